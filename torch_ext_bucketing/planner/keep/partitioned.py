"""Forward and backward of a joint graph as two models, before the graph is partitioned.

The pass that decides what stays gathered sees the joint graph, and what it decides is carried out
by the partitioner. So here the default partitioner's work is done on the joint graph's model: nodes
up to the last one of forward are forward's, the others backward's; what backward reads of forward
is saved, but for what is marked to be computed again, which is put right before its first use
there::

    joint      w -> gather -> wait -> t -> mm    |    t_1 = t(t)  mm_1(tangent, t_1)  scatter ...
    forward    w -> gather -> wait -> t -> mm                                saved: w, activations
    backward   w -> gather -> wait -> t -> t_1   mm_1(tangent, t_1)  scatter ...

A unit that is kept has its gathers left out of backward, and so is what only they read. What
backward reads of them is live from forward to its last use in backward. Groups of activations
(:mod:`.activations`) are units, too: kept, or else computed again. Without them activations are
taken to be saved, of which Inductor's partitioner decides by itself to compute some again.

Parameters can also be kept in part: as much as backward needs to gather them in a smaller group
(:mod:`.rewrites.reshard_to`). That is a unit as well, a *part* of the one that keeps them whole::

    whole again   w -> pack -> gather(all) -> wait -> copies        nothing is held
    in part       part -> pack -> gather(smaller) -> wait -> copies    the part is held
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx as fx

from ..._torch import aot as _aot
from ...bucketing.plan import BucketPlanner, checked_plan
from ...bucketing.units import ByUnit, unit_of
from ...fsdp.chains import parameter_chains, read_in_forward
from ...fsdp.units import Units
from ...graph.analysis import GraphAnalysis
from ...graph.collectives import is_collective, is_number, is_wait
from ...graph.liveness import Storages
from ...graph.tags import tag_of
from ...rewrites.reshard_to import Smaller
from ..cost.cost import Costs
from ..schedule.model import Model, Row, model_of
from ..search.merged_model import merged_model
from .activations import Activations


@dataclass(frozen=True)
class Unit:
    """Parameters that are kept or gathered again together, or activations that are kept or computed
    again.

    Args:
        name: of the unit, in few words.
        starts: their gathers in the joint graph; empty: these are activations.
        chains: the nodes from the parameters to the last mere rearrangement of what is gathered;
            or the activations.
        fqns: the parameters that backward reads; empty: keeping it would serve nothing.
        nbytes: bytes that are held if it is kept.
        held: the storages that these are.
        whole: of a part: the place of the unit that keeps these parameters whole; else -1.
    """

    name: str
    starts: tuple[fx.Node, ...]
    chains: tuple[fx.Node, ...]
    fqns: tuple[str, ...] = ()
    nbytes: int = 0
    held: tuple[int, ...] = ()
    whole: int = -1


@dataclass(frozen=True)
class Part:
    """What keeping a part changes.

    Args:
        made: by storage that is held, the place in forward of the wait behind which it is there.
        read: the last place in backward that reads it.
        copy_ms: by place in forward, how long making what is there with it takes.
        changes: by place in backward, fields of its row that are others.
        more: by place of a pack, how many bytes more are packed.
    """

    made: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)
    copy_ms: dict[int, float] = field(default_factory=dict)
    changes: dict[int, dict[str, Any]] = field(default_factory=dict)
    more: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Stay:
    """What a choice of kept units leaves in backward.

    Args:
        places: by place in backward, whether the node is there.
        held: the storages that are saved because of the choice.
        dropped: those that nothing kept would save, and that nothing reads now.
        parts: of units that are not kept whole.
    """

    places: bytearray
    held: tuple[int, ...]
    dropped: tuple[int, ...]
    parts: tuple[Part, ...] = ()

    def changes(self) -> dict[int, dict[str, Any]]:
        """By place in backward, fields of its row that the parts make others."""
        return {i: row for part in self.parts for i, row in part.changes.items()}


def unit_name(fqns: Sequence[str]) -> str:
    """A unit in a few words: what its names have in common, else the first of them."""
    name = posixpath.commonpath([f.replace(".", "/") for f in fqns] or [""]).replace("/", ".")
    if name:
        return name
    modules = list(dict.fromkeys(f.split(".")[0] for f in fqns))
    named = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    return named or "the root"


class PartitionedModel:
    """A joint graph as a model of forward and one of backward, for any choice of kept units.

    Args:
        graph: a tagged joint graph. It is only read.
        costs: milliseconds per node, and numbers for sizes that depend on data.
        units: which parameters are kept or not together. Without a unit a parameter is gathered
            again, as is what forward does not read of one.
        planner: plans the buckets of both halves; None: :class:`.ByUnit` of ``units``.
        rank_order: see :func:`.merged_model`.
        activations: whether activations are units, too.
        smaller: a group that backward may gather in, of parts that are kept.

    Attributes:
        units: in the order of their numbers, those of parameters first, their parts last.
        parts: by place of the unit, what keeping it changes.
        activations: the groups, and what is saved beside them; None: they are no units.
        forward: the model of forward, nothing kept.
        backward: of backward, with everything gathered and computed again.

    Raises:
        ValueError: the graph is not in topological order.
    """

    def __init__(
        self,
        graph: fx.Graph,
        costs: Costs,
        units: Units,
        planner: BucketPlanner | None = None,
        rank_order: bool = False,
        activations: bool = False,
        smaller: Smaller | None = None,
    ) -> None:
        analysis = GraphAnalysis(graph, costs.hints, donated=lambda node: False)
        joint = model_of(analysis, costs)
        chains = parameter_chains(graph)
        found_units = _units(chains, units)
        again = {n for chain in chains.values() for n in chain}
        self.activations: Activations | None = None
        if activations:
            names = {n: unit.name for unit in found_units for n in unit.starts}
            found = Activations(graph, names.get, again)
            found_units += [
                Unit(f"{stretch.name} {sort}", (), tuple(nodes))
                for (stretch, sort), nodes in found.groups.items()
            ]
            again.update(n for nodes in found.groups.values() for n in nodes)
            again.update(found.views)
            self.activations = found
        split = _Split(graph, joint, again)
        both = split.forward_model(), split.backward_model()
        planner = planner or ByUnit(units)
        self.forward, backward = (_merged(m, planner, costs, rank_order) for m in both)
        self.backward = backward
        self._owners: dict[fx.Node, set[int]] = {}
        for k, unit in enumerate(found_units):
            for node in unit.chains:
                self._owners.setdefault(node, set()).add(k)
        self._in_backward = {
            *backward.dependencies.nodes,
            *(m for members in backward.members.values() for m in members),
        }
        live, needed_by = backward.liveness, backward.dependencies.needed_by
        self._again = [  # places, what reads them, and the units that make them, the last first
            (i, [j for j in needed_by[i] if not backward.only_ordered(i, j)], self._owners.get(n))
            for i, n in reversed(list(enumerate(backward.dependencies.nodes)))
            if n in again
        ]
        self.touched_by: list[list[int]] = [[] for _ in live.size]
        for i, storages in enumerate(live.touches):
            for s in storages:
                self.touched_by[s].append(i)
        self._saved = [s for s in split.handed if self.touched_by[s]]
        self._stay: dict[frozenset[int], Stay] = {}
        self.units = found_units
        held = zip(found_units, self._held(), strict=True)
        self.units = [self._with_bytes(unit, mine) for unit, mine in held]
        self.parts: dict[int, Part] = {}
        if smaller is not None:
            self._add_parts(smaller, costs)

    def _add_parts(self, smaller: Smaller, costs: Costs) -> None:
        """Let each unit have a part, of its buckets that can be gathered in ``smaller``."""
        forward, backward = self.forward, self.backward
        live, nodes = backward.liveness, backward.dependencies.nodes
        owner = {n: k for k, unit in enumerate(self.units) if unit.held for n in unit.starts}
        made: dict[fx.Node, int] = {}
        for i, start in enumerate(forward.start_of):
            if start >= 0:
                first = forward.dependencies.nodes[start]
                made.update(dict.fromkeys(forward.members.get(start, (first,)), i))
        wait_of = {start: i for i, start in enumerate(backward.start_of)}
        size = [*live.size, *[0] * max(0, len(forward.liveness.size) - len(live.size))]

        def storage(nbytes: int) -> int:
            size.append(nbytes)
            return len(size) - 1

        found: dict[int, list[tuple[int, tuple[fx.Node, ...]]]] = {}
        for place, node in enumerate(nodes):
            members = backward.members.get(place, (node,))
            fits = all(m in made and m in smaller.starts for m in members)
            if node in owner and backward.group[place] is not None and fits:
                found.setdefault(owner[node], []).append((place, members))
        for k, buckets in sorted(found.items()):
            part, held = Part(), list[int]()
            for place, members in buckets:
                packs = [j for j in backward.dependencies.needs[place] if nodes[j] is members[0]]
                mine = []
                for member in members:
                    nbytes = costs.result_bytes(member) // smaller.ranks
                    mine.append(s := storage(nbytes))
                    part.made[s] = made[member]
                    part.read[s] = packs[0] if packs else wait_of[place]
                    copy_ms = part.copy_ms.get(made[member], 0.0)
                    part.copy_ms[made[member]] = copy_ms + costs.copy(nbytes)
                given = sum(size[s] for s in mine)
                moved = given * (1 + smaller.ranks)
                ms = costs.as_kind("all_gather", members[0], moved, smaller.group)
                part.changes[place] = {"ms": ms, "group": smaller.group}
                if packs:
                    buffer, before = live.allocates[packs[0]]
                    part.more[packs[0]] = given - size[before]
                    new = buffer, storage(given)
                    ms = costs.pack(given, given)
                    row = {"ms": ms, "allocates": new, "touches": (*new, *mine)}
                    part.changes[packs[0]] = row
                else:
                    both = {"touches": (*live.allocates[place], *mine)}
                    part.changes[place].update(both)
                    part.changes[wait_of[place]] = both
                held += mine
            unit = self.units[k]
            starts = tuple(m for _, members in buckets for m in members)
            fqns = tuple(f for n in starts if (tag := tag_of(n)) is not None for f in tag.fqns)
            name = f"{unit.name} over {smaller.ranks} ranks"
            nbytes = sum(size[s] for s in held)
            self.parts[len(self.units)] = part
            self.units.append(Unit(name, starts, (), fqns, nbytes, tuple(held), k))
        groups = [*filter(None, backward.group), smaller.group]
        self.backward = replace(
            backward,
            liveness=Storages(size, live.allocates, live.touches, live.kept, live.at_start),
            shared=costs.shared_levels(groups),
        )
        first = forward.liveness
        size = [*first.size, *size[len(first.size) :]]
        stays = Storages(size, first.allocates, first.touches, first.kept, first.at_start)
        self.forward = replace(forward, liveness=stays)

    def _held(self) -> list[tuple[int, ...]]:
        """By unit, what its gathers make in backward and others read there."""
        live = self.backward.liveness
        made: dict[int, int] = {}
        read: dict[int, dict[int, None]] = {}
        alone = self.unit_of_place(self.backward)
        for i, unit in enumerate(alone):
            if unit is not None:
                made.update(dict.fromkeys(live.allocates[i], unit))
            for s in live.touches[i]:
                owner = made.get(s)
                if owner is not None and owner != unit:
                    read.setdefault(owner, {})[s] = None
        return [tuple(sorted(read.get(k, ()))) for k in range(len(self.units))]

    def _with_bytes(self, unit: Unit, held: tuple[int, ...]) -> Unit:
        size = self.backward.liveness.size
        fqns = {
            f: None
            for start in unit.starts
            if (tag := tag_of(start)) is not None and start in self._in_backward
            for f in tag.fqns
        }
        nbytes = sum(size[s] for s in held)
        return replace(unit, fqns=tuple(fqns), held=held, nbytes=nbytes) if nbytes else unit

    def unit_of_place(self, model: Model) -> list[int | None]:
        """For each node of :attr:`forward` or :attr:`backward` the unit that it alone serves."""
        owners = (self._owners.get(n) for n in model.dependencies.nodes)
        return [next(iter(o)) if o is not None and len(o) == 1 else None for o in owners]

    def distinct(self, kept: Collection[int]) -> frozenset[int]:
        """``kept`` without the parts of what is kept whole."""
        return frozenset(k for k in kept if self.units[k].whole not in kept)

    def stay(self, kept: Collection[int]) -> Stay:
        """What the units ``kept``, by their places in :attr:`units`, leave in backward."""
        gone = self.distinct(kept)
        found = self._stay.get(gone)
        if found is None:
            found = self._stay[gone] = self._what_stays(gone)
        return found

    def _what_stays(self, gone: frozenset[int]) -> Stay:
        live, touched_by = self.backward.liveness, self.touched_by
        there = bytearray(b"\1") * len(self.backward)
        removed = []
        parts = tuple(part for k, part in self.parts.items() if k in gone)
        others = [i for part in parts for i, row in part.changes.items() if "touches" in row]
        reads = bytearray(there)  # what is made of parameters
        for i in others:
            reads[i] = self.backward.start_of[i] >= 0  # a wait needs its start all the same
        for i, readers, owners in self._again:
            if (owners and owners <= gone) or not any(reads[j] for j in readers):
                there[i] = reads[i] = 0
                removed.append(i)
        for i in others:
            reads[i] = 0
        made = [s for i in reversed(removed) for s in live.allocates[i]]
        held = tuple(s for s in made if any(reads[j] for j in touched_by[s]))
        dropped = tuple(s for s in self._saved if not any(reads[j] for j in touched_by[s]))
        return Stay(there, (*held, *(s for part in parts for s in part.made)), dropped, parts)

    def models(self, kept: Collection[int]) -> tuple[Model, Model]:
        """Forward and backward with the units ``kept``, by their places in :attr:`units`."""
        forward, backward = self.forward, self.backward
        if not kept:
            return forward, backward
        stay = self.stay(kept)
        live = forward.liveness
        saved = {**live.kept, **dict.fromkeys(stay.held)}
        for s in stay.dropped:
            saved.pop(s, None)
        ms, allocates, touches = list(forward.ms), list(live.allocates), list(live.touches)
        for part in stay.parts:
            for s, i in part.made.items():
                allocates[i] += (s,)
                touches[i] += (s,)
            for i, copy_ms in part.copy_ms.items():
                ms[i] += copy_ms
        stays = Storages(live.size, allocates, touches, saved, live.at_start)
        return replace(forward, ms=ms, liveness=stays), self._without(kept, stay)

    def in_place(self, kept: Collection[int]) -> Model:
        """:attr:`backward` with the times of the units ``kept``; what they leave out is there."""
        ms, group = list(self.backward.ms), list(self.backward.group)
        for i, row in self.stay(kept).changes().items():
            ms[i], group[i] = row.get("ms", ms[i]), row.get("group", group[i])
        return replace(self.backward, ms=ms, group=group)

    def places_without(self, kept: Collection[int]) -> list[int]:
        """The places of :attr:`backward` that are there with the units ``kept``."""
        return list(itertools.compress(range(len(self.backward)), self.stay(kept).places))

    def _late(self, stay: Stay) -> list[int]:
        """The places that stay, what is made again right before its first use."""
        model, order = self.backward, list[int]()
        left = dict.fromkeys(i for i, _, _ in self._again if stay.places[i])
        needs = model.dependencies.needs
        for i in itertools.compress(range(len(model)), stay.places):
            if i in left:
                continue
            mine, stack = [i], [i]
            while stack:
                reader = stack.pop()
                for j in needs[reader]:
                    if j in left and not model.only_ordered(j, reader):
                        del left[j]
                        mine.append(j)
                        stack.append(j)
            order += sorted(mine)
        return order

    def _without(self, kept: Collection[int], stay: Stay) -> Model:
        """Backward without what makes the units ``kept``."""
        old, live = self.backward, self.backward.liveness
        places = self._late(stay)
        members = {at: old.members[i] for at, i in enumerate(places) if i in old.members}
        more = sum(live.size[s] for s in stay.held) - sum(live.size[s] for s in stay.dropped)
        changes = stay.changes()
        rows = [
            row._replace(**changes[i]) if i in changes else row
            for i, row in zip(places, _rows(old, places), strict=True)
        ]
        return old.rebuilt(rows, members, live.size, live.kept, live.at_start + more)


def _rows(model: Model, places: Sequence[int]) -> Iterator[Row]:
    """Some of the nodes of a model in a new order, with the dependencies among them."""
    at = [-1] * len(model)
    for new, i in enumerate(places):
        at[i] = new
        yield model.row(i, at)


class _Split:
    """Which node runs where."""

    def __init__(self, graph: fx.Graph, joint: Model, chains: Collection[fx.Node]) -> None:
        liveness = joint.liveness
        self._joint, self._live = joint, liveness
        nodes = joint.dependencies.nodes
        in_forward = _aot.forward_nodes(graph)
        again = {**_aot.recomputed_nodes(graph), **dict.fromkeys(chains)}
        place = {n: i for i, n in enumerate(nodes)}
        self._in_forward = [n in in_forward for n in nodes]
        self._backward: list[int] = []
        saved: dict[fx.Node, None] = {}
        done: set[fx.Node] = set()
        for i, node in enumerate(nodes):
            if self._in_forward[i]:
                continue
            late: dict[fx.Node, None] = {}
            stack = [node]
            while stack:
                reader = stack.pop()
                for arg in reader.all_input_nodes:
                    if arg not in in_forward or arg not in place or arg in done or arg in late:
                        continue
                    if arg in again:
                        late[arg] = None
                        stack.append(arg)
                    elif not is_number(reader):  # of which the size is read, and nothing else
                        saved[arg] = None
            done.update(late)
            self._backward += sorted(place[n] for n in late)
            self._backward.append(i)
        self._saved = self._storages(saved)
        placeholders = graph.find_nodes(op="placeholder")
        tangents = [n for n in placeholders if n not in in_forward]
        self._tangents = self._storages(tangents)
        constants = graph.find_nodes(op="get_attr")
        given = self._storages([n for n in placeholders if n in in_forward] + constants)
        outputs = [a for n in graph.find_nodes(op="output") for a in n.all_input_nodes]
        first = [a for a in outputs if a in in_forward]
        second = [a for a in outputs if a not in in_forward]
        self._kept_forward = {**given, **self._storages(first), **self._saved}
        self._kept_backward = {**given, **self._tangents, **self._storages(second)}
        self._given = given
        kept = {**given, **self._storages(first)}
        self.handed = [s for s in self._saved if s not in kept]
        """Storages that are there after forward for backward alone."""
        self._at_start = sum(liveness.size[s] for s in given)
        needed = {*saved, *first}
        for i in reversed(range(len(nodes))):
            node = nodes[i]
            if self._in_forward[i] and (node in needed or _has_effects(node)):
                needed.update((node, *node.all_input_nodes))
        self._forward = [i for i, n in enumerate(nodes) if self._in_forward[i] and n in needed]

    def _storages(self, nodes: Iterable[fx.Node]) -> dict[int, None]:
        return {s: None for n in nodes for s in self._live.of_node[n]}

    def forward_model(self) -> Model:
        return self._model(self._forward, self._given, self._kept_forward, self._at_start)

    def backward_model(self) -> Model:
        size = self._live.size
        handed = {s: None for s in (*self._saved, *self._tangents) if s not in self._given}
        at_start = self._at_start + sum(size[s] for s in handed)
        given = {**self._given, **handed}
        return self._model(self._backward, given, self._kept_backward, at_start)

    def _model(
        self, places: Sequence[int], given: Mapping[int, None], kept: dict[int, None], at_start: int
    ) -> Model:
        there, rows = dict(given), list[Row]()
        for row in _rows(self._joint, places):
            fresh = tuple(s for s in row.allocates if s not in there)
            there.update(dict.fromkeys(fresh))
            touched = tuple(s for s in row.touches if s in there)
            rows.append(row._replace(allocates=fresh, touches=touched))
        return self._joint.rebuilt(rows, {}, self._live.size, kept, at_start)


def _has_effects(node: fx.Node) -> bool:
    return not is_collective(node) and not is_wait(node) and node.is_impure()


def _units(chains: Mapping[fx.Node, Sequence[fx.Node]], units: Units) -> list[Unit]:
    starts: dict[int, list[fx.Node]] = {}
    for start in read_in_forward(chains):
        tag = tag_of(start)
        number, *_ = unit_of(() if tag is None else tag.fqns, units)
        if number is not None:
            starts.setdefault(number, []).append(start)
    return [
        Unit(
            unit_name(units.units[number]),
            tuple(mine),
            tuple(dict.fromkeys(n for start in mine for n in chains[start])),
        )
        for number, mine in sorted(starts.items())
    ]


def _merged(model: Model, planner: BucketPlanner, costs: Costs, rank_order: bool) -> Model:
    """The model of a half with the buckets that ``planner`` plans for the half's graph."""
    graph, joint = _graph_of(model)
    plan = checked_plan(planner, GraphAnalysis(graph, costs.hints))
    buckets = [replace(b, members=tuple(joint[m] for m in b.members)) for b in plan.buckets]
    found = merged_model(model, buckets, costs, rank_order) if buckets or rank_order else model
    return model if found is None else found


def _graph_of(model: Model) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph of a half, whose inputs are what it reads and does not compute, and the joint
    graph's node of each of its nodes."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()

    def now(node: fx.Node) -> fx.Node:
        if node not in new:
            new[node] = graph.placeholder(node.name)
            new[node].meta = node.meta
        return new[node]

    for node in model.dependencies.nodes:
        new[node] = graph.node_copy(node, now)
    graph.output(tuple(node for node in graph.nodes if not node.users))
    return graph, {copy: node for node, copy in new.items()}
