"""The movable nodes of a graph as columns, one entry per node.

Longest paths of a model, and lower bounds of its step.

Both are cheap. Most plans and most orders that are compared are given up for a bound.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.liveness import Storages


@dataclass(frozen=True, eq=False)
class NodeTable:
    """The movable nodes of a graph, by place; see :func:`.model_of`.

    Args:
        dependencies: the nodes and their dependencies.
        liveness: the storages that each node allocates and touches.
        ms: milliseconds on the node's stream; 0 for nodes of uneven shards (:mod:`.graph.uneven`)
            and for nodes without a user.
        group: a collective's process group, or None.
        start_of: the place of a wait's collective, or -1.
        compute: whether the node is a compute node.
        reduces: whether it is a reduce-scatter.
        view: whether it runs no kernel.
        host: milliseconds that the host takes to launch the node.
        graph: the analysis of the graph that the table was made from.
        members: the starts in a planned bucket, by the place of the bucket's start.
        shared: the network level of each group that shares it with others.
    """

    dependencies: Precedence
    liveness: Storages
    ms: list[float]
    group: list[str | None]
    start_of: list[int]
    compute: list[bool]
    reduces: list[bool]
    view: list[bool]
    host: list[float]
    graph: GraphAnalysis
    members: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ms)

    def streams_of(self, group: str | None) -> tuple[str | None, ...]:
        """List the streams that a collective of ``group`` keeps busy, or a kernel (None).

        A group that shares its network level keeps that busy, too.
        """
        level = None if group is None else self.shared.get(group)
        return (group,) if level is None else (group, level)

    def only_ordered(self, before: int, after: int) -> bool:
        """Return whether both are starts: ``after`` then only launches after ``before``."""
        return self.group[before] is not None and self.group[after] is not None

    def needs_end(self, before: int, after: int) -> bool:
        """Return whether ``after``, which needs ``before``, can't begin before it has ended.

        A start is an exception unless ``after`` is its wait: a write to its input, for one, only
        needs its launch.
        """
        if self.group[before] is None:
            return True
        start = self.start_of[after]
        return start == before if start >= 0 else self.view[after]


_NEAR = 500
"""Kernels between two collectives count up to this distance of their places."""

_ROUNDED_MS = 1e-3
"""The most that rounding leaves of a sum after all its times were subtracted."""


class Rest(NamedTuple):
    """The stream's critical tail: the nodes that bound the end of the step.

    Args:
        ms: their milliseconds, one after the other.
        after_ms: the least milliseconds after each of them; other nodes of the stream have less.
    """

    ms: float
    after_ms: float


class Paths:
    """The longest paths of a model: :attr:`.Model.paths`.

    A stream is that of the kernels (None) or of a process group. A network level that groups share
    is a stream, too.

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
        found = {}
        for stream, work in self._work.items():
            most, total = Rest(0.0, 0.0), 0.0
            for after, ms in sorted(((self.tail[i] - ms, ms) for i, ms in work), reverse=True):
                total += ms
                if total + after >= most.ms + most.after_ms:
                    most = Rest(total, after)
            found[stream] = most
        return found

    @cached_property
    def bound_ms(self) -> float:
        """The least milliseconds of any order.

        It is the longest path, or the time of a stream whose nodes each come after the longest path
        to them and before the longest one from them. The host is one, too.
        """
        model, tail = self._model, self.tail
        launches = [(0.0, ms, after) for ms, after in zip(model.host, tail, strict=True) if ms]
        head = _longest(model, True, self._between)
        least = max((a + b - ms for a, b, ms in zip(head, tail, model.ms, strict=True)), default=0)
        least = max(least, _one_after_the_other(launches))
        for mine in self._work.values():
            work = [(head[i] - ms, ms, tail[i] - ms) for i, ms in mine if ms]
            least = max(least, _one_after_the_other(work))
        return least

    @cached_property
    def _work(self) -> dict[str | None, list[tuple[int, float]]]:
        """List the nodes of each stream, with their milliseconds."""
        found: dict[str | None, list[tuple[int, float]]] = {None: []}
        for i, (group, ms) in enumerate(zip(self._model.group, self._model.ms, strict=True)):
            for stream in self._model.streams_of(group):
                found.setdefault(stream, []).append((i, ms))
        return found


class Remaining:
    """The open nodes of a model whose nodes begin one after the other.

    Attributes:
        kernels_ms: milliseconds of the open kernels.
    """

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
        left, least = self._ms[stream], free_ms
        if left > _ROUNDED_MS:
            least += left + self._rest[stream].after_ms
        return max(least, free_ms + self.kernels_ms) if stream is None else least


def _one_after_the_other(work: list[tuple[float, float, float]]) -> float:
    """Compute the earliest end of a stream's nodes by Jackson's preemptive rule.

    Of the nodes that can begin, the one with the longest tail runs, until one with a longer tail
    can begin.

    Args:
        work: each node's earliest begin, duration and tail, in milliseconds.
    """
    coming = sorted(work, reverse=True)
    waiting: list[tuple[float, float]] = []  # negative tails, with the milliseconds left
    now = end = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, ms, tail = coming.pop()
            heapq.heappush(waiting, (-tail, ms))
        minus_tail, left = heapq.heappop(waiting)
        until = coming[-1][0] if coming else math.inf
        if now + left > until:
            heapq.heappush(waiting, (minus_tail, left - (until - now)))
            now = until
        else:
            now += left
            end = max(end, now - minus_tail)
    return end


def _longest(model: NodeTable, back: bool, known: dict[tuple[int, int], float]) -> list[float]:
    """Compute, by place, the longest path from the node, or to it (``back``), in milliseconds.

    ``known`` keeps the time of the kernels between two collectives. Both directions mostly meet the
    same pairs.

    The time between two collectives of a path is that of all kernels between them, because these
    share the compute stream::

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
        if group[i] is not None and near[i] >= 0 and abs(i - near[i]) <= _NEAR:
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
    found, stack = set[int](), [end]
    while stack:
        node = stack.pop()
        for j in needs[node]:
            if j in after and j not in found and (group[j] is None or model.needs_end(j, node)):
                found.add(j)
                stack.append(j)
    return found
