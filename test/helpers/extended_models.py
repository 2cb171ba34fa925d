"""Parameters with FSDP2 all-gather extensions, for ``test_extensions.py``, without torchao."""

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
    """A full-precision tensor in a subclass. Operators in ``_KEEP`` return the subclass."""

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
    """All-gathered as uint8 data with a float32 scale per row; pads uneven shards."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        assert isinstance(module, nn.Linear)
        assert (outer_stride, mp_policy.param_dtype) == ((outer_size[1], 1), torch.bfloat16)
        shard, rows = self._tensor, -(-outer_size[0] // mesh.size())
        shard = F.pad(shard, (0, 0, 0, rows - shard.shape[0]))
        scale = shard.abs().amax(dim=1, keepdim=True) / 127 + 1e-9
        data = ((shard / scale).round() + 128).to(torch.uint8)
        if outer_size[0] % mesh.size():  # eager FSDP2 requires the shard's shape then
            scale = scale.expand(shard.shape).contiguous()
        return (data, scale), "metadata"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        data, scale = outputs
        assert metadata == "metadata"
        return _into(((data.float() - 128) * scale).to(param_dtype), out)


class TensorScaled(Wrapper):
    """All-gathered as float8, scaled by the largest absolute value on all ranks."""

    kind = torch.float8_e4m3fn

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        amax = all_reduce(self._tensor.abs().max(), "max", mesh.get_group())
        scale = 448 / amax
        return ((self._tensor * scale).to(self.kind),), (scale,)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return _into((outputs[0].float() / metadata[0]).to(param_dtype), out)


class OtherScaled(TensorScaled):
    """All-gathered in another float8 dtype."""

    kind = torch.float8_e5m2


BLOCK = 2
"""Number of values that share a scale in :class:`Planes`."""


def _blockwise(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks of a row: float8 data, and power-of-two scales as bytes of float8_e8m0."""
    blocks = value.unflatten(-1, (-1, BLOCK))
    power = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-9).log2().floor() - 8
    data = (blocks * torch.exp2(-power)).to(torch.float8_e4m3fn)
    return data.flatten(-2), (power + 127).squeeze(-1).to(torch.uint8)


def _values(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return data.float() * torch.exp2(scale.float() - 127).repeat_interleave(BLOCK, -1)


class TwoPlanes(torch.Tensor):
    """An unsharded weight, quantized once along its rows and once along its columns."""

    _PARTS = ("rows", "row_scale", "columns", "column_scale")

    @staticmethod
    def __new__(cls: Any, parts: Any, dtype: torch.dtype, transposed: bool) -> Any:
        shape = parts[0].shape[::-1] if transposed else parts[0].shape
        stride = (1, shape[0]) if transposed else (shape[1], 1)
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=stride, dtype=dtype, device=parts[0].device
        )
        self.rows, self.row_scale, self.columns, self.column_scale = self.parts = parts
        self.transposed = transposed
        return self

    def __tensor_flatten__(self) -> Any:
        return list(self._PARTS), (self.dtype, self.transposed)

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Any:
        return cls(tuple(inner[name] for name in cls._PARTS), *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten.detach.default, _aten.t.default, _aten.as_strided.default):
            full = args[0]  # FSDP2's strided view has the same layout
            turned = full.transposed ^ (func is _aten.t.default)
            return cls(tuple(part.detach() for part in full.parts), full.dtype, turned)
        assert func in (_aten.mm.default, _aten.addmm.default), func
        *others, full = args
        if full.transposed:
            weight = _values(full.rows, full.row_scale).t()
        else:  # columns are stored as rows
            weight = _values(full.columns.mT, full.column_scale.mT).mT
        return func(*others, weight.to(full.dtype))

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Planes(Wrapper):
    """All-gathered as :class:`TwoPlanes`."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        columns = [part.mT.contiguous() for part in _blockwise(self._tensor.mT)]
        return (*_blockwise(self._tensor), *columns), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        # FSDP2 gathers into the buffers that the parts of `out` view.
        return None if out is not None else (TwoPlanes(outputs, param_dtype, False), outputs)


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
    """A model whose last layer is used twice."""

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
    """Make a model whose hidden rows neither 2 nor 4 ranks can share evenly."""
    return Model(2 * DIM + 1), inputs


def planes() -> Any:
    """Make a model whose linear layers, except the first, have two planes."""
    model = Model(2 * DIM)
    model.last = wrap(nn.Linear(DIM, DIM), Planes)
    for block in model.blocks:
        block.up = wrap(nn.Linear(DIM, 2 * DIM), Planes)
        block.down = wrap(nn.Linear(2 * DIM, DIM, bias=False), Planes)
    return model, inputs
