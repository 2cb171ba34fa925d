"""The report of a choice that measured steps confirmed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .base import Record, Report, aligned, sizes_text


@dataclass(frozen=True)
class CandidateReport(Record):
    """One candidate: medians over measured steps of the slowest rank, in milliseconds.

    Args:
        step_ms: of whole steps.
        graphs_ms: until the optimizer begins: forward, loss and backward.
        peak_bytes: most that a rank held in a step, by the device's allocator; on CPU the
            process's resident memory.
        fits: whether that is within the bound.
        relative: median of its steps, each over the median of all candidates in the same round;
            the choice is made by it.
        estimated_ms: the cost model's time of the graphs; None: not estimated.
        estimated_bytes: its peak of live bytes of the larger graph.
        corrected_ms: the estimate with the report's factors.
    """

    name: str
    step_ms: float
    graphs_ms: float
    peak_bytes: int
    fits: bool = True
    estimated_ms: float | None = None
    estimated_bytes: int | None = None
    corrected_ms: float | None = None
    relative: float = 1.0


@dataclass(frozen=True)
class TuneReport(Report):
    """The result of :func:`.tune`, alike on every rank but for estimates.

    Args:
        chosen: name of the candidate that was kept.
        candidates: in the given order.
        steps: measured steps of the chosen one; those that were not close have fewer.
        ranks: number of ranks.
        bound_bytes: the bound on what a rank holds; None: none.
        bits_depend: whether another choice gives other bits.
        factors: by what the measured steps correct times of the cost model's machine, by kind of
            collective and for ``"kernel"``; empty without estimates.
        from_cache: whether an earlier run's choice was taken without measuring.
    """

    chosen: str
    candidates: tuple[CandidateReport, ...]
    steps: int
    ranks: int
    bound_bytes: int | None = None
    bits_depend: bool = True
    factors: Mapping[str, float] = field(default_factory=dict)
    from_cache: bool = False

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TuneReport:
        """Read the result of :meth:`as_dict`."""
        candidates = tuple(CandidateReport(**each) for each in fields["candidates"])
        return cls(**{**fields, "candidates": candidates})

    def to_text(self) -> str:
        """Format a table of the candidates, and lines on the choice."""

        def ms(value: float | None) -> str:
            return "-" if value is None else f"{value:.2f}"

        def size(value: int | None) -> str:
            return "-" if value is None else sizes_text(value)[0]

        rows = [["candidate", "relative", "step, ms", "graphs, ms", "estimate", "corrected"]]
        rows[0] += ["peak", "graph's"]
        for c in self.candidates:
            name = f"{c.name} (chosen)" if c.name == self.chosen else c.name
            peak = size(c.peak_bytes) + ("" if c.fits else ", above the bound")
            times = (c.relative, c.step_ms, c.graphs_ms, c.estimated_ms, c.corrected_ms)
            rows.append([name, *map(ms, times), peak, size(c.estimated_bytes)])
        about = f"medians of up to {self.steps} steps of the slowest of {self.ranks} rank(s)"
        if self.from_cache:
            about = f"taken from an earlier run without measuring: {about}"
        if self.bound_bytes is not None:
            about += f", bound {size(self.bound_bytes)}"
        bits = (
            "bits depend on the choice: give every candidate FixedOrderReduce to have the same ones"
            if self.bits_depend
            else "bits do not depend on the choice: gradients are added in rank order"
        )
        lines = [*aligned(rows, right=(1, 2, 3, 4, 5)), about, bits]
        if self.factors:
            of = ", ".join(f"{kind} {factor:.2f}" for kind, factor in self.factors.items())
            lines.append(f"measured over estimated times: {of}")
        return "\n".join(lines) + "\n"
