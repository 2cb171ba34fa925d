"""Train under memory bounds with each attention kernel; compare peaks, losses and gradients.

    python -m benchmarks.attention_ranks --device cuda              two NCCL ranks, Inductor
    python -m benchmarks.attention_ranks --device cuda --backend aot_eager
    python -m benchmarks.attention_ranks --device cuda --park       and with activations parked
    python -m benchmarks.attention_ranks --quick                    on the CPU, small

Each kernel (``torch.nn.attention.sdpa_kernel``) trains the demo's model in bfloat16 without a
bound, and under bounds relative to the peak of the plan that keeps nothing. Columns:

- peaks in MiB: measured (bytes asked of the allocator in a step, with shards, above what was held
  before the model), planned, and the bound;
- saved: groups of activations that are not computed again, of all;
- loss: the largest difference of the losses of the first steps to those without a bound;
- gradients of the first step with the bits of those without a bound. Under ``aot_eager`` all have
  them with deterministic kernels. Under Inductor what is computed again is fused otherwise, and
  rounds otherwise;
- again: gradients with the same bits when the step is repeated.

Exit status: 0 if every kernel compiles, no peak on a GPU is more than 3% over its bound (gloo holds
buffers of its own), and losses differ by less than 0.02, 1 if not, 2 for bad options.
"""

import argparse
import gc
import hashlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import torch_ext_bucketing as teb
from benchmarks.command import (
    add_json,
    add_names,
    add_number,
    document_of,
    parser_of,
    title,
    write_json,
)
from benchmarks.eager_parity.devices import start, why_no_nccl
from benchmarks.keep_ranks import Loss, profiled
from torch_ext_bucketing.passes.park import Park, ParkReport
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.reports.planner import KeepReport
from torch_ext_bucketing.testing.ranks import Rank, RankError, preload, run_ranks
from torch_ext_bucketing.testing.training import ModelConfig, raw_bytes

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
ON_CPU = ("flash", "math")
RATIOS = (1.0, 1.3)
OVER = 1.03
"""Most that a measured peak may be of its bound: that of the estimate's own target."""
FURTHEST = 0.02
"""Largest difference of losses of about 1, by rounding in bfloat16."""
STEPS = 3
MIB = 2**20
# All kernels take 64 values per head, and no fewer heads of keys than of queries.
LARGE = ModelConfig(8192, 1024, 4, heads=16, kv_heads=16, hidden=2816, max_seq=1024)
SMALL = ModelConfig(64, 128, 2, heads=2, kv_heads=2, hidden=192, max_seq=32)


@dataclass(frozen=True)
class Case:
    """What a rank runs."""

    device: str
    backend: Literal["aot_eager", "inductor"]
    kernel: str
    ratios: tuple[float, ...]
    park: bool
    config: ModelConfig
    batch: int


def _rank(rank: Rank, case: Case) -> list[dict[str, Any]]:
    """Train without a bound and with each; return a row per run."""
    start(rank, "nccl" if case.device == "cuda" else "gloo")
    try:
        # ``start`` leaves the math kernel on alone.
        with sdpa_kernel(KERNELS[case.kernel]):
            rows: list[dict[str, Any]] = []
            gradients: list[dict[str, str]] = []
            ways = [(None, False), *((ratio, False) for ratio in case.ratios)]
            for ratio, park in [*ways, (None, True)] if case.park else ways:
                row, mine = _train(rank.rank, case, ratio, park)
                gradients.append(mine)
                row["equal"] = sum(mine[name] == gradients[0][name] for name in mine)
                row["gradients"] = len(mine)
                losses = zip(row["losses"], (rows or [row])[0]["losses"], strict=True)
                row["gap"] = max(abs(a - b) for a, b in losses)
                rows.append(row)
                rank.send(row)
            return rows
    finally:
        dist.destroy_process_group()


def _train(
    rank: int, case: Case, ratio: float | None, park: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Train a few steps; return a row, and digests of the first step's gradients by name."""
    torch._dynamo.reset()
    gc.collect()
    begin = time.monotonic()
    mesh = init_device_mesh(case.device, (dist.get_world_size(),))
    torch.manual_seed(0)
    half = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    model = teb.data_parallel(Loss(case.config).to(case.device), mesh, **half)
    under: dict[str, Any] = {}
    if ratio is not None:
        under = {"memory": teb.PeakMemory(ratio=ratio), "state_bytes_per_parameter": 0}
    passes = teb.recipe(model, **under)
    if park:
        passes.insert(0, Park([f"blocks.{n}" for n in range(case.config.layers)]))
    backend = teb.backend(case.backend, passes, model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    parameters = dict(model.named_parameters())

    def tokens(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        size = case.batch, case.config.max_seq
        return torch.randint(case.config.vocab, size, generator=generator).to(case.device)

    def backward(step: int) -> float:
        for parameter in parameters.values():
            parameter.grad = None
        loss = compiled(tokens(step))
        loss.backward()
        return loss.item()

    def found() -> dict[str, str]:
        local = {name: p.grad.to_local() for name, p in parameters.items()}
        return {name: hashlib.sha256(raw_bytes(g)).hexdigest() for name, g in local.items()}

    losses = [backward(0)]
    seconds = time.monotonic() - begin
    gradients = found()
    backward(0)
    again = found()
    with torch.no_grad():
        for step in range(1, STEPS):
            for parameter in parameters.values():
                parameter.sub_(parameter.grad, alpha=0.1)
            with torch.enable_grad():
                losses.append(backward(step))
    for parameter in parameters.values():
        parameter.grad = None
    _, above = profiled(lambda: backward(STEPS))
    held = [p.to_local() for p in parameters.values()] + list(model.buffers())
    report = backend.last_report()
    keep = next((r for r in report.rewrites if isinstance(r, KeepReport)), None)
    activations = [u for u in keep.units if not u.parameters] if keep else []
    row = {
        "kernel": case.kernel,
        "cuda": case.device == "cuda",
        "ratio": ratio,
        "losses": losses,
        "measured": above + sum(t.nbytes for t in held) + tokens(0).nbytes,
        "planned": max((s.peak_bytes[1] for s in report.schedules), default=0),
        "bound": keep.bound_bytes if keep else 0,
        "saved": sum(u.kept for u in activations),
        "groups": len(activations),
        "again": sum(again[name] == gradients[name] for name in again),
        "parked": sum(sum(r.parked.values()) for r in report.rewrites if isinstance(r, ParkReport)),
        "seconds": seconds,
        "warnings": list(report.warnings),
    }
    return row, gradients


def problems(row: dict[str, Any]) -> list[str]:
    """List the faults in the row of a run."""
    found = []
    if row["bound"] and row["cuda"] and row["measured"] > OVER * row["bound"]:
        found.append(f"the peak is {row['measured'] / row['bound']:.2f} of the bound")
    if not row["gap"] < FURTHEST:
        found.append(f"losses differ by {row['gap']:g}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    if cuda and (why := why_no_nccl()):
        parser.error(why)
    config, batch = (SMALL, 1) if args.quick else (LARGE, 4)
    kernels = args.kernels or list(KERNELS if cuda else ON_CPU)
    document = document_of("python -m benchmarks.attention_ranks", argv) | {"rows": []}
    print(title(document), flush=True)
    texts, failed = [], []
    for kernel in kernels:
        case = Case(args.device, args.backend, kernel, tuple(args.ratios), args.park, config, batch)
        rows: list[dict[str, Any]] = []

        def keep(rank: int, row: dict[str, Any], rows: list[dict[str, Any]] = rows) -> None:
            if rank == 0:
                rows.append(row)

        try:
            run_ranks(_rank, args.world, case, timeout_s=args.timeout, on_message=keep)
        except RankError as error:
            failed.append(f"{kernel}: {str(error).strip().splitlines()[-1]}")
            print(f"{kernel}: {error}", file=sys.stderr)
        failed += [f"{kernel}, {_bound(row)}: {text}" for row in rows for text in problems(row)]
        texts += rows
        print(render(rows), flush=True)
        document["rows"], document["failed"] = texts, failed
        write_json(args.json, document)
    for text in failed:
        print(f"FAILED: {text}")
    return 1 if failed else 0


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Render the table of a kernel."""
    head = ["kernel", "bound", "measured", "planned", "bound MiB", "saved", "parked MiB"]
    table = [[*head, "loss", "gradients equal", "again", "compiled, s"]]
    for row in rows:
        mib = [f"{row[name] / MIB:.1f}" for name in ("measured", "planned", "bound")]
        of = f" of {row['gradients']}"
        table.append(
            [
                row["kernel"],
                _bound(row),
                *mib,
                f"{row['saved']} of {row['groups']}",
                f"{row['parked'] / MIB:.1f}",
                f"{row['gap']:.2g}",
                f"{row['equal']}{of}",
                f"{row['again']}{of}",
                f"{row['seconds']:.0f}",
            ]
        )
    return columns(table)


def _bound(row: dict[str, Any]) -> str:
    return "none" if row["ratio"] is None else f"{row['ratio']:g}"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m benchmarks.attention_ranks", __doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--backend", choices=("inductor", "aot_eager"), default="inductor")
    add_names(parser, "kernels", tuple(KERNELS), "attention kernels; all of the device", ())
    parser.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS), metavar="X")
    parser.add_argument("--park", action="store_true", help="also park what blocks save")
    parser.add_argument("--quick", action="store_true", help="a small model")
    add_number(parser, "world", 2, "ranks")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for a kernel")
    add_json(parser, "written after every kernel")
    return parser


if __name__ == "__main__":
    preload("benchmarks.eager_parity.ranks")
    sys.exit(main())
