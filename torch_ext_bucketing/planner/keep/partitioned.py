"""Model forward and backward of a joint graph for any choice of keepables.

The choice is made on the joint graph, and the partitioner carries it out afterwards. So the joint
graph's model is split as the default partitioner splits the graph: nodes up to the last one of
forward are forward's, the others backward's. Backward's inputs from forward are saved, except nodes
marked to be recomputed, which are placed before their first use in backward::

    joint      w -> gather -> wait -> t -> mm    |    t_1 = t(t)  mm_1(tangent, t_1)  scatter ...
    forward    w -> gather -> wait -> t -> mm                                saved: w, activations
    backward   w -> gather -> wait -> t -> t_1   mm_1(tangent, t_1)  scatter ...

A :class:`Keepable` is the gathered parameters of a unit, a part of them, or a group of activations
(:mod:`.planner.keep.keepables`). Keeping
one removes from backward the nodes that recompute it, and nodes that only they read. Its storages
are live from forward to their last use in backward. Without ``activations=True`` all activations
are taken to be saved, although Inductor's partitioner recomputes some.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from ..._torch import aot as _aot
from ..._torch import paused_gc
from ...bucketing.contraction import BucketPlanner, checked_plan
from ...bucketing.plan import ByUnit
from ...fsdp.tagging import parameter_chains
from ...fsdp.units import Units
from ...graph.analysis import GraphAnalysis
from ...graph.fusion import Fused, fused
from ...graph.liveness import Storages, with_fused, with_packed, workspace_bytes
from ...graph.nodes import is_collective, is_number, is_view, is_wait, tag_of
from ...passes.park import could_park
from ...passes.reshard_to import Smaller
from ...reports.planner import BlockBytes
from ..cost.cost import Costs
from ..schedule.merged_model import merged_model
from ..schedule.model import Model, ModelEdit, model_of
from .keepables import Activations, Keepable, PartChanges, keepable_units, with_copies, with_parts


@dataclass(frozen=True)
class Stay:
    """Backward with a choice."""

    places: bytearray  # by place in backward, whether the node runs
    held: tuple[int, ...]  # storages that are saved because of the choice
    # Storages that are saved if nothing is kept, and that no remaining node reads.
    dropped: tuple[int, ...]
    removed: Sequence[int] = ()  # places in backward whose nodes do not run
    parts: tuple[PartChanges, ...] = ()  # changes by parts that are kept

    def changes(self) -> dict[int, dict[str, Any]]:
        """Return the changed fields of rows in backward, by place."""
        return {i: row for part in self.parts for i, row in part.changes.items()}


class PartitionedModel:
    """Models of forward and backward for any choice of keepables, given by their indices.

    Args:
        graph: a tagged joint graph.
        units: parameters that are kept together. Parameters without a unit, and values that forward
            does not read, are gathered again.
        planner: planner of both halves' buckets; None: :class:`.ByUnit` of ``units``.
        rank_order: see :func:`.merged_model`.
        activations: whether activations are keepable.
        smaller: a smaller group for parts; None: no parts.

    Attributes:
        seconds: time that making the models took.
        keepables: parameters by the index of their unit, then activations, then parts.
        parts: the changes by a kept part, by its index.
        activations: groups of activations, and nodes saved beside these; None: not keepable.
        sizes: bytes of each storage, also of those that no kernel writes with nothing kept.
        forward: model of forward, nothing kept; so is ``backward``.
        unwritten: storages that no kernel of :attr:`forward` writes.
    """

    @paused_gc()
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
        clock = time.perf_counter()
        # The host's time is the same, whatever is kept, but for recomputed nodes.
        costs = Costs(replace(costs.machine, host_ms={}), costs.hints)
        self.costs = costs
        workspaces = workspace_bytes(graph)
        analysis = GraphAnalysis(
            graph, costs.hints, donated=lambda node: False, external_live_bytes=workspaces
        )
        # Both halves take their rows from this model, so a kept value has one number in both.
        # Kernels don't reach over the halves, and are found in each.
        joint = model_of(analysis, costs, Fused())
        chains = parameter_chains(graph)
        keepables = keepable_units(chains, units)
        again = {n for chain in chains.values() for n in chain}
        self.activations: Activations | None = None
        if activations:
            names = {n: one.name for one in keepables for n in one.starts}
            chosen = Activations(graph, names.get, again, bool(costs.machine.fuses))
            keepables += [
                Keepable(f"{stretch.name} {sort}", (), tuple(nodes))
                for (stretch, sort), nodes in chosen.groups.items()
            ]
            again.update(n for nodes in chosen.groups.values() for n in nodes)
            again.update(chosen.derived)
            self.activations = chosen
        self._split = split = _Split(graph, joint, again, costs)
        both = split.forward_model(), split.backward_model()
        planner = planner or ByUnit(units)
        # Buckets are planned by nodes' arguments. After that the views can go.
        self.forward, backward = (_merged(m, planner, costs, rank_order).compact for m in both)
        self.backward = backward
        self._owners: dict[fx.Node, set[int]] = {}
        for k, one in enumerate(keepables):
            for node in one.chains:
                self._owners.setdefault(node, set()).add(k)
        self._in_backward = {
            *backward.dependencies.nodes,
            *(m for members in backward.members.values() for m in members),
        }
        live, needed_by = backward.liveness, backward.dependencies.needed_by
        # Recomputed places with their readers and their keepables, last one first.
        owners = self._owners_of_places(backward)
        self._again = [
            (i, [j for j in needed_by[i] if not backward.only_ordered(i, j)], owners[i])
            for i, n in reversed(list(enumerate(backward.dependencies.nodes)))
            if n in again
        ]
        self.touched_by: list[list[int]] = [[] for _ in live.size]
        for i, storages in enumerate(live.touches):
            for s in storages:
                self.touched_by[s].append(i)
        self._saved = [s for s in split.handed if self.touched_by[s]]
        made_in_forward = {s for new in self.forward.liveness.allocates for s in new}
        self._could_park: dict[int, fx.Node] = {}  # by storage, the node that makes it
        for node in could_park(graph) if activations else ():
            for s in joint.liveness.of_node[node]:
                if s in made_in_forward and joint.liveness.size[s]:
                    self._could_park.setdefault(s, node)
        self._stay: dict[frozenset[int], Stay] = {}
        self._last: tuple[Stay, list[int], Model] | None = None  # see _backward_of()
        self.keepables = keepables
        held = zip(keepables, self._held(), strict=True)
        self.keepables = [self._with_bytes(one, held_storages) for one, held_storages in held]
        self.parts: dict[int, PartChanges] = {}
        if smaller is not None:
            halves = self.forward, self.backward
            halves, more, self.parts = with_parts(*halves, self.keepables, costs, smaller)
            self.forward, self.backward = halves
            self.keepables += more
        self._halves = self.forward, self.backward
        self.sizes = self.forward.liveness.size
        self.unwritten = set[int]()
        if costs.machine.fuses:
            kept = [half.liveness.kept for half in self._halves]
            places = split.forward, split.backward
            self.forward, self.backward = map(split.fused, self._halves, kept, places)
            within = split.kernels(kept[0], tuple(split.forward))[0].within
            self.unwritten.update(s for n in within for s in joint.liveness.of_node[n])
        self.seconds = time.perf_counter() - clock

    def _held(self) -> list[tuple[int, ...]]:
        """Return, by keepable, the storages that its nodes allocate and others read in backward."""
        live = self.backward.liveness
        made_by: dict[int, int] = {}
        read: dict[int, dict[int, None]] = {}
        alone = self.keepable_of_place(self.backward)
        derived = () if self.activations is None else self.activations.derived
        for i, (node, owners) in enumerate(
            zip(self.backward.dependencies.nodes, alone, strict=True)
        ):
            if is_view(node) and node in derived:  # its readers touch the storage, too
                continue
            if owners is not None:
                made_by.update(dict.fromkeys(live.allocates[i], owners))
            for s in live.touches[i]:
                owner = made_by.get(s)
                if owner is not None and owner != owners:
                    read.setdefault(owner, {})[s] = None
        return [tuple(sorted(read.get(k, ()))) for k in range(len(self.keepables))]

    def _with_bytes(self, one: Keepable, held: tuple[int, ...]) -> Keepable:
        """Fill in the bytes that keeping a value holds, and the parameters that it serves."""
        size = self.backward.liveness.size
        fqns = {
            f: None
            for start in one.starts
            if (tag := tag_of(start)) is not None and start in self._in_backward
            for f in tag.fqns
        }
        nbytes = sum(size[s] for s in held)
        return replace(one, fqns=tuple(fqns), held=held, nbytes=nbytes) if nbytes else one

    def keepable_of_place(self, model: Model) -> list[int | None]:
        """Return, for each node of a half, the only keepable that it belongs to, if any."""
        owners = self._owners_of_places(model)
        return [next(iter(o)) if len(o) == 1 else None for o in owners]

    def _owners_of_places(self, model: Model) -> list[set[int]]:
        """Return, for each node of a half, the keepables without which it is there."""
        nodes = model.dependencies.nodes
        owners = [self._owners.get(n, set()) for n in nodes]
        for start, members in model.members.items():
            # A bucket stays as long as one member does, such as a plane that forward doesn't read:
            #     pack -> all_gather -> wait -> part of a kept plane
            #                                -> part of another
            if len({frozenset(self._owners.get(m, ())) for m in members}) > 1:
                for i, node in enumerate(nodes):
                    if node is nodes[start] or model.start_of[i] == start:
                        owners[i] = set()
        return owners

    def distinct(self, kept: Collection[int]) -> frozenset[int]:
        """Drop the parts of parameters that are kept whole."""
        gone = (k for k in self.parts if self.keepables[k].whole in kept)
        return frozenset(kept).difference(gone)

    def stay(self, kept: Collection[int]) -> Stay:
        """Return the nodes and storages that a choice leaves in backward."""
        gone = self.distinct(kept)
        stay = self._stay.get(gone)
        if stay is None:
            stay = self._stay[gone] = self._what_stays(gone)
        return stay

    def _what_stays(self, gone: frozenset[int]) -> Stay:
        live, touched_by = self._halves[1].liveness, self.touched_by
        runs = bytearray(b"\1") * len(self.backward)
        removed = list[int]()
        parts = tuple(part for k, part in self.parts.items() if k in gone)
        others = [i for part in parts for i, row in part.changes.items() if "touches" in row]
        # A bucket of a part reads the part instead of its inputs. Its wait still needs its start.
        reads = bytearray(runs)
        for i in others:
            reads[i] = self.backward.start_of[i] >= 0
        for i, readers, owners in self._again:
            if (owners and owners <= gone) or not any(map(reads.__getitem__, readers)):
                runs[i] = reads[i] = 0
                removed.append(i)
        for i in others:
            reads[i] = 0
        removed.reverse()
        allocated = [s for i in removed for s in live.allocates[i]]
        read = {s for s in (*allocated, *self._saved) if any(map(reads.__getitem__, touched_by[s]))}
        held = tuple(s for s in allocated if s in read)
        dropped = tuple(s for s in self._saved if s not in read)
        held += tuple(s for part in parts for s in part.made)
        return Stay(runs, held, dropped, removed, parts)

    def saved(self, kept: Collection[int]) -> frozenset[int]:
        """Return the storages that forward leaves for backward with a choice."""
        stay = self.stay(kept)
        return frozenset({*self._saved, *stay.held}.difference(stay.dropped))

    def could_park(self, kept: Collection[int]) -> dict[int, fx.Node]:
        """Map the saved storages that can be parked to the nodes that make them, in their order."""
        saved = self.saved(kept)
        return {s: node for s, node in self._could_park.items() if s in saved}

    def _made_in(self) -> dict[int, str]:
        """Map storages to the names of the stretches of forward that make them."""
        if self.activations is None:
            return {}
        allocations = zip(
            self.forward.dependencies.nodes, self.forward.liveness.allocates, strict=True
        )
        named = ((self.activations.stretch_of(node), new) for node, new in allocations)
        return {s: name for name, new in named if name is not None for s in new}

    def blocks(
        self, kept: Collection[int], parked: Collection[int], most: Collection[int]
    ) -> tuple[BlockBytes, ...]:
        """Return the bytes by stretch of forward that are saved, parked, or saved by ``most``."""
        saved, saved_by_most = self.saved(kept), self.saved(most)
        by_block: dict[str, list[int]] = {}
        for s, name in self._made_in().items():
            if s in saved or s in saved_by_most:
                where = 2 if s not in saved else int(s in parked)
                by_block.setdefault(name, [0, 0, 0])[where] += self.sizes[s]
        return tuple(BlockBytes(name, *block_bytes) for name, block_bytes in by_block.items())

    def with_parked(self, kept: Collection[int], parked: Collection[int]) -> tuple[Model, Model]:
        """Return :meth:`models` of a choice with some storages of :meth:`could_park` parked."""
        nodes = {s: self._could_park[s] for s in sorted(parked)}
        forward, backward = self.models(kept)
        return with_copies(forward, backward, nodes, self.costs) if nodes else (forward, backward)

    def models(self, kept: Collection[int]) -> tuple[Model, Model]:
        """Return the models of forward and backward for a choice."""
        return self.half(0, kept), self.half(1, kept)

    def half(self, number: int, kept: Collection[int]) -> Model:
        """Return forward's model for a choice, or with ``number`` 1 backward's."""
        if not kept:
            return (self.forward, self.backward)[number]
        model = self._half_of(number, kept)
        if not self.costs.machine.fuses:
            return model
        # A kernel ends where its half does, so a kept value is written in forward.
        return self._split.fused(model, model.liveness.kept, self._places_of(number, kept))

    def _places_of(self, number: int, kept: Collection[int]) -> list[int]:
        """Return the places of a half's nodes in the joint graph, without merged buckets."""
        if not number:
            return self._split.forward
        nodes = self._halves[1].dependencies.nodes
        return self._split.backward_without({nodes[i] for i in self.stay(kept).removed})[0]

    def _half_of(self, number: int, kept: Collection[int]) -> Model:
        """Return a half for a choice, without fused kernels."""
        if not kept:
            return self._halves[number]
        return self._backward_of(kept)[1] if number else self._forward_with(self.stay(kept))

    def _forward_with(self, stay: Stay) -> Model:
        """Return forward with the storages that a choice saves."""
        forward = self._halves[0]
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
        return replace(forward, ms=ms, liveness=stays)

    def in_place(self, kept: Collection[int]) -> Model:
        """Return :attr:`backward` with a choice's times, and with the nodes that it removes."""
        ms, group = list(self.backward.ms), list(self.backward.group)
        for i, row in self.stay(kept).changes().items():
            ms[i], group[i] = row.get("ms", ms[i]), row.get("group", group[i])
        return replace(self.backward, ms=ms, group=group)

    def places_without(self, kept: Collection[int]) -> list[int]:
        """Return the places in :attr:`backward` that remain with a choice."""
        return list(itertools.compress(range(len(self.backward)), self.stay(kept).places))

    def least_ms(self, kept: Collection[int]) -> float:
        """Return the least milliseconds of backward with a choice, in any order.

        The nodes that remain are taken to be as long as with nothing kept: a kernel without a part
        that is kept reads as much as before, but for some hundredths of a percent.
        """
        places, model = self._backward_of(kept)
        ms = self.in_place(kept).ms
        return replace(model, ms=[ms[i] for i in places]).paths.bound_ms

    def _late(self, stay: Stay) -> list[int]:
        """Return the remaining places, with recomputed nodes moved to before their first use."""
        model, order = self.backward, list[int]()
        candidates = dict.fromkeys(i for i, _, _ in self._again if stay.places[i])
        needs = model.dependencies.needs
        for i in itertools.compress(range(len(model)), stay.places):
            if i in candidates:
                continue
            chain, stack = [i], [i]
            while stack:
                reader = stack.pop()
                for j in needs[reader]:
                    if j in candidates and not model.only_ordered(j, reader):
                        del candidates[j]
                        chain.append(j)
                        stack.append(j)
            order += sorted(chain)
        return order

    def _backward_of(self, kept: Collection[int]) -> tuple[list[int], Model]:
        """Return backward for a choice, without fused kernels, and its places in backward."""
        stay = self.stay(kept)
        # Most choices are given up for their least time, others are scheduled right after it.
        if self._last is None or self._last[0] is not stay:
            places = self._late(stay)
            self._last = stay, places, self._without(places, stay)
        return self._last[1:]

    def _without(self, places: Sequence[int], stay: Stay) -> Model:
        """Return a model of backward without the nodes that recompute a choice."""
        backward, changes = self._halves[1], stay.changes()
        size, edit = backward.liveness.size, _edit_of(backward, places)
        for i in places:
            edit.keep(i, **changes.get(i, {}))
        edit.at_start += sum(size[s] for s in stay.held) - sum(size[s] for s in stay.dropped)
        return edit.model()


def _edit_of(model: Model, places: Sequence[int]) -> ModelEdit:
    """Begin an edit that keeps some nodes in a new order, where a node may need a later one."""
    edit = ModelEdit(model)
    for new, i in enumerate(places):
        edit.new_place[i] = new
    return edit


class _Split:
    """Split a joint graph's nodes into forward and backward."""

    def __init__(
        self, graph: fx.Graph, joint: Model, chains: Collection[fx.Node], costs: Costs
    ) -> None:
        liveness = joint.liveness
        self._costs = costs
        self._found: dict[Any, tuple[Fused, dict[fx.Node, float]]] = {}
        self._joint, self._live = joint, liveness
        self.nodes = nodes = joint.dependencies.nodes
        halves = _aot.Halves(graph)
        in_forward = halves.forward
        self._again = {**halves.recomputed, **dict.fromkeys(chains)}
        self._place = {n: i for i, n in enumerate(nodes)}
        self._in_forward = [n in in_forward for n in nodes]
        self._forward_inputs = {
            n: [a for a in n.all_input_nodes if a in in_forward and a in self._place] for n in nodes
        }
        self.backward, saved = self.backward_without(())
        self._saved = self._storages(saved)
        placeholders = graph.find_nodes(op="placeholder")
        tangents = [n for n in placeholders if n not in in_forward]
        self._tangents = self._storages(tangents)
        constants = graph.find_nodes(op="get_attr")
        input_storages = self._storages([n for n in placeholders if n in in_forward] + constants)
        outputs = [a for n in graph.find_nodes(op="output") for a in n.all_input_nodes]
        first = [a for a in outputs if a in in_forward]
        second = [a for a in outputs if a not in in_forward]
        self._kept_forward = {**input_storages, **self._storages(first), **self._saved}
        self._kept_backward = {**input_storages, **self._tangents, **self._storages(second)}
        self._given = input_storages
        kept = {**input_storages, **self._storages(first)}
        # Storages that are live after forward only for backward.
        self.handed = [s for s in self._saved if s not in kept]
        self._at_start = joint.graph.external_live_bytes + sum(
            liveness.size[s] for s in input_storages
        )
        # Forward runs the nodes that saved or returned values need, and nodes with effects.
        needed = {*saved, *first}
        for i in reversed(range(len(nodes))):
            node = nodes[i]
            if self._in_forward[i] and (node in needed or _has_effects(node)):
                needed.update((node, *node.all_input_nodes))
        self.forward = [i for i, n in enumerate(nodes) if self._in_forward[i] and n in needed]

    def backward_without(self, gone: Collection[fx.Node]) -> tuple[list[int], dict[fx.Node, None]]:
        """Return the places of backward's nodes, and the values that they read of forward."""
        # Recomputed nodes, but those in ``gone``, stand before their first use.
        places, saved, done = list[int](), dict[fx.Node, None](), set(gone)
        for i, node in enumerate(self.nodes):
            if self._in_forward[i]:
                continue
            late: dict[fx.Node, None] = {}
            stack = [node]
            while stack:
                reader = stack.pop()
                for arg in self._forward_inputs[reader]:
                    if arg in done or arg in late:
                        continue
                    if arg in self._again:
                        late[arg] = None
                        stack.append(arg)
                    elif not is_number(reader):  # a reader of sizes alone needs no saved tensor
                        saved[arg] = None
            done.update(late)
            places += sorted(self._place[n] for n in late)
            places.append(i)
        return places, saved

    def _storages(self, nodes: Iterable[fx.Node]) -> dict[int, None]:
        return {s: None for n in nodes for s in self._live.of_node[n]}

    def fused(self, model: Model, kept: Collection[int], places: Iterable[int]) -> Model:
        """Return a half, its buckets merged, with the fused kernels of ``places``."""
        kernels, fused_ms = self.kernels(kept, tuple(places))
        of_node = self._live.of_node
        rows = zip(model.dependencies.nodes, model.ms, model.view, strict=True)
        ms = [ms if view else fused_ms.get(n, ms) for n, ms, view in rows]
        live = with_fused(model.liveness, model.dependencies, of_node, kernels)
        live = with_packed(live, model.dependencies, model.members, of_node, kernels)
        return replace(model, ms=ms, liveness=live)

    def kernels(
        self, kept: Collection[int], places: tuple[int, ...]
    ) -> tuple[Fused, dict[fx.Node, float]]:
        """Find the fused kernels of ``places``, once, and the milliseconds of their nodes."""
        of_node, costs, free = self._live.of_node, self._costs, self._joint.graph.free

        def is_kept(node: fx.Node) -> bool:
            return any(s in kept for s in of_node.get(node, ()))

        # Storages in ``kept`` are written, as they outlive the half. Other libraries' kernels
        # write their results in any case, so choices of gathers share the kernels of forward.
        nodes = [self.nodes[i] for i in places]
        within = [n for n in nodes if costs.operators[n].fused]
        key = places, tuple(filter(is_kept, within))
        if key not in self._found:
            kernels = fused(nodes, costs.operators, free, is_kept)
            ms = costs.times(within, free, kernels)[0]
            self._found[key] = kernels, dict(zip(within, ms, strict=True))
        return self._found[key]

    def forward_model(self) -> Model:
        return self._model(self.forward, self._given, self._kept_forward, self._at_start)

    def backward_model(self) -> Model:
        size = self._live.size
        handed = {s: None for s in (*self._saved, *self._tangents) if s not in self._given}
        at_start = self._at_start + sum(size[s] for s in handed)
        at_start_storages = {**self._given, **handed}
        return self._model(self.backward, at_start_storages, self._kept_backward, at_start)

    def _model(
        self,
        places: Sequence[int],
        inputs: Mapping[int, None],
        kept: dict[int, None],
        at_start: int,
    ) -> Model:
        """Build the model of one half, of the nodes at ``places`` in the joint model."""
        present, live, edit = dict(inputs), self._live, _edit_of(self._joint, places)
        for i in places:
            fresh = tuple(s for s in live.allocates[i] if s not in present)
            present.update(dict.fromkeys(fresh))
            touched = tuple(s for s in live.touches[i] if s in present)
            edit.keep(i, allocates=fresh, touches=touched)
        edit.kept, edit.at_start = kept, at_start
        return edit.model()


def _has_effects(node: fx.Node) -> bool:
    return not is_collective(node) and not is_wait(node) and node.is_impure()


def _merged(model: Model, planner: BucketPlanner, costs: Costs, rank_order: bool) -> Model:
    """Plan the buckets of a half, and return its model with the buckets merged."""
    graph, joint = _graph_of(model)
    analysis = GraphAnalysis(graph, costs.hints)
    own = isinstance(planner, ByUnit)  # a plan of ours needs no check
    plan = planner.plan(analysis) if own else checked_plan(planner, analysis)
    buckets = [replace(b, members=tuple(joint[m] for m in b.members)) for b in plan.buckets]
    merged = merged_model(model, buckets, costs, rank_order) if buckets or rank_order else model
    return model if merged is None else merged


def _graph_of(model: Model) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Write a half as a graph for planners; return it, and the joint graph's nodes by its nodes."""
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()

    def copy_of(node: fx.Node) -> fx.Node:
        if node not in new:
            new[node] = graph.placeholder(node.name)
            new[node].meta = node.meta
        return new[node]

    for node in model.dependencies.nodes:
        # As graph.node_copy(), which takes twice as long: it looks for sizes among the arguments.
        args, kwargs = fx.map_arg((node.args, node.kwargs), copy_of)
        copy = new[node] = graph.create_node(node.op, node.target, name=node.name)
        copy.meta.update(node.meta)  # to set an attribute takes as long as to create the node
        copy.args = args
        if kwargs:
            copy.kwargs = kwargs
    graph.output(tuple(node for node in graph.nodes if not node.users))
    return graph, {copy: node for node, copy in new.items()}
