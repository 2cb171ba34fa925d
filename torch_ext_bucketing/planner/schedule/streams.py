"""Streams of collectives: one after the other in each process group, groups in parallel.

Groups on one level of a network share it: each of n busy groups gets one n-th of the bandwidth.
Groups on unknown levels don't slow each other down::

    group a   [ gather, alone 4 ms  ]            begins at 0
    group b        [ reduce, 2 ms ]              begins at 1: both at half the rate until 5
    a again at its full rate                     3 - 4 / 2 = 1 ms left at 5, done at 6
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

_DONE_MS = 1e-12


class Streams:
    """The streams of all groups of a model. Launches come in the order of time.

    Args:
        group: the process group of each collective, by place.
        ms: milliseconds of each node alone on its level.
        shared: the network level of each group that shares one.

    Attributes:
        begin: milliseconds at the begin of each node, by place.
        end: milliseconds at its end.
    """

    def __init__(
        self, group: Sequence[str | None], ms: Sequence[float], shared: Mapping[str, str]
    ) -> None:
        self._group, self._ms = group, ms
        self.begin, self.end = [0.0] * len(ms), [0.0] * len(ms)
        self._free: dict[str, float] = {}
        levels = {level: _Level(self.begin, self.end) for level in shared.values()}
        self._level = {g: levels[level] for g, level in shared.items()}

    def launch(self, i: int, now: float) -> None:
        """Launch collective ``i``, and delay the ``end`` of others on its level."""
        group = self._group[i]
        assert group is not None
        level = self._level.get(group)
        if level is not None:
            level.launch(i, group, now, self._ms[i])
            return
        self.begin[i] = max(now, self._free.get(group, 0.0))
        self.end[i] = self._free[group] = self.begin[i] + self._ms[i]

    def would_end(self, i: int, now: float) -> float:
        """Return the end of collective ``i`` if it launched at ``now`` and no other one after."""
        group = self._group[i]
        assert group is not None
        level = self._level.get(group)
        if level is not None:
            return level.would_end(group, now, self._ms[i])
        return max(now, self._free.get(group, 0.0)) + self._ms[i]

    def last_end(self) -> float:
        """Return the end of the last collective."""
        return max(self.end, default=0.0) if self._level else max(self._free.values(), default=0.0)


class _Level:
    """The groups of one network level. ``begin`` and ``end`` assume that no more launches come."""

    def __init__(self, begin: list[float], end: list[float]) -> None:
        self._begin, self._end = begin, end
        self._queues: dict[str, deque[list[float]]] = {}  # by group: place, milliseconds left
        self._clock = 0.0

    def launch(self, i: int, group: str, now: float, ms: float) -> None:
        self._clock = self._run(self._queues, self._clock, now)
        queue = self._queues.setdefault(group, deque())
        if not queue:
            self._begin[i] = now
        queue.append([i, ms])
        ahead = {g: deque([list(entry) for entry in q]) for g, q in self._queues.items()}
        self._run(ahead, self._clock, math.inf)

    def would_end(self, group: str, now: float, ms: float) -> float:
        self._clock = self._run(self._queues, self._clock, now)
        queue = self._queues.get(group)
        begin = self._end[int(queue[-1][0])] if queue else now
        # Each other group takes as much time as this collective, or as long as it is busy.
        others = (sum(left for _, left in q) for g, q in self._queues.items() if g != group)
        return begin + ms + sum(min(ms, left) for left in others)

    def _run(self, queues: Mapping[str, deque[list[float]]], clock: float, until: float) -> float:
        """Advance ``queues``, and return the time reached: ``until`` if that is finite."""
        while clock < until:
            busy = [q for q in queues.values() if q]
            if not busy:
                break
            step = min(until - clock, min(q[0][1] for q in busy) * len(busy))
            clock += step
            for queue in busy:
                queue[0][1] -= step / len(busy)
                if queue[0][1] > _DONE_MS:
                    continue
                self._end[int(queue.popleft()[0])] = clock
                if queue:
                    self._begin[int(queue[0][0])] = clock
        return until if until < math.inf else clock
