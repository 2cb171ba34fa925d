"""Find the values that may stay in memory, and edit models as a choice of them does.

Keepables are units' parameters, and groups of activations. A group is one sort of node in one
stretch of forward: matrix products, attention, collectives on activations, or other nodes, which
are cheap. The last stretch has two groups of cheap nodes: those before its first product, such as a
norm, and the loss. A stretch begins where the parameters of a unit are read and ends where the next
unit's are read. A unit that is read in two places, such as a root with embedding and head, has two
stretches. Values that a stretch hands to the next one are always saved, so that backward recomputes
one stretch at a time; a norm that is a unit of its own need not be saved::

    block 3   x -> norm -> mm -> silu -> mm -> add -> y       y, and x before it, are saved;
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^             the rest is in groups

Nodes that the user marked (``torch.utils.checkpoint``), that may not run twice
(:func:`.may_run_twice`), or make sizes that depend on data, are not in any group.

Of a part, each rank keeps the values that backward gathers in a smaller group
(:mod:`.passes.reshard_to`)::

    whole again   w -> pack -> gather(all) -> wait -> copies           holds nothing
    in part       part -> pack -> gather(smaller) -> wait -> copies    holds the part

Parked activations are copied to host memory and back::

    forward    x = relu(y)   TO HOST(x)   z = mm(x, w)   ...   wait           x is freed
    backward   FROM HOST(x)  ...   wait   threshold_backward(g, x)            x is allocated again

The copies are nodes on two streams, and schedules place them: to host memory as soon as the value
is there, back as gathers are prefetched. torch's partitioner makes the same nodes
(:mod:`.passes.park`).
"""

from __future__ import annotations

import operator
import posixpath
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch.fx as fx

from ..._torch import aot as _aot
from ...fsdp.tagging import read_in_forward
from ...fsdp.units import Units
from ...graph.dependencies import is_known, may_run_twice
from ...graph.layout import gather_packing
from ...graph.liveness import Storages
from ...graph.nodes import (
    FROM_HOST,
    TO_HOST,
    is_collective,
    is_compute,
    is_view,
    is_wait,
    tag_of,
    tensors_in,
)
from ...graph.operators import CASTS
from ...passes.reshard_to import Smaller
from ..cost.cost import Costs
from ..schedule.model import Model, ModelEdit, Row


@dataclass(frozen=True)
class Keepable:
    """A unit's parameters, or a part, or a group of activations: kept or recomputed together."""

    name: str  # name for reports
    starts: tuple[fx.Node, ...]  # all-gathers in the joint graph; empty for activations
    # Nodes from the parameters to the last view or copy of the gathered values; or the activations.
    chains: tuple[fx.Node, ...]
    # Parameters that backward reads; empty if keeping this saves nothing.
    fqns: tuple[str, ...] = ()
    nbytes: int = 0
    held: tuple[int, ...] = ()  # storages held, of ``nbytes``, if this is kept
    whole: int = -1  # for a part, the index of the keepable with the whole parameters; else -1


def unit_name(fqns: Sequence[str]) -> str:
    """Return a unit's name for reports: the common prefix of its FQNs, or the first modules."""
    name = posixpath.commonpath([f.replace(".", "/") for f in fqns] or [""]).replace("/", ".")
    if name:
        return name
    modules = list(dict.fromkeys(f.split(".")[0] for f in fqns))
    named = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    return named or "the root"


def keepable_units(chains: Mapping[fx.Node, Sequence[fx.Node]], units: Units) -> list[Keepable]:
    """List the units whose parameters forward reads."""
    starts: dict[int, list[fx.Node]] = {}
    for start in read_in_forward(chains):
        tag = tag_of(start)
        number = units.unit_of(*(() if tag is None else tag.fqns))
        if number is not None:
            starts.setdefault(number, []).append(start)
    return [
        Keepable(
            unit_name(units.units[number]),
            tuple(unit_starts),
            tuple(dict.fromkeys(n for start in unit_starts for n in chains[start])),
        )
        for number, unit_starts in sorted(starts.items())
    ]


class Stretch(NamedTuple):
    """The ``nth`` part of forward, from 1, that reads the parameters of one unit."""

    number: int
    unit: str
    nth: int

    @property
    def name(self) -> str:
        return self.unit if self.nth == 1 else f"{self.unit} ({self.nth})"


class Activations:
    """The activations of a joint graph.

    ``unit_of`` names the unit of an all-gather; ``moves`` are nodes between parameters and their
    uses, which are not activations.

    Attributes:
        groups: nodes by stretch and sort, in graph order.
        derived: nodes that are never saved: views; constants that only one stretch reads; and with
            ``fuses`` casts to larger dtypes of values that are saved with them, which kernels read.
        saved: nodes that stretches hand on, and nodes that must not run twice.
        unknown: operators among the latter whose tags do not show their effects, with their calls.
    """

    def __init__(
        self,
        graph: fx.Graph,
        unit_of: Callable[[fx.Node], str | None],
        moves: Collection[fx.Node],
        fuses: bool = False,
    ) -> None:
        self.groups: dict[tuple[Stretch, str], list[fx.Node]] = {}
        self.derived: dict[fx.Node, None] = {}
        self.saved: dict[fx.Node, None] = {}
        self.unknown: Counter[str] = Counter()
        inside = _aot.Halves(graph).forward
        self._nodes = [n for n in inside if n.op == "call_function" and n not in moves]
        self._inside = inside
        self._outputs = {a for n in graph.find_nodes(op="output") for a in n.all_input_nodes}
        self._moves, self._fuses = moves, fuses
        self._stretch: dict[fx.Node, Stretch] = {}
        self._units: dict[fx.Node, str] = {}  # units of nodes that depend on parameters only
        self._find_stretches(unit_of)
        self._move_to_readers()
        # Stretches that are more than a norm. A norm is made again from its inputs.
        self._long = {
            self._stretch[n]
            for n in self._nodes
            if n in self._stretch and (not _is_cheap(n) or self._reads_matrix(n))
        }
        self._last = max(self._stretch.values(), default=None)
        products = (n for n in self._nodes if _sort_of(n) == "products")
        in_last = (n for n in products if self._stretch.get(n) == self._last)
        self._first_product = next(in_last, None)
        early = self._first_product is not None
        for node in self._nodes:
            early = early and node is not self._first_product
            self._sort(node, early)

    def stretch_of(self, node: fx.Node) -> str | None:
        """Return the name of a node's stretch; None: it is not an activation."""
        return self._stretch[node].name if node in self._stretch else None

    def _find_stretches(self, unit_of: Callable[[fx.Node], str | None]) -> None:
        """Assign nodes to stretches."""
        # A node is in the latest stretch that it reads from. If it reads parameters of another
        # unit, it is in that unit's latest stretch if that comes later, and otherwise begins one.
        stretch, units = self._stretch, self._units
        latest: dict[str, Stretch] = {}
        for node in self._inside:
            args = [a for a in node.all_input_nodes if a.op != "get_attr"]
            unit = unit_of(node) or next((units[a] for a in args if a in units), None)
            before = max((stretch[a] for a in args if a in stretch), default=None)
            if unit is None or (before is not None and before.unit == unit):
                if before is not None:
                    stretch[node] = before
            elif before is None and (node in self._moves or all(a in units for a in args)):
                units[node] = unit
            else:
                last = latest.get(unit)
                if last is None or (before is not None and last < before):
                    number = 1 + max((s.number for s in latest.values()), default=-1)
                    last = latest[unit] = Stretch(number, unit, 1 + (last.nth if last else 0))
                stretch[node] = last
        # A node that reads no activation, such as a mask or a sum of weights, belongs where it is
        # read first.
        for node in reversed(self._nodes):
            readers = [stretch[u] for u in node.users if u in stretch]
            if readers and node not in stretch:
                stretch[node] = min(readers)

    def _later(self, node: fx.Node) -> bool:
        """Return whether a later stretch reads the node, or it is an output."""
        stretch = self._stretch[node]
        users = (self._stretch.get(u) for u in node.users if u in self._inside)
        return node in self._outputs or any(u is not None and u > stretch for u in users)

    def _reads_matrix(self, node: fx.Node) -> bool:
        """Return whether a node reads a parameter that is not a vector, as an embedding does."""
        read = (a for a in node.all_input_nodes if a in self._units)
        return any(v.dim() > 1 for a in read for v in tensors_in(a.meta.get("val")))

    def _move_to_readers(self) -> None:
        """Move cheap nodes that only a later stretch reads into that stretch.

        Such as a norm up to its weight, which is made again from what crosses the border already::

            before    block 0: add -> pow -> mean -> rsqrt |  block 1: mul(weight) -> mm
            after     block 0: add |  block 1: pow -> mean -> rsqrt -> mul(weight) -> mm

        Nodes that only backward reads go to the latest stretch that they read from.
        """
        stretch, inside = self._stretch, self._inside
        first_reader: dict[fx.Node, Stretch] = {}  # of nodes without one in their own
        unread: set[fx.Node] = set()  # nodes that only backward reads
        for node in reversed(self._nodes):
            users = [u for u in node.users if u in inside and u not in unread]
            if not users and node not in self._outputs:
                unread.add(node)
            elif users and node not in self._outputs and node in stretch and _is_cheap(node):
                later = min(first_reader.get(u) or stretch.get(u, stretch[node]) for u in users)
                if later > stretch[node]:
                    first_reader[node] = later
        # Values that a later stretch reads, with those that move.
        crossing = {n for n in self._nodes if n in stretch and self._later(n)}
        for node in self._nodes:
            inputs = [a for a in node.all_input_nodes if a in stretch]
            reads_weight = any(a in self._units for a in node.all_input_nodes)
            if node in first_reader and not reads_weight and all(a in crossing for a in inputs):
                crossing.add(node)
                stretch[node] = first_reader[node]
            elif node in unread and inputs:
                stretch[node] = max(stretch[a] for a in inputs)

    def _sort(self, node: fx.Node, early: bool) -> None:
        stretch = self._stretch.get(node)
        # The partitioner can't save a result without tensors.
        if stretch is None or "recompute" in node.meta or not tensors_in(node.meta.get("val")):
            return
        whole = _whole(node)
        if not is_known(node):
            self.unknown[str(node.target)] += 1
        handed_on = node in self._outputs or (stretch in self._long and self._later(node))
        once = node.meta.get("unbacked_bindings") or not may_run_twice(node)
        # A group that is kept doesn't keep the constants in it: each is a buffer then, and a kernel
        # that reads many buffers writes its values.
        constant = not node.all_input_nodes
        if handed_on or once or whole in self.saved:
            self.saved[node] = None
        elif constant or (is_view(node) and not is_wait(node) and whole is node):
            self.derived[node] = None
        else:  # a ``getitem`` is in the group of the node with several results
            sort = _sort_of(whole)
            # The loss must be saved for a low peak, and a norm before the logits need not be.
            if early and stretch == self._last and sort == "cheap":
                sort = "early cheap"
            group = self.groups.setdefault((stretch, sort), [])
            if self._fuses and self._is_wider(node, group):
                self.derived[node] = None
            else:
                group.append(node)

    def _is_wider(self, node: fx.Node, group: Collection[fx.Node]) -> bool:
        """Return whether a node casts a value that is saved with it to a larger dtype."""
        if node.target not in CASTS:
            return False
        source = node.all_input_nodes[0]
        while source in self.derived and source.all_input_nodes:  # a constant has none
            source = source.all_input_nodes[0]
        if source not in self.saved and source not in group:
            return False
        return bool(source.meta["val"].dtype.itemsize < node.meta["val"].dtype.itemsize)


def _whole(node: fx.Node) -> fx.Node:
    """Return the node whose results ``node`` is one of, or the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_cheap(node: fx.Node) -> bool:
    return _sort_of(node) == "cheap"


def _sort_of(node: Any) -> str:
    if is_collective(node) or is_wait(node):
        return "communication"
    if any(part in str(node.target) for part in ("attention", "varlen_attn")):
        return "attention"
    return "products" if is_compute(node) else "cheap"


@dataclass(frozen=True)
class PartChanges:
    """The changes in both halves if a part is kept."""

    # By held storage, the place in forward of the wait after which it is allocated.
    made: dict[int, int] = field(default_factory=dict)
    # By held storage, the last place in backward that reads it.
    read: dict[int, int] = field(default_factory=dict)
    # By place in forward, milliseconds of the copies made there.
    copy_ms: dict[int, float] = field(default_factory=dict)
    # By place in backward, the changed fields of its `Row`.
    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    # By place of a pack in backward, additional bytes that it allocates.
    more: dict[int, int] = field(default_factory=dict)


def with_parts(
    forward: Model, backward: Model, keepables: Sequence[Keepable], costs: Costs, smaller: Smaller
) -> tuple[tuple[Model, Model], list[Keepable], dict[int, PartChanges]]:
    """Make a part of each unit with buckets that can be gathered in ``smaller``.

    Returns models of both halves with the parts' storages; the parts, to be appended to
    ``keepables``; and their changes by their future indices.
    """
    live, nodes = backward.liveness, backward.dependencies.nodes
    owner = {n: k for k, one in enumerate(keepables) if one.held for n in one.starts}
    # By member, the wait in forward after which a part can be cut.
    wait_in_forward: dict[fx.Node, int] = {}
    for i, start in enumerate(forward.start_of):
        if start >= 0:
            first = forward.dependencies.nodes[start]
            wait_in_forward.update(dict.fromkeys(forward.members.get(start, (first,)), i))
    wait_of = {start: i for i, start in enumerate(backward.start_of)}
    # One numbering of storages for both halves: a part is made in forward and read in backward.
    size = [*live.size, *[0] * max(0, len(forward.liveness.size) - len(live.size))]

    def storage(nbytes: int) -> int:
        size.append(nbytes)
        return len(size) - 1

    # The buckets of backward, by keepable, whose members all fit the smaller group.
    fitting: dict[int, list[tuple[int, tuple[fx.Node, ...]]]] = {}
    for place, node in enumerate(nodes):
        members = backward.members.get(place, (node,))
        fits = all(m in wait_in_forward and m in smaller.starts for m in members)
        if node in owner and backward.group[place] is not None and fits:
            fitting.setdefault(owner[node], []).append((place, members))
    made_parts, parts = list[Keepable](), dict[int, PartChanges]()
    for k, buckets in sorted(fitting.items()):
        part, held = PartChanges(), list[int]()
        for place, members in buckets:
            # A merged bucket's pack has the node of its first member; a single gather has none.
            packs = [j for j in backward.dependencies.needs[place] if nodes[j] is members[0]]
            part_storages = []
            for member in members:
                nbytes = costs.result_bytes(member) // smaller.ranks
                part_storages.append(s := storage(nbytes))
                part.made[s] = wait_in_forward[member]
                part.read[s] = packs[0] if packs else wait_of[place]
                copy_ms = part.copy_ms.get(wait_in_forward[member], 0.0)
                part.copy_ms[wait_in_forward[member]] = copy_ms + costs.copy(nbytes)
            part_bytes = sum(size[s] for s in part_storages)
            moved = part_bytes * (1 + smaller.ranks)  # input and output of the gather
            ms = costs.as_kind("all_gather", members[0], moved, smaller.group)
            part.changes[place] = {"ms": ms, "group": smaller.group}
            if packs:  # the pack concatenates parts instead of shards
                buffer, before = live.allocates[packs[0]]
                part.more[packs[0]] = part_bytes - size[before]
                new = buffer, storage(part_bytes)
                ms, _ = costs.packing(gather_packing(part_bytes, part_bytes))
                row = {"ms": ms, "allocates": new, "touches": (*new, *part_storages)}
                part.changes[packs[0]] = row
            else:  # the gather itself reads the part, until its wait
                both = {"touches": (*live.allocates[place], *part_storages)}
                part.changes[place].update(both)
                part.changes[wait_of[place]] = both
            held += part_storages
        whole = keepables[k]
        starts = tuple(m for _, members in buckets for m in members)
        fqns = tuple(f for n in starts if (tag := tag_of(n)) is not None for f in tag.fqns)
        name = f"{whole.name} over {smaller.ranks} ranks"
        nbytes = sum(size[s] for s in held)
        parts[len(keepables) + len(parts)] = part
        made_parts.append(Keepable(name, starts, (), fqns, nbytes, tuple(held), k))
    groups = [*filter(None, backward.group), smaller.group]
    backward = replace(
        backward,
        liveness=Storages(size, live.allocates, live.touches, live.kept, live.at_start),
        shared=costs.shared_levels(groups),
    )
    first = forward.liveness
    size = [*first.size, *size[len(first.size) :]]
    stays = Storages(size, first.allocates, first.touches, first.kept, first.at_start)
    return (replace(forward, liveness=stays), backward), made_parts, parts


def with_copies(
    forward: Model, backward: Model, parked: Mapping[int, fx.Node], costs: Costs
) -> tuple[Model, Model]:
    """Add the copies to and from the host to both models; ``parked``: nodes by their storages."""
    return _to_host(forward, parked, costs), _from_host(backward, parked, costs)


def _to_host(model: Model, parked: Mapping[int, fx.Node], costs: Costs) -> Model:
    """Add a copy to host memory after each parked value, and its wait after the last use."""
    live, edit = model.liveness, ModelEdit(model)
    last = {s: i for i, touched in enumerate(live.touches) for s in parked.keys() & touched}
    start: dict[int, int] = {}
    for i, (new, touched) in enumerate(zip(live.allocates, live.touches, strict=True)):
        place = edit.keep(i)
        for s in (s for s in new if s in parked):
            ms = costs.host_copy(live.size[s])
            start[s] = edit.add(Row(parked[s], (place,), (), (s,), ms, TO_HOST))
        for s in (s for s in touched if last.get(s) == i):
            edit.add(_wait(parked[s], s, start[s]))
    edit.kept = {s: None for s in live.kept if s not in parked}
    return edit.model()


def _from_host(model: Model, parked: Mapping[int, fx.Node], costs: Costs) -> Model:
    """Add a copy from host memory before the first use of each parked value."""
    live, edit = model.liveness, ModelEdit(model)
    copies: dict[int, int] = {}
    for i, touched in enumerate(live.touches):
        parked_inputs = [s for s in touched if s in parked]
        for s in (s for s in parked_inputs if s not in copies):
            ms = costs.host_copy(live.size[s])
            start = edit.add(Row(parked[s], (), (s,), (s,), ms, FROM_HOST))
            copies[s] = edit.add(_wait(parked[s], s, start))
        edit.keep(i, needs=[*edit.row(i).needs, *(copies[s] for s in parked_inputs)])
    edit.at_start -= sum(live.size[s] for s in parked)
    return edit.model()


def _wait(node: fx.Node, s: int, start: int) -> Row:
    return Row(node, (start,), (), (s,), start_of=start, view=True)
