"""Make process groups without processes, and shard the models over them.

The world is fake: one process plays rank 0 of any number of ranks, and a collective moves nothing.
Every mesh is made by :func:`start_world`, always in the same order, so that a graph's process
groups have the same names whenever the graph is traced or loaded.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.nn.utils import parametrize

from benchmarks.eager_parity.tensor import block_plan
from torch_ext_bucketing.fsdp.shard import data_parallel

from .models import DeepSeek, Experts, Llama


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; one is none of that kind.

    Args:
        fsdp: ranks that share the dense parameters.
        tensor: ranks that share a matrix (and the sequence) within each FSDP rank.
        expert: ranks that share the experts; within the FSDP ranks, which then shard each expert
            over ``fsdp / expert`` ranks.
        replicas: how often all of that is there (HSDP): gradients are reduced over them, too.
    """

    fsdp: int
    tensor: int = 1
    expert: int = 1
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.replicas > 1 and self.expert > 1:
            raise ValueError("replicas and expert parallelism together are not laid out here")
        if self.tensor > 1 and self.expert > 1:
            raise ValueError("tensor and expert parallelism together are not laid out here")
        if self.fsdp % self.expert:
            raise ValueError(f"fsdp {self.fsdp} must be a multiple of expert {self.expert}")

    @property
    def world_size(self) -> int:
        return self.replicas * self.fsdp * self.tensor


@dataclass(frozen=True)
class Group:
    """A graph's process group: its number of ranks and its role.

    The role is ``"fsdp"``, ``"tp"``, ``"expert_fsdp"``, ``"ep"`` or ``"replicate"``.
    """

    size: int
    role: str


@dataclass(frozen=True)
class World:
    """The meshes of a layout."""

    layout: Layout
    data: DeviceMesh
    tensor: DeviceMesh | None
    expert_fsdp: DeviceMesh | None
    expert: DeviceMesh | None
    groups: dict[str, Group]


_current: World | None = None


def start_world(layout: Layout) -> World:
    """Start the fake world of a layout; end the one that an earlier call started."""
    global _current
    if _current is not None and _current.layout == layout and dist.is_initialized():
        return _current
    if dist.is_initialized():
        if _current is None:
            raise RuntimeError(
                "torch.distributed is initialised already, and graphs need a fake world of their "
                "own: load them in another process, or destroy_process_group() first"
            )
        end_world()
    dist.init_process_group("fake", rank=0, world_size=layout.world_size)
    # The device type has no effect on a fake group; "cpu" needs no device to be there.
    sizes = {"replicate": layout.replicas, "fsdp": layout.fsdp, "tp": layout.tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "fsdp"}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    fsdp = mesh["fsdp"] if len(sizes) > 1 else mesh
    tensor = mesh["tp"] if layout.tensor > 1 else None
    replicate = mesh["replicate"] if layout.replicas > 1 else None
    data = fsdp if replicate is None else mesh["replicate", "fsdp"]
    expert_fsdp = expert = None
    if layout.expert > 1:
        mesh = init_device_mesh(
            "cpu",
            (layout.fsdp // layout.expert, layout.expert),
            mesh_dim_names=("expert_fsdp", "ep"),
        )
        expert_fsdp, expert = mesh["expert_fsdp"], mesh["ep"]
    groups = {
        m.get_group().group_name: Group(m.size(), role)
        for role, m in (
            ("fsdp", fsdp),
            ("tp", tensor),
            ("expert_fsdp", expert_fsdp),
            ("ep", expert),
            ("replicate", replicate),
        )
        if m is not None
    }
    _current = World(layout, data, tensor, expert_fsdp, expert, groups)
    return _current


def end_world() -> None:
    """End the world that :func:`start_world` started, if any."""
    global _current
    if _current is not None and dist.is_initialized():
        dist.destroy_process_group()
    _current = None


def shard_llama(model: Llama, world: World) -> None:
    """Shard columns and rows like Megatron, with sequence parallelism, then FSDP, in place."""
    if world.tensor is not None:
        _tensor_parallel_llama(model, world.tensor)
    _fully_shard(model, world.data)


def shard_deepseek(model: DeepSeek, world: World) -> None:
    """Shard experts over the expert ranks and then over their own FSDP mesh, the rest by FSDP.

    The experts' gradients are averaged over their FSDP mesh alone. A trainer also divides them by
    the number of expert ranks, whose tokens they have seen, wherever it scales the loss.
    """
    experts = [m for m in model.modules() if isinstance(m, Experts)]
    if world.expert is None or world.expert_fsdp is None:
        experts = []
    else:
        for module in experts:
            for name, param in list(module.named_parameters(recurse=False)):
                # No rank needs another's values: nothing is scattered.
                local = distribute_tensor(param, world.expert, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(local.to_local().detach().clone()))
            _fully_shard(module, world.expert_fsdp)
    _fully_shard(model, world.data, but=experts)


def _tensor_parallel_llama(model: Llama, mesh: DeviceMesh) -> None:
    outside = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1)),
    }
    parallelize_module(model, mesh, outside, src_data_rank=None)
    for layer in model.layers:
        parallelize_module(layer, mesh, block_plan(sequence=True), src_data_rank=None)


class _AsTensorParallel(nn.Module):
    """Take the gathered tensor for a tensor-parallel rank's shard, as a parametrization."""

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> None:
        super().__init__()
        self.mesh, self.placements = mesh, placements

    def forward(self, local: torch.Tensor) -> DTensor:
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)


def _fully_shard(model: nn.Module, mesh: DeviceMesh, but: Collection[nn.Module] = ()) -> None:
    """Shard all modules but those in ``but``: fp32 shards, bf16 gathers, fp32 reductions."""
    for module in list(model.modules()):
        params = dict(module.named_parameters(recurse=False))
        if module in but or not params:
            continue
        for name, param in params.items():
            if isinstance(param, DTensor):
                module.register_parameter(name, nn.Parameter(param.to_local().detach().clone()))
                shard = _AsTensorParallel(param.device_mesh, param.placements)
                parametrize.register_parametrization(module, name, shard, unsafe=True)
        mode: Literal["fully_shard", "hybrid_shard"]
        mode = "fully_shard" if mesh.ndim == 1 else "hybrid_shard"
        data_parallel(module, mesh, mode, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
