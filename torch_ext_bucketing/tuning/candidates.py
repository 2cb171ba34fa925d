"""Make the candidates to start from, for a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.fx as fx
import torch.nn as nn

from .._torch.inductor import bucket_fsdp
from ..fsdp.plans import transformer_block_plan
from ..fsdp.units import Units
from ..passes.backends import BucketingBackend
from ..passes.base import Compilation, GraphPass, Stage
from ..passes.bucketing import BucketByCap, FixedOrderReduce
from ..planner.cost.machine import Machine
from ..planner.schedule.policy import Overlap, PeakMemory
from ..planner.scheduling import BucketAndSchedule, Estimate, Schedule
from ..recipes import recipe

_CAP_MB = 25.0  # DDP's default for a bucket


@dataclass(frozen=True, eq=False, repr=False)
class TorchBuckets(GraphPass):
    """Merge FSDP's collectives by torch's own passes, with their default caps."""

    stage: ClassVar[Stage] = "forward_backward"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        gm = graph.owning_module
        assert isinstance(gm, fx.GraphModule)
        bucket_fsdp(gm)


def candidates(
    model: nn.Module,
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
    *,
    units: Units | Sequence[str | Sequence[str]] | None = None,
    reduce: Literal["all_to_all"] | None = None,
    machine: Machine | None = None,
    memory: PeakMemory | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, BucketingBackend]:
    """Return plans that differ in buckets and order, for :func:`.tune`; options as :func:`.recipe`.

    - ``"estimate"``: those of ``recipe(model, "speed")``;
    - ``"units"``, ``"cap"``: buckets of FSDP2's units, or up to 25 MiB, in an order that overlaps,
      and in the graph's order;
    - ``"torch's buckets"``: torch's own merging, in its order;
    - ``"no buckets"``: one collective per parameter.

    All give the model eager FSDP2's collectives first and gather the same parameters again for
    backward. With ``reduce`` all give the same bits. Without transformer blocks and ``units`` those
    by unit are left out.
    """
    options: dict[str, Any] = {"machine": machine, "reduce": reduce, "memory": memory}
    options |= {"optimizer": optimizer}
    *first, bucketing = recipe(model, "speed", **options)
    assert isinstance(bucketing, BucketAndSchedule)
    sums = [FixedOrderReduce()] if reduce else []
    order = Schedule([Overlap()], machine)
    lists: dict[str, list[GraphPass]] = {"estimate": [*first, bucketing]}
    if units is not None or _has_blocks(model):
        *by_unit, _ = recipe(model, units=units, **options)
        lists |= {"units": [*by_unit, order], "units, graph's order": by_unit}
    by_cap = [*first, BucketByCap(_CAP_MB, kinds=bucketing.kinds), *sums]
    lists |= {
        "cap": [*by_cap, order],
        "cap, graph's order": by_cap,
        "torch's buckets": [*first, TorchBuckets(), *sums],
        "no buckets": [*first, *sums],
    }
    last = Estimate(machine)
    return {
        name: BucketingBackend(compiler, [*passes, last], model) for name, passes in lists.items()
    }


def _has_blocks(model: nn.Module) -> bool:
    try:
        transformer_block_plan(model)
    except ValueError:
        return False
    return True
