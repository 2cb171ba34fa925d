"""Parameters as sharding leaves them, tensor subclasses: the one place that knows their class,
``DTensor``, and of what plain tensors one is made."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .private import private_torch

with private_torch():
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_SHARD = "_local_tensor"


def is_distributed(tensor: Any) -> bool:
    """Whether a parameter is sharded or replicated over a mesh."""
    return isinstance(tensor, DTensor)


def mesh_of(value: Any) -> Any:
    """The mesh that a parameter is distributed over; None for anything else."""
    return value.device_mesh if isinstance(value, DTensor) else None


def placed(tensor: Any) -> tuple[bool, bool]:
    """Whether a distributed parameter is sharded, and whether it is replicated outermost.

    Replicas come first in a mesh: what is replicated further inside is tensor parallelism's. And
    strided shards (data parallelism on top of tensor parallelism) are no ``Shard`` to every torch.
    """
    placements = tensor.placements
    return not all(p.is_replicate() for p in placements), placements[0].is_replicate()


def shard_of(tensor: Any) -> torch.Tensor:
    """The plain tensor that this rank has of a parameter; a plain parameter itself."""
    local: torch.Tensor = getattr(tensor, _SHARD, tensor)
    return local


def is_part(source: str, sources: Collection[str]) -> bool:
    """Whether Dynamo's name for a tensor is that of the shard of another one among ``sources``."""
    return source.rpartition(f".{_SHARD}")[0] in sources


def name_per_tensor(name: str, tensor: Any) -> list[str | None]:
    """The name for a parameter's shard, and None for each further tensor that it is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return [name]
    attributes, _ = tensor.__tensor_flatten__()
    parts = [part for a in attributes for part in name_per_tensor(name, getattr(tensor, a))]
    return [name, *(None,) * (len(parts) - 1)]


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of."""
    found: list[torch.Tensor] = []
    map_parts(tensor, lambda part: found.append(part) or part)  # type: ignore[func-returns-value]
    return found


def map_parts(tensor: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor of what ``function`` makes of the plain tensors that ``tensor`` is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return function(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: map_parts(getattr(tensor, name), function) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
