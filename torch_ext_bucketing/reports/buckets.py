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
    """One member's place in a bucket's packed buffer: ``offset`` and ``nbytes``, padding included,
    in one rank's part of it (the rank's shards in an all-gather, the rows that the rank receives in
    a reduce-scatter, the whole buffer in an all-reduce), and its shape there. ``fqns`` are the
    parameters that it serves, none when it has no tag."""

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
        reduce_op: ``"avg"``, ``"sum"``, ...; None for a gather.
        node: name of the bucket's start in the graph.
        closed_by: what kept the next candidate out: the byte cap, the bound on compute runs, a
            dependency (or a write to a tensor), or ``"end"``: there was none.
        detail: which candidate, and why, in words.
        wire_bytes: what the members count against the cap, ``cap_bytes``: per member the larger of
            its input and its output; None where no cap was kept.
        packed_by: what decides the order of ``members``: the name of the payload order that was
            asked for, such as ``"FSDPParamOrder"``; ``"graph order"``; or ``"graph order: a member
            has no key"``.
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
    """A collective that could have been in a bucket and is in none; its fields are as of
    :class:`BucketReport`. ``closed_by`` is what kept the next candidate of its bucket key out;
    ``reason`` says which one, and why."""

    kind: str = ""
    group: str = ""
    wire_bytes: int = 0
    closed_by: ClosedBy = "end"


@dataclass(frozen=True, kw_only=True)
class NotMerged:
    """The collectives of one graph that are in no bucket, and why: parameters in no unit, what
    can't be in a bucket, what had to go into a bucket of its own to avoid a cycle, in words, and
    what could have been in one; each in graph order."""

    uncovered: tuple[str, ...] = ()
    ineligible: tuple[LeftAlone, ...] = ()
    splits: tuple[str, ...] = ()
    unmerged: tuple[Unmerged, ...] = ()

    def not_merged(self) -> dict[str, Any]:
        """These fields, to hand them on."""
        return {f.name: getattr(self, f.name) for f in fields(NotMerged)}
