"""The command ``python -m torch_ext_bucketing explain``."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..reports.base import aligned, sizes_text
from ..testing.target import TargetError, add_command, output_file

if TYPE_CHECKING:
    from ..reports.compile import CompileReport

_DESCRIPTION = """\
Compile a model's forward and backward in this process, with the passes of recipe() and a fake
process group of any number of ranks. Print the passes as code, the buckets with their layout and
why each was closed, and the collectives that are not merged, with the causes.

MODULE:FUNCTION is called without arguments once the process group exists, so it can make device
meshes. It returns the sharded model and its inputs: (model, tensor), (model, (tensor, ...)) or
(model, {"name": tensor}). The default is a small LLaMA-style model."""


def add_parser(subparsers: Any) -> None:
    """Add ``explain`` to a command's subparsers."""
    about = "show how a model's collectives are bucketed and scheduled, and why"
    parser = add_command(subparsers, "explain", run, help=about, description=_DESCRIPTION)
    for name, kind, metavar, text in (
        ("--world-size", int, "N", "ranks to pretend (default: 8)"),
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
        ("--json", output_file, "FILE", "also write the report to FILE"),
    ):
        parser.add_argument(name, type=kind, metavar=metavar, help=text)
    parser.set_defaults(goal="parity", world_size=8)
    option = parser.add_argument
    option("target", nargs="?", metavar="MODULE:FUNCTION", help="the model (default: the demo's)")
    option("--goal", choices=("parity", "speed"), help="see recipe() (default: parity)")
    in_rank_order = "add gradients in rank order, and compare the cost with rings"
    option("--reduce", choices=("all_to_all",), help=in_rank_order)
    option("--brief", action="store_true", help="leave out the members of the buckets")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status. Bad options exit with 2."""
    if args.world_size < 1:
        args.parser.error(f"--world-size: must be at least 1, got {args.world_size}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        args.parser.error("--plot: matplotlib is not installed: pip install matplotlib")
    import torch

    from ..explain import explain
    from ..planner.cost.machine import Machine
    from ..planner.schedule.plot import write_trace
    from ..reports.keep import KeepReport

    try:
        machine = None if args.machine is None else Machine.load(args.machine)
    except (ValueError, OSError) as error:
        raise TargetError(f"--machine: {error}") from error
    given = {name: getattr(args, name) for name in ("goal", "world_size", "memory_gib", "host_gib")}
    given |= {"machine": machine, "size_hints": args.size_hint}
    explained = explain(
        args.target, reduce=args.reduce, draw=bool(args.trace or args.plot), **given
    )
    reduce = f", reduce={args.reduce!r}" if args.reduce else ""
    print(f"recipe(model, {args.goal!r}{reduce}):", *explained.passes, sep="\n  ", end="\n\n")
    print(explained.report.to_text(members=not args.brief), end="")
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
