"""Units that were named or found, checked against the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch.nn as nn

from .._torch.dynamo_inputs import names_are_relative_to
from ..fqns import canonical_fqn, canonical_modules
from .plan import UnitSpec, module_named
from .tree import has_parameters

__all__ = ["find_units", "spec_of_units", "unit_names"]


def unit_names(units: Iterable[str | Sequence[str]]) -> list[tuple[str, ...]]:
    """Units as tuples of module names: a list of names and lists of names, or a ``UnitSpec``.

    Raises:
        TypeError: a string, or a unit that is neither a string nor a list of strings.
        ValueError: no unit, or an empty one.
    """
    if isinstance(units, str):
        raise TypeError(
            f"units must be a list of module FQNs or lists of them, got the string {units!r}"
        )
    named = []
    for unit in getattr(units, "units", units):
        names = (unit,) if isinstance(unit, str) else unit
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"each of units must be a module FQN or a list of module FQNs, got {unit!r}"
            )
        if not names:
            raise ValueError("a unit in units is an empty list: name its modules or leave it out")
        named.append(tuple(names))
    if not named:
        raise ValueError(
            'there are no units: name the modules of each fully_shard() call ("" for the model)'
        )
    return named


def find_units(
    model: nn.Module, units: Iterable[str | Sequence[str]]
) -> Iterator[tuple[tuple[str, ...], list[nn.Module]]]:
    """Each unit's names and its modules, in the order given.

    Args:
        model: wrapped or not.
        units: as of :func:`unit_names`, in the order of the ``fully_shard`` calls: inner modules
            before those around them.

    Raises:
        TypeError: as of :func:`unit_names`.
        ValueError: as of :func:`unit_names`; an unknown name, a module twice, or one inside an
            earlier unit.
    """
    known = canonical_modules(model)
    unit_of: dict[nn.Module, str] = {}
    inside: dict[nn.Module, str] = {}  # modules that an earlier unit holds
    for names in unit_names(units):
        label = "+".join(names)
        modules: list[nn.Module] = []
        for name in names:
            module = module_named(canonical_fqn(name), known)
            if module in modules:
                raise ValueError(f"units: module {name!r} is listed twice in one unit")
            if module in unit_of:
                raise ValueError(
                    f"units: module {name!r} is listed twice, before in unit {unit_of[module]!r}"
                )
            if module in inside:
                raise ValueError(
                    f"units: {name!r} lies inside {inside[module]!r}, which comes earlier and so "
                    "took its parameters: list inner modules before those around them, as with "
                    "fully_shard"
                )
            modules.append(module)
        unit_of.update(dict.fromkeys(modules, label))
        for module in modules:
            for below in module.modules():
                inside.setdefault(below, label)
        yield names, modules


def spec_of_units(units: Iterable[tuple[str, ...]], model: nn.Module) -> UnitSpec:
    """Units that fit the model, to which parameters' names are relative from now on.

    Raises:
        ValueError: as of :func:`find_units`; a unit without parameters.
    """
    found = list(find_units(model, units))
    for unit, modules in found:
        if not any(map(has_parameters, modules)):
            raise ValueError(f"units: {'+'.join(unit)!r} has no parameters: leave it out")
    names_are_relative_to(model)
    return UnitSpec(tuple(unit for unit, _ in found))
