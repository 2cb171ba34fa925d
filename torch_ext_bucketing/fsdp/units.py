"""Answer which unit a parameter is in, and at which place of eager FSDP2's packed buffer.

A unit has the parameters that eager FSDP2 packs together per ``fully_shard`` call. :class:`Units`
name parameters or modules. :class:`FSDPParamOrder` names parameters in eager FSDP2's order: buckets
with that payload order have eager's layout, so a collective whose order of additions depends on the
byte offset (NCCL over several nodes) rounds alike.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch.fx as fx
import torch.nn as nn

from .._source import package_digest
from .._torch.dynamo import names_are_relative_to
from .._torch.fsdp2 import grad_dtype, reduce_order
from .._torch.inductor import CustomPassBase
from ..errors import check_argument
from ..fqns import (
    canonical_fqn,
    canonical_modules,
    modules_of_call,
    nearest_names,
    parameter_names,
    unwrapped,
)
from ..graph.nodes import kind_of, tag_of
from .modules import param_groups


@dataclass(frozen=True, repr=False)
class Units:
    """Units as names: hashable and picklable. Iterating yields the units.

    Args:
        units: per unit the FQNs of parameters or modules, or one FQN. A module's name covers the
            parameters below it, unless a longer name covers them; ``""`` is the root. Wrappers'
            names in FQNs are dropped. Each name is in one unit.
        aliases: ``(other FQN, FQN in units)`` of shared parameters.
        made_by: the code that created the units, for their ``repr``.
    """

    units: tuple[tuple[str, ...], ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    made_by: str = field(default="", compare=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", names_of_units(self.units))
        unit_of: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            for name in unit:
                if (earlier := unit_of.setdefault(name, index)) != index:
                    raise ValueError(
                        f"{name!r} is in two units, {earlier} and {index}: name it in one"
                    )

    @classmethod
    def of(cls, given: Units | Iterable[Sequence[str]]) -> Units:
        """Return ``given`` as units; an order stays as it is."""
        return given if isinstance(given, Units) else cls(given)  # type: ignore[arg-type]

    @classmethod
    def of_modules(cls, given: Iterable[str | Sequence[str]]) -> Units:
        """Return units of modules, in the order of the ``fully_shard`` calls.

        Raises:
            TypeError, ValueError: see the class; also no units, or an empty unit.
        """
        names = _calls(given)
        return Units(names, made_by=f"fsdp.manual_plan({abbreviated(names)}, model)")

    @classmethod
    def guessed(cls, fqns: Iterable[str]) -> Units:
        """Guess units from parameters' FQNs, in order of use.

        A unit is a module up to its first number (``layers.3``), or any other module.
        """
        parts = ((re.match(r"(.*?\.?\d+)\.|(.*)\.", fqn), fqn) for fqn in fqns)
        names = (m[m.lastindex] if m and m.lastindex else fqn for m, fqn in parts)
        return Units(tuple((name,) for name in dict.fromkeys(names)))

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.units)

    def __repr__(self) -> str:
        return self.made_by or str([list(unit) for unit in self.units])

    def __reduce__(self) -> tuple[Any, ...]:
        # Without cached properties, since caches may compare pickles.
        return type(self), tuple(getattr(self, f.name) for f in fields(self) if f.compare)

    def place_of(self, fqn: str) -> tuple[int, int] | None:
        """Return a parameter's unit, and the place of its name in the unit; None without a unit."""
        name = canonical_fqn(fqn)
        places, aliases = self._tables
        name = aliases.get(name, name)
        # The longest name covers a parameter: its own, its module's, or that of a module around it.
        while name not in places:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return places[name]

    def unit_of(self, *fqns: str) -> int | None:
        """Return the index of the unit that has all of these parameters, or None."""
        units = {place[0] if (place := self.place_of(fqn)) else None for fqn in fqns}
        return units.pop() if len(units) == 1 else None

    def unknown(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """List the names among ``fqns`` that are in no unit."""
        return tuple(fqn for fqn in fqns if self.place_of(fqn) is None)

    def uncovered(self, model: nn.Module) -> tuple[str, ...]:
        """List the FQNs of parameters outside all units, in ``named_parameters()`` order."""
        names = parameter_names(model).values()
        return tuple(fqns[0] for fqns in names if len(self.unknown(fqns)) == len(fqns))

    @functools.cached_property
    def _tables(self) -> tuple[Mapping[str, tuple[int, int]], Mapping[str, str]]:
        places = {name: (i, k) for i, unit in enumerate(self.units) for k, name in enumerate(unit)}
        return places, dict(self.aliases)


def names_of_units(units: object, label: str = "units") -> tuple[tuple[str, ...], ...]:
    """Convert units, each a list of names or one name, to canonical names (errors: ``label``)."""
    if isinstance(units, str) or not isinstance(units, Iterable):
        shown = f"the string {units!r}" if isinstance(units, str) else repr(units)
        raise TypeError(f"{label} must be a list of units, each a list of FQNs, got {shown}")
    names = []
    for unit in units:
        if not isinstance(unit, Iterable):
            raise TypeError(f"each of {label} must be an FQN or a list of FQNs, got {unit!r}")
        names.append(tuple(map(canonical_fqn, (unit,) if isinstance(unit, str) else unit)))
    return tuple(names)


def _calls(units: object) -> tuple[tuple[str, ...], ...]:
    """Convert the units of ``fully_shard`` calls to names; none, and empty ones, are errors."""
    names = names_of_units(units)
    if not names:
        raise ValueError(
            "the list of units is empty: name the modules of each fully_shard() call "
            '("" for the model)'
        )
    if () in names:
        raise ValueError(f"unit {names.index(())} is empty: name its modules or leave it out")
    return names


def find_units(
    model: nn.Module, units: Iterable[str | Sequence[str]]
) -> Iterator[tuple[tuple[str, ...], list[nn.Module]]]:
    """Yield each unit's names and modules, in the order of the ``fully_shard`` calls."""
    check_argument("model", model, nn.Module)
    named = canonical_modules(model)
    unit_of: dict[nn.Module, str] = {}
    inside: dict[nn.Module, str] = {}  # modules that an earlier unit holds
    for names in _calls(units):
        label = "+".join(names)
        modules: list[nn.Module] = []
        for name in names:
            if name not in named:
                raise ValueError(f"units: no module is named {name!r}" + nearest_names(name, named))
            module = named[name]
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


def modules_with_input_nodes(
    model: nn.Module, units: Iterable[str | Sequence[str]]
) -> dict[str, nn.Module]:
    """Map FQNs to the modules whose inputs get autograd nodes: the first of each unit."""
    # Units without parameters of their own have none. Eager FSDP2 chooses the same module if a
    # unit's modules are called in the order of the unit.
    held: set[nn.Parameter] = set()
    first = {}
    for names, modules in find_units(model, units):
        parameters = {p for module in modules for p in module.parameters()} - held
        if parameters:
            first[names[0]] = unwrapped(modules[0])
        held |= parameters
    return first


def abbreviated(units: Iterable[Sequence[str]]) -> list[str]:
    """Write units as entries for :func:`.manual_plan`, consecutive numbers as one entry.

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
        (first, unit), *followers = items
        if followers:
            head, tail, offset = run
            short.append(f"{head}[{first + offset}-{followers[-1][0] + offset}]{tail}")
        else:
            short.append("+".join(unit))
    return short


_NUMBERED = re.compile(r"((?:.*\.)?)(0|[1-9]\d*)((?:\..*)?)")


@dataclass(frozen=True, repr=False)
class FSDPParamOrder(Units, CustomPassBase):
    """The parameters that eager FSDP2 packs together, in its order: hashable and picklable.

    Its units are FSDP2's payloads, in the order of the ``fully_shard`` calls, each with the
    canonical parameter FQNs in payload order. A call that splits its parameters over several meshes
    makes one payload per mesh, in the order of first use; a call without parameters makes none.

    A shared parameter is in one payload, where FSDP2 first visits it, under its name in
    ``model.named_parameters()`` (FSDP2's ``_param_fqn``). Its other names are ``aliases``.
    """

    reduce_units: tuple[tuple[str, ...], ...] = ()
    """``units`` in the payload order of reduce-scatters; empty if that is the same.

    torch 2.15 packs gradients by dtype if ``param.grad_dtype`` differs inside a unit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.units:
            raise ValueError("an order needs at least one parameter, got none")
        if () in self.units:
            raise ValueError(f"payload {self.units.index(())} has no parameter: leave it out")
        listed: set[str] = set()
        for index, unit in enumerate(self.units):
            for fqn in unit:
                if fqn in listed:
                    raise ValueError(f"parameter {fqn!r} is listed twice in payload {index}")
                listed.add(fqn)
        check_argument("aliases", self.aliases, Sequence)
        check_argument("made_by", self.made_by, str)
        aliases = tuple(sorted({(canonical_fqn(a), canonical_fqn(fqn)) for a, fqn in self.aliases}))
        for alias, fqn in aliases:
            if fqn not in listed:
                raise ValueError(f"{alias!r} stands for {fqn!r}, which is in no payload")
            if alias in listed or dict(aliases)[alias] != fqn:
                raise ValueError(
                    f"{alias!r} can't be another name of {fqn!r}: it names a parameter already"
                )
        reduced = names_of_units(self.reduce_units, "reduce_units")
        if reduced and [sorted(unit) for unit in reduced] != [sorted(unit) for unit in self.units]:
            raise ValueError(
                "reduce_units has to list the parameters of each of units, in another order"
            )
        object.__setattr__(self, "aliases", aliases)
        object.__setattr__(self, "reduce_units", () if reduced == self.units else reduced)

    @classmethod
    def from_fqns(
        cls,
        fqns: Sequence[str] | Sequence[Sequence[str]],
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> FSDPParamOrder:
        """Create an order from payloads, each a list of parameter FQNs, or from one such list.

        Wrappers' names are dropped (``fqns.canonical_fqn``). ``aliases`` maps other FQNs of shared
        parameters to their FQNs in ``fqns``.
        """
        if isinstance(fqns, str):
            raise TypeError(
                f"fqns must be a list of FQNs, or a list of such lists, got the string {fqns!r}"
            )
        if aliases is not None and not isinstance(aliases, Mapping):
            raise TypeError(f"aliases must map FQNs to FQNs, got {aliases!r}")
        units: list[Any] = list(fqns)
        flat = [isinstance(unit, str) for unit in units]
        if any(flat) and not all(flat):
            raise TypeError(
                "fqns mixes FQNs and lists of FQNs: put the single FQNs into lists of their own"
            )
        return cls((units,) if any(flat) else units, tuple((aliases or {}).items()))  # type: ignore[arg-type]

    @classmethod
    def from_model(
        cls, model: nn.Module, units: Iterable[str | Sequence[str]] = ("",)
    ) -> FSDPParamOrder:
        """Compute the order that ``fully_shard`` would give to a model, without calling it.

        ::

            order = FSDPParamOrder.from_model(model, ["emb", "layers.0", ["norm", "head"]])

        The rule is that of ``_get_managed_modules`` and ``_get_managed_states`` in torch 2.11 to
        2.15 (``torch/distributed/fsdp/_fully_shard/_fsdp_init.py``): the modules of a unit
        depth-first, children before the module itself, stopping at modules of earlier units; then
        each module's own parameters in registration order, each parameter once, frozen or not.
        Parameters are not read, so they may be on the meta device or parametrized. Those that
        ``fully_shard`` ignores, or sends over another mesh, do not change a bucket's order.

        Args:
            units: in the order of the ``fully_shard`` calls (inner modules first), each a module
                FQN or a list of the FQNs that share one call. ``""``, the default, is ``model``.
                Parameters outside all units are in no payload.
        """
        calls = list(find_units(model, units))
        names = parameter_names(model)
        visited: set[nn.Parameter] = set()
        wrapped: set[nn.Module] = set()  # modules of earlier calls
        payloads: list[list[nn.Parameter]] = []
        for _, modules in calls:
            roots, managed = modules_of_call(modules, wrapped)
            wrapped.update(roots)
            owned = (p for module in managed for _, p in module.named_parameters(recurse=False))
            # A shared parameter belongs to the unit that visits it first.
            new = [parameter for parameter in dict.fromkeys(owned) if parameter not in visited]
            visited.update(new)
            if new:
                payloads.append(new)
        if not payloads:
            raise ValueError(f"the units hold no parameter of {type(model).__name__}")
        names_are_relative_to(model)
        names_of_calls = [call for call, _ in calls]
        short = abbreviated(names_of_calls)
        plain = short == [unit[0] if len(unit) == 1 else None for unit in names_of_calls]
        code = str(short) if plain else f"fsdp.manual_plan({short}, model)"
        fqns = [tuple(names[parameter][0] for parameter in params) for params in payloads]
        all_names = [names[parameter] for params in payloads for parameter in params]
        return cls(
            units=tuple(fqns),
            aliases=tuple((alias, first) for first, *aliases in all_names for alias in aliases),
            reduce_units=tuple(
                reduce_order(unit, [grad_dtype(p) for p in params])
                for unit, params in zip(fqns, payloads, strict=True)
            ),
            made_by=f"FSDPParamOrder.from_model(model, units={code})",
        )

    @classmethod
    def from_fsdp(cls, model: nn.Module) -> FSDPParamOrder:
        """Read the order from a model that ``fully_shard`` was applied to, FSDP2's or ours.

        Works before and after the first forward. FQNs are relative to ``model``.
        """
        groups = [group for group in param_groups(model) if group.params]
        if not groups:
            raise ValueError(f"the fully_shard() units of {type(model).__name__} hold no parameter")
        first: dict[Hashable, str] = {}
        for group in groups:
            for fqn, origin in zip(group.params, group.origins, strict=True):
                if origin is not None and first.setdefault(origin, fqn) != fqn:
                    raise ValueError(
                        f"{first[origin]!r} and {fqn!r} are one shared parameter in two FSDP2 "
                        "units, which FSDP2 refuses at the first forward: put their modules into "
                        "one fully_shard([...]) call"
                    )
        return cls(
            units=tuple(group.params for group in groups),
            aliases=tuple(pair for group in groups for pair in group.aliases),
            reduce_units=tuple(group.reduce_params for group in groups),
            made_by="FSDPParamOrder.from_fsdp(model)",
        )

    def __repr__(self) -> str:
        return self.made_by or f"FSDPParamOrder.from_fqns({super().__repr__()})"

    def __call__(self, start: fx.Node) -> tuple[int, int] | None:
        """Return the sort key of a collective's start: (payload, position) of its parameter.

        For fused weights it is that of the parameter that is packed first. It is None, which keeps
        the whole bucket in graph order, without a tag or if the order does not know a parameter;
        passes warn of these.
        """
        tag = tag_of(start)
        if tag is None or self.unknown(tag.fqns):
            return None
        reduces = kind_of(start) in ("reduce_scatter", "all_reduce")
        payloads = self._reduced if reduces and self.reduce_units else self
        return min(place for fqn in tag.fqns if (place := payloads.place_of(fqn)) is not None)

    def uuid(self) -> str:
        """Return a cache key (hex) that is equal for equal contents and code, in any process."""
        contents = json.dumps([self.units, self.aliases, self.reduce_units])
        return hashlib.sha256(f"{package_digest()}\0{contents}".encode()).hexdigest()

    @functools.cached_property
    def _reduced(self) -> Units:
        return Units(self.reduce_units, self.aliases)
