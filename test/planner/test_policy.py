"""A user's own scheduling policy."""

import importlib
import itertools
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
import torch.fx as fx
from collective_graphs import assert_same, run_all_ranks
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from random_graphs import (
    Trainer,
    backward_graph,
    choose_caps,
    forward_graph,
    machine,
    order_of,
    random_graph,
    real_inputs,
)

import torch_ext_bucketing as teb
from torch_ext_bucketing._source import source_digest
from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import ByCap
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.passes.cache_key import describe
from torch_ext_bucketing.planner.schedule.model import Model, model_of
from torch_ext_bucketing.planner.schedule.policy import Case, Options, Policy, PolicyReport
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.scheduling import schedule
from torch_ext_bucketing.reports.compile import CompileReport

pytestmark = pytest.mark.usefixtures("two_ranks")


def most_in_flight(model: Model, order: Sequence[int]) -> int:
    """Count the most collectives that are between launch and wait at once."""
    now = most = 0
    for i in order:
        now += model.group[i] is not None
        most = max(most, now)
        now -= model.start_of[i] >= 0
    return most


@dataclass(frozen=True, kw_only=True)
class InFlightReport(PolicyReport):
    most_in_flight: int
    in_flight: tuple[int, int]


@dataclass(frozen=True)
class InFlight(Policy):
    """Bound the number of collectives between launch and wait."""

    most: int = 2

    def ask(self, case: Case, options: Options) -> Options:
        return replace(options, depth=min(options.depth, self.most), deadlines=False)

    def misses(self, case: Case, timeline: Timeline) -> float:
        return max(0, most_in_flight(case.model, timeline.order) - self.most) / self.most

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        before = most_in_flight(case.model, case.given.order)
        after = most_in_flight(case.model, timeline.order)
        missed = f"InFlight: {after} collectives are in flight at once, above {self.most}"
        return InFlightReport(
            repr(self),
            f"{before} -> {after} in flight, bound {self.most}",
            missed if after > self.most else "",
            most_in_flight=self.most,
            in_flight=(before, after),
        )


def all_at_once(layers: int = 5) -> fx.GraphModule:
    """Make gathers that all launch first, and reduce-scatters whose waits all come last."""
    gm = forward_graph(layers)
    nodes = list(gm.graph.nodes)
    gathers = [
        n for n in nodes if n.target is torch.ops._c10d_functional.all_gather_into_tensor.default
    ]
    for other, gather in itertools.pairwise(gathers):
        other.append(gather)
    gm.recompile()
    return gm


def reached(gm: fx.GraphModule) -> int:
    model = model_of(gm.graph)
    return most_in_flight(model, range(len(model)))


@pytest.mark.parametrize("most", [1, 2, 3])
def test_it_bounds_and_reports(most: int):
    gm = all_at_once()
    assert reached(gm) == 5
    report = schedule(gm, [teb.Overlap(depth=4), InFlight(most)], machine=machine(2.0))
    assert reached(gm) == most
    assert report.misses == 0
    assert not report.warnings
    assert report.bounds[1].in_flight == (5, most)
    assert report.bounds[1].most_in_flight == most
    assert f"InFlight(most={most})" in report.to_text()
    assert f"5 -> {most} in flight, bound {most}" in report.to_text()
    whole = json.loads(CompileReport(schedules=[report]).to_json())
    assert whole["schedules"][0]["bounds"][1]["in_flight"] == [5, most]


def test_alone_it_changes_only_what_misses_it():
    gm = all_at_once()
    before = order_of(gm)
    assert schedule(gm, InFlight(5)).chosen == "as given"
    assert order_of(gm) == before
    assert schedule(gm, InFlight(2)).chosen.startswith("gathers at their use")
    assert reached(gm) <= 2


def test_a_bound_that_cannot_be_kept_is_a_warning():
    """An operator of unknown effect comes after all launches and before all waits."""
    b = Trainer()
    x, w = b.matrix(), b.matrix()
    waits = [b.start("reduce_scatter", b.mm(x, w)) for _ in range(3)]
    unknown = b.graph.call_function(torch.manual_seed, (0,))
    gm = b.finish(waits)
    for wait in waits:
        unknown.append(wait)
    assert reached(gm) == 3
    with pytest.warns(teb.errors.BoundNotKeptWarning, match="InFlight: 3 collectives .* above 2"):
        report = schedule(gm, [teb.Overlap(), InFlight(2)], machine=machine())
    assert report.misses == 0.5
    assert report.warnings == ("InFlight: 3 collectives are in flight at once, above 2",)


@given(
    seed=st.integers(0, 10**6),
    size=st.integers(1, 12),
    most=st.integers(1, 3),
    merge=st.booleans(),
    ratio=st.floats(0.8, 3),
)
@examples(150)
def test_it_goes_with_the_others(seed: int, size: int, most: int, merge: bool, ratio: float):
    """Values stay equal, and each bound is kept or reported as missed."""
    gm = random_graph(seed, size, ["0"], share=False)
    inputs = real_inputs(gm)
    expected = run_all_ranks(gm, inputs)
    if merge:
        analysis = GraphAnalysis(gm.graph)
        apply_plan(analysis, ByCap(1.0, eligible=lambda start: True).plan(analysis))
    bounds = [InFlight(most), teb.MaxComputeRun(1), teb.PeakMemory(ratio=ratio)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", teb.errors.BoundNotKeptWarning)
        report = schedule(gm, [teb.Overlap(depth=3), *bounds])
    gm.graph.lint()
    assert report.order, report.warnings
    model = model_of(gm.graph)
    line = Timeline.of(model)
    found = report.step_ms[1], report.peak_bytes[1], report.longest_run[1]
    assert found == (pytest.approx(line.step_ms), line.peak_bytes, line.longest_run)
    assert line.step_ms >= model.paths.bound_ms - 1e-9
    assert report.bounds[1].in_flight[1] == reached(gm)
    for name, kept in (
        ("InFlight", reached(gm) <= most),
        ("MaxComputeRun", line.longest_run <= 1),
        ("PeakMemory", line.peak_bytes <= (report.limit_bytes or 0)),
    ):
        assert kept != any(w.startswith(name) for w in report.warnings)
    assert (report.misses > 0) == bool(report.warnings)
    assert_same(run_all_ranks(gm, inputs), expected)


def test_caps_are_chosen_under_it():
    gm = forward_graph(8)
    caps = [0.02, 0.05, 1.0]
    policies = [teb.Overlap(depth=4), InFlight(1), teb.PeakMemory(ratio=10)]
    _, free = choose_caps(gm.graph, policies[::2], caps_mb=caps, machine=machine(2.0))
    _, report = choose_caps(gm.graph, policies, caps_mb=caps, machine=machine(2.0))
    assert report.chosen.misses == 0
    assert report.chosen.step_ms >= free.chosen.step_ms


@dataclass(frozen=True)
class ShortRuns(Policy):
    """Bound buckets alone."""

    def max_bucket_run(self) -> int:
        return 4


def test_of_several_bounds_on_buckets_the_smallest_holds():
    gm = backward_graph(layers=6, products=1)
    policies = [teb.MaxComputeRun(8), ShortRuns()]
    found = []
    for bounds in (policies, policies[::-1], policies[:1]):
        plan, _ = choose_caps(gm.graph, bounds, caps_mb=[100.0], eligible=lambda start: True)
        found.append([(len(b.members), b.closed_by) for b in plan.buckets])
    assert found[0] == found[1]
    assert {closed for _, closed in found[0]} <= {"run", "end"}
    assert all(members <= 2 for members, _ in found[0])
    assert any(members > 2 for members, _ in found[2])


POLICY = """
from dataclasses import dataclass
from torch_ext_bucketing.planner.schedule.policy import Policy

@dataclass(frozen=True)
class Mine(Policy):
    most: int = 2
"""


def test_settings_and_source_are_part_of_the_cache_key(tmp_path, monkeypatch):
    """``test_caches`` edits the source of a pass."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "policy_of_mine.py").write_text(POLICY)
    mine = importlib.import_module("policy_of_mine").Mine
    assert source_digest("policy_of_mine") in repr(describe(mine()))
    lists = [[teb.Overlap()], [teb.Overlap(), mine()], [teb.Overlap(), mine(3)]]
    uuids = {teb.Schedule(policies).uuid() for policies in lists}
    assert None not in uuids
    assert len(uuids) == 3


def test_a_policy_without_known_fields_has_no_key(caplog):
    class Opaque(Policy):
        def __init__(self) -> None:
            self.ask_somebody = object()

    assert teb.Schedule([Opaque()]).uuid() is None
    assert "is not a plain value; give it a uuid()" in caplog.text
