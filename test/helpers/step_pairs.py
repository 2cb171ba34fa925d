"""A small model with ugly parameters, trained by eager FSDP2 and by the planned step in turn."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from sharded_models import eager_fsdp2, tokens_of
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from benchmarks.eager_parity.steps import state_digest
from torch_ext_bucketing.testing.training import digest

UNITS = ["first", "second", ""]
Make = Callable[[nn.Module], Any]


class Branch(nn.Module):
    """Has a layer that only some steps use, and shards that are uneven or, on one rank, empty."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 5, bias=False, dtype=dtype)
        self.narrow = nn.Linear(5, 8, dtype=dtype)
        self.other = nn.Linear(8, 8, bias=False, dtype=dtype)
        self.gain = nn.Parameter(torch.ones(1, 8, dtype=dtype))

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        given, x = x, x.to(self.gain.dtype)
        y = self.narrow(torch.tanh(self.wide(x)))
        if branch:
            y = y + self.other(x)
        return given + (y * self.gain).to(given.dtype)


class Ugly(nn.Module):
    """Ties its output to its embedding. ``poison`` makes gradients of ``shift`` alone infinite."""

    def __init__(self, dtypes: Sequence[torch.dtype | None] = (None, None)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 8)
        self.first, self.second = map(Branch, dtypes)
        self.shift = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(8, 37, bias=False)
        self.head.weight = self.embedding.weight

    def forward(
        self, tokens: torch.Tensor, branch: bool = False, poison: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.second(self.first(self.embedding(tokens), branch), branch)
        loss = self.head(x).logsumexp(-1).mean()
        scale = torch.ones(4) if poison is None else poison
        return loss + (self.shift * scale).sum()


def loss_of(model: nn.Module, *args: Any) -> torch.Tensor:
    return model(*args)


class Pair:
    """The same training by eager FSDP2 and by :func:`teb.train_step`."""

    def __init__(
        self,
        rank: int,
        make: Make,
        max_norm: float | None = 0.1,
        model: Callable[[], nn.Module] = Ugly,
        replicas: int = 1,
        scaler: Callable[[], torch.amp.GradScaler] | None = None,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        ranks = torch.distributed.get_world_size()
        shape = (ranks,) if replicas == 1 else (replicas, ranks // replicas)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        torch.manual_seed(0)
        start = model()
        self.max_norm, self.tokens = max_norm, tokens_of(rank, 37, 2, 8)

        self.eager = eager_fsdp2(copy.deepcopy(start), UNITS, mesh)
        mode = "fully_shard" if replicas == 1 else "hybrid_shard"
        self.model = teb.data_parallel(start, mesh, mode)
        self.optimizers, self.planned = list(make(self.eager)), list(make(self.model))
        self.scaler, planned = (scaler(), scaler()) if scaler else (None, None)
        self.options = {**options, "grad_scaler": planned}
        self.step = self.planned_step()

    def planned_step(self) -> Any:
        return teb.train_step(
            self.model,
            self.planned,
            loss_of,
            max_norm=self.max_norm,
            passes=teb.recipe(self.model, units=UNITS),
            compiler="aot_eager",
            **self.options,
        )

    def take(self, *numbers: int, given: Sequence[Sequence[Any]] = ((),)) -> bool:
        """Take a step with the batches of these numbers; return whether all is equal."""
        batches = [(self.tokens(n), *given[i % len(given)]) for i, n in enumerate(numbers)]
        norm = self.take_eager(self.eager, self.optimizers, batches)
        for batch in batches[:-1]:
            self.step.accumulate(*batch)
        self.step(*batches[-1])
        ours = self.step.total_norm
        planned = self.options["grad_scaler"]
        return (
            self.same()
            and (self.scaler is None or self.scaler.state_dict() == planned.state_dict())
            and (norm is None) == (ours is None)
            and (norm is None or norm.item().hex() == ours.item().hex())
        )

    def take_eager(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batches: Any
    ) -> torch.Tensor | None:
        """Take a step as training loops do; return the norm."""
        scaler = self.scaler or torch.amp.GradScaler("cpu", enabled=False)
        for batch in batches:
            scaler.scale(loss_of(model, *batch)).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = None
        if value := self.options.get("clip_value"):
            nn.utils.clip_grad_value_(model.parameters(), value)
        if self.max_norm is not None:
            norm_type = self.options.get("norm_type", 2.0)
            total = nn.utils.clip_grad_norm_(model.parameters(), self.max_norm, norm_type)
            norm = getattr(total, "full_tensor", lambda: total)()
        for optimizer in optimizers:
            if not self.options.get("skip_nonfinite") or norm is None or norm.isfinite():
                scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        return norm

    def same(self) -> bool:
        """Compare weights, gradients and optimizer state."""
        mine = [
            (digest(model), gradients(model), [saved(o) for o in optimizers])
            for model, optimizers in (
                (self.eager, self.optimizers),
                (self.model, self.planned),
            )
        ]
        return mine[0] == mine[1]


def saved(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    state = optimizer.state_dict()["state"]
    return state_digest(optimizer), {number: sorted(of) for number, of in state.items()}


def gradients(model: nn.Module) -> list[Any]:
    found = [(name, p.grad) for name, p in model.named_parameters()]
    return [(name, None if g is None else g.to_local().tolist()) for name, g in found]
