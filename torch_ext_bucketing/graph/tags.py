"""Read and write tags: a collective's kind and the parameters (FQNs) whose bytes it moves.

Tags are set on the joint graph (:mod:`.fsdp.tagging`) and stored in ``node.meta["custom"]``.
Partitioners, recomputation and Inductor's passes copy that dictionary, and torch's bucketing
collects it from every member of a bucket, so tags survive all of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from .nodes import KINDS, Kind, group_name, is_collective, kind_of

_TAG_KEY = "bucketing_tag"
_MEMBERS_KEY = "bucketing_member_tags"
_HOME_KEY = "bucketing_home_group"
_REPLACES_KEY = "bucketing_replaces"
_UPDATES_KEY = "bucketing_updates"
_OPTIMIZER_KEY = "bucketing_optimizer"
_BUFFERS_KEY = "bucketing_buffer_bytes"
_SOURCES_KEY = "bucketing_custom_sources"  # written by torch's bucketing, one entry per member


@dataclass(frozen=True)
class Tag:
    """The kind of a collective, and the canonical FQNs of its parameters, several if fused."""

    kind: Kind
    fqns: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if isinstance(self.fqns, str) or not all(isinstance(f, str) for f in self.fqns or (0,)):
            raise ValueError(f"fqns must be a non-empty tuple of names, got {self.fqns!r}")
        object.__setattr__(self, "fqns", tuple(self.fqns))


def set_tag(node: fx.Node, tag: Tag, home_group: str | None = None) -> None:
    """Tag a collective's start; raise a ValueError unless the kind is the tag's.

    ``home_group`` is the process group that shards the parameter, for an all-gather that runs in a
    smaller group (:mod:`.passes.reshard_to`).
    """
    kind = kind_of(node)
    if kind != tag.kind:
        what = "not a collective" if kind is None else f"{'a' if kind[0] == 'r' else 'an'} {kind}"
        raise ValueError(f"can't tag {node.name} as {tag.kind}: it is {what}")
    note(node, _TAG_KEY, (tag.kind, *tag.fqns))
    if home_group is not None:
        note(node, _HOME_KEY, home_group)


def set_member_tags(start: fx.Node, tags: Sequence[Tag | None]) -> None:
    """Record the tags of a bucket's members on its start, in payload order."""
    note(start, _MEMBERS_KEY, tuple(None if t is None else (t.kind, *t.fqns) for t in tags))


def home_group(start: fx.Node) -> str:
    """Return the process group that shards a parameter; its gather may run in a smaller group."""
    return noted(start, _HOME_KEY) or group_name(start)


def set_updates(node: fx.Node, fqns: Sequence[str], nbytes: int) -> None:
    """Tag a node that updates parameters, and allocates ``nbytes`` while it runs."""
    note(node, _UPDATES_KEY, tuple(fqns))
    note(node, _BUFFERS_KEY, nbytes)


def buffer_bytes(node: fx.Node) -> int:
    """Return the bytes that a node allocates while it runs, as far as its result shows none."""
    return noted(node, _BUFFERS_KEY) or 0


def updates_of(node: fx.Node) -> tuple[str, ...]:
    """List the parameters that a node updates."""
    return noted(node, _UPDATES_KEY) or ()


def mark_optimizer(node: fx.Node) -> None:
    """Mark a node of the norm, clipping or updates, whose time is the optimizer's."""
    note(node, _OPTIMIZER_KEY, True)


def is_optimizer(node: fx.Node) -> bool:
    """Return whether :func:`mark_optimizer` marked a node."""
    return noted(node, _OPTIMIZER_KEY) is not None


def mark_replaced(start: fx.Node) -> None:
    """Keep a reduction's tags, before its node becomes another collective such as an all-to-all."""
    note(start, _REPLACES_KEY, kind_of(start))


def replaced_kind(node: fx.Node) -> Kind | None:
    """Return the kind of a collective, or of the reduction that it replaces; else None."""
    return (noted(node, _REPLACES_KEY) or kind_of(node)) if is_collective(node) else None


def tag_of(node: fx.Node) -> Tag | None:
    """Return the tag of a collective's start; None for other nodes and for untagged collectives.

    A bucket's tag has the FQNs of all members, in payload order if this package merged the bucket,
    else in the members' order. A bucket with an untagged member has no tag.
    """
    tags = member_tags(node)
    if not tags or len(tags) < member_count(node):
        return None
    return Tag(tags[0].kind, tuple(dict.fromkeys(f for tag in tags for f in tag.fqns)))


def member_tags(start: fx.Node) -> tuple[Tag, ...]:
    """List the tags of a bucket's tagged members, or the own tag of a single collective."""
    return tuple(m for m in _members(start) if m is not None)


def member_count(start: fx.Node) -> int:
    """Count the collectives that were merged into this one; 1 if it is not a bucket."""
    return len(_members(start))


def is_bucket(node: fx.Node) -> bool:
    """Return whether this package or torch made a collective by merging several."""
    return noted(node, _MEMBERS_KEY) is not None or _SOURCES_KEY in node.meta


def _members(node: fx.Node) -> list[Tag | None]:
    """List the tags of a bucket's members, or of a collective that is not a bucket itself."""
    kind = replaced_kind(node)
    if kind is None:
        return []
    members = noted(node, _MEMBERS_KEY)
    if members is None:
        sources = node.meta.get(_SOURCES_KEY, [node.meta.get("custom")])
        members = [(custom or {}).get(_TAG_KEY) for custom in sources]
    # A tag of another kind came from another node, along with a copy of its metadata.
    return [Tag(kind, tuple(t[1:])) if t is not None and t[0] == kind else None for t in members]


def note(node: fx.Node, key: str, value: object) -> None:
    """Note a fact about a node, for passes that copy its tags."""
    # A new dictionary, since tracing shares one ``custom`` dictionary between many nodes.
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def noted(node: fx.Node, key: str) -> Any:
    """Return the value of :func:`note`, or None."""
    return (node.meta.get("custom") or {}).get(key)
