"""What each rank does for ``parity.py --rows``: every row eager, compiled, and in graph order."""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.parity_cells import CHANNELS, CHUNK_BYTES
from benchmarks.parity_models import batch_of
from benchmarks.parity_ranks import DTYPES, GraphOrderTwin
from benchmarks.parity_rows import Row, RowReport, Traffic
from benchmarks.parity_rows_models import (
    build_model,
    checkpoint_blocks,
    tensor_parallel,
    units_of,
)
from torch_ext_bucketing._torch.aot import stage_of
from torch_ext_bucketing._torch.process_groups import group_by_name, ranks_of
from torch_ext_bucketing.fsdp.order import FSDPParamOrder
from torch_ext_bucketing.fsdp.simple_fsdp import ReduceOnce, data_parallel
from torch_ext_bucketing.fsdp.tags import tag_of
from torch_ext_bucketing.graph.collectives import group_name, kind_of, wire_bytes
from torch_ext_bucketing.passes.backends import BucketingBackend, backend
from torch_ext_bucketing.passes.base import Compilation, GraphLike, GraphPass, Stage, graph_of
from torch_ext_bucketing.passes.bucketing import BucketUnits
from torch_ext_bucketing.recipes import recipe
from torch_ext_bucketing.testing.ranks import Rank
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank
from torch_ext_bucketing.testing.training import count_collectives, train

Step = Callable[[int], torch.Tensor]
"""Forward and backward of a step, by its number."""


def run_rows(rank: Rank, rows: Sequence[Row], steps: int) -> None:
    """Entry point of a rank: run ``rows``, all of one topology, and send a report of each."""
    first = rows[0]
    per_node = first.ranks // first.nodes
    topology = RingTopology(
        ranks_per_node=per_node,
        nodes=first.nodes,
        channels=CHANNELS,
        chunk_bytes=first.chunk_bytes or CHUNK_BYTES,
    )
    with ring_rank(rank, topology):
        meshes: dict[tuple[int, ...], DeviceMesh] = {}
        for row in rows:
            rank.send(("run", row.name))
            if row.mesh not in meshes:
                names = ("dp",) if len(row.mesh) == 1 else ("outer", "inner")
                meshes[row.mesh] = init_device_mesh("cpu", row.mesh, mesh_dim_names=names)
            runs: type[Runs] = Runs
            if row.client == "torchtitan's model":
                from benchmarks.parity_rows_titan import TitanRuns as runs
            elif row.client == "torchtitan's trainer":
                from benchmarks.parity_rows_trainer import TrainerRuns as runs
            rank.send(("row", runs(row, meshes[row.mesh], steps, per_node).report()))


Sent = list[tuple[str, str, int]]
"""Level, kind and bytes of each collective of a graph."""


class AsTraced(GraphPass):
    """Looks at the joint graph before any pass has changed it.

    Args:
        per_node: ranks of a simulated node.
    """

    stage: Stage = "joint"

    def __init__(self, per_node: int) -> None:
        self.per_node = per_node
        self.sent: Sent = []

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        self.sent = collectives_of(graph_of(graph).nodes, self.per_node)


class Tally:
    """Counts what the compiled graphs of a run send, each time that one of them runs, and what
    they would send as traced.

    Args:
        per_node: ranks of a simulated node.
        twin: makes the control of a run.
    """

    def __init__(self, per_node: int, twin: GraphOrderTwin) -> None:
        self.before: Traffic = {}
        self.after: Traffic = {}
        self.as_traced = AsTraced(per_node)
        self._twin = twin

    def compile(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Run ``graph`` as it is, or its twin."""
        run = self._twin.compile(graph, inputs)
        sent = collectives_of(graph.graph.nodes, self.as_traced.per_node)
        traced: Sent = []
        if stage_of(graph.graph) == "backward":
            # Freed after forward: a matter of memory, no part of what is compared.
            sent = [(a, "gathered again" if k == "all_gather" else k, n) for a, k, n in sent]
        else:
            traced = self.as_traced.sent

        def counted(*args: Any) -> Any:
            add_sent(self.before, traced)
            add_sent(self.after, sent)
            return run(*args)

        return counted


def collectives_of(nodes: Iterable[fx.Node], per_node: int) -> Sent:
    """The collectives of parameters among ``nodes``."""
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

    def __init__(self, row: Row, mesh: DeviceMesh, steps: int, per_node: int) -> None:
        self.row = row
        self.mesh = mesh
        self.steps = steps
        self.per_node = per_node
        self.scale = 1.0
        if row.client != "ours":
            self.scale = 1.0 / row.data_ranks  # its reductions are sums

    def report(self) -> RowReport:
        clock = time.perf_counter()
        eager = self.eager()
        digests = {"eager": self.train(eager, self.step(eager, eager))}
        with count_collectives() as counts:
            self.step(eager, eager)(0)
            eager.zero_grad()
        model = self.sharded()
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        passes = self.passes(model, eager)
        at, kinds = next((i, p.kinds) for i, p in enumerate(passes) if isinstance(p, BucketUnits))
        order = FSDPParamOrder.from_fsdp(eager)
        twin = GraphOrderTwin(BucketUnits(order, kinds=kinds, payload_order=None))
        tally = Tally(self.per_node, twin)
        passes = [tally.as_traced, *passes[:at], twin, *passes[at:]]
        compiler = backend(tally.compile, passes=passes, model=model)
        step = self.step(model, self.compiled(model, compiler), compiler)
        digests["fsdp_order"] = self.train(model, step)
        tally.after.clear()
        tally.before.clear()
        step(0)
        before, after = copy.deepcopy((tally.before, tally.after))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
                parameter.grad = None
        twin.active = True
        digests["control"] = self.train(model, step, stop_unlike=digests["eager"])
        return RowReport(
            self.row,
            digests,
            before,
            after,
            dict(counts),
            self.notes(compiler),
            torch.__version__,
            time.perf_counter() - clock,
        )

    def notes(self, compiler: BucketingBackend) -> list[str]:
        found = []
        if len(compiler.reports) != self.row.graphs:
            found.append(f"compiled {len(compiler.reports)} times")
        for report in compiler.reports:
            found += report.warnings
            found += [f"unnamed: {name}" for name in report.unnamed]
            for rewrite in report.rewrites:
                found += [f"{'+'.join(x.fqns)}: {x.reason}" for x in getattr(rewrite, "left", ())]
        return list(dict.fromkeys(found))

    # --- models ---------------------------------------------------------------------

    def plain(self) -> tuple[nn.Module, DeviceMesh]:
        """The model before data parallelism, and the mesh for that."""
        model = build_model(self.row.model)
        if not self.row.tensor:
            return model, self.mesh
        tensor_parallel(model, self.mesh["inner"], sequence=self.row.tensor == "tensor+sequence")
        return model, self.mesh["outer"]

    def eager(self) -> nn.Module:
        model, mesh = self.plain()
        if self.row.checkpoint:
            checkpoint_blocks(model, self.row.checkpoint)
        dtype = DTYPES[self.row.dtype]
        policy = MixedPrecisionPolicy(dtype, dtype, cast_forward_inputs=False)
        wrap: Callable[..., Any] = fully_shard
        if self.row.mode == "replicate":
            from torch.distributed._composable.replicate_with_fsdp import replicate

            wrap = replicate
        for name in units_of(model, self.row.regional):
            wrap(model.get_submodule(name), mesh=mesh, mp_policy=policy)
        if self.row.client == "torchtitan":
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
        return model

    def sharded(self) -> nn.Module:
        model, mesh = self.plain()
        dtype = DTYPES[self.row.dtype]
        if self.row.client == "torchtitan":
            from torchtitan.experiments.graph_trainer import simple_fsdp

            # It keeps one class per type of module, and with it the first mesh that it was given.
            simple_fsdp._wrap_class_cache.clear()
            policy = simple_fsdp.MixedPrecisionPolicy(dtype, dtype)
            model = simple_fsdp.data_parallel(model, mesh, self.row.mode, policy)
        else:
            data_parallel(model, mesh, self.row.mode, param_dtype=dtype, reduce_dtype=dtype)
        if self.row.checkpoint:
            checkpoint_blocks(model, self.row.checkpoint)
        return model

    def passes(self, model: nn.Module, eager: nn.Module) -> list[GraphPass]:
        return recipe(model, reference=eager)

    # --- steps ----------------------------------------------------------------------

    def compiled(self, model: nn.Module, compiler: BucketingBackend) -> Callable[..., Any]:
        torch._dynamo.reset()
        if self.row.regional:
            layers = model.layers
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                layer.compile(backend=compiler, fullgraph=True)
            return model
        return torch.compile(model, backend=compiler, fullgraph=True)

    def step(
        self,
        model: nn.Module,
        forward: Callable[..., torch.Tensor],
        compiler: BucketingBackend | None = None,
    ) -> Step:
        row = self.row
        shard = dist.get_rank() // (self.mesh.size(1) if row.tensor else 1)
        once: Any = contextlib.nullcontext()
        if compiler is not None and row.sync == "last":
            once = ReduceOnce(model, compiler)

        def run(step: int) -> torch.Tensor:
            with once:
                for part in range(row.microbatches):
                    if isinstance(model, FSDPModule) and row.sync == "last":
                        model.set_requires_gradient_sync(part == row.microbatches - 1)
                    batch: tuple[Any, ...] = batch_of(step * row.microbatches + part, shard)
                    if row.model == "branch":
                        batch = (*batch, step % 3 == 1)
                    loss = forward(*batch) * self.scale
                    loss.backward()
            return loss

        return run

    def train(
        self, model: nn.Module, step: Step, stop_unlike: Sequence[str] | None = None
    ) -> list[str]:
        """Digests after every step, to the first that differs from ``stop_unlike`` on a rank."""
        done = train(model, step, self.steps, recompiles=True, stop_unlike=stop_unlike)
        return done.digests
