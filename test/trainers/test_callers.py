"""Shard, load and train as other trainers call ``fully_shard``, beside eager FSDP2 on ranks.

Each program does what its trainer does, with a small model: the order of the calls, where weights
come from, mixed precision, clipping, and how checkpoints are read.
"""

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from marks import at_night
from rank_pool import on_ranks
from sharded_models import small_transformer, tokens_of
from torch.distributed import fsdp as fsdp2
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import distribute_tensor

import torch_ext_bucketing as teb
from torch_ext_bucketing.errors import PlanMismatchError
from torch_ext_bucketing.testing.training import Transformer, digest

STEPS, BF16 = 3, torch.bfloat16


def compiled(model: nn.Module, ours: bool):
    if not ours:
        return model
    return torch.compile(model, backend=teb.backend("aot_eager", teb.recipe(model), model=model))


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def train(rank: int, run, model: nn.Module, clip=nn.utils.clip_grad_norm_, loss=loss_of):
    """Return a hash of this rank's shards, the losses and the norms."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens, found = tokens_of(rank, 37, 2, 8), []
    for step in range(STEPS):
        value = loss(run, tokens(step))
        value.backward()
        norm = clip([p for p in model.parameters() if p.grad is not None], 0.5)
        found += [value.item().hex(), getattr(norm, "full_tensor", lambda n=norm: n)().item().hex()]
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), found


def materialized(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Give memory to modules on the meta device one by one, and let each set its own weights."""
    for path, module in model.named_modules():
        own = list(module.named_parameters(recurse=False))
        if any(p.is_meta for _, p in own) or any(b.is_meta for b in module.buffers(recurse=False)):
            module.to_empty(device="cpu", recurse=False)
        with torch.no_grad():
            for name, _ in own:
                whole = values[f"{path}.{name}".lstrip(".")]
                sharded = module._parameters[name]
                sharded.copy_(distribute_tensor(whole, sharded.device_mesh, sharded.placements))
        for name in list(module._buffers):
            module._buffers[name].copy_(values[f"{path}.{name}".lstrip(".")])


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: value.detach().clone() for name, value in named}


def lightning(rank: int, ours: bool):
    """Shard meta tensors on a 2-D mesh, as users of ``ModelParallelStrategy`` do."""
    shard = teb.fsdp.fully_shard if ours else fsdp2.fully_shard
    values = values_of(small_transformer(layers=1))
    with torch.device("meta"):
        model = small_transformer(layers=1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data_parallel", "tensor_parallel"))
    for block in model.blocks:
        shard(block, mesh=mesh["data_parallel"])
    shard(model, mesh=mesh["data_parallel"])
    materialized(model, values)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(whole[n], values[n]) for n in whole)
    return train(rank, compiled(model, ours), model)


def torchtune(rank: int, ours: bool):
    """Shard modules that meet a condition, innermost first, and assign weights."""
    shard = teb.fsdp.fully_shard if ours else fsdp2.fully_shard
    values = values_of(small_transformer())
    with torch.device("meta"):
        model = small_transformer()
    mesh = init_device_mesh("cpu", (2,))
    for name, module in reversed(list(model.named_modules())):
        parent, _, number = name.rpartition(".")
        if parent == "blocks" and number.isdigit():
            shard(module, mesh=mesh, reshard_after_forward=True)
    shard(model, mesh=mesh, reshard_after_forward=True)
    sharded = {
        name: nn.Parameter(distribute_tensor(values[name], p.device_mesh, p.placements))
        for name, p in model.state_dict().items()
    }
    model.load_state_dict(sharded, assign=True)
    for name in ("rope_cos", "rope_sin"):
        model.register_buffer(name, values[name], persistent=False)
    found = train(rank, compiled(model, ours), model)
    gathered = {name: p.full_tensor() for name, p in model.state_dict().items()}
    return found, {name: value.double().sum().item() for name, value in gathered.items()}


def automodel(rank: int, ours: bool):
    """Keep the last block and the root gathered, under HSDP, as NeMo AutoModel does."""
    shard = teb.fsdp.fully_shard if ours else fsdp2.fully_shard
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)[names]
    model = small_transformer()
    inner = MixedPrecisionPolicy(BF16, torch.float32)
    policy = MixedPrecisionPolicy(BF16, torch.float32, torch.float32)
    for i, block in enumerate(model.blocks):
        kept = i == len(model.blocks) - 1
        shard(block, mesh=mesh, mp_policy=inner, reshard_after_forward=not kept)
    shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return train(rank, compiled(model, ours), model)


def verl(rank: int, ours: bool):
    """Train an actor against a frozen reference, a copy that is sharded and compiled by itself."""
    shard = teb.fsdp.fully_shard if ours else fsdp2.fully_shard
    policy = MixedPrecisionPolicy(BF16, torch.float32, cast_forward_inputs=True)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    values = small_transformer().state_dict()

    def made() -> Transformer:
        model = small_transformer()
        wrapped = (m for m in model.modules() if type(m).__name__ in ("Block", "Embedding"))
        for module in list(wrapped):
            shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(values) if rank == 0 else {}, options=options)
        return model

    actor, reference = made(), made()
    reference.eval().requires_grad_(False)
    run, frozen = compiled(actor, ours), compiled(reference, ours)

    def log_probs(model, tokens):
        return model(tokens).float().log_softmax(-1).gather(-1, tokens[..., None])

    def loss(run, tokens):
        with torch.no_grad():
            old = log_probs(frozen, tokens)
        new = log_probs(run, tokens)
        return -(new - old).exp().mean() + 0.1 * (old - new).mean()

    def clip(parameters, most):
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    return train(rank, run, actor, clip, loss), digest(reference)


class VisionLanguage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 32))
        self.text = small_transformer()

    def forward(self, tokens, image=None):
        text = self.text
        x = text.embed(tokens)
        if image is not None:
            x = x + self.tower(image)[:, None]
        for block in text.blocks:
            x = block(x, text.rope_cos, text.rope_sin)
        return text.output(text.norm(x))


def vision_language(rank: int, ours: bool, alike: bool = True):
    """Skip the vision tower where a batch has no image."""
    shard = teb.fsdp.fully_shard if ours else fsdp2.fully_shard
    mesh = init_device_mesh("cpu", (2,))
    model = VisionLanguage()
    for module in (model.tower, *model.text.blocks, model):
        shard(module, mesh=mesh)
    steps = iter(range(STEPS))

    def loss(run, tokens):
        step = next(steps)
        has_image = step % 2 == 0 if alike else rank == 0
        image = torch.full((2, 6), float(step + rank)) if has_image else None
        return F.cross_entropy(run(tokens, image).flatten(0, 1), tokens.flatten())

    run = compiled(model, ours)
    if alike:
        return train(rank, run, model, loss=loss)
    with pytest.raises(PlanMismatchError, match="all_gather") as error:
        train(rank, run, model, loss=loss)
    return "tower" in str(error.value)


PROGRAMS = [lightning, torchtune, automodel, verl, vision_language]


@pytest.mark.parametrize(
    "program",
    [p if p is lightning else at_night(p) for p in PROGRAMS],
    ids=lambda p: p.__name__,
)
def test_a_caller_trains_as_on_eager_fsdp2(program):
    theirs, ours = (on_ranks(program, c, world=2, timeout_s=240) for c in (False, True))
    assert ours == theirs


@pytest.mark.slow
def test_a_tower_that_one_rank_skips_is_an_error_on_all():
    """Eager FSDP2 hangs there; the ranks' launches are compared before they start."""
    found = on_ranks(functools.partial(vision_language, alike=False), True, world=2, timeout_s=240)
    assert all(found)
