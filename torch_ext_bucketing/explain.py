"""``python -m torch_ext_bucketing explain``: what bucketing does to a model, without ranks.

The model is compiled on one process with a fake process group of any number of ranks, forward and
backward, and the report is printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .testing.target import TargetError, load_target

if TYPE_CHECKING:
    import torch.nn as nn

    from .graph.size_hints import GivenHints
    from .passes.base import GraphPass
    from .reports.compile import CompileReport
    from .scheduling.machine import Machine
    from .scheduling.trace import Drawn

__all__ = ["ExplainError", "add_parser", "explain"]

MODES = ("auto", "transformer_block", "none")
GOALS = ("parity", "speed")

_DESCRIPTION = """\
Compile a model's forward and backward on this process, with a fake process group of any number of
ranks, and print which collectives are merged, how each bucket is laid out, why it was closed, and
what is left and why.

MODULE:FUNCTION is called without arguments once the process group is there, so it can make device
meshes. It returns the sharded model and its inputs: (model, tensor), (model, (tensor, ...)) or
(model, {"name": tensor}). Without it, a small LLaMA-style model is taken."""


class ExplainError(Exception):
    """The target can't be explained; the message says why and what to do."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``explain`` to a command's subparsers; the arguments carry ``run(args) -> int``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "explain",
        help="print what bucketing does to a model's collectives, and why",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", nargs="?", metavar="MODULE:FUNCTION", help="makes the model (default: the demo's)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--goal",
        choices=GOALS,
        help="run the passes of recipe() for that goal, and print them as code",
    )
    parser.add_argument(
        "--reduce",
        choices=("all_to_all",),
        help="of --goal: add gradients in the order of the ranks, and compare that with rings",
    )
    what.add_argument(
        "--mode",
        choices=MODES,
        default="auto",
        help="buckets by byte cap, one per transformer block, or none (default: auto)",
    )
    parser.add_argument(
        "--cap-mb",
        type=float,
        metavar="MB",
        help="byte cap of mode auto, in MiB (default: torch's estimate for the group's size)",
    )
    parser.add_argument(
        "--primary-group",
        action="store_true",
        help="mode auto: only the process group with the most FSDP all-gathers",
    )
    parser.add_argument(
        "--world-size", type=int, default=8, metavar="N", help="ranks to pretend (default: 8)"
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="also schedule the graphs: gathers launch early, reductions are waited for late",
    )
    parser.add_argument(
        "--keep-gib",
        type=float,
        metavar="GIB",
        help="keep gathered from forward to backward what fits under this peak, and say what that "
        "saves; --plot draws time and memory over the bound",
    )
    parser.add_argument(
        "--machine",
        type=Path,
        metavar="FILE",
        help="times of --goal, --overlap, --keep-gib, --trace and --plot: a file that measure "
        "wrote (default: this GPU's data sheet, or an H100's)",
    )
    parser.add_argument(
        "--size-hint",
        type=int,
        metavar="N",
        help="what they take sizes that depend on data as, such as the tokens of an expert",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the graphs' timelines, before and after, as a trace for Perfetto",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw them before and after (needs matplotlib)"
    )
    parser.add_argument("--brief", action="store_true", help="leave out the members of the buckets")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.set_defaults(run=run, parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Explain; returns the exit status: 0, or 1 if it failed. Bad options exit with 2."""
    if args.world_size < 1:
        args.parser.error(f"--world-size: must be at least 1, got {args.world_size}")
    if args.keep_gib is not None and not 0 < args.keep_gib < float("inf"):
        args.parser.error(f"--keep-gib: must be a positive number, got {args.keep_gib}")
    if args.mode != "auto" and args.cap_mb is not None:
        args.parser.error(f"--cap-mb belongs to --mode auto, not to {args.mode}")
    if args.goal and (args.overlap or args.primary_group or args.keep_gib is not None):
        args.parser.error("--goal takes recipe()'s passes, without options of their own")
    if args.reduce and not args.goal:
        args.parser.error("--reduce belongs to --goal")
    if args.goal and args.cap_mb is not None:
        args.parser.error("--cap-mb belongs to --mode auto, not to a goal")
    estimates = args.goal or args.overlap or args.keep_gib is not None or args.trace or args.plot
    for option in ("machine", "size_hint"):
        if getattr(args, option) is not None and not estimates:
            name = option.replace("_", "-")
            args.parser.error(
                f"--{name}: nothing is estimated without --overlap, --goal, --keep-gib, --trace "
                "or --plot"
            )
    if args.size_hint is not None and args.size_hint < 0:
        args.parser.error(f"--size-hint: must be at least 0, got {args.size_hint}")
    for option in ("json", "trace", "plot"):
        path = getattr(args, option)
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            args.parser.error(f"--{option}: {path} is a folder, or is in none that exists")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        args.parser.error("--plot: matplotlib is not installed: pip install matplotlib")
    drawn: list[Drawn] | None = [] if args.trace or args.plot else None
    taken: list[GraphPass] = []
    machine = None
    try:
        machine = None if args.machine is None else _machine(args.machine)
        report = explain(
            args.target,
            goal=args.goal,
            reduce=args.reduce,
            mode=args.mode,
            cap_mb=args.cap_mb,
            primary=args.primary_group,
            world_size=args.world_size,
            overlap=args.overlap,
            keep_gib=args.keep_gib,
            taken=taken,
            drawn=drawn,
            machine=machine,
            size_hints=args.size_hint,
        )
        if args.goal:
            given = f", reduce={args.reduce!r}" if args.reduce else ""
            print(f"recipe(model, {args.goal!r}{given}):", *taken, sep="\n  ", end="\n\n")
        print(report.to_text(members=not args.brief), end="")
        if args.reduce:
            import torch

            torch._dynamo.reset()
            rings = explain(
                args.target,
                goal=args.goal,
                world_size=args.world_size,
                machine=machine,
                size_hints=args.size_hint,
            )
            print(_against_rings(report, rings, args.goal), end="")
        if args.json is not None:
            args.json.write_text(report.to_json() + "\n", encoding="utf-8")
        if args.trace is not None:
            from .scheduling.trace import write_trace

            write_trace(drawn or [], args.trace)
        if args.plot is not None:
            from .reports.keep import KeepReport
            from .scheduling.plot import plot

            kept = (r for r in report.rewrites if isinstance(r, KeepReport))
            plot(drawn or [], args.plot, next(kept, None))
    except ExplainError as error:
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{args.parser.prog}: error: cannot write: {error}", file=sys.stderr)
        return 1
    return 0


def explain(
    target: str | None = None,
    *,
    goal: str | None = None,
    reduce: str | None = None,
    mode: str = "auto",
    cap_mb: float | None = None,
    primary: bool = False,
    world_size: int = 8,
    overlap: bool = False,
    keep_gib: float | None = None,
    taken: list[GraphPass] | None = None,
    drawn: list[Drawn] | None = None,
    machine: Machine | None = None,
    size_hints: GivenHints = None,
) -> CompileReport:
    """The report of a model's forward and backward, compiled on a fake process group.

    Args:
        target: ``"module:function"``, which returns the model and its inputs; None takes the demo's
            model, sharded over all ranks.
        goal: one of ``GOALS``, for the passes of :func:`.recipe`; None takes those of ``mode``.
        reduce: as of :func:`.recipe`.
        mode: one of ``MODES``.
        cap_mb: byte cap in MiB, see :func:`.plan_by_cap`.
        primary: bucket only the primary process group.
        world_size: number of ranks; this process plays rank 0.
        overlap: also schedule the graphs, with :class:`.Overlap`.
        keep_gib: a bound in GiB, under which units stay gathered from forward to backward, see
            :class:`.ReshardAfterForward`.
        taken: gets the passes.
        drawn: gets the timelines of each graph, as compiled and as it became.
        machine: what nodes are timed for; None: this job's.
        size_hints: as of :func:`.backend`.

    Raises:
        ExplainError: the target can't be found, returns something else, or can't be compiled; an
            option is bad; a process group exists already.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if mode not in MODES:
        raise ExplainError(f"no mode is named {mode!r}; the modes are {', '.join(MODES)}")
    try:
        make = _demo_model if target is None else load_target(target)
    except TargetError as error:
        raise ExplainError(str(error)) from error
    if dist.is_initialized():
        raise ExplainError(
            "torch.distributed is initialised already; explain starts a fake process group of its "
            "own: importing the module of the target must not start one"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        model, arguments, keywords = _made(target or "the demo's model", make)
        from .scheduling.devices import job_machine

        on = job_machine() if machine is None else machine
        if goal is not None:
            passes = _recipe(model, goal, on, reduce)
        else:
            passes = _passes(model, mode, cap_mb, primary, keep_gib, on)
        if overlap:
            from .passes.scheduling import Schedule
            from .scheduling.overlap import Overlap

            passes.append(Schedule(Overlap(), on))
        if taken is not None:
            taken += passes
        if drawn is not None:
            passes = [_drawing(drawn, "before", on), *passes, _drawing(drawn, "after", on)]
        return _compile(model, arguments, keywords, passes, size_hints)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _machine(path: Path) -> Machine:
    from .scheduling.machine import Machine

    try:
        return Machine.load(path)
    except (ValueError, OSError) as error:
        raise ExplainError(f"--machine: {error}") from error


def _demo_model() -> Any:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from .fsdp.simple_fsdp import data_parallel
    from .testing.model import ModelConfig, Transformer

    config = ModelConfig()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = data_parallel(
        Transformer(config), mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    return model, torch.zeros(1, config.max_seq, dtype=torch.long)


def _made(name: str, make: Any) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    import torch.nn as nn

    try:
        result = make()
    except Exception as error:
        raise ExplainError(f"{name} raised {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], nn.Module):
        raise ExplainError(
            f"{name} must return (model, inputs), a torch.nn.Module and what it is called with; it "
            f"returned {type(result).__name__}"
        )
    model, inputs = result
    if isinstance(inputs, dict):
        return model, (), inputs
    return model, tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,), {}


def _against_rings(sums: CompileReport, rings: CompileReport, goal: str) -> str:
    """What the step and the peak are with reductions by all-to-all, and with rings."""
    from .reports.text import aligned

    rows: list[tuple[str, ...]] = [("estimated, all graphs", "step, ms", "peak, GiB")]
    for name, report in (("rings", rings), ("all-to-alls, sums in rank order", sums)):
        step = sum(s.step_ms[1] for s in report.schedules)
        peak = max((s.peak_bytes[1] for s in report.schedules), default=0)
        rows.append((name, f"{step:.3f}", f"{peak / 2**30:.3f}"))
    bits = (
        f'Goal "{goal}" has the bits of eager FSDP2 with AllToAllReduceScatter, whatever the '
        "units, caps and order.\n"
    )
    return "\n".join(["", *aligned(rows, right=(1, 2)), bits])


def _recipe(model: nn.Module, goal: str, machine: Machine, reduce: str | None) -> list[GraphPass]:
    from .recipes import recipe

    try:
        return recipe(model, goal, machine=machine, reduce=reduce)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise ExplainError(f"recipe(model, {goal!r}): {error}") from error


def _passes(
    model: nn.Module,
    mode: str,
    cap_mb: float | None,
    primary: bool,
    keep_gib: float | None,
    machine: Machine,
) -> list[GraphPass]:
    from .bucketing.groups import primary_group
    from .fsdp.blocks import transformer_block_plan
    from .fsdp.order import FSDPParamOrder
    from .graph.collectives import KINDS
    from .passes.bucketing import BucketByCap, BucketUnits
    from .rewrites.resharding import ReshardAfterForward
    from .scheduling.memory import PeakMemory

    reshard = ReshardAfterForward()
    if keep_gib is not None:
        bound = PeakMemory(gib=keep_gib)
        reshard = ReshardAfterForward("auto", memory=bound, curve=True, machine=machine)
    try:
        if mode == "transformer_block":
            plan = transformer_block_plan(model)
            order = FSDPParamOrder.from_model(model, units=plan)
            return [reshard, BucketUnits(order, KINDS)]
        if mode == "none":
            return [reshard, BucketByCap(kinds=())]
        by_cap = BucketByCap(cap_mb, group_filter=primary_group if primary else None)
        return [reshard, by_cap]
    except (ValueError, TypeError) as error:
        raise ExplainError(str(error)) from error


def _drawing(drawn: list[Drawn], version: str, machine: Machine) -> GraphPass:
    """A pass that keeps the timeline of each graph as it is."""
    from ._torch.aot import stage_of
    from .passes.base import Baseline, Compilation, GraphPass
    from .scheduling.model import model_of
    from .scheduling.timeline import Timeline
    from .scheduling.trace import Drawn

    class Draw(GraphPass):
        stage = "forward_backward"
        needs = (Baseline,)

        def run(self, graph: Any, compilation: Compilation) -> None:
            graph = getattr(graph, "graph", graph)
            model = model_of(compilation.analysis(graph), machine)
            drawn.append(Drawn(stage_of(graph), version, model, Timeline.of(model)))

    return Draw()


def _compile(
    model: nn.Module,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    passes: list[GraphPass],
    size_hints: GivenHints,
) -> CompileReport:
    import torch
    import torch.utils._pytree as pytree

    from .passes.backends import backend
    from .reports.compile import CompileReport

    compiler = backend("aot_eager", passes, model, size_hints=size_hints)
    compiled = torch.compile(model, backend=compiler)
    try:
        results = pytree.tree_leaves(compiled(*arguments, **keywords))
        losses = [r.sum() for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if losses:
            sum(losses).backward()  # type: ignore[union-attr]
    except Exception as error:
        raise ExplainError(
            f"compiling the model or running it failed: {type(error).__name__}: {error}"
        ) from error
    if not compiler.reports:
        raise ExplainError("the model compiled to no graph: nothing in it was traced")
    whole = CompileReport()
    for report in compiler.reports:  # several where the graph breaks
        whole.graphs += report.graphs
        whole.unnamed += report.unnamed
        whole.warnings += report.warnings
        whole.schedules += report.schedules
        whole.rewrites += report.rewrites
        whole.passes += report.passes
        whole.disabled = report.disabled
    return whole
