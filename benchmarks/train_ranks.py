"""Run the ways of ``benchmarks/train.py`` on one rank, side by side.

All ways start from the same weights and see the same text. The first steps of each way compile and
warm up; then every round takes one step of each way, in an order that turns by one from round to
round, so that whatever else the machine does hits all ways alike.
"""

import ctypes
import functools
import gc
import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_ext_bucketing as teb
from benchmarks.eager_parity.devices import start, synchronize
from torch_ext_bucketing.graph.nodes import GraphLike, Kind, graph_of
from torch_ext_bucketing.passes.base import Compilation, Stage
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.cost.measure import measure
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.testing import text
from torch_ext_bucketing.testing.ranks import Rank
from torch_ext_bucketing.testing.training import ModelConfig, Transformer, digest
from torch_ext_bucketing.testing.trial import wrap
from torch_ext_bucketing.tuning.tune import TorchBuckets, Tuner, default_candidates

WAYS = {
    "eager": "eager FSDP2",
    "torch": "torch alone",
    "torch_buckets": "torch alone, its buckets",
    "unbucketed": "compiled, no buckets",
    "units": "ours: FSDP2's units",
    "cap": "ours: 25 MiB cap",
    "auto": "ours: caps by cost model",
    "tuned": "ours: tuned",
}
"""The names of the ways, and for people. All but the first are compiled."""

OURS = ("units", "cap", "auto", "tuned")
BASES = ("eager", "torch", "torch_buckets")
"""What the others are divided by."""
Backend = Literal["aot_eager", "inductor"]
BACKENDS: tuple[Backend, ...] = ("aot_eager", "inductor")
WARMUP_STEPS = 3
"""Steps that compile, initialize and touch memory for the first time."""


CAP_MB = 25.0
_HEAD_DIM = 32
_LR = 3e-3
MEMORY_STEPS = 3


@dataclass(frozen=True)
class Training:
    """One group of ranks and one backend; ``steps`` are timed.

    Attributes:
        layers: those of the model, and its width ``dim``; LLaMA's proportions, in bf16.
        batch: sequences of ``seq`` bytes of text per rank and step.
        ways: names out of :data:`WAYS`, ``"eager"`` first.
        predict: whether the ranks measure their machine first, which ours then plan with and the
            cost model times all graphs on.
        device: ``"cpu"``, whose ranks talk over gloo, or ``"cuda"``, over NCCL.
    """

    ranks: int = 4
    steps: int = 30
    layers: int = 4
    dim: int = 512
    batch: int = 2
    seq: int = 64
    backend: Literal["aot_eager", "inductor"] = "aot_eager"
    ways: tuple[str, ...] = tuple(WAYS)
    predict: bool = False
    device: Literal["cpu", "cuda"] = "cpu"

    def __post_init__(self) -> None:
        if self.dim % (2 * _HEAD_DIM):  # two query heads share a head of keys and values
            raise ValueError(f"dim must be a multiple of {2 * _HEAD_DIM}, got {self.dim}")


@dataclass
class WayReport:
    """One way on one rank; times in milliseconds, of every timed step.

    ``step_ms`` are from the model's call to the end of the optimizer's step, ``graphs_ms`` to the
    end of backward; ``predicted_ms`` are these by the cost model, of the forward and the backward
    graph as they were compiled. ``step_bytes`` is what resident memory, or what a GPU's allocator
    has given out, grows by at most during a step, from ``rest_bytes``.
    """

    first_step_s: float = 0.0
    step_ms: list[float] = field(default_factory=list)
    graphs_ms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    predicted_ms: float = 0.0
    rest_bytes: int = 0
    step_bytes: int = 0


RankReport = tuple[dict[str, WayReport], dict[str, Any]]
"""Result of one rank: its ways, and the texts about the model and the machines."""


class Predict(teb.GraphPass):
    """Keep a way's graphs as they are compiled, and time them by the cost model."""

    stage: ClassVar[Stage] = "forward_backward"

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        """Keep ``graph``."""
        self.graphs.append(graph_of(graph))

    def ms(self, machine: teb.Machine) -> float:
        """Return the time of all graphs, one after the other, on ``machine``."""
        return sum(Timeline.of(model_of(graph, machine)).step_ms for graph in self.graphs)


TORCH_BUCKETS: dict[str, Any] = {
    "bucket_all_gathers_fx": "only_fsdp",
    "bucket_reduce_scatters_fx": "fsdp",
}
ENOUGH = teb.PeakMemory(gib=16)
"""A bound that keeps whatever is gathered, as torch alone does, where that is faster."""


@dataclass
class Way:
    """One way to train."""

    model: Transformer
    forward: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    report: WayReport
    predict: Predict | None = None
    tuner: Tuner | None = None


def train_rank(rank: Rank, training: Training) -> RankReport:
    """Train on one rank; send ``(way, seconds of the first step)`` and ``(round, rounds)``."""
    # A schedule may miss a bound that nobody set, on a machine that this is not.
    warnings.simplefilter("ignore")
    device = start(rank, "nccl" if training.device == "cuda" else "gloo")
    try:
        return _train(rank, training, init_device_mesh(device.type, (rank.world_size,)))
    finally:
        dist.destroy_process_group()


def _train(rank: Rank, training: Training, mesh: DeviceMesh) -> RankReport:
    machine = H100
    if training.predict:
        machine = measure((rank.world_size,), kib=(4, 64, 512, 4096, 16384))
    ways = {name: make_way(name, training, mesh, machine) for name in training.ways}
    names = list(ways)
    steps = itertools.count()

    def each_once(take: Callable[[Way, torch.Tensor, torch.Tensor], None], first: int) -> None:
        tokens, targets = text.batch(next(steps), rank.rank, size=training.batch, seq=training.seq)
        tokens, targets = tokens.to(mesh.device_type), targets.to(mesh.device_type)
        for name in names[first:] + names[:first]:
            take(ways[name], tokens, targets)

    tuners = [way.tuner for way in ways.values() if way.tuner is not None]
    for step in itertools.count():
        if step >= WARMUP_STEPS and all(tuner.chosen is not None for tuner in tuners):
            break
        each_once(_step, 0)
        if step == 0:
            for name, way in ways.items():
                way.report.first_step_s = way.report.step_ms[0] / 1e3
                rank.send((name, way.report.first_step_s))
    for way in ways.values():
        way.report.step_ms.clear()
        way.report.graphs_ms.clear()
    with torch.compiler.set_stance("fail_on_recompile"):
        for done in range(training.steps):
            each_once(_step, done % len(names))
            rank.send((done + 1, training.steps))
        timed = {
            name: (list(way.report.step_ms), list(way.report.graphs_ms))
            for name, way in ways.items()
        }
        each_once(_counted_step, 0)
        _return_memory_at_once()
        for _ in range(MEMORY_STEPS):
            each_once(_measured_step, 0)
    for name, way in ways.items():
        way.report.step_ms, way.report.graphs_ms = timed[name]
        if way.predict is not None:
            way.report.predicted_ms = way.predict.ms(machine)
    sizes = [p.numel() for p in ways[names[0]].model.parameters()]
    about = {
        "weights": sum(sizes),
        "tensors": len(sizes),
        "torch": torch.__version__,
        "device_name": torch.cuda.get_device_name() if mesh.device_type == "cuda" else "CPU",
        "machine": str(machine) if training.predict else "",
        "tuned": "".join(tuner.report.to_text() for tuner in tuners if tuner.report is not None),
    }
    return {name: way.report for name, way in ways.items()}, about


def make_way(name: str, training: Training, mesh: DeviceMesh, machine: teb.Machine = H100) -> Way:
    """Make the sharded model and the function that runs it; ours plan for ``machine``."""
    heads = training.dim // _HEAD_DIM
    config = ModelConfig(
        vocab=text.VOCAB,
        dim=training.dim,
        layers=training.layers,
        heads=heads,
        kv_heads=heads // 2,
        hidden=-(-training.dim * 8 // 3 // _HEAD_DIM) * _HEAD_DIM,
        max_seq=training.seq,
    )
    bf16 = torch.bfloat16
    model = Transformer(config, dtype=bf16).to(mesh.device_type)
    if name == "eager":
        policy = MixedPrecisionPolicy(bf16, bf16, cast_forward_inputs=False)
        wrap(model, [(unit,) for unit in model.unit_names()], mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, foreach=True)
        return Way(model, model, optimizer, WayReport())
    order = teb.FSDPParamOrder.from_model(model, units=model.unit_names())
    teb.data_parallel(model, mesh, param_dtype=bf16, reduce_dtype=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, foreach=True)
    compile_ = functools.partial(torch.compile, model, fullgraph=True)
    way = functools.partial(Way, model, optimizer=optimizer, report=WayReport())
    inductor = training.backend == "inductor"
    # Without this package's backend, which switches torch's own buckets off.
    if name == "torch" or (name == "torch_buckets" and inductor):
        options = TORCH_BUCKETS if name == "torch_buckets" else None
        return way(compile_(backend=training.backend, options=options))
    if name == "tuned":
        given = default_candidates(
            model,
            training.backend,
            units=model.unit_names(),
            machine=machine,
            memory=ENOUGH,
            optimizer=optimizer,
        )
        tuner = teb.tune(model, {**given, WAYS["torch"]: training.backend})
        return way(compile_(backend=tuner), tuner=tuner)
    # fully_shard leaves the root's parameters gathered between forward and backward.
    reshard = teb.ReshardAfterForward(keep=order.units[-1])
    kinds: tuple[Kind, ...] = ("all_gather", "reduce_scatter")
    passes: Mapping[str, list[teb.GraphPass]] = {
        "torch_buckets": [TorchBuckets()],
        "unbucketed": [reshard],
        "units": [reshard, teb.BucketByUnit(order), teb.Schedule([teb.Overlap()], machine)],
        "cap": [
            reshard,
            teb.BucketByCap(CAP_MB, kinds=kinds, payload_order=order),
            teb.Schedule([teb.Overlap()], machine),
        ],
        "auto": [
            reshard,
            teb.BucketAndSchedule([teb.Overlap()], payload_order=order, machine=machine),
        ],
    }
    predict = Predict() if training.predict else None
    last = [] if predict is None else [predict]
    backend = teb.backend(training.backend, [*passes[name], *last], model)
    return way(compile_(backend=backend), predict=predict)


def _step(way: Way, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    dist.barrier()  # so that no way pays for another one's stragglers
    start = time.perf_counter()

    def whole() -> torch.Tensor:
        loss = F.cross_entropy(way.forward(tokens).float().flatten(0, 1), targets.flatten())
        loss.backward()
        synchronize(tokens.device)
        way.report.graphs_ms.append((time.perf_counter() - start) * 1e3)
        way.optimizer.step()
        way.optimizer.zero_grad()
        synchronize(tokens.device)
        return loss

    loss = whole() if way.tuner is None else way.tuner.step(whole)()
    way.report.step_ms.append((time.perf_counter() - start) * 1e3)
    way.report.loss.append(loss.item())
    way.report.digests.append(digest(way.model))


_CALLS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
}
"""The functions that eager and compiled code call the process group through."""


def _counted_step(way: Way, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        _step(way, tokens, targets)
    found: Counter[str] = Counter()
    for event in profile.key_averages():
        if event.key in _CALLS:
            found[_CALLS[event.key]] += event.count
    way.report.collectives = dict(sorted(found.items()))


def _measured_step(way: Way, tokens: torch.Tensor, targets: torch.Tensor) -> None:
    gc.collect()
    if tokens.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        way.report.rest_bytes = torch.cuda.memory_allocated()
        _step(way, tokens, targets)
        grown = torch.cuda.max_memory_allocated() - way.report.rest_bytes
        way.report.step_bytes = max(way.report.step_bytes, grown)
        return
    _trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
    before = _status_bytes("VmRSS")
    _step(way, tokens, targets)
    grown = _status_bytes("VmHWM") - before
    if grown > way.report.step_bytes:
        way.report.rest_bytes, way.report.step_bytes = before, grown


def _return_memory_at_once() -> None:
    """Make the allocator return all but small blocks as soon as they are freed."""
    m_mmap_threshold = -3  # as glibc's malloc.h has it
    ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(0)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux alone")
