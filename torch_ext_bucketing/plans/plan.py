"""What a bucket plan is: an ordered list of units, each a tuple of module FQNs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch.nn as nn

from .._source import package_digest
from ..fqns import canonical_fqn, canonical_modules, nearest_names
from ..graph.collectives import check_kinds
from .abbreviate import abbreviated

__all__ = ["DEFAULT_KINDS", "MODES", "BucketPlan", "Units", "checked_kinds", "module_named"]

DEFAULT_KINDS = ("all_gather", "reduce_scatter")

MODES = ("none", "transformer_block", "auto", "manual")

_VERSION = 1

Units = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """Units of modules, in the order of ``fully_shard`` calls: a hashable, picklable value.

    Iterating gives the units, so a plan can be passed wherever a list of units is taken.

    Raises:
        TypeError: a name is no string.
        ValueError: an unknown mode or kind, no kind, a plan by modules without units, a plan of
            mode "none" or "auto" with units, an empty unit, or a module in two units.
    """

    mode: str
    """``"none"``: nothing is bucketed. ``"auto"``: buckets by byte cap only.
    ``"transformer_block"``, ``"manual"``: by ``units``."""
    units: Units = ()
    """Per unit its module FQNs, in the order in which ``fully_shard([...])`` would get them; ``""``
    is the model."""
    kinds: tuple[str, ...] = DEFAULT_KINDS
    """What is bucketed, of "all_gather", "reduce_scatter" and "all_reduce" (HSDP's and DDP's: only
    when asked for)."""
    head: str | None = None
    """The module that makes the logits, where known: its unit is the one that chunked losses use as
    "loss"."""
    cover: Units = ()
    """Per unit, modules that hold its parameters and don't overlap with those of any other unit.
    Differs from ``units`` where units are nested: a block whose experts are a unit of their own is
    covered by its other children."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"no bucketing mode is named {self.mode!r}; the modes are "
                f"{', '.join(map(repr, MODES))}"
            )
        object.__setattr__(self, "kinds", checked_kinds(self.kinds))
        units = tuple(
            tuple(canonical_fqn(name) for name in ((unit,) if isinstance(unit, str) else unit))
            for unit in self.units
        )
        if self.mode in ("none", "auto") and units:
            raise ValueError(
                f'a plan of mode "{self.mode}" names no modules, got {len(units)} units'
            )
        if self.mode in ("transformer_block", "manual") and not units:
            raise ValueError(
                f'a plan of mode "{self.mode}" needs at least one unit: the plan is empty'
            )
        unit_of: dict[str, int] = {}
        for index, unit in enumerate(units):
            if not unit:
                raise ValueError(f"unit {index} of the plan is empty")
            for name in unit:
                if name in unit_of:
                    raise ValueError(
                        f"module {name!r} is in two buckets, unit {unit_of[name]} "
                        f"{units[unit_of[name]]} and unit {index} {unit}"
                    )
                unit_of[name] = index
        if self.head is not None and self.head not in unit_of:
            raise ValueError(
                f"head: module {self.head!r} is in no unit" + nearest_names(self.head, unit_of)
            )
        cover = tuple(tuple(names) for names in self.cover) or units
        if len(cover) != len(units):
            raise ValueError(f"cover has {len(cover)} entries for {len(units)} units")
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "cover", cover)

    def __repr__(self) -> str:
        """The code that makes it, of a plan without units, or one with the same units and kinds."""
        kinds = "" if self.kinds == DEFAULT_KINDS else f", kinds={list(self.kinds)}"
        if not self.units:
            return f"make_plan({self.mode!r}{kinds})"
        return f"manual_plan({abbreviated(self.units)}, model{kinds})"

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.units)

    def module_bucket_plans(self, chunked_loss: bool = False) -> list[list[str] | str]:
        """The plan for torch's own ``manual_overlap_bucketing(module_bucket_plans=...)``.

        That pass finds a bucket's collectives by the module that they were traced in, asks for
        buckets that don't overlap (so nested units are spelled out: ``cover``) and has no name for
        the parameters that a module owns beside its children: those of the root and of modules
        around another unit stay unbucketed there.

        Args:
            chunked_loss: The loss is computed in chunks, with the head's weight used under the
                module name "loss": the bucket of the head (``head``, or else the last one) names
                "loss", too.

        Returns:
            Per bucket a module FQN or a list of them, in the plan's order. ``[]`` for mode "none".

        Raises:
            ValueError: mode "auto", which has no modules.
        """
        if self.mode == "auto":
            raise ValueError(
                'mode "auto" buckets by size, not by module, so manual_overlap_bucketing has no '
                'use for it: take mode "transformer_block" or "manual"'
            )
        named = [
            (unit, [name for name in cover if name])
            for unit, cover in zip(self.units, self.cover, strict=True)
        ]
        named = [(unit, names) for unit, names in named if names]
        if chunked_loss and named:
            ends = [names for unit, names in named if self.head in unit]
            if not ends:
                ends = [names for unit, names in named if unit != ("",)] or [named[-1][1]]
            ends[-1].append("loss")
        return [names[0] if len(names) == 1 else names for _, names in named]

    def uncovered(self, model: nn.Module) -> tuple[str, ...]:
        """FQNs of the parameters of ``model`` that no unit holds, in ``named_parameters()`` order.

        Empty for mode "auto", which leaves none out; all of them for mode "none".

        Raises:
            ValueError: a unit of the plan is not in ``model``.
        """
        if self.mode == "auto":
            return ()
        known = canonical_modules(model)
        held: set[nn.Parameter] = set()
        for unit in self.units:
            for name in unit:
                held.update(module_named(name, known).parameters())
        return tuple(canonical_fqn(fqn) for fqn, p in model.named_parameters() if p not in held)

    def uuid(self) -> str:
        """A name (hex) of the plan for Inductor's caches: equal plans have it in every process."""
        contents = json.dumps([_VERSION, self.mode, self.units, self.kinds, self.head, self.cover])
        return hashlib.sha256(f"{package_digest()}\0{contents}".encode()).hexdigest()


def checked_kinds(kinds: Iterable[str]) -> tuple[str, ...]:
    given = [kinds] if isinstance(kinds, str) else list(kinds)
    if not given:
        raise ValueError('kinds is empty: for a plan that buckets nothing take mode "none"')
    return check_kinds(given)


def module_named(name: str, known: dict[str, nn.Module]) -> nn.Module:
    if name not in known:
        raise ValueError(f"units: no module is named {name!r}" + nearest_names(name, known))
    return known[name]
