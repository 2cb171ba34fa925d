"""The command ``python -m torch_ext_bucketing explain``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reports.base import aligned, sizes_text
from ..testing.target import TargetError, add_command, mesh_of, output_file
from .sweep import cache_folder, meshes_of, sweep, text_of, title_of

if TYPE_CHECKING:
    from ..reports.compile import CompileReport

GPUS = ("h100", "h200", "b200", "gb200", "a100", "mi300x", "cpu")
"""Data sheets; ``cpu`` stands for CPU ranks, with the times of the default GPU."""
OPTIMIZERS = ("adamw", "adam", "sgd", "muon")
_GIB = 2**30
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
        (
            "--memory-gib",
            float,
            "GIB",
            "bound on the peak, for what is kept (--plot draws a curve)",
        ),
        ("--host-gib", float, "GIB", "host memory that may hold activations, with --memory-gib"),
        ("--machine", Path, "FILE", "a file that measure wrote (default: this GPU's data sheet)"),
        ("--size-hint", int, "N", "number for sizes that depend on data, as an expert's tokens"),
        ("--trace", output_file, "FILE", "write timelines before and after as a Perfetto trace"),
        ("--plot", output_file, "FILE", "draw timelines before and after (needs matplotlib)"),
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
    option("--no-cache", action="store_true", help="make the plans of --sweep anew")
    option("--brief", action="store_true", help="leave out the members of the buckets")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status. Bad options exit with 2."""
    for name in ("world_size", "sequence", "batch"):
        given = getattr(args, name)
        if given is not None and given < 1:
            args.parser.error(f"--{name.replace('_', '-')}: must be at least 1, got {given}")
    ranks = math.prod((args.mesh or {}).values())
    if args.mesh and args.world_size not in (None, ranks):
        args.parser.error(f"--mesh: it has {ranks} ranks, and --world-size is {args.world_size}")
    others = ("mesh", "world_size", "trace", "plot")
    if args.sweep and any(getattr(args, name) is not None for name in others):
        args.parser.error(f"--sweep goes without --{', --'.join(others).replace('_', '-')}")
    if args.gpu and args.machine:
        args.parser.error("give --gpu or --machine, not both")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        args.parser.error("--plot: matplotlib is not installed: pip install matplotlib")
    import torch

    from ..explain import explain
    from ..planner.cost.machine import DATA_SHEETS, Machine
    from ..planner.schedule.plot import write_trace
    from ..reports.keep import KeepReport

    try:
        machine = DATA_SHEETS.get(args.gpu) if args.machine is None else Machine.load(args.machine)
    except (ValueError, OSError) as error:
        raise TargetError(f"--machine: {error}") from error
    given = {name: getattr(args, name) for name in _PASSED_ON}
    given |= {"machine": machine, "size_hints": args.size_hint, "on_cpu": args.gpu == "cpu"}
    if args.sweep is not None:
        folder = None if args.no_cache else cache_folder()
        given |= {"target": args.target, "reduce": args.reduce}
        del given["mesh"]
        rows = sweep(args.sweep, given, folder, args.html is not None)
        pages = [row.pop("page") for row in rows if not row["error"] and args.html]
        if pages:
            from .page import write_page

            write_page(pages, args.html)
        print(text_of(rows, args.memory_gib), end="")
        if args.json is not None:
            args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        return 0 if any(not row["error"] for row in rows) else 1
    given["world_size"] = args.world_size or 8
    explained = explain(
        args.target, reduce=args.reduce, draw=bool(args.trace or args.plot or args.html), **given
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
        rings = explain(args.target, **given)
        print(_against_rings(explained.report, rings.report, args.goal), end="")
    if args.json is not None:
        args.json.write_text(explained.report.to_json() + "\n", encoding="utf-8")
    if args.trace is not None:
        write_trace(explained.drawn, args.trace)
    if args.plot is not None:
        from ..planner.schedule.plot import plot

        kept = (r for r in explained.report.rewrites if isinstance(r, KeepReport))
        plot(explained.drawn, args.plot, next(kept, None))
    if args.html is not None:
        from .page import plan_of, write_page

        where = args.mesh or {"ranks": given["world_size"]}
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
