"""An estimate of a graph as it is, alone and in joined reports."""

import pytest
from random_graphs import forward_graph

import torch_ext_bucketing as teb
from torch_ext_bucketing.planner.cost.machine import Machine
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.scheduling import Estimate
from torch_ext_bucketing.reports.compile import CompileReport

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
