"""Count the bytes that kept units hold from forward to backward, in graph order.

A choice moves live ranges of the model's storages, and nothing is rebuilt or scheduled for it, so
that many choices can be compared. A unit is held from its last use in forward to its first in
backward; there the buffers of its gathers are not allocated.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator

from ...graph.liveness import Range
from ..schedule.model import Model
from .partitioned import PartitionedModel, Stay


class HeldUnits:
    """Peaks of choices, and times, of the units of a joint graph, by their places in it.

    Attributes:
        keepables: the units.
        again_ms: milliseconds that backward spends to make each unit again: its gathers on their
            streams, its activations in kernels. Of a part, the time that its gathers take above
            those in the smaller group.
        write_ms: milliseconds that forward's kernels take to write each unit only if it is kept.
        held_ms: how long each unit is held, from forward to backward, in kernels' time.
    """

    def __init__(self, partitioned: PartitionedModel) -> None:
        self._partitioned, self.keepables = partitioned, partitioned.keepables
        self._forward, self._backward = partitioned.forward, partitioned.backward
        backward = self._backward
        self.again_ms = [0.0 for _ in partitioned.keepables]
        for i, k in enumerate(partitioned.keepable_of_place(backward)):
            if k is not None:
                gathers = bool(partitioned.keepables[k].starts)
                if not gathers or backward.group[i] is not None:
                    self.again_ms[k] += backward.ms[i]
        sizes, unwritten = partitioned.sizes, partitioned.unwritten
        self.write_ms = [
            partitioned.costs.traffic(sum(sizes[s] for s in unit.held if s in unwritten))
            for unit in partitioned.keepables
        ]
        self._touched_by: dict[int, list[int]] = {}
        for i, used in enumerate(backward.liveness.touches):
            for s in used:
                self._touched_by.setdefault(s, []).append(i)
        self._first = {s: i for i, new in enumerate(backward.liveness.allocates) for s in new}
        self._last = {s: i for i, used in enumerate(backward.liveness.touches) for s in used}
        self._made = {s: i for i, used in enumerate(self._forward.liveness.touches) for s in used}
        read = dict(self._first)
        for k, part in partitioned.parts.items():
            again = (
                (backward.ms[i], row["ms"]) for i, row in part.changes.items() if "group" in row
            )
            self.again_ms[k] = sum(ms - smaller for ms, smaller in again)
            self._made.update(part.made)
            read.update(part.read)
        first_ms, then_ms = _kernels_before(self._forward), _kernels_before(backward)
        self.held_ms = []
        for unit in partitioned.keepables:
            places = [self._made[s] for s in unit.held if s in self._made]
            # Forward's kernels after the values are made, and backward's before they are read.
            last = max(places, default=len(self._forward)) + bool(places)
            first = max((read[s] for s in unit.held), default=0)
            self.held_ms.append(first_ms[-1] - first_ms[last] + then_ms[first])

    def peak_bytes(self, kept: Collection[int]) -> int:
        """Return the peak of both halves with the units ``kept``."""
        stay = self._partitioned.stay(kept)
        first = self._forward.liveness.peak_with(self._moved_in_forward(stay))
        return max(first, self._backward.liveness.peak_with(self._moved_in_backward(stay)))

    def _moved_in_forward(self, stay: Stay) -> Iterator[Range]:
        """Yield the live ranges that are longer or shorter than with nothing kept."""
        live, made_at, end = self._forward.liveness, self._made, len(self._forward)
        for s in stay.held:
            if s in made_at and s not in live.kept:
                yield self._partitioned.sizes[s], made_at[s] + 1, end
        for s in stay.dropped:
            if s in made_at:
                yield -live.size[s], made_at[s] + 1, end

    def _moved_in_backward(self, stay: Stay) -> Iterator[Range]:
        live, touched_by = self._backward.liveness, self._touched_by
        whole = self._partitioned.sizes
        held, runs = set(stay.held), stay.places
        touched = dict.fromkeys(s for i in stay.removed for s in live.touches[i])
        for s in touched:
            nbytes, end = live.size[s], self._last[s]
            if s in held:
                first = self._first.get(s, 0)
                yield whole[s], 0, first
                yield whole[s] - nbytes, first, end + 1  # no kernel wrote it
                nbytes = whole[s]
            if nbytes and not runs[end] and s not in live.kept:  # freed earlier, or not there
                first = self._first.get(s, 0)
                last = next((i for i in reversed(touched_by[s]) if runs[i]), first - 1)
                yield -nbytes, last + 1, end + 1
        for part in stay.parts:
            for s, i in part.read.items():
                yield whole[s], 0, i + 1
            for i, nbytes in part.more.items():
                yield nbytes, i, i + 1


def _kernels_before(model: Model) -> list[float]:
    """Sum up the milliseconds of kernels before each place, and of all."""
    kernels = (0.0 if group else ms for ms, group in zip(model.ms, model.group, strict=True))
    return list(itertools.accumulate(kernels, initial=0.0))
