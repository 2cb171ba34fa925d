"""Run ``python -m torch_ext_bucketing explain``: one plan, or a table of several meshes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reports.base import aligned, sizes_text, table
from ..testing.target import TargetError, add_command, mesh_of, output_file

if TYPE_CHECKING:
    from ..explain import Explanation
    from ..reports.compile import CompileReport


Row = dict[str, Any]
_GIB = 2**30
# Those that last over the step, then others.
_PARTS = (
    *("parameters", "gradients", "state"),
    *("activations", "gathered", "buckets", "workspace", "host"),
)


def meshes_of(text: str) -> list[dict[str, int]]:
    """Convert an option such as ``fsdp=64..512,tp=8``: ranges are doubled from their first size."""
    choices = []
    for part in text.split(","):
        name, _, sizes = part.partition("=")
        first, dots, last = map(str.strip, sizes.partition(".."))
        (low,) = mesh_of(f"fsdp={first}").values()
        (high,) = mesh_of(f"fsdp={last if dots else first}").values()
        if high < low:
            raise argparse.ArgumentTypeError(f"{text!r}: {high} is below {low}")
        choices.append([f"{name}={low << i}" for i in range((high // low).bit_length())])
    return [mesh_of(",".join(parts)) for parts in itertools.product(*choices)]


def sweep(
    meshes: Sequence[Mapping[str, int]], options: Mapping[str, Any], draw: bool = False
) -> list[Row]:
    """Plan each mesh, in as many processes as there are CPUs, with a line of progress for each.

    Args:
        options: arguments of :func:`.explain` beside ``mesh``.
        draw: add each plan's part of a page, ``"page"``.
    """
    rows: dict[int, Row] = {}
    spawn = multiprocessing.get_context("spawn")
    workers = min(len(meshes), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        tasks = {pool.submit(_row, dict(m), options, draw): i for i, m in enumerate(meshes)}
        for done, task in enumerate(as_completed(tasks), 1):
            try:
                row = task.result()
            except BrokenProcessPool:
                row = _failed(meshes[tasks[task]], _ENDED)
            rows[tasks[task]] = row
            how = row["error"] or f"{row['seconds']:.0f} s"
            name = _sizes(row["mesh"])
            print(f"[{done}/{len(meshes)}] {name}: {how}", file=sys.stderr, flush=True)
    plans = [rows[i] for i in range(len(meshes))]
    fits = [row for row in plans if row["fits"]]
    for row in plans:
        row["best"] = bool(fits) and row is max(fits, key=lambda r: r["tokens_per_s_per_gpu"])
    return plans


def text_of(rows: Sequence[Row], memory_gib: float | None) -> str:
    """Format the plans as a table, and name the best one."""
    columns: dict[str, Callable[[Row], object]] = {
        "mesh": lambda row: _sizes(row["mesh"]),
        "step, ms:n": lambda row: f"{row['step_ms']:.1f}",
        "tokens/s/GPU:n": lambda row: f"{row['tokens_per_s_per_gpu']:.0f}",
        "exposed, ms:n": lambda row: f"{row['exposed_ms']:.1f}",
        "peak, GiB:n": lambda row: f"{row['peak_bytes'] / _GIB:.2f}",
        **{f"{p}:n": lambda row, p=p: f"{row['peak'][p] / _GIB:.2f}" for p in _PARTS},  # type: ignore[misc]
        "stay": lambda row: row["stay"],
        "": lambda row: "best" if row["best"] else "" if row["fits"] else "above the bound",
    }
    lines = table(columns, [row for row in rows if not row["error"]])
    failed = [f"{_sizes(row['mesh'])}: {row['error']}" for row in rows if row["error"]]
    about = "parts in GiB at the peak; stay: units gathered, groups of activations saved, parked"
    if memory_gib is not None and not any(row["fits"] for row in rows):
        peaks = [row["peak_bytes"] for row in rows if not row["error"]]
        least = f"; the least peak is {min(peaks) / _GIB:.2f} GiB" if peaks else ""
        about += f"\nno mesh keeps {memory_gib:g} GiB{least}"
    return "\n".join([*lines, about, *failed, ""])


def figures(planned: Explanation) -> Row:
    """Return the figures of a step: times, tokens, and the peak by part from the drawn graphs."""
    from ..planner.schedule.picture import PARTS
    from ..reports.planner import KeepReport

    schedules = planned.report.schedules
    step = sum(s.step_ms[1] for s in schedules)
    peak = dict.fromkeys((*PARTS, "host"), 0)
    most = -1
    for drawn in planned.drawn:
        totals = [sum(values) for values in zip(*drawn.live.values(), strict=True)]
        if drawn.version == "after" and max(totals, default=-1) > most:
            most = max(totals)
            peak |= {part: n[totals.index(most)] for part, n in drawn.live.items()}
    peak["state"] += planned.state_bytes
    row: Row = {"stay": "", "recomputed_bytes": 0}
    for keep in planned.report.rewrites:
        if isinstance(keep, KeepReport):
            gathered = [u.kept for u in keep.units if u.parameters and not u.part]
            saved = [u.kept for u in keep.units if not u.parameters]
            peak["host"] += keep.host_bytes
            stay = f"{sum(gathered)} of {len(gathered)}, {sum(saved)} of {len(saved)}"
            row["stay"] = f"{stay}, {keep.parked}"
            row["recomputed_bytes"] += sum(block.again for block in keep.blocks)
    per_s = planned.tokens / planned.copies / step * 1e3 if step else 0.0
    return {
        "step_ms": step,
        "tokens_per_s": per_s * planned.ranks,
        "tokens_per_s_per_gpu": per_s,
        "exposed_ms": sum(s.exposed_ms[1] for s in schedules),
        "peak_bytes": planned.peak_bytes,
        "peak": peak,
        "collectives": planned.report.collectives_after,
        **row,
    }


def _sizes(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def title_of(target: str | None, mesh: Mapping[str, int]) -> str:
    """Return the title of a plan on a page."""
    return f"{target or 'the model of the demo'}, {_sizes(mesh)}"


_ENDED = "a process that plans was ended, perhaps for want of memory: plan fewer meshes at once"


def _failed(mesh: Mapping[str, int], error: str) -> Row:
    return {"mesh": dict(mesh), "error": error, "fits": False}


def _row(mesh: dict[str, int], options: Mapping[str, Any], draw: bool = False) -> Row:
    """Plan one mesh."""
    import torch

    from ..explain import explain

    clock = time.process_time()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the row has the figures
            planned = explain(mesh=mesh, draw=True, curve=False, **options)
    except TargetError as error:
        return _failed(mesh, str(error))
    row = {"mesh": mesh, "error": "", **figures(planned)}
    if draw:
        from .page import plan_of

        row["page"] = plan_of(title_of(options["target"], mesh), planned)
    bound = options["memory_gib"]
    row["fits"] = bound is None or row["peak_bytes"] <= bound * _GIB
    row["seconds"] = time.process_time() - clock
    return row


GPUS = ("h100", "h200", "b200", "gb200", "a100", "mi300x", "cpu")
"""Data sheets; ``cpu`` stands for CPU ranks, with the times of the default GPU."""
OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
_PASSED_ON = ("goal", "mesh", "sequence", "batch", "optimizer", "memory_gib", "host_gib", "backend")

_DESCRIPTION = """\
Plan a model's forward and backward in this process, with the passes of recipe() and a fake
process group of any number of ranks. Print the passes as code, the buckets with their layout and
why each was closed, and the collectives that are not merged, with the causes.

MODEL is llama3-8b, llama3-70b or llama3-405b; hf: and a config.json of transformers, its folder or
a model_type such as deepseek_v3; or MODULE:FUNCTION. The function is called once the process group
exists, so it can make device meshes; if it has a parameter, it gets the mesh. It returns the
sharded model and its inputs: (model, tensor), (model, (tensor, ...)) or (model, {"name": tensor}),
and as a third a loss(output, inputs) that is compiled with the model. The default is a small
LLaMA-style model.

Nothing has weights or runs: tensors are fake, on any device that the function names, and the graph
has the operators of the GPU."""


def add_parser(subparsers: Any) -> None:
    """Add ``explain`` to a command's subparsers."""
    about = "show how a model's collectives are bucketed and scheduled, and why"
    parser = add_command(subparsers, "explain", run, help=about, description=_DESCRIPTION)
    for name, kind, metavar, text in (
        ("--world-size", int, "N", "ranks to pretend (default: 8), without --mesh"),
        ("--mesh", mesh_of, "SIZES", "ranks by dimension, as in replicate=4,fsdp=16,tp=8"),
        ("--sweep", meshes_of, "SIZES", "several meshes, as in fsdp=64..512,tp=8; one table"),
        ("--sequence", int, "N", "tokens of a sequence (default: 8192, or the model's most)"),
        ("--batch", int, "N", "sequences of a rank (default: 1)"),
        ("--memory-gib", float, "GIB", "bound on the peak, for what is kept"),
        ("--host-gib", float, "GIB", "host memory that may hold activations, with --memory-gib"),
        ("--machine", Path, "FILE", "a file that measure wrote (default: this GPU's data sheet)"),
        ("--size-hint", int, "N", "number for sizes that depend on data, as an expert's tokens"),
        ("--trace", output_file, "FILE", "write timelines before and after as a Perfetto trace"),
        ("--html", output_file, "FILE", "write timelines, memory and buckets as a page to look at"),
        ("--json", output_file, "FILE", "also write the report to FILE"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    parser.set_defaults(goal="parity", batch=1, optimizer="adamw", backend="inductor")
    option = parser.add_argument
    option("target", nargs="?", metavar="MODEL", help="the model (default: the demo's)")
    option("--gpu", choices=GPUS, help="its data sheet and operators (default: this GPU, or h100)")
    option("--optimizer", choices=OPTIMIZERS, help="whose state counts (default: adamw)")
    option("--backend", choices=("inductor", "aot_eager"), help="the job's (default: inductor)")
    option("--goal", choices=("parity", "speed"), help="see recipe() (default: parity)")
    in_rank_order = "add gradients in rank order, and compare the cost with rings"
    option("--reduce", choices=("all_to_all",), help=in_rank_order)
    option("--brief", action="store_true", help="leave out the members of the buckets")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status. Bad options exit with 2."""
    for name in ("world_size", "sequence", "batch"):
        number = getattr(args, name)
        if number is not None and number < 1:
            args.parser.error(f"--{name.replace('_', '-')}: must be at least 1, got {number}")
    ranks = math.prod((args.mesh or {}).values())
    if args.mesh and args.world_size not in (None, ranks):
        args.parser.error(f"--mesh: it has {ranks} ranks, and --world-size is {args.world_size}")
    excluded = ("mesh", "world_size", "trace")
    if args.sweep and any(getattr(args, name) is not None for name in excluded):
        args.parser.error(f"--sweep goes without --{', --'.join(excluded).replace('_', '-')}")
    if args.gpu and args.machine:
        args.parser.error("give --gpu or --machine, not both")
    import torch

    from ..explain import explain
    from ..planner.cost.machine import DATA_SHEETS, Machine
    from ..planner.schedule.picture import write_trace

    try:
        machine = DATA_SHEETS.get(args.gpu) if args.machine is None else Machine.load(args.machine)
    except (ValueError, OSError) as error:
        raise TargetError(f"--machine: {error}") from error
    options = {name: getattr(args, name) for name in _PASSED_ON}
    options |= {"machine": machine, "size_hints": args.size_hint, "on_cpu": args.gpu == "cpu"}
    if args.sweep is not None:
        options |= {"target": args.target, "reduce": args.reduce}
        del options["mesh"]
        rows = sweep(args.sweep, options, args.html is not None)
        pages = [row.pop("page") for row in rows if not row["error"] and args.html]
        if pages:
            from .page import write_page

            write_page(pages, args.html)
        print(text_of(rows, args.memory_gib), end="")
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return 0 if any(not row["error"] for row in rows) else 1
    options["world_size"] = args.world_size or 8
    explained = explain(
        args.target, reduce=args.reduce, draw=bool(args.trace or args.html), **options
    )
    reduce = f", reduce={args.reduce!r}" if args.reduce else ""
    print(f"recipe(model, {args.goal!r}{reduce}):", *explained.passes, sep="\n  ", end="\n\n")
    print(explained.report.to_text(members=not args.brief), end="")
    peak = explained.peak_bytes / _GIB
    if args.memory_gib is not None and peak > args.memory_gib:
        least = math.ceil(peak * 100) / 100
        print(
            f"no plan found keeps {args.memory_gib:g} GiB: --memory-gib {least:g} is the least "
            "that works; more ranks, tp= or shorter sequences need less"
        )
    if args.reduce:
        torch._dynamo.reset()
        rings = explain(args.target, **options)
        print(_against_rings(explained.report, rings.report, args.goal), end="")
    if args.json is not None:
        args.json.write_text(explained.report.to_json() + "\n", encoding="utf-8")
    if args.trace is not None:
        write_trace(explained.drawn, args.trace)
    if args.html is not None:
        from .page import plan_of, write_page

        where = args.mesh or {"ranks": options["world_size"]}
        write_page([plan_of(title_of(args.target, where), explained)], args.html)
    return 0


def _against_rings(sums: CompileReport, rings: CompileReport, goal: str) -> str:
    """Compare the step and the peak with reductions by all-to-all and with rings."""
    reports = {"rings": rings, "all-to-alls, sums in rank order": sums}
    steps = [sum(s.step_ms[1] for s in r.schedules) for r in reports.values()]
    peaks = [max((s.peak_bytes[1] for s in r.schedules), default=0) for r in reports.values()]
    rows = [("estimated, all graphs", "step, ms", "peak")]
    rows += zip(reports, (f"{step:.3f}" for step in steps), sizes_text(*peaks), strict=True)
    bits = (
        f'Goal "{goal}" has the bits of eager FSDP2 with AllToAllReduceScatter, whatever the '
        "units, caps and order.\n"
    )
    return "\n".join(["", *aligned(rows, right=(1, 2)), bits])
