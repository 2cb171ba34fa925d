"""Filters of process groups, for :mod:`.caps` and for torch's ``fsdp_group_filter``.

A filter is called once per graph with ``counts[group][kind]``, the number of FSDP collectives of
each kind on each process group that has any, in graph order, and returns those to bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from .._source import package_digest
from .._torch.inductor import CustomPassBase
from ..graph.collectives import KINDS

Counts = Mapping[str, Mapping[str, int]]
GroupFilter = Callable[[Counts], Iterable[str]]


class PrimaryGroup(CustomPassBase):
    """The process group with the most FSDP all-gathers; of equal ones the first in graph order.

    In a graph without gathers that with the most reduce-scatters, and without these that with the
    most all-reduces. Leaves the others' collectives alone, such as those of experts on a mesh.
    """

    def __call__(self, counts: Counts) -> tuple[str, ...]:
        """The primary group, or nothing where there are no groups."""
        if not counts:
            return ()
        return (max(counts, key=lambda group: [counts[group][kind] for kind in KINDS]),)

    def uuid(self) -> str:
        """Equal in every process, for Inductor's caches."""
        return hashlib.sha256(f"PrimaryGroup\0{package_digest()}".encode()).hexdigest()

    def __repr__(self) -> str:
        return "primary_group"


primary_group = PrimaryGroup()


def chosen_groups(group_filter: GroupFilter, counts: Counts) -> tuple[str, ...]:
    """The groups that ``group_filter`` returns, in the order of ``counts``.

    Raises:
        RuntimeError: the filter raised, returned something else than a collection of names, or a
            group that ``counts`` doesn't have; the cause is chained.
    """
    try:
        frozen = {group: MappingProxyType(dict(found)) for group, found in counts.items()}
        chosen = group_filter(MappingProxyType(frozen))
        if isinstance(chosen, str):
            raise TypeError("expected a collection of groups, got a str")
        wanted = dict.fromkeys(chosen)
        unknown = [g for g in wanted if g not in counts]
        if unknown:
            raise ValueError(f"returned {unknown}, which are none of the groups")
    except Exception as error:
        plain = {group: dict(found) for group, found in counts.items()}
        raise RuntimeError(f"group_filter failed on groups {plain}") from error
    return tuple(g for g in counts if g in wanted)
