"""The report of bucketing on one graph, and its logging."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from .._torch.trace import trace_artifact
from ..graph.collectives import COLLECTIVES, KINDS
from .base import Report
from .buckets import BucketReport, ClosedBy, NotMerged, PayloadMember, Unmerged
from .text import change, size_text, table

ARTIFACT = "torch_ext_bucketing_report"
"""Name of the artifact in ``TORCH_TRACE`` logs: JSON, one per graph."""

_log = logging.getLogger("torch_ext_bucketing")


@dataclass(frozen=True)
class GraphReport(NotMerged, Report):
    """The buckets of one graph, and what is in none.

    Args:
        stage: ``"forward"``, ``"backward"`` or ``"inference"``.
        collectives_before: number of collectives per kind.
        buckets: in graph order.
        kinds: kinds that the pass buckets.
        from_cache: whether the compiled graph, with this report, was loaded from a cache.
    """

    stage: str
    collectives_before: Mapping[str, int]
    collectives_after: Mapping[str, int]
    buckets: tuple[BucketReport, ...] = ()
    kinds: tuple[str, ...] = KINDS
    from_cache: bool = False

    def to_text(self, members: bool = True) -> str:
        """Format a table of the buckets, and what is in none.

        Args:
            members: list each bucket's members with their byte offsets.
        """
        lines = [self.summary()]
        if self.buckets:
            head, *rows = table(_BUCKET, self.buckets, right=(2, 3, 4, 5))
            lines += ["", head]
            for bucket, line in zip(self.buckets, rows, strict=True):
                lines.append(line)
                if bucket.detail:
                    lines.append(f"    {bucket.detail}")
                if bucket.no_key:
                    lines.append(f"    no key: {'; '.join(bucket.no_key)}")
                if members:
                    lines += [f"    {m}" for m in table(_MEMBER, bucket.members, right=(0, 1))]
        if self.unmerged:
            lines += ["", f"eligible and not merged: {len(self.unmerged)}"]
            lines += [f"  {line}" for line in table(_UNMERGED, self.unmerged, right=(2,))]
        if self.ineligible:
            lines += ["", f"not eligible: {len(self.ineligible)}"]
            by_reason: dict[str, list[str]] = {}
            for left in self.ineligible:
                by_reason.setdefault(left.reason, []).append(left.node)
            lines += [f"  {reason}: {', '.join(nodes)}" for reason, nodes in by_reason.items()]
        if self.uncovered:
            lines += ["", f"in no unit: {', '.join(self.uncovered)}"]
        if self.splits:
            lines += ["", *self.splits]
        return "\n".join(lines) + "\n"

    def summary(self) -> str:
        """Format one line: collectives per kind before and after, and what closed the buckets."""
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
    """Log a graph's report.

    The logger is ``torch_ext_bucketing``, also for ``TORCH_LOGS``: the summary at INFO, the rest at
    DEBUG. ``TORCH_TRACE`` gets an artifact, which tlparse shows.
    """
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report.to_text())
    trace_artifact(ARTIFACT, report.to_json, "json")


def _share_of_cap(bucket: BucketReport) -> str:
    wire, cap = bucket.wire_bytes, bucket.cap_bytes
    return f"{100 * wire / cap:.0f}%" if wire and cap else "-"


_BUCKET: dict[str, Callable[[BucketReport], object]] = {
    "kind": lambda b: COLLECTIVES[b.kind].short + (f" {b.reduce_op}" if b.reduce_op else ""),
    "group": lambda b: b.group,
    "ranks": lambda b: b.group_size,
    "members": lambda b: len(b.members),
    "bytes": lambda b: size_text(b.nbytes if b.wire_bytes is None else b.wire_bytes),
    "of cap": _share_of_cap,
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
