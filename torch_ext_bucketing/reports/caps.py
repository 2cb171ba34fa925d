"""The report of the search for byte caps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .base import Report

NamedCaps: TypeAlias = tuple[tuple[str, float | tuple[float, ...]], ...]


@dataclass(frozen=True)
class TriedCaps:
    """Caps that were tried on the cost model, and the best order found with them.

    Args:
        caps_mb: byte cap in MiB per process group and kind, such as ``"0 all_gather"``; if members
            were moved between buckets, the MiB of each bucket.
        longest_run: most compute nodes between two reduce-scatters.
        misses: sum over the bounds of (value - bound) / bound; 0: all are kept.
        order: name of that order, see :attr:`.ScheduleReport.chosen`.
        planner: ``repr`` of the planner, where the plan is not by caps.
    """

    caps_mb: NamedCaps
    step_ms: float
    peak_bytes: int
    longest_run: int
    misses: float
    order: str = ""
    planner: str = ""


@dataclass(frozen=True)
class CapsReport(Report):
    """The caps that :class:`.BySearch` tried and chose.

    Args:
        chosen: the caps that miss the bounds least, and of these the fastest.
        tried: in the order they were tried, without caps that can't be faster than others.
        warning: why nothing was tried, and the caps are torch's own.
    """

    chosen: TriedCaps
    tried: tuple[TriedCaps, ...]
    seconds: float = 0.0
    warning: str = ""

    @property
    def caps_mb(self) -> NamedCaps:
        """See :class:`TriedCaps`."""
        return self.chosen.caps_mb

    def to_text(self) -> str:
        """Format the chosen caps or planner, without a newline."""
        caps = self.chosen.planner or ", ".join(
            f"{_cap_text(cap)} for {name}" for name, cap in self.caps_mb
        )
        return f"{caps}, of {len(self.tried)} tried"


def _cap_text(cap: float | tuple[float, ...]) -> str:
    if not isinstance(cap, tuple):
        return f"{cap:g}"
    return f"{len(cap)} bucket(s) of {min(cap):.3g} to {max(cap):.3g}"
