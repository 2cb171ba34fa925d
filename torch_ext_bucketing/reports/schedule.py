"""What scheduling did to one graph."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from .text import aligned

__all__ = ["ScheduleReport"]


@dataclass(frozen=True)
class ScheduleReport:
    """What :func:`.schedule` reached. Pairs are before and after; times are the cost
    model's, in milliseconds.

    Args:
        policies: what was asked for.
        step_ms: time of the graph.
        bound_ms: what no order can beat: the largest of longest path, compute, busiest group.
        compute_ms: time that the compute stream is busy.
        exposed_ms: time that it waits for communication.
        peak_bytes: estimated peak of live bytes.
        reference_bytes: the peak that ratios refer to.
        limit_bytes: the memory bound; None where none was asked for.
        longest_run: most compute nodes between two reduce-scatters.
        max_run: its bound, or None.
        forced_run: what dependencies force some run to be at least, in any order.
        misses: by how much bounds are missed, as parts of them added up; 0: all are kept.
        chosen: which of the orders tried was taken.
        alternatives: all of them: name, step in ms, peak in bytes.
        caps_mb: byte cap in MiB per process group and kind, such as ``"0 all_gather"``, where caps
            were chosen here.
        cap_alternatives: all that were tried: the caps, step in ms, peak in bytes, misses.
        notes: what was asked for and does not apply to this graph.
        warnings: the bounds that are not kept, or why the graph kept its order.
        order: the movable nodes' names, in the new order.
        seconds: what it took.
    """

    policies: tuple[str, ...] = ()
    step_ms: tuple[float, float] = (0.0, 0.0)
    bound_ms: float = 0.0
    compute_ms: float = 0.0
    exposed_ms: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    reference_bytes: int = 0
    limit_bytes: int | None = None
    longest_run: tuple[int, int] = (0, 0)
    max_run: int | None = None
    forced_run: int = 0
    misses: float = 0.0
    chosen: str = "as given"
    alternatives: tuple[tuple[str, float, int], ...] = ()
    caps_mb: tuple[tuple[str, float], ...] = ()
    cap_alternatives: tuple[tuple[tuple[tuple[str, float], ...], float, int, float], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def with_caps(self, search: ScheduleReport) -> ScheduleReport:
        """This report, with what a search for caps found."""
        return replace(self, caps_mb=search.caps_mb, cap_alternatives=search.cap_alternatives)

    def to_text(self) -> str:
        """A few lines."""
        return _schedule_text(self)


def _schedule_text(report: ScheduleReport) -> str:
    """See :meth:`.ScheduleReport.to_text`."""
    gib = 2**30
    limit = "" if report.limit_bytes is None else f", bound {report.limit_bytes / gib:.2f}"
    rows: list[tuple[str, ...]] = [
        ("", "before", "after", ""),
        (
            "step, ms",
            f"{report.step_ms[0]:.2f}",
            f"{report.step_ms[1]:.2f}",
            f"lower bound {report.bound_ms:.2f}, {report.chosen}",
        ),
        ("exposed, ms", f"{report.exposed_ms[0]:.2f}", f"{report.exposed_ms[1]:.2f}", ""),
        (
            "peak, GiB",
            f"{report.peak_bytes[0] / gib:.2f}",
            f"{report.peak_bytes[1] / gib:.2f}",
            f"unreordered {report.reference_bytes / gib:.2f}{limit}",
        ),
        (
            "longest compute run",
            str(report.longest_run[0]),
            str(report.longest_run[1]),
            ""
            if report.max_run is None
            else f"bound {report.max_run}, dependencies force {report.forced_run}",
        ),
    ]
    if report.caps_mb:
        caps = ", ".join(f"{cap:g} for {name}" for name, cap in report.caps_mb)
        rows.append(("byte cap, MiB", "", "", f"{caps}, of {len(report.cap_alternatives)} tried"))
    return "\n".join([*aligned(rows, right=(1, 2)), *report.notes, *report.warnings]) + "\n"
