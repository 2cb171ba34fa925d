"""Find the facts that all orders of a model share: longest paths, lower bounds, sorts of nodes."""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, NewType, TypeAlias

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.liveness import LiveBytes, Storages
from ...graph.nodes import TO_HOST


@dataclass(frozen=True, eq=False)
class NodeTable:
    """The movable nodes of a graph as columns, one entry per node; see :func:`.model_of`.

    A node's *place* is its index in the columns.
    """

    dependencies: Precedence
    liveness: Storages
    # Milliseconds on the node's stream; 0 for nodes of uneven shards (`graph.sizes`) and for
    # nodes without a user.
    ms: list[float]
    group: list[str | None]  # a collective's process group, or None
    start_of: list[int]  # the place of a wait's collective, or -1
    compute: list[bool]  # whether the node is a compute node
    reduces: list[bool]  # whether it is a reduce-scatter
    view: list[bool]  # whether it runs no kernel
    host: list[float]  # milliseconds that the host takes to launch the node
    graph: GraphAnalysis
    # The starts in a planned bucket, by the place of the bucket's start.
    members: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    # The network level of each group that shares it with others.
    shared: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ms)

    def streams_of(self, group: str | None) -> tuple[str | None, ...]:
        """List the streams that a collective of ``group`` keeps busy, or a kernel (None)."""
        level = None if group is None else self.shared.get(group)
        return (group,) if level is None else (group, level)

    def only_ordered(self, before: int, after: int) -> bool:
        """Return whether both are starts: ``after`` then only launches after ``before``."""
        return self.group[before] is not None and self.group[after] is not None

    def needs_end(self, before: int, after: int) -> bool:
        """Return whether ``after``, which needs ``before``, can't begin before it has ended."""
        # A start's end holds back its wait and views; a write to its input only needs the launch.
        if self.group[before] is None:
            return True
        start = self.start_of[after]
        return start == before if start >= 0 else self.view[after]


# --- longest paths and bounds ---------------------------------------------------------------------

_MOST_BETWEEN = 500
"""Where the places of two collectives differ by more, not all kernels between them count."""

_ROUNDED_MS = 1e-3
"""The most that rounding leaves of a sum after all its times were subtracted."""


class Rest(NamedTuple):
    """The critical tail of a stream: the nodes that bound the end of the step.

    They take ``ms`` one after the other, and at least ``after_ms`` follow each of them; less
    follows other nodes of the stream.
    """

    ms: float
    after_ms: float


class Paths:
    """The longest paths of a model: :attr:`.Model.paths`.

    A stream is that of the kernels (None), of a process group, or of a network level that groups
    share.

    Attributes:
        tail: by place, the least milliseconds from the node's begin to the end of the step: the
            longest path, with all kernels between its collectives.
        kernels_ms: milliseconds of all nodes but collectives.
    """

    def __init__(self, model: NodeTable) -> None:
        self._model = model
        self._between: dict[tuple[int, int], float] = {}
        self.tail = _longest(model, False, self._between)
        self.kernels_ms = sum(ms for ms, g in zip(model.ms, model.group, strict=True) if g is None)

    @cached_property
    def rest(self) -> dict[str | None, Rest]:
        """The critical tail of each stream."""
        tails = {}
        for stream, work in self._work.items():
            most, total = Rest(0.0, 0.0), 0.0
            for after, ms in sorted(((self.tail[i] - ms, ms) for i, ms in work), reverse=True):
                total += ms
                if total + after >= most.ms + most.after_ms:
                    most = Rest(total, after)
            tails[stream] = most
        return tails

    @cached_property
    def bound_ms(self) -> float:
        """The least milliseconds of any order.

        The longest path, or the time of a stream whose nodes each come after the longest path to
        them and before the longest one from them. The host is one, too.
        """
        model, tail = self._model, self.tail
        head = _longest(model, True, self._between)
        least = max((a + b - ms for a, b, ms in zip(head, tail, model.ms, strict=True)), default=0)
        launches = [(0.0, ms, after) for ms, after in zip(model.host, tail, strict=True) if ms]
        least = max(least, _one_after_the_other(launches))
        for group_work in self._work.values():
            work = [(head[i] - ms, ms, tail[i] - ms) for i, ms in group_work if ms]
            least = max(least, _one_after_the_other(work))
        return least

    @cached_property
    def _work(self) -> dict[str | None, list[tuple[int, float]]]:
        """The nodes of each stream, with their milliseconds."""
        work: dict[str | None, list[tuple[int, float]]] = {None: []}
        for i, (group, ms) in enumerate(zip(self._model.group, self._model.ms, strict=True)):
            for stream in self._model.streams_of(group):
                work.setdefault(stream, []).append((i, ms))
        return work


class Remaining:
    """The open nodes of a model whose nodes begin one after the other, in milliseconds."""

    def __init__(self, model: NodeTable, paths: Paths) -> None:
        self._model, self._tail, self._rest = model, paths.tail, paths.rest
        self._ms = {stream: rest.ms for stream, rest in self._rest.items()}
        self.kernels_ms = paths.kernels_ms

    def begin(self, i: int, stream: str | None) -> None:
        """Take node ``i`` off the open nodes of a stream."""
        ms = self._model.ms[i]
        if stream is None:
            self.kernels_ms -= ms
        if self._tail[i] - ms >= self._rest[stream].after_ms:
            self._ms[stream] -= ms

    def least_end(self, stream: str | None, free_ms: float) -> float:
        """Return the earliest end of the step if ``stream`` is free from ``free_ms`` on."""
        work_left, least = self._ms[stream], free_ms
        if work_left > _ROUNDED_MS:
            least += work_left + self._rest[stream].after_ms
        return max(least, free_ms + self.kernels_ms) if stream is None else least


def _one_after_the_other(work: list[tuple[float, float, float]]) -> float:
    """Compute the earliest end of a stream's nodes by Jackson's preemptive rule.

    ``work``: each node's earliest begin, duration and tail, in milliseconds.
    """
    coming = sorted(work, reverse=True)
    waiting: list[tuple[float, float]] = []  # negative tails, with the milliseconds left
    clock_ms = end = 0.0
    while coming or waiting:
        if not waiting:
            clock_ms = max(clock_ms, coming[-1][0])
        while coming and coming[-1][0] <= clock_ms:
            _, ms, tail = coming.pop()
            heapq.heappush(waiting, (-tail, ms))
        minus_tail, ms_left = heapq.heappop(waiting)
        until = coming[-1][0] if coming else math.inf
        if clock_ms + ms_left > until:
            heapq.heappush(waiting, (minus_tail, ms_left - (until - clock_ms)))
            clock_ms = until
        else:
            clock_ms += ms_left
            end = max(end, clock_ms - minus_tail)
    return end


def _longest(model: NodeTable, back: bool, known: dict[tuple[int, int], float]) -> list[float]:
    """Compute, by place, the longest path from the node, or to it (``back``), in milliseconds.

    ``known`` keeps the time of the kernels between two collectives, of all kernels between them,
    not only of the path's, because these share the compute stream::

        all_to_all -> wait -> mm1 -> mul -> all_to_all      path: mm1, mul
                           `-> mm2 -----^                   between them: mm1, mm2, mul
    """
    size, dependencies, group = len(model), model.dependencies, model.group
    edges = dependencies.needs if back else dependencies.needed_by
    path, near = [0.0] * size, [-1] * size  # the nearest collective on it
    for i in range(size) if back else reversed(range(size)):
        longest, waiting_ms = 0.0, 0.0
        for j in edges[i]:
            if path[j] <= waiting_ms:
                continue
            first, second = (j, i) if back else (i, j)
            if group[first] is None or model.needs_end(first, second):
                waiting_ms, near[i] = path[j], near[j] if group[j] is None else j
            elif path[j] > longest and group[second] is not None:
                longest = path[j]  # one stream runs them one after the other
        if group[i] is not None and near[i] >= 0 and abs(i - near[i]) <= _MOST_BETWEEN:
            pair = (near[i], i) if back else (i, near[i])
            if pair not in known:
                between = sorted(_between(model, *pair))
                known[pair] = sum(model.ms[j] for j in between if group[j] is None)
            waiting_ms = max(waiting_ms, known[pair] + path[near[i]])
        path[i] = model.ms[i] + max(longest, waiting_ms)
    return path


def _between(model: NodeTable, start: int, end: int) -> set[int]:
    """Collect the nodes that wait for the end of ``start`` and that ``end`` waits for."""
    needs, needed_by, group = model.dependencies.needs, model.dependencies.needed_by, model.group
    after, stack = set[int](), [start]
    while stack:
        node = stack.pop()
        for j in needed_by[node]:
            if j < end and j not in after and (group[node] is None or model.needs_end(node, j)):
                after.add(j)
                stack.append(j)
    between, stack = set[int](), [end]
    while stack:
        node = stack.pop()
        for j in needs[node]:
            if j in after and j not in between and (group[j] is None or model.needs_end(j, node)):
                between.add(j)
                stack.append(j)
    return between


# --- the next collective after a kernel -----------------------------------------------------------


Send: TypeAlias = tuple[float, str | None, float, float]
"""The next collective on a node's longest path that its own kernels can't hide.

``(compute_ms, group, ms, tail)``: milliseconds of the node and of the path up to the collective,
collectives that kernels hide included, or of the node alone without a collective; the collective's
group, and milliseconds, 0 without one; the least milliseconds from its begin to the end of the
step. A plain tuple, since each model has one for each node.
"""


def sends_of(model: NodeTable, tail: Sequence[float]) -> list[Send]:
    """Find the next collective of each node, by place; see :class:`.Paths` for ``tail``.

    Nodes are walked from the last to the first, each after the longest of its users' paths::

        mm1 (2 ms) -> mm2 (3 ms) -> reduce (4 ms) -> mm3 (1 ms) -> gather (12 ms)

        mm2     next: reduce, after 3 ms: the kernel is shorter and can't hide it
        mm1     next: gather, after 2 + 3 + 4 + 1 ms: 5 ms of kernels hide the reduction
    """
    size, ms, group = len(model), model.ms, model.group
    # By place: the next collective, and milliseconds of the path up to it.
    collective, ahead_ms = [-1] * size, [0.0] * size
    for i in reversed(range(size)):
        users = model.dependencies.needed_by[i]
        if group[i] is not None:
            users = [j for j in users if model.needs_end(i, j)]
        longest = max(users, key=tail.__getitem__, default=-1)
        if longest >= 0 and group[longest] is not None:
            collective[i] = longest
        elif longest >= 0:
            collective[i], ahead_ms[i] = collective[longest], ahead_ms[longest]
        if group[i] is not None:  # its path begins after it
            continue
        ahead_ms[i] += ms[i]
        # A collective that is shorter than the path before it is hidden: go on to the next one.
        while (hidden := collective[i]) >= 0 and ms[hidden] < ahead_ms[i]:
            ahead_ms[i] += ms[hidden] + ahead_ms[hidden]
            collective[i] = collective[hidden]
    return [
        (ms[i], None, 0.0, tail[i] - ms[i])
        if place < 0
        else (ahead_ms[i], group[place], ms[place], tail[place])
        for i, place in enumerate(collective)
    ]


def sooner_ms(first: Send, second: Send, busy_first: float, busy_second: float) -> float:
    """Compute how much sooner the step ends with the first kernel's path ahead of the second's.

    Negative milliseconds: the second path had better go ahead. Longest paths don't decide this. Two
    chunks of tokens have equally long paths, so their kernels would alternate, and the stream of
    both chunks' collectives would be idle until both are ready::

        compute    | a | b | a | b |              | a     | b     |
        group                   [ of a ][ of b ]          [ of a ][ of b ]

    Both paths run through to their next collectives. Collectives of one group run one after the
    other; ``busy_first`` and ``busy_second`` are the milliseconds until their streams are free.
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


# --- sorts of nodes -------------------------------------------------------------------------------

_MOST_ADDED = 2**62
"""A cap in bytes on sums over paths, which count a node once for each path to it."""


Number = NewType("Number", int)
"""The index of a kernel among the kernels of the graph. A node's place counts all nodes."""


class ModelAnalysis:
    """The sorts of nodes that :mod:`.list_schedule` defines: :attr:`.Model.analysis`.

    Nodes are known by their places, kernels by a :class:`Number`, too, in the order of the graph.

    Attributes:
        lazy: by place, whether the node is a wait, a view or the like.
        source: by place, whether the node needs no kernel.
        kernels: places of the kernels, by number.
        number_of: number of each kernel, by place; -1 for other nodes.
        compute_before: by number, compute nodes before the kernel.
        ms_before: by number, milliseconds of the kernels before it.
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
        most: by number, the most bytes live from the kernel until the next one.
        live: by number, the bytes live before the kernel.
        changes: by place, live bytes after the node less those before it.
        missing, available, ready, produced: in-degrees, lazy nodes and starts, kernels, and starts
            of computed values, before any node has run.
    """

    def __init__(self, model: NodeTable, paths: Paths) -> None:
        needs, group, live, size = (
            model.dependencies.needs,
            model.group,
            model.liveness,
            len(model),
        )
        self._sort(model)
        self.kernels = kernels = [i for i in range(size) if not self.lazy[i] and group[i] is None]
        self.number_of = number_of = [Number(-1)] * size
        for number, i in enumerate(kernels):
            number_of[i] = Number(number)
        # One entry more than there are kernels: the last one is the total.
        self.compute_before = [
            *itertools.accumulate((model.compute[i] for i in kernels), initial=0)
        ]
        self.ms_before = [*itertools.accumulate((model.ms[i] for i in kernels), initial=0.0)]
        self._find_uses(model)
        self.sends = sends_of(model, paths.tail)
        self.own_bytes = [sum(map(live.size.__getitem__, new)) for new in live.allocates]
        self.adds = adds = list(self.own_bytes)
        for i, needed in enumerate(needs):
            for j in needed:
                if number_of[j] < 0:
                    adds[i] += adds[j]
            adds[i] = min(adds[i], _MOST_ADDED)
        self._find_collectives(model)
        self._find_available(model)
        needs_nothing, fillers = [False] * size, list[int]()
        for i, needed in enumerate(needs):
            needs_nothing[i] = (
                self.source[i] and group[i] is None and all(needs_nothing[j] for j in needed)
            )
            if (
                needs_nothing[i]
                and self.lazy[i]
                and model.ms[i]
                and self.first_use[i] < len(kernels)
            ):
                fillers.append(i)
        self.fillers = sorted(fillers, key=self.first_use.__getitem__)
        self.latest = self._latest_starts(model)
        self.most, self.changes = self._live_at_kernels(model)
        before = [*itertools.accumulate(self.changes, initial=live.at_start)]
        self.live = [before[i] for i in kernels]

    def _sort(self, model: NodeTable) -> None:
        """Find the nodes that need no kernel, and the lazy ones."""
        group, size = model.group, len(model)
        self.lazy, self.source = lazy, source = [False] * size, [False] * size
        for i, needed in enumerate(model.dependencies.needs):
            if model.compute[i]:
                continue
            start = group[i] is not None
            free = group[i] != TO_HOST  # such a copy follows its value at once
            for j in needed:
                if not source[j] and not (start and group[j] is not None):  # only ordered
                    free = False
                    break
            source[i] = free
            lazy[i] = not start and (free or model.start_of[i] >= 0 or model.view[i])

    def _find_uses(self, model: NodeTable) -> None:
        """Find the first kernel that needs each node, and the nodes that run right after it."""
        group, needed_by, number_of = model.group, model.dependencies.needed_by, self.number_of
        never, dead_ends = Number(len(self.kernels)), [False] * len(model)
        self.first_use = first_use = [never] * len(model)
        for i in reversed(range(len(model))):
            first, dead = never, self.lazy[i] and model.start_of[i] < 0
            for j in needed_by[i]:
                dead = dead and dead_ends[j]
                if group[i] is not None and group[j] is not None:  # only ordered
                    continue
                use = number_of[j] if number_of[j] >= 0 else first_use[j]
                if use < first:
                    first = use
            first_use[i] = first
            # A part of a gathered parameter that is kept is a dead end: it frees the rest.
            dead_ends[i] = dead and _adds_less(model, i)
        needs = model.dependencies.needs
        self.free_dead_ends = [i for i, dead in enumerate(dead_ends) if dead and not needs[i]]
        # Items of several results run at once, too: until then all results are live.
        at_once = [
            dead or node.target is operator.getitem
            for dead, node in zip(dead_ends, model.dependencies.nodes, strict=True)
        ]
        self.run_after = [[j for j in users if at_once[j]] for users in needed_by]

    def _find_collectives(self, model: NodeTable) -> None:
        self.gathers: dict[str, list[int]] = {}
        self.wait_of: dict[int, int] = {}
        self.reductions: dict[str, list[int]] = {}
        for i, name in enumerate(model.group):
            # A start that reaches no kernel is not a gather: a reduction of an input, for one.
            if name is not None and self.source[i] and self.first_use[i] < len(self.kernels):
                self.gathers.setdefault(name, []).append(i)
            if model.start_of[i] >= 0:
                self.wait_of[model.start_of[i]] = i
        for i in reversed(range(len(model))):
            if model.reduces[i]:
                self.reductions.setdefault(str(model.group[i]), []).append(i)

    def _find_available(self, model: NodeTable) -> None:
        """Find the state before any node has run.

        Nodes other than kernels take no time on the compute stream, so one without open needs is
        available, and does not count among the needs of others. Places ascend along dependencies,
        so one pass finds them all::

            wait of no kernel's result -> view -> mm        wait, view: available    mm: ready
        """
        self.missing = [len(n) for n in model.dependencies.needs]  # in-degrees
        self.available = [False] * len(model)  # by place
        self.ready: list[Number] = []
        self.produced: list[int] = []  # places of starts whose inputs are computed
        for i in range(len(model)):
            if self.missing[i]:
                continue
            if self.number_of[i] >= 0:
                self.ready.append(self.number_of[i])
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
                before = (self.ms_before[self.number_of[j]] for j in self._last_kernels(model, i))
                level = model.shared.get(group, group)
                load.setdefault(level, []).append((max(before, default=0.0), model.ms[i]))
        latest: dict[int, float] = {}
        for group, gathers in self.gathers.items():
            others = sorted(load.get(model.shared.get(group, group), []))
            uses = [(self.ms_before[self.first_use[i]], model.ms[i]) for i in gathers]
            starts = latest_starts(uses, others, self.ms_before[-1])
            latest.update(zip(gathers, starts, strict=True))
        return latest

    def first_uses(self) -> dict[int, int]:
        """Map each gather to the first kernel that needs it, both by place."""
        return {
            i: self.kernels[self.first_use[i]] for gathers in self.gathers.values() for i in gathers
        }

    def _last_kernels(self, model: NodeTable, i: int) -> list[int]:
        """List the kernels that ``i`` needs with only lazy nodes between."""
        last, seen, stack = list[int](), {i}, [i]
        while stack:
            node = stack.pop()
            for j in model.dependencies.needs[node]:
                if j in seen or model.only_ordered(j, node):
                    continue
                seen.add(j)
                if self.number_of[j] >= 0:
                    last.append(j)
                elif self.lazy[j] and not self.source[j]:
                    stack.append(j)
        return last

    def _live_at_kernels(self, model: NodeTable) -> tuple[list[int], list[int]]:
        """Compute the most live bytes of each kernel, and the change of live bytes by each node."""
        live, most, changes = LiveBytes(model.liveness), list[int](), list[int]()
        for i, number in enumerate(self.number_of):
            if number >= 0:
                most.append(0)
            before, during = live.now, live.run(i)
            changes.append(live.now - before)
            if most and during > most[-1]:
                most[-1] = during
        return most, changes


def _adds_less(model: NodeTable, i: int) -> bool:
    """Return whether a node leaves no more bytes live than it frees."""
    live, allocated = model.liveness, model.liveness.allocates[i]
    added = sum(live.size[s] for s in allocated if s in live.kept)
    read = sum(live.size[s] for s in live.touches[i] if s not in live.kept and s not in allocated)
    return not added or added < read


def latest_starts(
    gathers: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], end_ms: float
) -> list[float]:
    """Compute when each gather of a stream must begin so that none delays its use.

    Times are milliseconds of the kernels' time. ``gathers``: use and duration, in the order of
    launch. ``others``, the stream's other collectives, move the deadline of the gathers before them
    forward: earliest begin and duration, ascending. ``end_ms``: the end of the last kernel.
    """
    starts, bound, gathers_left = [0.0] * len(gathers), end_ms, len(others)
    for i in reversed(range(len(gathers))):
        use_ms, ms = gathers[i]
        bound = min(bound, use_ms)
        while gathers_left and others[gathers_left - 1][0] >= bound:
            gathers_left -= 1
        bound -= ms
        while gathers_left and others[gathers_left - 1][0] >= bound:
            gathers_left -= 1
            bound -= others[gathers_left][1]
        starts[i] = bound
    return starts
