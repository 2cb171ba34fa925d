"""Gather parameters and reduce their gradients in a compiled graph, by eager FSDP2's arithmetic.

Each gather and each reduction is a node of the graph, one per parameter and read::

    forward    shard -> param_dtype -> pad dim 0 -> all-gather -> full parameter
    backward   gradient -> reduce_dtype -> pad dim 0 -> reduce-scatter (avg)
                        [-> all-reduce (avg) over the replicas] -> dtype of the parameter

Shards on another dimension than 0 travel contiguous, as eager FSDP2's
(``_reassemble_all_gather_outputs``).

A tensor subclass with FSDP2's two methods chooses the tensors to gather, any number of any dtype,
and computes the full parameter from them (:class:`Extension`). torchao's weights do so::

    shard -> fsdp_pre_all_gather(...)  -> inputs, metadata       8-bit data, scales
    inputs -> all-gather -> outputs                              one collective each, to be bucketed
    outputs, metadata -> fsdp_post_all_gather(...) -> full parameter
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .._torch.aot import FakeTensorMode, fake_mode_of
from .._torch.fsdp2 import (
    KEEPS_WIDE_GRADIENTS,
    REDUCES_BY_GRAD_DTYPE,
    FSDPParam,
    Layout,
    is_distributed,
    is_traceable_wrapper_subclass,
    map_parts,
    mesh_of,
    parts_of,
    places_of,
    shard_of,
    sharded_parameter,
)
from .._torch.process_groups import MeshGroup, as_argument, mesh_group

_c10d = torch.ops._c10d_functional
_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Unshard:
    """Gathers one sharded parameter to the tensor that it was, plain or a ``DTensor``."""

    def __init__(
        self,
        managed: FSDPParam,
        layout: Layout,
        original: nn.Parameter,
        extension: Extension | None,
        unit: Any,  # a `Unit`, which has this
    ) -> None:
        self.managed, self.layout, self.extension, self.unit = managed, layout, extension, unit
        self.dim, self.shard_size = layout.dim, layout.shards
        self.shape: tuple[int, ...] = tuple(managed._orig_size)
        self.part: tuple[Any, ...] = ()  # of a `DTensor`: its mesh and placements, shape, stride
        if is_distributed(original):
            self.part = (_empty_like(original), tuple(original.shape), original.stride())
        mesh, shard_dim, replica_dim = layout.mesh, layout.shard_dim, layout.replica_dim
        self.shard_group = None if shard_dim is None else mesh_group(mesh, shard_dim)
        replicas = None if replica_dim is None else mesh_group(mesh, replica_dim)
        ranks, local_rows = self.shard_size * layout.replicas, managed.sharded_size[0]
        groups = (self.shard_group, self.shard_size, replicas)
        self.reduction = Reduction(layout.reduce_dtype, *groups, ranks, self.dim, local_rows)
        self.unreduced: torch.Tensor | None = None
        self.full: torch.Tensor | None = None

    def check(self) -> None:
        """Raise a TypeError for a reduction that drops imaginary parts."""
        param, reduce_dtype = self.managed.sharded_param, self.layout.reduce_dtype
        if param.dtype.is_complex and reduce_dtype is not None and not reduce_dtype.is_complex:
            raise TypeError(
                f"gradients of {param.dtype} can't be reduced in {reduce_dtype}, which drops their "
                "imaginary parts: set mp_policy.reduce_dtype to None for the unit"
            )

    def prepare(self) -> None:
        """Take up an extension that came after sharding."""
        shard = shard_of(self.managed.sharded_param)
        if self.extension is None and self.shard_group is not None and extends_gather(shard):
            module, name = places_of(self.managed)[0]
            label, shape = f"{name} of a {type(module).__name__}", torch.Size(self.shape)
            self.extension = Extension(label, module, shard, self.layout, shape)

    def shard_of(self, registered: torch.Tensor) -> torch.Tensor:
        """Return the shard, whichever of FSDP2's parameters its module has ``registered``."""
        return sharded_parameter(self.managed, registered)

    def read(self, module: nn.Module, name: str) -> torch.Tensor:
        """Gather the parameter that a module has registered; traced, a node of the graph."""
        # FSDP2 may have left the full parameter registered in a unit that it runs. Dynamo's graph
        # must not depend on that; other tracers exchange registered parameters.
        if self.unit.is_named and torch.compiler.is_dynamo_compiling():
            return self(self.managed.sharded_param)
        return self(self.shard_of(module._parameters[name]))

    def param_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gathered parameter, for a shard's."""
        return (self.layout.param_dtype if dtype.is_floating_point else None) or dtype

    def reduction_of(self, dtype: torch.dtype) -> Reduction:
        """Return how gradients are reduced, for a shard's dtype."""
        # The dtype may change until the first forward, ``model.bfloat16()``, as with eager FSDP2.
        if REDUCES_BY_GRAD_DTYPE and self.reduction.dtype is None:
            return self.reduction._replace(dtype=dtype)
        return self.reduction

    def __call__(self, sharded: DTensor) -> torch.Tensor:
        shard, full = sharded.to_local(), self.full
        if full is None and self.extension is not None:
            with torch.no_grad():
                full = self.extension.gather(shard)
        gathered = self.gathering_of(shard.dtype) if full is None else full
        return attach(shard, self.unreduced, self.reduction_of(shard.dtype), gathered, *self.part)

    def leaf(self, sharded: DTensor) -> torch.Tensor:
        """Create a leaf that accumulates gradients, in one element's memory.

        It has the full shape, or with ``scatters_each`` that of a padded shard.
        """
        dtype = self.reduction_of(sharded.dtype).dtype or self.param_dtype(sharded.dtype)
        element = torch.empty((), dtype=dtype, device=sharded.device)
        shard = (self._rows(), *self.managed.sharded_size[1:])
        scatters = self.reduction.scatters_each
        return element.expand(shard if scatters else self.shape).requires_grad_()

    def _rows(self) -> int:
        """Return the number of rows that a rank's shard has in a collective."""
        rows: int = self.managed.sharded_size[0]
        return rows if self.dim else -(-self.shape[0] // self.shard_size)

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        if self.extension is not None:
            return self.extension.gather(shard)
        return self.gathering_of(shard.dtype)(shard)

    def gathering_of(self, dtype: torch.dtype) -> Gathering:
        """Return how the parameter is gathered, for a shard's dtype."""
        group, rows = self.shard_group, self._rows()
        return Gathering(
            self.param_dtype(dtype), group, self.shard_size, self.dim, rows, self.shape[0]
        )


def _comes_wide(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> bool:
    """Return whether FSDP2 reduces gradients without rounding them to the parameter's ``dtype``."""
    # Such as the fp32 gradient of a norm's weight in bf16 that was multiplied with fp32.
    return KEEPS_WIDE_GRADIENTS and bool(
        reduce_dtype
        and reduce_dtype.is_floating_point
        and dtype.is_floating_point
        and reduce_dtype.itemsize > dtype.itemsize
    )


class Gathering(NamedTuple):
    """How one parameter is gathered; a constant in Dynamo's graphs."""

    dtype: torch.dtype  # of the gathered parameter
    shard_group: MeshGroup | None
    shards: int
    dim: int  # that is sharded
    rows: int  # of a rank's shard in the collective
    size: int  # of the parameter's dimension 0

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        """Gather the parameter from this rank's shard."""
        full = shard.to(self.dtype)
        if self.shard_group is None:
            return full.view_as(full)
        full = _pad_rows(full, self.rows)
        group = as_argument(self.shard_group)
        full = _c10d.all_gather_into_tensor(full.contiguous(), self.shards, group)
        full = _c10d.wait_tensor(full)
        if self.dim:
            parts = full.unflatten(0, (self.shards, self.rows)).movedim(0, self.dim)
            return parts.flatten(self.dim, self.dim + 1)
        padded = self.rows * self.shards != self.size
        return full.narrow(0, 0, self.size) if padded else full


class Reduction(NamedTuple):
    """How the gradient of one parameter is reduced; a constant in Dynamo's graphs."""

    dtype: torch.dtype | None  # of the reductions; None keeps the gradient's
    shard_group: MeshGroup | None
    shards: int
    replica_group: MeshGroup | None
    ranks: int  # of shards and replicas
    dim: int  # that is sharded
    local_rows: int  # of this rank's shard
    factor: float | None = None  # divides the sum instead of ``ranks``
    only_sums: bool = False  # whether process groups add and never average
    scatters_each: bool = False  # whether a `ReduceOnce` adds the results of `scattered`

    def __call__(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce a full gradient to this rank's shard."""
        return self.over_replicas(self.scattered(grad))

    def scattered(self, grad: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter a full gradient over the shards, to a padded shard."""
        shards, dim = self.shards, self.dim
        if self.dtype is not None:
            grad = grad.to(self.dtype)
        before, op, _, _ = self._division(grad.dtype)
        if dim:
            parts = grad.unflatten(dim, (shards, grad.shape[dim] // shards)).movedim(dim, 0)
            grad = parts.flatten(0, 1)
        if before != 1:
            grad = grad / before
        if self.shard_group is not None:
            rows = -(-grad.shape[0] // shards)
            grad = _pad_rows(grad, rows * shards).contiguous()
            group = as_argument(self.shard_group)
            grad = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(grad, op, shards, group))
        return grad

    def over_replicas(self, grad: torch.Tensor) -> torch.Tensor:
        """All-reduce a padded shard of a gradient over the replicas, and cut the padding off."""
        _, _, op, after = self._division(grad.dtype)
        if self.replica_group is not None:
            group = as_argument(self.replica_group)
            grad = _c10d.wait_tensor(_c10d.all_reduce(grad.contiguous(), op, group))
        if after != 1:
            grad = grad / after
        if self.shard_group is not None and not self.dim and self.local_rows != grad.shape[0]:
            grad = grad.narrow(0, 0, self.local_rows)
        return grad

    def _division(self, dtype: torch.dtype) -> tuple[float, str, str, float]:
        """Return a divisor before the reduction, the ops over shards and replicas, one after."""
        # As in eager FSDP2 (``_get_gradient_divide_factors``, torch 2.11 to 2.15) the process group
        # averages float32 and bfloat16. Other dtypes, which overflow sooner, are divided by about
        # the root of the factor before the sum, and by the rest after it.
        overflows = dtype not in (torch.float32, torch.bfloat16)
        if not overflows and not self.only_sums:
            if self.factor is None:
                return 1, "avg", "avg", 1
            return 1, "avg" if self.factor == self.shards else "sum", "sum", 1
        factor = float(self.ranks) if self.factor is None else self.factor
        before = 1  # a power of two, so that the division is exact
        while overflows and factor % before == 0 and factor / before > before:
            before *= 2
        return before, "sum", "sum", factor / before


class _Gather(torch.autograd.Function):
    """Gather a parameter, or return it, as part of a ``DTensor`` with ``part``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        unreduced: torch.Tensor | None,
        reduction: Reduction,
        gathered: torch.Tensor | Gathering,
        *part: Any,
    ) -> torch.Tensor:
        full = gathered(shard) if isinstance(gathered, Gathering) else gathered.detach()
        ctx.reduction, ctx.dtype = reduction, shard.dtype
        ctx.unreduced_dtype = None if unreduced is None else unreduced.dtype
        ctx.placements, ctx.others = None, (None,) * (2 + len(part))
        if _comes_wide(full.dtype, reduction.dtype):
            ctx.set_output_grad_dtype(None)
        if not part:
            return full
        like, shape, stride = part
        mesh, ctx.placements = like.device_mesh, like.placements
        return DTensor.from_local(
            full, mesh, ctx.placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.placements is not None:
            # FSDPParam._get_grad_inner_tensor sums a gradient that is partial on the inner mesh.
            # Since 2.15 the gradient has the reduction's dtype by then (`unsharded_grad_dtype`).
            dtype = ctx.reduction.dtype if REDUCES_BY_GRAD_DTYPE else None
            grad = grad.to(dtype or grad.dtype).redistribute(placements=ctx.placements).to_local()
        if ctx.unreduced_dtype is not None:  # passed on to the leaf of a `ReduceOnce`
            if ctx.reduction.scatters_each:
                grad = ctx.reduction.scattered(grad)
            return None, grad.to(ctx.unreduced_dtype), *ctx.others
        grad = ctx.reduction(grad).to(ctx.dtype)
        # The tensors of a subclass are views of one bucket. A class may want equal offsets of them.
        grad = grad.clone() if is_traceable_wrapper_subclass(grad) else grad
        return grad, None, *ctx.others


# Dynamo does not trace into this: it would require the parameter's class and dtype of the gradient,
# and a third of its time would go to the graphs of each parameter's forward and backward.
@torch.compiler.allow_in_graph
def attach(
    shard: torch.Tensor,
    unreduced: torch.Tensor | None,
    reduction: Reduction,
    gathered: torch.Tensor | Gathering,
    *part: Any,
) -> torch.Tensor:
    """Gather a parameter, or connect it to its shard, so that backward reduces the gradient."""
    attached: torch.Tensor = _Gather.apply(shard, unreduced, reduction, gathered, *part)
    return attached


CALLS = (attach, Gathering, Reduction)
"""Functions that Dynamo's graphs call. Their arguments are in keys of AOTAutograd's cache."""

_empty: dict[Any, torch.Tensor] = {}


def _empty_like(whole: Any) -> torch.Tensor:
    """Return a ``DTensor`` without elements, on the mesh and with the placements of another."""
    # A mesh gets into a graph in a tensor alone, and AOTAutograd finds the mesh of an output among
    # the inputs. Parameters share one, as each is an input. Not by the mesh itself: one made later,
    # for new process groups, is equal.
    mesh, placements = mesh_of(whole), whole.placements
    key = (id(mesh), placements, whole.ndim)
    if key not in _empty:
        local = torch.empty((0,) * whole.ndim, device=mesh.device_type)
        _empty[key] = DTensor.from_local(local, mesh, placements, run_check=False)
    return _empty[key]


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing))


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
