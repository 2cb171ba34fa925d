"""Units as the modules of each: as a person writes them, or as they are found in a model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn

from .._torch.dynamo_inputs import names_are_relative_to
from ..fqns import canonical_fqn, canonical_modules, nearest_names
from .tree import has_parameters

__all__ = ["UnitSpec", "abbreviated", "find_units", "spec_of_units", "unit_names"]


@dataclass(frozen=True, repr=False)
class UnitSpec:
    """Units of modules, in the order of ``fully_shard`` calls: a hashable, picklable value.

    Iterating gives the units, so it can be passed wherever a list of units is taken.

    Args:
        units: per unit its module FQNs, in the order in which ``fully_shard([...])`` would get
            them, or one FQN; ``""`` is the model.

    Raises:
        TypeError: a name is no string.
        ValueError: no units, an empty unit, or a module in two units.
    """

    units: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        units = tuple(
            tuple(canonical_fqn(name) for name in ((unit,) if isinstance(unit, str) else unit))
            for unit in self.units
        )
        if not units:
            raise ValueError("there are no units: name at least one module")
        unit_of: dict[str, int] = {}
        for index, unit in enumerate(units):
            if not unit:
                raise ValueError(f"unit {index} is empty")
            for name in unit:
                if name in unit_of:
                    raise ValueError(
                        f"module {name!r} is in two units, unit {unit_of[name]} "
                        f"{units[unit_of[name]]} and unit {index} {unit}"
                    )
                unit_of[name] = index
        object.__setattr__(self, "units", units)

    def __repr__(self) -> str:
        """The code that makes one with the same units."""
        return f"manual_plan({abbreviated(self.units)}, model)"

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.units)

    def uncovered(self, model: nn.Module) -> tuple[str, ...]:
        """FQNs of the parameters of ``model`` that no unit holds, in ``named_parameters()`` order.

        Raises:
            ValueError: a unit names a module that is not in ``model``.
        """
        known = canonical_modules(model)
        held: set[nn.Parameter] = set()
        for unit in self.units:
            for name in unit:
                held.update(_module_named(name, known).parameters())
        return tuple(canonical_fqn(fqn) for fqn, p in model.named_parameters() if p not in held)


def _module_named(name: str, known: dict[str, nn.Module]) -> nn.Module:
    """The module of that name.

    Raises:
        ValueError: there is none; the message has near names.
    """
    if name not in known:
        raise ValueError(f"units: no module is named {name!r}" + nearest_names(name, known))
    return known[name]


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
            module = _module_named(canonical_fqn(name), known)
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


def abbreviated(units: Iterable[Sequence[str]]) -> list[str]:
    """Units as entries for :func:`manual_plan`, those with consecutive numbers as one entry.

    >>> abbreviated([("emb",), ("layers.0",), ("layers.1",), ("norm", "head")])
    ['emb', 'layers.[0-1]', 'norm+head']
    """
    runs: list[list[Any]] = []  # head, first number, last number, tail
    for unit in units:
        name = "+".join(unit)
        match = _NUMBERED.fullmatch(name) if len(unit) == 1 else None
        if match is None:
            runs.append([name, None, None, ""])
            continue
        head, number, tail = match[1], int(match[2]), match[3]
        if runs and runs[-1][0::3] == [head, tail] and runs[-1][2] == number - 1:
            runs[-1][2] = number
        else:
            runs.append([head, number, number, tail])
    return [
        f"{head}{'' if first is None else first if first == last else f'[{first}-{last}]'}{tail}"
        for head, first, last, tail in runs
    ]


_NUMBERED = re.compile(r"((?:.*\.)?)(0|[1-9]\d*)((?:\..*)?)")
