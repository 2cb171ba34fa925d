"""Choose the process groups to bucket: all, by name, or the primary group."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal, TypeAlias

from ..graph.collectives import KINDS

Groups: TypeAlias = Collection[str] | Literal["primary"] | None
"""Names of process groups, planned one after the other; ``"primary"``: the group with the most
all-gathers, see :func:`chosen_groups`; None: all groups, planned together."""


def check_groups(groups: Groups) -> tuple[str, ...] | Literal["primary"] | None:
    """Return ``groups`` with names as a tuple; raise a TypeError for other values."""
    if groups is None or groups == "primary":
        return groups  # type: ignore[return-value]
    if isinstance(groups, str) or not isinstance(groups, Collection):
        raise TypeError(f"groups must be a list of names, 'primary' or None, got {groups!r}")
    if not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups must be names of process groups, got {groups!r}")
    return tuple(dict.fromkeys(groups))


def chosen_groups(groups: Groups, counts: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Return the chosen groups in the order of ``counts``.

    The primary group has the most FSDP all-gathers; in a graph without gathers the most
    reduce-scatters, and without these the most all-reduces. Of equals it is the first one.

    Args:
        groups: names that ``counts`` lacks are ignored, since other graphs may have these groups.
        counts: number of FSDP collectives by group and kind, in graph order.
    """
    if groups == "primary":
        return (max(counts, key=lambda g: [counts[g][k] for k in KINDS]),) if counts else ()
    return tuple(g for g in counts if groups is None or g in groups)
