"""The collectives of a graph as planning sees them, and which can be in a bucket at all."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from .._torch.symbols import depends_on_data
from ..fsdp.tags import Tag, home_group, is_bucket, tag_of
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import (
    Kind,
    bucket_key,
    group_name,
    group_size,
    kind_of,
    only_wait,
    wire_bytes,
)
from ..reports.base import LeftAlone

UNTAGGED = "it serves no known parameter"
"""Why a collective without a tag is in no bucket."""


@dataclass(frozen=True, eq=False)
class Collective:
    """The facts that planning needs of a collective, read once for any number of plans.

    Args:
        start: its node.
        kind: as of :func:`.kind_of`.
        group: the name of its process group.
        home: the name of that which its parameter is sharded over; see :func:`.home_group`.
        tag: None if it serves no known parameter.
        why_not: see :func:`unmergeable`.
        key: see :func:`.bucket_key`; None where there is a ``why_not``.
    """

    start: fx.Node
    kind: Kind
    group: str
    home: str
    tag: Tag | None
    why_not: str
    key: tuple[Any, ...] | None

    @property
    def fqns(self) -> tuple[str, ...]:
        """Its parameters, as far as they are known."""
        return () if self.tag is None else self.tag.fqns

    @cached_property
    def ranks(self) -> int:
        """The number of ranks in its process group."""
        return group_size(self.start)

    @cached_property
    def wire_bytes(self) -> int:
        """See :func:`.wire_bytes`."""
        return wire_bytes(self.start)

    def left_alone(self, reason: str) -> LeftAlone:
        """The record of it where it is not merged."""
        return LeftAlone(self.fqns, reason, self.start.name)


def collectives_of(analysis: GraphAnalysis, kinds: Collection[Kind]) -> list[Collective]:
    """The collectives of these kinds, in graph order."""
    found = []
    for node, kind in analysis.kinds.items():
        if kind in kinds:
            why = unmergeable(node)
            key = None if why else bucket_key(node)
            group, home = group_name(node), home_group(node)
            found.append(Collective(node, kind, group, home, tag_of(node), why, key))
    return found


def unmergeable(start: fx.Node) -> str:
    """Why a collective can't be a member of any bucket; empty if it can."""
    if start.target is torch.ops._c10d_functional.all_reduce_.default:
        return "it works in place"
    result = start.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return "its shape is unknown (no meta['val'])"
    if "out" in start.kwargs or is_bucket(start):
        return "it is a bucket already"
    wait = only_wait(start)
    if wait is None:
        return "its result is used by other nodes than one wait"
    # What torch's merging takes for granted:
    if start.kwargs or wait.kwargs:
        return "its arguments are given by keyword"
    value = start.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "the shape of its input is unknown (no meta['val'])"
    if any(map(depends_on_data, (*value.shape, *result.shape))):
        return "its size depends on data"
    kind = kind_of(start)
    if kind != "all_reduce" and not value.ndim:
        return "its input has no dimension"
    if kind == "reduce_scatter" and isinstance(value.shape[0], int):
        size = group_size(start)
        if value.shape[0] % size:
            return f"its input's {value.shape[0]} rows can't be divided among {size} ranks"
    return ""
