"""Train the rows ``step/*``: clipping and the optimizer in the planned graphs, too."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from whole_muon import WholeMuon

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.fsdp2 import shard_of
from torch_ext_bucketing.step.rules import StackedMuon
from torch_ext_bucketing.testing.experiments import Payload
from torch_ext_bucketing.testing.training import (
    TrainingRecord,
    count_collectives,
    digest,
    raw_bytes,
)

from .ranks import RowReport, Runs, Tally, compare_layout

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "adamw_fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "adamw_single": (torch.optim.AdamW, {"lr": 1e-3, "foreach": False}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "foreach": True, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "foreach": True, "momentum": 0.9}),
}


class Several:
    """Optimizers that step together."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for each in optimizers for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {p: s for each in self.optimizers for p, s in each.state.items()}

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()


def make_optimizers(name: str, model: nn.Module, muon: type[torch.optim.Muon]) -> Several:
    """Make the optimizers of a row."""
    if not name.endswith("muon"):
        return Several(make_optimizer(name, list(model.parameters())))
    tables = {
        p for m in model.modules() if isinstance(m, nn.Embedding) for p in m._parameters.values()
    }
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        matrices = (2, 3) if name == "stacked_muon" else (2,)
        parts[parameter.ndim in matrices and parameter not in tables].append(parameter)
    return Several(muon(parts[True], lr=0.02), make_optimizer("adamw", parts[False]))


def make_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer with a group for weights and one for the rest, which does not decay."""
    kind, options = OPTIMIZERS[name]
    groups: dict[bool, list[nn.Parameter]] = {}
    # No foreach kernel takes DTensors and other tensors; a model cut by hand has both.
    for parameter in parameters:
        groups.setdefault(parameter.ndim > 1, []).append(parameter)
    given = [
        {"params": params, "weight_decay": 0.1 if wide else 0.0} for wide, params in groups.items()
    ]
    return kind(given, **options)


def state_digest(optimizer: torch.optim.Optimizer | Several) -> str:
    """Return the SHA-256 (hex) of the state: names, classes, dtypes, shapes and bytes."""
    total = hashlib.sha256()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in sorted(optimizer.state.get(parameter, {}).items()):
                about = (name, isinstance(value, DTensor), value.dtype, tuple(value.shape))
                total.update(f"{about}".encode())
                total.update(raw_bytes(shard_of(value)))
    return total.hexdigest()


class StepRuns(Runs):
    """The runs of a row with an optimizer."""

    def run_eager(self, report: RowReport) -> nn.Module:
        eager = self.eager()
        optimizer = make_optimizers(self.row.optimizer, eager, WholeMuon)

        def step(number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            for part in range(self.row.microbatches):
                loss = self.loss(eager, number * self.row.microbatches + part)
                loss.backward()
            norm = None
            if self.row.max_norm:
                norm = self.clip(eager)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        with count_collectives() as counts:
            first = self.run(eager, optimizer, step, 1)
            report.eager_collectives = dict(counts)
        rest = self.run(eager, optimizer, step, self.steps, first)
        report.ran("eager", rest)
        return eager

    def clip(self, eager: nn.Module) -> torch.Tensor:
        """Clip as a training loop does; return the norm."""
        return torch.nn.utils.clip_grad_norm_(eager.parameters(), self.row.max_norm)

    def run_compiled(
        self, name: str, eager: nn.Module, payloads: Sequence[Payload] | None, report: RowReport
    ) -> None:
        torch._dynamo.reset()
        model, tally = self.sharded(), Tally(self.row.per_node)
        inner, passes = self.compiler(model, eager, tally, in_order=payloads is not None)
        muon = StackedMuon if self.row.optimizer == "stacked_muon" else torch.optim.Muon
        optimizer = make_optimizers(self.row.optimizer, model, muon)
        planned = teb.train_step(
            model,
            optimizer.optimizers,
            self.loss_function(),
            max_norm=self.row.max_norm or None,
            passes=passes,
            compiler=inner,
        )

        def step(number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            first = number * self.row.microbatches
            for part in range(self.row.microbatches - 1):
                planned.accumulate(*self.batch(first + part))
            loss = planned(*self.batch(first + self.row.microbatches - 1))
            if number == 0 and payloads is not None:
                report.before, report.after = copy.deepcopy((tally.before, tally.after))
            return loss, planned.total_norm

        unlike = report.digests["eager"] if payloads is None else None
        report.ran(name, self.run(model, optimizer, step, self.steps, unlike=unlike))
        if payloads is not None:
            report.look(planned.backend.reports, self.row.graphs)
            if self.row.layout:
                report.layout_differences += compare_layout(planned.backend, payloads)

    def run(
        self,
        model: nn.Module,
        optimizer: Several,
        step: Callable[[int], tuple[torch.Tensor, torch.Tensor | None]],
        steps: int,
        done: TrainingRecord | None = None,
        unlike: Sequence[str] | None = None,
    ) -> TrainingRecord:
        """Train up to ``steps``; with the digests ``unlike``, up to the first other one."""
        done = done or TrainingRecord()
        for number in range(len(done.digests), steps):
            # A schedule of the learning rate, without a new compile.
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first_lr", group["lr"]) * 0.98**number
            loss, norm = step(number)
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            shown = "none" if norm is None else norm.item().hex()
            done.digests.append(f"{digest(model)} {state_digest(optimizer)} {shown}")
            done.loss.append(loss.item())
            if unlike is not None:
                differs = loss.new_tensor(done.digests[-1] != unlike[number], dtype=torch.int32)
                torch.distributed.all_reduce(differs, op=torch.distributed.ReduceOp.MAX)
                if differs.item():
                    break
        return done
