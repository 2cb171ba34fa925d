"""Plan the step of transformers' LLaMA that was recorded on an H100, without a card.

    python -m benchmarks.live_llama                   8 layers, without a bound

LLaMA-3 8B's shapes, sequence 4,096, one sequence, bf16, a rank of 64, ``recipe(model, "speed")``.
Needs transformers. The plan is that of ``explain``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.reports.base import columns

from .command import add_json, add_number, document_of, parser_of, write_results

GIB = 2**30
RECORDED = {"forward": 6.68, "backward": 7.66}
"""GiB of the graphs alone on an H100 with torch 2.11, 8 layers, without a bound."""
_layers = 8


def build(mesh: DeviceMesh) -> tuple[nn.Module, dict[str, torch.Tensor], Any]:
    """Return the model, its inputs and its loss, for ``explain``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=_layers,
        attn_implementation="sdpa",
        use_cache=False,
        max_position_embeddings=8192,
    )
    model, bf16 = LlamaForCausalLM(config), torch.bfloat16
    teb.data_parallel(model, mesh, param_dtype=bf16, reduce_dtype=bf16)
    tokens = torch.zeros((1, 4096), dtype=torch.int64)
    return model, {"input_ids": tokens, "labels": tokens}, lambda output, inputs: output.loss


def planned(layers: int) -> dict[str, int]:
    """Return the planned peaks by stage."""
    global _layers
    _layers = layers
    target = f"{build.__module__}:build"
    report = explain(target, goal="speed", world_size=64, machine=H100).report
    return {
        graph.stage: schedule.peak_bytes[1]
        for graph, schedule in zip(report.graphs, report.schedules, strict=True)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser: argparse.ArgumentParser = parser_of("python -m benchmarks.live_llama", __doc__)
    add_number(parser, "layers", 8, "of the model")
    add_json(parser)
    args = parser.parse_args(argv)
    document = document_of("python -m benchmarks.live_llama", argv)
    document["peaks"] = peaks = planned(args.layers)
    lines = [["graph", "planned GiB", "recorded GiB", "ratio"]]
    for stage, nbytes in peaks.items():
        known = RECORDED.get(stage) if args.layers == 8 else None
        shown = ["", ""] if known is None else [f"{known:.2f}", f"{nbytes / GIB / known:.3f}"]
        lines.append([stage, f"{nbytes / GIB:.3f}", *shown])
    write_results(args.json, document, columns(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
