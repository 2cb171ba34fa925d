"""One record for each collective: a member of a bucket, or not merged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from .base import LeftAlone, Record

GRAPH_ORDER = "graph order"
NO_KEY = f"{GRAPH_ORDER}: a member has no key"
"""Two values of :attr:`BucketReport.packed_by`."""

ClosedBy = Literal["bytes", "run", "dependency", "end"]


@dataclass(frozen=True)
class PayloadMember:
    """One member's place in a bucket's packed buffer.

    Args:
        fqns: the parameters that it serves; empty when it has no tag.
        offset: where it starts, in bytes, in one rank's part of the buffer: the rank's shards in
            an all-gather, the rows that the rank receives in a reduce-scatter, the whole buffer in
            an all-reduce.
        nbytes: its size there, padding included.
        shape: its shape in one rank's part.
        dtype: of its values, such as ``"bfloat16"``.
    """

    fqns: tuple[str, ...]
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BucketReport(Record):
    """One bucket, its members in payload order.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        unit: index of the unit in the order or plan; None for a bucket by size.
        group: name of the process group.
        group_size: number of ranks in it.
        reduce_op: ``"avg"``, ``"sum"``, ...; None for a gather.
        node: name of the bucket's start in the graph.
        members: in the order of their bytes.
        closed_by: what kept the next candidate out: the byte cap, the bound on compute runs, a
            dependency (or a write to a tensor), or ``"end"``: there was none.
        detail: which candidate, and why, in words.
        wire_bytes: what the members count against the byte cap: per member the larger of its input
            and its output; None where no cap was kept.
        cap_bytes: the cap; None where no cap was kept.
        packed_by: what decides the order of ``members``: the name of the payload order that was
            asked for, such as ``"FSDPParamOrder"``; ``"graph order"``; or
            ``"graph order: a member has no key"``.
        no_key: the members without a key: their parameters, or the node's name for want of a tag.
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
    """A collective that could have been in a bucket and is in none.

    Args:
        kind: as in :class:`BucketReport`.
        group: name of the process group.
        wire_bytes: as in :class:`BucketReport`.
        closed_by: what kept the next candidate of its bucket key out; ``reason`` says which one,
            and why.
    """

    kind: str = ""
    group: str = ""
    wire_bytes: int = 0
    closed_by: ClosedBy = "end"


@dataclass(frozen=True, kw_only=True)
class NotMerged:
    """The collectives of one graph that are in no bucket, and why.

    Args:
        uncovered: FQNs of the parameters whose collectives are in no unit, sorted as met in the
            graph.
        ineligible: the collectives that can't be in a bucket.
        splits: what had to go into a bucket of its own to avoid a cycle, in words.
        unmerged: what could have been in a bucket and is in none, in graph order.
    """

    uncovered: tuple[str, ...] = ()
    ineligible: tuple[LeftAlone, ...] = ()
    splits: tuple[str, ...] = ()
    unmerged: tuple[Unmerged, ...] = ()

    def not_merged(self) -> dict[str, Any]:
        """These fields, to hand them on."""
        return {f.name: getattr(self, f.name) for f in fields(NotMerged)}
