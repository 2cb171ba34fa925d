"""Records of collectives: in a bucket, or not merged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from .base import LeftAlone, Record

# Values of BucketReport.packed_by.
GRAPH_ORDER = "graph order"
NO_KEY = f"{GRAPH_ORDER}: a member has no key"

ClosedBy = Literal["bytes", "run", "dependency", "search", "end"]


@dataclass(frozen=True)
class PayloadMember:
    """A member's place in the packed buffer, in bytes of one rank's part.

    That part is the rank's shards in an all-gather, the rows that the rank receives in a
    reduce-scatter, and the whole buffer in an all-reduce.

    Args:
        fqns: its parameters; empty if it has no tag.
        nbytes: its size, padding included; ``shape`` has the padding, too.
    """

    fqns: tuple[str, ...]
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BucketReport(Record):
    """A bucket.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        unit: index of the unit in the order or plan; None for a bucket by size.
        group: name of the process group.
        reduce_op: ``"avg"``, ``"sum"``, ...; None for a gather.
        node: name of the bucket's start.
        members: in payload order.
        closed_by: what kept the next candidate out: the byte cap, the bound on compute runs, a
            dependency or write, or ``"end"``: no candidate was left.
        detail: which candidate, and why, in words.
        wire_bytes: bytes that count against ``cap_bytes``: per member the larger of its input and
            its output; None without a cap.
        packed_by: name of the payload order, such as ``"FSDPParamOrder"``, or ``"graph order"``,
            or ``"graph order: a member has no key"``.
        no_key: members without a key: their parameters, or the node's name if it has no tag.
    """

    derived = ("nbytes",)
    kind: str
    unit: int | None
    group: str
    group_size: int
    reduce_op: str | None
    node: str
    members: tuple[PayloadMember, ...]
    closed_by: ClosedBy = "end"
    detail: str = ""
    wire_bytes: int | None = None
    cap_bytes: int | None = None
    packed_by: str = GRAPH_ORDER
    no_key: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of one rank's part, in bytes."""
        return sum(m.nbytes for m in self.members)


@dataclass(frozen=True)
class Unmerged(LeftAlone):
    """An eligible collective that is in no bucket.

    ``reason`` names the next candidate of its bucket key, and what kept it out (``closed_by``):
    ``"search"`` is a byte cap below others that were tried.
    """

    kind: str = ""
    group: str = ""
    wire_bytes: int = 0
    closed_by: ClosedBy = "end"


@dataclass(frozen=True, kw_only=True)
class NotMerged:
    """The collectives of one graph that are in no bucket, each in graph order.

    Args:
        uncovered: parameters that are in no unit.
        ineligible: collectives that can't be in a bucket.
        splits: collectives that got a further bucket to avoid a cycle, in words.
        unmerged: eligible collectives.
    """

    uncovered: tuple[str, ...] = ()
    ineligible: tuple[LeftAlone, ...] = ()
    splits: tuple[str, ...] = ()
    unmerged: tuple[Unmerged, ...] = ()

    def not_merged(self) -> dict[str, Any]:
        """Return these fields, to pass them on."""
        return {f.name: getattr(self, f.name) for f in fields(NotMerged)}
