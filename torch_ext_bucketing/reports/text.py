"""Reports as text, and where they are logged."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from .data import BucketReport, CompileReport, GraphReport, ScheduleReport

__all__ = [
    "ARTIFACT",
    "compile_text",
    "emit",
    "graph_summary",
    "graph_text",
    "schedule_text",
]

ARTIFACT = "torch_ext_bucketing_report"
"""Name of the artifact in TORCH_TRACE's logs: JSON, one per graph."""

_log = logging.getLogger("torch_ext_bucketing")
_NAMES = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR"}


def emit(report: GraphReport) -> None:
    """Log a graph's report: a line at INFO on the package's logger (``TORCH_LOGS`` takes its name,
    ``torch_ext_bucketing``), the whole of it at DEBUG, and an artifact for ``TORCH_TRACE``, which
    tlparse shows."""
    from torch._logging import trace_structured

    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report.to_text())
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": ARTIFACT, "encoding": "json"},
        payload_fn=report.to_json,
        expect_trace_id=False,
    )


def graph_summary(report: GraphReport) -> str:
    """One line: collectives per kind before and after, and what closed the buckets."""
    closed: Counter[str] = Counter(b.closed_by for b in report.buckets)
    parts = [f"{report.stage}: {_change(report.collectives_before, report.collectives_after)}"]
    if closed:
        reasons = ", ".join(f"{closed[r]} by {r}" for r in _in_order(closed))
        number = len(report.buckets)
        parts.append(f"{number} bucket{'s' if number > 1 else ''}, closed {reasons}")
    if report.alone:
        parts.append(f"{len(report.alone)} eligible not merged")
    if report.left_alone:
        parts.append(f"{len(report.left_alone)} not eligible")
    return "; ".join(parts)


def graph_text(report: GraphReport, members: bool = True) -> str:
    """See :meth:`.GraphReport.to_text`."""
    lines = [graph_summary(report)]
    if report.buckets:
        rows: list[tuple[str, ...]] = [
            ("kind", "group", "ranks", "members", "bytes", "of cap", "span", "closed by", "node")
        ]
        rows += [_bucket_row(b) for b in report.buckets]
        table = _aligned(rows, right=(2, 3, 4, 5, 6))
        lines += ["", table[0]]
        for bucket, line in zip(report.buckets, table[1:], strict=True):
            lines.append(line)
            if bucket.detail:
                lines.append(f"    {bucket.detail}")
            if members:
                lines += [f"    {line}" for line in _member_lines(bucket)]
    if report.alone:
        lines += ["", f"eligible and not merged: {len(report.alone)}"]
        unmerged: list[tuple[str, ...]] = [
            ("kind", "group", "bytes", "closed by", "node", "parameters", "why")
        ]
        unmerged += [
            (
                _NAMES.get(a.kind, a.kind),
                a.group,
                _size(a.wire_bytes),
                a.closed_by,
                a.node,
                ", ".join(a.fqns) or "-",
                a.detail,
            )
            for a in report.alone
        ]
        lines += [f"  {line}" for line in _aligned(unmerged, right=(2,))]
    if report.left_alone:
        lines += ["", f"not eligible: {len(report.left_alone)}"]
        by_reason: dict[str, list[str]] = {}
        for node, reason in report.left_alone:
            by_reason.setdefault(reason, []).append(node)
        lines += [f"  {reason}: {', '.join(nodes)}" for reason, nodes in by_reason.items()]
    if report.uncovered:
        lines += ["", f"in no unit: {', '.join(report.uncovered)}"]
    if report.splits:
        lines += ["", *report.splits]
    return "\n".join(lines) + "\n"


def schedule_text(report: ScheduleReport) -> str:
    """See :meth:`.ScheduleReport.to_text`."""
    gib = 2**30
    limit = "" if report.limit_bytes is None else f", bound {report.limit_bytes / gib:.2f}"
    rows: list[tuple[str, ...]] = [
        ("", "before", "after", ""),
        (
            "step, ms",
            f"{report.step_ms[0]:.2f}",
            f"{report.step_ms[1]:.2f}",
            f"lower bound {report.bound_ms:.2f}, {report.chosen}",
        ),
        ("exposed, ms", f"{report.exposed_ms[0]:.2f}", f"{report.exposed_ms[1]:.2f}", ""),
        (
            "peak, GiB",
            f"{report.peak_bytes[0] / gib:.2f}",
            f"{report.peak_bytes[1] / gib:.2f}",
            f"unreordered {report.reference_bytes / gib:.2f}{limit}",
        ),
        (
            "longest compute run",
            str(report.longest_run[0]),
            str(report.longest_run[1]),
            ""
            if report.max_run is None
            else f"bound {report.max_run}, dependencies force {report.forced_run}",
        ),
    ]
    if report.caps_mb:
        caps = ", ".join(f"{cap:g} for {name}" for name, cap in report.caps_mb)
        rows.append(("byte cap, MiB", "", "", f"{caps}, of {len(report.cap_alternatives)} tried"))
    return "\n".join([*_aligned(rows, right=(1, 2)), *report.notes, *report.warnings]) + "\n"


def compile_text(report: CompileReport, members: bool = True) -> str:
    """See :meth:`.CompileReport.to_text`."""
    parts = [graph_text(graph, members) for graph in report.graphs]
    parts += [schedule_text(schedule) for schedule in report.schedules]
    total = f"all graphs: {_change(report.collectives_before, report.collectives_after)}\n"
    if report.unnamed:
        total += "parameters whose name was not found:\n"
        total += "".join(f"  {node}: {reason}\n" for node, reason in report.unnamed)
    total += "".join(f"warning: {text}\n" for text in report.warnings)
    return "\n".join([*parts, total])


def _change(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    kinds = [k for k in _NAMES if before.get(k) or after.get(k)]
    if not kinds:
        return "no collectives"
    return ", ".join(f"{k} {before.get(k, 0)} -> {after.get(k, 0)}" for k in kinds)


def _in_order(closed: Mapping[str, int]) -> list[str]:
    return [r for r in ("bytes", "span", "dependency", "end") if closed.get(r)]


def _bucket_row(bucket: BucketReport) -> tuple[str, ...]:
    wire = bucket.wire_bytes
    share = f"{100 * wire / bucket.cap_bytes:.0f}%" if wire and bucket.cap_bytes else "-"
    return (
        _NAMES.get(bucket.kind, bucket.kind) + (f" {bucket.reduce_op}" if bucket.reduce_op else ""),
        bucket.group,
        str(bucket.group_size),
        str(len(bucket.members)),
        _size(bucket.nbytes if wire is None else wire),
        share,
        str(bucket.span),
        bucket.closed_by,
        bucket.node,
    )


def _member_lines(bucket: BucketReport) -> list[str]:
    rows = [("offset", "bytes", "dtype", "shape", "parameters")]
    rows += [
        (str(m.offset), str(m.nbytes), m.dtype, _shape(m.shape), ", ".join(m.fqns) or "-")
        for m in bucket.members
    ]
    return _aligned(rows, right=(0, 1))


def _shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _aligned(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
