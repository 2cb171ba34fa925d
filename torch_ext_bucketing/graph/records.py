"""One record for each collective of a graph: what planning, merging and reports ask of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from .._torch import aot as _aot
from .._torch.estimates import size_hint
from .._torch.symbols import depends_on_data
from .collectives import (
    Kind,
    bucket_key,
    group_name,
    group_size,
    kind_of,
    only_wait,
    reduce_op,
    sent_as_bytes,
    wire_bytes,
)
from .tags import Tag, home_group, is_bucket, member_count, tag_of

UNTAGGED = "it serves no known parameter"
"""Why a collective without a tag is in no bucket."""


@dataclass(frozen=True, eq=False)
class Collective:
    """The facts about one collective, each read from the graph once, for any number of plans.

    Args:
        group: the name of its process group.
        home: the name of that which its parameter is sharded over; see :func:`.home_group`.
        tag: None if it serves no known parameter.
        why_not: see :func:`unmergeable`.
        key: see :func:`.bucket_key`; None where there is a ``why_not``.
        merged: whether it is a bucket already.
        count: number of collectives that were merged into it; 1 where none were.
    """

    start: fx.Node
    kind: Kind
    group: str
    home: str
    tag: Tag | None
    why_not: str
    key: tuple[Any, ...] | None
    merged: bool
    count: int

    @property
    def fqns(self) -> tuple[str, ...]:
        """Its parameters, as far as they are known."""
        return () if self.tag is None else self.tag.fqns

    @property
    def wait(self) -> fx.Node:
        """The wait for it, where :attr:`waited_alone`."""
        return next(iter(self.start.users))

    @property
    def waited_alone(self) -> bool:
        """Whether one wait reads it, and nothing else; so it is where there is no ``why_not``."""
        return only_wait(self.start) is not None

    @cached_property
    def ranks(self) -> int:
        """The number of ranks in its process group."""
        return group_size(self.start)

    @cached_property
    def reduce_op(self) -> str | None:
        """See :func:`.reduce_op`."""
        return reduce_op(self.start)

    @cached_property
    def wire_bytes(self) -> int:
        """See :func:`.wire_bytes`."""
        return wire_bytes(self.start)

    @cached_property
    def in_backward(self) -> bool:
        """Whether it was traced while autograd ran, in the graph of a whole step."""
        return _aot.in_backward(self.start)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of a gather's input, of a reduction's result: its part of one rank's buffer."""
        node = self.start.all_input_nodes[0] if self.kind == "all_gather" else self.start
        sizes = node.meta["val"].shape
        return tuple(size_hint(s, "the report of a bucket's payload") for s in sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of its values, also where these are sent as bytes."""
        dtype: torch.dtype = sent_as_bytes(self.start) or self.start.meta["val"].dtype
        return dtype

    @cached_property
    def nbytes(self) -> int:
        """Bytes of :attr:`shape`."""
        return math.prod(self.shape) * self.dtype.itemsize


def record_of(start: fx.Node, kind: Kind) -> Collective:
    """The record of one collective."""
    why = unmergeable(start)
    return Collective(
        start,
        kind,
        group_name(start),
        home_group(start),
        tag_of(start),
        why,
        None if why else bucket_key(start),
        is_bucket(start),
        member_count(start),
    )


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
