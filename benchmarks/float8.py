"""Compare gathers in float8 and bfloat16 for LLaMA-3 8B on 64 ranks: bytes, collectives, step time.

    python -m benchmarks.float8
    python -m benchmarks.float8 --layers 2      with fewer layers, in seconds
    python -m benchmarks.float8 --kernels       kernels of a small decoder, on the CPU

Linears are torchao's, scaled by the largest value of each weight; needs torchao. Gathers are those
of forward and backward. Steps are estimates for H100s on the passes of ``recipe(model, "speed")``:
with each operator as a kernel of its own, which is too long for float8, and with those that
Inductor fuses as one (``Machine(fuses=True)``). Buckets are counted for these.

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
from benchmarks.eager_parity.devices import nodes
from benchmarks.eager_parity.models import MODELS, build, units_of
from benchmarks.models import Llama, LlamaConfig
from benchmarks.parallel import Layout, shard_llama, start_world
from benchmarks.tracing import Say, copy_graph, trace_model
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import kind_of, tag_of, wire_bytes
from torch_ext_bucketing.passes.combine_uses import CombineUses, MergeAmax
from torch_ext_bucketing.reports.base import columns

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
    """Return a step's gathered bytes, its collectives before bucketing, and the bucketed step."""
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
    for fuses in (False, True):
        after, step_ms = 0, 0.0
        for gm in graphs.values():
            copy = fx.GraphModule(gm, copy_graph(gm.graph))
            machine = replace(nodes(None), fuses=fuses)
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


if __name__ == "__main__":
    sys.exit(main())
