"""Planners of buckets: one protocol, for ours and a user's, and no choice by a name."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collective_graphs import fake_group
from random_graphs import WORLD, Trainer, backward_graph, forward_graph, machine
from sharded_models import Keep
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.bucketing.contraction import Bucket, MergePlan, checked_plan
from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import ByCap
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import kind_of
from torch_ext_bucketing.planner.cap_search import BySearch
from torch_ext_bucketing.planner.scheduling import schedule
from torch_ext_bucketing.testing.training import ModelConfig, Transformer

PAGE = Path(teb.__file__).parent / "docs" / "extending.md"
_, EXAMPLE, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
EVERY_START = ByCap(eligible=lambda start: True)


@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.BoundNotKeptWarning")
def test_a_planner_of_a_users_own(fake_world: int):
    """The search and the choice of what is kept plan with it."""
    scope: dict[str, Any] = {}
    exec(EXAMPLE, scope)
    several = scope["SeveralLayers"]
    torch._dynamo.reset()
    model = teb.data_parallel(
        Transformer(ModelConfig(layers=2)), init_device_mesh("cpu", (dist.get_world_size(),))
    )
    backend = teb.backend(Keep(), scope["passes"], model, agree=False)
    with mock.patch.object(several, "plan", autospec=True, side_effect=several.plan) as plan:
        compiled = torch.compile(model, backend=backend)
        compiled(torch.zeros(1, 16, dtype=torch.long)).float().sum().backward()
    # Forward and backward: as models before the partitioner runs, and as graphs after it.
    stages = [call.args[1].stage for call in plan.call_args_list]
    assert len(stages) == 4
    for made in backend.last_report().schedules:
        tried = [t.planner for t in made.caps.tried if t.planner]
        assert tried in ([], ["SeveralLayers(layers=2)"])  # none where its step is longer


@dataclass(frozen=True)
class Whole:
    """All collectives of a graph in one bucket, whatever depends on what."""

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        starts = tuple(analysis.collectives)
        return MergePlan((Bucket("all_gather", None, starts),))


@dataclass(frozen=True)
class Erases:
    """Changes the graph."""

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        analysis.graph.erase_node(next(reversed(analysis.graph.nodes)))
        return MergePlan()


def test_a_plan_that_is_chosen_is_carried_out():
    @dataclass(frozen=True)
    class Pair:
        def plan(self, analysis: GraphAnalysis) -> MergePlan:
            return MergePlan((Bucket("all_gather", None, tuple(analysis.collectives)[-2:]),))

    with fake_group(WORLD):
        graph = forward_graph(4).graph
        # Each cap merges all or nothing, and what is left alone is slow.
        search = BySearch((teb.Overlap(),), EVERY_START, caps_mb=[1e-3], machine=machine(9.0))
        found = replace(search, planners=(Pair(),)).search(GraphAnalysis(graph))
        assert found.report.chosen.planner == repr(Pair())
        assert found.report.summary() == f"{Pair()!r}, of 2 tried"
        assert found.report.chosen.step_ms < found.report.tried[0].step_ms
        assert len(apply_plan(GraphAnalysis(graph), found.plan)) == 1


def test_a_plan_that_can_not_be_carried_out_is_refused():
    with fake_group(WORLD):
        b = Trainer()
        graph = b.finish([b.start("all_gather", b.start("all_gather", b.matrix()))]).graph
        analysis = GraphAnalysis(graph)
        first, second = (n.name for n in graph.nodes if kind_of(n))
        text = rf"Whole\(\) can't put {second} into a bucket: {second} needs the result of {first}"
        with pytest.raises(ValueError, match=text):
            checked_plan(Whole(), analysis)
        with pytest.raises(RuntimeError, match=r"the planner Erases\(\) failed") as error:
            BySearch((), EVERY_START, planners=(Erases(),)).search(analysis)
        assert "changed the graph" in str(error.value.__cause__)


def searched(graph: Any) -> tuple[list[Any], list[str]]:
    bounds = (teb.Overlap(), teb.PeakMemory(ratio=1.1))
    search = BySearch(bounds, EVERY_START, machine=machine(2.0))
    plan, report, sort = search.search(GraphAnalysis(graph))
    buckets = [[m.name for m in b.members] for b in plan.buckets]
    apply_plan(GraphAnalysis(graph), plan)
    made = schedule(graph, bounds, machine=machine(2.0), like=sort)
    tried = [(t.caps_mb, t.step_ms, t.peak_bytes) for t in report.tried]
    orders = [(step, peak) for _, step, peak in made.alternatives]
    names = [name for name, _, _ in made.alternatives]
    return [buckets, tried, orders, made.order], names


@pytest.mark.parametrize("graph", [lambda: forward_graph(8), lambda: backward_graph(6)])
def test_no_plan_or_schedule_depends_on_the_names_of_orders(graph, monkeypatch):
    with fake_group(WORLD):
        found, names = searched(graph().graph)
        candidates = teb.Overlap.candidates
        monkeypatch.setattr(
            teb.Overlap,
            "candidates",
            lambda *a: [("as given", options) for _, options in candidates(*a)],
        )
        again, others = searched(graph().graph)
    assert found == again
    assert names != others
