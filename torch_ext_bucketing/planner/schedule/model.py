"""Model a graph for the scheduler: nodes with times, dependencies and live bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.fusion import Fused
from ...graph.liveness import Storages
from ...graph.nodes import (
    GraphLike,
    Kind,
    graph_of,
    is_compute,
    is_view,
    kind_of,
    launched_by,
    replaced_kind,
)
from ...graph.sizes import GivenHints, SizeHints
from ..cost.cost import Costs
from ..cost.machine import H100, Machine
from .analysis import ModelAnalysis, NodeTable, Paths


class Model(NodeTable):
    """The movable nodes of a graph, with facts that are computed once; see :func:`.model_of`."""

    @cached_property
    def paths(self) -> Paths:
        """The longest paths, and a lower bound of every order."""
        return Paths(self)

    @cached_property
    def analysis(self) -> ModelAnalysis:
        """The sorts of nodes."""
        return ModelAnalysis(self, self.paths)

    @cached_property
    def largest(self) -> tuple[str, int]:
        """The name of the node that allocates the most bytes in one block, and the bytes."""
        size, nodes = self.liveness.size, self.dependencies.nodes
        allocations = ((i, s) for i, new in enumerate(self.liveness.allocates) for s in new)
        i, s = max(allocations, key=lambda x: (size[x[1]], -x[0]), default=(-1, -1))
        return (nodes[i].name, size[s]) if i >= 0 else ("", 0)

    @cached_property
    def largest_collective(self) -> int:
        """The most bytes that a collective reads and writes."""
        size = self.liveness.size
        touched = zip(self.group, self.liveness.touches, strict=True)
        return max(
            (sum(map(size.__getitem__, storages)) for g, storages in touched if g), default=0
        )

    @cached_property
    def forced_run(self) -> int:
        """A lower bound of the longest compute run in any order."""
        # The reduce-scatters of one group keep their order. At its k-th, all compute nodes that the
        # first k need have run, cut into runs by at most k reduce-scatters of the group and all of
        # the other groups. So one run has at least the quotient.
        needs, groups = self.dependencies.needs, self.analysis.reductions.values()
        forced, total = 0, sum(map(len, groups))
        for starts in groups:
            seen, compute = set[int](), 0
            for k, start in enumerate(reversed(starts), 1):
                stack = [start]
                while stack:
                    for j in needs[stack.pop()]:
                        if j not in seen:
                            seen.add(j)
                            compute += self.compute[j]
                            stack.append(j)
                forced = max(forced, -(-compute // (k + total - len(starts))))
        return forced

    def least_bytes_at(self, i: int) -> int:
        """Return the bytes that are live while node ``i`` runs, whatever the order."""
        # Allocated by the node or one that it needs, and touched by the node or one that needs it,
        # or never freed.
        before = self._reached(i, self.dependencies.needs)
        after = self._reached(i, self.dependencies.needed_by)
        live, apart, later = self.liveness, set[int](), set(self.liveness.kept)
        for j, (new, touched) in enumerate(zip(live.allocates, live.touches, strict=True)):
            if not before[j]:
                apart.update(new)
            if after[j]:
                later.update(touched)
        allocated = {s for storages in live.allocates for s in storages}
        inputs = {s for storages in live.touches for s in storages if s not in allocated}
        always_live = sum(live.size[s] for s in allocated if s in later and s not in apart)
        return live.at_start + always_live - sum(live.size[s] for s in inputs if s not in later)

    def _reached(self, i: int, edges: Sequence[Iterable[int]]) -> bytearray:
        """Mark, by place, node ``i`` and all that the edges lead to from it."""
        reached, stack = bytearray(len(self)), [i]
        reached[i] = 1
        while stack:
            for j in edges[stack.pop()]:
                if not reached[j]:
                    reached[j] = 1
                    stack.append(j)
        return reached

    @cached_property
    def needed_values(self) -> Sequence[Sequence[int]]:
        """The dependencies of each node, without the launch order."""
        return [
            needed if self.group[i] is None else [j for j in needed if self.group[j] is None]
            for i, needed in enumerate(self.dependencies.needs)
        ]

    def with_collectives(self, times: float) -> Model:
        """Return the model on a machine whose collectives take ``times`` as long."""
        timed = zip(self.group, self.ms, strict=True)
        return replace(self, ms=[ms if group is None else times * ms for group, ms in timed])

    @property
    def compact(self) -> Model:
        """The model without nodes that run no kernel and hold no bytes of their own.

        Views are such nodes, and values that fused kernels compute inside their readers. Their
        users need what they need; times and live bytes stay. Those that a collective reads stay,
        and those whose users don't keep their storages live::

            mm -> t -> view -> mm        mm -> mm
        """
        return self._compact[0] or self

    def expanded(self, order: Sequence[int]) -> Sequence[int]:
        """Return the order of all nodes for one of :attr:`compact`.

        Nodes that are not in :attr:`compact` run right before their first user, and the model's
        own order stays.
        """
        compact, new_place = self._compact
        if compact is None or list(order) == list(range(len(compact))):
            return order if compact is None else range(len(self))
        rank = [0] * len(compact)
        for k, i in enumerate(order):
            rank[i] = k
        runs_with = [rank[i] if i >= 0 else len(order) for i in new_place]
        for i in reversed(range(len(self))):
            if new_place[i] < 0:
                runs_with[i] = min(runs_with[j] for j in self.dependencies.needed_by[i])
        return sorted(range(len(self)), key=runs_with.__getitem__)

    @cached_property
    def _compact(self) -> tuple[Model | None, list[int]]:
        """:attr:`compact`, None if no node goes, with the new places of nodes; -1: not in it."""
        edit, instead = ModelEdit(self), dict[int, list[int]]()
        for i, needed in enumerate(self.needed_values):
            needs = list(
                dict.fromkeys(k for j in needed for k in instead.get(j, (edit.new_place[j],)))
            )
            if self._may_go(i):
                instead[i] = needs
            else:
                edit.keep(i, needs=needs)
        return edit.model() if instead else None, edit.new_place

    def _may_go(self, i: int) -> bool:
        """Return whether :attr:`compact` does without node ``i``."""
        users, live, size = self.dependencies.needed_by[i], self.liveness, self.liveness.size
        runs = self.ms[i] or self.host[i] or self.compute[i]
        if not users or self.group[i] is not None:
            return False
        if (runs and not self.view[i]) or any(size[s] for s in live.allocates[i]):
            return False
        touched = [s for s in live.touches[i] if size[s]]
        return all(self.group[j] is None for j in (*self.needed_values[i], *users)) and all(
            s in live.touches[j] for s in touched for j in users
        )


class Row(NamedTuple):
    """A node of a new model; other fields: see :class:`.NodeTable` and :class:`.Storages`.

    ``needs`` are its dependencies as places in the new model, without those of the launch order.
    """

    node: fx.Node
    needs: Iterable[int]
    allocates: tuple[int, ...] = ()
    touches: tuple[int, ...] = ()
    ms: float = 0.0
    group: str | None = None
    start_of: int = -1
    compute: bool = False
    reduces: bool = False
    view: bool = False
    host: float = 0.0


class ModelEdit:
    """Change a model as a rewrite will change the graph; the model itself stays.

    Rows of the new model come in the order of the calls. An old node that is not kept is dropped::

        edit = ModelEdit(model)
        edit.keep(0)                                   # rows of the old model
        copy = edit.add(Row(node, [edit.new_place[0]], ...))  # a new row
        edit.keep(2, needs=[copy])                     # a changed one; node 1 is dropped
        edit.model()

    ``new_place`` has by old place the new place of the node's result; -1 without one. ``members``
    go by new place.
    """

    def __init__(self, model: Model) -> None:
        self._old, self._rows = model, list[Row]()
        self.new_place = [-1] * len(model)
        self.size, self.kept = list(model.liveness.size), dict(model.liveness.kept)
        self.at_start = model.liveness.at_start
        self.members: dict[int, tuple[fx.Node, ...]] = {}

    def row(self, i: int) -> Row:
        """Return old node ``i`` as a row that needs its dependencies in the new model."""
        old, new_place = self._old, self.new_place
        start = old.start_of[i]
        return Row(
            old.dependencies.nodes[i],
            [new_place[j] for j in old.needed_values[i] if new_place[j] >= 0],
            old.liveness.allocates[i],
            old.liveness.touches[i],
            old.ms[i],
            old.group[i],
            new_place[start] if start >= 0 else -1,
            old.compute[i],
            old.reduces[i],
            old.view[i],
            old.host[i],
        )

    def keep(self, i: int, **changes: Any) -> int:
        """Add old node ``i``, with changed fields of its row; return its new place."""
        row = self.row(i)
        place = self.new_place[i] = self.add(row._replace(**changes) if changes else row)
        if i in self._old.members:
            self.members[place] = self._old.members[i]
        return place

    def add(self, row: Row) -> int:
        """Add a node, and return its place."""
        self._rows.append(row)
        return len(self._rows) - 1

    def storage(self, nbytes: int) -> int:
        """Add a storage, and return its number."""
        self.size.append(nbytes)
        return len(self.size) - 1

    def model(self) -> Model:
        """Return the new model. Collectives of one group and kind launch in the order of rows."""
        rows = self._rows
        columns_of = zip(*rows, strict=True) if rows else [()] * len(Row._fields)
        nodes, needed, allocates, touches, *rest = map(list, columns_of)
        columns: dict[str, Any] = dict(zip(Row._fields[4:], rest, strict=True))
        needs = list(map(set, needed))
        last: dict[tuple[str, Kind], int] = {}
        for i, row in enumerate(rows):
            kind = None if row.group is None else kind_of(row.node)
            if row.group is not None and kind is not None:
                key = row.group, kind
                needs[i].update((last[key],) if key in last else ())
                last[key] = i
        return replace(
            self._old,
            dependencies=Precedence(nodes, needs),
            liveness=Storages(self.size, allocates, touches, self.kept, self.at_start),
            members=self.members,
            **columns,
        )


def model_of(
    graph: GraphLike | GraphAnalysis, machine: Machine | Costs = H100, kernels: Fused | None = None
) -> Model:
    """Build the model of a graph, in the order of the graph.

    ``machine`` may be costs, which several models can share. Size hints are those of ``graph``
    where that is an analysis. ``kernels`` replace those that the machine's fused operators have;
    operators in none of them take no time.
    """
    if isinstance(machine, Machine):
        machine = Costs(machine, graph.hints if isinstance(graph, GraphAnalysis) else None)
    costs = machine
    if not isinstance(graph, GraphAnalysis):
        graph = GraphAnalysis(graph_of(graph), costs.hints, fuses=bool(costs.machine.fuses))
    dependencies = graph.dependencies
    nodes, index = dependencies.nodes, dependencies.index
    ms, host = costs.times(nodes, graph.free, graph.fused if kernels is None else kernels)
    return Model(
        dependencies=dependencies,
        liveness=graph.liveness,
        ms=ms,
        group=[dependencies.group.get(i) for i in index.values()],
        start_of=[-1 if (s := launched_by(n)) is None else index[s] for n in nodes],
        compute=[is_compute(n) for n in nodes],
        reduces=[replaced_kind(n) == "reduce_scatter" for n in nodes],
        view=[is_view(n) for n in nodes],
        host=host,
        graph=graph,
        shared=costs.shared_levels(dependencies.group.values()),
    )


def peak_bytes(
    gm: GraphLike,
    donated: Callable[[fx.Node], bool] | None = None,
    size_hints: SizeHints | GivenHints = None,
    external_live_bytes: int = 0,
) -> int:
    """Estimate the peak of live bytes of a graph in its own order (:mod:`.graph.liveness`).

    The graph has fake tensors in ``meta["val"]``. Arguments are those of :class:`.GraphAnalysis`;
    ``size_hints``: see :func:`.backend`.
    """
    return GraphAnalysis(
        graph_of(gm), size_hints, donated=donated, external_live_bytes=external_live_bytes
    ).peak_bytes
