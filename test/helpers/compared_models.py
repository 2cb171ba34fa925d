"""Models with one fault each, and one without, for ``test_compare.py``."""

import random
from typing import Any

import torch
import torch.nn as nn

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.nodes import GraphLike, graph_of, kind_of
from torch_ext_bucketing.passes.base import Compilation, GraphPass
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.passes.pipeline import in_order

DIM = 32


class Block(nn.Module):
    """Owns a parameter and has children."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(DIM) if kind == "rounded" else nn.Identity()
        self.scale = nn.Parameter(torch.ones(DIM))
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if self.kind == "random":
            hidden = hidden * (1 + 0.1 * random.random())
        if self.kind == "branch" and torch.compiler.is_compiling():
            hidden = hidden * 3.0
            hidden = hidden / 3.0
        if self.kind == "decomposed":
            wide = nn.functional.interpolate(hidden[None], scale_factor=2, mode="linear")
            hidden = wide[0, :, : 2 * DIM]
        if self.kind == "crossing":
            hidden = hidden + self.up(memory) * torch.tanh(memory).repeat(1, 2)
        if self.kind == "twice":
            hidden = self.up(torch.tanh(self.down(torch.relu(hidden))))
        # Inductor's tanh rounds differently from ATen's.
        hidden = torch.relu(hidden) if self.kind == "rounded" else torch.tanh(hidden)
        return x + self.down(hidden) * self.scale


class Model(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.last = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = x = self.first(x)
        for block in self.blocks:
            x = block(x, memory)
        return self.last(x).square().mean()


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(6, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def of_kind(kind: str) -> Any:
    return Model(kind), inputs


def sound() -> Any:
    return of_kind("")


def randomly() -> Any:
    return of_kind("random")


def rounded() -> Any:
    return Model("rounded"), lambda step, rank: inputs(step, rank).bfloat16()


def without(name: str, model: nn.Module) -> Any:
    return [p for p in in_order(teb.recipe(model), model) if p.name != name]


def tied_and_uneven() -> Any:
    """Make a model with a tied weight, layers that run twice, and uneven shards."""
    model = Model("twice")
    model.last.weight = model.first.weight
    for block in model.blocks:
        block.up = nn.Linear(DIM, 2 * DIM + 1)
        block.down = nn.Linear(2 * DIM + 1, DIM, bias=False)
    return model, rounded()[1]


def failing() -> Any:
    return 1 // 0


def model_only() -> Any:
    return Model()


def too_small() -> Any:
    return nn.Linear(1, 1, bias=False), torch.ones(1, 1)


def no_blocks() -> Any:
    return nn.Linear(DIM, DIM), inputs


def no_loss() -> Any:
    return nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), inputs


def other_units(model: nn.Module) -> Any:
    return teb.recipe(model, units=["blocks.0", ["blocks.1", "first"], "last"])


def graph_order(model: nn.Module) -> Any:
    order = teb.FSDPParamOrder.from_model(model, units=teb.transformer_block_plan(model))
    return [CombineUses(), teb.BucketByUnit(order, payload_order=None)]


def rank_order(model: nn.Module) -> Any:
    return teb.recipe(model, reduce="all_to_all")


class Sums(GraphPass):
    """Replaces the average of reduce-scatters by a sum."""

    stage = "forward_backward"

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        for node in graph_of(graph).nodes:
            if kind_of(node) == "reduce_scatter":
                node.update_arg(1, "sum")


def without_average(model: nn.Module) -> Any:
    return [*teb.recipe(model), Sums()]


def all_but_last(model: Model, mesh: Any) -> None:
    last, model.last = model.last, nn.Identity()
    teb.data_parallel(model, mesh)
    model.last = last
