"""Models from the module trees of :mod:`.soak_cases`.

Every operator lowers to the ATen calls of eager, so that ``aot_eager`` can give eager's bits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from benchmarks.parity_ranks import DTYPES
from benchmarks.soak_cases import Case, Item, random_units
from torch_ext_bucketing.testing.model import RMSNorm


class Mlp(nn.Module):
    """A residual branch of two linear layers."""

    def __init__(self, dim: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=bias)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(x)))


class Node(nn.Module):
    """Applies its items one after the other to ``[batch, seq, dim]``. Owns parameters and has
    children, in whatever order the items come."""

    def __init__(self, items: Sequence[Item], dim: int) -> None:
        super().__init__()
        self.names: list[tuple[str, str]] = []
        for position, (kind, *rest) in enumerate(items):
            name = f"{kind}{position}"
            self.names.append((kind, name))
            if kind == "node":
                self.add_module(name, Node(rest[0], dim))
            elif kind == "mlp":
                self.add_module(name, Mlp(dim, *rest))
            elif kind == "norm":
                self.add_module(name, RMSNorm(dim, 1e-5))
            else:
                shape = {
                    "scale": (dim,),
                    "shift": (dim,),
                    "gain": (1,),
                    "matrix": (*rest, dim),
                    "experts": (*rest, dim, dim),
                }[kind]
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for kind, name in self.names:
            item = getattr(self, name)
            if kind in ("scale", "gain"):
                x = x * item
            elif kind == "shift":
                x = x + item
            elif kind == "matrix":
                x = x + torch.relu(x @ item.t()) @ item
            elif kind == "experts":
                rows = x.flatten(0, 1).unsqueeze(0).expand(item.shape[0], -1, -1)
                x = x + torch.bmm(rows, item).sum(0).view(x.shape)
            else:
                x = item(x)
        return x


class Model(nn.Module):
    """Token ids ``[batch, seq]`` int64 to logits ``[batch, seq, vocab]``."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embed = nn.Embedding(case.vocab, case.dim)
        self.body = Node(case.tree, case.dim)
        self.head = nn.Linear(case.dim, case.vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


def build(case: Case) -> tuple[Model, list[str | list[str]]]:
    """The model, with the same weights at every call, and its units."""
    model = Model(case)
    rng = random.Random(case.unit_seed)
    holders = [
        name
        for name, module in model.named_modules()
        if name and next(module.parameters(), None) is not None
    ]
    units = random_units(holders, rng)
    unit_of = _unit_finder(units)
    # FSDP2 takes a shared parameter only where all its users are in one unit.
    if case.tied and unit_of("embed.weight") == unit_of("head.weight"):
        model.head.weight = model.embed.weight
    if case.tied_matrices:
        _tie_matrices(model, unit_of)
    generator = torch.Generator().manual_seed(case.unit_seed)
    parameters = list(model.parameters())
    for parameter in parameters:
        drawn = torch.randn(parameter.shape, generator=generator)
        around = 1.0 if parameter.dim() == 1 else 0.0
        scale = 0.3 / max(1, parameter.shape[-1]) ** 0.5
        parameter.data = (around + scale * drawn).to(DTYPES[case.store_dtype])
    if case.frozen:
        for parameter in parameters[:: case.frozen]:
            if parameter is not model.embed.weight:
                parameter.requires_grad_(False)
    return model, units


def tied(model: nn.Module) -> bool:
    """Whether a parameter is shared."""
    return len(list(model.named_parameters(remove_duplicate=False))) != len(
        list(model.named_parameters())
    )


def batch(case: Case, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, ``[2, 5]`` int64 each: a function of the arguments alone."""
    generator = torch.Generator().manual_seed((case.unit_seed << 12) ^ (step << 6) ^ rank)
    tokens = torch.randint(case.vocab, (2, 6), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _unit_finder(units: Sequence[str | list[str]]) -> Any:
    index = {
        name: i
        for i, unit in enumerate(units)
        for name in ([unit] if isinstance(unit, str) else unit)
    }

    def unit_of(fqn: str) -> int:
        while fqn not in index:
            fqn = fqn.rpartition(".")[0]
        return index[fqn]

    return unit_of


def _tie_matrices(model: Model, unit_of: Any) -> None:
    seen: dict[tuple[Any, ...], nn.Parameter] = {}
    for fqn, parameter in list(model.named_parameters()):
        owner, _, name = fqn.rpartition(".")
        if name.startswith("matrix"):
            first = seen.setdefault((unit_of(fqn), tuple(parameter.shape)), parameter)
            setattr(model.get_submodule(owner), name, first)
