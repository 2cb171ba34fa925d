"""The report of bucketing on one graph, and where it is logged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from .._torch.trace import trace_artifact
from .base import Report
from .buckets import BucketReport, ClosedBy, NotMerged, Unmerged
from .text import KIND_NAMES, aligned, change, shape_text, size_text

ARTIFACT = "torch_ext_bucketing_report"
"""Name of the artifact in TORCH_TRACE's logs: JSON, one per graph."""


_log = logging.getLogger("torch_ext_bucketing")


@dataclass(frozen=True)
class GraphReport(NotMerged, Report):
    """The result of bucketing on one graph, with what is in no bucket (:class:`.NotMerged`).

    Args:
        stage: ``"forward"``, ``"backward"`` or ``"inference"``.
        collectives_before: number of collectives per kind.
        buckets: those that were merged, in graph order.
        kinds: what was to be bucketed.
        from_cache: Inductor had the compiled graph in a cache; this is of the compile that filled
            it.
    """

    stage: str
    collectives_before: Mapping[str, int]
    collectives_after: Mapping[str, int]
    buckets: tuple[BucketReport, ...] = ()
    kinds: tuple[str, ...] = tuple(KIND_NAMES)
    from_cache: bool = False

    def to_text(self, members: bool = True) -> str:
        """An aligned table of the buckets, and what is in none.

        Args:
            members: list each bucket's members with their byte offsets.
        """
        lines = [self.summary()]
        if self.buckets:
            table = aligned([_COLUMNS, *map(_bucket_row, self.buckets)], right=(2, 3, 4, 5))
            lines += ["", table[0]]
            for bucket, line in zip(self.buckets, table[1:], strict=True):
                lines.append(line)
                if bucket.detail:
                    lines.append(f"    {bucket.detail}")
                if bucket.no_key:
                    lines.append(f"    no key: {'; '.join(bucket.no_key)}")
                if members:
                    lines += [f"    {line}" for line in _member_lines(bucket)]
        if self.unmerged:
            names = ("kind", "group", "bytes", "closed by", "node", "parameters", "why")
            rows = [names, *map(_unmerged_row, self.unmerged)]
            lines += ["", f"eligible and not merged: {len(self.unmerged)}"]
            lines += [f"  {line}" for line in aligned(rows, right=(2,))]
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
        """One line: collectives per kind before and after, and what closed the buckets."""
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
    """Log a graph's report: a line at INFO on the package's logger (``TORCH_LOGS`` takes its name,
    ``torch_ext_bucketing``), the whole of it at DEBUG, and an artifact for ``TORCH_TRACE``, which
    tlparse shows."""
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report.to_text())
    trace_artifact(ARTIFACT, report.to_json, "json")


_COLUMNS = (
    "kind",
    "group",
    "ranks",
    "members",
    "bytes",
    "of cap",
    "closed by",
    "packed by",
    "node",
)


def _bucket_row(bucket: BucketReport) -> tuple[str, ...]:
    kind, wire = KIND_NAMES.get(bucket.kind, bucket.kind), bucket.wire_bytes
    share = f"{100 * wire / bucket.cap_bytes:.0f}%" if wire and bucket.cap_bytes else "-"
    return (
        kind + (f" {bucket.reduce_op}" if bucket.reduce_op else ""),
        bucket.group,
        str(bucket.group_size),
        str(len(bucket.members)),
        size_text(bucket.nbytes if wire is None else wire),
        share,
        bucket.closed_by,
        bucket.packed_by,
        bucket.node,
    )


def _unmerged_row(left: Unmerged) -> tuple[str, ...]:
    return (
        KIND_NAMES.get(left.kind, left.kind),
        left.group,
        size_text(left.wire_bytes),
        left.closed_by,
        left.node,
        ", ".join(left.fqns) or "-",
        left.reason,
    )


def _member_lines(bucket: BucketReport) -> list[str]:
    rows = [("offset", "bytes", "dtype", "shape", "parameters")]
    rows += [
        (str(m.offset), str(m.nbytes), m.dtype, shape_text(m.shape), ", ".join(m.fqns) or "-")
        for m in bucket.members
    ]
    return aligned(rows, right=(0, 1))
