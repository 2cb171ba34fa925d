"""Shard a model with one collective per parameter and eager FSDP2's arithmetic.

Every parameter becomes a ``DTensor``. Reading it gathers the full tensor, and backward reduces its
gradient. Compiled, each gather and each reduction is a node of the graph. The arithmetic is that of
``fully_shard`` with a ``MixedPrecisionPolicy``::

    forward    shard -> param_dtype -> pad dim 0 -> all-gather -> full parameter
    backward   gradient -> reduce_dtype -> pad dim 0 -> reduce-scatter (avg)
                        [-> all-reduce (avg) over the replicas] -> dtype of the parameter

:func:`data_parallel` shards a whole model, :func:`.fully_shard` unit by unit. Shards on another
dimension than 0 travel contiguous, as eager FSDP2's (``_reassemble_all_gather_outputs``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .._torch.fsdp2 import (
    KEEPS_WIDE_GRADIENTS,
    REDUCES_BY_GRAD_DTYPE,
    is_distributed,
    mesh_of,
    placed,
    shard_of,
    spanned,
)
from .._torch.process_groups import MeshGroup, as_argument, mesh_group
from ..errors import check_argument
from ..fqns import canonical_fqn, parameters_by_name
from .extensions import Extension, distribute, extends_gather

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
    """Shard or replicate every parameter of ``model``, in place, and return ``model``.

    Modules may share parameters. ``named_parameters()`` and ``state_dict()`` return the shards
    (``DTensor``) under the former names, so checkpoints are compatible with eager FSDP2's. Reading
    an attribute, ``module.weight``, gathers the parameter on all ranks. Writes to it, such as by
    ``torch.nn.init``, are lost: initialize before, or write to those of ``named_parameters()``,
    which are also the ones to freeze. Each module's class becomes a subclass, as with
    ``fully_shard``. Parametrizations (``torch.nn.utils.parametrize``) get the gathered parameter.
    Parameters with FSDP2 all-gather extensions are gathered by these (:mod:`.fsdp.extensions`),
    except by ``"replicate"``. An error leaves the model unchanged.

    Args:
        model: has its parameters on the mesh's device. Rank 0's values are distributed. Each rank
            shards its part of a ``DTensor`` of tensor parallelism, on other dimensions of the same
            mesh.
        mesh: 1-D; for ``"hybrid_shard"`` 2-D, replicas first, then shards.
        mode: shard every parameter on dim 0, do so within each group of replicas, or keep whole
            copies (DDP).
        param_dtype: dtype of the gathered parameters; None keeps each parameter's own.
        reduce_dtype: dtype of the reductions; None does as the running torch's eager FSDP2: the
            parameter's dtype from 2.15 on, the gradient's before.
    """
    if mode not in ("fully_shard", "hybrid_shard", "replicate"):
        raise ValueError(f"mode must be 'fully_shard', 'hybrid_shard' or 'replicate', got {mode!r}")
    check_argument("model", model, nn.Module)
    check_argument("mesh", mesh, DeviceMesh)
    check_argument("param_dtype", param_dtype, torch.dtype | None)
    check_argument("reduce_dtype", reduce_dtype, torch.dtype | None)
    dims = 2 if mode == "hybrid_shard" else 1
    if mesh.ndim != dims:
        raise ValueError(f"mode {mode!r} needs a {dims}-D mesh, got {mesh.ndim} dimensions")
    shard_dim = None if mode == "replicate" else dims - 1
    replica_dim = None if mode == "fully_shard" else 0
    layout = Layout(mesh, shard_dim, replica_dim, 0, param_dtype, reduce_dtype)
    for name, param in model.named_parameters():
        layout.check(name, param)
    distribute_parameters([model], dict.fromkeys(model.parameters(), layout), from_first=True)
    return model


@dataclass(frozen=True)
class Layout:
    """How ranks share a parameter, and the dtypes that it travels in."""

    mesh: DeviceMesh  # of 1 or 2 dimensions
    shard_dim: int | None  # the mesh dimension of the shards; None: whole copies
    replica_dim: int | None = None  # the mesh dimension of the replicas, or None
    # The tensor's dimension that is sharded. Other than 0 it is divisible by the shards.
    dim: int = 0
    # Dtype of the gathered parameter, if it has floating point; None: its own.
    param_dtype: torch.dtype | None = None
    # Dtype of the reduction; None: see :func:`data_parallel`.
    reduce_dtype: torch.dtype | None = None

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy."""
        return 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)

    @property
    def placements(self) -> list[Any]:
        """The placements of the parameter as a ``DTensor``."""
        dims = range(self.mesh.ndim)
        return [Shard(self.dim) if d == self.shard_dim else Replicate() for d in dims]

    def check(self, name: str, param: nn.Parameter) -> None:
        """Raise a ValueError if a parameter can't be sharded, or replicated, so."""
        if self.shard_dim is not None and not param.ndim:
            raise ValueError(
                f"parameter {name} is a scalar, which can't be sharded (nor by eager FSDP2): make "
                "it a tensor of one element"
            )
        try:
            spanned(self.mesh, self.placements, param)
        except ValueError as error:
            raise ValueError(f"parameter {name} {error}") from error

    def extension(self, name: str, param: torch.Tensor, module: nn.Module) -> Extension:
        """Return a parameter's all-gather extension."""
        mesh = self.mesh
        assert self.shard_dim is not None
        if self.dim:
            raise ValueError(f"parameter {name} has an all-gather extension: shard it on dim 0")
        if mesh.ndim > 1:
            if mesh.mesh_dim_names is None:
                raise ValueError(
                    "all-gather extensions get the shards' part of the mesh: name its dimensions, "
                    "init_device_mesh(..., mesh_dim_names=...)"
                )
            mesh = mesh[mesh.mesh_dim_names[self.shard_dim]]
        return Extension(name, param, module, mesh, self.param_dtype, self.reduce_dtype)


def distribute_parameters(
    roots: Sequence[nn.Module],
    layouts: Mapping[nn.Parameter, Layout],
    *,
    from_first: bool,
    gate: Any = None,
) -> None:
    """Replace parameters below ``roots`` by shards that are gathered when they are read.

    With ``from_first`` the values are those of rank 0; otherwise each rank takes its part of its
    own values, as ``fully_shard`` does. Until ``gate.running`` of a :class:`.Unit`, reading a
    parameter outside of a compile returns the shard.
    """
    torch.compiler.allow_in_graph(attach)
    places = [place for root in roots for place in parameters_by_name(root)]
    extensions: dict[nn.Parameter, Extension] = {}
    for fqn, param, module in places:
        layout = None if param in extensions else layouts.get(param)
        if layout is not None and layout.shard_dim is not None and extends_gather(shard_of(param)):
            extensions[param] = layout.extension(fqn, shard_of(param), module)
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    for param, layout in layouts.items():
        shard = distribute(param, layout.mesh, layout.placements, from_first)
        distributed[param] = nn.Parameter(shard, requires_grad=param.requires_grad)
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        sharded = {name: param for name, param in own if param in layouts}
        for name, param in sharded.items():
            unshard = Unshard(layouts[param], param, extensions.get(param), gate)
            module.__dict__.setdefault("_unshards", {})[name] = unshard
            module._parameters[name] = distributed[param]
        if sharded:
            change_class(module)


def change_class(module: nn.Module, *bases: type) -> None:
    """Give a module a subclass of its class with ``bases`` that gathers sharded parameters."""
    # Modules of one class share the subclass, and so the compiled code.
    cls: Any = type(module)
    plain, known = getattr(cls, "_plain_class", (cls, ()))
    names = tuple(module.__dict__.get("_unshards", ()))
    module.__class__ = _gathering_class(plain, names, tuple(dict.fromkeys((*bases, *known))))


def ignored_extensions(model: nn.Module) -> dict[str, str]:
    """Map parameters to their classes, where the model's sharding ignores all-gather extensions."""
    # `data_parallel` calls them, other SimpleFSDPs do not.
    ignored = {}
    for path, module in model.named_modules():
        unshards = module.__dict__.get("_unshards", {})
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            shard = shard_of(param)
            if name not in unshards and extends_gather(shard) and placed(param)[0]:
                ignored[canonical_fqn(f"{path}.{name}".lstrip("."))] = type(shard.data).__name__
    return ignored


class Unshard:
    """Gathers one sharded parameter to the tensor that it was, plain or a ``DTensor``."""

    def __init__(
        self, layout: Layout, param: nn.Parameter, extension: Extension | None, gate: Any
    ) -> None:
        self.layout = layout
        self.dim, self.shard_size = layout.dim, layout.shards
        self.shape = shape = tuple(shard_of(param).shape)
        self.attach = attach
        self.whole: tuple[Any, ...] = ()
        if is_distributed(param):
            self.attach = _attach_on(mesh_of(param), param.placements)  # type: ignore[attr-defined]
            self.whole = (tuple(param.shape), param.stride())
        self.extension = extension
        self.gate = gate
        mesh, shard_dim, replica_dim = layout.mesh, layout.shard_dim, layout.replica_dim
        self.shard_group = None if shard_dim is None else mesh_group(mesh, shard_dim)
        replicas = None if replica_dim is None else mesh_group(mesh, replica_dim)
        ranks = self.shard_size * (1 if replica_dim is None else mesh.size(replica_dim))
        local_rows = shape[0] if shape else 1
        if shard_dim is not None and not self.dim:
            rows = -(-local_rows // self.shard_size)
            local_rows = max(0, min(rows, local_rows - mesh.get_local_rank(shard_dim) * rows))
        # A flat tuple: Dynamo passes it to `attach` as a constant.
        groups = (self.shard_group, self.shard_size, replicas)
        self.reduction: _Reduction = (None, *groups, local_rows, self.dim, ranks, None, False)
        self.unreduced: torch.Tensor | None = None
        self.full: torch.Tensor | None = None

    def divide_by(self, factor: float | None, only_sums: bool) -> None:
        """Divide gradients by ``factor`` instead of the ranks' number; see ``FSDPModule``."""
        self.reduction = (*self.reduction[:7], factor, only_sums)

    def waits(self) -> bool:
        """Return whether reading the parameter returns the shard, as before the first forward."""
        gate = self.gate
        return not (torch.compiler.is_compiling() or gate is None or gate.running)

    def param_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the gathered parameter, for a shard's."""
        return (self.layout.param_dtype if dtype.is_floating_point else None) or dtype

    def how(self, dtype: torch.dtype) -> _Reduction:
        """Return how gradients are reduced, for a shard's dtype."""
        # The dtype may change until the first forward, ``model.bfloat16()``, as with eager FSDP2.
        reduce_dtype = self.layout.reduce_dtype or (dtype if REDUCES_BY_GRAD_DTYPE else None)
        return (reduce_dtype, *self.reduction[1:])

    def __call__(self, sharded: DTensor) -> torch.Tensor:
        shard = sharded.to_local()
        how = self.how(shard.dtype)
        wide = _comes_wide(self.param_dtype(shard.dtype), how[0])
        full = self.full
        if full is None and self.extension is None and not self.whole and not wide:
            return _Gather.apply(shard, self.unreduced, self, None)
        if full is None:
            with torch.no_grad():
                full = self.gather(shard)
        return self.attach(shard, self.unreduced, how, full, *self.whole)

    def leaf(self, sharded: DTensor) -> torch.Tensor:
        """Create a leaf that accumulates gradients: the full shape, in one element's memory."""
        dtype = self.how(sharded.dtype)[0] or self.param_dtype(sharded.dtype)
        one = torch.empty((), dtype=dtype, device=sharded.device)
        return one.expand(self.shape).requires_grad_()

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        if self.extension is not None:
            return self.extension.gather(shard)
        full = shard.to(self.param_dtype(shard.dtype))
        if self.shard_group is None:
            return full.view_as(full)
        rows = full.shape[0] if self.dim else -(-self.shape[0] // self.shard_size)
        full = _pad_rows(full, rows)
        group = as_argument(self.shard_group)
        full = _c10d.all_gather_into_tensor(full.contiguous(), self.shard_size, group)
        full = _c10d.wait_tensor(full)
        if self.dim:
            parts = full.unflatten(0, (self.shard_size, rows)).movedim(0, self.dim)
            return parts.flatten(self.dim, self.dim + 1)
        padded = rows * self.shard_size != self.shape[0]
        return full.narrow(0, 0, self.shape[0]) if padded else full


def _comes_wide(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> bool:
    """Return whether FSDP2 reduces gradients without rounding them to the parameter's ``dtype``."""
    # Such as the fp32 gradient of a norm's weight in bf16 that was multiplied with fp32.
    return KEEPS_WIDE_GRADIENTS and bool(
        reduce_dtype
        and reduce_dtype.is_floating_point
        and dtype.is_floating_point
        and reduce_dtype.itemsize > dtype.itemsize
    )


_Reduction: TypeAlias = tuple[
    torch.dtype | None, MeshGroup | None, int, MeshGroup | None, int, int, int, float | None, bool
]
"""How to reduce a gradient: dtype, group and number of shards, group of replicas, number of rows of
this rank's shard, sharded dimension, number of all ranks, and what :func:`_division` takes."""


def reduced(grad: torch.Tensor, how: _Reduction) -> torch.Tensor:
    dtype, shard_group, shards, replica_group, local_rows, dim, ranks, factor, only_sums = how
    if dtype is not None:
        grad = grad.to(dtype)
    before, op, op_replicas, after = _division(grad.dtype, shards, ranks, factor, only_sums)
    if dim:
        parts = grad.unflatten(dim, (shards, grad.shape[dim] // shards)).movedim(dim, 0)
        grad = parts.flatten(0, 1)
    if before != 1:
        grad = grad / before
    if shard_group is not None:
        rows = -(-grad.shape[0] // shards)
        grad = _pad_rows(grad, rows * shards)
        group = as_argument(shard_group)
        grad = _c10d.reduce_scatter_tensor(grad.contiguous(), op, shards, group)
        grad = _c10d.wait_tensor(grad)
    if replica_group is not None:
        grad = _c10d.all_reduce(grad.contiguous(), op_replicas, as_argument(replica_group))
        grad = _c10d.wait_tensor(grad)
    if after != 1:
        grad = grad / after
    if shard_group is not None and not dim and local_rows != grad.shape[0]:
        grad = grad.narrow(0, 0, local_rows)
    return grad


def _division(
    dtype: torch.dtype, shards: int, ranks: int, factor: float | None, only_sums: bool
) -> tuple[float, str, str, float]:
    """Return a divisor before the reduction, the ops over shards and replicas, a divisor after."""
    # As in eager FSDP2 (``_get_gradient_divide_factors``, torch 2.11 to 2.15) the process group
    # averages float32 and bfloat16. Other dtypes, which overflow sooner, are divided by about the
    # root of ``factor`` before the sum, and by the rest after it.
    overflows = dtype not in (torch.float32, torch.bfloat16)
    if not overflows and not only_sums:
        if factor is None:
            return 1, "avg", "avg", 1
        return 1, "avg" if factor == shards else "sum", "sum", 1
    factor = float(ranks) if factor is None else factor
    before = 1  # a power of two, so that the division is exact
    while overflows and factor % before == 0 and factor / before > before:
        before *= 2
    return before, "sum", "sum", factor / before


@functools.cache
def _gathering_class(cls: Any, names: tuple[str, ...], bases: tuple[type, ...]) -> Any:
    """Create a subclass of ``cls`` that gathers parameters when they are read as attributes."""

    # Shards stay in ``module._parameters``, which ``named_parameters()``, ``state_dict()`` and
    # optimizers read.
    def read(module: Any, name: str) -> torch.Tensor:
        sharded = module._parameters.get(name)
        if sharded is None:  # set to None or deleted; nn.Module handles the error
            raise AttributeError(name)
        unshard = module._unshards[name]
        if unshard.waits():
            return sharded
        full = unshard(sharded)
        steps: Any = module._modules.get("parametrizations")
        if steps is not None and name in steps:
            for step in steps[name]:
                full = step(full)
        return full

    def fqn_modifiers(module: nn.Module) -> dict[str, str]:
        # `torch.distributed.checkpoint.state_dict` resolves a parameter's name attribute by
        # attribute. With this detour it ends at the shards and gathers nothing.
        return dict.fromkeys(names, "_sharded_parameters")

    members: dict[str, Any] = {"__module__": cls.__module__, "_plain_class": (cls, bases)}
    if not names:
        return type(f"Gathering{cls.__name__}", (*bases, cls), members)
    members.update({name: property(functools.partial(read, name=name)) for name in names})
    members["parametrizations"] = property(functools.partial(_parametrizations, names=names))
    members["_fqn_modifiers"] = fqn_modifiers
    members["_sharded_parameters"] = property(lambda m: SimpleNamespace(**m._parameters))
    return type(f"Gathering{cls.__name__}", (*bases, cls), members)


def _parametrizations(module: nn.Module, names: tuple[str, ...]) -> nn.ModuleDict:
    """Return the parametrizations of a module, for ``register_parametrization`` to append to."""
    # Every sharded parameter has an entry, even without a parametrization. An appended one gets the
    # gathered tensor. The entries become a part of the module with the first one appended.
    steps = nn.ModuleDict(module._modules.get("parametrizations"))  # type: ignore[arg-type]
    for name in names:
        if name not in steps:
            steps[name] = _Steps(lambda: module._modules.update(parametrizations=steps))
    return steps


class _Steps(nn.ModuleList):
    """The parametrizations of a sharded parameter; calls ``keep`` before one is added."""

    unsafe = True  # the gathered parameter has another dtype and shape than the shard

    def __init__(self, keep: Callable[[], object]) -> None:
        super().__init__()
        self.keep = keep

    def append(self, module: nn.Module) -> Self:
        """Run ``module`` on the gathered parameter, after earlier parametrizations."""
        self.keep()
        return super().append(module)


class _Gather(torch.autograd.Function):
    """Gather the full parameter, or return a given one; ``inner``: as part of a ``DTensor``."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        unreduced: torch.Tensor | None,
        how: Unshard | _Reduction,
        full: torch.Tensor | None,
        inner: tuple[Any, ...] | None = None,
    ) -> torch.Tensor:
        ctx.reduction = how.how(shard.dtype) if isinstance(how, Unshard) else how
        ctx.dtype = shard.dtype
        ctx.unreduced_dtype = None if unreduced is None else unreduced.dtype
        ctx.inner = inner
        if isinstance(how, Unshard):
            return how.gather(shard)
        assert full is not None
        if _comes_wide(full.dtype, how[0]):
            ctx.set_output_grad_dtype(None)
        if inner is None:
            return full.detach()
        mesh, placements, shape, stride = inner
        return DTensor.from_local(
            full, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.inner is not None:
            # FSDPParam._get_grad_inner_tensor sums a gradient that is partial on the inner mesh.
            # Since 2.15 the gradient has the reduction's dtype by then (`unsharded_grad_dtype`).
            dtype = ctx.reduction[0] if REDUCES_BY_GRAD_DTYPE else None
            grad = grad.to(dtype or grad.dtype).redistribute(placements=ctx.inner[1]).to_local()
        if ctx.unreduced_dtype is not None:  # passed on to the leaf of a `ReduceOnce`
            return None, grad.to(ctx.unreduced_dtype), None, None, None
        return reduced(grad, ctx.reduction).to(ctx.dtype), None, None, None, None


def attach(
    shard: torch.Tensor, unreduced: torch.Tensor | None, reduction: _Reduction, full: torch.Tensor
) -> torch.Tensor:
    """Connect ``full``, which was gathered from ``shard``, to it: backward reduces the gradient."""
    # Dynamo does not trace into this. It would require the parameter's class and dtype of the
    # gradient.
    attached: torch.Tensor = _Gather.apply(shard, unreduced, reduction, full)
    return attached


_attach_by_mesh: dict[Any, tuple[DeviceMesh, Callable[..., torch.Tensor]]] = {}


def _attach_on(mesh: DeviceMesh, placements: tuple[Any, ...]) -> Callable[..., torch.Tensor]:
    """Return :func:`attach` for this rank's part of a ``DTensor`` on a mesh."""

    def attach_part(
        shard: torch.Tensor,
        unreduced: torch.Tensor | None,
        reduction: _Reduction,
        full: torch.Tensor,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        inner = (mesh, placements, shape, stride)
        attached: torch.Tensor = _Gather.apply(shard, unreduced, reduction, full, inner)
        return attached

    # Parameters share one function, as Dynamo guards on it. It has the mesh, which can't be an
    # argument of a node in Dynamo's graph. Not by the mesh itself: one made later, for new process
    # groups, is equal.
    key = (id(mesh), placements)
    if key not in _attach_by_mesh:
        _attach_by_mesh[key] = (mesh, torch.compiler.allow_in_graph(attach_part))
    return _attach_by_mesh[key][1]


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing))
