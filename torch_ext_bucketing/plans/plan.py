"""What a person, or :func:`.transformer_block_plan`, says of units: the modules of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn as nn

from ..fqns import canonical_fqn, canonical_modules, nearest_names
from .abbreviate import abbreviated

__all__ = ["UnitSpec", "module_named"]


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
                held.update(module_named(name, known).parameters())
        return tuple(canonical_fqn(fqn) for fqn, p in model.named_parameters() if p not in held)


def module_named(name: str, known: dict[str, nn.Module]) -> nn.Module:
    """The module of that name.

    Raises:
        ValueError: there is none; the message has near names.
    """
    if name not in known:
        raise ValueError(f"units: no module is named {name!r}" + nearest_names(name, known))
    return known[name]
