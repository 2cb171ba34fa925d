"""Gather parameters with FSDP2's all-gather extensions.

A tensor subclass with these two methods chooses the tensors to gather, any number of any dtype, and
computes the full parameter from them. torchao's weights do so::

    shard -> fsdp_pre_all_gather(...)  -> inputs, metadata       8-bit data, scales
    inputs -> all-gather -> outputs                              one collective each, to be bucketed
    outputs, metadata -> fsdp_post_all_gather(...) -> full parameter
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._torch.aot import FakeTensorMode, fake_mode_of
from .._torch.fsdp2 import Layout, map_parts, parts_of, shard_of

_c10d = torch.ops._c10d_functional
_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def extends_gather(tensor: torch.Tensor) -> bool:
    """Return whether a parameter has an all-gather extension."""
    return any(hasattr(tensor, method) for method in _METHODS)


def check_methods(name: str, param: torch.Tensor) -> None:
    """Raise a TypeError for a parameter that has one of FSDP2's two methods."""
    cls = type(param.data)
    missing = [method for method in _METHODS if not hasattr(cls, method)]
    if len(missing) == 1:
        raise TypeError(
            f"parameter {name}, a {cls.__name__}, has no {missing[0]}(): FSDP2's protocol needs "
            "both"
        )


class Extension:
    """The all-gather extension of one parameter, sharded on dim 0 over a 1-D mesh.

    A class that does not follow FSDP2's protocol is a ``TypeError``, wrong or unequal shapes on the
    ranks are a ``ValueError``, and its own errors are chained to a ``RuntimeError``.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        param: torch.Tensor,
        layout: Layout,
        shape: torch.Size | None = None,
    ) -> None:
        """Check a parameter before it is sharded, or with ``shape`` a shard of that full shape."""
        if layout.dim:
            raise ValueError(f"parameter {name} has an all-gather extension: shard it on dim 0")
        mesh = layout.mesh
        if mesh.ndim > 1:  # FSDP2 has checked that its dimensions have names
            mesh = mesh[mesh.mesh_dim_names[layout.shard_dim]]  # type: ignore[index]
        param_dtype, reduce_dtype = layout.param_dtype, layout.reduce_dtype
        cls = type(param.data)
        self.what = f"parameter {name}, a {cls.__name__}"
        on_class = hasattr(cls, _METHODS[0])
        if on_class and not hasattr(cls, "__tensor_flatten__"):
            raise TypeError(
                f"{self.what}, has no __tensor_flatten__(), which torch.compile needs of a subclass"
            )
        signature = inspect.signature(getattr(param.data if on_class else param, _METHODS[0]))
        if len(signature.parameters) not in (1, 5):
            raise TypeError(
                f"{self.what}: FSDP2 calls fsdp_pre_all_gather(mesh) or (mesh, outer_size, "
                f"outer_stride, module, mp_policy), and the signature is {signature}"
            )
        if on_class:
            self.pre, self.post = (getattr(cls, method) for method in _METHODS)
        else:  # a user gave the methods to the tensor
            pre, post = (getattr(param, method) for method in _METHODS)
            self.pre, self.post = (lambda _, *args: pre(*args)), (lambda _, *args: post(*args))
        self.ranks = mesh.size()
        self.group = mesh.get_group().group_name
        self.shape = param.shape if shape is None else shape
        self.stride = torch.empty(self.shape, device="meta").stride()
        floating = param.dtype.is_floating_point
        self.dtype = (param_dtype if floating else None) or param.dtype
        self.arguments: tuple[Any, ...] = (mesh,)
        if len(signature.parameters) == 5:
            policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)
            self.arguments = (mesh, self.shape, self.stride, module, policy)
        if shape is None:
            self._check(param)

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather the full parameter."""
        # Dynamo traces functions of a class, but not the bound methods of every class.
        inputs, metadata = self.pre(shard, *self.arguments)
        outputs = tuple(self._all_gather(x) for x in inputs)
        full, _ = self.post(shard, outputs, metadata, self.dtype)
        if full.shape != self.shape:  # rows that pad the last shards
            full = full.as_strided(self.shape, self.stride, 0)
        return full

    def _all_gather(self, value: torch.Tensor) -> torch.Tensor:
        dtype = value.dtype
        value = _as_known(value if value.ndim else value.view(1)).contiguous()
        value = _c10d.wait_tensor(_c10d.all_gather_into_tensor(value, self.ranks, self.group))
        return value if value.dtype == dtype else value.view(dtype)

    def _check(self, param: torch.Tensor) -> None:
        """Gather fake shards of every size, so that all ranks raise the same error."""
        rows = -(-self.shape[0] // self.ranks)
        whole = (self.shape, torch.Size((rows * self.ranks, *self.shape[1:])))
        first: list[tuple[torch.Size, torch.dtype]] = []
        mode = fake_mode_of(parts_of(param.data)[0]) or FakeTensorMode()
        full = map_parts(param.data, lambda part: mode.from_tensor(part.data))
        with mode, torch.no_grad():
            # Shards of the first ranks are full, one may be partly full, and the rest are empty.
            last = self.ranks - 1
            for rank in dict.fromkeys((0, min(self.shape[0] // max(rows, 1), last), last)):
                shard = _shard(full, rank, self.ranks)
                inputs, metadata = self._pair(shard, _METHODS[0], self.arguments)
                layout = [(x.shape, x.dtype) for x in inputs]
                first = first or layout
                if layout != first:
                    raise ValueError(
                        f"{self.what}: its {self.shape[0]} rows are sharded unevenly over "
                        f"{self.ranks} ranks, and fsdp_pre_all_gather gives tensors of "
                        f"{_listed(first)} on one and of {_listed(layout)} on another: it must pad "
                        f"them to {rows} rows, or the parameter have a multiple of {self.ranks}"
                    )
                outputs = tuple(self._all_gather(x) for x in inputs)
                arguments = (outputs, metadata, self.dtype)
                result, _ = self._pair(shard, _METHODS[1], arguments)
                if not isinstance(result, torch.Tensor) or result.shape not in whole:
                    was = tuple(result.shape) if isinstance(result, torch.Tensor) else result
                    raise ValueError(
                        f"{self.what}: fsdp_post_all_gather returns {was!r} for a parameter of "
                        f"shape {tuple(self.shape)}"
                    )

    def _pair(self, shard: torch.Tensor, method: str, arguments: tuple[Any, ...]) -> Any:
        try:
            result = getattr(shard, method)(*arguments)
        except Exception as error:
            text = f"{self.what}: {method} raised {type(error).__name__}: {error}"
            raise RuntimeError(text) from error
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"{self.what}: {method} must return two values, and returned {result!r}"
            )
        return result


def broadcast_from_first(params: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Give parameters, or ranks' parts of them, the values of the mesh's first rank, in place."""
    for param in params:
        for part in parts_of(shard_of(param).detach()):
            if not part.is_meta and fake_mode_of(part) is None:
                for dim in range(mesh.ndim):
                    dist.broadcast(_as_known(part), group=mesh.get_group(dim), group_src=0)


def _shard(full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return one rank's rows, as eager FSDP2 takes them: a part of rows with padding."""
    chunks = torch.chunk(full, ranks)
    padded = full.new_zeros(chunks[0].shape)
    if rank >= len(chunks):
        return padded.narrow(0, 0, 0)
    part = padded.narrow(0, 0, chunks[rank].shape[0])
    part.copy_(chunks[rank])
    return part


def _as_known(value: torch.Tensor) -> torch.Tensor:
    """View ``value`` as bytes if its dtype is an 8-bit float, which c10d does not support."""
    small = value.dtype.itemsize == 1 and value.dtype.is_floating_point
    return value.view(torch.uint8) if small else value


def _listed(layout: list[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(str(tuple(shape)) for shape, _ in layout)
