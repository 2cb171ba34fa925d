"""The step with Muon against torch's own on whole matrices, on real ranks and in graphs."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from marks import at_night
from rank_pool import on_ranks
from sharded_models import Keep, tokens_of
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from whole_muon import WholeMuon

import torch_ext_bucketing as teb
from benchmarks.eager_parity.steps import state_digest
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import collective_kind, is_wait
from torch_ext_bucketing.graph.sizes import work_of
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.reports.compile import StepReport
from torch_ext_bucketing.step import matrix
from torch_ext_bucketing.step.matrix import ADD, ORTHOGONALIZE, SEND
from torch_ext_bucketing.step.rules import StackedMuon
from torch_ext_bucketing.testing.training import digest


class Experts(nn.Module):
    """Four experts that see every token, as stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 32, 17) / 6)
        self.w2 = nn.Parameter(torch.randn(4, 17, 32) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (nn.functional.silu(x.unsqueeze(-3) @ self.w1) @ self.w2).mean(-3)


class GatedLayer(nn.Module):
    """Has three matrices, whose 33 rows or columns are uneven over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(32, 33, bias=False) for _ in range(2))
        self.down = nn.Linear(33, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Gated(nn.Module):
    """Compiles fast: most of the time is Dynamo's, and grows with the number of parameters."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 32)
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": GatedLayer()}) for _ in range(layers))
        self.norm = nn.RMSNorm(32)
        self.output = nn.Linear(32, 37, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block["mlp"](x)
        return self.output(self.norm(x))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().logsumexp(-1).mean()


def optimizers(model: nn.Module, muon=torch.optim.Muon, **options):
    """Train the matrices of blocks by Muon; embedding, head and vectors by AdamW."""
    parts = {
        mine: [p for n, p in model.named_parameters() if (p.ndim > 1 and "blocks" in n) is mine]
        for mine in (True, False)
    }
    adam = torch.optim.AdamW(parts[False], lr=1e-2, foreach=True)
    return [muon(parts[True], lr=0.02, **options), adam]


def step_of(model, of, machine=None, **options):
    given = {"compiler": "aot_eager", **options}
    units = [*(f"blocks.{n}" for n in range(len(model.blocks))), ""]
    passes = teb.recipe(model, units=units, reduce="all_to_all", machine=machine)
    return teb.train_step(model, of, loss_of, passes=passes, **given)


def trained(
    rank: int, shape, mode="fully_shard", tied=False, stacked=False, muon=None, caps=(None,), **more
) -> list[bool]:
    """Train by whole matrices and by planned steps, one for each cap on bytes of exchanges."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = Gated(layers=1 + stacked)
    if tied:
        start.output.weight = start.embed.weight
    if stacked:
        start.blocks[-1]["mlp"] = Experts()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    # WholeMuon has no rule: it runs after a step that updates AdamW's parameters and clips.
    planned = StackedMuon if stacked else torch.optim.Muon
    ways = [(WholeMuon, {}), *((planned, {"exchange_bytes": cap} if cap else {}) for cap in caps)]
    models = [teb.data_parallel(copy.deepcopy(start), mesh, mode) for _ in ways]
    all_of = [
        optimizers(m, kind, **(muon or {})) for m, (kind, _) in zip(models, ways, strict=True)
    ]
    steps = [
        step_of(m, of, **more, **cap) for m, of, (_, cap) in zip(models, all_of, ways, strict=True)
    ]
    tokens, found = tokens_of(rank, 37, 2, 8), []
    for number in range(4 if more.get("skip_nonfinite") else 3):
        if number == 2 and more.get("skip_nonfinite"):
            norm = models[1].norm._parameters["weight"].to_local()
            with torch.no_grad():
                kept = norm.clone()
                norm.fill_(float("inf"))
                steps[1](tokens(number))
                norm.copy_(kept)
            found.append(not steps[1].total_norm.isfinite().item())
            continue
        for step in steps:
            step(tokens(number))
        expected, *others = [
            (digest(model), [state_digest(o) for o in of])
            for model, of in zip(models, all_of, strict=True)
        ]
        found += [other == expected for other in others]
    return found


def uneven(rank: int) -> list[bool]:
    """Train in one exchange, and in as many as a small cap makes."""
    return trained(rank, (3,), caps=(None, 1), muon={"nesterov": False})


def clipped(rank: int) -> list[bool]:
    """Clip, skip a step, leave a tied embedding to AdamW, and train experts beside matrices."""
    return trained(rank, (2,), tied=True, stacked=True, max_norm=0.1, skip_nonfinite=True)


def copies(rank: int) -> list[bool]:
    """Keep whole copies: owners differ, nothing goes to them, and updates go to all."""
    return trained(rank, (2,), "replicate")


def experts(rank: int) -> list[bool]:
    """Train four experts on three ranks, in many buckets. The last rank has none."""
    return trained(rank, (3,), stacked=True, caps=(1,), max_norm=0.1)


def hybrid_experts(rank: int) -> list[bool]:
    """Train two experts on each of two ranks, twice."""
    return trained(rank, (2, 2), "hybrid_shard", stacked=True, skip_nonfinite=True, max_norm=0.1)


def hybrid(rank: int) -> list[bool]:
    """Spread owners over replicas, too."""
    options = {"adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}
    return trained(rank, (2, 2), "hybrid_shard", caps=(4096,), muon=options)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.EagerOptimizerWarning")
@pytest.mark.parametrize(
    ("function", "world"),
    [
        pytest.param(clipped, 2, marks=pytest.mark.torch),
        at_night(experts, 3),
        at_night(uneven, 3),
        at_night(copies, 2),
        at_night(hybrid, 4),
        at_night(hybrid_experts, 4),
    ],
)
def test_bits_are_those_of_the_whole_matrices(function, world):
    for found in on_ranks(function, world=world, timeout_s=480):
        assert found
        assert all(found), found


@pytest.mark.torch
def test_each_matrix_of_a_stack_has_torchs_update_eagerly():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 6, 4))
    single = [nn.Parameter(m.clone()) for m in stack.detach()]
    matrix = nn.Parameter(torch.randn(4, 6))
    mine = StackedMuon([{"params": [stack]}, {"params": [matrix], "lr": 0.5}], lr=0.02)
    theirs = torch.optim.Muon(single, lr=0.02)
    for _ in range(3):
        stack.grad, matrix.grad = torch.randn_like(stack), torch.randn_like(matrix)
        for p, grad in zip(single, stack.grad, strict=True):
            p.grad = grad.clone()
        before = matrix.detach().clone()
        mine.step()
        theirs.step()
        assert torch.equal(stack, torch.stack(single))
        assert not torch.equal(matrix, before)
    momentum = [theirs.state[p]["momentum_buffer"] for p in single]
    assert torch.equal(mine.state[stack]["momentum_buffer"], torch.stack(momentum))
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        mine.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(mine.param_groups) == 2
    with pytest.raises(ValueError, match="at least one parameter"):
        StackedMuon([])


TOKENS = torch.zeros(2, 8, dtype=torch.long)


@pytest.fixture
def model(fake_world):
    torch._dynamo.reset()
    return teb.data_parallel(Gated(layers=4), init_device_mesh("cpu", (fake_world,)))


def planned(model: nn.Module, muon=torch.optim.Muon, **options):
    """Take one step; return its report and the nodes of its backward graph."""
    graphs = Keep()
    step = step_of(model, optimizers(model, muon), compiler=graphs, **options)
    step(TOKENS)
    (report,) = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
    return report, list(graphs["backward"].graph.nodes)


@pytest.mark.torch
def test_one_exchange_travels_while_another_is_computed(model):
    # All owners have three of the 12 matrices; each exchange brings one to an owner.
    slow = dataclasses.replace(H100, flops={**H100.flops, "bfloat16": 1e10}, host_ms={})
    report, nodes = planned(model, exchange_bytes=1, machine=slow)
    (owners,) = report.owners
    assert (owners.matrices, owners.ranks, owners.idle) == (12, 4, 0)
    assert owners.exchanges >= 12 / 4
    assert f"12 matrices on 4 ranks, exchanged {owners.exchanges} times" in report.to_text()
    counts = [sum(n.target is t for n in nodes) for t in (SEND, ORTHOGONALIZE, ADD)]
    assert counts == [owners.exchanges] * 3
    exchanges = [n for n in nodes if collective_kind(n) == "all_to_all"]
    forth, back = ([n for n in exchanges if n.args[0].target is t] for t in (SEND, ORTHOGONALIZE))
    assert len(forth) == owners.exchanges
    computed = [i for i, n in enumerate(nodes) if n.target is ORTHOGONALIZE]
    waits = {n.args[0]: i for i, n in enumerate(nodes) if is_wait(n)}
    assert any(nodes.index(n) < computed[0] < waits[n] for n in forth)
    # Where that takes long, kernels run all the time from the first exchange to the last one.
    scheduled = model_of(GraphAnalysis(nodes[0].graph), Costs(slow))
    line, place = Timeline.of(scheduled), scheduled.dependencies.index
    *others, last = sorted(line.end[place[n]] for n in (*forth, *back))
    first = min(line.begin[place[n]] for n in forth)
    computing = max(line.end[place[n]] for n in nodes if n.target is ORTHOGONALIZE)
    assert others[-1] < computing < last
    inside = [i for i in line.order if first <= line.begin[i] < computing]
    busy = sum(scheduled.ms[i] for i in inside if scheduled.group[i] is None)
    assert busy > 0.98 * (computing - first)
    updated = {f for of in report.updates for f in of}
    assert updated == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("fake_world", [5], indirect=True)
def test_ranks_without_a_matrix_take_part(fake_world):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (fake_world,))
    report, nodes = planned(teb.data_parallel(Gated(), mesh))
    (owners,) = report.owners
    assert (owners.matrices, owners.ranks, owners.idle, owners.exchanges) == (3, 5, 2, 1)
    assert "5 ranks, 2 without one" in report.to_text()
    assert sum(n.target is ORTHOGONALIZE for n in nodes) == 1


@pytest.mark.torch
def test_experts_that_lie_whole_on_a_rank_stay_there(fake_world):
    torch._dynamo.reset()
    start = Gated(layers=2)
    for block in start.blocks:
        block["mlp"] = Experts()
    for name, p in start.named_parameters():
        p.requires_grad_(".mlp." in name)
    model = teb.data_parallel(start, init_device_mesh("cpu", (fake_world,)))
    report, nodes = planned(model, StackedMuon)
    (owners,) = report.owners
    assert (owners.matrices, owners.exchanges, owners.balance) == (16, 0, 1.0)
    assert sum(n.target is ORTHOGONALIZE for n in nodes) == 1
    after = nodes[[n.target for n in nodes].index(SEND) :]
    assert [n for n in after if collective_kind(n)] == []


def test_what_cannot_be_exchanged_is_refused(fake_world, monkeypatch):
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (fake_world,))
    model = teb.data_parallel(Gated(), mesh)
    with pytest.raises(ValueError, match="exchange_bytes must be a whole number"):
        planned(model, exchange_bytes=0)
    with monkeypatch.context() as patch:
        patch.setattr(matrix, "compiles_for_all_ranks", lambda: True)
        with pytest.raises(Exception, match="compile_on_one_rank"):
            planned(model)
    whole = {(): (0, 0, 16, 32)}
    monkeypatch.setattr(matrix, "blocks_of", lambda parameter: whole)
    with pytest.raises(
        Exception, match=r"blocks.0.mlp.down.weight is sharded as .* another optimizer"
    ):
        planned(model)


def plan_of(rank: int) -> list[object]:
    """Return what the planner sees of the exchanges, and what this rank's owners receive."""
    model = teb.data_parallel(Gated(), init_device_mesh("cpu", (3,)))
    _, nodes = planned(model, exchange_bytes=4096)
    ours, costs = [n for n in nodes if work_of(n) or collective_kind(n)], Costs()
    sizes = [n.meta["val"].numel() for n in ours if n.target is SEND]
    return [[(str(n.target), n.name, costs(n), costs.result_bytes(n)) for n in ours], sizes]


@pytest.mark.slow
def test_ranks_with_other_rows_plan_alike():
    first, *others = on_ranks(plan_of, world=3, timeout_s=240)
    assert all(other[0] == first[0] for other in others)
    assert others[-1][1] != first[1]


def wholes(model: nn.Module, of) -> list[np.ndarray]:
    """Return all parameters and momentum, gathered."""
    found = [*model.parameters(), *(s["momentum_buffer"] for s in of[0].state.values())]
    return [getattr(t, "full_tensor", lambda t=t: t)().detach().numpy() for t in found]


def state_of(model: nn.Module, of):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, of)}


def saved(rank: int, path: str) -> list[list[np.ndarray]]:
    """Take two steps, save, and take a third."""
    torch.manual_seed(0)
    model = teb.data_parallel(Gated(), init_device_mesh("cpu", (2,)))
    of = optimizers(model)
    step = step_of(model, of)
    for _ in range(2):
        step(TOKENS)
    dcp.save(state_of(model, of), checkpoint_id=path)
    before = wholes(model, of)
    step(TOKENS)
    return [before, wholes(model, of)]


def load(model: nn.Module, of, path: str) -> None:
    state = state_of(model, of)
    dcp.load(state, checkpoint_id=path)
    set_optimizer_state_dict(model, of, state["optimizer"])


def loaded(rank: int, path: str) -> list[list[np.ndarray]]:
    """Load on three ranks, and take a step."""
    model = teb.data_parallel(Gated(), init_device_mesh("cpu", (3,)))
    of = optimizers(model)
    load(model, of, path)
    before = wholes(model, of)
    step_of(model, of)(TOKENS)
    return [before, wholes(model, of)]


@pytest.mark.slow
def test_momentum_of_two_ranks_loads_on_three_and_into_eager(tmp_path):
    first = on_ranks(saved, str(tmp_path), world=2, timeout_s=240)[0]
    second = on_ranks(loaded, str(tmp_path), world=3, timeout_s=240)[0]
    model = Gated()
    of = optimizers(model)
    load(model, of, str(tmp_path))
    assert len(first[0]) == 6 + 3
    for one, other in zip(first[0], second[0], strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(first[0], wholes(model, of), strict=True):
        np.testing.assert_array_equal(one, other)
    # All ranks have the same tokens. Only rounding of sums of two and three equal terms is between.
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3, rtol=0)
