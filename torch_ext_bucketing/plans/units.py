"""Units that were named or found, checked against the model and made into a bucket plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch.nn as nn

from ..fqns import canonical_modules
from .plan import BucketPlan, Units, checked_kinds, module_named
from .tree import ModuleTree, has_parameters

__all__ = ["plan_of_units"]


def plan_of_units(
    mode: str,
    units: list[tuple[str, ...]],
    model: nn.Module,
    *,
    kinds: Iterable[str],
    head: str | None = None,
) -> BucketPlan:
    """Checks the units against the model and makes the plan."""
    known = canonical_modules(model)
    unit_of: dict[nn.Module, str] = {}
    inside: dict[nn.Module, str] = {}  # modules that an earlier unit holds
    for unit in units:
        label = "+".join(unit)
        for name in unit:
            module = module_named(name, known)
            if module in unit_of:
                raise ValueError(
                    f"plan: module {name!r} is in two buckets, {unit_of[module]!r} and {label!r}"
                )
            if module in inside:
                raise ValueError(
                    f"plan: {label!r} lies inside the earlier {inside[module]!r}: list inner "
                    "modules before those around them, as with fully_shard"
                )
            unit_of[module] = label
        for name in unit:
            for module in known[name].modules():
                inside.setdefault(module, label)
        if not any(has_parameters(known[name]) for name in unit):
            raise ValueError(f"plan: unit {label!r} has no parameters: leave it out")
    return BucketPlan(
        mode=mode,
        units=tuple(units),
        kinds=checked_kinds(kinds),
        head=head,
        cover=_covers(units, model),
    )


def _covers(units: list[tuple[str, ...]], model: nn.Module) -> Units:
    """Per unit the outermost modules that hold nothing of another unit. See `BucketPlan.cover`."""
    tree = ModuleTree(model)
    names = {name for unit in units for name in unit}

    def spell(path: str, unit: tuple[str, ...]) -> Iterator[str]:
        prefix = f"{path}." if path else ""
        if not any(n != path and n.startswith(prefix) and n not in unit for n in names):
            yield path
            return
        for child, _ in tree.children(path):
            if child not in names:
                yield from spell(child, unit)

    covers = []
    for unit in units:
        # A module inside another of the same unit is named by that one.
        outer = [
            n for n in unit if not any(o != n and n.startswith(f"{o}." if o else "") for o in unit)
        ]
        covers.append(tuple(piece for name in outer for piece in spell(name, unit)))
    return tuple(covers)
