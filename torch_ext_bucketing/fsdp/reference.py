"""Compare how a model is sharded with a reference on eager FSDP2, and cast as that does."""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from .._torch.fsdp2 import ParamGroup, Sent, is_distributed, sent_by_name
from ..fqns import canonical_fqn, format_names
from .modules import param_groups, units_of
from .unit_inputs import register_casts


def follow(model: nn.Module, reference: nn.Module) -> list[ParamGroup]:
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
