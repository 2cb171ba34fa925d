"""Which process groups are bucketed: for :mod:`.caps` and for torch's ``fsdp_group_filter``.

A policy is called with the number of FSDP all-gathers of each process group that has any, in graph
order, and returns the groups to bucket: all-gathers, reduce-scatters and all-reduces on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from .._source import package_digest
from .._torch.caches import before_key

__all__ = [
    "GroupFilter",
    "PrimaryGroup",
    "chosen_groups",
    "primary_group",
]

GroupFilter = Callable[[Mapping[str, int]], Iterable[str]]


class PrimaryGroup:
    """The process group with the most FSDP all-gathers; of equal ones the first in graph order.

    Leaves the others' collectives alone, such as those of expert parameters on a mesh of their own.
    """

    def __call__(self, counts: Mapping[str, int]) -> tuple[str, ...]:
        """The primary group, or nothing where no group has gathers."""
        return (max(counts, key=counts.__getitem__),) if counts else ()

    def uuid(self) -> str:
        """Equal in every process, for Inductor's caches."""
        before_key()
        return hashlib.sha256(f"PrimaryGroup\0{package_digest()}".encode()).hexdigest()

    def __repr__(self) -> str:
        return "primary_group"


primary_group = PrimaryGroup()


def chosen_groups(group_filter: GroupFilter, counts: Mapping[str, int]) -> tuple[str, ...]:
    """The groups that ``group_filter`` returns, in the order of ``counts``.

    Raises:
        RuntimeError: the filter raised, returned something else than a collection of names, or a
            group that ``counts`` doesn't have; the cause is chained.
    """
    try:
        chosen = group_filter(MappingProxyType(dict(counts)))
        if isinstance(chosen, str):
            raise TypeError("expected a collection of groups, got a str")
        wanted = dict.fromkeys(chosen)
        unknown = [g for g in wanted if g not in counts]
        if unknown:
            raise ValueError(f"returned {unknown}, which are none of the groups")
    except Exception as error:
        raise RuntimeError(f"group_filter failed on groups {dict(counts)}") from error
    return tuple(g for g in counts if g in wanted)
