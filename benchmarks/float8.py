"""Compare gathers in float8 and bfloat16 for LLaMA-3 8B on 64 ranks: bytes, collectives, step time.

    python -m benchmarks.float8
    python -m benchmarks.float8 --layers 2      with fewer layers, in seconds
    python -m benchmarks.float8 --kernels       kernels of a small decoder, on the CPU

Linears are torchao's, scaled by the largest value of each weight; needs torchao. Gathers are those
of forward and backward. Steps are estimates for H100s on the passes of ``recipe(model, "speed")``:
with each operator that scales or casts as a kernel of its own, as the cost model has it, which is
too long for float8; and with those that Inductor fuses as one kernel. Buckets are counted for
these.

Kernels are the functions that Inductor generates, and its calls of others, products among them, in
forward and backward of two blocks, with embedding and head: without any bucketing and with
``recipe(model)``.
"""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.fx as fx
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import DeviceMesh

import torch_ext_bucketing as teb
from benchmarks.command import add_number, document_of, parser_of, sayer, title
from benchmarks.models import Llama, LlamaConfig
from benchmarks.parallel import Layout, shard_llama, start_world
from benchmarks.tracing import Say, copy_graph, trace_model
from eager_parity.devices import nodes
from eager_parity.models import MODELS, build, units_of
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.collectives import (
    is_view,
    kind_of,
    tensors_in,
    wire_bytes,
)
from torch_ext_bucketing.graph.tags import tag_of
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.rewrites.combine_uses import CombineUses
from torch_ext_bucketing.rewrites.merge_amax import MergeAmax
from torch_ext_bucketing.testing.demo.table import columns

WAYS = ("bfloat16", "float8", "float8, amax one by one")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.float8", __doc__)
    add_number(parser, "layers", LlamaConfig.layers, "of the model")
    parser.add_argument("--kernels", action="store_true", help="count kernels")
    args = parser.parse_args(argv)
    say = sayer(time.monotonic())
    if args.kernels:
        print(f"{title(document_of('benchmarks.float8', argv))}\n\n{columns(kernels(say))}")
        return 0
    titles = ["GiB gathered", "of bfloat16's", "collectives", "merged", "step, ms", "fused, ms"]
    rows = [["gathers in", *titles]]
    first = 0
    for way in WAYS:
        gathered, before, *times = measured(way, replace(LlamaConfig(), layers=args.layers))
        first = first or gathered
        steps = [f"{ms:.1f}" for _, ms in times]
        counts = [str(gathered / first)[:5], str(before), str(times[1][0]), *steps]
        rows.append([way, f"{gathered / 2**30:.2f}", *counts])
        say(way)
    print(f"{title(document_of('benchmarks.float8', argv))}\n\n{columns(rows)}")
    return 0


Merged = tuple[int, float]
"""Collectives after bucketing, and the time of a step in ms."""


def measured(way: str, config: LlamaConfig) -> tuple[int, int, Merged, Merged]:
    """Return a step's gathered bytes, its collectives before bucketing, and the bucketed step.

    The step is timed by the package's cost model and by one of fused kernels.
    """
    world = start_world(Layout(fsdp=64))

    def build() -> Llama:
        llama = Llama(config)
        if way != "bfloat16":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            float8 = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            convert_to_float8_training(llama, config=float8)
        shard_llama(llama, world)
        return llama

    joint: list[teb.GraphPass] = [CombineUses(), teb.ReshardAfterForward()]
    if way == "float8":
        joint.insert(1, MergeAmax())
    shape = (config.batch, config.seq)
    graphs = trace_model(build, shape, lambda text: None, {way: joint})
    gathered = before = 0
    for gm in graphs.values():
        starts = [n for n in gm.graph.nodes if kind_of(n) == "all_gather" and tag_of(n)]
        gathered += sum(map(wire_bytes, starts))
        before += sum(GraphAnalysis(gm.graph).counts.values())
    policies = [teb.Overlap(), teb.PeakMemory(ratio=1.02)]
    found = list[Merged]()
    for estimate in (None, Fused()):
        after, step_ms = 0, 0.0
        for gm in graphs.values():
            copy = fx.GraphModule(gm, copy_graph(gm.graph))
            machine = replace(nodes(None), estimate=estimate)
            report = teb.BucketAndSchedule(policies, machine=machine)(copy)
            after += sum(GraphAnalysis(copy.graph).counts.values())
            step_ms += report.schedules[-1].step_ms[1]
        found.append((after, step_ms))
    return gathered, before, found[0], found[1]


def kernels(say: Say) -> list[list[str]]:
    """Render a table of a step's kernels before and after bucketing."""
    mesh = start_world(Layout(fsdp=4)).data
    rows = [["gathers in", "generated", "others", "collectives"]]
    for way, name in (("bfloat16", "llama"), ("float8", "float8")):
        found = []
        for bucketed in (False, True):
            found.append(_kernels(name, mesh, bucketed))
            say(f"{way}, {'after' if bucketed else 'before'}")
        rows.append([way, *(f"{a} -> {b}" for a, b in zip(*found, strict=True))])
    return rows


def _kernels(name: str, mesh: DeviceMesh, bucketed: bool) -> tuple[int, int, int]:
    """Count the functions that Inductor generates, other kernels that it calls, and collectives."""
    model = build(name, layers=2)
    teb.data_parallel(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    passes: list[teb.GraphPass] = [CombineUses(), teb.ReshardAfterForward()]
    if bucketed:
        passes = teb.recipe(model, units=units_of(name, model))
    torch.compiler.reset()
    compiled = torch.compile(model, backend=teb.backend("inductor", passes, model), fullgraph=True)
    batch = MODELS[name].batch(0, 0, 2)
    with fresh_cache():
        _, codes = run_and_get_code(lambda: compiled(*batch).backward())
    calls = [c for code in codes for c in re.findall(_CALL, code[code.index("def call(") :])]
    sent = [c for c in calls if "_c10d_functional" in c and "wait_tensor" not in c]
    generated = [c for c in calls if c.startswith("cpp_fused")]
    others = [c for c in calls if c not in generated and "_c10d_functional" not in c]
    return len(generated), len(others), len(sent)


_CALL = (
    r"(?m)^ +(?:\w+ = )?"
    r"(cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.(?:aten|_c10d_functional)\.\w+)\b"
)


class Fused:
    """Time pointwise operators and reductions as parts of fused kernels.

    What only its own kernel reads is neither written nor read. A kernel ends before a node that
    waits for another kernel, and after a reduction of all elements.
    """

    def __init__(self) -> None:
        self._costs = Costs(nodes(None))
        self._kernel: dict[fx.Node, int] = {}  # length of the chain of kernels before it
        self._known: tuple[fx.Graph, int] | None = None

    def __call__(self, node: fx.Node, nbytes: int | None) -> float | None:
        """Estimate a node's milliseconds, as :class:`.Machine` expects."""
        if nbytes is not None or not (_is_pointwise(node) or _is_reduction(node)):
            return None
        known = node.graph, len(node.graph.nodes)
        if known != self._known:  # or changed by merging
            self._known = known
            self._find_kernels(node.graph)
        read = sum(self._costs.result_bytes(n) for n in node.all_input_nodes if not self._stays(n))
        if self._stays(node):
            return read / self._costs.machine.bandwidth * 1e3
        return self._costs.kernel(read + self._costs.result_bytes(node))

    def _find_kernels(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            fuses = _is_pointwise(node) or _is_reduction(node)
            self._kernel[node] = max(
                (self._kernel[n] + self._ends(n, fuses, node) for n in node.all_input_nodes),
                default=0,
            )

    @staticmethod
    def _ends(made: fx.Node, fuses: bool, node: fx.Node) -> bool:
        if is_view(node):
            return False
        while is_view(made) and made.all_input_nodes:
            made = made.all_input_nodes[0]
        joins = _is_pointwise(made) or (_is_reduction(made) and _numel(made) > 1)
        return not (fuses and joins)

    def _stays(self, node: fx.Node) -> bool:
        while is_view(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return _is_pointwise(node) and all(
            self._kernel[reader] == self._kernel[node]
            and (_is_reduction(reader) or _numel(reader) == _numel(node))
            for reader in _readers(node)
        )


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of a value, looking through views."""
    found = list[fx.Node]()
    for user in node.users:
        found += _readers(user) if is_view(user) else [user]
    return found


def _numel(node: fx.Node) -> int:
    return sum(t.numel() for t in tensors_in(node.meta.get("val")))


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _is_reduction(node: fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


if __name__ == "__main__":
    sys.exit(main())
