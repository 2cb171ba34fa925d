"""Read which part of a tensor each rank of a mesh holds."""

from __future__ import annotations

import itertools
from typing import Any

from torch.distributed.tensor import DTensor

from .private import private_torch
from .sharded import sharded_dims


def blocks_of(tensor: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the part of a tensor at each coordinate of its mesh, 0 for dimensions of copies.

    Returns:
        Offsets, then sizes of each part; a plain tensor is all at ``()``.
    """
    if not isinstance(tensor, DTensor):
        return {(): (*(0,) * tensor.dim(), *tensor.shape)}
    with private_torch():
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as part

    mesh = tuple(tensor.device_mesh.shape)
    cut = {dim for _, dim in sharded_dims(tensor)}
    spans = [range(n) if d in cut else (0,) for d, n in enumerate(mesh)]
    found = {}
    for at in itertools.product(*spans):
        shape, offset = part(tensor.shape, mesh, list(at), tensor.placements)
        found[at] = (*offset, *shape)
    return found
