"""Plans as a page: timelines, memory by part, buckets and causes, in one file.

``page.html`` beside this module draws the data that is put into it. The page loads nothing, so that
it opens from a mail or from a job's artifacts. It uses no library of charts: one would be most of
each file, and an element for each of the 40,000 kernels of a large model is slow, where a canvas
draws them in milliseconds.
"""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._torch.dynamo import module_of
from ..explain import Explanation
from ..graph.nodes import COLLECTIVES, HOST_STREAMS, collective_kind
from ..planner.schedule.picture import PARTS, Drawn, label
from ..reports.base import Columns, sizes_text
from ..reports.compile import BUCKET, BucketReport, CompileReport
from ..reports.planner import BLOCK, UNIT, KeepReport

_EXPOSED = "kernels wait for communication or the host"
_BEFORE = (
    "before: no collectives are merged, and nodes have the graph's order; "
    "what is kept from forward to backward is the same in both"
)
_KINDS = [*COLLECTIVES, "compute", "copy", "host"]


def write_page(plans: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one page for plans, each from :func:`plan_of`.

    Raises:
        OSError: the file can't be written.
    """
    data = {"kinds": [k.replace("_", "-") for k in _KINDS], "parts": PARTS, "plans": plans}
    # A name of a module must not end the element that holds the data.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    path.write_text(page.replace("/*DATA*/", text), encoding="utf-8")


def plan_of(title: str, explained: Explanation) -> dict[str, Any]:
    """Return a plan's part of the page, as data for JSON.

    Args:
        explained: found by :func:`.explain` with ``draw=True``.
    """
    report = explained.report
    keeps = [r for r in report.rewrites if isinstance(r, KeepReport)]
    state = explained.state_bytes
    versions = {
        version: _version([d for d in explained.drawn if d.version == version], report, state)
        for version in ("before", "after")
    }
    warnings = [*report.warnings, *(text for s in report.schedules for text in s.warnings)]
    return {
        "title": title,
        "versions": versions,
        "about": [
            _BEFORE,
            *dict.fromkeys(f"times are for: {s.machine}" for s in report.schedules if s.machine),
            *(f"warning: {text}" for text in dict.fromkeys(warnings)),
        ],
        "passes": [str(p) for p in explained.passes],
        "summary": _summary(versions, sum(s.bound_ms for s in report.schedules)),
        "tables": [*_choices(keeps), *_collectives(report)],
    }


def _version(drawn: Sequence[Drawn], report: CompileReport, state: int) -> dict[str, Any]:
    """Return the bars of each stream and the bytes over time, graph after graph."""
    ranks = {b.group: f", {b.group_size} ranks" for b in report.buckets}
    rows = {row: {key: list[Any]() for key in "bdknz"} for row in ("host", "compute")}
    names, graphs = dict[str, int](), list[dict[str, Any]]()
    times, live, launches, begin_ms = list[float](), list[list[int]](), Counter[str](), 0.0
    for d in drawn:
        nodes, groups, size = d.model.dependencies.nodes, d.model.group, d.model.graph.result_bytes
        for row, kind, i, begin, ms in d.bars():
            node, group = nodes[i], groups[i]
            if group == row and group not in HOST_STREAMS:
                row = f"group {group}{ranks.get(group, '')}"
            moved = max(map(size, [node, *node.all_input_nodes[:1]]))
            nbytes = size(node) if group is None else moved
            number = names.setdefault(_name(d, i), len(names))
            values = (round(begin_ms + begin, 5), round(ms, 5), _KINDS.index(kind), number, nbytes)
            bars = rows.setdefault(row, {key: [] for key in "bdknz"})
            for column, value in zip(bars.values(), values, strict=True):
                column.append(value)
        timeline, held = d.timeline, {**d.live, "state": [state] * len(d.timeline.order)}
        for i, *held_bytes in zip(timeline.order, *(held[part] for part in PARTS), strict=True):
            if groups[i] is None and (not live or held_bytes != live[-1]):
                times.append(round(begin_ms + timeline.begin[i], 5))
                live.append(held_bytes)
        starts = (n for n, g in zip(nodes, groups, strict=True) if g and g not in HOST_STREAMS)
        launches.update(str(collective_kind(start)) for start in starts)
        kernels = zip(groups, d.model.host, strict=True)
        launches["kernels"] += sum(group is None and host > 0 for group, host in kernels)
        limits = [] if d.report is None else [s.limit_bytes for s in d.report.schedules]
        same = [x for x in drawn if x.report is d.report]
        limit = limits[same.index(d)] if len(limits) == len(same) else None
        end, bound = begin_ms + timeline.step_ms, None if limit is None else limit + state
        graphs.append({"stage": d.stage, "begin": begin_ms, "end": end, "bound": bound})
        begin_ms = end
    return {
        "rows": [{"name": name, **columns} for name, columns in rows.items() if columns["b"]],
        "names": [*names],
        "graphs": graphs,
        "times": times,
        "live": list(zip(*live, strict=True)),
        "peak": max(live, key=sum, default=[0] * len(PARTS)),
        "step_ms": begin_ms,
        "exposed_ms": sum(d.timeline.exposed_ms for d in drawn),
        "host_ms": sum(sum(d.model.host) for d in drawn),
        "launches": dict(launches),
    }


def _name(d: Drawn, i: int) -> str:
    """Name a node as a pointer shows it, with its operator and module."""
    node = d.model.dependencies.nodes[i]
    if d.model.group[i] is not None:
        return f"{label(node, d.model.graph.hints)} | {node.name}"
    target = str(node.target).removesuffix(".default")
    # What packs and unpacks a bucket has the first member's module.
    part = "" if d.parts is None else d.parts.of_node.get(node.name)
    module = None if part in ("buckets", "gathered") else module_of(node)
    return f"{node.name} | {target}" + (f" | {module}" if module else "")


_Table = dict[str, Any]


def _table(title: str, empty: str, columns: Columns, items: Iterable[Any]) -> _Table:
    """Describe a table.

    Args:
        empty: shown in the place of a table without rows.
        columns: types are those of a report's, ``list`` for lines that unfold, and ``bar`` for
            bytes on the device, on the host, and computed again.
    """
    rows = [[value(item) for value in columns.values()] for item in items]
    return {"title": title, "empty": empty, "head": [*columns], "rows": rows}


def _places(head: str) -> Columns:
    """Return columns whose values are an item's, one after the other."""
    return {name: operator.itemgetter(i) for i, name in enumerate(head.split(","))}


def _summary(versions: dict[str, Any], bound_ms: float) -> _Table:
    before, after = versions.values()
    bounds = [g["bound"] for g in after["graphs"] if g["bound"] is not None]
    peaks = sizes_text(sum(before["peak"]), sum(after["peak"]), *bounds)
    rows = [
        (
            "step, ms",
            *(f"{v['step_ms']:.2f}" for v in (before, after)),
            f"no order of these nodes takes less than {bound_ms:.2f}",
        ),
        ("exposed, ms", *(f"{v['exposed_ms']:.2f}" for v in (before, after)), _EXPOSED),
        ("host, ms", *(f"{v['host_ms']:.2f}" for v in (before, after)), "its time to launch"),
        ("peak", *peaks[:2], ", ".join(dict.fromkeys(f"bound {text}" for text in peaks[2:]))),
    ]
    for kind in (*COLLECTIVES, "kernels"):
        counts = [v["launches"].get(kind, 0) for v in (before, after)]
        if any(counts):
            name = kind.replace("_", "-").removesuffix("s")
            rows.append((f"{name} launches", *map(str, counts), ""))
    head = ("", "before:n", "after:n", "")
    return {"title": "Summary", "empty": "", "head": head, "rows": rows}


def _choices(keeps: Sequence[KeepReport]) -> Iterator[_Table]:
    """Yield tables of values that stay from forward to backward, and of other bounds."""
    empty = "Nothing was chosen: --memory-gib gives a bound to choose under."
    blocks = {**BLOCK, ":bar": lambda b: (b.on_device, b.on_host, b.again)}
    yield _table("Activations by block", empty, blocks, [b for k in keeps for b in k.blocks])
    units = [u for k in keeps for u in k.shown]
    yield _table("Kept from forward to backward", empty, UNIT, units)
    curve = [point for k in keeps for point in sorted(k.curve)]
    bounds = _places("bound:b,step:ms,peak:b,kept:n")
    yield _table("Other bounds, without the host's time", empty, bounds, curve)


def _payload(bucket: BucketReport) -> list[str]:
    return [
        f"{', '.join(m.fqns) or '-'}: {'x'.join(map(str, m.shape)) or 'scalar'} {m.dtype}, "
        f"{m.nbytes} B at {m.offset}"
        for m in bucket.members
    ]


_BUCKET: Columns = {**BUCKET, "cause": lambda b: b.detail, "payload:list": _payload}


def _of_bucket(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Read a value of the bucket in a pair of graph and bucket."""
    return lambda pair: value(pair[1])


def _collectives(report: CompileReport) -> Iterator[_Table]:
    unmerged = list[Sequence[Any]]()
    for g in report.graphs:
        for x in g.unmerged:
            kind = COLLECTIVES[x.kind].short
            names = ", ".join(x.fqns) or "-"
            unmerged.append(
                (g.stage, kind, x.group, x.wire_bytes, x.closed_by, x.reason, names, x.node)
            )
        for y in g.ineligible:
            names = ", ".join(y.fqns) or "-"
            unmerged.append((g.stage, "-", "-", None, "not eligible", y.reason, names, y.node))
        unmerged += [(g.stage, "-", "-", None, "in no unit", "", x, "") for x in g.uncovered]
    buckets = {"graph": lambda x: x[0].stage}
    buckets |= {name: _of_bucket(value) for name, value in _BUCKET.items()}
    of_graphs = [(g, b) for g in report.graphs for b in g.buckets]
    yield _table("Buckets", "No collectives were merged.", buckets, of_graphs)
    head = _places("graph,kind,group,bytes:b,left by,cause,parameters,node")
    yield _table("Collectives not merged", "All collectives are in buckets.", head, unmerged)
