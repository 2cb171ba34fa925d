"""The launches of a graph on each process group, which a group's ranks must share.

Ranks meet in a process group in the order in which they launch, and a bucket's bytes mean what
their sender packed. So compared are, per group, the collectives in the order of the graph after
bucketing and scheduling, each with what makes its bytes: kind, reduce op, dtype, and its members
with their parameters, byte offsets and sizes. So is what the order was planned with: ranks with
other times may launch alike today, and differently with the next change of the model.

What may rightly differ between ranks is left out: names of nodes, the sizes of collectives that
serve no parameter (an all-to-all of tokens, a batch of varying length), and sends and receives. A
graph that takes its groups as inputs, compiled by one rank for all, has no launches here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ..graph.collectives import argument, collective_group, kind_of, sent_as_bytes
from ..graph.tags import is_bucket, member_tags, tag_of
from ..reports.buckets import BucketReport

_POINT_TO_POINT = ("isend", "irecv", "batch_p2p_ops")


class Member(NamedTuple):
    """One member of a collective, with its place and size in one rank's part of the buffer, in
    bytes; None, or an empty text, stands for what is not known."""

    fqns: tuple[str, ...]
    offset: int | None = None
    nbytes: int | None = None
    dtype: str = ""

    def to_text(self) -> str:
        name = "+".join(self.fqns) or "(untagged)"
        where = "" if self.offset is None else f" at byte {self.offset}"
        size = "" if self.nbytes is None else f", {self.nbytes} bytes {self.dtype}"
        return f"{name}{where}{size}"


class Launch(NamedTuple):
    """One collective; of no known kind, the operator's name is its ``kind``. ``members`` are in the
    order of their bytes, none where it serves no parameter."""

    kind: str
    reduce_op: str | None
    dtype: str
    bucketed: bool
    members: tuple[Member, ...] = ()

    def to_text(self, around: int = 0) -> str:
        """One line. Of a large bucket only the members near the one at place ``around``."""
        head = " ".join(p for p in (self.kind, self.reduce_op or "", self.dtype) if p)
        if not self.members:
            return f"{head}, of no parameter"
        first = max(0, min(around - 2, len(self.members) - 5))
        shown = [m.to_text() for m in self.members[first : first + 5]]
        if first > 0:
            shown.insert(0, "...")
        if first + 5 < len(self.members):
            shown.append("...")
        many = f"bucket of {len(self.members)}: " if self.bucketed else ""
        return f"{head}, {many}{'; '.join(shown)}"


class GroupLaunches(NamedTuple):
    """The launches of one graph on one process group, by its name, in order."""

    group: str
    launches: tuple[Launch, ...]

    @classmethod
    def of(cls, group: str, launches: Iterable[Any]) -> GroupLaunches:
        """The reverse of what JSON makes of it: lists of lists."""
        return cls(
            group,
            tuple(
                Launch(kind, op, dtype, bucketed, tuple(Member(tuple(f), *m) for f, *m in members))
                for kind, op, dtype, bucketed, members in launches
            ),
        )


class GraphLaunches(NamedTuple):
    """The launches of one graph, per process group in the order of their first collectives;
    ``planned_with``: the times and size hints of its order, in short."""

    stage: str
    groups: tuple[GroupLaunches, ...]
    planned_with: str = ""

    def encode(self) -> str:
        """Return it as a short text without spaces or quotes, to travel in a graph."""
        packed = zlib.compress(json.dumps(self, separators=(",", ":")).encode(), 9)
        return base64.urlsafe_b64encode(packed).decode()

    @classmethod
    def decode(cls, text: str) -> GraphLaunches:
        """The reverse of :meth:`encode`."""
        stage, groups, planned_with = json.loads(zlib.decompress(base64.urlsafe_b64decode(text)))
        return cls(stage, tuple(GroupLaunches.of(*group) for group in groups), planned_with)

    def digest(self) -> str:
        """SHA-256 (hex) of everything in it."""
        return hashlib.sha256(repr(self).encode()).hexdigest()


def launches_of(
    graph: fx.Graph, stage: str, buckets: Iterable[BucketReport] = (), planned_with: str = ""
) -> GraphLaunches:
    """Read the launches off a graph as it will run. ``buckets`` are what merged them knows of the
    buckets, found by the names of their nodes; others have their members' names alone."""
    known = {bucket.node: bucket for bucket in buckets}
    groups: dict[str, list[Launch]] = {}
    for node in graph.nodes:
        group = collective_group(node)
        if group is not None and _op_name(node) not in _POINT_TO_POINT:
            groups.setdefault(group, []).append(_launch_of(node, known))
    return GraphLaunches(
        stage, tuple(GroupLaunches(g, tuple(found)) for g, found in groups.items()), planned_with
    )


def _launch_of(node: fx.Node, known: Mapping[str, BucketReport]) -> Launch:
    op, dtype = argument(node, "reduce_op"), _dtype_of(node)
    report, tag = known.get(node.name), tag_of(node)
    members: Iterable[Member] = ()
    if report is not None:
        members = (Member(m.fqns, m.offset, m.nbytes, m.dtype) for m in report.members)
    elif is_bucket(node):
        members = (Member(t.fqns) for t in member_tags(node))
    elif tag is not None:
        bytes_of = sent_as_bytes(node)
        own = dtype if bytes_of is None else str(bytes_of).removeprefix("torch.")
        members = (Member(tag.fqns, 0, _nbytes_of(node), own),)
    return Launch(
        kind_of(node) or _op_name(node),
        None if op is None else str(op),
        dtype,
        report is not None or is_bucket(node),
        tuple(members),
    )


def _op_name(node: fx.Node) -> str:
    return str(node.target).split(".")[1]


def _sent(node: fx.Node) -> Any:
    value = next(iter((*node.args, *node.kwargs.values())))
    if isinstance(value, list | tuple):
        value = next(iter(value), None)
    return value.meta.get("val") if isinstance(value, fx.Node) else None


def _dtype_of(node: fx.Node) -> str:
    value = _sent(node)
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""


def _nbytes_of(node: fx.Node) -> int | None:
    """Bytes in one rank's part: of what it sends to a gather, of what it receives of a
    reduction."""
    value = _sent(node) if kind_of(node) == "all_gather" else node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(value.numel(), int):
        return None
    return int(value.numel()) * value.dtype.itemsize
