"""Shard a model unit by unit, by calls of ``fully_shard`` as eager FSDP2 takes them.

The calls say what a trainer means: units, payload order, dtypes, placements, resharding. So
``recipe(model)`` reads all of it from the model, and a trainer for eager FSDP2 changes one import::

    from torch_ext_bucketing.fsdp import MixedPrecisionPolicy, fully_shard

    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fully_shard(model, mesh=mesh)

The rules are those of ``torch/distributed/fsdp/_fully_shard``, torch 2.11 to 2.15.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from .._torch.fsdp2 import Casts, is_wrapped, policy_for
from .fsdp_module import UNITS, FSDPModule, Unit, unit_of
from .shard import Layout, change_class, check_plain, distribute_parameters
from .unit_inputs import register_casts, run_first
from .units import modules_of_call

_numbers = itertools.count()


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
    """Shard the parameters below ``module`` as one unit, as FSDP2's ``fully_shard`` does.

    Inner modules come first, and the root last. A call takes what earlier calls left. Compiled,
    each parameter has an all-gather and a reduce-scatter, and ``recipe(model)`` merges them into
    eager FSDP2's. Modules get the methods of :class:`FSDPModule`. Parameters are ``DTensor``, with
    the values of each rank's own module, or on the meta device until ``to_empty()``. From the first
    forward on, reading one as an attribute gathers it.

    Args:
        module: a module, or a list of modules that share one unit. Parameters and buffers are moved
            to the mesh's device.
        mesh: 1-D, or for HSDP 2-D, replicas first. None: all ranks, on the accelerator.
        reshard_after_forward: True frees gathered parameters after forward, False keeps them, a
            number reshards them to groups of that size. None is True except for the root. With
            ``recipe(memory=)`` the bound decides instead.
        shard_placement_fn: maps a parameter to ``Shard(dim)``, to None for ``Shard(0)``, or since
            torch 2.13 to a ``ShardPlacementResult``, with a mesh of its own. A dimension other than
            0 must be divisible by the number of shards.
        mp_policy: dtypes of gathers, reductions, outputs, and whether inputs are cast to
            ``param_dtype``.
        offload_policy: only the default, which offloads nothing.
        ignored_params: parameters to leave as they are. Nothing reduces their gradients.
        dp_mesh_dims: not supported.

    Returns:
        ``module``.

    Raises:
        TypeError: an argument of another type.
        ValueError: what FSDP2 refuses, too: a module twice, or after one that contains it; a
            ``ModuleList`` without ``forward``; a scalar; an uneven shard on another dimension than
            0; a parameter that another unit shares. Also ``DTensor`` parameters, a ``grad_dtype``
            of another dtype, and unsupported arguments. The model is unchanged then.
    """
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, list | tuple) or not all(isinstance(m, nn.Module) for m in given):
        raise TypeError(f"module must be a torch.nn.Module or a list of them, got {module!r}")
    if not given:
        raise ValueError("the list of modules is empty: name the modules that share a unit")
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}")
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if not isinstance(dtype, torch.dtype | None):
            raise TypeError(f"mp_policy.{name} must be a torch dtype or None, got {dtype!r}")
    if type(offload_policy) is not OffloadPolicy:
        raise ValueError(
            f"offload_policy={offload_policy!r} is not supported: to hold less on the device, let "
            "activations wait in host memory, recipe(model, memory=PeakMemory(gib=..., "
            "host_gib=...))"
        )
    if dp_mesh_dims is not None:
        raise ValueError(
            "dp_mesh_dims is not supported: give the data-parallel part of the mesh, "
            "mesh=mesh['dp'], and shard over other dimensions with torchtitan's data_parallel"
        )
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {mesh!r}")
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must have 1 dimension, or 2 for HSDP, got {mesh.ndim}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be a function, got {shard_placement_fn!r}")
    reshard = _checked_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1))
    ignored = frozenset(ignored_params or ())
    for param in ignored:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"ignored_params must be parameters, got {param!r}")

    inner = {m: u for top in given for m in top.modules() if (u := unit_of(m))}
    for top in given:
        what = type(top).__name__
        if top in inner:
            raise ValueError(f"a {what} was given to fully_shard() before: call it once per module")
        if isinstance(top, nn.ModuleList | nn.ModuleDict) and type(top).forward in _NO_FORWARD:
            raise ValueError(f"a {what} has no forward: give the modules in it as a list")
        if is_wrapped(top):
            raise ValueError(f"a {what} is wrapped by eager fully_shard() already")
    roots, managed = modules_of_call(given, inner)
    before = {p for u in inner.values() for ref in u.originals if (p := ref()) is not None}
    layouts: dict[nn.Parameter, Layout] = {}
    payloads: dict[Any, list[nn.Parameter]] = {}
    for owner in managed:
        for name, param in owner.named_parameters(recurse=False):
            if param in layouts or param in ignored:
                continue
            what = f"{name} of a {type(owner).__name__}"
            known = owner.__dict__.get("_unshards", {}).get(name)
            if known is not None and known.gate is not None:
                raise ValueError(
                    f"parameter {what} has a unit already: call fully_shard() on inner modules "
                    "first, and once for a module that several others share"
                )
            layout = _layout(what, param, mesh, mp_policy, shard_placement_fn)
            if param in before:
                raise ValueError(
                    f"parameter {what} is shared with another unit: "
                    "put both modules into one call, fully_shard([a, b])"
                )
            layouts[param] = layout
            groups = tuple(layout.mesh.get_group(d).group_name for d in range(layout.mesh.ndim))
            payloads.setdefault(groups, []).append(param)
    places: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for owner in (m for root in roots for m in root.modules()):
        for name, param in owner.named_parameters(recurse=False):
            if param in layouts:
                places.setdefault(param, (owner, name))
    unit = Unit(
        number=next(_numbers),
        modules=tuple(roots),
        payloads=tuple(tuple(places[p] for p in params) for params in payloads.values()),
        layouts=tuple(tuple(layouts[p] for p in params) for params in payloads.values()),
        policy=mp_policy,
        reshard=reshard,
        ignored=ignored,
        originals=[weakref.ref(p) for p in layouts],
    )
    _move(managed, layouts, mesh)
    distribute_parameters(roots, layouts, from_first=False, gate=unit)
    UNITS[unit.number] = unit
    for top in roots:
        top.__dict__["_fully_shard_unit"] = unit
        change_class(top, FSDPModule)
    register_casts(roots, Casts.of(mp_policy))
    for top in roots:
        run_first(top, unit.begin)
    return module


_NO_FORWARD = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _checked_reshard(given: Any, shards: int) -> bool | int | None:
    """Return ``reshard_after_forward`` as True, False, a smaller group's size, or None."""
    if given is None or isinstance(given, bool):
        return given
    if not isinstance(given, int):
        raise TypeError(f"reshard_after_forward must be a bool, a number or None, got {given!r}")
    if given < 1 or shards % given:
        raise ValueError(
            f"reshard_after_forward must divide the {shards} ranks that share a parameter, got "
            f"{given}"
        )
    return given if 1 < given < shards else given == shards


def _layout(
    what: str,
    param: nn.Parameter,
    mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    placement_fn: Callable[[nn.Parameter], Any] | None,
) -> Layout:
    """Return a parameter's layout; raise a ValueError for one that can't be sharded so."""
    check_plain(what, param)
    if getattr(param, "_has_grad_dtype_override", False) and param.grad_dtype != param.dtype:
        raise ValueError(
            f"parameter {what} has grad_dtype {param.grad_dtype}, and gradients of sharded "
            f"parameters have their dtype here, {param.dtype}: leave grad_dtype unset, and set "
            "mp_policy.reduce_dtype"
        )
    placement: Any = None if placement_fn is None else placement_fn(param)
    replica_dim, shard_dim = (0, 1) if mesh.ndim == 2 else (None, 0)
    if hasattr(placement, "mesh_info"):  # ShardPlacementResult, since 2.13
        info, placement = placement.mesh_info, placement.placement
        mesh, shard_dim = info.mesh, info.shard_mesh_dim
        replica_dim = info.replicate_mesh_dim
    if placement is None:
        placement = Shard(0)
    if type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for parameter {what}: FSDP2 takes Shard(dim) "
            "or None; parameters that every rank holds whole are ignored_params"
        )
    dim, shards = placement.dim % param.ndim, mesh.size(shard_dim)
    if not -param.ndim <= placement.dim < param.ndim or (dim and param.shape[dim] % shards):
        raise ValueError(
            f"parameter {what}, of shape {tuple(param.shape)}, can't be sharded by {placement!r} "
            f"over {shards} ranks: other dimensions than 0 must be divisible by them, as in FSDP2"
        )
    resolved = policy_for(policy, param)
    dtypes = (resolved.param_dtype, resolved.reduce_dtype)
    return Layout(mesh, shard_dim, replica_dim, dim, *dtypes)


def _move(managed: Sequence[nn.Module], layouts: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Move parameters and buffers to the mesh's device, but those on the meta device."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    buffers = (buffer for module in managed for buffer in module.buffers(recurse=False))
    for tensor in itertools.chain(layouts, buffers):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)
