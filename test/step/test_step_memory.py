"""Bytes of updates in bounds on memory, alike on ranks with uneven shards, and as measured."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from collective_graphs import fake_group
from sharded_models import Keep
from step_pairs import Ugly, loss_of
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.fsdp2 import largest_shard_numel
from torch_ext_bucketing.errors import BoundNotKeptWarning
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import updates_of
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.reports.compile import StepReport
from torch_ext_bucketing.step.matrix import ORTHOGONALIZE
from torch_ext_bucketing.step.rules import BY_NAME, RULES, UPDATE, one_by_one

NUMEL = 1 << 14
IMPLEMENTATIONS = [{"foreach": True}, {"foreach": False}, {"foreach": None}, {"fused": True}]
ADAM = [{}, {"weight_decay": 0.1}, {"maximize": True}, {"amsgrad": True}]
SGD = [
    {},
    {"momentum": 0.9},
    {"weight_decay": 0.1},
    {"maximize": True},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
]
KINDS = [
    *((torch.optim.Adam, options) for options in ADAM),
    *((torch.optim.AdamW, options) for options in ADAM),
    *((torch.optim.SGD, options) for options in SGD),
]


@pytest.mark.torch
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=str)
def test_rules_count_what_kernels_allocate(implementation):
    """Three equal parameters, in the first and the second step."""
    for kind, options in KINDS:
        parameters = [nn.Parameter(torch.ones(NUMEL)) for _ in range(3)]
        optimizer = kind(parameters, lr=0.1, **implementation, **options)
        (group,) = optimizer.param_groups
        rule = BY_NAME[RULES[kind]]
        single = one_by_one(rule.options_of(group), parameters[0].device)
        first = []
        for _ in range(2):
            for p in parameters:
                p.grad = torch.ones(NUMEL)
            first.append(allocated(optimizer.step) / (4 * NUMEL))
        if kind is not torch.optim.SGD:
            first = first[1:]  # Adam's first step makes state
        counted = rule.copies(group, single) * (1 if single and not options.get("momentum") else 3)
        about = kind.__name__, implementation, options, first, counted
        assert max(first) <= counted + 0.01, about  # counters of steps
        if not (single and options.get("momentum")):
            assert max(first) >= counted - 0.01, about


def allocated(run) -> int:
    """Return the most bytes that are allocated at one time."""
    cpu = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profile:
        run()
    events = profile.profiler.kineto_results.events()
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((nbytes for _, nbytes in memory), initial=0))


TOKENS = torch.arange(16).view(2, 8)
GIB = 2**30
NO_HOST = replace(H100, host_ms={})
"""The host would bound such small models, and nothing would be hidden beside others."""


def backward(
    rank: int, make, passes_of, microbatches: int = 1, start=Ugly, ranks: int = 4, **options
):
    """Take a step; return it and its backward graph."""
    torch._dynamo.reset()
    graphs = Keep()
    with fake_group(ranks, rank):
        model = teb.data_parallel(start(), init_device_mesh("cpu", (ranks,)))
        optimizer = make(model.parameters())
        passes = passes_of(model, optimizer)
        step = teb.train_step(model, optimizer, loss_of, passes=passes, compiler=graphs, **options)
        for _ in range(microbatches - 1):
            step.accumulate(TOKENS)
        step(TOKENS)
        analysis = GraphAnalysis(graphs["backward"].graph)
        return step, analysis, model_of(analysis)


def adamw(parameters):
    return torch.optim.AdamW(parameters, foreach=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, foreach=True, momentum=0.9, weight_decay=0.1)


def bounded(model: nn.Module, optimizer):
    memory = teb.PeakMemory(gib=20000 / GIB)
    return teb.recipe(model, "speed", memory=memory, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {}),
        (sgd, {"max_norm": 1.0, "microbatches": 2}),
    ],
)
def test_ranks_with_uneven_shards_estimate_and_order_updates_alike(make, options):
    """Rank 3 has no row of some parameters, and fewer of others."""
    found = []
    for rank in (0, 3):
        step, analysis, model = backward(rank, make, bounded, **options)
        times = [
            ms
            for node, ms in zip(analysis.dependencies.nodes, model.ms, strict=True)
            if node.target is UPDATE
        ]
        (report,) = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
        peak = analysis.peak_bytes
        found.append((peak, times, report.updates, report.state_bytes, report.buffer_bytes))
    assert found[0] == found[1]
    # Gradients of earlier microbatches are not state, which was taken off the bound.
    updated = {fqn for fqns in found[0][2] for fqn in fqns}
    numel = sum(
        largest_shard_numel(p) for fqn, p in step.model.named_parameters() if fqn in updated
    )
    each = 4 * numel if make is sgd else 8 * numel + 4 * len(updated)
    assert found[0][3] == each
    assert found[0][1]
    assert all(ms > 0 for ms in found[0][1])


LAYERS = 16


class Stack(nn.Module):
    """Layers whose gradients, reduced, are more than what backward gathers at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens.view(-1, 16).float()).square().mean()


def test_updates_stand_where_a_bound_on_memory_is_kept():
    """Without clipping. All gradients together, ahead of the updates, are more than the bound."""
    limit = 34000

    def passes_of(model: nn.Module, optimizer):
        *first, _ = teb.recipe(model, "speed")
        buckets = teb.BucketByUnit([f"layers.{i}" for i in range(LAYERS)])
        return [*first, buckets, teb.Schedule([teb.Overlap(), teb.PeakMemory(gib=limit / GIB)])]

    with warnings.catch_warnings():
        warnings.simplefilter("error", BoundNotKeptWarning)
        step, analysis, model = backward(0, adamw, passes_of, start=Stack, ranks=2)
    nodes = analysis.dependencies.nodes

    def late(i: int) -> int:
        return 2 if nodes[i].op == "output" else bool(updates_of(nodes[i]))

    updates_last = Timeline.of(model, sorted(range(len(model)), key=late))
    assert Timeline.of(model).peak_bytes <= limit < updates_last.peak_bytes
    # The host bounds so small a model, and launches of updates are longer than their kernels.
    added, kernels, _ = step.backend.last_report().schedules[-1].optimizer_ms
    assert added > kernels > 0


def matrices_under(kib: float, **options) -> tuple[int, float, bool]:
    """Return the exchanges of Muon's matrices, their live KiB, and whether the report has all."""
    torch._dynamo.reset()
    graphs = Keep()
    with fake_group(2, 0):
        layers = (nn.Linear(64, 64, bias=False) for _ in range(12))
        model = teb.data_parallel(nn.Sequential(*layers), init_device_mesh("cpu", (2,)))
        memory = teb.PeakMemory(gib=kib * 1024 / GIB)
        passes = teb.recipe(
            model, "speed", memory=memory, state_bytes_per_parameter=4, machine=NO_HOST
        )
        given = {"passes": passes, "compiler": graphs, **options}
        muon = torch.optim.Muon(model.parameters())
        step = teb.train_step(model, muon, lambda model, x: model(x).sum(), **given)
        step(torch.zeros(1, 64))
        analysis = GraphAnalysis(graphs["backward"].graph)
        live = model_of(analysis).liveness.own_profile
        at = [i for i, n in enumerate(analysis.dependencies.nodes) if n.target is ORTHOGONALIZE]
        last = step.backend.last_report()
        (report,) = (r for r in last.rewrites if isinstance(r, StepReport))
        # The state is among backward's inputs alone, and counts once in the step's peak.
        forward, backward_ = last.schedules
        assert (forward.state_bytes, backward_.state_bytes) == (0, report.state_bytes)
        assert report.state_bytes > 0
        peaks = forward.peak_bytes[1], backward_.peak_bytes[1] - report.state_bytes
        assert last.peak_bytes == max(peaks)
        exposed, kernels, collectives = last.schedules[-1].optimizer_ms
        assert min(kernels, collectives) > 0
        # Hidden is what runs beside backward, or one exchange beside another's kernels.
        hidden = kernels + collectives - exposed
        assert (abs(hidden) < 1e-9) == (report.owners[0].exchanges == 1)
        assert 0 <= hidden + 1e-9 < collectives
        assert "optimizer adds, ms" in last.to_text()
        counted = last.schedules[-1].peak_bytes[-1]
        return report.owners[0].exchanges, max(live[i] for i in at) / 1024, counted == max(live)


# What a reduction packs is above the bound, too.
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.BoundNotKeptWarning")
def test_exchanges_are_cut_to_fit_under_the_bound():
    # 288 KiB of shards, gradients and momentum; a matrix has 8 KiB in bfloat16.
    exchanges, live, _ = matrices_under(324, exchange_bytes=256 << 20)
    assert (exchanges, live > 324) == (1, True)
    exchanges, live, counted = matrices_under(324)
    assert (exchanges, live <= 324) == (6, True)
    # All shards are inputs, also those that only forward reads, and count once.
    assert counted
    assert matrices_under(600)[0] == 1
