"""LLaMA-3 8B on 64 ranks with gathers in float8 beside bfloat16: bytes, collectives, step.

    python -m benchmarks.float8
    python -m benchmarks.float8 --layers 2      with fewer layers, in seconds

Linears are torchao's, scaled by the largest value of each weight; needs torchao. Gathers are those
of forward and backward. Steps are estimates for H100s on the passes of ``recipe(model, "speed")``,
in which each operator that scales or casts is a kernel of its own: too long for float8.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.command import add_number, document_of, parser_of, sayer, title
from benchmarks.machines import nodes
from benchmarks.models import Llama, LlamaConfig
from benchmarks.parallel import Layout, shard_llama, start_world
from benchmarks.tracing import trace_model
from torch_ext_bucketing.fsdp.tags import tag_of
from torch_ext_bucketing.graph.collectives import count_collectives, kind_of, wire_bytes
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.passes.scheduling import BucketAndSchedule
from torch_ext_bucketing.rewrites.combine_uses import CombineUses
from torch_ext_bucketing.rewrites.merge_amax import MergeAmax
from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward
from torch_ext_bucketing.scheduling.memory import CapComputeRun, PeakMemory
from torch_ext_bucketing.scheduling.overlap import Overlap
from torch_ext_bucketing.testing.demo.table import columns

WAYS = ("bfloat16", "float8", "float8, amax one by one")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("python -m benchmarks.float8", __doc__)
    add_number(parser, "layers", LlamaConfig.layers, "of the model")
    args = parser.parse_args(argv)
    say = sayer(time.monotonic())
    rows = [["gathers in", "GiB gathered", "of bfloat16's", "collectives", "merged", "step, ms"]]
    first = 0
    for way in WAYS:
        gathered, before, after, step_ms = measured(way, replace(LlamaConfig(), layers=args.layers))
        first = first or gathered
        counts = [str(gathered / first)[:5], str(before), str(after), f"{step_ms:.1f}"]
        rows.append([way, f"{gathered / 2**30:.2f}", *counts])
        say(way)
    print(f"{title(document_of('benchmarks.float8', argv))}\n\n{columns(rows)}")
    return 0


def measured(way: str, config: LlamaConfig) -> tuple[int, int, int, float]:
    """Bytes that a step gathers, its collectives before and after bucketing, and its time in ms."""
    world = start_world(Layout(fsdp=64))

    def build() -> Llama:
        llama = Llama(config)
        if way != "bfloat16":
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            float8 = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
            convert_to_float8_training(llama, config=float8)
        shard_llama(llama, world)
        return llama

    joint: list[GraphPass] = [CombineUses(), ReshardAfterForward()]
    if way == "float8":
        joint.insert(1, MergeAmax())
    shape = (config.batch, config.seq)
    graphs = trace_model(build, shape, lambda text: None, {way: joint})
    gathered = before = after = 0
    step_ms = 0.0
    policies = [Overlap(), PeakMemory(ratio=1.02), CapComputeRun(max_consecutive=8)]
    for gm in graphs.values():
        starts = [n for n in gm.graph.nodes if kind_of(n) == "all_gather" and tag_of(n)]
        gathered += sum(map(wire_bytes, starts))
        before += sum(count_collectives(gm.graph).values())
        report = BucketAndSchedule(policies, machine=nodes(None))(gm)
        after += sum(count_collectives(gm.graph).values())
        step_ms += report.schedules[-1].step_ms[1]
    return gathered, before, after, step_ms


if __name__ == "__main__":
    sys.exit(main())
