"""The graphs of a planned step: norms, updates, their places and their inputs."""

import functools
import re
from dataclasses import replace

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
from marks import at_night
from sharded_models import Keep, TwoBlocks
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.fsdp2 import largest_shard_bytes
from torch_ext_bucketing.errors import EagerOptimizerWarning
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import is_wait, kind_of, updates_of
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.reports.compile import StepReport
from torch_ext_bucketing.step.norm import CLAMP
from torch_ext_bucketing.step.rules import UPDATE
from torch_ext_bucketing.testing.training import digest

pytestmark = pytest.mark.torch

UNITS = ["layers.0", "layers.1", ""]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().logsumexp(-1).mean()


def adamw(model: nn.Module, **options):
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": wide}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, **options)


@pytest.fixture
def model(fake_world):
    torch._dynamo.reset()
    return teb.data_parallel(TwoBlocks(), init_device_mesh("cpu", (fake_world,)))


@pytest.fixture
def tiny(fake_world):
    """Compiles fast."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    return teb.data_parallel(model, init_device_mesh("cpu", (fake_world,)))


TOKENS = torch.zeros(2, 8, dtype=torch.long)
NO_HOST = replace(H100, host_ms={})
"""The host would bound so small a model, and no order would fill a wait sooner than another."""


def planned(model: nn.Module, optimizer, **options):
    """Take one step; return it, its report and the nodes of its backward graph."""
    graphs = Keep()
    units = UNITS if hasattr(model, "layers") else [""]
    given = {"passes": teb.recipe(model, units=units), **options}
    step = teb.train_step(model, optimizer, loss_of, compiler=graphs, **given)
    step(TOKENS)
    reports = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
    return step, next(reports, None), list(graphs["backward"].graph.nodes)


@functools.cache
def with_adamw():
    """Plan a step of the model once, for tests that look at its graph."""
    torch._dynamo.reset()
    model = teb.data_parallel(TwoBlocks(), init_device_mesh("cpu", (4,)))
    passes = teb.recipe(model, units=UNITS, machine=NO_HOST)
    return model, *planned(model, adamw(model, foreach=True), passes=passes)


def is_reduced(node: fx.Node) -> bool:
    return is_wait(node) and kind_of(node.args[0]) == "reduce_scatter"


def test_one_update_per_bucket_follows_its_reduction(fake_world):
    model, step, report, nodes = with_adamw()
    updates = [n for n in nodes if n.target is UPDATE]
    # Two groups in each block, and one in the root.
    assert len(updates) == len(report.updates) == 5
    assert sorted(f for n in updates for f in updates_of(n)) == sorted(
        name for name, _ in model.named_parameters()
    )
    waits = [i for i, n in enumerate(nodes) if is_reduced(n)]
    assert nodes.index(updates[0]) < waits[-1]
    output = nodes[-1]
    assert all(n.op == "placeholder" for n in output.all_input_nodes)
    state = sum(
        t.to_local().nbytes for s in step.optimizers[0].state.values() for t in list(s.values())[1:]
    )
    assert 0 <= report.state_bytes - state <= 8 * report.gradients  # and the counters of steps
    assert "10 gradients, 10 updated here in 5 calls (2 eagerly" in report.to_text()


def test_readers_keep_their_side_of_an_update(fake_world):
    """An update writes parameters and state in place, and returns nothing that a reader needs."""
    *_, nodes = with_adamw()
    update = next(n for n in nodes if n.target is UPDATE)
    params, state = update.args[0], update.args[2]
    graph, aten = update.graph, torch.ops.aten
    with graph.inserting_before(update):
        before = [graph.call_function(aten.clone.default, (x,)) for x in (params[0], state[0])]
    with graph.inserting_after(update):
        after = [graph.call_function(aten.clone.default, (x,)) for x in (params[0], state[0])]
    for node in (*before, *after):
        node.meta["val"] = node.args[0].meta["val"]
    dependencies = GraphAnalysis(graph).dependencies
    places = dependencies.index
    assert {places[n] for n in before} <= set(dependencies.needs[places[update]])
    assert all(places[update] in dependencies.needs[places[n]] for n in after)


def test_the_norm_is_one_all_reduce(model):
    _, report, nodes = planned(model, adamw(model, foreach=True), max_norm=1.0)
    assert sum(kind_of(n) == "all_reduce" for n in nodes) == 1
    assert (report.norm_reductions, report.norm_kernels, report.eager_norms) == (1, 3, 1)
    # A call per group, and one that scales, as eagerly: with clipping, buckets share calls.
    assert "waits for the norm: 2 updates" in report.to_text()
    assert sum(n.target is torch.ops.aten._foreach_mul_.Tensor for n in nodes) == 1


def test_clipping_by_value_and_watched_norms_leave_updates_at_their_reductions(model):
    passes = teb.recipe(model, units=UNITS, machine=NO_HOST)
    adam = adamw(model, foreach=True)
    step, report, nodes = planned(model, adam, passes=passes, clip_value=0.1, norms=[2.0])
    assert report.norm_reductions is None
    assert len(report.updates) == 5
    clamps = [n for n in nodes if n.target is CLAMP]
    assert len(clamps) == 3  # one per reduction
    assert sum(kind_of(n) == "all_reduce" for n in nodes) == 1
    updates = [i for i, n in enumerate(nodes) if n.target is UPDATE]
    waits = [i for i, n in enumerate(nodes) if is_reduced(n)]
    assert updates[0] < waits[-1]
    assert step.norms[2.0].keys() == dict(model.named_parameters()).keys()


def test_calls_that_wait_for_the_norm_allocate_a_bounded_number_of_bytes(fake_world):
    torch._dynamo.reset()
    layers = (nn.Linear(2048, 2048, bias=False) for _ in range(5))  # shards of 4 MiB
    model = nn.Sequential(nn.Embedding(8, 2048), *layers)
    teb.data_parallel(model, init_device_mesh("cpu", (fake_world,)))
    adam, most = torch.optim.AdamW(model.parameters(), foreach=True), 16 << 20
    _, report, _ = planned(model, adam, max_norm=1.0)
    sizes = {fqn: largest_shard_bytes(p) for fqn, p in model.named_parameters()}
    calls = [sum(map(sizes.get, call)) for call in report.updates]
    assert report.buffer_bytes == max(calls) <= most
    assert sorted(f for fqns in report.updates for f in fqns) == sorted(sizes)
    # A call is full if the next one's first parameter does not fit.
    for nbytes, following in zip(calls, report.updates[1:], strict=False):
        assert nbytes + sizes[following[0]] > most
    assert len(calls) > 1


def test_another_optimizer_runs_eagerly_with_a_warning(tiny):
    before = digest(tiny)
    with pytest.warns(EagerOptimizerWarning, match="Adagrad has no rule"):
        step, _, nodes = planned(tiny, torch.optim.Adagrad(tiny.parameters()), max_norm=1.0)
    assert not any(n.target is UPDATE for n in nodes)
    assert digest(tiny) != before
    assert all(p.grad is None for p in tiny.parameters())
    assert step.total_norm is not None


@pytest.mark.parametrize("of_all", [False, True])
def test_hooks_of_a_step_are_called_by_it(tiny, of_all):
    called = []
    optimizer = adamw(tiny)
    if of_all:
        handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    else:
        handle = optimizer.register_step_post_hook(lambda *_: called.append(1))
    try:
        with pytest.warns(EagerOptimizerWarning, match="hooks"):
            *_, nodes = planned(tiny, optimizer)
    finally:
        handle.remove()
    assert called
    assert not any(n.target is UPDATE for n in nodes)


def test_bad_input_is_refused_before_anything_is_compiled(model):
    adam = adamw(model)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        teb.train_step(model, adam, loss_of, max_norm=-1.0)
    with pytest.raises(ValueError, match="not both"):
        teb.train_step(model, adam, loss_of, max_norm=1.0, clip_value=1.0)
    with pytest.raises(ValueError, match="clip_value must be a positive number"):
        teb.train_step(model, adam, loss_of, clip_value=0.0)
    with pytest.raises(TypeError, match="norms must be a list of orders"):
        teb.train_step(model, adam, loss_of, norms=2.0)
    with pytest.raises(ValueError, match="belong to max_norm="):
        teb.train_step(model, adam, loss_of, skip_nonfinite=True)
    with pytest.raises(ValueError, match="evaluates the model by a closure"):
        teb.train_step(model, torch.optim.LBFGS(model.parameters()), loss_of)
    with pytest.raises(ValueError, match=r"of SGD belong to an earlier optimizer, too: param_g"):
        teb.train_step(model, [adam, torch.optim.SGD(model.parameters(), lr=0.1)], loss_of)
    foreign = torch.optim.AdamW(TwoBlocks().parameters())
    with pytest.raises(ValueError, match=r"are not in .*param_groups\[0\]"):
        teb.train_step(model, foreign, loss_of)


def test_state_is_looked_at_before_a_step(tiny):
    """A checkpoint's is cast when it is loaded, as in eager; code may have changed it since."""
    optimizer = adamw(tiny, foreach=True)
    step, *_ = planned(tiny, optimizer)
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    optimizer.load_state_dict(saved)
    step(TOKENS)
    state = optimizer.state[next(iter(optimizer.state))]
    assert state["exp_avg"].dtype is torch.float32
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="AdamW has state of a parameter without max_exp_avg_sq"):
        step(TOKENS)
    optimizer.param_groups[0]["amsgrad"] = False
    state["exp_avg"] = state["exp_avg"].bfloat16()
    with pytest.raises(ValueError, match=r"exp_avg of .* is torch.bfloat16"):
        step(TOKENS)


@pytest.mark.parametrize("goal", [at_night("parity"), "speed"])
def test_updates_fill_the_wait_for_the_last_reduction(model, goal):
    """Without clipping, all buckets but the last are updated before that is waited for."""
    passes = teb.recipe(model, units=UNITS, machine=NO_HOST)
    if goal == "speed":  # whose caps would make one bucket
        units = [teb.BucketByUnit(UNITS), teb.Schedule([teb.Overlap()], machine=NO_HOST)]
        passes = [*teb.recipe(model, "speed")[:-1], *units]
    adam = torch.optim.AdamW(model.parameters(), foreach=True)
    *_, nodes = planned(model, adam, passes=passes)
    steps = [n.target is UPDATE for n in nodes if is_reduced(n) or n.target is UPDATE]
    assert sorted(steps) == [False] * 3 + [True] * 3
    assert steps[-2:] == [False, True]
    place = {node: i for i, node in enumerate(nodes)}
    for update_ in (n for n in nodes if n.target is UPDATE):
        for gradient in update_.args[1]:
            assert max(map(place.__getitem__, gradient.users)) == place[update_]


@pytest.mark.slow
def test_inductor_keeps_them_there(model):
    passes = teb.recipe(model, units=UNITS, machine=NO_HOST)
    adam = torch.optim.AdamW(model.parameters(), foreach=True)
    step = teb.train_step(model, adam, loss_of, passes=passes, compiler="inductor")
    _, (_, backward) = run_and_get_code(step, TOKENS)
    # Inductor names a wait's argument: the buffer that its reduction has written.
    found = re.findall(r"(wait_tensor)\.default\((\w+)\)|\.(update_)\.default\(", backward)
    reduced = set(re.findall(r"(\w+) = torch\.ops\._c10d_functional\.reduce_scatter", backward))
    steps = [bool(update_) for _, of, update_ in found if update_ or of in reduced]
    assert sorted(steps) == [False] * 3 + [True] * 3
    assert steps[-2:] == [False, True]
