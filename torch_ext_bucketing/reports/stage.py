"""The report of one stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Report
from .compile import CompileReport
from .text import change, size_text


@dataclass(frozen=True)
class StageReport(Report):
    """What a stage does and holds in one step, on one rank.

    Args:
        stage: its number in the pipeline.
        compiled: of the graphs that gather and reduce, each of which is there once.
        gathers: how often a step gathers its parameters.
        reductions: how often it reduces its gradients.
        under_way: the most microbatches between forward and backward.
        gathered_bytes: its whole parameters.
        gradient_bytes: their gradients, summed over microbatches.
        saved_bytes: of each microbatch under way.
        peak_bytes: the most of all these at a time, with what the graph that runs then makes;
            shards and the optimizer's state are beside it.
        rank_peak_bytes: of all stages of the rank together.
    """

    stage: int
    compiled: CompileReport
    gathers: int
    reductions: int
    under_way: int
    gathered_bytes: int
    gradient_bytes: int
    saved_bytes: int
    peak_bytes: int
    rank_peak_bytes: int

    def to_text(self) -> str:
        """One line."""
        counts = change(self.compiled.collectives_before, self.compiled.collectives_after)
        gathered, gradients, saved, peak, rank = map(
            size_text,
            (
                self.gathered_bytes,
                self.gradient_bytes,
                self.saved_bytes,
                self.peak_bytes,
                self.rank_peak_bytes,
            ),
        )
        return (
            f"pipeline stage {self.stage}: {counts}; gathered {self.gathers} and reduced "
            f"{self.reductions} times a step; {gathered} gathered, {gradients} of gradients, "
            f"{self.under_way} microbatches under way of {saved} each; at most {peak}, the rank's "
            f"stages together {rank}\n"
        )
