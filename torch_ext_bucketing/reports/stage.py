"""The report of one stage of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Report
from .compile import CompileReport
from .text import change, size_text


@dataclass(frozen=True)
class StageReport(Report):
    """What a stage of a pipeline does and holds in one step, on one rank: how often it gathers
    its parameters and reduces its gradients; the most microbatches between forward and backward
    (``under_way``), of ``saved_bytes`` each; its whole parameters, and their gradients, summed
    over microbatches; the most of all these at a time, with what the graph that runs then makes,
    of the stage and of all stages of the rank together (shards and the optimizer's state are
    beside it)."""

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
        return (
            f"pipeline stage {self.stage}: {counts}; gathered {self.gathers} and reduced "
            f"{self.reductions} times a step; {size_text(self.gathered_bytes)} gathered, "
            f"{size_text(self.gradient_bytes)} of gradients, {self.under_way} microbatches under "
            f"way of {size_text(self.saved_bytes)} each; at most {size_text(self.peak_bytes)}, the "
            f"rank's stages together {size_text(self.rank_peak_bytes)}\n"
        )
