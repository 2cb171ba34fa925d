"""Record the facts about each collective of a graph for planning, merging and reports."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import torch
import torch.fx as fx

from .._torch import aot as _aot
from .._torch.estimates import size_hint
from .._torch.process_groups import is_inside, ranks_of
from .collectives import (
    Kind,
    bucket_key,
    group_name,
    group_size,
    only_wait,
    reduce_op,
    sent_as_bytes,
    wire_bytes,
)
from .mergeable import unmergeable
from .tags import home_group, is_bucket, member_count, tag_of

_c10d = torch.ops._c10d_functional

_ADDED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

UNTAGGED = "it serves no known parameter"
"""Why a collective without a tag is in no bucket."""


class Collective:
    """The facts about one collective, each read from the graph once, for any number of plans.

    Attributes:
        group: name of its process group.
        home: name of the process group that shards its parameter; see :func:`.home_group`.
        tag: its tag; None without a known parameter.
        why_not: why it can't be merged; see :func:`unmergeable`.
        key: its bucket key, see :func:`.bucket_key`; None if it can't be merged.
        merged: whether it is a bucket already.
        count: number of collectives that were merged into it; 1 if it is not a bucket.
        in_backward: whether autograd ran while it was traced, in the graph of a whole step.
    """

    def __init__(self, start: fx.Node, kind: Kind) -> None:
        self.start = start
        self.kind = kind
        self.group = group_name(start)
        self.home = home_group(start)
        self.tag = tag_of(start)
        self.why_not = unmergeable(start)
        self.key = None if self.why_not else bucket_key(start)
        self.merged = is_bucket(start)
        self.count = member_count(start)
        self.reduce_op = reduce_op(start)
        self.in_backward = _aot.in_backward(start)

    @property
    def fqns(self) -> tuple[str, ...]:
        """FQNs of its parameters; empty without a tag."""
        return () if self.tag is None else self.tag.fqns

    @property
    def wait(self) -> fx.Node:
        """Its wait, if that is its only reader: if ``why_not`` is empty."""
        return next(iter(self.start.users))

    @cached_property
    def ranks(self) -> int:
        return group_size(self.start)

    @cached_property
    def wire_bytes(self) -> int:
        return wire_bytes(self.start)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of a gather's input or of a reduction's result, its part of one rank's buffer."""
        node = self.start.all_input_nodes[0] if self.kind == "all_gather" else self.start
        sizes = node.meta["val"].shape
        return tuple(size_hint(s, "the report of a bucket's payload") for s in sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """dtype of its values, even if they are sent as bytes."""
        dtype: torch.dtype = sent_as_bytes(self.start) or self.start.meta["val"].dtype
        return dtype

    @cached_property
    def nbytes(self) -> int:
        """Bytes of :attr:`shape`."""
        return math.prod(self.shape) * self.dtype.itemsize


def gradient_sums(collectives: Mapping[fx.Node, Collective]) -> dict[fx.Node, Collective]:
    """Select the reductions that add gradients over data-parallel ranks.

    This excludes an all-reduce inside one data-parallel rank, such as tensor parallelism's, whose
    result another reduction of the same parameter adds. Eager FSDP2 leaves that to the process
    group, too.
    """
    found = {start: c for start, c in collectives.items() if _adds_gradients(c)}
    groups: dict[str, dict[str, None]] = {}
    for c in found.values():
        for fqn in c.fqns:
            groups.setdefault(fqn, {})[c.group] = None
    ranks = {group: ranks_of(group) for of_one in groups.values() for group in of_one}

    def inside(c: Collective) -> bool:
        others = (group for fqn in c.fqns for group in groups[fqn])
        return any(is_inside(ranks[c.group], ranks[other]) for other in others)

    return {n: c for n, c in found.items() if c.kind != "all_reduce" or not inside(c)}


def _adds_gradients(c: Collective) -> bool:
    return (
        c.start.target in (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)
        and c.tag is not None
        and c.reduce_op in ("sum", "avg")
        and isinstance(value := c.start.meta.get("val"), torch.Tensor)
        and "val" in c.start.all_input_nodes[0].meta
        and value.dtype in _ADDED
        and not c.start.kwargs
        and c.ranks > 1
        and only_wait(c.start) is not None
    )
