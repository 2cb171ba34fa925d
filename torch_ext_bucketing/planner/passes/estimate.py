"""The pass that times a graph without changing it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from ..._torch.aot import stage_of
from ...graph.collectives import collective_kind
from ...graph.unwrap import GraphLike, graph_of
from ...passes.base import GraphPass, Stage
from ...passes.compilation import Compilation
from ...passes.facts import Baseline, Fact
from ...reports.estimate import EstimateReport
from ..cost.devices import job_machine
from ..cost.machine import Machine
from ..schedule.model import Model, model_of
from ..schedule.timeline import Timeline


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(GraphPass):
    """Add the cost model's times of each graph, as the passes before it leave it, to the report.

    Args:
        machine: the machine to time nodes for; None: :func:`.job_machine`.
    """

    stage: ClassVar[Stage] = "forward_backward"
    requires: ClassVar[tuple[type[Fact], ...]] = (Baseline,)
    machine: Machine | None = None

    def __post_init__(self) -> None:
        self._set(machine=self.machine or job_machine())

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        assert self.machine is not None
        machine = self.machine.for_backend(compilation.fuses, compilation.captured)
        model = model_of(compilation.analysis(graph), machine)
        compilation.report.estimates.append(
            _estimate(model, stage_of(graph_of(graph)), machine.describe())
        )


def _estimate(model: Model, stage: str, machine: str) -> EstimateReport:
    line = Timeline.of(model)
    kinds = {i: collective_kind(n) for i, n in enumerate(model.dependencies.nodes)}
    busy, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    now, last = 0.0, ""
    for i in line.order:
        if model.group[i] is not None:
            last = kinds[i] or "other"
            busy[last] += model.ms[i]
            continue
        if model.start_of[i] >= 0 and line.begin[i] > now:
            exposed[kinds[model.start_of[i]] or "other"] += line.begin[i] - now
        now = line.end[i]
    if line.step_ms > now:  # a collective that no wait of this graph ends
        exposed[last] += line.step_ms - now
    return EstimateReport(
        stage, machine, line.step_ms, line.compute_ms, dict(busy), dict(exposed), line.peak_bytes
    )
