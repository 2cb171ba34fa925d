"""A model with uneven shards on two ranks, and its gradients on a rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from sharded_models import OneBlock
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from torch_ext_bucketing.fqns import canonical_fqn
from torch_ext_bucketing.fsdp.shard import data_parallel

Gradients = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""The loss, and the local gradient of each parameter."""


UNITS = ["layers.0", ""]


def model(dim: int = 9, vocabulary: int = 13) -> OneBlock:
    torch.manual_seed(0)
    return OneBlock(dim, vocabulary)


def tokens(rank: int) -> torch.Tensor:
    return torch.arange(8).add(rank).remainder(13).view(2, 4)


def gradients(run: Callable[..., Any], module: nn.Module, rank: int) -> Gradients:
    """Run forward and backward of ``run``, which is ``module`` or compiled from it."""
    loss = run(tokens(rank)).float().logsumexp(-1).mean()
    loss.backward()
    found = {
        canonical_fqn(n): (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).clone()
        for n, p in module.named_parameters()
    }
    module.zero_grad()
    return loss.detach(), found


def assert_equal(one: Gradients, other: Gradients) -> None:
    assert torch.equal(one[0], other[0])
    assert sorted(one[1]) == sorted(other[1])
    for name, grad in one[1].items():
        assert torch.equal(grad, other[1][name]), name


def mesh(mode: str) -> DeviceMesh:
    world = dist.get_world_size()
    if mode == "hybrid_shard":
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def shard(mode: str, *sizes: int, **dtypes: torch.dtype | None) -> nn.Module:
    return data_parallel(model(*sizes), mesh(mode), mode, **dtypes)
