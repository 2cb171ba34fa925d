"""Dropout in activation checkpoints: backward draws what forward drew."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from marks import at_night
from rank_pool import on_ranks
from torch.distributed import fsdp as eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torch_ext_bucketing as teb
from torch_ext_bucketing.fsdp import fully_shard

pytestmark = pytest.mark.torch


def save_products(ctx, op, *args, **kwargs):
    save = op == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


KINDS = {
    "whole": {},
    "selective": {
        "context_fn": functools.partial(create_selective_checkpoint_contexts, save_products)
    },
}


class Layer(nn.Module):
    """A unit with a checkpoint in it: eager FSDP2 can't be in a selective one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(7, 7, bias=False), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._drop, x, use_reentrant=False, **KINDS[self.kind])

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(nn.functional.dropout(x, 0.2)), 0.5)


class Dropping(nn.Sequential):
    """Is linear in the weight of each layer."""

    def __init__(self, kind: str) -> None:
        super().__init__(*(Layer(kind) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def made(how: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = Dropping(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if how == "data_parallel":
        return teb.data_parallel(model, mesh)
    shard = eager.fully_shard if how == "eager" else fully_shard
    for module in (*model, model):
        shard(module, mesh=mesh)
    return model


def compiled(model: nn.Module, compiler: str) -> nn.Module:
    return torch.compile(model, backend=teb.backend(compiler, model=model), fullgraph=True)


def trained(rank: int, how: str, kind: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    model = made(how, kind)
    run = model if how == "eager" else compiled(model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(3):
        run(torch.randn(4, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]


def equal_bits(rank: int, how: str, kind: str) -> bool:
    return all(map(torch.equal, trained(rank, how, kind), trained(rank, "eager", kind)))


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("fully_shard", "whole"),
        ("data_parallel", "selective"),
        at_night("fully_shard", "selective"),
        at_night("data_parallel", "whole"),
    ],
)
def test_bits_are_those_of_eager_fsdp2(how, kind):
    assert all(on_ranks(equal_bits, how, kind))


def gaps(rank: int, kind: str, drawn_by_torch: bool) -> list[float]:
    """Return the gaps between the loss and each layer's weight times its gradient."""
    model = made("fully_shard", kind)
    with torch._inductor.config.patch(fallback_random=drawn_by_torch):
        loss = compiled(model, "inductor")(torch.randn(4, 7) + rank)
        loss.backward()
    dist.all_reduce(loss := loss.detach() / dist.get_world_size())
    found = []
    for param in model.parameters():
        product = (param.detach() * param.grad).sum()
        assert isinstance(product, DTensor)
        found.append(((product.full_tensor() - loss) / loss).abs().item())
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "drawn_by_torch", "ranks"),
    [
        ("selective", False, 1),  # each rank compiles the same kernels
        at_night("selective", False, 2),
        at_night("whole", False, 2),
        at_night("whole", True, 2),
        at_night("selective", True, 2),
    ],
)
def test_inductor_draws_the_same_in_backward(kind, drawn_by_torch, ranks):
    found = on_ranks(gaps, kind, drawn_by_torch, world=ranks)
    assert max(max(g) for g in found) < 1e-5
