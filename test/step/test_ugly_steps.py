"""Ugly steps against eager FSDP2 on real ranks: absent gradients, skips, odd shards and states."""

import tempfile
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from marks import at_night
from rank_pool import on_ranks
from step_pairs import UNITS, Pair, Ugly, loss_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from benchmarks.eager_parity.steps import state_digest
from torch_ext_bucketing._torch.aot import stage_of
from torch_ext_bucketing.testing.training import digest

BF16 = torch.bfloat16


def adamw(model: nn.Module, **options):
    wide = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": wide}, {"params": rest, "weight_decay": 0.0, "lr": 1e-3}]
    return [torch.optim.AdamW(groups, **{"lr": 1e-2, "foreach": True, **options})]


def sgd(model: nn.Module, **options):
    return [torch.optim.SGD(model.parameters(), **{"lr": 1e-2, "momentum": 0.9, **options})]


def fused(model: nn.Module):
    return adamw(model, foreach=False, fused=True)


def dampened(model: nn.Module):
    return sgd(model, dampening=0.1)


def plain_sgd(model: nn.Module):
    return [torch.optim.SGD(model.parameters(), lr=1e-2, weight_decay=0.1)]


def adagrad(model: nn.Module):
    return [torch.optim.Adagrad(model.parameters(), lr=1e-2)]


def branches(rank: int, make) -> list[bool]:
    pair = Pair(rank, make)
    taken = [False, True, False, True, True, False]
    return [pair.take(n, given=[(taken[n],)]) for n in range(6)]


def microbatches(rank: int, make) -> list[bool]:
    """Use a layer in some microbatches only."""
    pair = Pair(rank, make)
    orders = [(False, True, False), (True, False, False), (False, False, True), (False,) * 3]
    return [
        pair.take(*(3 * n + k for k in range(3)), given=[(b,) for b in order])
        for n, order in enumerate((*orders, orders[0]))
    ]


def skips(rank: int, make) -> list[bool]:
    """Poison a gradient of one rank's data, in another rank's shard."""
    pair = Pair(rank, make, skip_nonfinite=True)
    found = []
    for n, poisoned in enumerate((True, False, True, False)):
        poison = torch.ones(4)
        if poisoned and rank == 0:
            poison[-1] = float("inf")
        found.append(pair.take(n, given=[(False, poison)]))
        finite = pair.step.total_norm.isfinite().item()
        found.append(finite is not poisoned)
    return found


def scaled(rank: int, make, max_norm: float | None, replicas: int = 1) -> list[bool]:
    """Poison steps under a loss scale, which halves there and doubles after two good ones."""

    def both(model: nn.Module):
        shift = dict(model.named_parameters())["shift"]
        return [torch.optim.SGD([shift], lr=1e-2), *make(without(model, "shift"))]

    scaler = partial(torch.amp.GradScaler, "cpu", init_scale=3.0 * 2**9, growth_interval=2)
    pair = Pair(rank, both, max_norm, replicas=replicas, scaler=scaler)
    found, scales = [], []
    for n, poisoned in enumerate((True, False, False, True, False)):
        poison = torch.ones(4)
        if poisoned and rank == 0:
            poison[-1] = float("inf")
        found.append(pair.take(2 * n, 2 * n + 1, given=[(False, torch.ones(4)), (False, poison)]))
        scales.append(pair.scaler.get_scale())
    return [*found, scales == [768.0, 768.0, 1536.0, 768.0, 768.0]]


def mixed_dtypes(rank: int, make) -> list[bool]:
    found = []
    for dtypes in ((None, BF16), (BF16, torch.float16)):
        pair = Pair(rank, make, model=partial(Ugly, dtypes))
        found += [pair.take(n, given=[(True,)]) for n in range(2)]
    return found


def unclipped(rank: int, *makes) -> list[bool]:
    pairs = (Pair(rank, make, max_norm=None) for make in makes)
    return [pair.take(n) for pair in pairs for n in range(2)]


def mild() -> nn.Module:
    """Make a model without empty shards, which have no largest value, and without ties."""
    model = Ugly()
    model.first.gain, model.second.gain = (nn.Parameter(torch.ones(8)) for _ in range(2))
    model.second.gain.requires_grad_(False)
    # Uncompiled, each use would be reduced by itself.
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def other_norms(rank: int, make) -> list[bool]:
    """Clip by norms that are combined with and without powers."""
    norms = (float("inf"), 1.0)
    pairs = (
        Pair(rank, make, max_norm=1e-3, model=mild, norm_type=norm_type) for norm_type in norms
    )
    return [pair.take(n) and pair.step.total_norm.item() > 1e-3 for pair in pairs for n in range(2)]


def watched(rank: int, make) -> list[bool]:
    """Clip by value, and look at norms of each parameter, with microbatches and empty shards."""
    orders, found = [2.0, float("inf")], []
    for options in ({"max_norm": None, "clip_value": 1e-3}, {"max_norm": 0.1}):
        pair = Pair(rank, make, norms=orders, **options)
        for n in range(2):
            for batch in (2 * n, 2 * n + 1):
                loss_of(pair.eager, pair.tokens(batch)).backward()
            grads = {
                name: p.grad.full_tensor()
                for name, p in pair.eager.named_parameters()
                if p.grad is not None
            }
            pair.eager.zero_grad()
            found += [pair.take(2 * n, 2 * n + 1), list(pair.step.norms) == orders]
            for order, norms in pair.step.norms.items():
                whole = {name: torch.linalg.vector_norm(g, order) for name, g in grads.items()}
                found.append(norms.keys() == whole.keys())
                # A norm of norms rounds otherwise.
                found += [torch.allclose(norms[n], whole[n], rtol=1e-6) for n in whole]
            largest = max(pair.step.norms[float("inf")].values())
            found.append(largest == max(g.abs().max() for g in grads.values()))
    return found


def between(rank: int, make) -> list[bool]:
    """Take an eager step between planned ones, and load the state that was saved."""
    pair = Pair(rank, make, model=mild)
    found = [pair.take(n) for n in range(2)]
    for model, optimizers in ((pair.eager, pair.optimizers), (pair.model, pair.planned)):
        pair.take_eager(model, optimizers, [(pair.tokens(2),)])
    found.append(pair.same())
    pair.planned[0].load_state_dict(pair.planned[0].state_dict())
    return [*found, pair.take(3), len(pair.step.backend.reports) == 1]


def rates(rank: int, make) -> list[bool]:
    """Change the learning rate, a tensor in one case, and momentum by a schedule."""
    return scheduled(Pair(rank, make), 4)


def scheduled(pair: Pair, steps: int) -> list[bool]:
    # Momentum is cycled, too, where an optimizer has it.
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=8)
    schedules = [
        cycle(o, cycle_momentum=not {"momentum", "betas"}.isdisjoint(o.defaults))
        for o in (*pair.optimizers, *pair.planned)
    ]
    found = []
    for n in range(steps):
        found.append(pair.take(n))
        for schedule in schedules:
            schedule.step()
    return [*found, len(pair.step.backend.reports) == 1]


def tensor_rate(model: nn.Module):
    return adamw(model, lr=torch.tensor(1e-2), foreach=False)


def without(model: nn.Module, start: str) -> nn.Module:
    """Return what has the model's parameters but those whose names start so."""
    named = model.named_parameters()
    return nn.ParameterList(p for name, p in named if not name.startswith(start))


def left_out(rank: int, make) -> list[bool]:
    """Leave a parameter to no optimizer: its clipped gradients add up."""
    pair = Pair(rank, lambda model: make(without(model, "shift")))
    return [pair.take(n) for n in range(4)]


def two_optimizers(rank: int, make) -> list[bool]:
    """Clip for two optimizers; the first has no rule. A schedule changes their learning rates."""

    def both(model: nn.Module):
        return [*adagrad(model.first), *make(without(model, "first"))]

    return scheduled(Pair(rank, both), 3)


def grown(rank: int, make) -> list[bool]:
    """Add a group of parameters, change options, and drop state, between steps."""
    pair = Pair(rank, lambda model: make(without(model, "second")))
    found = [pair.take(0)]
    for model, optimizers in ((pair.eager, pair.optimizers), (pair.model, pair.planned)):
        optimizers[0].add_param_group({"params": list(model.second.parameters()), "lr": 1e-3})
        model.zero_grad()
    found.append(pair.take(1))
    for optimizers in (pair.optimizers, pair.planned):
        optimizers[0].param_groups[0]["maximize"] = True
    found.append(pair.take(2))
    for optimizers in (pair.optimizers, pair.planned):
        optimizers[0].state.clear()
    return [*found, pair.take(3)]


def half_state(rank: int, make) -> list[bool]:
    """Go on with state that code has cast to bfloat16, in a new planned step."""
    pair = Pair(rank, make)
    found = [pair.take(0)]
    for optimizers in (pair.optimizers, pair.planned):
        for state in optimizers[0].state.values():
            state["momentum_buffer"] = state["momentum_buffer"].to(BF16)
    pair.step = pair.planned_step()
    return [*found, *(pair.take(n) for n in range(1, 3))]


def checkpoints(rank: int, make) -> list[bool]:
    """Save after two steps, and load into new models, eager and planned."""
    pair = Pair(rank, make)
    found = [pair.take(n, given=[(n == 1,)]) for n in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        shared = [folder]
        torch.distributed.broadcast_object_list(shared)
        save(f"{shared[0]}/eager", pair.eager, *pair.optimizers)
        save(f"{shared[0]}/planned", pair.model, *pair.planned)
        torch.distributed.barrier()
        other = Pair(rank, make)
        other.take(7, given=[(True,)])
        load(f"{shared[0]}/planned", other.eager, *other.optimizers)
        load(f"{shared[0]}/eager", other.model, *other.planned)
        torch.distributed.barrier()
    found.append(other.same())
    for n in range(2, 4):
        found += [pair.take(n), other.take(n)]
        found.append(digest(pair.model) == digest(other.model))
    return found


def save(path: str, model: nn.Module, optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)


def load(path: str, model: nn.Module, optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    given = {"model": weights, "optimizer": state}
    dcp.load(given, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=given["optimizer"])


def name_of(case) -> str:
    return "-".join(getattr(c, "__name__", str(c)) for c in case)


def slow(*case):
    return at_night(case, id=name_of(case))


CASES = [
    slow(branches, adamw),
    slow(branches, sgd),
    slow(branches, adagrad),
    slow(microbatches, adamw),
    slow(microbatches, sgd),
    slow(microbatches, adagrad),
    (skips, fused),
    slow(skips, sgd),
    slow(skips, adagrad),
    slow(scaled, adamw, 0.1, 2),
    slow(scaled, sgd, None),
    slow(scaled, adagrad, 0.1),
    slow(mixed_dtypes, adamw),
    slow(unclipped, plain_sgd, dampened, fused),
    slow(other_norms, sgd),
    slow(watched, adamw),
    slow(between, adamw),
    slow(rates, tensor_rate),
    slow(rates, sgd),
    slow(left_out, adamw),
    slow(left_out, adagrad),
    (two_optimizers, adamw),
    slow(grown, adamw),
    slow(grown, sgd),
    slow(half_state, sgd),
    slow(checkpoints, adamw),
    slow(checkpoints, sgd),
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ugly_steps_are_eager_fsdp2s(case):
    function, *args = case
    world = 4 if args[-1] == 2 else 2  # with replicas
    for found in on_ranks(function, *args, world=world, timeout_s=480):
        assert found
        assert all(found), found


@pytest.mark.torch
def test_inductors_graphs_update_as_the_optimizer_does(fake_world):
    torch._dynamo.reset()
    mesh, found = init_device_mesh("cpu", (fake_world,)), []
    tokens = torch.arange(16).view(2, 8)
    for planned in (True, False):
        torch.manual_seed(0)
        model = teb.data_parallel(Ugly(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        passes = teb.recipe(model, units=UNITS)
        scaler = torch.amp.GradScaler("cpu", init_scale=1536.0)
        if planned:
            step = teb.train_step(model, optimizer, loss_of, passes=passes, grad_scaler=scaler)
        else:
            backend = teb.backend("inductor", passes, model=model)
            run = torch.compile(loss_of, backend=backend, fullgraph=True)
        for _ in range(3):
            # Kernels are not compiled: the order of a graph's nodes decides what an update reads.
            with torch._inductor.config.patch(fallback_by_default=True):
                if planned:
                    step(tokens)
                else:
                    scaler.scale(run(model, tokens)).backward()
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        found.append((digest(model), state_digest(optimizer), scaler.state_dict()))
    assert found[0] == found[1]


class Branching(nn.Module):
    """Compiles fast, and has a layer that only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 8)
        self.other = nn.Linear(8, 8, bias=False)

    def forward(self, tokens: torch.Tensor, branch: bool = False) -> torch.Tensor:
        x = self.embedding(tokens)
        return (x + self.other(x) if branch else x).square().mean()


def test_a_step_that_fails_leaves_no_state(fake_world):
    torch._dynamo.reset()
    model = teb.data_parallel(Branching(), init_device_mesh("cpu", (fake_world,)))
    failing, tokens = [True], torch.arange(16).view(2, 8)

    def compiler(gm, inputs):
        def run(*args):
            if failing[0] and stage_of(gm.graph) == "backward":
                raise MemoryError
            return gm.forward(*args)

        return run

    (optimizer,) = adamw(model)
    passes = teb.recipe(model, units=[""])
    step = teb.train_step(model, optimizer, loss_of, passes=passes, compiler=compiler)
    before = digest(model)
    for branch in (False, True):
        with pytest.raises(MemoryError):
            step(tokens, branch)
        assert not optimizer.state
    assert digest(model) == before
    failing[0] = False
    step(tokens)
    left = [name for name, p in model.named_parameters() if p not in optimizer.state]
    assert left == ["other.weight"]
    finite = [t for state in optimizer.state.values() for t in state.values()]
    assert all(t.isfinite().all() for t in finite)
