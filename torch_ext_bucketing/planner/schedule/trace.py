"""Timelines as a trace for Perfetto (https://ui.perfetto.dev) or ``chrome://tracing``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.fx as fx

from ...graph.collectives import COLLECTIVES, collective_kind
from ...graph.host_copies import host_stream
from ...graph.size_hints import SizeHints
from ...graph.tags import member_tags, tag_of
from .model import Model
from .timeline import Timeline


@dataclass(frozen=True)
class Drawn:
    """One order of the graph of ``stage``; ``version`` is ``"before"`` or ``"after"`` passes."""

    stage: str
    version: str
    model: Model
    timeline: Timeline


def label(start: fx.Node, hints: SizeHints | None = None) -> str:
    """Describe a collective by kind, modules and size, or a copy by its stream and size."""
    hints = hints or SizeHints()
    tags = [t for t in (*member_tags(start), tag_of(start)) if t is not None]
    fqns = list(dict.fromkeys(f for t in tags for f in t.fqns))
    modules = list(dict.fromkeys(".".join(f.split(".")[:2]) for f in fqns))
    val = start.meta.get("val")
    size = "" if val is None else f" {hints(val.numel()) * val.dtype.itemsize / 2**20:.1f} MiB"
    names = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    count = f" ({len(fqns)} parameters)" if len(fqns) > 1 else ""
    known = COLLECTIVES.get(str(collective_kind(start)))
    kind = host_stream(start) if known is None else known.short
    return f"{kind} {names or start.name}{count}{size}"


def _trace_events(drawn: Sequence[Drawn]) -> Iterator[dict[str, Any]]:
    """Yield Chrome trace events: one process per version, its graphs one after the other.

    Each process has a row for the host, one for computation, one for each process group, and a
    counter of live bytes.
    """
    versions = list(dict.fromkeys(d.version for d in drawn))
    for pid, version in enumerate(versions, 1):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": version}}
        mine = [d for d in drawn if d.version == version]
        groups = list(dict.fromkeys(g for d in mine for g in d.model.group if g is not None))
        row = {"ph": "M", "pid": pid, "name": "thread_name"}
        for tid, name in enumerate(["host", "compute", *(f"group {g}" for g in groups)]):
            yield {**row, "tid": tid, "args": {"name": name}}
        offset = 0.0
        for d in mine:
            yield from _events(d, pid, groups, offset)
            offset += d.timeline.step_ms


def _events(d: Drawn, pid: int, groups: list[str], offset: float) -> Iterator[dict[str, Any]]:
    nodes, timeline = d.model.dependencies.nodes, d.timeline
    for i, live, launched in zip(timeline.order, timeline.live, timeline.launched, strict=True):
        begin_us = (offset + timeline.begin[i]) * 1e3
        group = d.model.group[i]
        if group is None:
            gib = {"GiB": round(live / 2**30, 6)}
            yield {"ph": "C", "pid": pid, "name": "live GiB", "ts": begin_us, "args": gib}
        node, host_ms = nodes[i], d.model.host[i]
        row = 1 if group is None else 2 + groups.index(group)
        launch_us = (offset + launched - host_ms) * 1e3
        for tid, ts, ms in ((0, launch_us, host_ms), (row, begin_us, d.model.ms[i])):
            if ms > 0:
                yield {
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "name": node.name if group is None else label(node, d.model.graph.hints),
                    "ts": ts,
                    "dur": ms * 1e3,
                    "args": {"stage": d.stage, "node": node.name, "target": str(node.target)},
                }


def write_trace(drawn: Sequence[Drawn], path: Path) -> None:
    """Write timelines as a Chrome trace.

    Raises:
        OSError: the file can't be written.
    """
    document = {"traceEvents": list(_trace_events(drawn)), "displayTimeUnit": "ms"}
    path.write_text(json.dumps(document), encoding="utf-8")
