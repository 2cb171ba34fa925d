"""Train one model in several ways on each rank of the demo, and hash its shards after each step.

The runs share weights, text and optimizer, and differ only in how gradients and weights travel.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from ..fsdp.units import FSDPParamOrder
from ..passes.backends import BucketingBackend
from ..passes.base import GraphPass
from ..passes.bucketing import BucketByUnit
from ..planner.resharding import ReshardAfterForward
from ..testing import text
from ..testing.comparison import CompareOptions
from ..testing.ranks import Rank
from ..testing.training import ModelConfig, Training, Transformer, count_collectives
from ..testing.trial import Run, Trial


def train_rank(
    rank: Rank, steps: int, layers: int, labels: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Train on one rank of a ring group; return the fields of each run, by name.

    Rank 0 sends lines of progress with the runs' labels.
    """
    config = ModelConfig(vocab=text.VOCAB, layers=layers, hidden=352)
    batches = partial(text.batch, size=2, seq=config.max_seq)
    options = CompareOptions(
        lambda: (Transformer(config, dtype=torch.bfloat16), batches),
        units=[*(f"blocks.{i}" for i in range(layers)), ""],
        ranks=rank.world_size,
        nodes=1,  # the caller lays them out
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
    )
    trial = Trial(rank, options)

    def training(model: nn.Module, run: Run) -> Training:
        def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(run(tokens).float().flatten(0, 1), targets.flatten())

        return Training(model, partial(trial.backward, loss), lr=3e-3)

    eager = trial.wrapped()
    runs, compilers = {"eager": training(eager, eager)}, dict[str, BucketingBackend]()
    for name in ("fsdp_order", "graph_order"):
        model, compilers[name], run = trial.ours(partial(_passes, name == "fsdp_order"))
        runs[name] = training(model, run)
    called: dict[str, int] = {}
    for step in range(steps):
        for name, train in runs.items():
            if step == 0:
                trial.say(f"first step of: {labels[name]}")
            counting = count_collectives() if name == "eager" else nullcontext(called)
            dist.barrier()  # a run's time must not include stragglers of another run
            with counting as called:
                train.take()
        if (step + 1) % max(1, steps // 5) == 0:
            trial.say(f"step {step + 1} of {steps}")
    number = sum(called.values())
    records = {"eager": {**vars(runs["eager"].done), "before": number, "after": number}}
    for name, compiler in compilers.items():
        (report,) = compiler.reports  # Dynamo has reused no other run's graph
        counts = (sum(n.values()) for n in (report.collectives_before, report.collectives_after))
        records[name] = vars(runs[name].done) | dict(zip(("before", "after"), counts, strict=True))
    return records


def _passes(by_unit: bool, model: Any) -> list[GraphPass]:
    """Return passes that merge collectives into FSDP2's units."""
    order = FSDPParamOrder.from_model(model, units=model.unit_names())
    # fully_shard leaves the root's parameters gathered between forward and backward.
    reshard = ReshardAfterForward(keep=order.units[-1])
    return [reshard, BucketByUnit(order, payload_order="units" if by_unit else None)]
