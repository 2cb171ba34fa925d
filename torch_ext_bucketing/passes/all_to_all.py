"""The pass that reduces gradients in rank order, by all-to-alls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .._torch.lowering import lower_sum
from ..bucketing.all_to_all import reduce_by_all_to_all
from ..fsdp.all_to_all import SUM, check_accumulate
from ..graph.snapshot import unchanged_on_error
from ..graph.unwrap import GraphLike, graph_of
from .base import GraphPass, Stage
from .compilation import Compilation
from .facts import Fact, Order, RankOrder, Tags


@dataclass(frozen=True, eq=False, repr=False)
class FixedOrderReduce(GraphPass):
    """Replace reductions of gradients by an all-to-all and a local sum in rank order.

    The bits of a gradient then depend on the ranks' values and the number of ranks only, and not on
    byte caps, units, or the order of payload and graph. Eager FSDP2 has the same bits with
    :class:`.AllToAllReduceScatter`. Ranks send the bytes of a ring reduction, in the same dtype,
    and hold what they receive, as large as the packed gradients, until it is added.

    Runs after the passes that bucket and before :class:`.Schedule`; ``BucketAndSchedule`` takes it
    as ``reduce=``. Only sums and averages of floating-point gradients of parameters are replaced,
    on groups of more than one rank. :mod:`.bucketing.all_to_all` shows the graphs.

    Args:
        accumulate: dtype of the sums, or of the gradients if that is wider.

    Raises:
        ValueError: ``accumulate`` is neither ``torch.float32`` nor ``torch.float64``.
    """

    stage: ClassVar[Stage] = "forward_backward"
    requires = (Tags,)
    conflicts_with = (Order,)
    accumulate: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_accumulate(self.accumulate)

    @property
    def provides(self) -> tuple[Fact, ...]:
        return (RankOrder(self.accumulate),)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        lower_sum(SUM)
        with unchanged_on_error(g):
            reduce_by_all_to_all(g, self.accumulate)
            g.lint()
