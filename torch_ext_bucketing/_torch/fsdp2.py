"""Read sharded parameters, tensor subclasses, and the param groups that eager FSDP2 made.

Versions (``torch/distributed/fsdp/_fully_shard``):

* A ``FSDPState`` holds ``_fsdp_param_groups``, a list, in 2.13 to 2.15; in 2.11
  ``_fsdp_param_group``. ``fully_shard`` makes one group, or one per pair of process groups where a
  ``shard_placement_fn`` sends parameters to several meshes (``_init_param_group``).
* The all-gather packs a group in the order of ``fsdp_params``, and so does the reduce-scatter up to
  2.14. 2.15 packs the reduce-scatter by gradient dtype, in order of first appearance, and within
  one dtype in that order (``_init_reduce_scatter_param_order``): another one only where
  ``param.grad_dtype`` was set on some parameters or frozen parameters have another dtype.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..fqns import canonical_fqn, outermost, parameter_names
from . import private_torch
from .process_groups import ranks_of

with private_torch():
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import _common_utils
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllocMixin as DefaultAllocMixin,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Whether this torch packs reduce-scatters by gradient dtype (since 2.15), keeps the dtype of a
# gradient that is wider than its parameter (2.15), finds inputs in dataclasses (2.12), and casts
# inputs and outputs of each module of a list, not the first one's and the last one's (2.13).
REDUCES_BY_GRAD_DTYPE = hasattr(FSDPParamGroup, "_init_reduce_scatter_param_order")
KEEPS_WIDE_GRADIENTS = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
WRAPS_DATACLASSES = hasattr(_common_utils, "replace_grad_tensors")
CASTS_EACH_MODULE = hasattr(FSDPState, "_cast_output_dtype")
_SHARD = "_local_tensor"


def blocks_of(tensor: Any) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Return the part of a tensor at each coordinate of its mesh, 0 for dimensions of copies.

    A part has its offsets, then its sizes; a plain tensor is all at ``()``.
    """
    if not isinstance(tensor, DTensor):
        return {(): (*(0,) * tensor.dim(), *tensor.shape)}
    with private_torch():
        from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as part

    mesh = tuple(tensor.device_mesh.shape)
    cut = {dim for _, dim in sharded_dims(tensor)}
    spans = [range(n) if d in cut else (0,) for d, n in enumerate(mesh)]
    parts = {}
    for at in itertools.product(*spans):
        shape, offset = part(tensor.shape, mesh, list(at), tensor.placements)
        parts[at] = (*offset, *shape)
    return parts


def is_distributed(tensor: Any) -> bool:
    """Return whether a parameter is sharded or replicated over a mesh."""
    return isinstance(tensor, DTensor)


def mesh_of(value: Any) -> Any:
    """Return the mesh that a parameter is distributed over, or None."""
    return value.device_mesh if isinstance(value, DTensor) else None


def spanned(
    mesh: DeviceMesh, placements: Sequence[Any], param: torch.Tensor
) -> tuple[DeviceMesh, list[Any]]:
    """Return mesh and placements of a parameter's shards, the data-parallel dimensions first.

    A ``DTensor`` of tensor or expert parallelism keeps its own dimensions after them, and each
    rank's part is sharded, as by ``FSDPParam._init_sharding_spec_tp``.

    Raises:
        ValueError: the meshes are not different dimensions of one mesh.
    """
    if not isinstance(param, DTensor):
        return mesh, list(placements)
    inner = param.device_mesh
    try:
        joined = DeviceMesh._concatenate([mesh, inner])
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"is a DTensor on {inner}, and the given mesh is {mesh}: both must be different, named "
            'dimensions of one mesh, as init_device_mesh(..., mesh_dim_names=("dp", "tp"))["dp"]; '
            f"and shard a model once ({error})"
        ) from error
    outer = []
    for placement in placements:
        if placement.is_shard():
            ways = zip(inner.shape, param.placements, strict=True)
            parts = math.prod(n for n, p in ways if getattr(p, "dim", None) == placement.dim)
            if parts > 1:
                placement = _StridedShard(placement.dim, split_factor=parts)
        outer.append(placement)
    return joined, [*outer, *param.placements]


def placed(tensor: Any) -> tuple[bool, bool]:
    """Return whether a distributed parameter is sharded, and whether it has replicas."""
    # Replicas are a mesh's first dimension. Inner replication belongs to tensor parallelism.
    placements = tensor.placements
    # Not is_shard(): a strided shard (FSDP over tensor parallelism) is not a Shard in every torch.
    return not all(p.is_replicate() for p in placements), placements[0].is_replicate()


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter; a plain parameter itself."""
    local: torch.Tensor = getattr(tensor, _SHARD, tensor)
    return local


def largest_shard_numel(tensor: Any) -> int:
    """Return the number of elements of a parameter's shard on the rank that has most."""
    if not isinstance(tensor, DTensor):
        return int(tensor.numel())
    sizes = list(tensor.shape)
    for ranks, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        # A strided shard is not a Shard in every torch, but has its dimension, too.
        if (dim := getattr(placement, "dim", None)) is not None:
            sizes[dim] = -(-sizes[dim] // ranks)
    return math.prod(sizes)


def largest_shard_bytes(tensor: Any) -> int:
    """Return the bytes of a parameter's shard on the rank that has most."""
    # Bounds on memory count these: they are alike on every rank, and so are plans.
    return largest_shard_numel(tensor) * shard_of(tensor).element_size()


def unevenness(tensor: Any) -> float:
    """Return the bytes of a parameter's largest shard over the mean of all shards."""
    ranks = math.prod(mesh.shape[dim] for mesh, dim in sharded_dims(tensor))
    return largest_shard_numel(tensor) * ranks / max(1, int(tensor.numel()))


def sharded_dims(tensor: Any) -> tuple[tuple[Any, int], ...]:
    """List the mesh dimensions that a parameter is sharded over, each with the mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple((mesh, i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def is_part(source: str, sources: Collection[str]) -> bool:
    """Return whether a Dynamo source names the shard of another tensor in ``sources``."""
    return source.rpartition(f".{_SHARD}")[0] in sources


def name_per_tensor(name: str, tensor: Any) -> list[str | None]:
    """Return a parameter's name for its first plain tensor, and None for each other one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [name]
    attributes, _ = tensor.__tensor_flatten__()
    parts = [part for a in attributes for part in name_per_tensor(name, getattr(tensor, a))]
    return [name, *(None,) * (len(parts) - 1)]


def parts_of(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors that a tensor consists of."""
    parts: list[torch.Tensor] = []
    map_parts(tensor, lambda part: parts.append(part) or part)  # type: ignore[func-returns-value]
    return parts


def map_parts(tensor: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Rebuild a tensor after applying ``function`` to the plain tensors that it consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return function(tensor)
    names, context = tensor.__tensor_flatten__()
    parts = {name: map_parts(getattr(tensor, name), function) for name in names}
    return type(tensor).__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())


class Sent(NamedTuple):
    """How eager FSDP2 shards and sends one parameter.

    Attributes:
        shards, replicas: global ranks of the two groups; empty without one.
        dtype, gathered, reduced: dtypes of the shard, of the gather, and of the reduction (None:
            the gradient's).
    """

    dim: int  # the sharded dimension
    shards: tuple[int, ...]
    replicas: tuple[int, ...]
    dtype: torch.dtype
    gathered: torch.dtype
    reduced: torch.dtype | None
    # ``set_gradient_divide_factor``'s number; None: the number of ranks.
    factor: float | None = None
    only_sums: bool = False  # ``set_force_sum_reduction_for_comms``


class Casts(NamedTuple):
    """The dtypes that a unit casts its floating-point inputs and outputs to; None: no cast."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None

    @classmethod
    def of(cls, policy: MixedPrecisionPolicy) -> Casts:
        return cls(policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)


@dataclass(frozen=True)
class ParamGroup:
    """One payload of a model on FSDP2, eager or ours."""

    modules: tuple[str, ...]  # FQNs of the modules of the ``fully_shard`` call, in its order
    # FQNs of the parameters in all-gather order; ``reduce_params`` in reduce-scatter order.
    params: tuple[str, ...]
    reduce_params: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]  # (other name, name) of shared parameters
    # Identity of each parameter before sharding; None before torch 2.13.
    origins: tuple[Hashable, ...]
    sent: tuple[Sent, ...]  # how each of ``params`` is sharded and sent
    # Whether its parameters are freed after forward, or the size of the group that they are
    # resharded to.
    reshard: bool | int
    casts: Casts  # of its unit's inputs and outputs
    # Settings that only eager FSDP2 has, as the code that makes them.
    eager_only: tuple[str, ...] = ()


def policy_for(policy: MixedPrecisionPolicy, param: nn.Parameter) -> MixedPrecisionPolicy:
    """Return a unit's policy for one parameter, by ``param_dtype_override_fn`` (since 2.15)."""
    resolve = getattr(policy, "_resolve_for_param", None)
    own: MixedPrecisionPolicy = policy if resolve is None else resolve(param)
    return own


def sent(
    dim: int,
    shards: Iterable[int],
    replicas: Iterable[int],
    dtype: torch.dtype,
    policy: MixedPrecisionPolicy,
    factor: float | None,
    only_sums: bool,
) -> Sent:
    """Describe a parameter that has ``dtype`` under its unit's policy."""
    gathered = (policy.param_dtype if dtype.is_floating_point else None) or dtype
    reduced = policy.reduce_dtype or (dtype if REDUCES_BY_GRAD_DTYPE else gathered)
    return Sent(dim, tuple(shards), tuple(replicas), dtype, gathered, reduced, factor, only_sums)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called on ``model`` or a module in it."""
    return bool(_states_in(model))


def _states_in(model: nn.Module) -> list[FSDPState]:
    """Return the FSDP2 states of a model's modules, each once."""
    with private_torch():
        states = dict.fromkeys(map(_composable_state._get_module_state, model.modules()))
    return [state for state in states if isinstance(state, FSDPState)]


def read_param_groups(model: nn.Module) -> list[ParamGroup]:
    """Read a model's param groups in the order of the ``fully_shard`` calls.

    Works before and after FSDP2's lazy initialization. FQNs are relative to ``model``.
    """
    states = _states_in(model)
    if not states:
        raise ValueError(
            f"{type(model).__name__} has no FSDP2 module: call fully_shard() on it first, or use "
            "from_model() for a model that stays unwrapped"
        )
    names = parameter_names(model)
    module_names = {m: canonical_fqn(n) for n, m in model.named_modules()}
    roots = outermost(module for state in states for module in state._modules)
    groups: list[ParamGroup] = []
    for state, group in _groups_of(states):
        names_of_each = [_names_of(fsdp_param, names) for fsdp_param in group.fsdp_params]
        params = tuple(fqns[0] for fqns in names_of_each)
        # Lazy initialization keeps the root's parameters, unless the call chose for them.
        is_root = state._auto_reshard_after_forward and state._modules[0] in roots
        groups.append(
            ParamGroup(
                modules=tuple(module_names[m] for m in group.modules if m in module_names),
                params=params,
                reduce_params=reduce_order(params, [_grad_dtype(p) for p in group.fsdp_params]),
                aliases=tuple((alias, fqns[0]) for fqns in names_of_each for alias in fqns[1:]),
                origins=tuple(getattr(p, "_orig_param_uid", None) for p in group.fsdp_params),
                sent=tuple(_sent(p, group) for p in group.fsdp_params),
                reshard=False if is_root else _reshard(group),
                casts=Casts.of(state._mp_policy),
                eager_only=tuple(_eager_only(group)),
            )
        )
    return groups


def _sent(fsdp_param: Any, group: Any) -> Sent:
    info = fsdp_param.mesh_info
    shards = getattr(info, "shard_process_group", None)
    replicas = getattr(info, "replicate_process_group", None)
    return sent(
        fsdp_param.fsdp_placement.dim,
        () if shards is None else ranks_of(shards),
        () if replicas is None else ranks_of(replicas),
        fsdp_param.sharded_param.dtype,
        getattr(fsdp_param, "mp_policy", None) or group.mp_policy,
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )


def _reshard(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None or after == group.mesh_info:
        return after is not None
    return int(after.shard_mesh_size)


def _eager_only(group: Any) -> Iterable[str]:
    if isinstance(group.offload_policy, CPUOffloadPolicy):
        yield "offload_policy=CPUOffloadPolicy()"
    parts = {
        "set_custom_all_gather": group._all_gather_comm,
        "set_custom_reduce_scatter": group._reduce_scatter_comm,
        "set_all_reduce_hook": group._all_reduce_hook,
    }
    for method, part in parts.items():
        home = getattr(part, "__module__", "").partition(".")[0]
        # This package's own add in rank order, which a compiled step can do, too.
        if part is not None and home not in ("torch", __name__.partition(".")[0]):
            yield f"{method}({getattr(part, '__name__', type(part).__name__)})"
    if getattr(group, "reduce_scatter_unused_params", False):
        yield "set_reduce_scatter_unused_params(True)"


def reduce_order(params: Sequence[str], grad_dtypes: Sequence[Hashable]) -> tuple[str, ...]:
    """Sort ``params`` as torch packs the reduce-scatter: by gradient dtype since 2.15."""
    if not REDUCES_BY_GRAD_DTYPE:
        return tuple(params)
    met = list(dict.fromkeys(grad_dtypes))
    pairs = zip(params, grad_dtypes, strict=True)
    return tuple(fqn for fqn, _ in sorted(pairs, key=lambda pair: met.index(pair[1])))


def grad_dtype(parameter: nn.Parameter) -> Hashable:
    """Return the ``FSDPParam.sharded_grad_dtype`` that FSDP2 would set for a parameter."""
    if getattr(parameter, "_has_grad_dtype_override", False):
        return parameter.grad_dtype
    return parameter.dtype


def _grad_dtype(fsdp_param: Any) -> Hashable:
    # ``sharded_grad_dtype`` is final only after lazy initialization. Without an override it becomes
    # the dtype of the sharded parameter (``FSDPParam.init_dtype_attrs``).
    if getattr(fsdp_param, "_has_sharded_grad_dtype_override", False):
        return fsdp_param.sharded_grad_dtype
    return fsdp_param.sharded_param.dtype


def _groups_of(states: list[FSDPState]) -> list[tuple[FSDPState, Any]]:
    """Return states and their param groups in the order of the ``fully_shard`` calls."""
    # A state does not record when it was made, but the calls fill this table in their order.
    made = dict.fromkeys(ref() for ref in _composable_state._module_state_mapping.values())
    groups: list[tuple[FSDPState, Any]] = []
    for state in [state for state in made if state in states]:
        if hasattr(state, "_fsdp_param_groups"):
            groups += [(state, group) for group in state._fsdp_param_groups]
        elif state._fsdp_param_group is not None:
            groups.append((state, state._fsdp_param_group))
    return groups


def _names_of(fsdp_param: Any, names: Mapping[nn.Parameter, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all FQNs of an ``FSDPParam``, the one of ``model.named_parameters()`` first."""
    info = fsdp_param._module_info
    fqns = names.get(info.module._parameters.get(info.param_name), ())
    if not fqns:
        raise ValueError(
            f"a fully_shard() unit of this model holds {info.param_name!r} of a "
            f"{type(info.module).__name__} that is not in it: pass the model that all modules "
            "of the unit belong to"
        )
    return fqns
