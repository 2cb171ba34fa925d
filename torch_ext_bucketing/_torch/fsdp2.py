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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..fqns import canonical_fqn, format_names, outermost, parameter_names
from . import private_torch
from .process_groups import ranks_of

with private_torch():
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import _common_utils
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter as ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
        DefaultAllocMixin as DefaultAllocMixin,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam as FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import (
        FSDPParamGroup as FSDPParamGroup,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
    from torch.distributed.fsdp._fully_shard._fully_shard import _unimplemented_deepcopy
    from torch.utils._python_dispatch import (
        is_traceable_wrapper_subclass as is_traceable_wrapper_subclass,
    )

# Whether this torch packs reduce-scatters by gradient dtype (since 2.15), keeps the dtype of a
# gradient that is wider than its parameter (2.15), finds inputs in dataclasses (2.12), and casts
# inputs and outputs of each module of a list, not the first one's and the last one's (2.13).
REDUCES_BY_GRAD_DTYPE = hasattr(FSDPParamGroup, "_init_reduce_scatter_param_order")
KEEPS_WIDE_GRADIENTS = hasattr(FSDPParamGroup, "_set_unsharded_grad_dtypes")
WRAPS_DATACLASSES = hasattr(_common_utils, "replace_grad_tensors")
CASTS_EACH_MODULE = hasattr(FSDPState, "_cast_output_dtype")
_SHARD = "_local_tensor"

refuse_deepcopy = _unimplemented_deepcopy


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
    for coordinate in itertools.product(*spans):
        shape, offset = part(tensor.shape, mesh, list(coordinate), tensor.placements)
        parts[coordinate] = (*offset, *shape)
    return parts


def is_distributed(tensor: Any) -> bool:
    """Return whether a parameter is sharded or replicated over a mesh."""
    return isinstance(tensor, DTensor)


def mesh_of(value: Any) -> Any:
    """Return the mesh that a parameter is distributed over, or None."""
    return value.device_mesh if isinstance(value, DTensor) else None


def placed(tensor: Any) -> tuple[bool, bool]:
    """Return whether a distributed parameter is sharded, and whether it has replicas."""
    # Replicas are a mesh's first dimension. Inner replication belongs to tensor parallelism.
    placements = tensor.placements
    # Not is_shard(): a strided shard (FSDP over tensor parallelism) is not a Shard in every torch.
    return not all(p.is_replicate() for p in placements), placements[0].is_replicate()


def shard_of(tensor: Any) -> torch.Tensor:
    """Return this rank's shard of a parameter; a plain parameter itself."""
    return getattr(tensor, _SHARD, tensor)


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


class Setting(NamedTuple):
    """A setting that only eager FSDP2 can follow: its method or argument, and the code it is of."""

    name: str
    code: str


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
    eager_only: tuple[Setting, ...] = ()


class Layout(NamedTuple):
    """How ranks share a parameter, and the dtypes that it travels in."""

    mesh: DeviceMesh  # of 1 or 2 dimensions
    shard_dim: int | None  # the mesh dimension of the shards; None: whole copies
    replica_dim: int | None  # the mesh dimension of the replicas, or None
    dim: int  # the tensor's dimension that is sharded
    param_dtype: torch.dtype | None  # of the gathered parameter, if it has floating point
    reduce_dtype: torch.dtype | None  # of the reduction; None: see `Sent`

    @property
    def shards(self) -> int:
        """The number of ranks that share one copy."""
        return 1 if self.shard_dim is None else self.mesh.size(self.shard_dim)

    @property
    def replicas(self) -> int:
        """The number of copies."""
        return 1 if self.replica_dim is None else self.mesh.size(self.replica_dim)


def layout_of(managed: FSDPParam, group: FSDPParamGroup) -> Layout:
    """Return the layout of one parameter of a group."""
    info = managed.mesh_info
    policy = getattr(managed, "mp_policy", None) or group.mp_policy
    dims = info.shard_mesh_dim, info.replicate_mesh_dim
    dim = managed.fsdp_placement.dim
    return Layout(info.mesh, *dims, dim, policy.param_dtype, policy.reduce_dtype)


def sharded_parameter(managed: FSDPParam, registered: torch.Tensor) -> torch.Tensor:
    """Return a parameter's shard, whichever of FSDP2's tensors the module has ``registered``."""
    if managed.sharded_state == ShardedState.SHARDED:
        return registered
    return managed.sharded_param


def places_of(managed: FSDPParam) -> list[tuple[nn.Module, str]]:
    """List the modules that share a parameter, each with its name there."""
    info = managed._module_info
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return [(info.module, info.param_name), *shared]


def groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Return the param groups of one call: one per mesh that it sends parameters to."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in ([state._fsdp_param_group] if groups is None else groups) if g is not None]


def replicate_modules(
    modules: nn.Module | list[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    """Give every rank of a 1-D mesh a whole copy of each parameter, as FSDP2's ``replicate``."""
    with private_torch():
        from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(modules, mesh=mesh, mp_policy=policy)


class UndoSharding:
    """Restores modules after a ``fully_shard`` call that failed, as they were when it is made."""

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._saved = []
        for module in dict.fromkeys(m for root in roots for m in root.modules()):
            copies = {k: dict(v) for k, v in vars(module).items() if isinstance(v, dict)}
            state = _composable_state._module_state_mapping.get(module)
            self._saved.append((module, type(module), dict(vars(module)), copies, state))

    def __call__(self) -> None:
        """Restore the modules."""
        for module, cls, attributes, copies, state in self._saved:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            for name, items in copies.items():
                attributes[name].clear()
                attributes[name].update(items)
            if state is None:
                _composable_state._module_state_mapping.pop(module, None)


def state_of(module: nn.Module) -> FSDPState | None:
    """Return the state of the ``fully_shard`` call that a module was given to, or None."""
    with private_torch():
        state = _composable_state._get_module_state(module)
    return state if isinstance(state, FSDPState) else None


def take_hooks(
    state: FSDPState, module: nn.Module, pre_forward: Any, post_forward: Any
) -> tuple[Any, Any]:
    """Put hooks in the places of FSDP2's on a module of a new unit, and return FSDP2's."""
    # They are the first to run before forward, and the last one added after it.
    key, before = next(iter(module._forward_pre_hooks.items()))
    module._forward_pre_hooks[key] = pre_forward
    key, after = next(reversed(module._forward_hooks.items()))
    module._forward_hooks[key] = post_forward
    # Dynamo does not trace hooks that run after an error.
    module._forward_hooks_always_called.pop(key, None)
    # `register_fsdp_forward_method` calls these.
    state._pre_forward, state._post_forward = pre_forward, post_forward
    return before, after


def prepare_group(group: FSDPParamGroup, travels_together: bool) -> None:
    """Take up new parameters, tie and check them, as FSDP2 does at the first forward.

    Without ``travels_together`` dtypes in the group may differ.

    Raises:
        RuntimeError: parameters are still on the meta device.
        AssertionError: dtypes in the group differ (FSDP2's own).
    """
    paths = {m: path for root in group.modules for path, m in root.named_modules()}
    registered = [places_of(managed)[0] for managed in group.fsdp_params]
    on_meta = [
        f"{paths[module]}.{name}".lstrip(".")
        for module, name in registered
        if module._parameters[name].is_meta  # type: ignore[union-attr]
    ]
    if on_meta:
        raise RuntimeError(
            f"{len(on_meta)} parameter(s) of a {type(group.modules[0]).__name__}, a fully_shard() "
            f"unit, are on the meta device: {format_names(on_meta)}. Materialize them, "
            "model.to_empty(device=...), and initialize or load their values before forward"
        )
    if travels_together:
        group.lazy_init()
    elif group.is_sharded:
        for managed in group.fsdp_params:
            managed.reset_sharded_param()
    if group.is_sharded:
        for managed in group.fsdp_params:
            managed._setattr_on_modules(managed.sharded_param)


def reshard_after_traced_backward(group: FSDPParamGroup) -> None:
    """Free the full parameters of a group when a graph has reduced one of their gradients.

    FSDP2's own backward does so before the optimizer changes the shards. Graphs read the shards,
    and an evaluation without a graph would read full parameters from before the change.
    """

    def reshard(_: torch.Tensor) -> None:
        is_traced = group._training_state == TrainingState.IDLE
        if is_traced and not group.is_sharded and group.reshard_after_backward:
            group.reshard()

    for managed in group.fsdp_params:
        if managed.sharded_param.requires_grad:
            managed.sharded_param.register_post_accumulate_grad_hook(reshard)


def grad_hooks(param: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return a user's hooks before and after a parameter's gradient is accumulated."""
    accumulated = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    package = __name__.partition(".")[0]  # which has hooks of its own
    users = [
        hook
        for hook in accumulated.values()
        if getattr(hook, "__module__", "").partition(".")[0] != package
    ]
    return list((param._backward_hooks or {}).values()), users


def unsharded_parameter(managed: FSDPParam) -> nn.Parameter | None:
    """Return the full parameter that FSDP2 has made, or None before it has gathered one."""
    return getattr(managed, "_unsharded_param", None)


def is_inner_state(state: FSDPState) -> bool:
    """Return whether a module around the state's runs, or has run, by FSDP2's own hooks."""
    return state._is_root is False


def has_not_run(state: FSDPState) -> bool:
    """Return whether FSDP2's hooks have run neither for the state nor for a module around it."""
    return state._is_root is None


def read_param_groups(model: nn.Module, states: Sequence[FSDPState]) -> list[ParamGroup]:
    """Read the param groups of calls in a model, in the order of the calls.

    Works before and after FSDP2's lazy initialization. FQNs are relative to ``model``.
    """
    if not states:
        raise ValueError(
            f"{type(model).__name__} has no FSDP2 module: call fully_shard() on it first, or use "
            "from_model() for a model that stays unwrapped"
        )
    names = parameter_names(model)
    module_names = {m: canonical_fqn(n) for n, m in model.named_modules()}
    roots = outermost(module for state in states for module in state._modules)
    groups: list[ParamGroup] = []
    for state, group in _groups_in_order(states):
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
                eager_only=tuple(eager_settings(state)),
            )
        )
    return groups


def sent_by_name(model: nn.Module) -> dict[str, Sent]:
    """Describe how each parameter of a model on FSDP2 is sent, by each of its FQNs."""
    names = parameter_names(model)
    states = list(dict.fromkeys(s for m in model.modules() if (s := state_of(m)) is not None))
    return {
        fqn: _sent(managed, group)
        for state in states
        for group in groups_of(state)
        for managed in group.fsdp_params
        for fqn in _names_of(managed, names)
    }


def _sent(fsdp_param: Any, group: Any) -> Sent:
    """Describe the collectives of FSDP2 for a parameter: ranks, dtypes and factors."""
    info, dtype = fsdp_param.mesh_info, fsdp_param.sharded_param.dtype
    policy = getattr(fsdp_param, "mp_policy", None) or group.mp_policy
    shards = getattr(info, "shard_process_group", None)
    replicas = getattr(info, "replicate_process_group", None)
    gathered = (policy.param_dtype if dtype.is_floating_point else None) or dtype
    return Sent(
        fsdp_param.fsdp_placement.dim,
        () if shards is None else ranks_of(shards),
        () if replicas is None else ranks_of(replicas),
        dtype,
        gathered,
        policy.reduce_dtype or (dtype if REDUCES_BY_GRAD_DTYPE else gathered),
        group.gradient_divide_factor,
        group.force_sum_reduction_for_comms,
    )


def _reshard(group: Any) -> bool | int:
    after = group.post_forward_mesh_info
    if after is None or after == group.mesh_info:
        return after is not None
    return int(after.shard_mesh_size)


def eager_settings(state: FSDPState) -> Iterator[Setting]:
    """Yield the settings of a ``fully_shard`` call that a graph can't follow."""
    for group in groups_of(state):
        if isinstance(group.offload_policy, CPUOffloadPolicy):
            yield Setting("offload_policy", "offload_policy=CPUOffloadPolicy()")
        if getattr(group.mesh_info, "is_spmd_mesh", False):
            yield Setting("dp_mesh_dims", "dp_mesh_dims=")
        for managed in group.fsdp_params:
            if _grad_dtype(managed) != managed.sharded_param.dtype:
                code = f"grad_dtype = {_grad_dtype(managed)}"
                yield Setting("grad_dtype", f"{code} of {managed._module_info.param_name}")
        parts = {
            "set_custom_all_gather": group._all_gather_comm,
            "set_custom_reduce_scatter": group._reduce_scatter_comm,
            "set_all_reduce_hook": group._all_reduce_hook,
        }
        for method, part in parts.items():
            home = getattr(part, "__module__", "").partition(".")[0]
            # This package's own add in rank order, which a compiled step can do, too.
            if part is not None and home not in ("torch", __name__.partition(".")[0]):
                yield Setting(method, f"{method}({getattr(part, '__name__', type(part).__name__)})")
        unused = getattr(group, "reduce_scatter_unused_params", False)
        calls = {
            "set_requires_gradient_sync(False)": not group.reduce_grads,
            "set_requires_all_reduce(False)": not group.all_reduce_grads,
            "set_reshard_after_backward(False)": not group.reshard_after_backward,
            "set_reduce_scatter_unused_params(True)": unused,
        }
        yield from (Setting(call.partition("(")[0], call) for call, made in calls.items() if made)
        factor = group.gradient_divide_factor
        shards = getattr(group.mesh_info, "shard_mesh_size", 1)
        dtypes = [_sent(managed, group).reduced for managed in group.fsdp_params]
        # Other dtypes are divided before the sum.
        averaged = any(dtype in (torch.float32, torch.bfloat16, None) for dtype in dtypes)
        if averaged and not group.force_sum_reduction_for_comms and factor not in (None, 1, shards):
            yield Setting("set_gradient_divide_factor", f"set_gradient_divide_factor({factor})")


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


def _groups_in_order(states: Sequence[FSDPState]) -> list[tuple[FSDPState, FSDPParamGroup]]:
    """Return states and their param groups in the order of the ``fully_shard`` calls."""
    # A state does not record when it was made, but the calls fill this table in their order.
    in_order = dict.fromkeys(ref() for ref in _composable_state._module_state_mapping.values())
    return [(state, group) for state in in_order if state in states for group in groups_of(state)]


def _names_of(fsdp_param: Any, names: Mapping[nn.Parameter, tuple[str, ...]]) -> tuple[str, ...]:
    """Return all FQNs of an ``FSDPParam``, the one of ``model.named_parameters()`` first."""
    info = fsdp_param._module_info
    registered = info.module._parameters.get(info.param_name)
    # Eager FSDP2's modules are read as they are, ours as shards (`parameters_by_name`).
    fqns = names.get(registered) or names.get(sharded_parameter(fsdp_param, registered), ())
    if not fqns:
        raise ValueError(
            f"a fully_shard() unit of this model holds {info.param_name!r} of a "
            f"{type(info.module).__name__} that is not in it: pass the model that all modules "
            "of the unit belong to"
        )
    return fqns
