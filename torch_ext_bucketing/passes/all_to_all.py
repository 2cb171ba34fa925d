"""The pass that lets gradients be reduced by all-to-alls, see :mod:`.bucketing.all_to_all`."""

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
class ReduceByAllToAll(GraphPass):
    """Let gradients be reduced by all-to-alls and local sums in the order of the ranks; see
    :mod:`.bucketing.all_to_all` for the graphs.

    The bits of a gradient are then a function of the ranks' values alone: byte caps, units, the
    payload's and the graph's order may change between two steps. The number of ranks may not. Eager
    FSDP2 has the same bits with :class:`.AllToAllReduceScatter`. The bytes sent are those of the
    reduction that is replaced (of a ring's), in its dtype. A rank also holds what it receives, as
    large as the packed gradients, until it has been added.

    Comes after the passes that bucket and before :class:`.Schedule`; ``BucketAndSchedule`` takes it
    as ``reduce=``. Sums and averages of parameters' gradients in floating point are replaced,
    bucketed or not; other reductions and those on a group of one rank stay.

    Args:
        accumulate: the dtype of the sums, ``torch.float32`` or ``torch.float64`` (another is a
            ``ValueError``); that of the gradients where this is wider.
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
