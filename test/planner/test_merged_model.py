"""Compare the model of a plan with the model of the merged graph."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
from collective_graphs import fake_group
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st
from random_graphs import (
    C10D,
    WORLD,
    Builder,
    choose_caps,
    demo_graphs,
    random_graph,
)

from torch_ext_bucketing.bucketing.pack import merge_buckets
from torch_ext_bucketing.bucketing.plan import ByCap, MergePlan
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.liveness import LiveBytes
from torch_ext_bucketing.graph.nodes import kind_of, tag_of
from torch_ext_bucketing.planner import cap_search as auto_cap
from torch_ext_bucketing.planner.cost.cost import Costs, Machine
from torch_ext_bucketing.planner.schedule.list_schedule import list_schedule, plain_schedule
from torch_ext_bucketing.planner.schedule.merged_model import merged_model
from torch_ext_bucketing.planner.schedule.model import Model, model_of
from torch_ext_bucketing.planner.schedule.orders import schedule_model
from torch_ext_bucketing.planner.schedule.policy import Case, MaxComputeRun, Overlap, PeakMemory
from torch_ext_bucketing.planner.schedule.timeline import Timeline, step_ms

# Kernel times grow with bytes, however few. Launches take next to nothing, each its own time.
SLOW = Machine(
    bandwidth=1e6,
    kernel_ms=1e-9,
    host_ms={"kernel": 1e-9, "all_gather": 1e-8, "reduce_scatter": 1e-7, "all_reduce": 1e-6},
)


@pytest.fixture(scope="module", autouse=True)
def world():
    with fake_group(WORLD):
        yield


def both(graph: fx.Graph, plan: MergePlan, machine: Machine = SLOW) -> tuple[Model, Model]:
    """Merge a graph; return the planned model and the model of the merged graph."""
    costs = Costs(machine)
    planned = merged_model(model_of(graph, costs).compact, plan.buckets, costs)
    assert planned is not None
    merge_buckets(GraphAnalysis(graph), plan)
    return planned, model_of(graph, costs)


def check_is_model(model: Model) -> None:
    """Check that nodes come after what they need, and touch only live storages."""
    assert model.dependencies.is_order(range(len(model)))
    last: dict[object, int] = {}
    for i, (group, needs) in enumerate(zip(model.group, model.dependencies.needs, strict=True)):
        if group is not None:
            key = (group, kind_of(model.dependencies.nodes[i]))
            assert key not in last or last[key] in needs
            last[key] = i
    live = set(range(len(model.liveness.size)))
    live -= {s for new in model.liveness.allocates for s in new}
    for new, touched in zip(model.liveness.allocates, model.liveness.touches, strict=True):
        assert live.isdisjoint(new)
        live.update(new)
        assert live.issuperset(touched)


def bytes_left(model: Model) -> int:
    live = LiveBytes(model.liveness)
    for i in range(len(model)):
        live.run(i)
    return live.now


@given(seed=st.integers(0, 10**6), size=st.integers(2, 16), cap=st.integers(50, 3000))
@example(598, 4, 64)  # a write to what a bucket packs does not wait for the bucket
@example(320, 12, 552)  # an item that waits for several others
@example(266, 11, 556)  # a gather of a result of an earlier bucket
@example(926355, 16, 2563)  # a collective of one result of a bucket, and one of another
@examples(200)
def test_times_are_those_of_the_merged_graph(seed, size, cap):
    gm = random_graph(seed, size, ["0"], share=False)
    plan = ByCap(cap / 2**20, eligible=lambda start: True).plan(GraphAnalysis(gm.graph))
    planned, merged = both(gm.graph, plan)
    check_is_model(planned)
    ours, theirs = Timeline.of(planned), Timeline.of(merged)
    assert ours.step_ms == pytest.approx(theirs.step_ms)
    assert ours.compute_ms == pytest.approx(theirs.compute_ms)
    assert sum(planned.host) == pytest.approx(sum(merged.host))
    assert ours.longest_run == theirs.longest_run
    assert planned.paths.bound_ms == pytest.approx(merged.paths.bound_ms)
    assert planned.paths.bound_ms <= ours.step_ms * (1 + 1e-9)
    launched = [
        [(g, kind_of(n)) for g, n in zip(m.group, m.dependencies.nodes, strict=True) if g]
        for m in (planned, merged)
    ]
    assert launched[0] == launched[1]


def test_fused_gradient_is_written_into_its_bucket():
    b, starts = Builder(), []
    for _ in range(2):
        x, y = (b.leaf(256, torch.float32) for _ in range(2))
        gradient = b.op(torch.ops.aten.mul.Tensor, x, y)
        args = (gradient, "sum", WORLD, "0")
        starts.append(b.call(C10D.reduce_scatter_tensor.default, args, 256 // WORLD, torch.float32))
    gm = b.finish(
        [b.call(C10D.wait_tensor.default, (s,), 256 // WORLD, torch.float32) for s in starts]
    )
    plan = ByCap(1.0, kinds=("reduce_scatter",), eligible=lambda start: True).plan(
        GraphAnalysis(gm.graph)
    )
    assert plan.buckets
    planned, merged = both(gm.graph, plan, replace(SLOW, fuses=True))
    moved = 2 * 3 * 4 * 256  # two products of two values each
    expected = pytest.approx(SLOW.kernel_ms + moved / SLOW.bandwidth * 1e3)
    ours, theirs = Timeline.of(planned), Timeline.of(merged)
    assert ours.compute_ms == theirs.compute_ms == expected
    assert ours.peak_bytes == theirs.peak_bytes


@pytest.fixture(scope="module")
def traced(world):
    return demo_graphs()


POLICIES = [Overlap(), PeakMemory(ratio=1.1), MaxComputeRun(3)]


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.parametrize("cap", [0.05, 0.3, 100.0])
def test_schedules_of_a_traced_model(traced, stage, cap):
    graph = copy.deepcopy(traced[stage]).graph
    plan = ByCap(cap, kinds=("all_gather", "reduce_scatter")).plan(GraphAnalysis(graph))
    assert plan.buckets
    planned, merged = both(graph, plan)
    check_is_model(planned)
    assert Timeline.of(planned).peak_bytes == Timeline.of(merged).peak_bytes
    assert bytes_left(planned) == bytes_left(merged)
    ours, theirs = (schedule_model(m, POLICIES, None, quick=True)[0] for m in (planned, merged))
    assert ours.step_ms == pytest.approx(theirs.step_ms)
    assert ours.longest_run == theirs.longest_run
    assert ours.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.01)


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_no_order_depends_on_views(traced, stage):
    graph = copy.deepcopy(traced[stage]).graph
    costs, bound = Costs(), PeakMemory(ratio=1.1)
    plan = ByCap(0.3, kinds=("all_gather", "reduce_scatter")).plan(GraphAnalysis(graph))
    viewed = model_of(graph, costs)
    alone = [merged_model(m, plan.buckets, costs) for m in (viewed, viewed.compact)]
    assert len(alone[1]) < 0.8 * len(alone[0])
    check_is_model(alone[1])
    found = []
    for model in alone:
        case = Case(model, Timeline.of(model), Timeline.of(model).peak_bytes)
        sorts = [bound.ask(case, sort) for _, sort in Overlap().candidates(case, quick=False)]
        orders = [plain_schedule(model), *(list_schedule(model, sort) for sort in sorts)]
        lines = [Timeline.of(model, order) for order in orders]
        found.append([(line.step_ms, line.peak_bytes) for line in lines])
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_nodes_that_run_nothing_follow_their_readers(traced, stage, fuses):
    analysis = GraphAnalysis(copy.deepcopy(traced[stage]).graph, fuses=fuses)
    model = model_of(analysis, replace(SLOW, fuses=fuses))
    compact, nodes = model.compact, model.dependencies.nodes
    assert len(compact) < (0.6 if fuses else 0.8) * len(model)
    check_is_model(compact)
    assert compact.compact is compact
    assert compact.paths.bound_ms == model.paths.bound_ms
    found = set()
    for _, options in Overlap().candidates(Case(compact, Timeline.of(compact), 0), quick=False):
        order = list_schedule(compact, options)
        whole = model.expanded(order)
        assert model.dependencies.is_order(whole)
        kept = [compact.dependencies.nodes[i] for i in order]
        assert [n for n in (nodes[i] for i in whole) if n in {*kept}] == kept
        line = Timeline.of(compact, order)
        assert step_ms(model, whole) == line.step_ms
        assert model.liveness.peak(whole) == line.peak_bytes
        found.add(tuple(whole))
    assert len(found) > 1
    # The graph's own order stays, node by node.
    assert list(model.expanded(range(len(compact)))) == list(range(len(model)))


def test_nodes_without_time_may_hold_bytes_and_storages(traced):
    model = model_of(copy.deepcopy(traced["backward"]).graph, Costs(SLOW))
    live, size, users = model.liveness, model.liveness.size, model.dependencies.needed_by

    def dropped(changed: Model) -> set[int]:
        return {i for i, place in enumerate(changed._compact[1]) if place < 0}

    alone = dropped(model)
    timeless = replace(model, ms=[0.0] * len(model), host=[0.0] * len(model))
    assert alone == dropped(timeless)  # nodes with bytes stay
    # Collectives, their waits and compute nodes stay in any case.
    empty = replace(timeless, liveness=replace(live, size=[0] * len(size)))
    rows = zip(model.group, model.start_of, model.compute, strict=True)
    stay = {i for i, (group, start, counts) in enumerate(rows) if group or start >= 0 or counts}
    assert dropped(empty).isdisjoint(stay)
    assert len(dropped(empty)) > len(alone)
    launched = replace(timeless, host=[1.0] * len(model), view=[False] * len(model))
    assert not dropped(launched)
    # A view whose users leave its storage alone keeps it live.
    view = next(i for i in sorted(alone) if any(size[s] for s in live.touches[i]))
    touches = [() if i in users[view] else used for i, used in enumerate(live.touches)]
    apart = replace(model, liveness=replace(live, touches=touches))
    assert view in alone - dropped(apart)


@pytest.mark.parametrize("stage", ["forward", "backward"])
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.planner.scheduling.BoundNotKeptWarning")
def test_the_search_chooses_as_it_would_by_merging(traced, stage, monkeypatch):
    search = {"caps_mb": (0.05, 0.3, 1.0, 4.0), "machine": SLOW}
    plan, report = choose_caps(traced[stage].graph, POLICIES, **search)
    monkeypatch.setattr(auto_cap, "merged_model", lambda *args: None)
    by_merging, theirs = choose_caps(traced[stage].graph, POLICIES, **search)
    assert plan.buckets == by_merging.buckets
    assert report.caps_mb == theirs.caps_mb
    assert [t.caps_mb for t in report.tried] == [t.caps_mb for t in theirs.tried]


def test_a_bucket_is_found_by_the_parameters_of_all_its_members(traced):
    graph = traced["forward"].graph
    plan = ByCap(0.3, kinds=("all_gather",)).plan(GraphAnalysis(graph))
    costs = Costs()
    model = merged_model(model_of(graph, costs), plan.buckets, costs)
    assert model is not None
    assert set(model.members.values()) == {b.members for b in plan.buckets}
    uses = model.analysis.first_uses()
    assert all(start in uses for start in model.members)
    late, early = (tag_of(b.members[-1]).fqns[0] for b in (plan.buckets[-1], plan.buckets[0]))
    overlap = Overlap(prefetch_under={late: early})
    assert schedule_model(model, overlap, None, quick=True)[0].notes == ()


def test_members_on_both_sides_of_a_side_effect_are_tried_by_merging():
    b = Builder(share=False)
    p, q = b.leaf(WORLD * 8, torch.float32), b.leaf(WORLD * 8, torch.float32)
    first = b.collective("reduce_scatter", p, "0")
    b.graph.call_function(torch.manual_seed, (0,))
    gm = b.finish([first, b.collective("reduce_scatter", q, "0")])
    options = {"eligible": lambda start: True}
    plan = ByCap(1.0, **options).plan(GraphAnalysis(gm.graph))
    costs = Costs()
    assert [len(bucket.members) for bucket in plan.buckets] == [2]
    assert merged_model(model_of(gm.graph, costs), plan.buckets, costs) is None
    chosen, report = choose_caps(gm.graph, Overlap(), caps_mb=(1.0,), **options)
    assert chosen.buckets == plan.buckets
    assert report.tried
