"""Units of parameters: finds a parameter's unit, and its place in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from ..fqns import canonical_fqn

__all__ = ["HasUnits", "Units"]


@runtime_checkable
class HasUnits(Protocol):
    """A parameter order or a bucket plan: units as tuples of FQNs of parameters or modules."""

    @property
    def units(self) -> Sequence[Sequence[str]]: ...


class Units:
    """Units of parameters, which are found by FQN.

    Args:
        units: per unit the FQNs of parameters or modules, or one FQN. A module's name covers the
            parameters below it that no longer name covers; ``""`` is the root. A name that no
            parameter has covers none. Wrappers' names in FQNs don't count.
        aliases: ``(other FQN, FQN in units)`` of shared parameters.

    Raises:
        TypeError: the units are a string, or a name is none.
        ValueError: one name in two units.
    """

    def __init__(
        self, units: Iterable[Sequence[str]], aliases: Iterable[tuple[str, str]] = ()
    ) -> None:
        if isinstance(units, str):
            raise TypeError(f"units must be a sequence of units, got the string {units!r}")
        self.units = tuple((unit,) if isinstance(unit, str) else tuple(unit) for unit in units)
        self.aliases = tuple(aliases)
        self._place: dict[str, tuple[int, int]] = {}
        for index, unit in enumerate(self.units):
            for place, name in enumerate(unit):
                fqn = canonical_fqn(name)
                known, _ = self._place.setdefault(fqn, (index, place))
                if known != index:
                    raise ValueError(
                        f"{name!r} is in two units, {known} and {index}: name it in one"
                    )
        self._alias = dict(self.aliases)

    @classmethod
    def of(cls, given: HasUnits | Iterable[Sequence[str]]) -> Units:
        """Take the units of an order or a plan, or the units themselves; errors are those of the
        class."""
        if isinstance(given, HasUnits):
            return cls(given.units, getattr(given, "aliases", ()))
        return cls(given)

    def place_of(self, fqn: str) -> tuple[int, int] | None:
        """A parameter's unit, and the place in it of the name that covers the parameter; None for
        a parameter in no unit."""
        name = canonical_fqn(fqn)
        name = self._alias.get(name, name)
        while name not in self._place:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return self._place[name]

    def unit_of(self, fqn: str) -> int | None:
        """The number of a parameter's unit, or None."""
        place = self.place_of(fqn)
        return None if place is None else place[0]
