"""The next collective after each kernel, and which of two kernels runs first for it.

Longest paths don't decide this. Two chunks of tokens have equally long paths, so their kernels
would alternate, and the stream of both chunks' collectives would be idle until both are ready::

    compute    | a | b | a | b |              | a     | b     |
    group                   [ of a ][ of b ]          [ of a ][ of b ]

Facts that all orders of a model share; :mod:`.list_schedule` defines the sorts of nodes.

The scheduler's model of a graph: nodes with times, dependencies and live bytes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.liveness import LiveBytes, Storages
from ...graph.nodes import (
    TO_HOST,
    GraphLike,
    Kind,
    graph_of,
    is_compute,
    is_view,
    kind_of,
    launched_by,
)
from ...graph.sizes import GivenHints, SizeHints
from ...graph.tags import replaced_kind
from ..cost.cost import Costs
from ..cost.machine import H100, Machine
from .paths import NodeTable, Paths


class Send(NamedTuple):
    """The next collective on a node's longest path that its own kernels can't hide.

    Args:
        compute_ms: milliseconds of the node and of the path up to the collective, collectives
            that kernels hide included; of the node alone without a collective.
        group: the collective's process group; None without one.
        ms: its milliseconds; 0 without one.
        tail: least milliseconds from its begin to the end of the step.
    """

    compute_ms: float
    group: str | None
    ms: float
    tail: float


def sends_of(model: NodeTable, tail: Sequence[float]) -> list[Send]:
    """Find the next collective of each node, by place; see :class:`.Paths` for ``tail``."""
    size, ms, group = len(model), model.ms, model.group
    ahead, start = [0.0] * size, [-1] * size
    for i in reversed(range(size)):
        users = model.dependencies.needed_by[i]
        if group[i] is not None:
            users = [j for j in users if model.needs_end(i, j)]
        after = max(users, key=tail.__getitem__, default=-1)
        if after >= 0 and group[after] is not None:
            start[i] = after
        elif after >= 0:
            ahead[i], start[i] = ahead[after], start[after]
        if group[i] is not None:  # its path begins after it
            continue
        ahead[i] += ms[i]
        while (at := start[i]) >= 0 and ms[at] < ahead[i]:
            ahead[i] += ms[at] + ahead[at]
            start[i] = start[at]
    return [
        Send(ms[i], None, 0.0, tail[i] - ms[i])
        if at < 0
        else Send(ahead[i], group[at], ms[at], tail[at])
        for i, at in enumerate(start)
    ]


def sooner_ms(first: Send, second: Send, busy_first: float, busy_second: float) -> float:
    """Compute how much sooner the step ends with the first kernel's path ahead of the second's.

    Both paths run through to their next collectives. Collectives of one group run one after the
    other.

    Args:
        first: the next collective of the first kernel.
        second: that of the second kernel.
        busy_first: milliseconds until the first collective's stream is free; 0 without a group.
        busy_second: the same for the second one's.

    Returns:
        Milliseconds, negative where the second path had better go ahead.
    """
    # This runs for each pair of ready kernels, so it calls nothing, not even max().
    compute, group, ms, tail = first
    other_compute, other_group, other_ms, other_tail = second
    both = compute + other_compute
    begin = compute if compute > busy_first else busy_first
    other_begin = other_compute if other_compute > busy_second else busy_second
    free, other_free = busy_second, busy_first
    if group == other_group:
        free, other_free = begin + ms, other_begin + other_ms
    ahead, after = begin + tail, (both if both > free else free) + other_tail
    end = ahead if ahead > after else after
    ahead, after = other_begin + other_tail, (both if both > other_free else other_free) + tail
    return (ahead if ahead > after else after) - end


_LARGE = 2**62  # bytes


class ModelAnalysis:
    """Facts that all orders of a model share: :attr:`.Model.analysis`.

    Nodes are known by their places. Kernels also have numbers, in the order of the graph.

    Attributes:
        lazy: by place, whether the node is a wait, a view or the like.
        source: by place, whether the node needs no kernel.
        kernels: places of the kernels, by number.
        at: number of each kernel, by place; -1 for other nodes.
        compute_before: by number, compute nodes before the kernel.
        ms_before: by number, milliseconds of the kernels before it.
        total_ms: milliseconds of all kernels.
        sends: by place, the node's next collective.
        first_use: by place, number of the first kernel that needs the node.
        free_dead_ends: places of the dead ends that need no node. A dead end is lazy, reaches no
            kernel and no collective, and leaves no more bytes live than it frees.
        run_after: by place, the nodes that run right after the node: dead ends and items.
        own_bytes: by place, the bytes that the node allocates.
        adds: the same with those of the lazy nodes right before it.
        gathers: by process group, the starts that need no kernel and reach one.
        wait_of: by place of a start, the place of its wait.
        reductions: by process group, the reduce-scatters, the last one first.
        fillers: lazy nodes that take time and need no collective, in the order of their use.
        latest: by place of a gather, when it must begin; see :func:`latest_starts`.
        live: by number, bytes live before the kernel.
        most_in: for each power of two, by number, the most bytes live from the kernel until that
            many kernels later.
    """

    def __init__(self, model: NodeTable, paths: Paths) -> None:
        needs, needed_by = model.dependencies.needs, model.dependencies.needed_by
        group, live, size = model.group, model.liveness, len(model)
        self.lazy = lazy = [False] * size
        self.source = source = [False] * size
        for i, mine in enumerate(needs):
            if model.compute[i]:
                continue
            start = group[i] is not None
            free = group[i] != TO_HOST  # such a copy follows its value at once
            for j in mine:
                if not source[j] and not (start and group[j] is not None):  # only ordered
                    free = False
                    break
            source[i] = free
            lazy[i] = not start and (free or model.start_of[i] >= 0 or model.view[i])
        self.kernels = [i for i in range(size) if not lazy[i] and group[i] is None]
        self.at = at = [-1] * size
        for number, i in enumerate(self.kernels):
            at[i] = number
        # One entry more than there are kernels: the last one is the total.
        kernels = self.kernels
        self.compute_before = [
            *itertools.accumulate((model.compute[i] for i in kernels), initial=0)
        ]
        self.ms_before = [*itertools.accumulate((model.ms[i] for i in kernels), initial=0.0)]
        self.total_ms = self.ms_before[-1]
        never = len(kernels)
        self.first_use = first_use = [never] * size
        # A part of a gathered parameter that is kept is a dead end: it frees the rest.
        dead_ends = [False] * size
        for i in reversed(range(size)):
            first, dead = never, lazy[i] and model.start_of[i] < 0
            for j in needed_by[i]:
                dead = dead and dead_ends[j]
                if group[i] is not None and group[j] is not None:  # only ordered
                    continue
                use = at[j] if at[j] >= 0 else first_use[j]
                if use < first:
                    first = use
            first_use[i] = first
            dead_ends[i] = dead and _adds_less(model, i)
        self.free_dead_ends = [i for i, dead in enumerate(dead_ends) if dead and not needs[i]]
        self.sends = sends_of(model, paths.tail)
        # Items of several results run at once, too: until then all results are live.
        at_once = [
            dead or node.target is operator.getitem
            for dead, node in zip(dead_ends, model.dependencies.nodes, strict=True)
        ]
        self.run_after = [[j for j in users if at_once[j]] for users in needed_by]
        # The most bytes that a node allocates, with the lazy nodes right before it.
        self.own_bytes = [sum(map(live.size.__getitem__, new)) for new in live.allocates]
        self.adds = adds = list(self.own_bytes)
        for i, mine in enumerate(needs):
            for j in mine:
                if at[j] < 0:
                    adds[i] += adds[j]
            adds[i] = min(adds[i], _LARGE)
        # A start that reaches no kernel is not a gather: a reduction of an input, for one.
        self.gathers: dict[str, list[int]] = {}
        self.wait_of: dict[int, int] = {}
        for i, name in enumerate(group):
            if name is not None and source[i] and first_use[i] < never:
                self.gathers.setdefault(name, []).append(i)
            if model.start_of[i] >= 0:
                self.wait_of[model.start_of[i]] = i
        self.reductions: dict[str, list[int]] = {}
        for i in reversed(range(size)):
            if model.reduces[i]:
                self.reductions.setdefault(str(group[i]), []).append(i)
        self._find_available(model)
        given = [False] * size
        fillers = []
        for i, mine in enumerate(needs):
            given[i] = source[i] and group[i] is None and all(given[j] for j in mine)
            if given[i] and lazy[i] and model.ms[i] and first_use[i] < never:
                fillers.append(i)
        self.fillers = sorted(fillers, key=first_use.__getitem__)
        self.latest = self._latest_starts(model)
        self.live, most = self._live_at_kernels(model)
        self.most_in, half = [most], 1
        while 2 * half <= len(kernels):
            most, half = list(map(max, most, most[half:])), 2 * half
            self.most_in.append(most)

    def _find_available(self, model: NodeTable) -> None:
        """Find the nodes that are ready at the start: lazy nodes, starts and kernels.

        ``missing`` has the in-degrees of the others.
        """
        self.missing = [len(n) for n in model.dependencies.needs]
        self.available = [False] * len(model)
        self.ready: list[int] = []
        self.produced: list[int] = []
        for i in range(len(model)):
            if self.missing[i]:
                continue
            if self.at[i] >= 0:
                self.ready.append(self.at[i])
                continue
            self.available[i] = True
            if model.group[i] is not None and not self.source[i]:
                self.produced.append(i)
            for j in model.dependencies.needed_by[i]:
                self.missing[j] -= 1

    def _latest_starts(self, model: NodeTable) -> dict[int, float]:
        """Compute when each gather must begin, in milliseconds of the kernels' time."""
        load: dict[str, list[tuple[float, float]]] = {}
        for i, group in enumerate(model.group):
            if group is not None and not self.source[i]:
                produced = max(
                    (self.ms_before[self.at[j]] for j in self._last_kernels(model, i)),
                    default=0.0,
                )
                level = model.shared.get(group, group)
                load.setdefault(level, []).append((produced, model.ms[i]))
        latest: dict[int, float] = {}
        for group, gathers in self.gathers.items():
            others = sorted(load.get(model.shared.get(group, group), []))
            uses = [(self.ms_before[self.first_use[i]], model.ms[i]) for i in gathers]
            latest.update(zip(gathers, latest_starts(uses, others, self.total_ms), strict=True))
        return latest

    def first_uses(self) -> dict[int, int]:
        """Map each gather to the first kernel that needs it, both by place."""
        return {i: self.kernels[self.first_use[i]] for mine in self.gathers.values() for i in mine}

    def _last_kernels(self, model: NodeTable, i: int) -> list[int]:
        """List the kernels that ``i`` needs with only lazy nodes between."""
        found, seen, stack = [], {i}, [i]
        while stack:
            node = stack.pop()
            for j in model.dependencies.needs[node]:
                if j in seen or model.only_ordered(j, node):
                    continue
                seen.add(j)
                if self.at[j] >= 0:
                    found.append(j)
                elif self.lazy[j] and not self.source[j]:
                    stack.append(j)
        return found

    def _live_at_kernels(self, model: NodeTable) -> tuple[list[int], list[int]]:
        """Compute, by number, bytes live before the kernel, and the most until the next one."""
        live, before, most = LiveBytes(model.liveness), list[int](), list[int]()
        for i, number in enumerate(self.at):
            if number >= 0:
                before.append(live.now)
                most.append(0)
            during = live.run(i)
            if most and during > most[-1]:
                most[-1] = during
        return before, most


def _adds_less(model: NodeTable, i: int) -> bool:
    """Return whether a node leaves no more bytes live than it frees."""
    live = model.liveness
    added = sum(live.size[s] for s in live.allocates[i] if s in live.kept)
    own = live.allocates[i]
    read = sum(live.size[s] for s in live.touches[i] if s not in live.kept and s not in own)
    return not added or added < read


def latest_starts(
    gathers: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], end_ms: float
) -> list[float]:
    """Compute when each gather of a stream must begin so that none delays its use.

    Times are milliseconds of the kernels' time. Other collectives of the stream move the deadline
    of the gathers before them forward.

    Args:
        gathers: use and duration of each gather, in the order of launch.
        others: earliest begin and duration of each other collective, ascending.
        end_ms: the end of the last kernel.
    """
    found, bound, left = [0.0] * len(gathers), end_ms, len(others)
    for i in reversed(range(len(gathers))):
        use_ms, ms = gathers[i]
        bound = min(bound, use_ms)
        while left and others[left - 1][0] >= bound:
            left -= 1
        bound -= ms
        while left and others[left - 1][0] >= bound:
            left -= 1
            bound -= others[left][1]
        found[i] = bound
    return found


def model_of(graph: GraphLike | GraphAnalysis, machine: Machine | Costs = H100) -> Model:
    """Build the model of a graph, in the order of the graph.

    Args:
        graph: a graph, or its analysis.
        machine: the machine to time nodes for, or costs, which several models can share. Size hints
            are those of ``graph`` where that is an analysis.

    Raises:
        ValueError: the graph is not in topological order.
    """
    if isinstance(machine, Costs):
        costs = machine
        if not isinstance(graph, GraphAnalysis):
            fuses = bool(costs.machine.fuses)
            graph = GraphAnalysis(graph_of(graph), costs.hints, fuses=fuses)
    else:
        if not isinstance(graph, GraphAnalysis):
            graph = GraphAnalysis(graph_of(graph), fuses=bool(machine.fuses))
        costs = Costs(machine, graph.hints)
    dependencies = graph.dependencies
    nodes, index = dependencies.nodes, dependencies.index
    ms, host = costs.times(nodes, graph.free, graph.fused)
    return Model(
        dependencies=dependencies,
        liveness=graph.liveness,
        ms=ms,
        group=[dependencies.group.get(i) for i in range(len(nodes))],
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

    Args:
        gm: a graph with fake tensors in ``meta["val"]``.
        donated: see :class:`.GraphAnalysis`.
        size_hints: see :func:`.backend`.
        external_live_bytes: see :class:`.GraphAnalysis`.

    Raises:
        TypeError: ``size_hints`` is neither a whole number nor a callable.
        ValueError: the graph is not in topological order, or ``size_hints`` is negative.
    """
    return GraphAnalysis(
        graph_of(gm), size_hints, donated=donated, external_live_bytes=external_live_bytes
    ).peak_bytes


class Row(NamedTuple):
    """A node of a new model; other fields are those of :class:`Model` and :class:`.Storages`.

    Args:
        node: the node of the graph, or one that represents it.
        needs: its dependencies as places in the new model, without those of the launch order.
    """

    node: fx.Node
    needs: Iterable[int]
    allocates: tuple[int, ...]
    touches: tuple[int, ...]
    ms: float = 0.0
    group: str | None = None
    start_of: int = -1
    compute: bool = False
    reduces: bool = False
    view: bool = False
    host: float = 0.0


class Model(NodeTable):
    """The movable nodes of a graph, with facts that are computed once; see :func:`.model_of`."""

    @cached_property
    def paths(self) -> Paths:
        """The longest paths, and a lower bound of every order."""
        return Paths(self)

    @cached_property
    def analysis(self) -> ModelAnalysis:
        """Facts that all orders share."""
        return ModelAnalysis(self, self.paths)

    @cached_property
    def largest(self) -> tuple[str, int]:
        """The name of the node that allocates the most bytes in one block, and the bytes."""
        size, nodes = self.liveness.size, self.dependencies.nodes
        made = ((i, s) for i, new in enumerate(self.liveness.allocates) for s in new)
        i, s = max(made, key=lambda x: (size[x[1]], -x[0]), default=(-1, -1))
        return (nodes[i].name, size[s]) if i >= 0 else ("", 0)

    def least_bytes_at(self, i: int) -> int:
        """Return the bytes that are live while node ``i`` runs, whatever the order.

        These are storages that the node or one that it needs allocates, and that the node or one
        that needs it touches, or that are never freed.
        """
        before = self._reached(i, self.dependencies.needs)
        after = self._reached(i, self.dependencies.needed_by)
        live, apart, later = self.liveness, set[int](), set(self.liveness.kept)
        for j, (new, touched) in enumerate(zip(live.allocates, live.touches, strict=True)):
            if not before[j]:
                apart.update(new)
            if after[j]:
                later.update(touched)
        allocated = {s for mine in live.allocates for s in mine}
        given = {s for mine in live.touches for s in mine if s not in allocated}
        there = sum(live.size[s] for s in allocated if s in later and s not in apart)
        return live.at_start + there - sum(live.size[s] for s in given if s not in later)

    def _reached(self, i: int, edges: Sequence[Iterable[int]]) -> bytearray:
        found, stack = bytearray(len(self)), [i]
        found[i] = 1
        while stack:
            for j in edges[stack.pop()]:
                if not found[j]:
                    found[j] = 1
                    stack.append(j)
        return found

    @cached_property
    def needed_values(self) -> list[list[int]]:
        """The dependencies of each node, without those of the launch order."""
        return [
            mine if self.group[i] is None else [j for j in mine if self.group[j] is None]
            for i, mine in enumerate(self.dependencies.needs)
        ]

    def without_views(self) -> Model:
        """Let the users of views need what the views need; times and live bytes stay.

        Views that a collective reads stay, and those whose users don't keep their storages live::

            mm -> t -> view -> mm        mm -> mm
        """
        needed_by, live = self.dependencies.needed_by, self.liveness
        at, rows = [-1] * len(self), list[Row]()
        instead: dict[int, list[int]] = {}
        for i, mine in enumerate(self.needed_values):
            needs = list(dict.fromkeys(k for j in mine for k in instead.get(j, (at[j],))))
            users, touched = needed_by[i], set(live.touches[i])
            if (
                self.view[i]
                and users
                and self.start_of[i] < 0
                and not live.allocates[i]
                and all(self.group[j] is None for j in (*mine, *users))
                and all(touched.issubset(live.touches[j]) for j in users)
            ):
                instead[i] = needs
                continue
            at[i] = len(rows)
            rows.append(self.row(i, at)._replace(needs=needs))
        return self.rebuilt(rows, {}, live.size, live.kept, live.at_start)

    def row(self, i: int, at: Sequence[int]) -> Row:
        """Return node ``i`` for a new model; ``at`` maps old places to new ones, or to -1."""
        start = self.start_of[i]
        return Row(
            self.dependencies.nodes[i],
            [at[j] for j in self.needed_values[i] if at[j] >= 0],
            self.liveness.allocates[i],
            self.liveness.touches[i],
            self.ms[i],
            self.group[i],
            at[start] if start >= 0 else -1,
            self.compute[i],
            self.reduces[i],
            self.view[i],
            self.host[i],
        )

    def rebuilt(
        self,
        rows: Sequence[Row],
        members: dict[int, tuple[fx.Node, ...]],
        size: list[int],
        kept: dict[int, None],
        at_start: int,
    ) -> Model:
        """Build the model of other nodes on the same machine.

        Collectives of one group and kind launch in the order of ``rows``. The other arguments are
        those of :class:`Model` and :class:`.Storages`.
        """
        columns_of = zip(*rows, strict=True) if rows else [()] * len(Row._fields)
        nodes, given, allocates, touches, *rest = map(list, columns_of)
        columns: dict[str, Any] = dict(zip(Row._fields[4:], rest, strict=True))
        needs = list(map(set, given))
        last: dict[tuple[str, Kind], int] = {}
        for i, row in enumerate(rows):
            kind = None if row.group is None else kind_of(row.node)
            if row.group is not None and kind is not None:
                key = row.group, kind
                needs[i].update((last[key],) if key in last else ())
                last[key] = i
        return replace(
            self,
            dependencies=Precedence(nodes, needs),
            liveness=Storages(size, allocates, touches, kept, at_start),
            members=members,
            **columns,
        )
