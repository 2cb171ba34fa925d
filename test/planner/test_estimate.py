"""Another kind of collective is a row of ``COLLECTIVES``: times, drawings and reports follow it."""

import contextlib
from unittest import mock

import pytest
import torch.distributed as dist
from collective_graphs import C10D
from random_graphs import Builder, forward_graph

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph import nodes as collectives
from torch_ext_bucketing.graph.nodes import COLLECTIVES, CollectiveType, is_collective
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import Level, Machine
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.plot import Drawn, _trace_events, plot
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.scheduling import Estimate
from torch_ext_bucketing.reports.base import change
from torch_ext_bucketing.reports.compile import CompileReport

BROADCAST = C10D.broadcast.default
ROW = CollectiveType(
    "BC",
    (BROADCAST,),
    lambda ranks, part: (0,),
    whole_input=True,
    whole_output=True,
    rounds=1,
    launches=("c10d::broadcast_",),
    input_at=0,
)
LEVELS = Machine(ranks_per_node=2, intra=Level(1e9), inter=Level(1e8))


@contextlib.contextmanager
def with_broadcast():
    """Add a row, as a change of the source would."""
    with (
        mock.patch.dict(COLLECTIVES, {"broadcast": ROW}),
        mock.patch.dict(collectives._KIND_OF_TARGET, {BROADCAST: "broadcast"}),
    ):
        yield


def test_it_is_timed_drawn_and_reported(two_ranks, tmp_path):
    builder = Builder()
    x = builder.shaped((1024,))
    group = dist.group.WORLD.group_name
    start = builder.graph.call_function(BROADCAST, (x, 0, group))
    start.meta["val"] = x.meta["val"]
    wait = builder.graph.call_function(C10D.wait_tensor.default, (start,))
    wait.meta["val"] = x.meta["val"]
    builder.graph.output(wait)
    assert not is_collective(start)
    with with_broadcast():
        assert is_collective(start)
        assert Costs(LEVELS)(start) == pytest.approx(4096 / 2 / 1e9 * 1e3)
        table = {("broadcast", 2): ((8192, 3.0),)}
        model = model_of(builder.graph, Machine(collectives=table))
        assert model.group == [group, None]
        drawn = [Drawn("forward", v, model, Timeline.of(model)) for v in ("before", "after")]
        (one, _) = (e for e in _trace_events(drawn) if e["ph"] == "X")
        assert one["name"] == f"BC {start.name} 0.0 MiB"
        assert one["dur"] == pytest.approx(3.0 * 1e3)
        assert change({"broadcast": 1}, {"broadcast": 2}) == "broadcast 1 -> 2"
        pytest.importorskip("matplotlib")
        plot(drawn, tmp_path / "plot.svg")
        assert "broadcast" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


SLOW = Machine(collectives={(kind, 2): ((1, 9.0),) for kind in ("all_gather", "reduce_scatter")})


def test_an_estimate_is_the_timeline_of_the_graph_as_it_is(two_ranks):
    gm = forward_graph(3)
    before = [n.name for n in gm.graph.nodes]
    report = Estimate(SLOW)(gm)
    assert [n.name for n in gm.graph.nodes] == before
    (e,) = report.estimates
    line = Timeline.of(model_of(gm, SLOW))
    assert (e.step_ms, e.kernels_ms, e.peak_bytes) == (
        line.step_ms,
        line.compute_ms,
        line.peak_bytes,
    )
    assert e.busy_ms.keys() == {"all_gather"}
    assert 0 < sum(e.exposed_ms.values()) == pytest.approx(line.exposed_ms)
    assert all(e.exposed_ms[kind] <= busy for kind, busy in e.busy_ms.items())


def test_estimates_go_through_caches_and_joined_reports(two_ranks):
    report = Estimate(SLOW)(forward_graph(1))
    kept = report.since(0, 0, 0)
    again = CompileReport()
    again.add_cached(kept)
    assert again.estimates == report.estimates
    assert CompileReport.joined([report, again]).estimates == report.estimates * 2
    assert report.since(0, 0, 1).estimates == []
    assert Estimate(SLOW).uuid() != Estimate(teb.Machine()).uuid()
