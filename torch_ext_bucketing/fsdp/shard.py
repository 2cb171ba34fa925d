"""Shard a model as eager FSDP2 does, by its calls or by one short call.

torch's own FSDP2 shards, and runs the model wherever nothing is traced. A traced step has a gather
and a reduction in its graph for each parameter (:mod:`.fsdp.modules`). The calls say what a trainer
means: units, payload order, dtypes, placements, resharding. So ``recipe(model)`` reads all of it
from the model, and a trainer for eager FSDP2 changes one import::

    from torch_ext_bucketing.fsdp import MixedPrecisionPolicy, fully_shard

    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, mesh=mesh)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import NoneType
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import UnshardHandle as UnshardHandle
from torch.distributed.fsdp import fully_shard as eager_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as register_fsdp_forward_method
from torch.distributed.fsdp import share_comm_ctx as share_comm_ctx

from .._torch.fsdp2 import (
    Casts,
    UndoSharding,
    groups_of,
    is_distributed,
    layout_of,
    placed,
    places_of,
    replicate_modules,
    shard_of,
    state_of,
)
from ..errors import check_argument
from ..fqns import canonical_fqn, modules_of_call
from .gather import Extension, Unshard, broadcast_from_first, check_methods, extends_gather
from .modules import Unit, adopt

# Since torch 2.12; before, no argument is one.
DataParallelMeshDims: type = getattr(torch.distributed.fsdp, "DataParallelMeshDims", NoneType)

GradientReductionHandle: type = getattr(torch.distributed.fsdp, "GradientReductionHandle", NoneType)

Mode = Literal["fully_shard", "hybrid_shard", "replicate"]


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: Mode = "fully_shard",
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard or replicate every parameter of ``model``, in place, and return ``model``.

    For models that are compiled whole: ``recipe(model)`` divides them into units. Modules may share
    parameters. ``named_parameters()``, ``state_dict()`` and reads of attributes return the shards
    (``DTensor``) under the former names, so checkpoints are compatible with eager FSDP2's, and
    writes reach the shards. While the model's forward runs, a read gathers the parameter.
    Parameters with FSDP2 all-gather extensions are gathered by these (:mod:`.fsdp.gather`), except
    by ``"replicate"``. An error leaves the model unchanged.

    Args:
        model: has its parameters on the mesh's device, none of them a scalar. Rank 0's values are
            distributed. Each rank shards its part of a ``DTensor`` of tensor parallelism, on other
            dimensions of the same mesh.
        mesh: 1-D; for ``"hybrid_shard"`` 2-D with named dimensions, replicas first, then shards.
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
    if dims == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            "a 2-D mesh needs named dimensions: init_device_mesh(..., "
            'mesh_dim_names=("replicate", "shard"))'
        )
    policy = MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=False)

    def shard(roots: Sequence[nn.Module]) -> None:
        broadcast_from_first(model.parameters(), mesh)
        target: Any = roots[0] if len(roots) == 1 else list(roots)
        if mode == "replicate":
            replicate_modules(target, mesh, policy)
        else:
            eager_fully_shard(target, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    _shard(_callable(model), mesh, policy, frozenset(), shard, is_named=False)
    return model


def _callable(module: nn.Module) -> list[nn.Module]:
    """Return a module, or the modules in a container without ``forward``."""
    containers = nn.ModuleList | nn.ModuleDict
    if not isinstance(module, containers) or type(module).forward is not nn.Module.forward:
        return [module]
    return [inner for child in module.children() for inner in _callable(child)]


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (as in torch)
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters below ``module`` as one unit, by FSDP2's ``fully_shard``; return it.

    Inner modules come first, and the root last. A call takes the parameters that earlier calls
    left. The modules are FSDP2's (``isinstance(module, torch.distributed.fsdp.FSDPModule)``), with
    its methods, hooks and states, and run as FSDP2's where nothing is traced. In a traced step each
    parameter has an all-gather and a reduce-scatter, and ``recipe(model)`` merges them into eager
    FSDP2's. An error leaves the modules unchanged.

    Args:
        module: a module, or a list of modules that share one unit. Parameters and buffers are moved
            to the mesh's device.
        mesh: 1-D, or for HSDP 2-D with named dimensions, replicas first. None: all ranks, on the
            accelerator.
        reshard_after_forward: True frees gathered parameters after forward, False keeps them, a
            number reshards them to groups of that size. None is True except for the root. With
            ``recipe(memory=)`` the bound decides instead.
        shard_placement_fn: maps a parameter to ``Shard(dim)``, to None for ``Shard(0)``, or since
            torch 2.13 to a ``ShardPlacementResult``, with a mesh of its own. A dimension other than
            0 must be divisible by the number of shards.
        mp_policy: dtypes of gathers, reductions, outputs, and whether inputs are cast to
            ``param_dtype``.
        offload_policy: of FSDP2. Only the default, which offloads nothing, can be traced.
        ignored_params: parameters to leave as they are. Nothing reduces their gradients.
        dp_mesh_dims: of FSDP2. Only None can be traced.

    Raises:
        ValueError, AssertionError, NotImplementedError: FSDP2 refuses the call, such as a module
            twice, a container without ``forward``, a scalar, or uneven shards on another dimension
            than 0; or another unit has one of the parameters.
        TypeError: an argument has another type.
    """
    modules = [module] if isinstance(module, nn.Module) else module
    if not isinstance(modules, list | tuple) or not all(isinstance(m, nn.Module) for m in modules):
        raise TypeError(f"module must be a torch.nn.Module or a list of them, got {module!r}")
    if not modules:
        raise ValueError("the list of modules is empty: name the modules that share a unit")
    check_argument("mp_policy", mp_policy, MixedPrecisionPolicy)
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        check_argument(f"mp_policy.{name}", getattr(mp_policy, name), torch.dtype | None)
    check_argument("offload_policy", offload_policy, OffloadPolicy)
    check_argument("mesh", mesh, DeviceMesh | None)
    check_argument("reshard_after_forward", reshard_after_forward, bool | int | None)
    check_argument("shard_placement_fn", shard_placement_fn, Callable | None)
    check_argument("ignored_params", ignored_params, Iterable | None)
    ignored = frozenset(ignored_params or ())
    if wrong := [param for param in ignored if not isinstance(param, nn.Parameter)]:
        raise TypeError(f"ignored_params must be parameters, got {wrong[0]!r}")
    for top in modules:
        if state_of(top) is not None:  # FSDP2 raises the same, but after our own checks
            raise AssertionError(
                f"a {type(top).__name__} was given to fully_shard() before: call it once per module"
            )
    arguments: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": None if ignored_params is None else set(ignored),
    }
    if dp_mesh_dims is not None:
        check_argument("dp_mesh_dims", dp_mesh_dims, DataParallelMeshDims)
        arguments["dp_mesh_dims"] = dp_mesh_dims

    def shard(roots: Sequence[nn.Module]) -> None:
        eager_fully_shard(module if isinstance(module, nn.Module) else list(roots), **arguments)

    _shard(modules, mesh, mp_policy, ignored, shard, is_named=True)
    return module


fully_shard.state = eager_fully_shard.state  # type: ignore[attr-defined]


def _shard(
    modules: Sequence[nn.Module],
    mesh: DeviceMesh | None,
    policy: MixedPrecisionPolicy,
    ignored: frozenset[nn.Parameter],
    shard: Callable[[Sequence[nn.Module]], None],
    is_named: bool,
) -> None:
    """Make ``modules`` a unit by a call of FSDP2, ``shard(roots)``; undo all if that fails."""
    inner = {m for top in modules for m in top.modules() if state_of(m) is not None}
    roots, managed = modules_of_call(modules, inner)
    originals = {
        (owner, name): param
        for owner in dict.fromkeys([*managed, *(m for root in roots for m in root.modules())])
        for name, param in owner._parameters.items()
        if param is not None and param not in ignored
    }
    paths = {m: path for root in roots for path, m in root.named_modules()}
    is_inside_mesh = False
    for owner in managed:
        for name, param in owner.named_parameters(recurse=False):
            label = f"parameter {name} of a {type(owner).__name__}"
            if name in vars(owner).get("_unshards", {}):
                raise ValueError(
                    f"{label} has a unit already: call fully_shard() on inner modules first, and "
                    "once for a module that several others share"
                )
            if param not in ignored and hasattr(param, "_sharded_by_fully_shard"):
                raise ValueError(
                    f"{label} is shared with another unit: put both modules into one call, "
                    "fully_shard([a, b])"
                )
            check_methods(f"{paths[owner]}.{name}".lstrip("."), shard_of(param))
            is_inside_mesh |= is_distributed(param)
    undo = UndoSharding(roots)
    try:
        shard(roots)
        state: Any = state_of(roots[0])
        unit = Unit(state, tuple(roots), ignored, is_named, Casts.of(policy))
        reads = {}
        for group in groups_of(state):
            for fsdp_param in group.fsdp_params:
                layout, places = layout_of(fsdp_param, group), places_of(fsdp_param)
                original = originals[places[0]]
                extension = None
                if layout.shard_dim is not None and extends_gather(shard_of(original)):
                    owner, name = places[0]
                    label = f"{paths[owner]}.{name}".lstrip(".")
                    extension = Extension(label, owner, original, layout)
                for place in places:
                    reads[place] = Unshard(fsdp_param, layout, original, extension, unit)
    except BaseException as error:
        undo()
        if is_inside_mesh and isinstance(error, TypeError | RuntimeError):
            raise ValueError(
                f"FSDP2 can't shard DTensors on {mesh}: they must be on other, named dimensions of "
                'one mesh, as init_device_mesh(..., mesh_dim_names=("dp", "tp"))["dp"] here, and '
                f"a model is sharded once ({error})"
            ) from error
        raise
    adopt(unit, reads)
    for place in reads:
        originals[place]._sharded_by_fully_shard = True  # type: ignore[attr-defined]


def ignored_extensions(model: nn.Module) -> dict[str, str]:
    """Map parameters to their classes, where the model's sharding ignores all-gather extensions."""
    # `data_parallel` calls them, other SimpleFSDPs do not.
    ignored = {}
    for path, module in model.named_modules():
        unshards = vars(module).get("_unshards", {})
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            shard = shard_of(param)
            if name not in unshards and extends_gather(shard) and placed(param)[0]:
                ignored[canonical_fqn(f"{path}.{name}".lstrip("."))] = type(shard.data).__name__
    return ignored
