"""What torch's bucketing returns, put right where graphs are run as they are."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.bucketing import BucketUnits
from torch_ext_bucketing.plans.order import FSDPParamOrder
from torch_ext_bucketing.plans.simple_fsdp import data_parallel


class Experts(nn.Module):
    """Stacked experts, as many as asked for, that the forward views as one matrix."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(experts, 3, 2))
        self.outer = nn.Parameter(torch.randn(experts, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.view(-1, 2).t() @ self.outer.view(-1, 2)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_gathered_parameter_can_be_viewed_whatever_the_rows_of_a_shard(
    fake_world: int, rows: int, compiler: str
):
    """With one row per rank torch leaves the gathered parameter a strided view of the bucket."""
    torch._dynamo.reset()
    model = Experts(rows * fake_world)
    order = FSDPParamOrder.from_model(model)
    data_parallel(model, init_device_mesh("cpu", (fake_world,)))
    passes = backend(compiler, passes=[BucketUnits(order)], model=model)
    torch.compile(model, backend=passes, fullgraph=True)(torch.randn(5, 2)).sum().backward()
    assert passes.last_report().collectives_after == {"all_gather": 1, "reduce_scatter": 1}
