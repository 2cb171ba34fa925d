"""Train one model in several ways on each rank of the demo, and hash its shards after each step.

The runs share weights, text and optimizer, and differ only in how gradients and weights travel.
"""

from __future__ import annotations

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
from ..testing.differences import bucket_payloads, fsdp_payloads
from ..testing.ranks import Rank
from ..testing.training import ModelConfig, Training, Transformer, count_collectives
from ..testing.trial import Run, Trial
from .demo_results import HEAD_DIM, LABELS, RankReport, RunRecord, Settings

PARAM_DTYPE = torch.bfloat16
REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def make_model(settings: Settings) -> Transformer:
    """Make the model of ``settings``: LLaMA's proportions, two query heads per KV head."""
    heads = settings.dim // HEAD_DIM
    config = ModelConfig(
        vocab=text.VOCAB,
        dim=settings.dim,
        layers=settings.layers,
        heads=heads,
        kv_heads=heads // 2,
        hidden=-(-settings.dim * 8 // 3 // HEAD_DIM) * HEAD_DIM,
        max_seq=settings.seq,
    )
    return Transformer(config, seed=settings.seed, dtype=PARAM_DTYPE)


def train_rank(rank: Rank, settings: Settings) -> RankReport:
    """Train on one rank of a ring group. Rank 0 sends lines of progress."""
    batches = partial(text.batch, size=settings.batch, seq=settings.seq, seed=settings.seed)
    options = CompareOptions(
        lambda: (make_model(settings), batches),
        units=[*(f"blocks.{i}" for i in range(settings.layers)), ""],
        ranks=settings.ranks,
        param_dtype=PARAM_DTYPE,
        reduce_dtype=REDUCE_DTYPES[settings.reduce_dtype],
    )
    trial = Trial(rank, options)

    def training(model: nn.Module, run: Run) -> Training:
        def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(run(tokens).float().flatten(0, 1), targets.flatten())

        return Training(model, partial(trial.backward, loss), settings.lr)

    eager = trial.wrapped()
    runs, compilers = {"eager": training(eager, eager)}, dict[str, BucketingBackend]()
    for name in ("fsdp_order", "graph_order"):
        model, compilers[name], run = trial.ours(partial(_passes, name == "fsdp_order"))
        runs[name] = training(model, run)
    called: dict[str, int] = {}
    for step in range(settings.steps):
        for name, train in runs.items():
            if step == 0:
                trial.say(f"first step of: {LABELS[name]}")
            counting = count_collectives() if name == "eager" else nullcontext(called)
            dist.barrier()  # a run's time must not include stragglers of another run
            with counting as called:
                train.take()
        if (step + 1) % max(1, settings.steps // 5) == 0:
            trial.say(f"step {step + 1} of {settings.steps}")
    order = FSDPParamOrder.from_fsdp(eager)
    payloads = fsdp_payloads(
        eager,
        order,
        shards=settings.ranks,
        param_dtype=PARAM_DTYPE,
        reduce_dtype=REDUCE_DTYPES[settings.reduce_dtype],
    )
    number = sum(called.values())
    done = vars(runs["eager"].done)
    records = {"eager": RunRecord(**done, before=number, after=number, payloads=payloads)}
    for name, compiler in compilers.items():
        if len(compiler.reports) != 1:
            # Dynamo could have reused another run's graph.
            raise RuntimeError(f"run {name} was not compiled exactly once")
        report = compiler.last_report()
        records[name] = RunRecord(
            **vars(runs[name].done),
            before=sum(report.collectives_before.values()),
            after=sum(report.collectives_after.values()),
            payloads=bucket_payloads(report.buckets),
        )
    sizes = [parameter.numel() for parameter in eager.parameters()]
    return RankReport(
        records,
        model={"parameters": sum(sizes), "tensors": len(sizes), "units": len(order.units)},
        torch=torch.__version__,
    )


def _passes(by_unit: bool, model: Any) -> list[GraphPass]:
    """Return passes that merge collectives into FSDP2's units."""
    order = FSDPParamOrder.from_model(model, units=model.unit_names())
    # fully_shard leaves the root's parameters gathered between forward and backward.
    reshard = ReshardAfterForward(keep=order.units[-1])
    return [reshard, BucketByUnit(order, payload_order="units" if by_unit else None)]
