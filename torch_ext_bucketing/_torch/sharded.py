"""Read sharded parameters, which are ``DTensor``, and the plain tensors in a tensor subclass."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .private import private_torch

with private_torch():
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SHARD = "_local_tensor"


def is_distributed(tensor: Any) -> bool:
    """Return whether a parameter is sharded or replicated over a mesh."""
    return isinstance(tensor, DTensor)


def mesh_of(value: Any) -> Any:
    """Return the mesh that a parameter is distributed over, or None."""
    return value.device_mesh if isinstance(value, DTensor) else None


def placed(tensor: Any) -> tuple[bool, bool]:
    """Return whether a distributed parameter is sharded, and whether it has replicas.

    Replicas are a mesh's first dimension. Inner replication belongs to tensor parallelism.
    """
    placements = tensor.placements
    # Not is_shard(): a strided shard (FSDP over tensor parallelism) is not a Shard in every torch.
    return not all(p.is_replicate() for p in placements), placements[0].is_replicate()


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter; a plain parameter itself."""
    local: torch.Tensor = getattr(tensor, _SHARD, tensor)
    return local


def largest_shard_numel(tensor: Any) -> int:
    """Return the number of elements of a parameter's shard on the rank that has most."""
    if not isinstance(tensor, DTensor):
        return int(tensor.numel())
    sizes = list(tensor.shape)
    for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        # A strided shard is not a Shard in every torch, but has its dimension, too.
        if (dim := getattr(placement, "dim", None)) is not None:
            sizes[dim] = -(-sizes[dim] // ranks)
    return math.prod(sizes)


def largest_shard_bytes(tensor: Any) -> int:
    """Return the bytes of a parameter's shard on the rank that has most.

    Bounds on memory count these: they are alike on every rank, and so are plans.
    """
    return largest_shard_numel(tensor) * shard_of(tensor).element_size()


def sharded_dims(tensor: Any) -> tuple[tuple[Any, int], ...]:
    """List the mesh dimensions that a parameter is sharded over, each with the mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple((mesh, i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def is_part(source: str, sources: Collection[str]) -> bool:
    """Return whether a Dynamo source names the shard of another tensor in ``sources``."""
    return source.rpartition(f".{_SHARD}")[0] in sources


def name_per_tensor(name: str, tensor: Any) -> list[str | None]:
    """Return a parameter's name for its first plain tensor, and None for each other one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [name]
    attributes, _ = tensor.__tensor_flatten__()
    parts = [part for a in attributes for part in name_per_tensor(name, getattr(tensor, a))]
    return [name, *(None,) * (len(parts) - 1)]


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of."""
    found: list[torch.Tensor] = []
    map_parts(tensor, lambda part: found.append(part) or part)  # type: ignore[func-returns-value]
    return found


def map_parts(tensor: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Rebuild a tensor after applying ``function`` to the plain tensors that it consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return function(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: map_parts(getattr(tensor, name), function) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
