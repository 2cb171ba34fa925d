"""Compare the cost model's fused kernels with those of Inductor's scheduler: numbers and bytes.

    python -m benchmarks.kernels                      on the CPU
    python -m benchmarks.kernels --device cuda        on fake CUDA: a torch with CUDA, and triton
    python -m benchmarks.kernels --cap 100            with collectives merged up to 100 MiB

Graphs are forward and backward of four models of :mod:`.graphs`, with two layers. Inductor
compiles them up to its scheduler's last fusion, so no GPU is needed. Its kernels are those that it
generates, without calls of other libraries and collectives. Their bytes are Inductor's own count of
the buffers that a kernel reads and writes; of a buffer that is read at computed places, such as an
embedding's table, what the parts of a fused kernel count each. Seconds are CPU seconds: of the
grouping, and of the whole road to Inductor's scheduler.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch.fx as fx
from generated_order import fake_gpu
from torch._guards import TracingContext, tracing
from torch._inductor import config, scheduler
from torch._inductor.compile_fx import compile_fx_inner

from torch_ext_bucketing._torch.inductor import CustomGraphPass
from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import ByCap
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.fusion import fused
from torch_ext_bucketing.graph.nodes import FSDP_KINDS
from torch_ext_bucketing.graph.sizes import SizeHints
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.reports.base import columns

from .bucketing import parameter_groups
from .command import document_of, matching, parser_of_graphs, write_results
from .graphs import Graph, load

CONFIGS = ("llama3_8b_fsdp64", "llama3_8b_fsdp8_tp8", "deepseek_v3_fsdp64_ep8", "held_out_02")
NAMES = [f"{config}.{part}" for config in CONFIGS for part in ("forward", "backward.recompute")]


class _Scheduled(BaseException):
    """Ends a compile with its kernels' bytes; not an Exception, which Inductor would wrap."""


class _Ours(CustomGraphPass):
    """Groups the nodes of the graph that Inductor lowers."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.nbytes: list[int] = []
        self.seconds = 0.0

    def __call__(self, graph: fx.Graph) -> None:
        clock = time.process_time()
        nodes = [n for n in graph.nodes if n.op == "call_function"]
        self.nbytes = [k.nbytes for k in fused(nodes, self.costs.operators).kernels]
        self.seconds = time.process_time() - clock

    def uuid(self) -> None:
        return None


def measured(graph: Graph) -> dict[str, Any]:
    """Return a row: kernels, bytes and seconds, ours and Inductor's."""

    def stop(self: scheduler.Scheduler) -> None:
        others = scheduler.ExternKernelSchedulerNode, scheduler.NopKernelSchedulerNode
        raise _Scheduled([_bytes(node) for node in self.nodes if not isinstance(node, others)])

    inputs = [n.meta["val"] for n in graph.gm.graph.nodes if n.op == "placeholder"]
    ours = _Ours(Costs(hints=SizeHints(graph.config.size_hints)))
    clock, theirs = time.process_time(), list[int]()
    with (
        config.patch({"post_grad_custom_post_pass": ours, "fx_graph_cache": False}),
        tracing(TracingContext(graph.mode)),
        mock.patch.object(scheduler.Scheduler, "codegen", stop),
        fake_gpu() if inputs[-1].is_cuda else contextlib.nullcontext(),
    ):
        try:
            compile_fx_inner(graph.gm, inputs, is_backward=graph.phase == "backward")
        except _Scheduled as done:
            (theirs,) = done.args
    return {
        "kernels": [len(ours.nbytes), len(theirs)],
        "bytes": [sum(ours.nbytes), sum(theirs)],
        "seconds": [ours.seconds, time.process_time() - clock],
    }


def _bytes(node: scheduler.BaseSchedulerNode) -> int:
    """Count the bytes that a kernel reads and writes."""

    def counted(node: scheduler.BaseSchedulerNode) -> dict[str, int]:
        return node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)

    most: dict[str, int] = {}
    for part in node.get_nodes():
        for name, nbytes in counted(part).items():
            most[name] = most.get(name, 0) + nbytes
    return sum(min(nbytes, most[name]) for name, nbytes in counted(node).items())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per graph."""
    lines = [["graph", "kernels", "Inductor's", "ratio", "GiB", "Inductor's", "ratio", "s", "s"]]
    for row in rows:
        line = [row["graph"]]
        for key, scale, digits in (("kernels", 1, 0), ("bytes", 2**30, 3)):
            ours, theirs = row[key]
            line += [f"{n / scale:.{digits}f}" for n in (ours, theirs)] + [f"{ours / theirs:.2f}"]
        lines.append([*line, *(f"{s:.3f}" for s in row["seconds"])])
    return columns(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.kernels", __doc__, layers=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cap", type=float, metavar="MIB", help="merge collectives up to this")
    args = parser.parse_args(argv)
    document = document_of("python -m benchmarks.kernels", argv)
    document["rows"] = rows = []
    for name in matching(parser, NAMES, args.only):
        graph = load(name, args.layers, device=args.device, quiet=True)
        if args.cap is not None:
            analysis = GraphAnalysis(graph.gm.graph, graph.config.size_hints)
            by_cap = ByCap(args.cap, kinds=FSDP_KINDS, groups=[*parameter_groups(graph)])
            apply_plan(GraphAnalysis(graph.gm.graph), by_cap.plan(analysis))
            graph.gm.recompile()
        rows.append({"graph": name, **measured(graph)})
    write_results(args.json, document, table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
