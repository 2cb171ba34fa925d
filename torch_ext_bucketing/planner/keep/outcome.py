"""Describe a choice of units that stay: its outcome, its units, and why no more is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...reports.base import size_text
from ...reports.planner import KeptUnit
from ..schedule.orders import rank
from .held import HeldUnits

_SHOWN = 16  # of equal gathers, whose gains are evaluated for the report


@dataclass(frozen=True)
class Outcome:
    """Schedules of forward and backward with a choice."""

    kept: frozenset[int]  # indices of the keepables
    step_ms: float  # sum of both halves
    peak_bytes: int  # larger peak of both halves
    above: int  # bytes of the peak above the bound
    misses: float  # sum over other bounds of (value - bound) / bound
    # Storages that wait in ``host_bytes`` of pinned memory for backward.
    parked: frozenset[int] = frozenset()
    host_bytes: int = 0

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, the smallest is the best; of equals the one that parks less, or keeps more."""
        return self.above, *rank(self.misses, self.step_ms, self.host_bytes, -len(self.kept))

    def __lt__(self, other: Outcome) -> bool:
        return self.rank < other.rank


def units_of(
    kept: frozenset[int],
    kinds: Sequence[Sequence[int]],
    held: HeldUnits,
    backward_ms: Callable[[frozenset[int]], float],
) -> tuple[KeptUnit, ...]:
    """Describe each unit that could stay; ``kinds`` are equal ones, by their numbers.

    ``backward_ms`` estimates backward's time with a choice.
    """
    now_ms, saved = backward_ms(kept), dict[int, float]()
    for kind, keeps in itertools.product(kinds, (False, True)):
        some = [k for k in sorted(kind) if (k in kept) == keeps]
        # Of many equal blocks one in several is evaluated: its neighbours differ little.
        each = -(-len(some) // _SHOWN)
        for number, k in enumerate(some):
            if not held.keepables[k].starts:
                saved[k] = held.again_ms[k]
            elif number % each == 0:
                saved[k] = abs(backward_ms(kept ^ {k}) - now_ms)
            else:
                saved[k] = saved[some[number - number % each]]
    named = ((k, held.keepables[k]) for k in sorted(saved))
    return tuple(
        KeptUnit(u.name, k in kept, u.nbytes, held.again_ms[k], saved[k], len(u.fqns), u.whole >= 0)
        for k, u in named
    )


def warning_of(
    chosen: Outcome, limit: int, kinds: Sequence[Sequence[int]], held: HeldUnits, at_start: int
) -> str:
    """Explain why a bound in bytes is not kept, or nothing is; empty otherwise.

    ``at_start``: bytes that are live before backward begins, with nothing kept.
    """
    bound = f"the bound of {size_text(limit)}"
    if chosen.above:
        return (
            f"{len(chosen.kept) or 'nothing'} is kept: the smallest peak found is "
            f"{size_text(chosen.peak_bytes)}, {size_text(chosen.above)} above {bound}; before "
            f"backward begins {size_text(at_start)} are there with nothing kept"
        )
    if chosen.kept or not kinds:
        return ""
    peaks = {kind[-1]: held.peak_bytes(kind[-1:]) for kind in kinds}
    k = min(peaks, key=lambda k: (peaks[k], k))
    if peaks[k] > limit:
        return (
            f"nothing is kept: the cheapest unit, {held.keepables[k].name}, needs a peak of "
            f"{size_text(peaks[k])}, {size_text(peaks[k] - limit)} above {bound}"
        )
    return f"nothing is kept: no unit makes the step shorter under {bound}"
