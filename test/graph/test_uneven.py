"""Ranks whose shards differ in size make the same plan and launch in the same order."""

import copy
import warnings

import pytest
import torch
import torch.fx as fx
from collective_graphs import fake_group
from random_graphs import choose_caps
from sharded_models import TwoBlocks
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import ByCap
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import kind_of, member_tags, tag_of
from torch_ext_bucketing.graph.sizes import ShardSide, shard_side
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.planner.cost.cost import Costs, Machine
from torch_ext_bucketing.planner.resharding import ReshardAfterForward
from torch_ext_bucketing.planner.schedule.merged_model import merged_model
from torch_ext_bucketing.planner.schedule.model import model_of, peak_bytes
from torch_ext_bucketing.planner.schedule.policy import MaxComputeRun, Overlap, PeakMemory
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.scheduling import schedule

pytestmark = pytest.mark.torch

WORLD = 2
CAPS_MB = (0.0002, 0.0005, 0.002)


def graphs(rank, world=WORLD, **sizes):
    """Return one rank's forward and backward graph of a model, unbucketed, by stage."""
    kept = []

    def keep(gm, inputs):
        kept.append(copy.deepcopy(gm))
        return gm

    with fake_group(world, rank):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = TwoBlocks(**sizes)
        data_parallel(model, init_device_mesh("cpu", (world,)), param_dtype=torch.bfloat16)
        compiled = torch.compile(model, backend=backend(keep, [ReshardAfterForward()]))
        compiled(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    return kept


@pytest.fixture(scope="module")
def uneven():
    return [graphs(rank, dim=9, vocabulary=13) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def even():
    return graphs(0, dim=8, vocabulary=12)


@pytest.fixture(autouse=True)
def group():
    with fake_group(WORLD):
        yield


def names(start: fx.Node):
    tags = [t for t in (*member_tags(start), tag_of(start)) if t is not None]
    return kind_of(start), tuple(dict.fromkeys(f for t in tags for f in t.fqns))


def members(plan):
    return [(b.kind, tuple(names(m) for m in b.members)) for b in plan.buckets]


def nbytes(nodes):
    """Count bytes, each storage once."""
    values = [n.meta["val"] for n in nodes]
    storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def launches(gm):
    """Schedule several caps under several bounds; return the reports and launch orders."""
    found = []
    bounds = [
        [Overlap()],
        [Overlap(depth=2, window=4), PeakMemory(ratio=1.0)],
        [Overlap(depth=0, window=0), PeakMemory(ratio=1.3), MaxComputeRun(1)],
        [PeakMemory(ratio=1.0)],
    ]
    for cap in CAPS_MB:
        for policies in bounds:
            mine = copy.deepcopy(gm)
            reference = peak_bytes(mine)
            apply_plan(GraphAnalysis(mine.graph), ByCap(cap).plan(GraphAnalysis(mine.graph)))
            report = schedule(mine, policies, reference_bytes=reference)
            order = [names(n) for n in mine.graph.nodes if kind_of(n)]
            found.append((report.chosen, report.step_ms, report.peak_bytes, order))
    plan, search = choose_caps(gm.graph, bounds[1], caps_mb=(0.0002, 0.0005, 0.002))
    return [*found, (members(plan), search.caps_mb)]


def test_plans_and_schedules(uneven):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some bounds are too low
        for first, second in zip(*uneven, strict=True):
            assert len(first.graph.nodes) < len(second.graph.nodes)  # the ranks' graphs differ
            assert launches(first) == launches(second)


def test_shards_count_as_many_bytes_as_the_largest_ranks(uneven):
    """Estimates equal the real bytes of rank 0, which has the most rows."""
    for stages in zip(*uneven, strict=True):
        found = []
        for gm in stages:
            counted = GraphAnalysis(gm.graph).liveness
            kept = sum(counted.size[s] for s in counted.kept)
            found.append((counted.at_start, kept, counted.peak(range(len(counted.touches)))))
        assert found[0] == found[1]
        graph = stages[0].graph
        at_start, kept, _ = found[0]
        assert at_start == nbytes(n for n in graph.nodes if n.op == "placeholder" and n.users)
        assert kept >= nbytes(graph.output_node().all_input_nodes) > 0


def test_nothing_is_left_out_of_even_graphs(even, uneven):
    for gm in even:
        assert shard_side(gm.graph) == ShardSide()
    for stages in uneven:
        for gm in stages:
            side = shard_side(gm.graph)
            assert side.nodes
            assert not any(kind_of(n) for n in side.nodes)


@pytest.mark.parametrize("phase", [0, 1], ids=["forward", "backward"])
def test_a_merged_model_is_alike_on_all_ranks_and_as_if_merged(uneven, phase):
    found = []
    for rank in range(WORLD):
        gm = copy.deepcopy(uneven[rank][phase])
        costs = Costs(Machine(bandwidth=1e9, kernel_ms=1e-9))  # every move takes time
        plan = ByCap(0.0005).plan(GraphAnalysis(gm.graph))
        assert plan.buckets
        planned = merged_model(model_of(gm.graph, costs), plan.buckets, costs)
        assert planned is not None
        apply_plan(GraphAnalysis(gm.graph), plan)
        timelines = [Timeline.of(m) for m in (planned, model_of(gm.graph, costs))]
        found += [(t.step_ms, t.compute_ms, t.peak_bytes, t.longest_run) for t in timelines]
    assert all(other == pytest.approx(found[0]) for other in found)
