"""What units that stay gathered hold from forward to backward, in the order of the graph.

A unit is held from its last use in forward to its first in backward; the buffers of the gathers
that are saved are not there. Exact, and cheap enough to ask for many choices.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection
from dataclasses import dataclass

from .model import Model
from .partitioned import PartitionedModel


@dataclass(frozen=True)
class _Half:
    """Forward or backward.

    Args:
        live: bytes live at each place, nothing kept.
        clock: milliseconds of the kernels before each place, and of all.
        changes: by unit, how ``live`` changes where it is kept: ``(from, to, bytes)``.
    """

    live: list[int]
    clock: list[float]
    changes: list[list[tuple[int, int, int]]]

    def peak_bytes(self, kept: Collection[int]) -> int:
        steps = [0] * (len(self.live) + 1)
        for k in kept:
            for first, end, nbytes in self.changes[k]:
                steps[first] += nbytes
                steps[end] -= nbytes
        return max(map(operator.add, self.live, itertools.accumulate(steps)), default=0)


class HeldBytes:
    """Bytes and times of the units of a joint graph, by their places in it.

    Args:
        partitioned: of the joint graph.

    Attributes:
        gather_ms: time that the gathers of each unit keep their streams busy in backward.
        held_ms: how long each unit is held, from forward to backward, in kernels' time.
    """

    def __init__(self, partitioned: PartitionedModel) -> None:
        forward = self._forward = _half(partitioned, partitioned.forward, forward=True)
        backward = self._backward = _half(partitioned, partitioned.backward, forward=False)
        model, units = partitioned.backward, range(len(partitioned.units))
        owners = partitioned.unit_of_place(model)
        self.gather_ms = [0.0 for _ in units]
        for i, unit in enumerate(owners):
            if unit is not None and model.group[i] is not None:
                self.gather_ms[unit] += model.ms[i]
        self.held_ms = []
        for k in units:
            last = max((first for first, _, _ in forward.changes[k]), default=len(forward.live))
            first = max((end for _, end, n in backward.changes[k] if n > 0), default=0)
            held_ms = forward.clock[-1] - forward.clock[last] + backward.clock[first]
            self.held_ms.append(held_ms)

    def peak_bytes(self, kept: Collection[int]) -> int:
        """The peak of both halves with the units ``kept``."""
        return max(self._forward.peak_bytes(kept), self._backward.peak_bytes(kept))


def _half(partitioned: PartitionedModel, model: Model, forward: bool) -> _Half:
    live, owner = model.liveness, partitioned.unit_of_place(model)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i in range(len(model)):
        first.update(dict.fromkeys(live.allocates[i], i))
        last.update(dict.fromkeys(live.touches[i], i))
    changes: list[list[tuple[int, int, int]]] = [[] for _ in partitioned.units]
    for k, unit in enumerate(partitioned.units):
        for s in unit.held:
            if not forward:
                changes[k].append((0, first[s], live.size[s]))
            elif s in first and s not in live.kept:
                changes[k].append((last[s] + 1, len(model), live.size[s]))
    for s, i in first.items():
        mine = owner[i]
        if not forward and mine is not None and s not in partitioned.units[mine].held:
            changes[mine].append((i, last[s] + 1, -live.size[s]))
    kernels = (0.0 if group else ms for ms, group in zip(model.ms, model.group, strict=True))
    clock = list(itertools.accumulate(kernels, initial=0.0))
    return _Half(live.profile(range(len(model))), clock, changes)
