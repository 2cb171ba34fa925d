"""Time clipping and the optimizer in the planned step, against eager after the same graphs.

    python -m benchmarks.step                     # 2 ranks on gloo, CPU seconds
    python -m benchmarks.step --layers 12 --json results/step.json
    python -m benchmarks.step --between llama3_8b_fsdp64        # what the next step waits for

A transformer is trained on tiny batches by three ways, step by step in turn: ``planned`` is
``train_step``; ``eager`` is the same forward and backward graphs, then ``clip_grad_norm_`` and
``optimizer.step()`` on ``DTensor`` parameters, timed by themselves. What the planned step takes
beyond eager's graphs is its optimizer part. Seconds are CPU seconds of a rank's main thread,
medians over steps, so that other programs on the machine count little. Both ways run in one process
with one thread for kernels. It keeps the memory that it frees, as a GPU's allocator does: glibc's
would return it to the system and take it back, page by page, in every step.

``--between`` plans a graph of :mod:`.graphs` on the default machine instead, and prints the gathers
that forward waits for, and when the last reductions of backward end: a gather can't begin before
its parameters are updated.

Exit status: 0, or 1 if weights differ.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.nodes import collective_kind, tag_of
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.schedule.model import model_of, peak_bytes
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.reports.compile import StepReport
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import ring_rank
from torch_ext_bucketing.testing.training import ModelConfig, Transformer, digest

from .command import add_json, add_number, document_of, parser_of, write_results
from .graphs import load

WAYS = (("foreach", None), ("foreach", 1.0), ("fused", 1.0))
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 33)}
OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.step", __doc__)
    add_number(parser, "layers", 4, "blocks")
    add_number(parser, "dim", 128, "width")
    add_number(parser, "steps", 30, "timed steps")
    add_json(parser)
    parser.add_argument("--between", metavar="GRAPH", help="print what the next step waits for")
    args = parser.parse_args(argv)
    if args.between is not None:
        print("\n".join(between_steps(args.between)))
        return 0
    os.environ |= KEEP_MEMORY  # read when the ranks' first process starts
    found = run_ranks(times, 2, args.layers, args.dim, args.steps, timeout_s=1800)
    document = document_of("python -m benchmarks.step", argv) | {"rows": found[0]}
    head = ["AdamW", "clipped", "parameters", "calls", "eager ms", "planned ms", "ratio", "equal"]
    table = [head]
    for row in found[0]:
        eager, planned = row["eager_ms"], row["planned_ms"]
        shown = [f"{eager:.2f}", f"{planned:.2f}", f"{planned / eager:.2f}"]
        counts = [str(row["parameters"]), str(row["calls"])]
        clipped, equal = ("yes" if row[key] else "no" for key in ("clipped", "equal"))
        table.append([row["optimizer"], clipped, *counts, *shown, equal])
    write_results(args.json, document, columns(table))
    return 0 if all(row["equal"] for ranks in found for row in ranks) else 1


def between_steps(name: str) -> list[str]:
    """List forward's waits, and the ends of the last reductions of backward."""
    lines = []
    for phase, kind in (("forward", "all_gather"), ("backward", "reduce_scatter")):
        gm = load(f"{name}.{phase}.recompute", None, quiet=True).gm
        bound = teb.PeakMemory(gib=1.02 * peak_bytes(gm) / 2**30)
        compilation = Compilation()
        teb.BucketAndSchedule([teb.Overlap(), bound], machine=H100)(gm, compilation)
        model = model_of(compilation.analysis(gm.graph), H100)
        line, nodes, now = Timeline.of(model), model.dependencies.nodes, 0.0
        lines.append(f"{phase}: {line.step_ms:.1f} ms, kernels {line.compute_ms:.1f} ms")
        for i in line.order:
            if model.group[i] is None:
                start = model.start_of[i]
                if start >= 0 and line.begin[i] > now and collective_kind(nodes[start]) == kind:
                    wait, about = line.begin[i] - now, tag_of(nodes[start])
                    of = ", ".join(about.fqns) if about is not None else nodes[start].name
                    lines.append(f"  from {now:.1f} ms: {wait:.2f} ms for the {kind} of {of}")
                now = line.end[i]
        if line.step_ms > now:
            lines.append(f"  from {now:.1f} ms: {line.step_ms - now:.2f} ms for the last {kind}")
    return lines


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return a scalar that depends on all parameters."""
    loss: torch.Tensor = model(tokens).float().logsumexp(-1).mean()
    return loss


def times(rank: Rank, layers: int, dim: int, steps: int) -> list[dict[str, Any]]:
    """Return a row per way, of this rank."""
    with ring_rank(rank):
        return [_row(rank.rank, layers, dim, steps, *way) for way in WAYS]


def _row(
    rank: int, layers: int, dim: int, steps: int, optimizer: str, max_norm: float | None
) -> dict[str, Any]:
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,))
    config = ModelConfig(dim=dim, layers=layers, hidden=3 * dim, max_seq=4)
    units = [*(f"blocks.{i}" for i in range(layers)), ""]
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(teb.data_parallel(Transformer(config), mesh))
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), **OPTIONS[optimizer]))
    first, second = (teb.recipe(model, units=units) for model in models)
    step = teb.train_step(
        models[0], optimizers[0], loss_of, max_norm=max_norm, passes=first, compiler="aot_eager"
    )
    backend = teb.backend("aot_eager", second, model=models[1])
    run: Any = torch.compile(loss_of, backend=backend, fullgraph=True)
    planned, graphs, eager = [], [], []
    for number in range(steps + 3):
        tokens = torch.full((1, 4), (number + rank) % config.vocab)
        clock = time.thread_time()
        step(tokens)
        planned.append(time.thread_time() - clock)
        clock = time.thread_time()
        run(models[1], tokens).backward()
        graphs.append(time.thread_time() - clock)
        clock = time.thread_time()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), max_norm)
        optimizers[1].step()
        optimizers[1].zero_grad()
        eager.append(time.thread_time() - clock)
    ours, theirs, alone = (statistics.median(t[3:]) * 1e3 for t in (planned, eager, graphs))
    (report,) = (r for r in step.backend.last_report().rewrites if isinstance(r, StepReport))
    return {
        "optimizer": optimizer,
        "clipped": max_norm is not None,
        "parameters": report.gradients,
        "calls": len(report.updates),
        "eager_ms": theirs,
        "graphs_ms": alone,
        "planned_ms": ours - alone,
        "equal": digest(models[0]) == digest(models[1]),
    }


if __name__ == "__main__":
    sys.exit(main())
