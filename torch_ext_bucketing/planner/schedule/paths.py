"""The longest paths of a model, and how long its step takes at least.

Both are known long before an order is: most models of plans that are compared, and most orders of
those that are scheduled, are given up for that.
"""

from __future__ import annotations

import heapq
import math
from functools import cached_property
from typing import NamedTuple

from .nodes import NodeTable

_NEAR = 500
"""What is computed between two collectives is looked for where they are no farther apart."""

_ROUNDED_MS = 1e-3
"""What rounding may leave of times that were taken away one by one."""


class Rest(NamedTuple):
    """The nodes of a stream that keep the step from ending the longest.

    Args:
        ms: that they take, one after the other.
        after_ms: that must come after each of them, and comes after no other one of the stream.
    """

    ms: float
    after_ms: float


class Paths:
    """Facts that all orders of a model have in common: :attr:`.Model.paths`.

    A stream is that of the kernels (None), or of a process group; where groups share a network
    level, the level is one more.

    Attributes:
        tail: by place, milliseconds from the node's begin to the end at least: the longest path,
            with all that is computed between its collectives.
        kernels_ms: milliseconds of all that is no collective.
    """

    def __init__(self, model: NodeTable) -> None:
        self._model = model
        self.tail = _longest(model, back=False)
        self.kernels_ms = sum(ms for ms, g in zip(model.ms, model.group, strict=True) if g is None)

    @cached_property
    def rest(self) -> dict[str | None, Rest]:
        """By stream, what makes a step long that has come to none of its nodes yet."""
        found = {}
        for stream, work in self._work().items():
            most, total = Rest(0.0, 0.0), 0.0
            for after, ms in sorted(((self.tail[i] - ms, ms) for i, ms in work), reverse=True):
                total += ms
                if total + after >= most.ms + most.after_ms:
                    most = Rest(total, after)
            found[stream] = most
        return found

    @cached_property
    def bound_ms(self) -> float:
        """No order takes less: a longest path; or what a stream has to do, each node behind the
        longest path to it and ahead of the longest one from it."""
        model, tail = self._model, self.tail
        head = _longest(model, back=True)
        least = max((a + b - ms for a, b, ms in zip(head, tail, model.ms, strict=True)), default=0)
        for mine in self._work().values():
            work = [(head[i] - ms, ms, tail[i] - ms) for i, ms in mine if ms]
            least = max(least, _one_after_the_other(work))
        return least

    def _work(self) -> dict[str | None, list[tuple[int, float]]]:
        """By stream, its nodes, and what they take."""
        found: dict[str | None, list[tuple[int, float]]] = {None: []}
        for i, (group, ms) in enumerate(zip(self._model.group, self._model.ms, strict=True)):
            for stream in self._model.streams_of(group):
                found.setdefault(stream, []).append((i, ms))
        return found


class Remaining:
    """What is left of a model whose nodes begin one after the other.

    Attributes:
        kernels_ms: milliseconds of all that is no collective.
    """

    def __init__(self, model: NodeTable, paths: Paths) -> None:
        self._model, self._tail, self._rest = model, paths.tail, paths.rest
        self._ms = {stream: rest.ms for stream, rest in self._rest.items()}
        self.kernels_ms = paths.kernels_ms

    def begin(self, i: int, stream: str | None) -> None:
        """Node ``i`` is no longer to come on that stream."""
        ms = self._model.ms[i]
        if stream is None:
            self.kernels_ms -= ms
        if self._tail[i] - ms >= self._rest[stream].after_ms:
            self._ms[stream] -= ms

    def least_end(self, stream: str | None, free_ms: float) -> float:
        """When all ends at the earliest for what is left of a stream that is free from then on."""
        left, least = self._ms[stream], free_ms
        if left > _ROUNDED_MS:
            least += left + self._rest[stream].after_ms
        return max(least, free_ms + self.kernels_ms) if stream is None else least


def _one_after_the_other(work: list[tuple[float, float, float]]) -> float:
    """When all ends at the earliest that a stream has to do, by Jackson's preemptive rule: of what
    can begin, the one with the most behind it goes first, and is interrupted for one with more.

    Args:
        work: when each node can begin, how long it takes, and what comes behind it, in
            milliseconds.
    """
    coming = sorted(work, reverse=True)
    waiting: list[tuple[float, float]] = []  # the most behind it first, with what is left of it
    now = end = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            _, ms, behind = coming.pop()
            heapq.heappush(waiting, (-behind, ms))
        behind, left = heapq.heappop(waiting)
        until = coming[-1][0] if coming else math.inf
        if now + left > until:
            heapq.heappush(waiting, (behind, left - (until - now)))
            now = until
        else:
            now += left
            end = max(end, now - behind)
    return end


def _longest(model: NodeTable, back: bool) -> list[float]:
    """By place, milliseconds of the longest path that begins with the node, or ends with it.

    A path has one node after the other. Between two of its collectives there is more: whatever
    needs the first one's result and is needed by the second runs on the one compute stream::

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
                longest = path[j]  # one stream takes one after the other, too
        if group[i] is not None and near[i] >= 0 and abs(i - near[i]) <= _NEAR:
            between = _between(model, *sorted((i, near[i])))
            computed = sum(model.ms[j] for j in sorted(between) if group[j] is None)
            waiting_ms = max(waiting_ms, computed + path[near[i]])
        path[i] = model.ms[i] + max(longest, waiting_ms)
    return path


def _between(model: NodeTable, start: int, end: int) -> set[int]:
    """What waits for the end of ``start``, and what ``end`` waits for."""
    needs, needed_by, group = model.dependencies.needs, model.dependencies.needed_by, model.group
    behind, stack = set[int](), [start]
    while stack:
        node = stack.pop()
        for j in needed_by[node]:
            if j < end and j not in behind and (group[node] is None or model.needs_end(node, j)):
                behind.add(j)
                stack.append(j)
    found, stack = set[int](), [end]
    while stack:
        node = stack.pop()
        for j in needs[node]:
            if j in behind and j not in found and (group[j] is None or model.needs_end(j, node)):
                found.add(j)
                stack.append(j)
    return found
