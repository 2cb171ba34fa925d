"""Represent units: the parameters that eager FSDP2 packs together per ``fully_shard`` call.

:class:`UnitSpec` holds units of modules, :class:`.FSDPParamOrder` units of parameters in eager
FSDP2's order.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.nn as nn

from .._torch.dynamo import names_are_relative_to
from ..fqns import canonical_fqn, canonical_modules, has_parameters, nearest_names, outermost


@dataclass(frozen=True, repr=False)
class Units:
    """Units as names: hashable and picklable. Iterating yields the units.

    Args:
        units: per unit the FQNs of parameters or modules, or one FQN. A module's name covers the
            parameters below it, unless a longer name covers them; ``""`` is the root. Wrappers'
            names in FQNs are dropped.
        aliases: ``(other FQN, FQN in units)`` of shared parameters.

    Raises:
        TypeError: the units are not a list of names or of lists of names.
        ValueError: one name in two units.
    """

    units: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", names_of_units(self.units))
        unit_of: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            for name in unit:
                known = unit_of.setdefault(name, index)
                if known != index:
                    raise ValueError(
                        f"{name!r} is in two units, {known} and {index}: name it in one"
                    )

    @classmethod
    def of(cls, given: Units | Iterable[Sequence[str]]) -> Units:
        """Return ``given`` as units; an order stays as it is."""
        return given if isinstance(given, Units) else cls(given)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.units)

    def __repr__(self) -> str:
        return str([list(unit) for unit in self.units])

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached properties, since caches may compare pickles.
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.compare)

    def place_of(self, fqn: str) -> tuple[int, int] | None:
        """Return a parameter's unit, and the place of its name in it; None without a unit."""
        name = canonical_fqn(fqn)
        places, aliases = self._tables
        name = aliases.get(name, name)
        while name not in places:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return places[name]

    def unit_of(self, fqn: str) -> int | None:
        """Return the index of a parameter's unit, or None."""
        place = self.place_of(fqn)
        return None if place is None else place[0]

    @functools.cached_property
    def _tables(self) -> tuple[Mapping[str, tuple[int, int]], Mapping[str, str]]:
        places = {name: (i, k) for i, unit in enumerate(self.units) for k, name in enumerate(unit)}
        return places, dict(self.aliases)


def names_of_units(units: object, what: str = "units") -> tuple[tuple[str, ...], ...]:
    """Convert units, each a list of names or one name, to canonical names; errors name ``what``."""
    if isinstance(units, str) or not isinstance(units, Iterable):
        given = f"the string {units!r}" if isinstance(units, str) else repr(units)
        raise TypeError(f"{what} must be a list of units, each a list of FQNs, got {given}")
    found = []
    for unit in units:
        if not isinstance(unit, Iterable):
            raise TypeError(f"each of {what} must be an FQN or a list of FQNs, got {unit!r}")
        found.append(tuple(map(canonical_fqn, (unit,) if isinstance(unit, str) else unit)))
    return tuple(found)


@dataclass(frozen=True, repr=False)
class UnitSpec(Units):
    """Units of modules, in the order of the ``fully_shard`` calls.

    Raises:
        TypeError, ValueError: see :class:`Units`; also no units, or an empty unit.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_not_empty(self.units)

    def __repr__(self) -> str:
        return f"fsdp.manual_plan({abbreviated(self.units)}, model)"

    def uncovered(self, model: nn.Module) -> tuple[str, ...]:
        """List the FQNs of parameters outside all units, in ``named_parameters()`` order.

        Raises:
            ValueError: see :func:`find_units`.
        """
        held = {
            parameter
            for _, modules in find_units(model, self.units)
            for module in modules
            for parameter in module.parameters()
        }
        return tuple(canonical_fqn(fqn) for fqn, p in model.named_parameters() if p not in held)


def _check_not_empty(units: Sequence[Sequence[str]]) -> None:
    if not units:
        raise ValueError(
            "the list of units is empty: name the modules of each fully_shard() call "
            '("" for the model)'
        )
    for index, unit in enumerate(units):
        if not unit:
            raise ValueError(f"unit {index} is empty: name its modules or leave it out")


def find_units(
    model: nn.Module, units: Iterable[Sequence[str]]
) -> Iterator[tuple[tuple[str, ...], list[nn.Module]]]:
    """Yield each unit's names and modules, in the order of the ``fully_shard`` calls.

    Raises:
        TypeError: see :class:`Units`.
        ValueError: no units, an empty unit, an unknown name, or a module that is listed twice or
            lies in an earlier unit.
    """
    known = canonical_modules(model)
    unit_of: dict[nn.Module, str] = {}
    inside: dict[nn.Module, str] = {}  # modules that an earlier unit holds
    given = names_of_units(units)
    _check_not_empty(given)
    for names in given:
        label = "+".join(names)
        modules: list[nn.Module] = []
        for name in names:
            if name not in known:
                raise ValueError(f"units: no module is named {name!r}" + nearest_names(name, known))
            module = known[name]
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
            unit_of[module] = label
        for module in modules:
            for below in module.modules():
                inside.setdefault(below, label)
        yield names, modules


def modules_of_call(
    modules: Sequence[nn.Module], wrapped: Collection[nn.Module]
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules of one ``fully_shard`` call, and all that it manages, in its order.

    Args:
        modules: given to the call, which drops those inside others (``_get_root_modules``).
        wrapped: the modules of earlier calls, where it stops.
    """
    roots = outermost(modules)
    seen = set(wrapped)
    return roots, [module for root in roots for module in _children_first(root, seen)]


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules below ``module``, then itself, without seen ones and those below them."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def spec_of_units(units: Iterable[tuple[str, ...]], model: nn.Module) -> UnitSpec:
    """Check that all units have parameters, and make parameters' names relative to ``model``."""
    found = list(find_units(model, units))
    for unit, modules in found:
        if not any(map(has_parameters, modules)):
            raise ValueError(f"units: {'+'.join(unit)!r} has no parameters: leave it out")
    names_are_relative_to(model)
    return UnitSpec(tuple(unit for unit, _ in found))


def abbreviated(units: Iterable[Sequence[str]]) -> list[str]:
    """Write units as entries for :func:`manual_plan`, consecutive numbers as one entry.

    >>> abbreviated([("emb",), ("layers.0",), ("layers.1",), ("norm", "head")])
    ['emb', 'layers.[0-1]', 'norm+head']
    """

    def run_of(item: tuple[int, Sequence[str]]) -> tuple[Any, ...]:
        """Return a key that is equal for neighbors in a run: head, tail, number minus place."""
        place, unit = item
        match = _NUMBERED.fullmatch(unit[0]) if len(unit) == 1 else None
        return (match[1], match[3], int(match[2]) - place) if match else (place,)

    short = []
    for run, items in itertools.groupby(enumerate(units), key=run_of):
        (first, unit), *more = items
        if more:
            head, tail, offset = run
            short.append(f"{head}[{first + offset}-{more[-1][0] + offset}]{tail}")
        else:
            short.append("+".join(unit))
    return short


_NUMBERED = re.compile(r"((?:.*\.)?)(0|[1-9]\d*)((?:\..*)?)")
