"""What units that stay gathered hold from forward to backward, in the order of the graph.

A unit is held from its last use in forward to its first in backward; the buffers of the gathers
that are saved are not there. Exact, and cheap enough to ask for many choices.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection

from ..schedule.model import Model
from .partitioned import PartitionedModel, Stay


class HeldBytes:
    """Bytes and times of the units of a joint graph, by their places in it.

    Args:
        partitioned: of the joint graph.

    Attributes:
        again_ms: time that what makes each unit again takes in backward: its gathers keep their
            streams busy for as long, its activations the kernels. Of a part what its gathers take
            more than those of the smaller group.
        held_ms: how long each unit is held, from forward to backward, in kernels' time.
    """

    def __init__(self, partitioned: PartitionedModel) -> None:
        self._partitioned = partitioned
        forward, backward = partitioned.forward, partitioned.backward
        self._forward, self._backward = _Half(forward), _Half(backward)
        self.again_ms = [0.0 for _ in partitioned.units]
        for i, k in enumerate(partitioned.unit_of_place(backward)):
            if k is not None:
                gathers = bool(partitioned.units[k].starts)
                if not gathers or backward.group[i] is not None:
                    self.again_ms[k] += backward.ms[i]
        for k, part in partitioned.parts.items():
            again = (
                (backward.ms[i], row["ms"]) for i, row in part.changes.items() if "group" in row
            )
            self.again_ms[k] = sum(ms - smaller for ms, smaller in again)
            self._forward.last.update(part.made)
            self._backward.first.update(part.read)
        self.held_ms = []
        for unit in partitioned.units:
            places = [self._forward.last[s] for s in unit.held if s in self._forward.last]
            last = max(places, default=len(forward)) + bool(places)
            first = max((self._backward.first[s] for s in unit.held), default=0)
            clocks = self._forward.clock, self._backward.clock
            self.held_ms.append(clocks[0][-1] - clocks[0][last] + clocks[1][first])

    def peak_bytes(self, kept: Collection[int]) -> int:
        """The peak of both halves with the units ``kept``."""
        stay = self._partitioned.stay(kept)
        forward, backward = self._forward, self._backward
        size, end = backward.model.liveness.size, len(forward.model)
        steps = [0] * (end + 1)
        for s in stay.held:
            if s in forward.last and s not in forward.model.liveness.kept:
                steps[forward.last[s] + 1] += size[s]
        for s in stay.dropped:
            if s in forward.last:
                steps[forward.last[s] + 1] -= size[s]
        return max(forward.peak(steps), backward.peak(self._changes(stay)))

    def _changes(self, stay: Stay) -> list[int]:
        """How the bytes that are live in backward change from place to place, against nothing
        kept."""
        live, touched_by = self._backward.model.liveness, self._partitioned.touched_by
        steps = [0] * (len(self._backward.model) + 1)
        held, touched = set(stay.held), dict[int, None]()
        for i, there in enumerate(stay.places):
            if not there:
                touched.update(dict.fromkeys(live.touches[i]))
                touched.update(dict.fromkeys(live.allocates[i]))
        for s in touched:
            nbytes, first = live.size[s], self._backward.first.get(s, 0)
            last = max((i for i in touched_by[s] if stay.places[i]), default=-1)
            if s in held:
                steps[0] += nbytes
                steps[first] -= nbytes
            if s in live.kept:
                continue
            # Freed earlier, or not there at all.
            steps[last + 1 if last >= 0 else first] -= nbytes
            steps[self._backward.last[s] + 1] += nbytes
        for part in stay.parts:
            for s, i in part.read.items():
                steps[0] += live.size[s]
                steps[i + 1] -= live.size[s]
            for i, nbytes in part.more.items():
                steps[i] += nbytes
                steps[i + 1] -= nbytes
        return steps


class _Half:
    """Forward or backward, with nothing kept.

    Attributes:
        clock: milliseconds of the kernels before each place, and of all.
        first: where a storage is allocated, for those that are.
        last: where it is last touched.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        live = model.liveness
        self._live = live.profile(range(len(model)))
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for i in range(len(model)):
            self.first.update(dict.fromkeys(live.allocates[i], i))
            self.last.update(dict.fromkeys(live.touches[i], i))
        kernels = (0.0 if group else ms for ms, group in zip(model.ms, model.group, strict=True))
        self.clock = list(itertools.accumulate(kernels, initial=0.0))

    def peak(self, steps: list[int]) -> int:
        return max(map(operator.add, self._live, itertools.accumulate(steps)), default=0)
