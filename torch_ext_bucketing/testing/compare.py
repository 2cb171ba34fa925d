"""What two runs are compared by: digests of their weights, and how many collectives they called."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from ..fqns import canonical_fqn

__all__ = ["count_collectives", "digest", "raw_bytes"]


def digest(model: nn.Module) -> str:
    """sha256 (hex) over the names, dtypes, shapes and bytes of this rank's shards."""
    total = hashlib.sha256()
    for name, parameter in sorted(
        (canonical_fqn(name), parameter) for name, parameter in model.named_parameters()
    ):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total.update(f"{name} {local.dtype} {tuple(local.shape)} ".encode())
        total.update(raw_bytes(local))
    return total.hexdigest()


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's bytes, without NumPy, which torch does not require."""
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


_CALLS = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}
"""The functions of ``torch.distributed`` that eager FSDP2 calls, by kind, newest name first."""


@contextlib.contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Count by kind what is called as ``torch.distributed.<function>`` inside the block."""
    counts = dict.fromkeys(_CALLS, 0)
    originals: dict[str, Callable[..., Any]] = {}

    def counting(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[kind] += 1
            return original(*args, **kwargs)

        return call

    for kind, names in _CALLS.items():
        for name in names:
            if hasattr(dist, name):
                originals[name] = getattr(dist, name)
                setattr(dist, name, counting(kind, originals[name]))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
