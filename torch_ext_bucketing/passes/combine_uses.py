"""The pass that gathers and reduces every parameter once, however often it is used."""

from __future__ import annotations

from typing import Any

from ..reports.rewrites import CombineReport
from ..rewrites.combine_uses import combine_uses
from ..scheduling.memory import PeakMemory
from .base import Compilation, GraphLike, GraphPass, Stage, Tags, graph_of
from .code import call

__all__ = ["CombineUses"]


class CombineUses(GraphPass):
    """One gather and one reduction per parameter and step, as eager FSDP2 has them.

    A parameter that is read twice, tied weights, a head that is called per chunk of a loss: a
    traced graph gathers and reduces them once per use. This adds their gradients before reducing
    the sum, in the order and dtype in which autograd adds them in eager: the same bits as eager
    FSDP2, and fewer bytes on the network. See :mod:`.rewrites.combine_uses`.

    Args:
        peak: bounds what that may cost in memory: gathered parameters and gradients stay alive from
            their first use to the last. None: no bound. See :func:`.combine_uses`.

    Raises:
        TypeError: ``peak`` is no ``PeakMemory``.
    """

    stage: Stage = "joint"
    needs = (Tags,)

    def __init__(self, peak: PeakMemory | None = None) -> None:
        if peak is not None and not isinstance(peak, PeakMemory):
            raise TypeError(f"peak must be a PeakMemory or None, got {peak!r}")
        self.peak = peak
        self.last_report: CombineReport | None = None

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        self.last_report = combine_uses(graph_of(graph), self.peak, compilation.size_hints)
        compilation.report.rewrites.append(self.last_report)

    def __repr__(self) -> str:
        return call("CombineUses", peak=self.peak)

    def settings(self) -> tuple[Any, ...]:
        """The bound."""
        return (self.peak,)
