"""Plan the step of transformers' LLaMA that was recorded on an H100, without a card.

    python -m benchmarks.live_llama                   8 layers, without a bound
    python -m benchmarks.live_llama --gib 9.03        and under a bound on memory

LLaMA-3 8B's shapes, sequence 4,096, one sequence, bf16, a rank of 64, ``recipe(model, "speed")``.
Dynamo, AOTAutograd and Inductor's passes run on fake CPU tensors; kernels are grouped as on CUDA.
Needs transformers and torch 2.15.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._inductor import compile_fx
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph import fusion
from torch_ext_bucketing.passes import backends
from torch_ext_bucketing.reports.base import columns

from .command import add_json, add_number, document_of, parser_of, write_results

GIB = 2**30
RECORDED = {"forward": 6.68, "backward": 7.66}
"""GiB of the graphs alone on an H100 with torch 2.11, 8 layers, without a bound."""


def _passes_alone(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
    """Run Inductor's passes on a graph instead of compiling it."""
    values = (n.meta.get("val") for n in gm.graph.nodes)
    mode = next(v.fake_mode for v in values if hasattr(v, "fake_mode"))
    with V.set_fake_mode(mode):
        compile_fx._recursive_post_grad_passes(gm, is_inference=False)
    gm.recompile()

    def run(args: Sequence[Any]) -> Any:
        return gm(*args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def planned(layers: int, gib: float | None) -> dict[str, int]:
    """Return the planned peaks by stage."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        num_hidden_layers=layers,
        attn_implementation="sdpa",
        use_cache=False,
        max_position_embeddings=8192,
    )
    dist.init_process_group("fake", rank=0, world_size=64)
    mesh, bf16 = init_device_mesh("cpu", (64,)), torch.bfloat16
    memory: dict[str, Any] = {} if gib is None else {"memory": teb.PeakMemory(gib=gib)}
    with (
        FakeTensorMode(),
        warnings.catch_warnings(),
        mock.patch.object(compile_fx, "compile_fx_inner", _passes_alone),
        mock.patch.object(backends, "pin_order", return_value=0),
        mock.patch.object(fusion, "tensors_in", return_value=[]),  # no CPU tensor: as on CUDA
    ):
        warnings.simplefilter("ignore")
        model = LlamaForCausalLM(config)
        teb.data_parallel(model, mesh, param_dtype=bf16, reduce_dtype=bf16)
        tokens = torch.zeros((1, 4096), dtype=torch.int64)
        backend = teb.backend("inductor", teb.recipe(model, "speed", **memory), agree=False)
        run = torch.compile(lambda m, x: m(input_ids=x, labels=x).loss, backend=backend)
        run(model, tokens).backward()
    report = backend.last_report()
    return {
        graph.stage: schedule.peak_bytes[1]
        for graph, schedule in zip(report.graphs, report.schedules, strict=True)
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser: argparse.ArgumentParser = parser_of("python -m benchmarks.live_llama", __doc__)
    add_number(parser, "layers", 8, "of the model")
    parser.add_argument("--gib", type=float, help="a bound on memory")
    add_json(parser)
    args = parser.parse_args(argv)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    document = document_of("python -m benchmarks.live_llama", argv)
    document["peaks"] = peaks = planned(args.layers, args.gib)
    lines = [["graph", "planned GiB", "recorded GiB", "ratio"]]
    for stage, nbytes in peaks.items():
        known = RECORDED.get(stage) if (args.layers, args.gib) == (8, None) else None
        shown = ["", ""] if known is None else [f"{known:.2f}", f"{nbytes / GIB / known:.3f}"]
        lines.append([stage, f"{nbytes / GIB:.3f}", *shown])
    write_results(args.json, document, columns(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
