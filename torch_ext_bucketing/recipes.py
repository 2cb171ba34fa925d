"""Recommend the list of passes to start from, for a model and a goal."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ._torch.dynamo import names_are_relative_to
from ._torch.fsdp2 import ParamGroup, Sent, is_distributed, placed, sent_by_name
from .errors import NotBucketedWarning, check_argument
from .fqns import canonical_fqn, format_names
from .fsdp.modules import is_eager, param_groups, units_of
from .fsdp.plans import transformer_block_plan
from .fsdp.shard import ignored_extensions
from .fsdp.unit_inputs import register_casts
from .fsdp.units import FSDPParamOrder, Units
from .graph.nodes import KINDS, Kind
from .passes.base import GraphPass
from .passes.bucketing import BucketByUnit, FixedOrderReduce
from .passes.pipeline import MatchFSDP2
from .planner.cost.machine import Machine
from .planner.resharding import ReshardAfterForward
from .planner.schedule.policy import Overlap, PeakMemory
from .planner.scheduling import BucketAndSchedule, Schedule
from .planner.step_memory import check_bound, state_bytes

Goal = Literal["parity", "speed"]


def recipe(
    model: nn.Module | Sequence[nn.Module],
    goal: Goal = "parity",
    *,
    units: Units | Sequence[str | Sequence[str]] | None = None,
    reference: nn.Module | None = None,
    machine: Machine | None = None,
    reduce: Literal["all_to_all"] | None = None,
    memory: PeakMemory | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    state_bytes_per_parameter: float | None = None,
    to: DeviceMesh | int | None = None,
) -> list[GraphPass]:
    """Return the recommended passes for a sharded model, for :func:`.backend`.

    The result is an ordinary list, to be printed and changed: the ``repr`` of each pass is the code
    that makes it. A backend with these passes names parameters as ``model`` does, whatever code is
    compiled: the model, its ``forward``, a function or module around it, or a part of it.

    - ``"parity"``: the same weights as eager FSDP2, bit for bit. Each unit of eager FSDP2 is one
      bucket, its members in eager's order, and gradients of activations are added unit by unit. The
      graph is then reordered for overlap, which changes no result.
    - ``"speed"``: byte caps chosen on a cost model, and an order that overlaps within 1.02 of the
      unbucketed graph's peak memory. Bits are eager's only with ``reduce``.

    Both give the model eager FSDP2's collectives first (:class:`.MatchFSDP2`), and free gathered
    parameters after forward, except those of the last unit with ``"parity"``, unless calls of
    ``fully_shard`` say which. Parameters that are trained and not sharded are a
    ``NotBucketedWarning``.

    Args:
        model: sharded or replicated, with ``DTensor`` parameters, such as by
            :func:`.fsdp.fully_shard`, whose units and resharding it then has, or by
            :func:`.data_parallel`; not wrapped by eager FSDP2. Or a list of models that one
            function calls, such as student and teacher; names are those in an ``nn.ModuleList``,
            ``0.layers.1.weight``.
        units: for ``"parity"``: the modules of each ``fully_shard`` call of the eager training, as
            names or as a plan, unless ``model`` has units. None takes
            :func:`.transformer_block_plan`'s.
        reference: for ``"parity"``: the model wrapped by FSDP2's ``fully_shard``, whose units,
            order, casts and resharding are used instead. ``model`` must be sharded alike.
        machine: the machine that the cost model times nodes for; it reaches every pass. None: this
            job's (:func:`.job_machine`).
        reduce: ``"all_to_all"`` adds gradients in the order of the ranks
            (:class:`.FixedOrderReduce`). With either goal, and any buckets, the bits are those of
            eager FSDP2 with :class:`.AllToAllReduceScatter`. None: the process group adds.
        memory: a bound on everything that a rank holds in a step: shards, gradients, optimizer
            state, inputs, activations, gathered parameters, buckets. The gathered parameters and
            the activations that stay in memory are chosen for the shortest step under it, and with
            ``host_gib`` those that wait in host memory. Bits do not change, but Inductor may round
            recomputed values differently. None: activations are saved as without this package, and
            the last unit stays gathered. Less than shards, gradients and optimizer state need is a
            ``ValueError``.
        optimizer: with ``memory``: the optimizer whose state counts. It is only read.
        state_bytes_per_parameter: or bytes of its state per element of a parameter. With neither it
            is 8, as for AdamW in fp32.
        to: with ``memory``: a smaller group, such as a node's ranks, for backward to gather in
            where that is worth its memory; see :class:`.ReshardAfterForward`. It creates process
            groups: call this on every rank at the same point of the program.
    """
    if goal not in ("parity", "speed"):
        raise ValueError(f"goal must be 'parity' or 'speed', got {goal!r}")
    if reduce not in (None, "all_to_all"):
        raise ValueError(f"reduce must be 'all_to_all' or None, got {reduce!r}")
    model = together(model)
    check_argument("reference", reference, nn.Module | None)
    if reference is not None and isinstance(model, Together):
        raise ValueError(
            "reference= is one model's: give nn.ModuleList(models) and an nn.ModuleList of their "
            "references"
        )
    if goal == "speed" and (units is not None or reference is not None):
        raise ValueError('units= and reference= belong to goal "parity"; "speed" has no units')
    check_argument("memory", memory, PeakMemory | None)
    kinds = _kinds(model)
    if not kinds:
        return []
    gathers = "all_gather" in kinds
    for unit in units_of(model):
        unit.check()
        unit.is_read = True
    _warn_of_others(model)
    match = MatchFSDP2()
    reshard: list[GraphPass] = [ReshardAfterForward()] if gathers else []
    sums = FixedOrderReduce() if reduce else None
    if goal == "parity":
        order, as_given, modules = _order(model, units, reference)
        match = MatchFSDP2(model, modules)
        reshard = as_given if gathers else []
        buckets = [BucketByUnit(order, kinds=kinds), *([sums] if sums is not None else [])]
        last = [*buckets, Schedule([Overlap()], machine)]
    else:
        # With memory=, the bound on the step holds for schedules, too.
        policies = [Overlap(), *([PeakMemory(ratio=1.02)] if memory is None else [])]
        last = [BucketAndSchedule(policies, kinds=kinds, machine=machine, reduce=sums)]
    if memory is not None:
        state = state_bytes(model, optimizer, state_bytes_per_parameter)
        check_bound(model, memory, state)
        reshard = [
            ReshardAfterForward("auto", memory=memory, activations=True, state_bytes=state, to=to)
        ]
    elif any(option is not None for option in (optimizer, state_bytes_per_parameter, to)):
        raise ValueError(
            "optimizer=, state_bytes_per_parameter= and to= belong to memory=; without a bound, "
            "ReshardAfterForward(to=...)"
        )
    # in_order() lists the passes that run for these.
    passes = [match, *reshard, *last]
    names_are_relative_to(model, passes, keep=isinstance(model, Together))
    return passes


class Together(nn.ModuleList):
    """Models that one recipe is for."""


def together(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Return a model, or a list of models as one module."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, list | tuple) or not all(isinstance(m, nn.Module) for m in model):
        raise TypeError(f"give a torch.nn.Module or a list of them, got {model!r}")
    if not model or len(set(model)) < len(model):
        raise ValueError(f"give each model once, and at least one, got {len(model)}")
    return Together(model)


def _warn_of_others(model: nn.Module) -> None:
    """Warn of trained parameters that the sharding leaves out, wholly or by their extensions."""
    ignored = {param for unit in units_of(model) for param in unit.ignored}
    trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad and p not in ignored)
    plain = [name for name, p in trained if not is_distributed(p)]
    if plain:
        warnings.warn(
            f"{len(plain)} parameter(s) of {type(model).__name__} are trained and not sharded, so "
            "no collective reduces their gradients, and each rank trains its own: "
            f"{format_names(plain)}. Shard the whole model, data_parallel(model, mesh), or "
            "reduce them yourself",
            NotBucketedWarning,
            stacklevel=3,
        )
    extended = ignored_extensions(model)
    if extended:
        warnings.warn(
            f"{len(extended)} parameter(s) of {type(model).__name__} have all-gather extensions "
            f"(fsdp_pre_all_gather of {', '.join(dict.fromkeys(extended.values()))}, such as "
            "gathers in float8), and its sharding ignores that, as torchtitan's data_parallel does:"
            f" {format_names(list(extended))}. Shard it by torch_ext_bucketing.data_parallel("
            "model, mesh)",
            NotBucketedWarning,
            stacklevel=3,
        )


def _kinds(model: nn.Module) -> tuple[Kind, ...]:
    """Return the kinds of collectives that the parameters' placements make."""
    name = type(model).__name__
    if is_eager(model):
        raise ValueError(
            f"{name} is wrapped by fully_shard(), whose collectives are not in a compiled graph: "
            "shard an unwrapped copy, data_parallel(copy, mesh), and compile that with "
            "recipe(copy, reference=model)"
        )
    placements = [placed(p) for p in model.parameters() if is_distributed(p)]
    if not placements and units_of(model):  # it has no parameters, or ignores them all
        return ()
    if not placements:
        raise ValueError(
            f"{name} is not sharded: none of its parameters is a DTensor, so its graphs have no "
            "collectives to bucket. Shard it first: data_parallel(model, mesh)"
        )
    sharded, replicated = map(any, zip(*placements, strict=True))
    has = {"all_gather": sharded, "reduce_scatter": sharded, "all_reduce": replicated}
    return tuple(kind for kind in KINDS if has[kind])


def _order(
    model: nn.Module,
    units: Units | Sequence[str | Sequence[str]] | None,
    reference: nn.Module | None,
) -> tuple[FSDPParamOrder, list[GraphPass], list[tuple[str, ...]]]:
    """Return the order, the passes that reshard as the units say, and the units' modules."""
    model_units = units_of(model)
    if units is not None and (model_units or reference is not None):
        raise ValueError(
            "give units= or reference=, not both: a reference has units of its own"
            if reference is not None
            else "units= is for models without units of their own: fully_shard() gave this one its"
        )
    if model_units or reference is not None:
        groups = param_groups(model) if reference is None else _follow(model, reference)
        groups = [group for group in groups if group.params]
        order = FSDPParamOrder.from_fsdp(model if reference is None else reference)
        return order, _resharding(groups), list(dict.fromkeys(group.modules for group in groups))
    if units is None and isinstance(model, Together):
        plans = [
            [tuple(f"{i}.{name}".strip(".") for name in unit) for unit in _plan(part)]
            for i, part in enumerate(model)
        ]
        named = [unit for plan in plans for unit in plan]
        last = ReshardAfterForward(keep=[name for plan in plans for name in plan[-1]])
        return FSDPParamOrder.from_model(model, named), [last], named
    if units is None:
        units = _plan(model)
    order = FSDPParamOrder.from_model(model, units=units)
    named = [tuple([unit] if isinstance(unit, str) else unit) for unit in units]
    keep = named[-1]
    if keep == ("",):
        # The root's own parameters by name: "" would stand for all that are in the model.
        keep = (*(named[-2] if len(named) > 1 else ()), *order.units[-1])
    return order, [ReshardAfterForward(keep=keep)], named


def _plan(model: nn.Module) -> Units:
    try:
        return transformer_block_plan(model)
    except ValueError as error:
        raise ValueError(
            f"{error}. For a recipe: recipe(model, units=[...]) with the modules of each "
            'fully_shard() call of the eager training, or recipe(model, "speed"), which needs '
            "no units"
        ) from error


def _resharding(groups: Sequence[ParamGroup]) -> list[GraphPass]:
    """Return the pass that frees gathered parameters by the units' ``reshard_after_forward``."""
    by_size: dict[bool | int, list[str]] = {}
    for group in groups:
        by_size.setdefault(group.reshard, []).extend(group.params)
    gathered = by_size.pop(False, [])
    if len(by_size) > 1:
        sizes = ", ".join(f"{size} for {format_names(fqns, 2)}" for size, fqns in by_size.items())
        raise ValueError(
            "one step reshards to groups of one size, and the units say reshard_after_forward="
            f"{sizes}: give one number, or True, to all units that do not keep their parameters"
        )
    return [ReshardAfterForward(*by_size, keep=gathered)]


def _follow(model: nn.Module, reference: nn.Module) -> list[ParamGroup]:
    """Check that ``model`` sends as ``reference`` does, and cast as it does; return its groups.

    ``model`` is sharded by :func:`.fully_shard`, by ``data_parallel`` or by another SimpleFSDP,
    whose placements alone are known. A ``ValueError`` names the first difference.
    """
    groups = param_groups(reference)
    groups_of_model = {g.modules: g for g in param_groups(model)} if units_of(model) else None
    ours_sent = sent_by_name(model)
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
            settings = " and ".join(setting.code for setting in group.eager_only)
            raise ValueError(
                f"the reference has {settings} on {label}, which a compiled step can't reproduce"
            )
        for fqn, expected in zip(group.params, group.sent, strict=True):
            module, name = places[fqn]
            param: Any = module._parameters[name]
            if not is_distributed(param):
                raise ValueError(f"{fqn} is not sharded, and the reference shards it. {again}")
            sent = ours_sent.get(fqn)
            if sent is None:  # another SimpleFSDP
                dims = [d for p in param.placements if (d := getattr(p, "dim", None)) is not None]
                same = not dims or expected.dim in dims
                sent = expected if same else expected._replace(dim=dims[0])
            differ = [
                f"{field} is {value!r}, in the reference {expected_value!r}"
                for field, value, expected_value in zip(Sent._fields, sent, expected, strict=True)
                if value != expected_value
            ]
            if differ:
                raise ValueError(f"{fqn}: {'; '.join(differ)}. {again}")
        model_group = groups_of_model.get(group.modules) if groups_of_model is not None else group
        if group.params and (model_group is None or model_group.params != group.params):
            raise ValueError(f"the model has no unit like the reference's {label}. {again}")
        if model_group is not None and model_group.casts != group.casts:
            differ = [f"casts to {model_group.casts}", f"in the reference to {group.casts}"]
            raise ValueError(f"{label} {', '.join(differ)}. {again}")
    if groups_of_model is None:
        modules = {canonical_fqn(n): m for n, m in reversed(list(model.named_modules()))}
        for names, casts in dict.fromkeys((g.modules, g.casts) for g in groups):
            if "_fully_shard_casts" not in modules[names[0]].__dict__:
                register_casts([modules[n] for n in names], casts)
                modules[names[0]].__dict__["_fully_shard_casts"] = casts
    return groups
