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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import Shard

from .._torch.fsdp2 import (
    Casts,
    ParamGroup,
    Sent,
    is_distributed,
    is_wrapped,
    policy_for,
    read_param_groups,
    reduce_order,
    sent,
    shard_of,
)
from .._torch.process_groups import ranks_of
from ..errors import check_argument
from ..fqns import canonical_fqn, format_names, modules_of_call, outermost, parameter_names
from .shard import Layout, change_class, distribute_parameters
from .unit_inputs import register_casts, run_first

_numbers = itertools.count()
_units: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()


class _Place(NamedTuple):
    """The first place of a parameter, and the parameter's layout."""

    module: nn.Module
    name: str
    layout: Layout

    @property
    def param(self) -> nn.Parameter | None:
        return self.module._parameters[self.name]


@dataclass(eq=False)
class Unit:
    """One call of :func:`.fully_shard`.

    Attributes:
        policy, reshard, ignored: as given; ``reshard`` None means unless the unit is the root.
        factor, only_sums: see :class:`.Sent`.
    """

    number: int  # ascends in the order of the calls
    modules: tuple[nn.Module, ...]  # those of the call, without modules inside others
    payloads: tuple[tuple[_Place, ...], ...]  # per mesh, the parameters in payload order
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    ignored: frozenset[nn.Parameter]
    # The parameters before they were sharded.
    originals: list[weakref.ref[nn.Parameter]] = field(repr=False)
    # Whether a forward has begun. Until then reading a parameter returns the shard, for
    # initialization in place.
    running: bool = False
    read: bool = False  # whether a recipe was made of the unit
    factor: float | None = None
    only_sums: bool = False

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that forward begins; a forward pre-hook."""
        if torch.compiler.is_compiling():
            _begin(self.number)
        else:
            self.running = True

    def divide(self, factor: float | None, only_sums: bool) -> None:
        """Set the divisor of gradients."""
        for place in itertools.chain(*self.payloads):
            shards = place.layout.shards
            # Other dtypes are divided before the sum; see `_division` of `.shard`.
            reduced = _sent(place.param, place.layout, self).reduced
            averaged = reduced in (torch.float32, torch.bfloat16, None)
            if averaged and not only_sums and factor not in (None, 1, shards):
                raise ValueError(
                    f"set_gradient_divide_factor({factor}) needs a process group that multiplies "
                    "before it adds, which functional collectives have not: first "
                    "set_force_sum_reduction_for_comms(True), which divides after the sum, or a "
                    f"factor of 1 or {shards}"
                )
        self.factor, self.only_sums = factor, only_sums
        # Every place of a shared parameter gathers by itself.
        for inner in dict.fromkeys(m for top in self.modules for m in top.modules()):
            for unshard in inner.__dict__.get("_unshards", {}).values():
                if unshard.gate is self:
                    unshard.divide_by(factor, only_sums)


@torch.compiler.assume_constant_result
def _begin(number: int) -> bool:
    # Dynamo calls this while it traces, instead of tracing a write to the unit.
    if (unit := _units.get(number)) is not None:
        unit.running = True
    return True


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of the ``fully_shard`` call that a module was given to, or None."""
    return module.__dict__.get("_fully_shard_unit")


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
    """Shard the parameters below ``module`` as one unit, like FSDP2's ``fully_shard``; return it.

    Inner modules come first, and the root last. A call takes the parameters that earlier calls
    left. Compiled, each parameter has an all-gather and a reduce-scatter, and ``recipe(model)``
    merges them into eager FSDP2's. Modules get the methods of :class:`FSDPModule`. Parameters are
    ``DTensor``, with the values of each rank's own module, or on the meta device until
    ``to_empty()``. From the first forward on, reading one as an attribute gathers it.

    Calls that FSDP2 refuses are errors, too: a module twice, or after one that contains it; a
    ``ModuleList`` without ``forward``; a scalar; an uneven shard on another dimension than 0; a
    parameter that another unit shares; a ``DTensor`` that is not on other dimensions of the mesh.
    So is a ``grad_dtype`` of another dtype. An error leaves the model unchanged.

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
    """
    given = [module] if isinstance(module, nn.Module) else module
    if not isinstance(given, list | tuple) or not all(isinstance(m, nn.Module) for m in given):
        raise TypeError(f"module must be a torch.nn.Module or a list of them, got {module!r}")
    if not given:
        raise ValueError("the list of modules is empty: name the modules that share a unit")
    check_argument("mp_policy", mp_policy, MixedPrecisionPolicy)
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        check_argument(f"mp_policy.{name}", getattr(mp_policy, name), torch.dtype | None)
    if type(offload_policy) is not OffloadPolicy:
        raise ValueError(
            f"offload_policy={offload_policy!r} is not supported: to hold less on the device, let "
            "activations wait in host memory, recipe(model, memory=PeakMemory(gib=..., "
            "host_gib=...))"
        )
    if dp_mesh_dims is not None:
        raise ValueError(
            "dp_mesh_dims is not supported: make parameters DTensors on the other dimensions only, "
            "mesh['tp'], and give the data-parallel part of the mesh, mesh=mesh['dp']"
        )
    if mesh is None:
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
    check_argument("mesh", mesh, DeviceMesh)
    if mesh.ndim not in (1, 2):
        raise ValueError(f"mesh must have 1 dimension, or 2 for HSDP, got {mesh.ndim}")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"shard_placement_fn must be a function, got {shard_placement_fn!r}")
    reshard = _checked_reshard(reshard_after_forward, mesh.size(mesh.ndim - 1))
    check_argument("ignored_params", ignored_params, Iterable | None)
    ignored = frozenset(ignored_params or ())
    if others := [param for param in ignored if not isinstance(param, nn.Parameter)]:
        raise TypeError(f"ignored_params must be parameters, got {others[0]!r}")
    inner = {m: u for top in given for m in top.modules() if (u := unit_of(m))}
    for top in given:
        what = type(top).__name__
        if top in inner:
            raise ValueError(f"a {what} was given to fully_shard() before: call it once per module")
        if isinstance(top, nn.ModuleList | nn.ModuleDict) and type(top).forward in _NO_FORWARD:
            raise ValueError(f"a {what} has no forward: give the modules in it as a list")
        if is_wrapped(top):
            raise ValueError(f"a {what} is wrapped by eager fully_shard() already")
    # All checks come before the first change, so that an error leaves the model as it was.
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
            layouts[param] = layout = _layout(what, param, mesh, mp_policy, shard_placement_fn)
            if param in before:
                raise ValueError(
                    f"parameter {what} is shared with another unit: "
                    "put both modules into one call, fully_shard([a, b])"
                )
            # As in eager FSDP2, parameters of another pair of process groups travel apart.
            groups = tuple(layout.mesh.get_group(d).group_name for d in range(layout.mesh.ndim))
            payloads.setdefault(groups, []).append(param)
    # Places and not parameters, which shards replace below.
    places: dict[nn.Parameter, _Place] = {}
    for owner in (m for root in roots for m in root.modules()):
        for name, param in owner.named_parameters(recurse=False):
            if param in layouts:
                places.setdefault(param, _Place(owner, name, layouts[param]))
    unit = Unit(
        number=next(_numbers),
        modules=tuple(roots),
        payloads=tuple(tuple(places[p] for p in params) for params in payloads.values()),
        policy=mp_policy,
        reshard=reshard,
        ignored=ignored,
        originals=[weakref.ref(p) for p in layouts],
    )
    _move(managed, layouts, mesh)
    distribute_parameters(roots, layouts, from_first=False, gate=unit)
    _units[unit.number] = unit
    for top in roots:
        top.__dict__["_fully_shard_unit"] = unit
        change_class(top, FSDPModule)
        run_first(top, unit.begin)
    register_casts(roots, Casts.of(mp_policy))
    return module


_NO_FORWARD = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _checked_reshard(given: Any, shards: int) -> bool | int | None:
    """Return ``reshard_after_forward`` as True, False, a smaller group's size, or None."""
    if isinstance(given, bool | None):
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
        mesh, shard_dim, replica_dim = info.mesh, info.shard_mesh_dim, info.replicate_mesh_dim
    placement = Shard(0) if placement is None else placement
    if type(placement) is not Shard:
        raise ValueError(
            f"shard_placement_fn gave {placement!r} for parameter {what}: FSDP2 takes Shard(dim) "
            "or None; parameters that every rank holds whole are ignored_params"
        )
    resolved = policy_for(policy, param)
    dtypes = (resolved.param_dtype, resolved.reduce_dtype)
    shape, shards = shard_of(param).shape, mesh.size(shard_dim)
    dim = placement.dim % max(len(shape), 1)
    layout = Layout(mesh, shard_dim, replica_dim, dim, *dtypes)
    layout.check(what, param)
    if not -len(shape) <= placement.dim < len(shape) or (dim and shape[dim] % shards):
        raise ValueError(
            f"parameter {what}, of shape {tuple(shape)}, can't be sharded by {placement!r} "
            f"over {shards} ranks: other dimensions than 0 must be divisible by them, as in FSDP2"
        )
    return layout


def _move(managed: Sequence[nn.Module], layouts: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Move parameters and buffers to the mesh's device, but leave meta tensors."""
    device = torch.device(mesh.device_type)
    if device.type != "cpu":
        device = torch.device(device.type, torch.get_device_module(device).current_device())
    buffers = (buffer for module in managed for buffer in module.buffers(recurse=False))
    for tensor in itertools.chain(layouts, buffers):
        if tensor.device != device and not tensor.is_meta:
            tensor.data = tensor.to(device)


_REDUCE_ONCE = (
    "run the microbatches in `with ReduceOnce(model, backend): ...`, from torch_ext_bucketing.fsdp"
)


def _only(setting: str, accepted: bool, way: str) -> Callable[..., None]:
    """Make a method for a setting that has one value in a compiled step."""

    def method(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        value = args[0] if args else kwargs.get(setting, kwargs.get("enable"))
        if bool(value) is not accepted:
            raise _no_counterpart(f"set_{setting}({value})", way)

    return method


def _never(name: str, way: str) -> Callable[..., None]:
    """Make a method that raises: collectives of a compiled step are nodes of its graph."""

    def method(self: FSDPModule, *_: Any, **__: Any) -> None:
        raise _no_counterpart(name, way)

    return method


def _no_counterpart(call: str, way: str) -> NotImplementedError:
    return NotImplementedError(f"{call} has no counterpart in a compiled step. Instead: {way}")


class FSDPModule:
    """A module that :func:`.fully_shard` was called on, with the methods of FSDP2's own class.

    Settings of eager FSDP2's streams, buffers and prefetching have no effect: passes order and
    merge collectives. Settings that a compiled step can't follow are errors that name another way.
    """

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, before the recipe is made."""
        check_argument("reshard_after_forward", reshard_after_forward, bool)
        for unit in self._changed(recurse, "set_reshard_after_forward"):
            unit.reshard = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of the number of ranks."""
        for unit in self._changed(False, "set_gradient_divide_factor"):
            unit.divide(float(factor), unit.only_sums)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Only add in collectives, and divide before or after them."""
        for unit in self._changed(False, "set_force_sum_reduction_for_comms"):
            unit.divide(unit.factor, bool(enable))

    def unshard(self, async_op: bool = False) -> Any:
        """Do nothing: a compiled step gathers parameters where its passes put the gathers."""
        return SimpleNamespace(wait=lambda: None) if async_op else None

    def reshard(self) -> None:
        """Do nothing: gathered parameters live inside a compiled step."""

    set_requires_gradient_sync = _only("requires_gradient_sync", True, _REDUCE_ONCE)
    set_requires_all_reduce = _only("requires_all_reduce", True, _REDUCE_ONCE)
    set_reshard_after_backward = _only(
        "reshard_after_backward",
        True,
        _REDUCE_ONCE.replace("backend)", "backend, gather_once=True)"),
    )
    set_reduce_scatter_unused_params = _only(
        "reduce_scatter_unused_params",
        False,
        "all ranks run one graph, so a parameter is unused on all of them or on none; for a "
        "gradient of zeros, add `0 * parameter.sum()` to the loss",
    )
    set_custom_all_gather = _never("set_custom_all_gather", "write a pass, teb.GraphPass")
    set_custom_reduce_scatter = _never(
        "set_custom_reduce_scatter",
        "recipe(model, reduce='all_to_all') adds in rank order, or write a pass, teb.GraphPass",
    )
    set_all_reduce_hook = _never(
        "set_all_reduce_hook", "a 2-D mesh all-reduces, or write a pass, teb.GraphPass"
    )

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Do nothing: :class:`.Schedule` orders the gathers."""
        for module in modules:
            check_argument("each module", module, FSDPModule)

    set_modules_to_backward_prefetch = set_modules_to_forward_prefetch

    def _no_effect(self, *_: Any, **__: Any) -> None:
        """Do nothing: the setting is about eager FSDP2's streams and buffers."""

    finalize_backward = _no_effect
    reset_iter_state = _no_effect
    set_allocate_memory_from_process_group_for_comm = _no_effect
    set_is_last_backward = _no_effect
    set_keep_unsharded_storage = _no_effect
    set_manual_backward_finalization = _no_effect
    set_post_optim_event = _no_effect
    set_reduce_scatter_max_input_buffers = _no_effect
    set_separate_reduce_scatter_group = _no_effect
    set_symm_mem_for_comm = _no_effect
    set_unshard_in_backward = _no_effect

    def _changed(self, recurse: bool, method: str) -> Iterator[Unit]:
        """Yield the units that a method changes; raise a RuntimeError if it comes too late."""
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        units = dict.fromkeys(u for m in modules if (u := unit_of(m)) is not None)
        if any(unit.read or unit.running for unit in units):
            raise RuntimeError(
                f"{method}() comes too late: a recipe was made of the model, or it ran. Call it "
                "after fully_shard(), before recipe(model)"
            )
        return iter(units)


def _sent(param: nn.Parameter | None, layout: Layout, unit: Unit | None) -> Sent:
    """Describe how a parameter is sharded and sent."""
    assert param is not None
    mesh, dims = layout.mesh, (layout.shard_dim, layout.replica_dim)
    shards, replicas = (() if d is None else ranks_of(mesh.get_group(d)) for d in dims)
    policy = MixedPrecisionPolicy(layout.param_dtype, layout.reduce_dtype)
    factor, only_sums = (None, False) if unit is None else (unit.factor, unit.only_sums)
    return sent(layout.dim, shards, replicas, param.dtype, policy, factor, only_sums)


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units in ``model``, in the order of the calls."""
    units = dict.fromkeys(u for m in model.modules() if (u := unit_of(m)) is not None)
    return sorted(units, key=lambda unit: unit.number)


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """Read the payloads of a model that ``fully_shard`` was applied to, eager FSDP2's or ours.

    They are in the order of the calls, with FQNs relative to ``model``.
    """
    units = units_of(model)
    if not units:
        return read_param_groups(model)
    names = parameter_names(model)
    module_names = {m: canonical_fqn(n) for n, m in model.named_modules()}
    roots = outermost(m for unit in units for m in unit.modules)
    groups = []
    for unit in units:
        # Only now it is known which unit is the root: a later call may have wrapped around it.
        reshard = unit.modules[0] not in roots if unit.reshard is None else unit.reshard
        for payload in unit.payloads:
            params = [p for place in payload if (p := place.param) is not None]
            fqns_of = [names.get(p, ()) for p in params]
            for fqns, place in zip(fqns_of, payload, strict=True):
                if not fqns:
                    owner = type(place.module).__name__
                    raise ValueError(
                        f"a fully_shard() unit holds {place.name!r} of a {owner} that is "
                        f"not in this {type(model).__name__}: pass the model that all modules of "
                        "the unit belong to"
                    )
            trained = {p.dtype for p in params if p.requires_grad}
            if len(trained) > 1:
                raise ValueError(
                    f"a unit trains parameters of {' and '.join(sorted(map(str, trained)))}, which "
                    f"FSDP2 refuses: {format_names([f[0] for f in fqns_of])}. Give each dtype a "
                    "fully_shard() call, or cast the model"
                )
            firsts = tuple(fqns[0] for fqns in fqns_of)
            groups.append(
                ParamGroup(
                    modules=tuple(module_names[m] for m in unit.modules if m in module_names),
                    params=firsts,
                    reduce_params=reduce_order(firsts, [p.dtype for p in params]),
                    aliases=tuple((alias, fqns[0]) for fqns in fqns_of for alias in fqns[1:]),
                    origins=(None,) * len(params),
                    sent=tuple(_sent(place.param, place.layout, unit) for place in payload),
                    reshard=reshard,
                    casts=Casts.of(unit.policy),
                )
            )
    return groups


def follow(model: nn.Module, reference: nn.Module) -> list[ParamGroup]:
    """Check that ``model`` sends as ``reference`` does, and cast as it does; return its groups.

    ``model`` is sharded by :func:`.fully_shard`, by ``data_parallel`` or by another SimpleFSDP,
    whose placements alone are known. A ``ValueError`` names the first difference.
    """
    groups = param_groups(reference)
    own = {g.modules: g for g in param_groups(model)} if units_of(model) else None
    places = {
        canonical_fqn(f"{path}.{name}".lstrip(".")): (module, name)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    held = {fqn for g in groups for fqn in (*g.params, *(alias for alias, _ in g.aliases))}
    again = "Shard the copy by the calls of the reference, torch_ext_bucketing.fsdp.fully_shard"
    missing = [fqn for g in groups for fqn in g.params if fqn not in places]
    if missing:
        raise ValueError(
            f"the reference has parameters that the model has not: {format_names(missing, 8)}. "
            "Both must be made by the same code"
        )
    for fqn, (module, name) in places.items():
        if fqn not in held and is_distributed(module._parameters[name]):
            alone = "the reference leaves it alone (ignored_params, or outside of all units)"
            raise ValueError(f"{fqn} is sharded, and {alone}. {again}")
    for group in groups:
        label = f"unit {'+'.join(group.modules)!r}"
        if group.eager_only:
            raise ValueError(
                f"the reference has {' and '.join(group.eager_only)} on {label}, which a compiled "
                "step can't reproduce"
            )
        for fqn, theirs in zip(group.params, group.sent, strict=True):
            module, name = places[fqn]
            param: Any = module._parameters[name]
            if not is_distributed(param):
                raise ValueError(f"{fqn} is not sharded, and the reference shards it. {again}")
            unshard = module.__dict__.get("_unshards", {}).get(name)
            if unshard is None:  # another SimpleFSDP
                dims = [d for p in param.placements if (d := getattr(p, "dim", None)) is not None]
                same = not dims or theirs.dim in dims
                ours = theirs if same else theirs._replace(dim=dims[0])
            else:
                unit = unshard.gate if isinstance(unshard.gate, Unit) else None
                ours = _sent(param, unshard.layout, unit)
            differ = [
                f"{what} is {mine!r}, in the reference {other!r}"
                for what, mine, other in zip(Sent._fields, ours, theirs, strict=True)
                if mine != other
            ]
            if differ:
                raise ValueError(f"{fqn}: {'; '.join(differ)}. {again}")
        mine = own.get(group.modules) if own is not None else group
        if group.params and (mine is None or mine.params != group.params):
            raise ValueError(f"the model has no unit like the reference's {label}. {again}")
        if mine is not None and mine.casts != group.casts:
            differ = [f"casts to {mine.casts}", f"in the reference to {group.casts}"]
            raise ValueError(f"{label} {', '.join(differ)}. {again}")
    if own is None:
        modules = {canonical_fqn(n): m for n, m in reversed(list(model.named_modules()))}
        for names, casts in dict.fromkeys((g.modules, g.casts) for g in groups):
            if "_fully_shard_casts" not in modules[names[0]].__dict__:
                register_casts([modules[n] for n in names], casts)
                modules[names[0]].__dict__["_fully_shard_casts"] = casts
    return groups
