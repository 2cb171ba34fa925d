"""The report of one stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Report
from .compile import CompileReport
from .text import change, size_text


@dataclass(frozen=True)
class StageReport(Report):
    """The actions of a pipeline stage in one step on one rank, and its memory.

    Args:
        gathers: number of times that it gathers its parameters.
        reductions: number of times that it reduces its gradients.
        under_way: most microbatches between forward and backward, of ``saved_bytes`` each.
        gathered_bytes: its unsharded parameters.
        gradient_bytes: their gradients, summed over microbatches.
        peak_bytes: the peak of all these and of the running graph, without shards and optimizer
            state; ``rank_peak_bytes`` for all stages of the rank.
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
        """Format one line."""
        counts = change(self.compiled.collectives_before, self.compiled.collectives_after)
        return (
            f"pipeline stage {self.stage}: {counts}; gathered {self.gathers} and reduced "
            f"{self.reductions} times a step; {size_text(self.gathered_bytes)} gathered, "
            f"{size_text(self.gradient_bytes)} of gradients, {self.under_way} microbatches under "
            f"way of {size_text(self.saved_bytes)} each; at most {size_text(self.peak_bytes)}, the "
            f"rank's stages together {size_text(self.rank_peak_bytes)}\n"
        )
