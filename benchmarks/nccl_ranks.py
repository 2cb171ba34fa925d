"""What each rank of ``benchmarks/nccl.py`` does: eager FSDP2, then the compiled runs.

All runs of one number of ranks share one process group per set of ranks. They start from the same
weights and see the same text. Where the device is a GPU, everything is placed on it: model, batch,
collectives; a step's time ends when the device is done.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.nccl_cells import (
    WARMUP_STEPS,
    Key,
    Settings,
    TimedReport,
    in_order,
    nccl_environment,
)
from benchmarks.parity_models import batch_of
from benchmarks.parity_ranks import (
    aten_kernels,
    bucket_units,
    compare_layout,
    compilable_model,
    eager_model,
    reshard,
)
from torch_ext_bucketing.fsdp.order import FSDPParamOrder
from torch_ext_bucketing.graph.collectives import count_collectives
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.base import Compilation, GraphPass, Stage
from torch_ext_bucketing.testing.compare import count_collectives as count_calls
from torch_ext_bucketing.testing.compare import digest
from torch_ext_bucketing.testing.demo.results import Payload
from torch_ext_bucketing.testing.ranks import Rank


def run_rank(rank: Rank, keys: Sequence[Key], settings: Settings) -> None:
    """Entry point of a rank: run ``keys``, all of one number of ranks.

    Sends ``("about", dict)`` from rank 0, ``("begin", key)`` before each run and
    ``("end", key, report)`` after it, or ``("end", key, why)`` where it was left out.
    """
    began = time.monotonic()
    device = start(rank, settings.backend)
    if rank.rank == 0:
        rank.send(("about", _about(device)))
    _Runs(rank, settings, device, began).run(keys)
    # Not in a finally: to destroy NCCL's communicators can wait for ranks that never answer, and
    # a rank that failed must say so at once.
    dist.destroy_process_group()


def start(rank: Rank, backend_name: str) -> torch.device:
    """Join the process group; returns the rank's device, which is the current one.

    Raises:
        ValueError: see :func:`.nccl_environment`.
    """
    torch.set_num_threads(1)
    # A graph from a cache has not been through the passes.
    inductor_config.fx_graph_cache = False
    functorch_config.enable_autograd_cache = False
    device = torch.device("cpu")
    inductor_config.compile_threads = 2
    if backend_name == "nccl":
        # Before the first CUDA call of this process, which is when these are read.
        devices = torch.cuda.device_count()
        os.environ.update(nccl_environment(rank.rank, rank.world_size, devices))
        device = torch.device("cuda", rank.rank % devices)
        torch.cuda.set_device(device)
        # Triton compiles in processes of their own, per rank; a GPU's machine has cores for it.
        cores = len(os.sched_getaffinity(0))
        inductor_config.compile_threads = max(1, min(8, cores // rank.world_size))
        # Of the attention kernels only this one is made of operators that eager and a traced
        # graph run alike, and adds in a fixed order in backward.
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.enable_math_sdp(True)
    dist.init_process_group(
        backend_name,
        store=dist.FileStore(rank.store_path, rank.world_size),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=rank.timeout,
    )
    return device


def synchronize(device: torch.device) -> None:
    """Wait until ``device`` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _about(device: torch.device) -> dict[str, Any]:
    about: dict[str, Any] = {"torch": torch.__version__, "device": f"CPU ({platform.machine()})"}
    if device.type == "cuda":
        about["device"] = torch.cuda.get_device_name(device)
        about["gpus"] = torch.cuda.device_count()
        about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return about


class TorchBuckets(GraphPass):
    """torch's own greedy bucketing with its defaults, as Inductor's post-grad passes run it."""

    stage: Stage = "forward_backward"

    def run(self, graph: fx.GraphModule | fx.Graph, compilation: Compilation) -> None:
        """Merge neighbours, reductions first; the hooks are unset here."""
        from torch._inductor.fx_passes import bucketing
        from torch._inductor.pattern_matcher import stable_topological_sort

        gm = graph if isinstance(graph, fx.GraphModule) else graph.owning_module
        assert gm is not None
        bucketing.bucket_reduce_scatter(gm)
        bucketing.bucket_all_reduce(gm)
        bucketing.bucket_all_gather(gm)
        stable_topological_sort(gm.graph)
        gm.graph.lint()


class CountCollectives(GraphPass):
    """Adds up the collectives of all graphs of one compile, as they are when it runs."""

    stage: Stage = "forward_backward"

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def run(self, graph: fx.GraphModule | fx.Graph, compilation: Compilation) -> None:
        """Count ``graph``'s."""
        found = count_collectives(graph.graph if isinstance(graph, fx.GraphModule) else graph)
        for kind, number in found.items():
            self.counts[kind] = self.counts.get(kind, 0) + number


class _Runs:
    """The runs of one launch, on one rank."""

    def __init__(self, rank: Rank, settings: Settings, device: torch.device, began: float) -> None:
        self.rank = rank
        self.settings = settings
        self.device = device
        self.began = began
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.eager: dict[str, tuple[TimedReport, list[Payload]]] = {}

    def run(self, keys: Sequence[Key]) -> None:
        for key in in_order(keys):
            if key.parallelism not in self.eager:
                for run in ("eager", "eager_again"):
                    self._reported(Key(key.ranks, key.parallelism, "-", run))
            if key.run != "ours" and self._any_rank(self._late()):
                self.rank.send(("end", key, "out of time"))
                continue
            report = self._reported(key)
            expected = self.eager[key.parallelism][0].digests
            # Inductor's kernels may round as eager's do not. With ATen's in their place nothing but
            # what this package does could differ.
            proof = key.run == "ours" and key.backend == "inductor"
            if proof and self._any_rank(report.digests != expected):
                again = Key(key.ranks, key.parallelism, key.backend, "aten_kernels")
                with aten_kernels():
                    self._reported(again)

    def _late(self) -> bool:
        return time.monotonic() - self.began > self.settings.soft_s

    def _any_rank(self, mine: bool) -> bool:
        """Whether it holds on some rank; all ranks get the same answer, at about the same time."""
        flag = torch.tensor([int(mine)], device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _reported(self, key: Key) -> TimedReport:
        self.rank.send(("begin", key))
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        began = time.perf_counter()
        report = self._eager(key) if key.backend == "-" else self._compiled(key)
        report.seconds = time.perf_counter() - began
        self.rank.send(("end", key, report))
        return report

    def _mesh(self, key: Key) -> DeviceMesh:
        shape = key.reference.mesh_shape
        if shape not in self.meshes:
            names = ("dp",) if len(shape) == 1 else ("dp", "inner")
            self.meshes[shape] = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self.meshes[shape]

    def _eager(self, key: Key) -> TimedReport:
        before = self._allocated()
        model, payloads = eager_model(
            key.reference, self._mesh(key), self.settings.layers, self.settings.dim
        )
        report = self._train(model, model, before, proof=key.run == "eager")
        self.eager.setdefault(key.parallelism, (report, payloads))
        return report

    def _compiled(self, key: Key) -> TimedReport:
        settings = self.settings
        before = self._allocated()
        model, order = compilable_model(
            key.reference, self._mesh(key), settings.layers, settings.dim
        )
        count = CountCollectives()
        passes = [reshard(order), *_bucketing(key.run, order), count]
        compiler = backend(key.backend, passes=passes, model=model)  # type: ignore[arg-type]
        forward = torch.compile(model, backend=compiler, fullgraph=True)
        proof = key.run in ("ours", "aten_kernels")
        report = self._train(model, forward, before, proof=proof)
        report.collectives = count.counts
        if proof:
            report.layout_differences = compare_layout(compiler, self.eager[key.parallelism][1])
        return report

    def _train(
        self, model: nn.Module, forward: Callable[..., torch.Tensor], before: int, *, proof: bool
    ) -> TimedReport:
        report = TimedReport()
        steps = self.settings.steps if proof else self.settings.timed_steps
        enough = steps if proof else WARMUP_STEPS + 1
        began_run: float | None = None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        for step in range(steps):
            batch = batch_of(step, self.rank.rank, size=self.settings.batch)
            tokens, targets = (tensor.to(self.device) for tensor in batch)
            if step == min(1, steps - 1) and self.device.type == "cuda":
                # What compiling allocates is no memory of a step.
                torch.cuda.reset_peak_memory_stats(self.device)
            # This is a barrier as well: no run pays for another one's stragglers.
            spent = 0.0 if began_run is None else time.monotonic() - began_run
            slow = spent > self.settings.run_s or self._late()
            if self._any_rank(slow and step >= enough):
                break
            if step == 1:
                began_run = time.monotonic()
            with contextlib.ExitStack() as stack:
                if step and forward is not model:
                    # What a later step compiled would be under other settings, and timed.
                    stack.enter_context(torch.compiler.set_stance("fail_on_recompile"))
                elif forward is model:
                    report.collectives = stack.enter_context(count_calls())
                began = time.perf_counter()
                loss = forward(tokens, targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                synchronize(self.device)
                report.step_ms.append((time.perf_counter() - began) * 1e3)
            if self.device.type == "cuda":
                report.peak_bytes = torch.cuda.max_memory_allocated(self.device) - before
            report.loss.append(loss.item())
            report.digests.append(digest(model))
        return report

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0


def _bucketing(run: str, order: FSDPParamOrder) -> list[GraphPass]:
    if run == "unbucketed":
        return []
    if run == "torch_buckets":
        return [TorchBuckets()]
    return [bucket_units(order, run != "graph_order")]
