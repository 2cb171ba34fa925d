"""What each rank of the demo does: train one model several ways, step by step, side by side.

The runs differ in nothing but how gradients and weights travel. They start from the same
weights, see the same text in the same order and use the same optimizer; after each step every
rank hashes its shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ...fsdp.order import FSDPParamOrder
from ...fsdp.simple_fsdp import data_parallel
from ...passes.backends import BucketingBackend, backend
from ...passes.bucketing import BucketUnits
from ...rewrites.resharding import ReshardAfterForward
from .. import text
from ..model import ModelConfig, Transformer
from ..payloads import bucket_payloads, fsdp_payloads
from ..ranks import Rank
from ..ring import RingTopology, ring_rank
from ..training import count_collectives, digest
from ..untouched import require_untouched_torch
from .results import RankReport, RunRecord
from .rounding import eager_rounding
from .settings import HEAD_DIM, Settings

PARAM_DTYPE = torch.bfloat16
REDUCE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def model_config(settings: Settings) -> ModelConfig:
    """The model that ``settings`` ask for: LLaMA's proportions, two query heads per KV head."""
    heads = settings.dim // HEAD_DIM
    hidden = -(-settings.dim * 8 // 3 // HEAD_DIM) * HEAD_DIM
    return ModelConfig(
        vocab=text.VOCAB,
        dim=settings.dim,
        layers=settings.layers,
        heads=heads,
        kv_heads=heads // 2,
        hidden=hidden,
        max_seq=settings.seq,
    )


@dataclass
class Run:
    """One way to train. ``eager_rounding`` holds while it compiles."""

    name: str
    module: Transformer
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    record: RunRecord = field(default_factory=RunRecord)
    eager_rounding: bool = False
    compiler: BucketingBackend | None = None


def train_rank(rank: Rank, settings: Settings) -> RankReport:
    """Entry point of a rank; see :func:`.run_ranks`.

    Sends ``(step, run name, digest)`` after each step of each run, and ``(0, run name, "")``
    before a run's first step, which is the one that compiles.
    """
    topology = RingTopology(
        ranks_per_node=settings.ranks // settings.nodes,
        channels=settings.channels,
        chunk_bytes=settings.chunk_bytes,
    )
    with ring_rank(rank, topology):
        return _train(rank, settings, init_device_mesh("cpu", (settings.ranks,)))


def _train(rank: Rank, settings: Settings, mesh: DeviceMesh) -> RankReport:
    eager = eager_run(settings, mesh)
    runs = [eager, *compiled_runs(settings, mesh)]
    # From the real thing: what FSDP2's param groups hold, in their order.
    fsdp_order = FSDPParamOrder.from_fsdp(eager.module)
    for step in range(settings.steps):
        tokens, targets = text.batch(
            step, rank.rank, size=settings.batch, seq=settings.seq, seed=settings.seed
        )
        for run in runs:
            if step == 0:
                rank.send((0, run.name, ""))
            # What a later step compiled would not be in the report.
            stance = torch.compiler.set_stance("fail_on_recompile" if step else "default")
            rounding = eager_rounding() if run.eager_rounding and not step else nullcontext()
            counting = count_collectives() if run is eager else nullcontext()
            with stance, rounding, counting as counts:
                _step(run, tokens, targets)
            if counts is not None:
                run.record.before = run.record.after = counts
            rank.send((step + 1, run.name, run.record.digests[-1]))
    eager.record.payloads = fsdp_payloads(
        eager.module,
        fsdp_order,
        shards=settings.ranks,
        param_dtype=PARAM_DTYPE,
        reduce_dtype=REDUCE_DTYPES[settings.reduce_dtype],
    )
    for run in runs[1:]:
        _read_report(run)
    require_untouched_torch()
    sizes = [parameter.numel() for parameter in eager.module.parameters()]
    return RankReport(
        runs={run.name: run.record for run in runs},
        model={"parameters": sum(sizes), "tensors": len(sizes), "units": len(fsdp_order.units)},
        versions={"torch": torch.__version__},
    )


def _step(run: Run, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    dist.barrier()  # so that no run pays for another one's stragglers
    start = time.perf_counter()
    logits = run.forward(tokens)
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.record.step_ms.append((time.perf_counter() - start) * 1e3)
    run.record.loss.append(loss.item())
    run.record.digests.append(digest(run.module))


def eager_run(settings: Settings, mesh: DeviceMesh) -> Run:
    """Eager FSDP2: ``fully_shard`` per block, then the root."""
    model = _model(settings).to(mesh.device_type)
    policy = MixedPrecisionPolicy(
        param_dtype=PARAM_DTYPE,
        reduce_dtype=REDUCE_DTYPES[settings.reduce_dtype],
        # The rotary tables are inputs of the blocks and stay float32, as in the other runs.
        cast_forward_inputs=False,
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return Run("eager", model, model, _optimizer(model, settings))


def compiled_runs(settings: Settings, mesh: DeviceMesh) -> list[Run]:
    """The compiled runs: FSDP2's payload order, graph order and, for Inductor, two more."""
    names = ["fsdp_order", "graph_order"]
    if settings.backend == "inductor":
        names += ["fsdp_order_again", "fsdp_order_precise"]
    return [_compiled_run(name, settings, mesh) for name in names]


def _compiled_run(name: str, settings: Settings, mesh: DeviceMesh) -> Run:
    """SimpleFSDP: one collective per parameter, merged by the compiler into FSDP2's units."""
    model = _model(settings)
    order = FSDPParamOrder.from_model(model, units=model.unit_names())
    data_parallel(
        model, mesh, param_dtype=PARAM_DTYPE, reduce_dtype=REDUCE_DTYPES[settings.reduce_dtype]
    )
    # fully_shard leaves the root's parameters gathered between forward and backward.
    root = order.units[-1]
    units = BucketUnits(order, payload_order=None if name == "graph_order" else "units")
    compiler = backend(settings.backend, [ReshardAfterForward(keep=root), units], model)
    return Run(
        name,
        model,
        torch.compile(model, backend=compiler, fullgraph=True),
        _optimizer(model, settings),
        eager_rounding=name == "fsdp_order_precise",
        compiler=compiler,
    )


def _model(settings: Settings) -> Transformer:
    return Transformer(model_config(settings), seed=settings.seed, dtype=PARAM_DTYPE)


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=settings.lr, foreach=True)


def _read_report(run: Run) -> None:
    if run.compiler is None or len(run.compiler.reports) != 1:
        # Dynamo could have taken another run's graph for this one.
        raise RuntimeError(f"run {run.name} was not compiled exactly once, on its own")
    report = run.compiler.last_report()
    run.record.before = dict(report.collectives_before)
    run.record.after = dict(report.collectives_after)
    run.record.payloads = bucket_payloads(report.buckets)
