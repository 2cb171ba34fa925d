"""Run an order on the host, one compute stream and one stream per process group.

The host launches one node after the other. Kernels begin when they are launched, and their stream
and their inputs are ready. A collective begins when it is launched, its group's stream is free and
the compute stream has reached it. A wait holds the compute stream until its collective ends, and
does not hold the host::

    host       mm cat rs mm mm wait mm
    compute       mm   cat   mm  mm  |exposed| wait  mm
    group 0                 [ reduce_scatter ]

Groups run in parallel. Those on one level of a network share it: each of n busy groups gets one
n-th of the bandwidth. Groups on unknown levels don't slow each other down::

    group a   [ gather, alone 4 ms  ]            begins at 0
    group b        [ reduce, 2 ms ]              begins at 1: both at half the rate until 5
    a again at its full rate                     3 - 4 / 2 = 1 ms left at 5, done at 6
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...fsdp.rank_order import SUM
from ...graph.nodes import OPTIMIZER, noted
from ..cost.cost import Costs
from .analysis import NodeTable
from .model import Model

_DONE_MS = 1e-12
"""The most that rounding leaves of a collective that is done."""


class Streams:
    """The host and all streams of a model. Nodes run in the order of :meth:`run`.

    Attributes:
        now: milliseconds that the compute stream has reached.
        begin: milliseconds at the begin of each node, by place. Those of collectives on shared
            levels, and their ``end``, hold as long as no further ones launch.
    """

    def __init__(self, model: NodeTable) -> None:
        self._ms, self._host = model.ms, model.host
        self._group, self._start_of = model.group, model.start_of
        self.begin, self.end = [0.0] * len(model.ms), [0.0] * len(model.ms)
        self.now = self._launched = 0.0
        self._free: dict[str, float] = {}
        levels = {level: _Level(self.begin, self.end) for level in model.shared.values()}
        self._level = {group: levels[level] for group, level in model.shared.items()}

    def run(self, i: int) -> float:
        """Run node ``i`` after the nodes that it needs; return :attr:`now`."""
        # This runs for each node of each order, so it calls nothing for a kernel.
        clock_ms, launched = self.now, self._launched + self._host[i]
        self._launched = launched
        if launched > clock_ms:
            clock_ms = launched
        group = self._group[i]
        if group is not None:
            self.now = clock_ms
            level = self._level.get(group)
            if level is not None:
                level.launch(i, group, clock_ms, self._ms[i])
            else:
                begin = self.begin[i] = max(clock_ms, self._free.get(group, 0.0))
                self.end[i] = self._free[group] = begin + self._ms[i]
            return clock_ms
        start = self._start_of[i]
        if start >= 0 and self.end[start] > clock_ms:
            clock_ms = self.end[start]
        self.begin[i] = clock_ms
        self.now = self.end[i] = clock_ms = clock_ms + self._ms[i]
        return clock_ms

    def would_end(self, i: int) -> float:
        """Return the end of collective ``i`` if it launched now and no other one after."""
        group = self._group[i]
        assert group is not None
        level = self._level.get(group)
        if level is not None:
            return level.would_end(group, self.now, self._ms[i])
        return max(self.now, self._free.get(group, 0.0)) + self._ms[i]

    def last_end(self) -> float:
        """Return the end of the last stream."""
        ends = self.end if self._level else self._free.values()
        return max(self.now, max(ends, default=0.0))


class _Level:
    """The groups of one network level. ``begin`` and ``end`` assume that no more launches come."""

    def __init__(self, begin: list[float], end: list[float]) -> None:
        self._begin, self._end = begin, end
        self._queues: dict[str, deque[list[float]]] = {}  # by group: place, milliseconds left
        self._clock = 0.0

    def launch(self, i: int, group: str, now: float, ms: float) -> None:
        """Launch collective ``i`` at ``now``, and time all that is in flight anew."""
        self._clock = self._run(self._queues, self._clock, now)
        queue = self._queues.setdefault(group, deque())
        if not queue:
            self._begin[i] = now
        queue.append([i, ms])
        # Ends are known only as far as nothing else launches, so they are computed anew each time.
        ahead = {g: deque([list(entry) for entry in q]) for g, q in self._queues.items()}
        self._run(ahead, self._clock, math.inf)

    def would_end(self, group: str, now: float, ms: float) -> float:
        self._clock = self._run(self._queues, self._clock, now)
        queue = self._queues.get(group)
        begin = self._end[int(queue[-1][0])] if queue else now
        # Each other group takes as much time as this collective, or as long as it is busy.
        others = (sum(ms_left for _, ms_left in q) for g, q in self._queues.items() if g != group)
        return begin + ms + sum(min(ms, ms_left) for ms_left in others)

    def _run(self, queues: Mapping[str, deque[list[float]]], clock: float, until: float) -> float:
        """Advance ``queues``, and return the time reached: ``until`` if that is finite."""
        while clock < until:
            busy = [q for q in queues.values() if q]
            if not busy:
                break
            # Each of n busy groups runs at an n-th of its rate, until the first one is done.
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


@dataclass(frozen=True, eq=False)
class Timeline:
    """An order on a machine; ``begin`` and ``end`` are milliseconds by place."""

    order: Sequence[int]
    begin: Sequence[float]
    end: Sequence[float]
    step_ms: float
    _model: Model = field(repr=False)

    @staticmethod
    def of(
        model: Model,
        order: Sequence[int] | None = None,
        streams: Streams | None = None,
        peak_bytes: int | None = None,
    ) -> Timeline:
        """Compute the timeline of ``order``, by default the graph's; ``streams`` have run it."""
        order = range(len(model)) if order is None else order
        if streams is None:
            streams = Streams(model)
            for i in order:
                streams.run(i)
        line = Timeline(order, streams.begin, streams.end, streams.last_end(), model)
        if peak_bytes is not None:
            line.__dict__["peak_bytes"] = peak_bytes
        return line

    # Most orders of a search are too long, and nobody reads more than their steps.

    @cached_property
    def compute_ms(self) -> float:
        """Milliseconds that the compute stream is busy."""
        ms, group = self._model.ms, self._model.group
        return sum(ms[i] for i in self.order if group[i] is None)

    @property
    def exposed_ms(self) -> float:
        """Milliseconds that the compute stream waits, for communication or the host, to the end."""
        return self.step_ms - self.compute_ms

    @cached_property
    def launched(self) -> Sequence[float]:
        """Milliseconds at which the host has launched each node of ``order``."""
        return [*itertools.accumulate(self._model.host[i] for i in self.order)]

    @cached_property
    def live(self) -> Sequence[int]:
        """Bytes live while each node of ``order`` runs."""
        liveness = self._model.liveness
        if self.order == range(len(self._model)):
            return liveness.own_profile
        return liveness.profile(self.order)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that are live at any time."""
        return max(self.live, default=self._model.liveness.at_start)

    @cached_property
    def longest_run(self) -> int:
        """Most compute nodes between two reduce-scatter starts, or before the first; else 0."""
        return max((run for _, run in compute_runs(self._model, self.order)), default=0)


def step_ms(model: Model, order: Sequence[int]) -> float:
    """Compute :attr:`Timeline.step_ms` alone, of all nodes or some."""
    return Timeline.of(model, order).step_ms


def compute_runs(model: Model, order: Sequence[int]) -> list[tuple[int, int]]:
    """List the reduce-scatter starts, each with the compute nodes since the one before it."""
    runs, run = list[tuple[int, int]](), 0
    for i in order:
        run += model.compute[i]
        if model.reduces[i]:
            runs.append((i, run))
            run = 0
    return runs


def rank_order_ms(model: Model, order: Sequence[int], costs: Costs) -> float | None:
    """Compute :attr:`.ScheduleReport.rank_order_ms`."""
    nodes = model.dependencies.nodes
    if not any(n.target is SUM for n in nodes):
        return None
    ms, host = costs.with_rings(nodes, model.ms, model.host)
    return step_ms(model, order) - step_ms(replace(model, ms=ms, host=host), order)


def optimizer_ms(model: Model, order: Sequence[int]) -> tuple[float, float, float] | None:
    """Compute :attr:`.ScheduleReport.optimizer_ms`."""
    places = [i for i, node in enumerate(model.dependencies.nodes) if noted(node, OPTIMIZER)]
    if not places:
        return None
    ms, host = list(model.ms), list(model.host)
    for i in places:
        ms[i] = host[i] = 0.0
    added = step_ms(model, order) - step_ms(replace(model, ms=ms, host=host), order)
    kernels = sum(model.ms[i] for i in places if model.group[i] is None)
    return added, kernels, sum(model.ms[i] for i in places if model.group[i] is not None)
