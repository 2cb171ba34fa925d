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

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, Self, TypeAlias

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from .._torch.fsdp2 import KEEPS_WIDE_GRADIENTS, REDUCES_BY_GRAD_DTYPE
from .._torch.process_groups import MeshGroup, as_argument, mesh_group
from .._torch.sharded import is_distributed, placed, shard_of
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
    """Shard or replicate every parameter of ``model``, in place.

    Parameters may be shared by modules, which stays so, and uneven over the ranks. Names stay, too:
    ``named_parameters()`` and ``state_dict()`` give the shards (``DTensor``) under the names from
    before, so checkpoints go to and from eager FSDP2's models. Reading a parameter
    as an attribute, ``module.weight``, gathers it: all ranks have to. What is written to that, as
    by ``torch.nn.init``, is lost: initialize before, or write to those of ``named_parameters()``,
    which are also the ones to freeze. Each module becomes one of a subclass of its class, as with
    ``fully_shard``. Parametrizations (``torch.nn.utils.parametrize``), registered before or
    afterwards, get the gathered parameter. A parameter that follows FSDP2's protocol for gathers of
    its own is gathered by it, see :mod:`.fsdp.extensions`, but for ``"replicate"``.

    Args:
        model: its parameters are plain tensors on the mesh's device, equal on all ranks or not:
            rank 0's values are distributed.
        mesh: 1-D; for ``"hybrid_shard"`` 2-D, replicas first, then shards.
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
            a ``DTensor`` already, or a scalar to be sharded. The model is as it was, as after
            errors that name a parameter with gathers of its own and what is wrong with its class
            (:class:`.Extension`).
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
        if is_distributed(param):
            raise ValueError(f"parameter {name} is a DTensor already; shard a model once")
        if not param.ndim and mode != "replicate":
            raise ValueError(
                f"parameter {name} is a scalar, which can't be sharded (nor by eager FSDP2): make "
                "it a tensor of one element"
            )

    shard_dim = None if mode == "replicate" else dims - 1
    replica_dim = None if mode == "fully_shard" else 0
    placements: list[Any] = [Shard(0) if dim == shard_dim else Replicate() for dim in range(dims)]
    extensions: dict[nn.Parameter, Extension] = {}
    shards = mesh
    torch.compiler.allow_in_graph(attach)
    if shard_dim is not None and any(map(extends_gather, model.parameters())):
        if shard_dim:
            if mesh.mesh_dim_names is None:
                raise ValueError(
                    "parameters with gathers of their own are told of the shards' part of the mesh:"
                    " name its dimensions, init_device_mesh(..., mesh_dim_names=...)"
                )
            shards = mesh[mesh.mesh_dim_names[shard_dim]]
        dtypes = (param_dtype, reduce_dtype)
        for fqn, param, module in parameters_by_name(model):
            if extends_gather(param) and param not in extensions:
                extensions[param] = Extension(fqn, param, module, shards, *dtypes)
    distributed: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        unshards: dict[str, _Unshard] = {}
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, param in own.items():
            extension = extensions.get(param)
            if param not in distributed:
                share = distribute_tensor if extension is None else distribute
                distributed[param] = nn.Parameter(
                    share(param.detach(), mesh, placements), requires_grad=param.requires_grad
                )
            reduced_in = reduce_dtype or (param.dtype if REDUCES_BY_GRAD_DTYPE else None)
            unshards[name] = _Unshard(
                mesh, shard_dim, replica_dim, param.shape, param_dtype, reduced_in, extension
            )
        if own:
            module._parameters.update({name: distributed[param] for name, param in own.items()})
            module.__dict__["_unshards"] = unshards
            plain: Any = type(module)
            module.__class__ = _gathering_class(plain, tuple(unshards))
    return model


def ignored_extensions(model: nn.Module) -> dict[str, str]:
    """Names and classes of sharded parameters that follow FSDP2's protocol where the sharding of
    ``model``, another than :func:`data_parallel`, does not."""
    found = {}
    for path, module in model.named_modules():
        unshards = module.__dict__.get("_unshards", {})
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            shard = shard_of(param)
            if name not in unshards and extends_gather(shard) and placed(param)[0]:
                found[canonical_fqn(f"{path}.{name}".lstrip("."))] = type(shard.data).__name__
    return found


class _Unshard:
    """From one sharded parameter, a ``DTensor``, to the full, plain tensor."""

    def __init__(
        self,
        mesh: DeviceMesh,
        shard_dim: int | None,
        replica_dim: int | None,
        shape: torch.Size,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        extension: Extension | None,
    ) -> None:
        self.shape = tuple(shape)
        self.extension = extension
        self.param_dtype = param_dtype
        self.shard_size = size = 1 if shard_dim is None else mesh.size(shard_dim)
        self.shard_group = group = None if shard_dim is None else mesh_group(mesh, shard_dim)
        replicas = None if replica_dim is None else mesh_group(mesh, replica_dim)
        local_rows = shape[0] if shape else 1
        if shard_dim is not None:
            rows = -(-local_rows // size)
            local_rows = max(0, min(rows, local_rows - mesh.get_local_rank(shard_dim) * rows))
        self.reduction: _Reduction = (reduce_dtype, group, size, replicas, local_rows)
        self.unreduced: torch.Tensor | None = None
        self.full: torch.Tensor | None = None

    def __call__(self, sharded: DTensor) -> torch.Tensor:
        shard = sharded.to_local()
        wide = _comes_wide(self.param_dtype or shard.dtype, self.reduction[0])
        full = self.full
        if full is None and self.extension is None and not wide:
            return _Gather.apply(shard, self.unreduced, self, None)
        if full is None:
            with torch.no_grad():
                full = self.gather(shard)
        return attach(shard, self.unreduced, self.reduction, full)

    def leaf(self, sharded: DTensor) -> torch.Tensor:
        """A leaf whose ``grad`` adds up, of the full shape with one element's memory."""
        dtype = self.param_dtype or sharded.dtype
        one = torch.empty((), dtype=self.reduction[0] or dtype, device=sharded.device)
        return one.expand(self.shape).requires_grad_()

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        if self.extension is not None:
            return self.extension.gather(shard)
        full = shard if self.param_dtype is None else shard.to(self.param_dtype)
        if self.shard_group is None:
            return full.view_as(full)
        rows = -(-self.shape[0] // self.shard_size)
        full = _pad_rows(full, rows)
        group = as_argument(self.shard_group)
        full = _c10d.all_gather_into_tensor(full.contiguous(), self.shard_size, group)
        full = _c10d.wait_tensor(full)
        padded = rows * self.shard_size != self.shape[0]
        return full.narrow(0, 0, self.shape[0]) if padded else full


def _comes_wide(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> bool:
    """Whether FSDP2 reduces a gradient as autograd made it, not rounded to the parameter's
    ``dtype``: fp32 for a norm's weight in bf16 that was multiplied with fp32."""
    return KEEPS_WIDE_GRADIENTS and bool(
        reduce_dtype
        and reduce_dtype.is_floating_point
        and dtype.is_floating_point
        and reduce_dtype.itemsize > dtype.itemsize
    )


_Reduction: TypeAlias = tuple[torch.dtype | None, MeshGroup | None, int, MeshGroup | None, int]
"""How a gradient is reduced: its dtype there, group and number of the shards, group of the
replicas, and the rows of this rank's shard."""


def _reduced(grad: torch.Tensor, how: _Reduction) -> torch.Tensor:
    reduce_dtype, shard_group, shard_size, replica_group, local_rows = how
    if reduce_dtype is not None:
        grad = grad.to(reduce_dtype)
    if shard_group is not None:
        rows = -(-grad.shape[0] // shard_size)
        grad = _pad_rows(grad, rows * shard_size)
        group = as_argument(shard_group)
        grad = _c10d.reduce_scatter_tensor(grad.contiguous(), "avg", shard_size, group)
        grad = _c10d.wait_tensor(grad)
    if replica_group is not None:
        grad = _c10d.all_reduce(grad.contiguous(), "avg", as_argument(replica_group))
        grad = _c10d.wait_tensor(grad)
    if shard_group is not None and local_rows != grad.shape[0]:
        grad = grad.narrow(0, 0, local_rows)
    return grad


@functools.cache
def _gathering_class(cls: Any, names: tuple[str, ...]) -> Any:
    """A subclass of ``cls`` whose parameters are gathered when they are read as attributes.

    They stay in ``module._parameters``, which ``named_parameters()``, ``state_dict()`` and
    optimizers read. Modules of one class share the result, and so the code compiled for one.
    """

    def read(module: Any, name: str) -> torch.Tensor:
        sharded = module._parameters.get(name)
        if sharded is None:  # set to None or deleted since: nn.Module knows what to say
            raise AttributeError(name)
        full = module._unshards[name](sharded)
        steps: Any = module._modules.get("parametrizations")
        if steps is not None and name in steps:
            for step in steps[name]:
                full = step(full)
        return full

    def fqn_modifiers(module: nn.Module) -> dict[str, str]:
        # `torch.distributed.checkpoint.state_dict` walks a parameter's name attribute by attribute.
        # Told of this detour, it ends at the shards and gathers nothing.
        return dict.fromkeys(names, "_sharded_parameters")

    members: dict[str, Any] = {name: property(functools.partial(read, name=name)) for name in names}
    members["parametrizations"] = property(functools.partial(_parametrizations, names=names))
    members["_fqn_modifiers"] = fqn_modifiers
    members["_sharded_parameters"] = property(lambda m: SimpleNamespace(**m._parameters))
    members["__module__"] = cls.__module__
    return type(f"Gathering{cls.__name__}", (cls,), members)


def _parametrizations(module: nn.Module, names: tuple[str, ...]) -> nn.ModuleDict:
    """The attribute that ``torch.nn.utils.parametrize.register_parametrization`` looks for and
    appends to.

    It finds each sharded parameter parametrized, by no step yet, and so appends one, which gets the
    gathered tensor. Only then does this become a part of the module.
    """
    found = nn.ModuleDict(module._modules.get("parametrizations"))  # type: ignore[arg-type]
    for name in names:
        if name not in found:
            found[name] = _Steps(lambda: module._modules.update(parametrizations=found))
    return found


class _Steps(nn.ModuleList):
    """The parametrizations of a sharded parameter; ``keep`` is called before one is added."""

    unsafe = True  # what is gathered has another dtype and shape than the shard

    def __init__(self, keep: Callable[[], object]) -> None:
        super().__init__()
        self.keep = keep

    def append(self, module: nn.Module) -> Self:
        """Run ``module`` on what is gathered, after those that were added before."""
        self.keep()
        return super().append(module)


class _Gather(torch.autograd.Function):
    """The full parameter, gathered by an :class:`_Unshard` or given; its gradient is reduced, or
    handed on to ``unreduced`` as it is."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        shard: torch.Tensor,
        unreduced: torch.Tensor | None,
        how: _Unshard | _Reduction,
        full: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.reduction = how.reduction if isinstance(how, _Unshard) else how
        ctx.dtype = shard.dtype
        ctx.unreduced_dtype = None if unreduced is None else unreduced.dtype
        if isinstance(how, _Unshard):
            return how.gather(shard)
        assert full is not None
        if _comes_wide(full.dtype, how[0]):
            ctx.set_output_grad_dtype(None)
        return full.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.unreduced_dtype is not None:
            return None, grad.to(ctx.unreduced_dtype), None, None
        return _reduced(grad, ctx.reduction).to(ctx.dtype), None, None, None


def attach(
    shard: torch.Tensor, unreduced: torch.Tensor | None, reduction: _Reduction, full: torch.Tensor
) -> torch.Tensor:
    """``full`` as what was gathered of ``shard``, whose gradient is reduced by ``reduction``.

    A node of Dynamo's graph, which would have the gradient be of the parameter's class and dtype.
    """
    found: torch.Tensor = _Gather.apply(shard, unreduced, reduction, full)
    return found


class _ReduceLate(torch.autograd.Function):
    """Zero; the gradient of the shard is what ``total`` reduces to."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, shard: torch.Tensor, total: torch.Tensor, unshard: _Unshard
    ) -> torch.Tensor:
        ctx.unshard = unshard
        ctx.dtype = shard.dtype
        ctx.save_for_backward(total)
        return torch.zeros((), dtype=shard.dtype, device=shard.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (total,) = ctx.saved_tensors
        return _reduced(total, ctx.unshard.reduction).to(ctx.dtype), None, None


class ReduceOnce:
    """Reduces the gradients of several backwards once: gradient accumulation without reductions
    between microbatches, as eager FSDP2 does with ``set_requires_gradient_sync(False)``.

        reduce_once = ReduceOnce(model, backend("aot_eager", recipe(model), model=model))
        with reduce_once:
            for batch in microbatches:
                compiled(batch).backward()
        optimizer.step()

    Inside of it, gradients of the full parameters add up on every rank, in the dtype in which they
    are reduced; at its end they are reduced, in the buckets of ``backend``, and added to the
    parameters' ``grad``. That costs one full gradient of every parameter in memory (4 bytes each
    with float32), saves all reductions but one, and overlaps these with no computation.

    What is run inside is compiled for itself, once. Bits are eager FSDP2's, but where a parameter
    that is read several times in one forward is reduced in another dtype than it is gathered in:
    eager adds its uses in the one and its microbatches in the other.

    Args:
        model: sharded by :func:`data_parallel`.
        backend: compiles the reductions, and the gathers that are made once; None runs them one by
            one. With buckets it needs ``model=``, by which the parameters are told apart.
        gather_once: gather every parameter on entering, not in each microbatch, as eager FSDP2 does
            with ``set_reshard_after_backward(False)``, for one full copy of every parameter until
            it is left. What was written to the parameters inside is not seen inside.

    Raises:
        ValueError: ``model`` is not sharded by :func:`data_parallel`.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Callable[..., Any] | None = None,
        *,
        gather_once: bool = False,
    ) -> None:
        self._of: dict[nn.Parameter, list[_Unshard]] = {}
        for module in model.modules():
            for name, unshard in module.__dict__.get("_unshards", {}).items():
                param = module._parameters.get(name)
                if param is not None:
                    self._of.setdefault(param, []).append(unshard)
        self._trained = [p for p in self._of if p.requires_grad]
        if not self._trained:
            raise ValueError(
                f"{type(model).__name__} has no parameter to train that data_parallel() has "
                "sharded: call data_parallel(model, mesh) first"
            )
        self._gather_once = gather_once
        self._unreduced: list[torch.Tensor] = []
        compiled = functools.partial(torch.compile, backend=backend, fullgraph=True)
        self._gather = compiled(_gather_all) if backend else _gather_all
        self._reduce = compiled(_reduce_late) if backend else _reduce_late

    def __enter__(self) -> ReduceOnce:
        if self._unreduced:
            raise RuntimeError("this ReduceOnce is entered already: leave it before entering again")
        if self._gather_once:
            with torch.no_grad():
                gathered = self._gather([of[0] for of in self._of.values()], list(self._of))
            for unshards, full in zip(self._of.values(), gathered, strict=True):
                for unshard in unshards:
                    unshard.full = full
        for param in self._trained:
            self._unreduced.append(self._of[param][0].leaf(param))
            for unshard in self._of[param]:
                unshard.unreduced = self._unreduced[-1]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        totals = [leaf.grad for leaf in self._unreduced]
        self._unreduced = []
        for unshards in self._of.values():
            for unshard in unshards:
                unshard.unreduced = unshard.full = None
        if kind is not None:  # a step that failed leaves no gradients behind
            return
        pairs = zip(self._trained, totals, strict=True)
        used = [(self._of[p][0], p, total) for p, total in pairs if total is not None]
        if used:
            units, shards, sums = (list(part) for part in zip(*used, strict=True))
            del used, totals, pairs
            self._reduce(units, shards, sums).backward()


def _gather_all(units: list[_Unshard], shards: list[DTensor]) -> list[torch.Tensor]:
    return [unit.gather(shard.to_local()) for unit, shard in zip(units, shards, strict=True)]


def _reduce_late(
    units: list[_Unshard], shards: list[DTensor], totals: list[torch.Tensor]
) -> torch.Tensor:
    parts = zip(units, shards, totals, strict=True)
    return torch.stack([_ReduceLate.apply(s.to_local(), t, u) for u, s, t in parts]).sum()


def _pad_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    missing = rows - tensor.shape[0]
    return tensor if missing == 0 else F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing))
