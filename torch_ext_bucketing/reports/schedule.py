"""What scheduling did to one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .base import Report
from .caps import CapsReport
from .text import aligned


@dataclass(frozen=True)
class PolicyReport:
    """What one policy, by its ``repr``, says of the order that was taken: its bound and what was
    reached by name, for JSON, and in a few words for a line of the text (empty: no line); and by
    how much the bound is missed and what stands in the way (empty: it is kept)."""

    policy: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    warning: str = ""


@dataclass(frozen=True)
class ScheduleReport(Report):
    """What :func:`.schedule` reached. Pairs are before and after; times are the cost model's, in
    milliseconds; ``peak_bytes`` are estimates of live bytes.

    Args:
        policies: what was asked for.
        machine: what times are for, and how many ranks a node is taken to have.
        bound_ms: what no order can beat: the largest of longest path, compute, busiest group.
        exposed_ms: time that the compute stream waits for communication.
        reference_bytes: the peak that ratios refer to.
        longest_run: most compute nodes between two reduce-scatters.
        bounds: what each policy says of it.
        misses: by how much bounds are missed, as parts of them added up; 0: all are kept.
        chosen: which of the orders tried, ``alternatives`` (name, ms, bytes), was taken.
        caps: how the byte caps of the graph's buckets were chosen, where that was part of it.
        notes: what was asked for and does not apply to this graph, or is no more than a guess.
        warnings: the bounds that are not kept, or why the graph kept its order.
        order: the movable nodes' names, in the new order.
        bounds_cost_ms: by how much an order of the same graph without any bound would be faster.
        rank_order_ms: by how much the step would be shorter with rings, in this order, where
            gradients are added in the order of the ranks; None: none are.
        size_hints: what sizes that depend on data were taken as; empty: there are none.
        seconds: what it took.
    """

    derived = ("limit_bytes",)
    policies: tuple[str, ...] = ()
    machine: str = ""
    step_ms: tuple[float, float] = (0.0, 0.0)
    bound_ms: float = 0.0
    compute_ms: float = 0.0
    exposed_ms: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    reference_bytes: int = 0
    longest_run: tuple[int, int] = (0, 0)
    bounds: tuple[PolicyReport, ...] = ()
    misses: float = 0.0
    chosen: str = "as given"
    alternatives: tuple[tuple[str, float, int], ...] = ()
    caps: CapsReport | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    bounds_cost_ms: float = 0.0
    rank_order_ms: float | None = None
    size_hints: str = ""
    seconds: float = 0.0

    def figure(self, name: str) -> int | None:
        """A figure that one of the policies reports; None where none does."""
        return next((b.figures[name] for b in self.bounds if name in b.figures), None)

    @property
    def limit_bytes(self) -> int | None:
        """The bound of ``PeakMemory``; None where there was none."""
        return self.figure("limit_bytes")

    def to_text(self) -> str:
        """A few lines."""

        def two(pair: Sequence[float]) -> list[str]:
            return [f"{value:.2f}" for value in pair]

        gib = 2**30
        peak = f"{self.reference_bytes / gib:.2f}"
        limit = "" if self.limit_bytes is None else f", bound {self.limit_bytes / gib:.2f}"
        most, forced = self.figure("max_run"), self.figure("forced_run")
        run = "" if most is None else f"bound {most}, dependencies force {forced}"
        rows: list[tuple[str, ...]] = [
            ("", "before", "after", ""),
            ("step, ms", *two(self.step_ms), f"lower bound {self.bound_ms:.2f}, {self.chosen}"),
            ("exposed, ms", *two(self.exposed_ms), ""),
            ("peak, GiB", *two([n / gib for n in self.peak_bytes]), f"unreordered {peak}{limit}"),
            ("longest compute run", *map(str, self.longest_run), run),
        ]
        if self.bounds_cost_ms:
            rows.append(("bounds cost, ms", "", f"{self.bounds_cost_ms:.2f}", ""))
        if self.rank_order_ms is not None:
            text = "what all-to-alls and their sums take longer than rings"
            rows.append(("sums in rank order, ms", "", f"{self.rank_order_ms:.2f}", text))
        if self.caps is not None and (self.caps.caps_mb or self.caps.chosen.planner):
            rows.append(("byte cap, MiB", "", "", self.caps.to_text()))
        rows += [(bound.policy, "", "", bound.text) for bound in self.bounds if bound.text]
        notes = [f"times are for: {self.machine}"] if self.machine else []
        notes += [self.size_hints] if self.size_hints else []
        lines = [*aligned(rows, right=(1, 2)), *notes, *self.notes, *self.warnings]
        return "\n".join(lines) + "\n"
