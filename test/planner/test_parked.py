"""Test the third choice for activations: to park them in host memory."""

import itertools
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from random_joint import random_planner
from rank_pool import on_ranks
from sharded_models import Keep, eager_fsdp2, small_transformer, tokens_of, trained
from torch.distributed.device_mesh import init_device_mesh
from two_pools import TwoPools

import torch_ext_bucketing as teb
from torch_ext_bucketing.bucketing.plan import ByUnit
from torch_ext_bucketing.fsdp.tagging import parameter_chains
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.nodes import FROM_HOST, TO_HOST, graph_of, tag_of
from torch_ext_bucketing.passes.base import PARKED
from torch_ext_bucketing.passes.park import ParkReport, import_copies
from torch_ext_bucketing.passes.park import finish as finish_copies
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.planner.keep.partitioned import PartitionedModel
from torch_ext_bucketing.planner.resharding import _choice, _mark
from torch_ext_bucketing.planner.schedule.list_schedule import list_schedule
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.policy import Options
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.reports.planner import KeepReport
from torch_ext_bucketing.testing.training import ModelConfig, Transformer

STREAMS = {"forward": TO_HOST, "backward": FROM_HOST}

pytest.importorskip(
    "torch._functorch._activation_offloading.offload_ops",
    reason="this torch has no copies to host memory: 2.13 and 2.15 have",
)
pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("fresh_dynamo")]


class OnJoint(teb.GraphPass):
    """Calls a function with the joint graph's model, and the graph."""

    stage = "joint"
    provides = frozenset({PARKED})

    def __init__(self, function):
        import_copies()
        self.function = function

    def run(self, graph, compilation):
        g = graph_of(graph)
        units = Units.guessed(f for n in g.nodes if (t := tag_of(n)) for f in t.fqns)
        unmerged = ByUnit(units, ())
        self.function(PartitionedModel(g, Costs(), units, unmerged, activations=True), g)

    def finish(self, graph, compilation):
        finish_copies(graph_of(graph), compilation)


def compiled(*passes, dim=64):
    graphs = Keep()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = teb.data_parallel(
        Transformer(ModelConfig(layers=2, dim=dim)), mesh, param_dtype=torch.bfloat16
    )
    b = teb.backend(graphs, passes, model, agree=False)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    torch.compile(model, backend=b)(tokens).float().sum().backward()
    return graphs, b.last_report()


@pytest.mark.parametrize("seed", range(2))
def test_halves_with_parked_activations_are_what_the_partitioner_makes(fake_world, seed):
    rng, found = random.Random(seed), {}

    def choose(partitioned, graph):
        held = [k for k, u in enumerate(partitioned.keepables) if u.held]
        kept = partitioned.distinct([k for k in held if rng.random() < 0.6])
        could = partitioned.could_park(kept)
        parked = [s for s in could if rng.random() < 0.6]
        found["models"] = partitioned.with_parked(kept, parked)
        found["parked"] = sum(partitioned.forward.liveness.size[s] for s in parked)
        found["names"] = {could[s].name for s in parked}
        assert 0 < len(parked) < len(could)
        _mark(parameter_chains(graph), _choice(partitioned, kept, parked), lambda tag: True)

    graphs, report = compiled(OnJoint(choose))
    (made,) = (r for r in report.rewrites if isinstance(r, ParkReport))
    assert set(made.parked) == found["names"]
    assert sum(made.parked.values()) == found["parked"] <= made.nbytes < 2 * found["parked"]
    for ours, (stage, stream) in zip(found["models"], STREAMS.items(), strict=True):
        graph = model_of(graphs[stage].graph, replace(H100, host_ms={}))
        for group in (None, stream):
            times = (
                sum(ms for ms, g in zip(model.ms, model.group, strict=True) if g == group)
                for model in (ours, graph)
            )
            assert next(times) == pytest.approx(next(times), rel=1e-6)
        unread = ours.liveness.at_start - graph.liveness.at_start
        one, other = (Timeline.of(m, list_schedule(m, Options())) for m in (ours, graph))
        assert one.step_ms == pytest.approx(other.step_ms, rel=0.02)
        assert one.peak_bytes - unread == pytest.approx(other.peak_bytes, rel=0.02)


def test_host_memory_is_used_where_it_helps_and_within_its_bound(fake_world):
    """Never slower than without, and below the least peak that keeping and recomputing reach."""
    found = {}

    def choose(partitioned, graph):
        plain = KeepPlanner(partitioned)
        least = plain.choose(0).peak_bytes
        most = plain.scheduled(plain.candidates, 2**62).peak_bytes
        for share in (-0.2, 0.5):
            limit = int(least + share * (most - least))
            for host in (2**13, 2**30):
                planner = KeepPlanner(partitioned, host_bytes=host)
                found[share, host] = limit, plain.choose(limit), planner.choose(limit)
                _, report = planner.report(limit)
                assert report.host_bytes == found[share, host][2].host_bytes
                assert "in host memory: " in report.to_text()
                size = partitioned.forward.liveness.size
                there = sum(size[s] for s in found[share, host][2].parked)
                assert sum(b.on_host for b in report.blocks) == there
                assert {b.name for b in report.blocks} >= {"blocks.0", "blocks.1"}

    compiled(OnJoint(choose), dim=512)
    for (share, host), (limit, without, chosen) in found.items():
        assert not without < chosen
        assert chosen.host_bytes <= host
        assert chosen.peak_bytes <= max(limit, without.peak_bytes)
        if host == 2**30:
            assert chosen.above < without.above or chosen.step_ms <= without.step_ms
            assert bool(without.above) == (share < 0)
    assert found[-0.2, 2**30][2].peak_bytes < found[-0.2, 2**30][1].peak_bytes
    assert any(c.step_ms < w.step_ms and not c.above for _, w, c in found.values())


def test_choices_are_near_the_best_of_all(fake_world):
    """Compare with every possible choice, each scheduled."""
    worse, helped = 0, 0
    for seed in range(4, 34):
        rng = random.Random(seed)
        planner = random_planner(seed, 2, activations=True, link=rng.choice((0.25, 0.5, 1, 2, 4)))
        everything = planner.scheduled(planner.candidates, 2**60)
        low, high = planner.reference_bytes, everything.peak_bytes
        limit = int(low + rng.uniform(-0.2, 1.0) * (high - low))
        choices = [
            planner.scheduled(kept, limit, parked)
            for kept in subsets(planner.candidates)
            for parked in subsets(planner.partitioned.could_park(kept))
        ]
        best, chosen = min(choices), planner.choose(limit)
        worse += chosen.above > best.above or chosen.step_ms > 1.02 * best.step_ms
        without = KeepPlanner(planner.partitioned).choose(limit)
        assert not without < chosen
        helped += chosen.step_ms < 0.98 * without.step_ms
    assert not worse
    assert helped > 5


def subsets(given):
    return itertools.chain.from_iterable(
        itertools.combinations(given, n) for n in range(len(given) + 1)
    )


def test_bad_arguments(fake_world):
    for given in (-1, 0, float("inf"), True):
        with pytest.raises(ValueError, match=r"must be a positive number"):
            teb.PeakMemory(gib=1, host_gib=given)
    with pytest.raises(ValueError, match="give either gib or ratio"):
        teb.PeakMemory(host_gib=1)
    with pytest.raises(ValueError, match="host_gib is for activations: give activations=True"):
        teb.ReshardAfterForward("auto", memory=teb.PeakMemory(gib=1, host_gib=1))
    memory = [teb.PeakMemory(gib=1), teb.PeakMemory(gib=1, host_gib=1)]
    passes = [teb.ReshardAfterForward("auto", memory=m, activations=True) for m in memory]
    assert passes[0].uuid() != passes[1].uuid()
    assert "PeakMemory(gib=1, host_gib=1)" in repr(passes[1])


# -- real ranks -----------------------------------------------------------------------------------


def _beside_eager(rank, ratio):
    mesh, tokens = init_device_mesh("cpu", (2,)), tokens_of(rank, 37, 2, 8)
    dtypes, names = (torch.bfloat16, torch.float32), ["blocks.0", "blocks.1", ""]
    torch.manual_seed(0)
    eager = eager_fsdp2(small_transformer(), names, mesh, *dtypes)
    expected = trained(eager, eager, tokens)
    torch.manual_seed(0)
    model = small_transformer()
    order = teb.FSDPParamOrder.from_model(model, names)
    teb.data_parallel(model, mesh, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    # A link that is as fast as memory, so that parking pays for values of a few KiB.
    machine = teb.Machine(host_bandwidth=1e15, kernel_ms=0.0, bandwidth=1e10, ranks_per_node=2)
    memory = teb.PeakMemory(ratio=ratio, host_gib=1)
    reshard = teb.ReshardAfterForward("auto", memory=memory, activations=True, machine=machine)
    passes = [teb.MatchFSDP2(), reshard, teb.BucketByUnit(order)]
    passes += [teb.Schedule(teb.Overlap(), machine)]
    pools = TwoPools()
    backend = teb.backend(pools, passes, model)
    found = trained(model, torch.compile(model, backend=backend, fullgraph=True), tokens)
    (report,) = (r for r in backend.last_report().rewrites if isinstance(r, KeepReport))
    assert pools.parked == 3 * report.host_bytes  # in three steps
    return expected, found, report.host_bytes


@pytest.mark.parametrize("ratio", [1.0, pytest.param(1.1, marks=pytest.mark.slow)])
def test_bits_of_eager(ratio):
    parked = []
    for expected, found, nbytes in on_ranks(_beside_eager, ratio):
        assert found == expected
        parked.append(nbytes)
    assert parked[0] > 0
    assert len(set(parked)) == 1
