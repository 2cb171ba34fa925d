"""Read units and payloads of models that ``fully_shard`` was applied to, FSDP2's or ours.

Compute the order of parameters in eager FSDP2's packed buffers.

Buckets with this payload order have eager FSDP2's layout, so a collective whose order of additions
depends on the byte offset (NCCL over several nodes) rounds alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx
import torch.nn as nn

from .._source import package_digest
from .._torch.dynamo import names_are_relative_to
from .._torch.fsdp2 import Casts, ParamGroup, Sent, is_distributed, read_param_groups, reduce_order
from .._torch.inductor import CustomPassBase
from ..fqns import canonical_fqn, format_names, nearest_names, outermost, parameter_names
from ..graph import tags
from .fsdp_module import Unit, sent_by, unit_of
from .unit_inputs import register_casts
from .units import Units, abbreviated, find_units, modules_of_call, names_of_units


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


@dataclass(frozen=True, repr=False)
class FSDPParamOrder(Units, CustomPassBase):
    """The parameters that eager FSDP2 packs together, in its order: hashable and picklable.

    Its units are FSDP2's payloads, in the order of the ``fully_shard`` calls, each with the
    canonical parameter FQNs in payload order. A call that splits its parameters over several meshes
    makes one payload per mesh, in the order of first use; a call without parameters makes none.

    A shared parameter is in one payload, where FSDP2 first visits it, under its name in
    ``model.named_parameters()`` (FSDP2's ``_param_fqn``). Its other names are ``aliases``.

    Raises:
        TypeError: a payload or an FQN has the wrong type.
        ValueError: no parameter at all, an empty payload, or one FQN twice.
    """

    reduce_units: tuple[tuple[str, ...], ...] = ()
    """``units`` in the payload order of reduce-scatters; empty if that is the same.

    torch 2.15 packs gradients by dtype if ``param.grad_dtype`` differs inside a unit."""
    made_by: str = field(default="", compare=False)
    """The code that created the order, for its ``repr``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.units:
            raise ValueError("an order needs at least one parameter, got none")
        known: set[str] = set()
        for index, unit in enumerate(self.units):
            if not unit:
                raise ValueError(f"payload {index} has no parameter: leave it out")
            for fqn in unit:
                if fqn in known:
                    raise ValueError(f"parameter {fqn!r} is listed twice in payload {index}")
                known.add(fqn)
        aliases = tuple(sorted({(canonical_fqn(a), canonical_fqn(fqn)) for a, fqn in self.aliases}))
        for alias, fqn in aliases:
            if fqn not in known:
                raise ValueError(f"{alias!r} stands for {fqn!r}, which is in no payload")
            if alias in known or dict(aliases)[alias] != fqn:
                raise ValueError(
                    f"{alias!r} can't be another name of {fqn!r}: it names a parameter already"
                )
        reduced = names_of_units(self.reduce_units, "reduce_units")
        if reduced == self.units:
            reduced = ()
        if reduced and [sorted(unit) for unit in reduced] != [sorted(unit) for unit in self.units]:
            raise ValueError(
                "reduce_units has to list the parameters of each of units, in another order"
            )
        object.__setattr__(self, "aliases", aliases)
        object.__setattr__(self, "reduce_units", reduced)

    @classmethod
    def from_fqns(
        cls,
        fqns: Sequence[str] | Sequence[Sequence[str]],
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> FSDPParamOrder:
        """Create an order from FQNs.

        Args:
            fqns: a list of payloads, each a list of parameter FQNs, or a flat list for one payload.
                Wrappers' names in them are dropped (``fqns.canonical_fqn``).
            aliases: maps other FQNs of shared parameters to their FQNs in ``fqns``.

        Raises:
            TypeError: ``fqns`` or ``aliases`` has the wrong type, or mixes FQNs and lists.
            ValueError: see the class.
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
        cls,
        model: nn.Module,
        units: Iterable[str | Sequence[str]] = ("",),
        *,
        ignored_params: Collection[nn.Parameter | str] = (),
        group_key: Callable[[str, nn.Parameter], Hashable] | None = None,
    ) -> FSDPParamOrder:
        """Compute the order that ``fully_shard`` would give to a model, without calling it.

        ::

            order = FSDPParamOrder.from_model(model, ["emb", "layers.0", ["norm", "head"]])

        The rule is that of ``_get_managed_modules`` and ``_get_managed_states`` in torch 2.11 to
        2.15 (``torch/distributed/fsdp/_fully_shard/_fsdp_init.py``): the modules of a unit
        depth-first, children before the module itself, stopping at modules of earlier units; then
        each module's own parameters in registration order, each parameter once, frozen or not.
        Parameters are not read, so they may be on the meta device or parametrized.

        Args:
            model: the model, wrapped or not.
            units: in the order of the ``fully_shard`` calls (inner modules first), each a module
                FQN or a list of the FQNs that share one call. ``""``, the default, is ``model``.
                Parameters outside all units are in no payload.
            ignored_params: as in ``fully_shard``, as parameters or FQNs.
            group_key: splits units like a ``shard_placement_fn`` with several meshes. Maps an FQN
                and its parameter to a hashable key for the mesh. Each key is a payload, in order of
                first appearance.

        Raises:
            TypeError: ``units`` is a string, or an item is neither a string nor a list of strings.
            ValueError: no units or no parameters in them, an unknown FQN, a module in two units, or
                a unit inside an earlier one.
        """
        from .._torch.fsdp2 import grad_dtype, reduce_order

        given = names_of_units(units)
        names = parameter_names(model)
        by_name = {fqn: parameter for parameter, fqns in names.items() for fqn in fqns}
        ignored: set[nn.Parameter] = set()  # may include parameters of other pipeline stages
        for item in [ignored_params] if isinstance(ignored_params, str) else ignored_params:
            if isinstance(item, str) and canonical_fqn(item) not in by_name:
                near = nearest_names(item, by_name)
                raise ValueError(f"ignored_params: no parameter is named {item!r}{near}")
            ignored.add(by_name[canonical_fqn(item)] if isinstance(item, str) else item)
        taken: set[nn.Parameter] = set()
        payloads: list[list[nn.Parameter]] = []
        for modules in _unit_modules(model, given):
            by_key: dict[Hashable, list[nn.Parameter]] = {}
            own = (p for module in modules for _, p in module.named_parameters(recurse=False))
            for parameter in dict.fromkeys(own):
                if parameter not in taken and parameter not in ignored:
                    taken.add(parameter)
                    key = None if group_key is None else group_key(names[parameter][0], parameter)
                    by_key.setdefault(key, []).append(parameter)
            payloads.extend(by_key.values())
        if not payloads:
            raise ValueError(f"the units hold no parameter of {type(model).__name__}")
        names_are_relative_to(model)
        fqns = [tuple(names[parameter][0] for parameter in params) for params in payloads]
        held = [names[parameter] for params in payloads for parameter in params]
        short = abbreviated(given)
        plain = short == [unit[0] if len(unit) == 1 else None for unit in given]
        code = str(short) if plain else f"fsdp.manual_plan({short}, model)"
        return cls(
            units=tuple(fqns),
            aliases=tuple((alias, first) for first, *others in held for alias in others),
            reduce_units=tuple(
                reduce_order(unit, [grad_dtype(p) for p in params])
                for unit, params in zip(fqns, payloads, strict=True)
            ),
            made_by=f"from_model(model, units={code})",
        )

    @classmethod
    def from_fsdp(cls, model: nn.Module) -> FSDPParamOrder:
        """Read the order from a model that ``fully_shard`` was applied to, FSDP2's or ours.

        Works before and after the first forward. FQNs are relative to ``model``.

        Raises:
            ValueError: ``model`` holds no FSDP2 module or no parameter in one, or shares a
                parameter across two param groups, which FSDP2 refuses at the first forward.
        """
        pass

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
            made_by="from_fsdp(model)",
        )

    def __repr__(self) -> str:
        if self.made_by:
            return f"FSDPParamOrder.{self.made_by}"
        units = ", ".join(str(list(unit)) for unit in self.units)
        return f"FSDPParamOrder.from_fqns([{units}])"

    def __call__(self, start: fx.Node) -> tuple[int, int] | None:
        """Return the sort key of a collective's start: (payload, position) of its parameter.

        For fused weights it is that of the parameter that is packed first. It is None, which keeps
        the whole bucket in graph order, without a tag or if the order does not know a parameter;
        passes warn of these.
        """
        tag = tags.tag_of(start)
        if tag is None or self.unknown(tag.fqns):
            return None
        reduces = tags.kind_of(start) in ("reduce_scatter", "all_reduce")
        payloads = self._reduced if reduces and self.reduce_units else self
        return min(place for fqn in tag.fqns if (place := payloads.place_of(fqn)) is not None)

    def unknown(self, fqns: Iterable[str]) -> tuple[str, ...]:
        """List the names among ``fqns`` that are in no payload."""
        return tuple(fqn for fqn in fqns if self.place_of(fqn) is None)

    def uuid(self) -> str:
        """Return a cache key (hex) that is equal for equal contents and code, in any process."""
        contents = json.dumps([self.units, self.aliases, self.reduce_units])
        return hashlib.sha256(f"{package_digest()}\0{contents}".encode()).hexdigest()

    @functools.cached_property
    def _reduced(self) -> Units:
        return Units(self.reduce_units, self.aliases)


def _unit_modules(model: nn.Module, units: Iterable[tuple[str, ...]]) -> Iterator[list[nn.Module]]:
    """Yield each unit's modules with own parameters, in FSDP2's order of visits."""
    wrapped: set[nn.Module] = set()  # modules of earlier calls
    for _, modules in find_units(model, units):
        roots, managed = modules_of_call(modules, wrapped)
        yield managed
        wrapped.update(roots)
