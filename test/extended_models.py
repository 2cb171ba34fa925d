"""Parameters that follow FSDP2's protocol for gathers, for ``test_extensions.py``, without torchao."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.distributed._functional_collectives import all_reduce

_aten = torch.ops.aten
_KEEP = {
    *(_aten.detach.default, _aten.clone.default, _aten._to_copy.default, _aten.copy_.default),
    *(_aten.split.Tensor, _aten.slice.Tensor, _aten.view.default, _aten.as_strided.default),
    *(_aten.new_zeros.default, _aten.empty_like.default, _aten.new_empty.default),
}


class Wrapper(torch.Tensor):
    """A tensor of full precision under a class of its own, which some operators keep."""

    _tensor: torch.Tensor

    @staticmethod
    def __new__(cls: Any, tensor: torch.Tensor) -> Any:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            tensor.size(),
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=tensor.requires_grad,
        )
        self._tensor = tensor
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__} of {tuple(self.shape)}"  # torch 2.11 logs it while it is fake
        )

    def __tensor_flatten__(self) -> Any:
        return ["_tensor"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["_tensor"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda t: t._tensor, (args, kwargs or {}))
        out = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, out) if func in _KEEP else out

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _into(full: torch.Tensor, out: torch.Tensor | None) -> Any:
    if out is None:
        return full, (full,)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        out.copy_(full[: out.shape[0]])
    return None


class RowScaled(Wrapper):
    """Gathered as data, uint8, and a scale per row, float32; pads what is uneven."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear)
        assert (outer_stride, mp_policy.param_dtype) == ((outer_size[1], 1), torch.bfloat16)
        shard, rows = self._tensor, -(-outer_size[0] // mesh.size())
        shard = F.pad(shard, (0, 0, 0, rows - shard.shape[0]))
        scale = shard.abs().amax(dim=1, keepdim=True) / 127 + 1e-9
        data = ((shard / scale).round() + 128).to(torch.uint8)
        if outer_size[0] % mesh.size():  # eager FSDP2 takes nothing of another shape then
            scale = scale.expand(shard.shape).contiguous()
        return (data, scale), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        data, scale = outputs
        assert metadata == "metadata"
        return _into(((data.float() - 128) * scale).to(param_dtype), out)


class TensorScaled(Wrapper):
    """Gathered as float8, scaled by the largest value of all ranks."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        amax = all_reduce(self._tensor.abs().max(), "max", mesh.get_group())
        scale = 448 / amax
        return ((self._tensor * scale).to(torch.float8_e4m3fn),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return _into((outputs[0].float() / metadata[0]).to(param_dtype), out)


DIM = 24


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.up = wrap(nn.Linear(DIM, hidden), RowScaled)
        self.down = wrap(nn.Linear(hidden, DIM, bias=False), TensorScaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


class Model(nn.Module):
    """The last block's weight is read twice."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(2))
        self.last = wrap(nn.Linear(DIM, DIM), TensorScaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(torch.relu(self.last(x))).square().mean()


def wrap(linear: nn.Linear, cls: type[Wrapper]) -> nn.Linear:
    linear.weight = nn.Parameter(cls(linear.weight.data))
    return linear


def inputs(step: int, rank: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(6, DIM, generator=rng).bfloat16()


def even() -> Any:
    return Model(2 * DIM), inputs


def uneven() -> Any:
    return Model(2 * DIM + 2), inputs
