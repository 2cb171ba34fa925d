"""Combine the reports of all ranks into the result of a row, and results into a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from benchmarks.eager_parity.rows import Row
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.comparison import whole_digest

if TYPE_CHECKING:
    from benchmarks.eager_parity.ranks import RowReport, Traffic


KERNELS = (
    "Inductor's decompositions and generated kernels round differently from eager's kernels; with "
    "ATen's kernels in their place the same Inductor compile equals eager"
)


@dataclass
class RowResult:
    """The result of a row of ``steps`` steps; other attributes are those of ``RowReport``.

    Attributes:
        steps_equal: steps after which the hash of all ranks' weights is eager FSDP2's.
        control_first_different_step: first step after which it differs with buckets in graph order;
            ``None`` if every step was equal, or without a control.
        cause: why weights differ, or why the control can't; ``""`` if nothing needs an explanation.
        experiment: the figures that prove the cause.
    """

    row: Row
    steps: int
    steps_equal: int
    control_first_different_step: int | None
    layout_differences: list[str] = field(default_factory=list)
    cause: str = ""
    experiment: dict[str, Any] = field(default_factory=dict)
    before: Traffic = field(default_factory=dict)
    after: Traffic = field(default_factory=dict)
    eager_collectives: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warned: bool = False
    merged: bool = True
    error: str = ""
    seconds: float = 0.0
    torch: str = ""
    date: str = ""

    @property
    def problems(self) -> list[str]:
        """List the reasons that keep the row from passing."""
        if self.error:
            return [self.error.strip().splitlines()[-1]]
        found = []
        if self.layout_differences:
            found.append("the payload layout is not eager's")
        if not self.merged:
            found.append("nothing was bucketed")
        equal = f"weights equal after {self.steps_equal} of {self.steps} steps"
        proven = self.experiment.get("aten_kernels_steps_equal") == self.steps
        if self.row.unlike:
            if self.steps_equal == self.steps:
                found.append(f"{equal}, where they can't be: {self.row.unlike}")
            if not self.warned:
                found.append("nothing warned that bits are not eager's")
        elif self.steps_equal != self.steps and not proven:
            found.append(f"{equal} only")
        elif self.warned:
            found.append("warned that bits are not eager's, which they are")
        if not self.row.why_no_control and self.control_first_different_step is None:
            found.append("graph order gives the same bits")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return the row's fields, then the rest, for JSON."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "row"}
        verdict = {"passed": not self.problems, "problems": self.problems}
        return {**asdict(self.row), "ranks": self.row.ranks, **own, **verdict}


def combine(reports: Sequence[RowReport], steps: int) -> RowResult:
    """Combine the reports of all ranks into one row's result."""
    first = reports[0]
    row = first.row

    def hashes(name: str) -> list[str]:
        shards = zip(*(r.digests[name] for r in reports), strict=True)
        return [whole_digest(of_step) for of_step in shards]

    eager = hashes("eager")

    def equal(name: str) -> list[bool]:
        return [a == b for a, b in zip(hashes(name), eager, strict=False)]

    def first_different(name: str) -> int | None:
        found = equal(name)
        return found.index(False) + 1 if False in found else None

    differences = [f"rank {i}: {d}" for i, r in enumerate(reports) for d in r.layout_differences]
    result = RowResult(
        row,
        steps,
        sum(equal("fsdp_order")),
        first_different("control") if "control" in first.digests else None,
        differences[:5],
        "" if row.case else row.why_no_control,
        before=first.before,
        after=first.after,
        eager_collectives=first.eager_collectives,
        notes=list(dict.fromkeys(note for r in reports for note in r.notes)),
        warned=any(r.warned for r in reports),
        # All ranks plan alike, or don't take part.
        merged=any(r.merged for r in reports),
        error=next((r.error for r in reports if r.error), ""),
        seconds=round(max(r.seconds for r in reports), 1),
        torch=first.torch,
    )
    if row.unlike:
        result.cause = row.unlike
    if row.backend == "inductor":
        losses = [(r.loss["fsdp_order"], r.loss["eager"]) for r in reports]
        proven = sum(equal("aten_kernels"))
        result.experiment = {
            "aten_kernels_steps_equal": proven,
            "first_different_step": first_different("fsdp_order"),
            "ranks_with_other_loss_before_any_reduction": sum(a[0] != b[0] for a, b in losses),
            "largest_loss_difference": max(
                abs(x - y) for a, b in losses for x, y in zip(a, b, strict=True)
            ),
        }
        if result.steps_equal != steps:
            kernels = KERNELS if proven == steps else "unknown"
            result.cause = "; ".join(text for text in (kernels, result.cause) if text)
    return result


def verdict(result: RowResult) -> str:
    """Format one line of progress."""
    text = f"{result.steps_equal} of {result.steps} equal"
    if "aten_kernels_steps_equal" in result.experiment:
        text += f", on ATen's kernels {result.experiment['aten_kernels_steps_equal']} equal"
    if not result.row.case:
        text += f", control differs at {first_different(result.control_first_different_step)}"
    return text + (f"; FAILED: {'; '.join(result.problems)}" if result.problems else "")


def render(results: Sequence[RowResult], left_out: Sequence[str] = ()) -> str:
    """Render the table, with the causes below it, and the rows that were left out."""
    steps = results[0].steps if results else 0
    rows = [
        ["row", "ranks", "steps equal", "on ATen's", "control", "layout", "collectives"],
        ["", "x nodes", f"of {steps}", "kernels", "differs", "equal", "traced -> ours (eager's)"],
    ]
    rows[0] += ["KiB inside", "between nodes", "", "cause"]
    rows[1] += ["nodes", "", "", ""]
    causes: dict[str, int] = {}
    for r in results:
        counts = [_total(traffic, 0) for traffic in (r.before, r.after)]
        counted = f"{counts[0]} -> {counts[1]} ({sum(r.eager_collectives.values())})"
        rows.append(
            [
                r.row.name,
                f"{r.row.ranks} x {r.row.nodes}",
                str(r.steps_equal),
                str(r.experiment.get("aten_kernels_steps_equal", "")),
                "" if r.row.case else first_different(r.control_first_different_step),
                ("no" if r.layout_differences else "yes") if r.row.layout else "",
                counted if r.before else "",
                *(_kib(r, level) for level in ("inside nodes", "between nodes")),
                "FAILED" if r.problems else "ok",
                f"[{causes.setdefault(r.cause, len(causes) + 1)}]" if r.cause else "",
            ]
        )
    lines = [f"[{number}] {cause}" for cause, number in causes.items()]
    lines += [f"{r.row.name}: {text}" for r in results for text in (*r.problems, *r.notes)]
    lines += [f"  {text}" for r in results for text in r.layout_differences]
    lines += [r.error for r in results if r.error]
    lines += [f"left out: {text}" for text in left_out]
    passed = sum(not r.problems for r in results)
    return "\n".join([columns(rows), "", *lines, f"{passed} of {len(results)} rows pass"])


def first_different(first: int | None) -> str:
    """Format the step."""
    return "none" if first is None else f"step {first}"


def _kib(result: RowResult, level: str) -> str:
    sent = [_total(traffic, 1, level) / 1024 for traffic in (result.before, result.after)]
    return f"{sent[0]:.0f} -> {sent[1]:.0f}" if any(sent) else ""


def _total(traffic: Traffic, what: int, level: str = "") -> int:
    """Sum the number (0) or the bytes (1) of all collectives of a level."""
    return sum(
        entry[what]
        for name, kinds in traffic.items()
        if level in ("", name)
        for kind, entry in kinds.items()
        if kind != "gathered again"
    )
