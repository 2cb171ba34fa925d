"""The step with clipping and the optimizer against eager FSDP2, on real ranks and in graphs."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn as nn
from sharded_models import eager_fsdp2, small_transformer, tokens_of
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_ext_bucketing as teb
from eager_parity.steps import state_digest
from torch_ext_bucketing._torch.fsdp2 import largest_shard_bytes
from torch_ext_bucketing.errors import EagerOptimizerWarning
from torch_ext_bucketing.graph.nodes import is_wait, kind_of
from torch_ext_bucketing.graph.tags import updates_of
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.reports.compile import StepReport
from torch_ext_bucketing.step import update
from torch_ext_bucketing.step.rules import UPDATE
from torch_ext_bucketing.testing.ring import on_ranks
from torch_ext_bucketing.testing.training import digest

pytestmark = pytest.mark.torch

UNITS = ["blocks.0", "blocks.1", ""]
CLIP = 0.1


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().logsumexp(-1).mean()


def pair(rank: int, make, max_norm=CLIP, **options):
    """Make a model under eager FSDP2 and its optimizer, and the same as a planned step."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    start = small_transformer(layers=1)  # most of a rank's time is Dynamo's
    start.blocks[0].mlp_gamma.requires_grad_(False)
    start.unused = nn.Parameter(torch.ones(6))
    eager = eager_fsdp2(copy.deepcopy(start), UNITS[::2], mesh)
    ours = teb.data_parallel(copy.deepcopy(start), mesh)
    first, second = make(eager), make(ours)
    step = teb.train_step(
        ours,
        second,
        loss_of,
        max_norm=max_norm,
        passes=teb.recipe(ours, units=UNITS[::2]),
        compiler="aot_eager",
        **options,
    )
    return (eager, first), (ours, second), step


def take_eager(
    model: nn.Module, optimizer, *batches: torch.Tensor, max_norm=CLIP, norm_type=2.0
) -> float:
    for batch in batches:
        loss_of(model, batch).backward()
    norm = 0.0
    if max_norm is not None:
        total = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        norm = getattr(total, "full_tensor", lambda: total)().item()
    optimizer.step()
    optimizer.zero_grad()
    return norm


def same(one, other) -> bool:
    (model, optimizer), (model2, optimizer2) = one, other
    names = optimizer.state_dict()["state"].keys() == optimizer2.state_dict()["state"].keys()
    states = state_digest(optimizer) == state_digest(optimizer2)
    return digest(model) == digest(model2) and names and states


def adamw(model: nn.Module, **options):
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": wide}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


def sgd(model: nn.Module):
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1)


def scheduled(rank: int) -> list[object]:
    """Train with a schedule, eager steps in between, and a checkpoint's state."""
    one, other, step = pair(rank, lambda model: adamw(model, foreach=True))
    tokens, found = tokens_of(rank, 37, 2, 8), []
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.7) for _, o in (one, other)]
    for number in range(6):
        norm = take_eager(*one, tokens(number))
        if number == 3:
            ours = take_eager(*other, tokens(number))
        else:
            step(tokens(number))
            ours = step.total_norm.item()
        if number == 4:
            other[1].load_state_dict(other[1].state_dict())
        for schedule in schedules:
            schedule.step()
        found += [same(one, other), norm == ours]
    found.append(all(p.grad is None for p in other[0].parameters()))
    found.append(len(step.backend.reports) == 1)
    found.append(other[0].unused not in other[1].state)
    return found


def unclipped(rank: int) -> list[bool]:
    """Train by momentum, which begins with a copy of the gradient, and by fused AdamW."""
    found = []
    for make in (sgd, lambda model: adamw(model, fused=True)):
        torch._dynamo.reset()
        one, other, step = pair(rank, make, max_norm=None)
        tokens = tokens_of(rank, 37, 2, 8)
        for number in range(3):
            take_eager(*one, tokens(number), max_norm=None)
            step(tokens(number))
            found.append(same(one, other))
    return found


def microbatches(rank: int) -> list[bool]:
    one, other, step = pair(rank, lambda model: adamw(model, foreach=True))
    tokens, found = tokens_of(rank, 37, 2, 8), []
    for number in range(2):
        batches = [tokens(3 * number + part) for part in range(3)]
        norm = take_eager(*one, *batches)
        for batch in batches[:-1]:
            step.accumulate(batch)
        step(batches[-1])
        found += [same(one, other), norm == step.total_norm.item()]
    return found


def other_norms(rank: int) -> list[bool]:
    """Clip by norms that are combined with and without powers."""
    found = []
    for norm_type in (float("inf"), 1.0):
        torch._dynamo.reset()
        one, other, step = pair(rank, sgd, max_norm=1e-3, norm_type=norm_type)
        tokens = tokens_of(rank, 37, 2, 8)
        for number in range(2):
            norm = take_eager(*one, tokens(number), max_norm=1e-3, norm_type=norm_type)
            step(tokens(number))
            found += [same(one, other), norm == step.total_norm.item(), norm > 1e-3]
    return found


def poisoned(model: nn.Module, take) -> None:
    """Take a step with an infinite parameter."""
    with torch.no_grad():
        norm = model.norm._parameters["weight"].to_local()
        kept = norm.clone()
        norm.fill_(float("inf"))
    take()
    with torch.no_grad():
        norm.copy_(kept)


def skipped_first(rank: int) -> list[bool]:
    """Skip the step that makes momentum buffers; the next one makes them."""
    one, other, step = pair(rank, sgd, skip_nonfinite=True)
    tokens = tokens_of(rank, 37, 2, 8)
    poisoned(other[0], lambda: step(tokens(0)))
    found = [not step.total_norm.isfinite().item(), not other[1].state]
    for number in range(2):
        take_eager(*one, tokens(number))
        step(tokens(number))
        found.append(same(one, other))
    return found


def not_finite(rank: int) -> list[bool]:
    """Return whether a step with a norm that is not finite changes nothing."""
    found = []
    for options in ({"foreach": True}, {"fused": True}):
        torch._dynamo.reset()
        one, other, step = pair(rank, lambda m, o=options: adamw(m, **o), skip_nonfinite=True)
        tokens = tokens_of(rank, 37, 2, 8)
        take_eager(*one, tokens(0))
        step(tokens(0))
        before = digest(other[0]), state_digest(other[1])
        found.append(same(one, other))
        poisoned(other[0], lambda: step(tokens(1)))  # noqa: B023
        found.append(not torch.isfinite(step.total_norm).item())
        found.append(before == (digest(other[0]), state_digest(other[1])))
        take_eager(*one, tokens(2))
        step(tokens(2))
        found.append(same(one, other))
    return found


FUNCTIONS = [scheduled, unclipped, microbatches, other_norms, not_finite, skipped_first]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_steps_are_eager_fsdp2s(function):
    for found in on_ranks(function, world=2, timeout_s=480):
        assert found
        assert all(found), found


@pytest.fixture
def model(fake_world):
    torch._dynamo.reset()
    return teb.data_parallel(small_transformer(), init_device_mesh("cpu", (fake_world,)))


TOKENS = torch.zeros(2, 8, dtype=torch.long)


def planned(model: nn.Module, optimizer, **options):
    """Take one step; return it and its backward graph."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    given = {"passes": teb.recipe(model, units=UNITS), **options}
    step = teb.train_step(model, optimizer, loss_of, compiler=keep, **given)
    step(TOKENS)
    return step, list(graphs[-1].nodes)


def test_one_update_per_bucket_follows_its_reduction(model):
    # The host would bound so small a model, and nothing would go ahead.
    passes = teb.recipe(model, units=UNITS, machine=replace(H100, host_ms={}))
    step, nodes = planned(model, adamw(model, foreach=True), passes=passes)
    (report,) = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
    updates = [n for n in nodes if n.target is UPDATE]
    # Two groups in each of three units.
    assert len(updates) == len(report.updates) == 6
    assert sorted(f for n in updates for f in updates_of(n)) == sorted(
        name for name, _ in model.named_parameters()
    )
    waits = [
        i for i, n in enumerate(nodes) if is_wait(n) and kind_of(n.args[0]) == "reduce_scatter"
    ]
    assert nodes.index(updates[0]) < waits[-1]
    output = nodes[-1]
    assert all(n.op == "placeholder" for n in output.all_input_nodes)
    state = sum(
        t.to_local().nbytes for s in step.optimizers[0].state.values() for t in list(s.values())[1:]
    )
    assert 0 <= report.state_bytes - state <= 8 * report.gradients  # and the counters of steps
    assert "27 gradients, 27 updated here in 6 calls (2 eagerly" in report.to_text()


def test_the_norm_is_one_all_reduce(model):
    step, nodes = planned(model, adamw(model, foreach=True), max_norm=1.0)
    assert sum(kind_of(n) == "all_reduce" for n in nodes) == 1
    (report,) = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
    assert (report.norm_reductions, report.norm_kernels, report.eager_norms) == (1, 3, 1)
    # A call per group, and one that scales, as eagerly: with clipping, buckets share calls.
    assert "waits for the norm: 2 updates" in report.to_text()
    assert sum(n.target is torch.ops.aten._foreach_mul_.Tensor for n in nodes) == 1


def test_calls_that_wait_for_the_norm_allocate_a_bounded_number_of_bytes(model, monkeypatch):
    largest = max(largest_shard_bytes(p) for p in model.parameters())
    monkeypatch.setattr(update, "_CALL_BYTES", largest)
    before = digest(model)
    step, _ = planned(model, adamw(model, foreach=True), max_norm=1.0)
    (report,) = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
    assert report.buffer_bytes == largest
    assert 2 < len(report.updates) < report.gradients
    assert sorted(f for fqns in report.updates for f in fqns) == sorted(
        name for name, _ in model.named_parameters()
    )
    # A call is full if the next one of its group does not fit.
    parameters = dict(model.named_parameters())
    sizes = {fqn: largest_shard_bytes(p) for fqn, p in parameters.items()}
    wide = [fqns for fqns in report.updates if parameters[fqns[0]].ndim > 1]
    for call, following in itertools.pairwise(wide):
        assert sum(map(sizes.get, call)) + sizes[following[0]] > largest
    assert digest(model) != before


def test_another_optimizer_runs_eagerly_with_a_warning(model):
    before = digest(model)
    with pytest.warns(EagerOptimizerWarning, match="Adagrad has no rule"):
        step, nodes = planned(model, torch.optim.Adagrad(model.parameters()), max_norm=1.0)
    assert not any(n.target is UPDATE for n in nodes)
    assert digest(model) != before
    assert all(p.grad is None for p in model.parameters())
    assert step.total_norm is not None


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_a_step_are_called_by_it(model, of_all):
    called = []
    optimizer = adamw(model)
    if of_all:
        handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    else:
        handle = optimizer.register_step_post_hook(lambda *_: called.append(1))
    try:
        with pytest.warns(EagerOptimizerWarning, match="hooks"):
            _, nodes = planned(model, optimizer)
    finally:
        handle.remove()
    assert called
    assert not any(n.target is UPDATE for n in nodes)


def test_parameters_of_no_optimizer_keep_their_gradients(model):
    mine = [p for name, p in model.named_parameters() if name != "output.weight"]
    planned(model, torch.optim.AdamW(mine, foreach=True))
    other = dict(model.named_parameters())["output.weight"]
    assert other.grad is not None
    assert other.grad.shape == other.shape
    assert all(p.grad is None for p in mine)


def test_bad_input_is_refused_before_anything_is_compiled(model):
    adam = adamw(model)
    with pytest.raises(TypeError, match=r"give a torch.nn.Module and a torch.optim.Optimizer"):
        teb.train_step(model, model, loss_of)
    with pytest.raises(TypeError, match="loss must be a function"):
        teb.train_step(model, adam, None)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        teb.train_step(model, adam, loss_of, max_norm=-1.0)
    with pytest.raises(ValueError, match="belong to max_norm="):
        teb.train_step(model, adam, loss_of, skip_nonfinite=True)
    with pytest.raises(ValueError, match="evaluates the model by a closure"):
        teb.train_step(model, torch.optim.LBFGS(model.parameters()), loss_of)
    with pytest.raises(ValueError, match=r"of SGD belong to an earlier optimizer, too: param_g"):
        teb.train_step(model, [adam, sgd(model)], loss_of)
    with pytest.raises(TypeError, match="or a list of them"):
        teb.train_step(model, [adam, None], loss_of)
    foreign = torch.optim.AdamW(small_transformer().parameters())
    with pytest.raises(ValueError, match=r"are not in .*param_groups\[0\]"):
        teb.train_step(model, foreign, loss_of)


def test_state_of_another_dtype_is_refused(model):
    optimizer = adamw(model, foreach=True)
    step, _ = planned(model, optimizer)
    state = optimizer.state[next(iter(optimizer.state))]
    state["exp_avg"] = state["exp_avg"].to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"exp_avg of .* is torch.bfloat16"):
        step(TOKENS)
