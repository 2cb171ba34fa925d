"""Forward and backward in a few hundred numbers, to compare many choices of what stays gathered.

A list schedule of a graph of real size takes a tenth of a second, and there are hundreds of choices
to compare. So each half is cut where something of communication happens, with the milliseconds of
the kernels in between and the most bytes live there::

    kernels   |  3.1 ms   |  2.9 ms |   3.0 ms  |
              ^ uses gather 0       ^ uses gather 1
                          ^ launches a reduction

Streams are followed as in :mod:`.timeline`, but groups on one level of a network take turns on one
stream: gathers one ahead of their use, or as early as their stream needs, where memory allows. Live
bytes are exact for the order of the graph: keeping a unit adds what it holds from its last use in
forward to its first in backward, and takes away the buffers of the gather that is saved. What is
chosen is looked at again with a real schedule (:mod:`.scheduling.keep`).
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from .model import Model
from .model_analysis import latest_starts
from .partitioned import PartitionedModel

__all__ = [
    "CoarseSimulator",
]


@dataclass
class _Gather:
    unit: int | None
    use: int  # segment
    ms: float
    around_ms: float  # packing and unpacking, on the compute stream
    nbytes: int


@dataclass
class _CoarseHalf:
    """One half, cut into segments.

    Args:
        ms: of the kernels of each segment.
        live: most bytes live in each segment, nothing kept.
        gathers: of each process group, in the order of launch.
        launches: at the begin of each segment: ``(group, ms, number)`` of other collectives.
        waits: at the begin of each segment: the numbers of those that it waits for.
        changes: of each unit, by how much ``live`` changes where it is kept: ``(from, to, bytes)``.
        stream: of each process group: groups on one level of a network share one.
    """

    ms: list[float]
    live: list[int]
    gathers: list[list[_Gather]]
    launches: list[list[tuple[int, float, int]]]
    waits: list[list[int]]
    changes: list[list[tuple[int, int, int]]]
    stream: list[int]
    clock: list[float] = field(default_factory=list)
    load: list[list[tuple[float, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        now = 0.0
        self.load = [[] for _ in self.gathers]
        for ms, launched in zip(self.ms, self.launches, strict=True):
            self.clock.append(now)
            for group, collective_ms, _ in launched:
                self.load[self.stream[group]].append((now, collective_ms))
            now += ms
        self.clock.append(now)

    def with_kept(self, kept: Collection[int]) -> list[int]:
        """Most bytes live in each segment."""
        steps = [0] * (len(self.live) + 1)
        for k in kept:
            for first, end, nbytes in self.changes[k]:
                steps[first] += nbytes
                steps[end] -= nbytes
        return list(map(operator.add, self.live, itertools.accumulate(steps)))

    def latest(self, group: int, gathers: Sequence[_Gather]) -> list[float]:
        """When each gather must begin; see :func:`.latest_starts`."""
        uses = [(self.clock[g.use], g.ms) for g in gathers]
        return latest_starts(uses, self.load[self.stream[group]], self.clock[-1])

    def step_ms(self, kept: Collection[int], live: Sequence[int], limit: int) -> float:
        """Time of the half when the gathers of ``kept`` are not needed."""
        groups = [[g for g in mine if g.unit not in kept] for mine in self.gathers]
        gathering = [k for k, mine in enumerate(groups) if mine]
        latest = [self.latest(k, mine) for k, mine in enumerate(groups)]
        uses: dict[int, list[int]] = {}
        for k, mine in enumerate(groups):
            for g in mine:
                uses.setdefault(g.use, []).append(k)
        at = [0] * len(groups)  # the next to launch
        used = [0] * len(groups)
        end: list[list[float]] = [[] for _ in groups]
        stream, free = self.stream, [0.0] * len(groups)
        ended: dict[int, float] = {}
        now, ahead = 0.0, 0  # bytes gathered ahead of use
        for s, ms in enumerate(self.ms):
            for k, collective_ms, number in self.launches[s]:
                k = stream[k]
                free[k] = ended[number] = max(now, free[k]) + collective_ms
            for number in self.waits[s]:
                now = max(now, ended.get(number, 0.0))
            for k in uses.get(s, ()):
                g = groups[k][used[k]]
                if used[k] == at[k]:
                    free[stream[k]] = max(now, free[stream[k]]) + g.ms
                    end[k].append(free[stream[k]])
                    at[k] += 1
                else:
                    ahead -= g.nbytes
                now = max(now, end[k][used[k]]) + g.around_ms
                used[k] += 1
            clock = self.clock[s]
            for k in gathering:
                while at[k] < len(groups[k]):
                    when = now
                    if at[k] > used[k]:  # one is ahead: a further one only if time presses
                        if latest[k][at[k]] > clock + ms:
                            break
                        when += max(0.0, latest[k][at[k]] - clock)
                    g = groups[k][at[k]]
                    room = limit - ahead - g.nbytes
                    if max(live[s : g.use], default=room) > room:
                        break
                    free[stream[k]] = max(when, free[stream[k]]) + g.ms
                    end[k].append(free[stream[k]])
                    ahead += g.nbytes
                    at[k] += 1
            now += ms
        return max([now, *free])


class CoarseSimulator:
    """Step and peak for any choice of what is kept.

    Args:
        partitioned: of the joint graph.
    """

    def __init__(self, partitioned: PartitionedModel) -> None:
        self._forward = _half(partitioned, partitioned.forward, forward=True)
        self._backward = _half(partitioned, partitioned.backward, forward=False)
        self._ahead = sum(g.nbytes for mine in self._forward.gathers for g in mine)
        self._free: float | None = None
        self.segments = len(self._forward.ms) + len(self._backward.ms)
        """Of both halves: what a look at a choice costs."""
        self.held_ms = self._held_ms(partitioned)
        """How long each unit is held, from forward to backward, in kernels' time."""

    def _held_ms(self, partitioned: PartitionedModel) -> list[float]:
        forward, backward = self._forward, self._backward
        found = []
        for k in range(len(partitioned.units)):
            last = max((first for first, _, _ in forward.changes[k]), default=len(forward.ms))
            first = max((end for _, end, n in backward.changes[k] if n > 0), default=0)
            found.append(forward.clock[-1] - forward.clock[last] + backward.clock[first])
        return found

    def gather_ms(self, k: int) -> float:
        """Time that the gathers of unit ``k`` keep their streams busy in backward."""
        return sum(g.ms for mine in self._backward.gathers for g in mine if g.unit == k)

    def peak_bytes(self, kept: Collection[int]) -> int:
        """The peak of both partitioned, in the order of the graph."""
        return max(max(h.with_kept(kept), default=0) for h in (self._forward, self._backward))

    def step_ms(self, kept: Collection[int], limit: int) -> float:
        """Time of both partitioned, with prefetching under ``limit`` bytes."""
        kept = frozenset(kept)
        forward, backward = self._forward, self._backward
        live = forward.with_kept(kept)
        # The room that prefetching may need at all: above it forward takes the same time always.
        if max(live, default=0) <= limit - self._ahead:
            if self._free is None:
                self._free = forward.step_ms((), live, limit)
            first = self._free
        else:
            first = forward.step_ms((), live, limit)
        return first + backward.step_ms(kept, backward.with_kept(kept), limit)


def _half(partitioned: PartitionedModel, model: Model, forward: bool) -> _CoarseHalf:
    analysis, live = model.analysis, model.liveness
    nodes, kernels = model.dependencies.nodes, model.analysis.kernels
    owner = partitioned.unit_of_place(model)
    count, units = len(model), len(partitioned.units)
    uses = {
        i: kernels[analysis.first_use[i]] if analysis.first_use[i] < len(kernels) else count
        for i, group in enumerate(model.group)
        if group is not None
    }
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in range(count):
        # Which shards are padded, ranks differ in; all of them must cut alike.
        for s in () if nodes[i] in model.shard_side.nodes else live.allocates[i]:
            first[s] = i
        for s in live.touches[i]:
            last[s] = i
    spans: list[list[tuple[int, int, int]]] = [[] for _ in range(units)]
    for k, unit in enumerate(partitioned.units):
        if forward:
            for s in unit.held:
                if s in first and s not in live.kept:
                    spans[k].append((last[s] + 1, count, live.size[s]))
            continue
        spans[k] = [(0, first[s], live.size[s]) for s in unit.held]
    if not forward:
        for s, i in first.items():
            mine = owner[i]
            if mine is not None and s not in partitioned.units[mine].held:
                spans[mine].append((i, last[s] + 1, -live.size[s]))
    cuts = sorted(
        {0, *(x for mine in spans for a, b, _ in mine for x in (a, b))}
        | set(uses)
        | set(uses.values())
    )
    cuts = [c for c in cuts if c < count] or [0]  # half of a graph may have no nodes

    def segment(place: int) -> int:
        return len(cuts) if place >= count else bisect.bisect_right(cuts, place) - 1

    profile = live.profile(range(count))
    ends = [*cuts[1:], count]
    names = list(dict.fromkeys(g for g in model.group if g is not None))
    number = {g: k for k, g in enumerate(names)}
    levels: dict[str, int] = {}
    stream = [levels.setdefault(model.shared.get(g, g), number[g]) for g in names]
    gathers: list[list[_Gather]] = [[] for _ in names]
    launches: list[list[tuple[int, float, int]]] = [[] for _ in cuts]
    waits: list[list[int]] = [[] for _ in cuts]
    around = [0.0] * units
    ms = [0.0] * len(cuts)
    for i in range(count):
        group = model.group[i]
        if group is None:
            mine = owner[i]
            if mine is not None and not model.compute[i]:
                around[mine] += model.ms[i]
            else:
                ms[segment(i)] += model.ms[i]
            continue
        if analysis.source[i]:
            nbytes = sum(live.size[s] for s in live.touches[i] if s in first)
            use = min(segment(uses[i]), len(cuts) - 1)
            gathers[number[group]].append(_Gather(owner[i], use, model.ms[i], 0.0, nbytes))
            continue
        launches[segment(i)].append((number[group], model.ms[i], i))
        if uses[i] < count:
            waits[segment(uses[i])].append(i)
    for of_group in gathers:
        for g in of_group:
            if g.unit is not None:  # all of a unit's copies are charged to its first gather
                g.around_ms, around[g.unit] = around[g.unit], 0.0
    return _CoarseHalf(
        ms,
        [max(profile[a:b], default=0) for a, b in zip(cuts, ends, strict=True)],
        gathers,
        launches,
        waits,
        [[(segment(a), segment(b), n) for a, b, n in mine if a < b] for mine in spans],
        stream,
    )
