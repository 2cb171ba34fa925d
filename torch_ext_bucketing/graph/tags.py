"""A collective's tag: its kind and the parameters (FQNs) whose bytes it moves.

Tags are made on the joint graph (:mod:`.fsdp.tag_graph`) and stored in ``node.meta["custom"]``.
That dictionary is copied by the partitioners, by recomputation and by Inductor's passes, and
torch's bucketing collects it from every member of a bucket, so a tag can be read ever after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from .collectives import KINDS, Kind, group_name, is_collective, kind_of

_TAG_KEY = "bucketing_tag"
_MEMBERS_KEY = "bucketing_member_tags"
_HOME_KEY = "bucketing_home_group"
_REPLACES_KEY = "bucketing_replaces"
_SOURCES_KEY = "bucketing_custom_sources"  # written by torch's bucketing, one entry per member


@dataclass(frozen=True)
class Tag:
    """The kind of a collective and the parameters that it serves.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        fqns: canonical FQNs of the parameters in it; more than one for fused weights.

    Raises:
        ValueError: an unknown kind, no FQN, or one that is no string.
    """

    kind: Kind
    fqns: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if isinstance(self.fqns, str) or not all(isinstance(f, str) for f in self.fqns or (0,)):
            raise ValueError(f"fqns must be a non-empty tuple of names, got {self.fqns!r}")
        object.__setattr__(self, "fqns", tuple(self.fqns))


def set_tag(node: fx.Node, tag: Tag, home_group: str | None = None) -> None:
    """Tag a collective by hand.

    Args:
        node: its start.
        tag: its kind and parameters.
        home_group: over which a gather's parameter is sharded, where the gather itself runs in a
            smaller group (:mod:`.rewrites.reshard_to`).

    Raises:
        ValueError: ``node`` is no collective, or one of another kind than the tag's.
    """
    kind = kind_of(node)
    if kind != tag.kind:
        what = "no collective" if kind is None else f"{'a' if kind[0] == 'r' else 'an'} {kind}"
        raise ValueError(f"can't tag {node.name} as {tag.kind}: it is {what}")
    _note(node, _TAG_KEY, (tag.kind, *tag.fqns))
    if home_group is not None:
        _note(node, _HOME_KEY, home_group)


def set_member_tags(start: fx.Node, tags: Sequence[Tag | None]) -> None:
    """Record a bucket's members, in payload order, on its start (for whoever merged them)."""
    _note(start, _MEMBERS_KEY, tuple(None if t is None else (t.kind, *t.fqns) for t in tags))


def home_group(start: fx.Node) -> str:
    """The process group that a parameter is sharded over, also where it is gathered in another."""
    return _noted(start, _HOME_KEY) or group_name(start)


def mark_replaced(start: fx.Node) -> None:
    """Keep the tags of a reduction whose node is to start a collective of another kind that does
    its work, such as an all-to-all."""
    _note(start, _REPLACES_KEY, kind_of(start))


def replaced_kind(node: fx.Node) -> Kind | None:
    """The kind of a collective as its tags have it: that of the reduction whose work it does
    (:func:`mark_replaced`), else its own; None for any other node."""
    return (_noted(node, _REPLACES_KEY) or kind_of(node)) if is_collective(node) else None


def tag_of(node: fx.Node) -> Tag | None:
    """The tag of a collective's start; None for any other node and for an untagged collective.

    For a bucket: all its members' FQNs, in payload order where this package merged it and in the
    order of the members otherwise. None as soon as one member has none.
    """
    tags = member_tags(node)
    if not tags or len(tags) < member_count(node):
        return None
    return Tag(tags[0].kind, tuple(dict.fromkeys(f for tag in tags for f in tag.fqns)))


def member_tags(start: fx.Node) -> tuple[Tag, ...]:
    """The tags of a bucketed collective's members, in payload order where known, those without one
    left out. A collective that is no bucket is its own only member; other nodes have none."""
    return tuple(m for m in _members(start) if m is not None)


def member_count(start: fx.Node) -> int:
    """The number of collectives that were merged into this one; 1 for one that is no bucket."""
    return len(_members(start))


def is_bucket(node: fx.Node) -> bool:
    """True for a collective that came of merging several, by this package or by torch."""
    return _noted(node, _MEMBERS_KEY) is not None or _SOURCES_KEY in node.meta


def _members(node: fx.Node) -> list[Tag | None]:
    """The tags of those that became one collective, or its own; a tag of another kind was copied
    from another node along with the rest of the metadata, and is none."""
    kind = replaced_kind(node)
    if kind is None:
        return []
    found = _noted(node, _MEMBERS_KEY)
    if found is None:
        sources = node.meta.get(_SOURCES_KEY, [node.meta.get("custom")])
        found = [(custom or {}).get(_TAG_KEY) for custom in sources]
    return [Tag(kind, tuple(t[1:])) if t is not None and t[0] == kind else None for t in found]


def _note(node: fx.Node, key: str, value: object) -> None:
    # A fresh dictionary: tracing shares one ``custom`` dictionary between many nodes.
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def _noted(node: fx.Node, key: str) -> Any:
    return (node.meta.get("custom") or {}).get(key)
