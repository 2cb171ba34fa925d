"""Run the rows of :mod:`.rows` on a rank: eager, compiled, and with buckets in graph order."""

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch._inductor import decomposition
from torch.distributed._composable_state import _get_module_state
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.aot import stage_of
from torch_ext_bucketing._torch.process_groups import group_by_name, ranks_of
from torch_ext_bucketing.fqns import parameter_names
from torch_ext_bucketing.fsdp import ReduceOnce
from torch_ext_bucketing.graph.nodes import (
    GraphLike,
    graph_of,
    group_name,
    kind_of,
    tag_of,
    wire_bytes,
)
from torch_ext_bucketing.passes.backends import BucketingBackend
from torch_ext_bucketing.passes.base import Compilation, Stage
from torch_ext_bucketing.reports.compile import CompileReport
from torch_ext_bucketing.testing.experiments import (
    Payload,
    bucket_payloads,
    fsdp_payloads,
    layout_differences,
)
from torch_ext_bucketing.testing.ranks import Rank
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import TrainingRecord, count_collectives, train

from .base import Unit
from .devices import nodes, start
from .models import MODELS, build, units_of
from .rows import CHANNELS, Row
from .tensor import cut, parallelize

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DIMS = {"cpu": None, "cuda": 1024}
"""Width of the models by device; None for their own."""
BATCHES = {"cpu": 2, "cuda": 16}
"""Sequences per rank and step."""

RUNS = {
    "aot_eager": {"fsdp_order": (True, False), "control": (False, False)},
    "inductor": {
        "fsdp_order": (True, False),
        "aten_kernels": (True, True),
        "control": (False, True),
    },
}
"""Compiled runs of a row by backend: whether buckets are in FSDP2's order, and whether Inductor
compiles to ATen's kernels."""

Step = Callable[[int], torch.Tensor]
"""Forward and backward of a step, by its number."""

Traffic = dict[str, dict[str, list[int]]]
"""Collectives of parameters in one step, per network level ("inside nodes", "between nodes") and
kind: their number and the bytes of their full buffers, on one rank. What is gathered a second time,
for backward, is a kind of its own."""


@dataclass
class RowReport:
    """Result of a row on one rank; losses and digests of its weights after every step, by run.

    Attributes:
        layout_differences: how buckets differ from eager FSDP2's payloads, in words.
        before: what a step of the graphs would send as traced.
        after: what a step sends.
        eager_collectives: collectives of an eager step, by kind.
        notes: what compile reports list as left alone or as impossible.
        warned: number of warnings that bits are not eager's.
        merged: number of collectives that buckets replaced.
        error: the end of the traceback, if the compiled run raised.
    """

    row: Row
    digests: dict[str, list[str]] = field(default_factory=dict)
    loss: dict[str, list[float]] = field(default_factory=dict)
    layout_differences: list[str] = field(default_factory=list)
    before: Traffic = field(default_factory=dict)
    after: Traffic = field(default_factory=dict)
    eager_collectives: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warned: int = 0
    merged: int = 0
    error: str = ""
    torch: str = torch.__version__
    seconds: float = 0.0

    def ran(self, name: str, done: TrainingRecord) -> None:
        """Store the results of a run."""
        self.digests[name], self.loss[name] = done.digests, done.loss

    def look(self, reports: Sequence[CompileReport], expected: int = 0) -> None:
        """Store what the reports of a compiled run contain, and check their number if given."""
        found = []
        if expected and len(reports) != expected:
            found.append(f"compiled {len(reports)} times")
        for report in reports:
            found += report.warnings
            for rewrite in report.rewrites:
                found += [f"{'+'.join(x.fqns)}: {x.reason}" for x in getattr(rewrite, "left", ())]
            self.merged += sum(len(b.members) for graph in report.graphs for b in graph.buckets)
        self.warned += sum("eager FSDP2's bit for bit" in text for text in found)
        self.notes = list(dict.fromkeys([*self.notes, *found]))


@functools.cache
def _mesh(device: str, sizes: tuple[int, ...]) -> DeviceMesh:
    names = ("dp",) if len(sizes) == 1 else ("outer", "inner")
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def mesh_of(row: Row) -> DeviceMesh:
    """Make the mesh of all ranks."""
    return _mesh(row.device, row.mesh)


@contextlib.contextmanager
def row_group(rank: Rank, row: Row) -> Iterator[None]:
    """Join a ring group of the row's nodes; on GPUs NCCL's."""
    if row.device == "cpu":
        topology = RingTopology(row.per_node, CHANNELS, row.chunk_bytes)
        with ring_rank(rank, topology):
            yield
        return
    start(rank, "nccl")
    yield
    # Not in a finally: to destroy NCCL's communicators can wait for ranks that never answer, and
    # a rank that failed must say so at once.
    dist.destroy_process_group()


@contextlib.contextmanager
def aten_kernels() -> Iterator[None]:
    """Make Inductor compile every operator to the kernel that eager runs."""
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


Sent = list[tuple[str, str, int]]
"""Level, kind and bytes of each collective of a graph."""


class Tally(teb.GraphPass):
    """A backend that runs graphs as they are, like ``"aot_eager"``, and counts what they send."""

    stage: ClassVar[Stage] = "joint"

    def __init__(self, per_node: int) -> None:
        self.before: Traffic = {}
        self.after: Traffic = {}
        self._per_node = per_node
        self._traced: Sent = []

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        """Count ``graph``'s collectives before any pass has changed it."""
        self._traced = collectives_of(graph_of(graph).nodes, self._per_node)

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run ``graph``."""
        sent, traced = collectives_of(graph.graph.nodes, self._per_node), self._traced
        if stage_of(graph.graph) == "backward":
            # Freed after forward: a matter of memory, no part of what is compared.
            sent = [(a, "gathered again" if k == "all_gather" else k, n) for a, k, n in sent]
            traced = []

        def run(*args: Any) -> Any:
            add_sent(self.before, traced)
            add_sent(self.after, sent)
            return graph.forward(*args)

        return run


def collectives_of(nodes: Iterable[fx.Node], per_node: int) -> Sent:
    """Return the collectives of parameters among ``nodes``."""
    return [
        (_level(node, per_node), str(kind_of(node)), wire_bytes(node))
        for node in nodes
        if kind_of(node) is not None and tag_of(node) is not None
    ]


def _level(start: fx.Node, per_node: int) -> str:
    ranks = ranks_of(group_by_name(group_name(start)))
    nodes = dict.fromkeys(rank // per_node for rank in ranks)
    return "between nodes" if len(nodes) > 1 else "inside nodes"


def add_sent(traffic: Traffic, sent: Sent) -> None:
    """Add collectives to ``traffic``."""
    for level, kind, nbytes in sent:
        entry = traffic.setdefault(level, {}).setdefault(kind, [0, 0])
        entry[0] += 1
        entry[1] += nbytes


class Runs:
    """All runs of one row on one rank."""

    def __init__(self, rank: Rank, row: Row, mesh: DeviceMesh, steps: int) -> None:
        self.rank = rank
        self.row = row
        self.mesh = mesh
        self.steps = steps
        self.dtype = DTYPES[row.dtype]
        # torchtitan's reductions are sums.
        sums = row.client.startswith("torchtitan")
        self.scale = 1.0 / math.prod(row.data_sizes) if sums else 1.0

    def report(self) -> RowReport:
        """Run all."""
        clock = time.perf_counter()
        report = RowReport(self.row)
        eager = self.run_eager(report)
        payloads = self.payloads(eager) if self.row.layout else []
        for name, (ordered, on_aten) in RUNS[self.row.backend].items():
            with aten_kernels() if on_aten else contextlib.nullcontext():
                self.run_compiled(name, eager, payloads if ordered else None, report)
        report.seconds = time.perf_counter() - clock
        return report

    def run_eager(self, report: RowReport) -> nn.Module:
        """Train eager FSDP2, and count what its first step calls."""
        eager = self.eager()
        with count_collectives() as counts:

            def after_first() -> None:
                report.eager_collectives = dict(counts)

            report.ran("eager", self.train(eager, self.step(eager, eager, after_first=after_first)))
        return eager

    def run_compiled(
        self, name: str, eager: nn.Module, payloads: Sequence[Payload] | None, report: RowReport
    ) -> None:
        """Train compiled; without ``payloads`` it is the control, in graph order."""
        model, tally = self.sharded(), Tally(self.row.per_node)
        inner, passes = self.compiler(model, eager, tally, in_order=payloads is not None)
        compiler = teb.backend(inner, passes=passes, model=model)

        def after_first() -> None:
            if payloads is not None:
                report.before, report.after = copy.deepcopy((tally.before, tally.after))

        step = self.step(model, self.compiled(model, compiler), compiler, after_first)
        stop = report.digests["eager"] if payloads is None else None
        report.ran(name, self.train(model, step, stop_unlike=stop))
        if payloads is not None:
            report.look(compiler.reports, self.row.graphs)
            if self.row.layout:
                report.layout_differences += compare_layout(compiler, payloads)

    def compiler(
        self, model: nn.Module, eager: nn.Module, tally: Tally, in_order: bool
    ) -> tuple[Any, list[teb.GraphPass]]:
        """Return the inner compiler and the passes; not ``in_order``: buckets in graph order."""
        passes = self.passes(model, eager)
        if not in_order:
            passes = [in_graph_order(p) if isinstance(p, teb.BucketByUnit) else p for p in passes]
        if self.row.backend == "aot_eager":
            return tally.compile, [tally, *passes]
        return "inductor", passes

    # --- models ---------------------------------------------------------------------

    def plain(self) -> tuple[nn.Module, DeviceMesh]:
        """Return the model before data parallelism, on its device, and the mesh for that."""
        row = self.row
        dim = DIMS[row.device]
        model = build(row.model, layers=row.layers, dim=dim, chunks=row.chunks).to(row.device)
        if not row.tensor:
            return model, self.mesh
        if row.tensor == "cut":
            cut(model, self.mesh["inner"])
        else:
            parallelize(model, self.mesh["inner"], sequence=row.tensor == "module+sequence")
        return model, self.mesh["outer"]

    def units(self, model: nn.Module) -> list[Unit]:
        """Return the ``fully_shard`` calls."""
        units = units_of(self.row.model, model)
        return [*units[:-1], "embed", "norm", "head", ""] if self.row.regional else units

    def eager(self) -> nn.Module:
        """Return the model under eager FSDP2, or under torch's ``replicate``."""
        model, mesh = self.plain()
        if self.row.checkpoint:
            checkpoint_blocks(model, self.row.checkpoint)
        # Rotary tables and gates are inputs of units and stay float32, as in the compiled runs.
        policy = MixedPrecisionPolicy(self.dtype, self.dtype, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        wrap: Callable[..., Any] = fully_shard
        if self.row.mode == "replicate":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            wrap = replicate
        if self.row.to and not self.row.memory:
            options["reshard_after_forward"] = self.row.to
        wrap_units(model, self.units(model), wrap, **options)
        if self.row.client == "torchtitan":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
        return model

    def payloads(self, eager: nn.Module) -> list[Payload]:
        """Return the payloads of eager FSDP2's collectives."""
        sizes = self.row.data_sizes
        return fsdp_payloads(
            eager,
            teb.FSDPParamOrder.from_fsdp(eager),
            shards=sizes[-1],
            param_dtype=self.dtype,
            reduce_dtype=self.dtype,
            replicas=sizes[0] if len(sizes) == 2 else 1,
            gathered=gathered_bytes(eager),
        )

    def sharded(self) -> nn.Module:
        """Return the model with one collective per parameter."""
        model, mesh = self.plain()
        if self.row.client == "torchtitan":
            from torchtitan.experiments.graph_trainer import simple_fsdp

            # It keeps one class per type of module, and with it the first mesh that it was given.
            simple_fsdp._wrap_class_cache.clear()
            policy = simple_fsdp.MixedPrecisionPolicy(self.dtype, self.dtype)
            model = simple_fsdp.data_parallel(model, mesh, self.row.mode, policy)
        else:
            teb.data_parallel(
                model, mesh, self.row.mode, param_dtype=self.dtype, reduce_dtype=self.dtype
            )
        if self.row.checkpoint:
            checkpoint_blocks(model, self.row.checkpoint)
        return model

    def passes(self, model: nn.Module, eager: nn.Module) -> list[teb.GraphPass]:
        """Return the recipe; it gathers all again but the root's parameters, as eager FSDP2."""
        units = self.units(model)
        if self.row.memory:
            bound = teb.PeakMemory(ratio=self.row.memory)
            to = self.row.to or None
            machine = replace(nodes(1), ranks_per_node=to) if to else None
            given: dict[str, Any] = {"memory": bound, "machine": machine, "to": to}
            return teb.recipe(model, units=units, state_bytes_per_parameter=0, **given)
        passes = teb.recipe(model, units=units)
        order = teb.FSDPParamOrder.from_model(model, units)
        keep = () if self.row.to else order.units[-1]
        again = teb.ReshardAfterForward(keep=keep, to=self.row.to or None)
        return [again if isinstance(p, teb.ReshardAfterForward) else p for p in passes]

    # --- steps ----------------------------------------------------------------------

    def compiled(self, model: nn.Module, compiler: BucketingBackend) -> Callable[..., Any]:
        """Return what to call in the place of ``model``."""
        torch._dynamo.reset()
        if self.row.regional:
            for layer in model.get_submodule("layers").children():
                layer.compile(backend=compiler, fullgraph=True)
            return model
        return torch.compile(model, backend=compiler, fullgraph=True)

    def batch(self, number: int) -> tuple[Any, ...]:
        """Return this rank's batch, the same on all tensor-parallel ranks."""
        row = self.row
        shard = dist.get_rank() // (row.mesh[1] if row.tensor else 1)
        batch = MODELS[row.model].batch(number, shard, BATCHES[row.device])
        return tuple(x.to(row.device) if isinstance(x, torch.Tensor) else x for x in batch)

    def step(
        self,
        model: nn.Module,
        forward: Callable[..., torch.Tensor],
        compiler: BucketingBackend | None = None,
        after_first: Callable[[], None] = lambda: None,
    ) -> Step:
        """Take a step of ``model``, called as ``forward``; call ``after_first`` after step 0."""
        row = self.row
        once: Any = contextlib.nullcontext()
        if compiler is not None and row.sync == "last":
            once = ReduceOnce(model, compiler, gather_once=row.gather_once)

        def run(number: int) -> torch.Tensor:
            with once:
                for part in range(row.microbatches):
                    if isinstance(model, FSDPModule) and row.sync == "last":
                        model.set_requires_gradient_sync(part == row.microbatches - 1)
                        model.set_reshard_after_backward(
                            part == row.microbatches - 1 or not row.gather_once
                        )
                    loss = self.loss(forward, number * row.microbatches + part)
                    loss.backward()
            if number == 0:
                after_first()
            return loss

        return run

    def loss(self, forward: Callable[..., torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a step's batch."""
        return self.loss_function()(forward, *self.batch(number))

    def loss_function(self) -> Callable[..., torch.Tensor]:
        """Return a function that computes the loss of the model, or its stand-in, and a batch."""
        scale = self.scale
        return lambda forward, *batch: forward(*batch) * scale

    def train(
        self, model: nn.Module, step: Step, stop_unlike: Sequence[str] | None = None
    ) -> TrainingRecord:
        """Train all steps, or to the first after which weights differ from ``stop_unlike``."""
        again = self.row.graphs > 1 or self.row.regional
        return train(model, step, self.steps, recompiles=again, stop_unlike=stop_unlike)


def gathered_bytes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the bytes of each tensor that this rank gives to an all-gather, by canonical FQN."""
    names = parameter_names(model)
    states: Any = dict.fromkeys(filter(None, map(_get_module_state, model.modules())))
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    found = {}
    for param in [param for group in groups for param in group.fsdp_params]:
        if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
            info = param._module_info
            fqn, *_ = names[info.module._parameters[info.param_name]]
            found[fqn] = tuple(part.nbytes for part in param.all_gather_inputs)
    return found


def wrap_units(
    model: nn.Module,
    units: Sequence[Unit],
    wrap: Callable[..., Any] = fully_shard,
    **options: Any,
) -> None:
    """Call ``fully_shard``, or another function, for each unit."""
    for unit in units:
        modules = [model.get_submodule(n) for n in ([unit] if isinstance(unit, str) else unit)]
        wrap(modules[0] if len(modules) == 1 else modules, **options)


def in_graph_order(bucket: teb.BucketByUnit) -> teb.BucketByUnit:
    """Return the same passes with buckets packed in graph order."""
    return teb.BucketByUnit(bucket.units, kinds=bucket.kinds, payload_order=None)


def checkpoint_blocks(model: nn.Module, kind: str) -> None:
    """Recompute every block in backward, all of it or all but its matmuls."""
    settings: dict[str, Any] = {}
    if kind == "selective":
        settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for i, layer in enumerate(layers):
        layers[i] = checkpoint_wrapper(layer, **settings)


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def compare_layout(compiler: BucketingBackend, eager: Sequence[Payload]) -> list[str]:
    """Describe where a compile's buckets differ from eager FSDP2's payloads."""
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
