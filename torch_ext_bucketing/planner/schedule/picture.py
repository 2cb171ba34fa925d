"""Divide live bytes among their purposes, for pages, and write timelines as a trace.

Each storage has one part, by the nodes that make and read it::

    forward    w -> cast -> pack -> AG -> wait -> clone -> mm -----------> output
               |    '----- buckets -----------'   gathered '- activations: backward reads it
               parameters

    backward   mm -> view -> pack -> RS -> wait -> view -> output
               gradients     buckets '--- gradients: the caller keeps them

A collective in no bucket has no pack: its result is ``gathered``, or gradients.

Perfetto (https://ui.perfetto.dev) and ``chrome://tracing`` show the trace.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.fx as fx

from ..._torch.aot import from_forward
from ...fsdp.rank_order import SUM
from ...fsdp.tagging import FqnOf, gradients_of, named_inputs
from ...graph.analysis import GraphAnalysis
from ...graph.layout import fills_buffer
from ...graph.liveness import Storages, workspace_bytes
from ...graph.nodes import (
    COLLECTIVES,
    collective_kind,
    host_stream,
    is_bucket,
    is_collective,
    member_tags,
    replaced_kind,
    tag_of,
)
from ...graph.sizes import SizeHints
from ...graph.values import CONSTANTS, SCALES, is_move
from ...passes.base import Compilation
from ...reports.compile import CompileReport
from ..cost.machine import Machine
from .model import Model, model_of
from .timeline import Timeline

PARTS = {
    "parameters": "shards of parameters",
    "state": "the optimizer's state",
    "gradients": "gradients of parameters, before and after their reduction",
    "gathered": "unsharded parameters",
    "activations": "inputs, what forward saves for backward, and what backward computes again",
    "buckets": "packed buffers of collectives, and what is cast for them",
    "workspace": "values that a graph makes and frees itself, and cuBLAS's workspaces",
}
"""The parts, from those that last longest, with what each contains."""


@dataclass(frozen=True)
class Parts:
    """The part of each storage of a graph.

    Args:
        of_storage: by number of the storage.
        of_node: by name of the node, for nodes with a part of their own.
        beside: bytes that are live all the time and in no storage.
    """

    of_storage: Sequence[str]
    of_node: Mapping[str, str]
    beside: Mapping[str, int]

    @staticmethod
    def of(
        analysis: GraphAnalysis, fqn_of: FqnOf | None = None, saved: Mapping[str, str] | None = None
    ) -> Parts:
        """Find the parts of a forward, backward or inference graph with tags.

        Args:
            analysis: of the graph.
            fqn_of: names parameters among the inputs, see :func:`.tag_joint_graph`.
            saved: for a backward graph, :attr:`of_node` of its forward graph.
        """
        live, part = analysis.liveness, _parts_of_nodes(analysis, fqn_of, saved or {})
        of_storage = [""] * len(live.size)
        for node, storages in live.of_node.items():
            for s in storages:
                of_storage[s] = of_storage[s] or part.get(node, "")
        # Views of a bucket are of its buffer.
        for start in filter(is_bucket, part):
            for s in live.of_node[start]:
                of_storage[s] = part[start] if s in live.kept else "buckets"
            for s in live.of_node[start.all_input_nodes[0]]:
                of_storage[s] = "buckets"
        rest = "workspace" if analysis.stage == "backward" else "activations"
        for s, part_of_storage in enumerate(of_storage):
            of_storage[s] = part_of_storage or (rest if s in live.kept else "workspace")
        workspaces = workspace_bytes(analysis.graph)
        outside = {"parameters": analysis.external_live_bytes - workspaces, "workspace": workspaces}
        return Parts(of_storage, {n.name: p for n, p in part.items()}, outside)

    def profile(self, live: Storages, order: Sequence[int]) -> dict[str, list[int]]:
        """Return, for each part, the bytes live while each node of ``order`` runs.

        They add up to :meth:`.Storages.profile`.
        """
        profiles, allocated = {}, set(itertools.chain.from_iterable(live.allocates))
        for part in PARTS:
            storages = zip(live.size, self.of_storage, strict=True)
            size = [nbytes if storage_part == part else 0 for nbytes, storage_part in storages]
            at_start = sum(nbytes for s, nbytes in enumerate(size) if s not in allocated)
            at_start += self.beside.get(part, 0)
            profiles[part] = replace(live, size=size, at_start=at_start).profile(order)
        return profiles


def _parts_of_nodes(
    analysis: GraphAnalysis, fqn_of: FqnOf | None, saved: Mapping[str, str]
) -> dict[fx.Node, str]:
    """Map each node to the part of memory that its result counts for."""
    graph, part = analysis.graph, dict[fx.Node, str]()
    parameters = set(named_inputs(graph, fqn_of).values())
    for node in analysis.nodes:
        input_parts = {part.get(n) for n in node.all_input_nodes if n.target not in CONSTANTS}
        if node.op == "placeholder":
            other = saved.get(node.name, "activations")
            part[node] = "parameters" if node in parameters else other
        elif replaced_kind(node) == "all_gather":
            if tag_of(node) is not None:
                part[node] = "gathered"
        elif input_parts and input_parts <= {"parameters", "gathered"} and is_move(node):
            part[node] = "gathered"
        elif analysis.stage == "backward" and from_forward(node):
            part[node] = "activations"
    gathers = [n for n, node_part in part.items() if node_part == "gathered" and is_collective(n)]
    fills = _back(
        [n for start in gathers for n in start.all_input_nodes],
        fills_buffer,
    )
    for node in fills:
        if node.op != "placeholder":
            part[node] = "buckets"
    for node in _back([n for n, _ in gradients_of(graph, fqn_of)], _keeps_gradient):
        if node.op != "placeholder":
            part[node] = "gradients"
    return part


def _back(nodes: Iterable[fx.Node], goes_on: Callable[[fx.Node], bool]) -> dict[fx.Node, None]:
    """Collect ``nodes`` and, from each node where ``goes_on`` is true, its inputs in turn."""
    collected, stack = dict[fx.Node, None](), list(nodes)
    while stack:
        node = stack.pop()
        if node not in collected:
            collected[node] = None
            stack += node.all_input_nodes if goes_on(node) else ()
    return collected


def _keeps_gradient(node: fx.Node) -> bool:
    """Return whether a gradient's bytes or their sum over ranks go through ``node``."""
    scales = node.target in SCALES and len(node.all_input_nodes) == 1
    return is_move(node) or is_collective(node) or scales or node.target is SUM


@dataclass(frozen=True, eq=False)
class Drawn:
    """One order of the graph of ``stage``.

    Args:
        version: ``"before"`` or ``"after"`` passes.
        report: of the compile. Its graphs have one report, and graph breaks make several compiles.
        parts: of :attr:`model`'s storages.
    """

    stage: str
    version: str
    model: Model
    timeline: Timeline
    report: CompileReport | None = None
    parts: Parts | None = None

    @staticmethod
    def of(
        graph: fx.Graph,
        version: str,
        machine: Machine,
        compilation: Compilation,
        earlier: Sequence[Drawn],
    ) -> Drawn:
        """Return the order that ``graph`` has.

        Args:
            earlier: a backward graph's forward graph is one of them.
        """
        report, analysis = compilation.report, compilation.analysis(graph)
        model = model_of(analysis, machine)
        saved: dict[str, str] = {}
        for d in reversed(earlier):  # the partitioner's names are those before passes
            if d.report is report and d.parts is not None:
                saved.update(d.parts.of_node)
        parts = Parts.of(model.graph, compilation.input_fqns, saved)
        return Drawn(analysis.stage, version, model, Timeline.of(model), report, parts)

    @cached_property
    def live(self) -> dict[str, list[int]]:
        """Bytes live while each node of the order runs, by part (:data:`.PARTS`)."""
        assert self.parts is not None
        return self.parts.profile(self.model.liveness, self.timeline.order)

    @property
    def groups(self) -> list[str]:
        """Process groups and streams of copies, in the order of the graph."""
        return list(dict.fromkeys(g for g in self.model.group if g is not None))

    def bars(self) -> Iterator[tuple[str, str, int, float, float]]:
        """Yield launches and nodes that take time: row, kind, place, begin and milliseconds.

        A row is ``"host"``, ``"compute"`` or one of :attr:`groups`; so is a kind, but for those of
        collectives and ``"copy"``.
        """
        model, timeline = self.model, self.timeline
        for i, launched in zip(timeline.order, timeline.launched, strict=True):
            if host_ms := model.host[i]:
                yield "host", "host", i, launched - host_ms, host_ms
            if model.ms[i] > 0:
                row, kind = model.group[i] or "compute", "compute"
                if model.group[i] is not None:
                    kind = collective_kind(model.dependencies.nodes[i]) or "copy"
                yield row, kind, i, timeline.begin[i], model.ms[i]


def label(start: fx.Node, hints: SizeHints | None = None) -> str:
    """Describe a collective by kind, modules and size, or a copy by its stream and size."""
    hints = hints or SizeHints()
    fqns = list(dict.fromkeys(f for tag in member_tags(start) for f in tag.fqns))
    modules = list(dict.fromkeys(".".join(f.split(".")[:2]) for f in fqns))
    val = start.meta.get("val")
    size = "" if val is None else f" {hints(val.numel()) * val.dtype.itemsize / 2**20:.1f} MiB"
    names = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    count = f" ({len(fqns)} parameters)" if len(fqns) > 1 else ""
    collective = COLLECTIVES.get(str(collective_kind(start)))
    kind = host_stream(start) if collective is None else collective.short
    return f"{kind} {names or start.name}{count}{size}"


def _trace_events(drawn: Sequence[Drawn]) -> Iterator[dict[str, Any]]:
    """Yield Chrome trace events: one process per version, its graphs one after the other.

    Each process has a row for the host, one for computation, one for each process group, and a
    counter of live bytes.
    """
    versions = list(dict.fromkeys(d.version for d in drawn))
    for pid, version in enumerate(versions, 1):
        yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": version}}
        graphs = [d for d in drawn if d.version == version]
        groups = dict.fromkeys(group for d in graphs for group in d.groups)
        rows = {row: tid for tid, row in enumerate(["host", "compute", *groups])}
        row = {"ph": "M", "pid": pid, "name": "thread_name"}
        for name, tid in rows.items():
            yield {**row, "tid": tid, "args": {"name": f"group {name}" if tid > 1 else name}}
        offset = 0.0
        for d in graphs:
            yield from _events(d, pid, rows, offset)
            offset += d.timeline.step_ms


def _events(d: Drawn, pid: int, rows: Mapping[str, int], offset: float) -> Iterator[dict[str, Any]]:
    nodes, groups, timeline = d.model.dependencies.nodes, d.model.group, d.timeline
    for i, live in zip(timeline.order, timeline.live, strict=True):
        if groups[i] is None:
            ts, gib = (offset + timeline.begin[i]) * 1e3, {"GiB": round(live / 2**30, 6)}
            yield {"ph": "C", "pid": pid, "name": "live GiB", "ts": ts, "args": gib}
    for row, _, i, begin, ms in d.bars():
        node = nodes[i]
        yield {
            "ph": "X",
            "pid": pid,
            "tid": rows[row],
            "name": node.name if groups[i] is None else label(node, d.model.graph.hints),
            "ts": (offset + begin) * 1e3,
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
