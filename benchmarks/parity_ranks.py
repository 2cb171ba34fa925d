"""What each rank of the parity matrix does: one eager run, then the compiled runs of its cells.

All runs of a reference start from the same weights and see the same text. After every step each
rank hashes its shards and keeps the hash; the launching process compares those of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch._inductor import decomposition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.devices import start
from benchmarks.parity_cells import (
    CHANNELS,
    CHUNK_BYTES,
    LOSS_CHUNKS,
    Cell,
    CellReport,
    Reference,
    RunReport,
)
from benchmarks.parity_models import (
    Llama,
    ParityModel,
    batch_of,
    build,
    tensor_parallel,
    unit_names,
)
from torch_ext_bucketing.fsdp.order import FSDPParamOrder
from torch_ext_bucketing.fsdp.simple_fsdp import data_parallel
from torch_ext_bucketing.graph.collectives import KINDS
from torch_ext_bucketing.passes.backends import BucketingBackend, backend
from torch_ext_bucketing.passes.base import Compilation, GraphPass, Stage
from torch_ext_bucketing.passes.bucketing import BucketUnits
from torch_ext_bucketing.rewrites.combine_uses import CombineUses
from torch_ext_bucketing.rewrites.reduce_scatter_first import ReduceScatterFirst
from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward
from torch_ext_bucketing.testing.payloads import (
    Payload,
    bucket_payloads,
    fsdp_payloads,
    layout_differences,
)
from torch_ext_bucketing.testing.ranks import Rank
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import train

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Of computation, gathers and reductions; weights and optimizer are float32 in all cells. Gradients
computed in bfloat16 would prove little about float32 reductions: the sum of a few of them is mostly
exact in float32, in whatever order."""


@contextlib.contextmanager
def aten_kernels() -> Iterator[None]:
    """While this lasts, Inductor compiles every operator to the kernel that eager runs: nothing is
    decomposed, no cast is dropped and no code is generated. The rest of Inductor stays: its passes
    and ours, its scheduling, its wrapper."""
    table = decomposition.decompositions
    removed = dict(table)
    table.clear()
    decomposition.fast_random_decomps.cache_clear()  # it keeps a copy of the table
    try:
        with inductor_config.patch(fallback_by_default=True, emulate_precision_casts=True):
            yield
    finally:
        table.update(removed)
        decomposition.fast_random_decomps.cache_clear()


class GraphOrderTwin(GraphPass):
    """Makes the control of a run from the same compile: every graph a second time, its buckets
    packed in graph order, to be run in place of the first while ``active``.

    Comes before the run's own ``BucketUnits``, and compiles the graphs, too: as ``"aot_eager"``
    does, by running them as they are.

    Args:
        bucket: buckets in graph order.
    """

    stage: Stage = "forward_backward"

    def __init__(self, bucket: BucketUnits) -> None:
        self.active = False
        self._bucket = bucket
        self._twin: fx.GraphModule | None = None

    def run(self, graph: fx.GraphModule | fx.Graph, compilation: Compilation) -> None:
        """Copy ``graph`` and bucket the copy."""
        assert isinstance(graph, fx.GraphModule)
        self._twin = fx.GraphModule(graph, copy.deepcopy(graph.graph))
        self._bucket(self._twin)
        self._twin.recompile()

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run ``graph``, or its twin while ``active``."""
        twin, self._twin = self._twin, None
        assert twin is not None

        def run(*args: Any) -> Any:
            return (twin if self.active else graph).forward(*args)

        return run


DIMS = {"cpu": None, "cuda": 1024}
"""Width of the models by device; None for their own."""
BATCHES = {"cpu": 2, "cuda": 16}
"""Sequences per rank and step."""

INDUCTOR_RUNS = {
    "fsdp_order": (True, False),
    "aten_kernels": (True, True),
    "control": (False, True),
}
"""Runs of an Inductor cell: whether buckets are in FSDP2's order, and whether on ATen's kernels."""


def run_cells(rank: Rank, cells: Sequence[Cell], steps: int, layers: int) -> None:
    """Entry point of a rank: run ``cells``, all of one topology, and send a report of each."""
    with _in_group(rank, cells[0].reference):
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        eager: tuple[Reference, RunReport, list[Payload]] | None = None
        for cell in cells:
            reference = cell.reference
            shape = reference.mesh_shape
            if shape not in meshes:
                names = ("dp",) if len(shape) == 1 else ("dp", "inner")
                meshes[shape] = init_device_mesh(reference.device, shape, mesh_dim_names=names)
            if eager is None or eager[0] != reference:
                rank.send(("run", f"{cell.name}: eager"))
                eager = (reference, *_eager(reference, meshes[shape], steps, layers))
            job = _Job(reference, meshes[shape], steps, layers, eager[1], eager[2])
            if cell.backend == "inductor":
                runs = {}
                for name, (ordered, on_aten) in INDUCTOR_RUNS.items():
                    rank.send(("run", f"{cell.name}: {name}"))
                    with aten_kernels() if on_aten else contextlib.nullcontext():
                        runs[name] = _inductor(job, ordered)
            else:
                rank.send(("run", f"{cell.name}: fsdp_order and control"))
                runs = _aot_eager(job)
            rank.send(("cell", CellReport(cell, eager[1], runs, torch.__version__)))


@contextlib.contextmanager
def _in_group(rank: Rank, reference: Reference) -> Iterator[None]:
    """A ring group of the reference's nodes; on GPUs NCCL's."""
    if reference.device == "cpu":
        per_node = reference.ranks_per_node
        with ring_rank(rank, RingTopology(per_node, CHANNELS, CHUNK_BYTES, reference.nodes)):
            yield
        return
    start(rank, "nccl")
    yield
    # Not in a finally: to destroy NCCL's communicators can wait for ranks that never answer, and
    # a rank that failed must say so at once.
    dist.destroy_process_group()


def _model(
    reference: Reference, layers: int, mesh: DeviceMesh, dim: int | None = None
) -> tuple[ParityModel, DeviceMesh]:
    """The model on the mesh's device, and the mesh that its data parallelism runs over."""
    chunks = LOSS_CHUNKS if reference.parallelism == "fsdp+chunked_loss" else 1
    model = build(reference.model, layers=layers, dim=dim, chunks=chunks).to(mesh.device_type)
    if reference.parallelism != "fsdp+tp":
        return model, mesh
    assert isinstance(model, Llama)
    inner = mesh["inner"]
    name = inner.get_group().group_name
    tensor_parallel(model, inner.get_local_rank(), inner.size(), name)
    return model, mesh["dp"]


def _shard_of_data(reference: Reference) -> int:
    """Which part of the text this rank sees: tensor-parallel ranks all see the same."""
    if reference.parallelism == "fsdp+tp":
        return dist.get_rank() // reference.ranks_per_node
    return dist.get_rank()


def _eager(
    reference: Reference, mesh: DeviceMesh, steps: int, layers: int
) -> tuple[RunReport, list[Payload]]:
    start = time.perf_counter()
    model, payloads = eager_model(reference, mesh, layers)
    report = RunReport()
    _train(model, model, report, steps, _shard_of_data(reference))
    report.seconds = time.perf_counter() - start
    return report, payloads


def eager_model(
    reference: Reference, mesh: DeviceMesh, layers: int, dim: int | None = None
) -> tuple[ParityModel, list[Payload]]:
    """Eager FSDP2, on the mesh's device, and what its collectives carry.

    Args:
        reference: says which model, in which parallelism.
        mesh: of the shape that ``reference`` asks for.
        layers: number of blocks.
        dim: width of the model; None for that of its device.
    """
    model, mesh = _model(reference, layers, mesh, dim or DIMS[reference.device])
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[reference.reduce_dtype],
        reduce_dtype=DTYPES[reference.reduce_dtype],
        # Rotary tables and gates are inputs of units and stay float32, as in the compiled runs.
        cast_forward_inputs=False,
    )
    for name in unit_names(reference.model, model):
        fully_shard(model.get_submodule(name), mesh=mesh, mp_policy=policy)
    order = FSDPParamOrder.from_fsdp(model)
    dtype = DTYPES[reference.reduce_dtype]
    return model, fsdp_payloads(
        model,
        order,
        shards=reference.shard_size,
        param_dtype=dtype,
        reduce_dtype=dtype,
        replicas=reference.replicas,
    )


def compilable_model(
    reference: Reference, mesh: DeviceMesh, layers: int, dim: int | None = None
) -> tuple[ParityModel, FSDPParamOrder]:
    """SimpleFSDP, one collective per parameter, and FSDP2's order; arguments as of
    :func:`eager_model`."""
    model, mesh = _model(reference, layers, mesh, dim or DIMS[reference.device])
    order = FSDPParamOrder.from_model(model, units=unit_names(reference.model, model))
    data_parallel(
        model,
        mesh,
        "hybrid_shard" if reference.parallelism == "hsdp" else "fully_shard",
        param_dtype=DTYPES[reference.reduce_dtype],
        reduce_dtype=DTYPES[reference.reduce_dtype],
    )
    return model, order


@dataclass(frozen=True)
class _Job:
    """What the compiled runs of a reference share."""

    reference: Reference
    mesh: DeviceMesh
    steps: int
    layers: int
    eager: RunReport
    payloads: Sequence[Payload]

    def model_and_order(self) -> tuple[ParityModel, FSDPParamOrder]:
        return compilable_model(self.reference, self.mesh, self.layers)

    def train(self, model: nn.Module, compiler: BucketingBackend, *, control: bool) -> RunReport:
        """Compile and train, to the first difference from eager if ``control``."""
        torch._dynamo.reset()
        start = time.perf_counter()
        forward = torch.compile(model, backend=compiler, fullgraph=True)
        report = self.continue_training(model, forward, control=control)
        report.layout_differences = compare_layout(compiler, self.payloads)
        report.seconds = time.perf_counter() - start
        return report

    def continue_training(
        self, model: nn.Module, forward: Callable[..., torch.Tensor], *, control: bool = False
    ) -> RunReport:
        report = RunReport()
        _train(
            model,
            forward,
            report,
            self.steps,
            _shard_of_data(self.reference),
            stop_unlike=self.eager.digests if control else None,
        )
        return report


def bucket_units(order: FSDPParamOrder, ordered: bool) -> BucketUnits:
    """One collective per unit, kind and group, its payload in FSDP2's order if ``ordered``."""
    # All kinds: HSDP's all-reduces run over the same buffers as its reduce-scatters.
    return BucketUnits(order, kinds=KINDS, payload_order="units" if ordered else None)


def rewrites() -> list[GraphPass]:
    """What makes one gather and one reduction per parameter, in eager FSDP2's order."""
    return [CombineUses(), ReduceScatterFirst()]


def reshard(order: FSDPParamOrder) -> ReshardAfterForward:
    """Gather again in backward as eager FSDP2 does."""
    # fully_shard leaves the root's parameters gathered between forward and backward.
    return ReshardAfterForward(keep=order.units[-1])


def _inductor(job: _Job, ordered: bool) -> RunReport:
    model, order = job.model_and_order()
    compiler = backend(
        "inductor",
        passes=[*rewrites(), reshard(order), bucket_units(order, ordered)],
        model=model,
    )
    return job.train(model, compiler, control=not ordered)


def _aot_eager(job: _Job) -> dict[str, RunReport]:
    model, order = job.model_and_order()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    twin = GraphOrderTwin(bucket_units(order, False))
    compiler = backend(
        twin.compile,
        passes=[*rewrites(), reshard(order), twin, bucket_units(order, True)],
        model=model,
    )
    torch._dynamo.reset()
    clock = time.perf_counter()
    forward = torch.compile(model, backend=compiler, fullgraph=True)
    ours = job.continue_training(model, forward)
    ours.layout_differences = compare_layout(compiler, job.payloads)
    ours.seconds = time.perf_counter() - clock
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[name])
    twin.active = True
    clock = time.perf_counter()
    control = job.continue_training(model, forward, control=True)
    control.seconds = time.perf_counter() - clock
    return {"fsdp_order": ours, "control": control}


def _train(
    model: nn.Module,
    forward: Callable[..., torch.Tensor],
    report: RunReport,
    steps: int,
    shard: int,
    stop_unlike: Sequence[str] | None = None,
) -> None:
    device = next(model.parameters()).device.type

    def step(number: int) -> torch.Tensor:
        loss = forward(*(t.to(device) for t in batch_of(number, shard, size=BATCHES[device])))
        loss.backward()
        return loss

    done = train(model, step, steps, stop_unlike=stop_unlike)
    report.loss, report.digests = done.loss, done.digests


def compare_layout(compiler: BucketingBackend, eager: Sequence[Payload]) -> list[str]:
    """In words, where the buckets of the one compile differ from eager FSDP2's payloads.

    Raises:
        RuntimeError: it was not compiled exactly once.
    """
    if len(compiler.reports) != 1:
        raise RuntimeError(f"compiled {len(compiler.reports)} times instead of once")
    report = compiler.last_report()
    again = [g for g in report.graphs if g.stage == "backward"]
    closer = [b for g in again for b in g.buckets if b.kind == "all_gather"]
    found = layout_differences(
        eager, bucket_payloads(b for b in report.buckets if not any(b is c for c in closer))
    )
    # Backward gathers again only what backward reads (no biases): in eager's order, but closer.
    orders = [[m.fqn for m in p.members] for p in eager if p.kind == "all_gather"]
    for payload in bucket_payloads(closer):
        mine = [m.fqn for m in payload.members]
        if mine not in [[fqn for fqn in order if fqn in mine] for order in orders]:
            found.append(f"backward all_gather of {', '.join(mine)}: not in eager FSDP2's order")
    left = [f for graph in report.graphs for f in (*graph.uncovered, *graph.splits)]
    return [*found, *(f"not bucketed as a unit: {name}" for name in left)]
