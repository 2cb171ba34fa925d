"""Data parallelism, one collective per parameter, in the arithmetic of eager FSDP2.

Every parameter becomes a ``DTensor``; reading it gathers the full tensor, and its gradient is
reduced on the way back. Compiled, each gather and each reduction is a node of the graph, ready to
be bucketed. The arithmetic is that of ``torch.distributed.fsdp.fully_shard`` with a
``MixedPrecisionPolicy``, so the results can be equal bit for bit::

    forward    shard -> param_dtype -> pad dim 0 -> all-gather -> full parameter
    backward   gradient -> reduce_dtype -> pad dim 0 -> reduce-scatter (avg)
                        [-> all-reduce (avg) over the replicas] -> dtype of the parameter
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

from .._torch.fsdp2 import REDUCES_BY_GRAD_DTYPE

__all__ = [
    "Mode",
    "data_parallel",
]

Mode = Literal["fully_shard", "hybrid_shard", "replicate"]

_c10d = torch.ops._c10d_functional


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: Mode = "fully_shard",
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard or replicate every parameter of ``model``, in place.

    A parameter that several modules share stays shared. Parameters may be uneven over the ranks.

    Args:
        model: its parameters are plain tensors on the mesh's device, equal on all ranks or not:
            rank 0's values are distributed.
        mesh: 1-D for ``"fully_shard"`` and ``"replicate"``; for ``"hybrid_shard"`` 2-D, replicas
            first, then shards.
        mode: shard every parameter on dim 0, do so within groups that are replicas of each other,
            or keep whole copies (DDP).
        param_dtype: dtype of the gathered parameters; None keeps each parameter's own.
        reduce_dtype: dtype in which gradients are reduced; None does as eager FSDP2 does on the
            running torch: the dtype of the parameter from 2.15 on, that of the gradient before.

    Returns:
        ``model``.

    Raises:
        TypeError: ``mesh`` is no device mesh, or a dtype is none.
        ValueError: an unknown mode, a mesh of another number of dimensions, a parameter that is
            a ``DTensor`` already, or a scalar to be sharded. The model is as it was.
    """
    if mode not in ("fully_shard", "hybrid_shard", "replicate"):
        raise ValueError(f"mode must be 'fully_shard', 'hybrid_shard' or 'replicate', got {mode!r}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}")
    for dtype in (param_dtype, reduce_dtype):
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"param_dtype and reduce_dtype must be torch dtypes, got {dtype!r}")
    dims = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != dims:
        raise ValueError(f"mode {mode!r} needs a {dims}-D mesh, got {mesh.ndim} dimensions")
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(f"parameter {name} is a DTensor already; shard a model once")
        if not param.ndim and mode != "replicate":
            raise ValueError(
                f"parameter {name} is a scalar, which can't be sharded (nor by eager FSDP2): make "
                "it a tensor of one element"
            )

    placements: list[Any] = {
        "fully_shard": [Shard(0)],
        "hybrid_shard": [Replicate(), Shard(0)],
        "replicate": [Replicate()],
    }[mode]
    shard_dim = {"fully_shard": 0, "hybrid_shard": 1, "replicate": None}[mode]
    replica_dim = {"fully_shard": None, "hybrid_shard": 0, "replicate": 0}[mode]
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, param in list(module._parameters.items()):
            if param is None:
                continue
            if param not in distributed:
                distributed[param] = nn.Parameter(
                    distribute_tensor(param.detach(), mesh, placements),
                    requires_grad=param.requires_grad,
                )
            module.register_parameter(name, distributed[param])
            reduced_in = reduce_dtype or (param.dtype if REDUCES_BY_GRAD_DTYPE else None)
            parametrize.register_parametrization(
                module,
                name,
                _Unshard(mesh, shard_dim, replica_dim, param.shape, param_dtype, reduced_in),
                unsafe=True,  # the full parameter has another dtype than the shard
            )
    return model


class _Unshard(nn.Module):
    """The parametrization: from the sharded DTensor to the full, plain tensor."""

    def __init__(
        self,
        mesh: DeviceMesh,
        shard_dim: int | None,
        replica_dim: int | None,
        shape: torch.Size,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.param_dtype = param_dtype
        self.reduce_dtype = reduce_dtype
        self.shard_size = 1 if shard_dim is None else mesh.size(shard_dim)
        self.shard_group = None if shard_dim is None else mesh.get_group(shard_dim).group_name
        self.replica_group = None if replica_dim is None else mesh.get_group(replica_dim).group_name
        self.local_rows = shape[0] if shape else 1
        if shard_dim is not None:
            rows = -(-self.local_rows // self.shard_size)
            rank = mesh.get_local_rank(shard_dim)
            self.local_rows = max(0, min(rows, self.local_rows - rank * rows))

    def forward(self, sharded: DTensor) -> torch.Tensor:
        return _Gather.apply(
            sharded.to_local(),
            self.shape,
            self.local_rows,
            self.shard_size,
            self.shard_group,
            self.replica_group,
            self.param_dtype,
            self.reduce_dtype,
        )


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        shape: tuple[int, ...],
        local_rows: int,
        shard_size: int,
        shard_group: str | None,
        replica_group: str | None,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> torch.Tensor:
        ctx.rows = local_rows
        ctx.shard_size = shard_size
        ctx.shard_group = shard_group
        ctx.replica_group = replica_group
        ctx.reduce_dtype = reduce_dtype
        ctx.dtype = shard.dtype
        full = shard if param_dtype is None else shard.to(param_dtype)
        if shard_group is None:
            return full.view_as(full)
        rows = -(-shape[0] // shard_size)
        full = _pad_rows(full, rows)
        full = _c10d.all_gather_into_tensor(full.contiguous(), shard_size, shard_group)
        full = _c10d.wait_tensor(full)
        return full.narrow(0, 0, shape[0]) if rows * shard_size != shape[0] else full

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.reduce_dtype is not None:
            grad = grad.to(ctx.reduce_dtype)
        if ctx.shard_group is not None:
            rows = -(-grad.shape[0] // ctx.shard_size)
            grad = _pad_rows(grad, rows * ctx.shard_size)
            grad = _c10d.reduce_scatter_tensor(
                grad.contiguous(), "avg", ctx.shard_size, ctx.shard_group
            )
            grad = _c10d.wait_tensor(grad)
        if ctx.replica_group is not None:
            grad = _c10d.all_reduce(grad.contiguous(), "avg", ctx.replica_group)
            grad = _c10d.wait_tensor(grad)
        if ctx.shard_group is not None and ctx.rows != grad.shape[0]:
            grad = grad.narrow(0, 0, ctx.rows)
        return (grad.to(ctx.dtype), *(None,) * 7)


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing))
