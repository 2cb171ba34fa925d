"""Which process groups are bucketed: all, those that are named, or the primary one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from ..graph.collectives import KINDS

Groups: TypeAlias = Collection[str] | Literal["primary"] | None
"""Names of process groups, each of which is planned by itself; ``"primary"``: the one with the most
all-gathers, as of :func:`chosen_groups`; None: all of them, planned together."""


def check_groups(groups: Groups) -> tuple[str, ...] | Literal["primary"] | None:
    """``groups``, names as a tuple; a TypeError for what is none."""
    if groups is None or groups == "primary":
        return groups  # type: ignore[return-value]
    if isinstance(groups, str) or not isinstance(groups, Collection):
        raise TypeError(f"groups must be a list of names, 'primary' or None, got {groups!r}")
    if not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups must be names of process groups, got {groups!r}")
    return tuple(dict.fromkeys(groups))


def chosen_groups(groups: Groups, counts: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Those of the groups in ``counts`` that ``groups`` chooses, in the order of ``counts``.

    The primary group has the most FSDP all-gathers; in a graph without gathers the most
    reduce-scatters, and without these the most all-reduces. Of equals it is the first one. That
    leaves others' collectives alone, such as those of experts on a mesh of their own.

    Args:
        counts: by group, in graph order, the number of FSDP collectives of each kind.
    """
    if groups == "primary":
        return (max(counts, key=lambda g: [counts[g][k] for k in KINDS]),) if counts else ()
    return tuple(g for g in counts if groups is None or g in groups)
