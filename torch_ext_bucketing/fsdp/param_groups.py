"""Read units and payloads of models that ``fully_shard`` was applied to, FSDP2's or ours."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from .._torch.fsdp2 import Casts, ParamGroup, Sent, read_param_groups, reduce_order
from .._torch.sharded import is_distributed
from ..fqns import canonical_fqn, format_names, outermost, parameter_names
from .fsdp_module import Unit, sent_by, unit_of
from .unit_inputs import register_casts


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units in ``model``, in the order of the calls."""
    found = dict.fromkeys(u for m in model.modules() if (u := unit_of(m)) is not None)
    return sorted(found, key=lambda unit: unit.number)


def ignored_parameters(model: nn.Module) -> frozenset[nn.Parameter]:
    """Return the parameters that the model's :func:`fully_shard` calls were to ignore."""
    return frozenset(p for unit in units_of(model) for p in unit.ignored)


def param_groups(model: nn.Module) -> list[ParamGroup]:
    """Read the payloads of a model that ``fully_shard`` was applied to, eager FSDP2's or ours.

    They are in the order of the calls, with FQNs relative to ``model``.

    Raises:
        ValueError: nothing is wrapped, or a unit has a parameter outside of ``model``; or trained
            parameters of one unit differ in dtype, which eager FSDP2 refuses, too.
    """
    units = units_of(model)
    if not units:
        return read_param_groups(model)
    names = parameter_names(model)
    module_names = {m: canonical_fqn(n) for n, m in model.named_modules()}
    roots = outermost(m for unit in units for m in unit.modules)
    groups = []
    for unit in units:
        is_root = unit.reshard is None and unit.modules[0] in roots
        reshard = not is_root if unit.reshard is None else unit.reshard
        for places, layouts in zip(unit.payloads, unit.layouts, strict=True):
            params = [module._parameters[name] for module, name in places]
            found = [names.get(p, ()) for p in params if p is not None]
            for fqns, (module, name) in zip(found, places, strict=True):
                if not fqns:
                    raise ValueError(
                        f"a fully_shard() unit holds {name!r} of a {type(module).__name__} that is "
                        f"not in this {type(model).__name__}: pass the model that all modules of "
                        "the unit belong to"
                    )
            trained = {p.dtype for p in params if p is not None and p.requires_grad}
            if len(trained) > 1:
                raise ValueError(
                    f"a unit trains parameters of {' and '.join(sorted(map(str, trained)))}, which "
                    f"FSDP2 refuses: {format_names([f[0] for f in found])}. Give each dtype a "
                    "fully_shard() call, or cast the model"
                )
            fqns_of = tuple(fqns[0] for fqns in found)
            groups.append(
                ParamGroup(
                    modules=tuple(module_names[m] for m in unit.modules if m in module_names),
                    params=fqns_of,
                    reduce_params=reduce_order(fqns_of, [p.dtype for p in params if p is not None]),
                    aliases=tuple((alias, fqns[0]) for fqns in found for alias in fqns[1:]),
                    origins=(None,) * len(found),
                    sent=tuple(
                        sent_by(*place, layout, unit)
                        for place, layout in zip(places, layouts, strict=True)
                    ),
                    reshard=reshard,
                    casts=Casts.of(unit.policy),
                )
            )
    return groups


def follow(model: nn.Module, reference: nn.Module) -> list[ParamGroup]:
    """Check that ``model`` sends what ``reference`` does, and cast as it does; return its groups.

    Args:
        model: sharded by :func:`.fully_shard`, by ``data_parallel`` or by another SimpleFSDP. Of
            the last one, only placements are known.
        reference: wrapped by FSDP2's ``fully_shard``.

    Raises:
        ValueError: the first thing that ``model`` can't reproduce.
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
            raise ValueError(
                f"{fqn} is sharded, and the reference leaves it alone (ignored_params, or outside "
                f"of all units). {again}"
            )
    for group in groups:
        if group.eager_only:
            raise ValueError(
                f"the reference has {' and '.join(group.eager_only)} on {_label(group)}, which a "
                "compiled step can't reproduce"
            )
        for fqn, theirs in zip(group.params, group.sent, strict=True):
            module, name = places[fqn]
            param = module._parameters[name]
            if not is_distributed(param):
                raise ValueError(f"{fqn} is not sharded, and the reference shards it. {again}")
            unshard = module.__dict__.get("_unshards", {}).get(name)
            if unshard is None:  # another SimpleFSDP
                placements: Any = param.placements  # type: ignore[union-attr]
                dims = {d for p in placements if (d := getattr(p, "dim", None)) is not None}
                if dims and theirs.dim not in dims:
                    raise ValueError(
                        f"{fqn} is sharded on dimension {dims.pop()}, in the reference on "
                        f"{theirs.dim}. {again}"
                    )
                continue
            unit = unshard.gate if isinstance(unshard.gate, Unit) else None
            ours = sent_by(module, name, unshard.layout, unit)
            differ = [
                f"{what} is {mine!r}, in the reference {other!r}"
                for what, mine, other in zip(Sent._fields, ours, theirs, strict=True)
                if mine != other
            ]
            if differ:
                raise ValueError(f"{fqn}: {'; '.join(differ)}. {again}")
        if own is not None:
            mine = own.get(group.modules)
            if group.params and (mine is None or mine.params != group.params):
                raise ValueError(
                    f"the model has no unit like the reference's {_label(group)}. {again}"
                )
            if mine is not None and mine.casts != group.casts:
                raise ValueError(
                    f"{_label(group)} casts to {mine.casts}, in the reference to {group.casts}. "
                    f"{again}"
                )
    if own is None:
        modules = {canonical_fqn(n): m for n, m in reversed(list(model.named_modules()))}
        for names, casts in dict.fromkeys((g.modules, g.casts) for g in groups):
            if "_fully_shard_casts" not in modules[names[0]].__dict__:
                register_casts([modules[n] for n in names], casts)
                modules[names[0]].__dict__["_fully_shard_casts"] = casts
    return groups


def _label(group: ParamGroup) -> str:
    return f"unit {'+'.join(group.modules)!r}"
