"""How byte caps were chosen for one graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .base import Report

NamedCaps: TypeAlias = tuple[tuple[str, float | tuple[float, ...]], ...]


@dataclass(frozen=True)
class TriedCaps:
    """Caps that were tried on the cost model, and the best order that was found with them.

    Args:
        caps_mb: byte cap in MiB per process group and kind, such as ``"0 all_gather"``; where
            members were moved between buckets, what each of them holds.
        longest_run: most compute nodes between two reduce-scatters.
        misses: by how much bounds are missed, as parts of them added up; 0: all are kept.
        order: the name of that order, as :attr:`.ScheduleReport.chosen`.
        planner: the planner, by its ``repr``, where the plan is not by caps.
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
    """What :class:`.BySearch` tried, in that order, and what it chose: the caps that miss the
    bounds least, then the fastest. Caps that can't be faster than others were passed over and are
    not among those ``tried``. A ``warning`` says why nothing was tried and the caps are torch's
    own."""

    chosen: TriedCaps
    tried: tuple[TriedCaps, ...]
    seconds: float = 0.0
    warning: str = ""

    @property
    def caps_mb(self) -> NamedCaps:
        """As of :class:`TriedCaps`."""
        return self.chosen.caps_mb

    def to_text(self) -> str:
        """The caps or the planner that was chosen, and of how many, in one line."""
        caps = self.chosen.planner or ", ".join(
            f"{_cap_text(cap)} for {name}" for name, cap in self.caps_mb
        )
        return f"{caps}, of {len(self.tried)} tried"


def _cap_text(cap: float | tuple[float, ...]) -> str:
    if not isinstance(cap, tuple):
        return f"{cap:g}"
    return f"{len(cap)} bucket(s) of {min(cap):.3g} to {max(cap):.3g}"
