"""Define keepables: the values that may stay in memory from forward to backward."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ...fsdp.tagging import read_in_forward
from ...fsdp.units import Units
from ...graph.tags import tag_of


@dataclass(frozen=True)
class Keepable:
    """A unit's parameters, or a part, or a group of activations: kept or recomputed together."""

    name: str  # name for reports
    starts: tuple[fx.Node, ...]  # all-gathers in the joint graph; empty for activations
    # Nodes from the parameters to the last view or copy of the gathered values; or the activations.
    chains: tuple[fx.Node, ...]
    # Parameters that backward reads; empty if keeping this saves nothing.
    fqns: tuple[str, ...] = ()
    nbytes: int = 0
    held: tuple[int, ...] = ()  # storages held, of ``nbytes``, if this is kept
    whole: int = -1  # for a part, the index of the keepable with the whole parameters; else -1


def unit_name(fqns: Sequence[str]) -> str:
    """Return a unit's name for reports: the common prefix of its FQNs, or the first modules."""
    name = posixpath.commonpath([f.replace(".", "/") for f in fqns] or [""]).replace("/", ".")
    if name:
        return name
    modules = list(dict.fromkeys(f.split(".")[0] for f in fqns))
    named = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    return named or "the root"


def keepable_units(chains: Mapping[fx.Node, Sequence[fx.Node]], units: Units) -> list[Keepable]:
    """List the units whose parameters forward reads."""
    starts: dict[int, list[fx.Node]] = {}
    for start in read_in_forward(chains):
        tag = tag_of(start)
        number = units.unit_of(*(() if tag is None else tag.fqns))
        if number is not None:
            starts.setdefault(number, []).append(start)
    return [
        Keepable(
            unit_name(units.units[number]),
            tuple(mine),
            tuple(dict.fromkeys(n for start in mine for n in chains[start])),
        )
        for number, mine in sorted(starts.items())
    ]
