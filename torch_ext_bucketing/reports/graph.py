"""Report bucketing on one graph, and log the report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .._torch.inductor import trace_artifact
from ..graph.nodes import COLLECTIVES, KINDS
from .base import LeftAlone, Record, Report, change, size_text, table

# Values of BucketReport.packed_by.
GRAPH_ORDER = "graph order"
NO_KEY = f"{GRAPH_ORDER}: a member has no key"

ClosedBy = Literal["bytes", "run", "dependency", "search", "end"]


@dataclass(frozen=True)
class PayloadMember:
    """A member's place in the packed buffer, in bytes of one rank's part.

    One rank's part is its shards in an all-gather, the rows that it receives in a reduce-scatter,
    and the whole buffer in an all-reduce. ``nbytes`` and ``shape`` include padding.
    """

    fqns: tuple[str, ...]
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BucketReport(Record):
    """Collectives that were merged into one."""

    derived = ("nbytes",)
    kind: str
    unit: int | None  # index of the unit in the order or plan; None for a bucket by size
    group: str
    group_size: int
    reduce_op: str | None  # ``"avg"``, ``"sum"``, ...; None for a gather
    node: str  # name of the bucket's start
    members: tuple[PayloadMember, ...]  # in payload order
    # The reason that kept the next candidate out: the byte cap, the bound on compute runs, a
    # dependency or write, or ``"end"``: no candidate was left.
    closed_by: ClosedBy = "end"
    detail: str = ""  # the candidate and the reason, in words
    # Bytes that count against ``cap_bytes``: per member the larger of its input and its output;
    # None without a cap.
    wire_bytes: int | None = None
    cap_bytes: int | None = None
    # Name of the payload order, such as ``"FSDPParamOrder"``, or ``"graph order"``, or ``"graph
    # order: a member has no key"``.
    packed_by: str = GRAPH_ORDER
    # Members without a key: their parameters, or the node's name if it has no tag.
    no_key: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of one rank's part, in bytes."""
        return sum(m.nbytes for m in self.members)


@dataclass(frozen=True)
class Unmerged(LeftAlone):
    """An eligible collective that is in no bucket.

    ``reason`` names the next candidate of its bucket key, and why that stayed out (``closed_by``):
    ``"search"`` is a byte cap below others that were tried.
    """

    kind: str = ""
    group: str = ""
    wire_bytes: int = 0
    closed_by: ClosedBy = "end"


@dataclass(frozen=True, kw_only=True)
class NotMerged:
    """The collectives of one graph that are in no bucket, each in graph order.

    ``uncovered`` are parameters in no unit, ``ineligible`` collectives that can't be in a bucket,
    ``splits`` those that got a further bucket to avoid a cycle, in words.
    """

    uncovered: tuple[str, ...] = ()
    ineligible: tuple[LeftAlone, ...] = ()
    splits: tuple[str, ...] = ()
    unmerged: tuple[Unmerged, ...] = ()

    def not_merged(self) -> dict[str, Any]:
        """Return the fields of this class, for another record."""
        return {f.name: getattr(self, f.name) for f in fields(NotMerged)}


ARTIFACT = "torch_ext_bucketing_report"
"""Name of the artifact in ``TORCH_TRACE`` logs: JSON, one per graph."""

_log = logging.getLogger("torch_ext_bucketing")


@dataclass(frozen=True)
class GraphReport(NotMerged, Report):
    """The buckets of one graph, and the collectives in none; the pass buckets ``kinds``."""

    stage: str
    collectives_before: Mapping[str, int]
    collectives_after: Mapping[str, int]
    buckets: tuple[BucketReport, ...] = ()
    kinds: tuple[str, ...] = KINDS
    from_cache: bool = False

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a table of the buckets, and the collectives in none."""
        yield self.summary()
        if self.buckets and not members and not any(b.no_key for b in self.buckets):
            yield from ("", *table(_BUCKET, self.buckets, right=(2, 3, 4, 5), join="node"))
        elif self.buckets:
            head, *rows = table(_BUCKET, self.buckets, right=(2, 3, 4, 5))
            yield from ("", head)
            for bucket, line in zip(self.buckets, rows, strict=True):
                yield line
                if bucket.detail:
                    yield f"    {bucket.detail}"
                if bucket.no_key:
                    yield f"    no key: {'; '.join(bucket.no_key)}"
                if members:
                    yield from (f"    {m}" for m in table(_MEMBER, bucket.members, right=(0, 1)))
        if self.unmerged:
            yield from ("", f"eligible and not merged: {len(self.unmerged)}")
            yield from (f"  {line}" for line in table(_UNMERGED, self.unmerged, right=(2,)))
        if self.ineligible:
            yield from ("", f"not eligible: {len(self.ineligible)}")
            by_reason: dict[str, list[str]] = {}
            for left in self.ineligible:
                by_reason.setdefault(left.reason, []).append(left.node)
            yield from (f"  {reason}: {', '.join(nodes)}" for reason, nodes in by_reason.items())
        if self.uncovered:
            yield from ("", f"in no unit: {', '.join(self.uncovered)}")
        if self.splits:
            yield from ("", *self.splits)

    def summary(self) -> str:
        """Format one line: collectives per kind before and after, and why buckets closed."""
        closed: Counter[str] = Counter(b.closed_by for b in self.buckets)
        stage = f"{self.stage}, from cache" if self.from_cache else self.stage
        parts = [f"{stage}: {change(self.collectives_before, self.collectives_after)}"]
        if closed:
            reasons = ", ".join(f"{closed[r]} by {r}" for r in get_args(ClosedBy) if closed[r])
            number = len(self.buckets)
            parts.append(f"{number} bucket{'s' if number > 1 else ''}, closed {reasons}")
        if self.unmerged:
            parts.append(f"{len(self.unmerged)} eligible not merged")
        if self.ineligible:
            parts.append(f"{len(self.ineligible)} not eligible")
        parts += [f"{k} not asked for" for k in self.collectives_before if k not in self.kinds]
        return "; ".join(parts)


def emit(report: GraphReport) -> None:
    """Log a graph's report, by logger ``torch_ext_bucketing``, and trace it for tlparse."""
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report.to_text())
    trace_artifact(ARTIFACT, report.to_json, "json")


_BUCKET: dict[str, Callable[[BucketReport], object]] = {
    "kind": lambda b: COLLECTIVES[b.kind].short + (f" {b.reduce_op}" if b.reduce_op else ""),
    "group": lambda b: b.group,
    "ranks": lambda b: b.group_size,
    "members": lambda b: len(b.members),
    "bytes": lambda b: size_text(b.nbytes if b.wire_bytes is None else b.wire_bytes),
    "of cap": lambda b: f"{(b.wire_bytes or 0) / b.cap_bytes:.0%}" if b.cap_bytes else "-",
    "closed by": lambda b: b.closed_by,
    "packed by": lambda b: b.packed_by,
    "node": lambda b: b.node,
}
_MEMBER: dict[str, Callable[[PayloadMember], object]] = {
    "offset": lambda m: m.offset,
    "bytes": lambda m: m.nbytes,
    "dtype": lambda m: m.dtype,
    "shape": lambda m: "x".join(map(str, m.shape)) or "scalar",
    "parameters": lambda m: ", ".join(m.fqns) or "-",
}
_UNMERGED: dict[str, Callable[[Unmerged], object]] = {
    "kind": lambda x: COLLECTIVES[x.kind].short,
    "group": lambda x: x.group,
    "bytes": lambda x: size_text(x.wire_bytes),
    "closed by": lambda x: x.closed_by,
    "node": lambda x: x.node,
    "parameters": lambda x: ", ".join(x.fqns) or "-",
    "why": lambda x: x.reason,
}
