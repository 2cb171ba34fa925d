"""Gradient accumulation without reductions between microbatches."""

import contextlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from blocks_on_ranks import assert_equal, mesh, model, tokens
from marks import at_night
from rank_pool import on_ranks
from sharded_models import eager_fsdp2
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing import fsdp
from torch_ext_bucketing.fsdp import ReduceOnce
from torch_ext_bucketing.testing.ring import init_ring_process_group

pytestmark = pytest.mark.torch

UNITS = ["blocks.0", "blocks.1", ""]
BF16, FP32 = torch.bfloat16, torch.float32


class Tied(nn.Module):
    """Two blocks, a head tied to the first one, and a linear that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 6)
        self.head.weight = self.blocks[0].weight
        self.spare = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sigmoid(block(x))
        return self.head(x).float().square().mean()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator).to(BF16) for _ in range(3)]


def compiled(model):
    torch._dynamo.reset()
    b = teb.backend("aot_eager", teb.recipe(model, units=UNITS), model=model)
    return b, torch.compile(model, backend=b, fullgraph=True)


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    init_ring_process_group(0, 1, store=store, timeout=timedelta(seconds=30))
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("reduce_dtype", "gather_once"),
    [
        (BF16, False),
        (FP32, True),
        at_night(BF16, True),
        at_night(FP32, False),
    ],
)
def test_gradients_are_those_of_fsdp2_without_sync(one_rank, reduce_dtype, gather_once):
    eager = Tied()
    if reduce_dtype is FP32:  # see ReduceOnce: uses in one dtype, microbatches in the other
        eager.head.weight = nn.Parameter(eager.head.weight.detach().clone())
    model = teb.data_parallel(_copy(eager), one_rank, param_dtype=BF16, reduce_dtype=reduce_dtype)
    eager_fsdp2(eager, [""], one_rank, BF16, reduce_dtype)
    for i, x in enumerate(batches()):
        eager.set_requires_gradient_sync(i == 2)
        eager(x).backward()
    b, run = compiled(model)
    with ReduceOnce(model, b, gather_once=gather_once):
        for x in batches():
            run(x).backward()
    for (name, one), other in zip(eager.named_parameters(), model.parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None, name
        else:
            assert torch.equal(one.grad.to_local(), other.grad.to_local()), name


def _copy(model):
    other = Tied()
    if model.head.weight is not model.blocks[0].weight:
        other.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return other


def test_nothing_is_reduced_but_at_the_end_and_in_buckets(fake_world):
    mesh = init_device_mesh("cpu", (fake_world,))
    model = teb.data_parallel(Tied(), mesh, param_dtype=BF16, reduce_dtype=FP32)
    b, run = compiled(model)
    once = ReduceOnce(model, b)
    for _ in range(2):
        with once:
            for x in batches():
                run(x).backward()
            assert all(p.grad is None for p in model.parameters())
        unused = [name for name, p in model.named_parameters() if p.grad is None]
        assert unused
        assert all(name.startswith("spare.") for name in unused)
        model.zero_grad()
    inside, late = b.reports  # compiled once, whatever is repeated
    assert inside.collectives_after == {"all_gather": 4}
    assert late.collectives_before == {"reduce_scatter": 5}
    assert late.collectives_after == {"reduce_scatter": 3}
    run(batches()[0]).backward()
    assert b.last_report().collectives_after == {"all_gather": 4, "reduce_scatter": 3}


def test_parameters_are_gathered_once_in_buckets(fake_world):
    mesh = init_device_mesh("cpu", (fake_world,))
    model = teb.data_parallel(Tied(), mesh, param_dtype=BF16, reduce_dtype=FP32)
    dict(model.named_parameters())["blocks.1.bias"].requires_grad_(False)
    b, run = compiled(model)
    once = ReduceOnce(model, b, gather_once=True)
    for _ in range(2):
        with once:
            for x in batches():
                run(x).backward()
        model.zero_grad()
    gathers, inside, late = b.reports
    assert gathers.collectives_before == {"all_gather": 7}
    assert gathers.collectives_after == {"all_gather": 3}
    assert inside.collectives_after == {}
    assert late.collectives_after == {"reduce_scatter": 3}
    run(batches()[0]).backward()
    assert b.last_report().collectives_after == {"all_gather": 4, "reduce_scatter": 3}


def test_a_step_that_fails_leaves_no_gradients(fake_world):
    mesh = init_device_mesh("cpu", (fake_world,))
    model = teb.data_parallel(Tied(), mesh)
    once = ReduceOnce(model)
    with pytest.raises(RuntimeError, match="entered already"), once:
        once.__enter__()

    def failing():
        with once:
            model(torch.zeros(2, 6)).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    with once:
        assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())


# --- on two levels -------------------------------------------------------------------


def sharded_by(fully_shard, policy):
    made, on = model(), mesh("hybrid_shard")
    for layer in made.layers:
        fully_shard(layer, mesh=on, mp_policy=policy)
    return fully_shard(made, mesh=on, mp_policy=policy)


def accumulated(rank, dtypes, how):
    """Return a loss and the gradients of two steps of three microbatches, and what a rank holds."""
    policy = fsdp.MixedPrecisionPolicy(*dtypes)
    made = sharded_by(torch_fsdp.fully_shard if how == "eager" else fsdp.fully_shard, policy)
    found, held = [], None
    run, once = made, None
    if how == "whole model":
        b, run = compiled_by_recipe(made)
        once = ReduceOnce(made, b, scatter_each=True)
    elif how == "block by block":
        for layer in made.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with once or contextlib.nullcontext():
            for part in range(3):
                if once is None:
                    made.set_requires_all_reduce(part == 2)
                loss = run(tokens(rank + part)).float().logsumexp(-1).mean()
                loss.backward()
            if once is not None:
                held = sum(leaf.grad.nbytes for leaf in once._unreduced)
        grads = {n: p.grad.to_local().clone() for n, p in made.named_parameters()}
        found.append((loss.detach(), grads))
        made.zero_grad()
    reports = [r.collectives_after for r in b.reports] if once else []
    return found, held, reports


def compiled_by_recipe(made):
    torch._dynamo.reset()
    b = teb.backend("aot_eager", teb.recipe(made), model=made)
    return b, torch.compile(made, backend=b, fullgraph=True)


@pytest.mark.parametrize(
    "dtypes",
    [at_night((None, None)), (BF16, FP32)],
    ids=["fp32", "bf16"],
)
def test_microbatches_are_scattered_inside_a_node_and_all_reduced_once(dtypes):
    """As eager FSDP2 does with ``set_requires_all_reduce(False)``, on 2 x 2 ranks."""
    theirs, whole, blocks = (
        on_ranks(accumulated, dtypes, how, world=4)
        for how in ("eager", "whole model", "block by block")
    )
    for (steps, _, _), (ours, held, reports), (by_block, _, _) in zip(
        theirs, whole, blocks, strict=True
    ):
        for step, one, other in zip(steps, ours, by_block, strict=True):
            assert_equal(step, one)
            assert_equal(step, other)
        # A rank's part of each of two shards, padded.
        padded = sum(-(-p.shape[0] // 2) * p[0].numel() for p in model().parameters())
        assert held == 4 * padded
        inside, late = reports
        # Of the layer, in forward and backward, and of the root.
        assert inside == {"all_gather": 3, "reduce_scatter": 2}
        assert late == {"all_reduce": 2}


def test_scatter_each_needs_replicas(fake_world):
    made = teb.data_parallel(Tied(), init_device_mesh("cpu", (fake_world,)))
    with pytest.raises(ValueError, match=r"scatter_each=True .* 2-D mesh"):
        ReduceOnce(made, scatter_each=True)


def test_it_needs_a_model_that_is_sharded_here():
    with pytest.raises(ValueError, match="data_parallel"):
        ReduceOnce(Tied())
