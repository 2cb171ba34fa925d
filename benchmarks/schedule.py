"""Estimate step time and memory of our schedule and the unpatched torch's on graphs of real size.

    python -m benchmarks.schedule                           every graph, prints a table
    python -m benchmarks.schedule --only 'llama3_8b_*' --json out.json
    python -m benchmarks.schedule --between 12.5            a slower network between nodes
    python -m benchmarks.schedule --only 'held_out_*'       models that nothing is tuned on
    python -m benchmarks.schedule --only 'measured_*' --measured   scored by other times

Each row is one graph of :mod:`.graphs`. Two ways, each in a process of its own:

- ``unpatched``: ``schedule_overlap_bucketing`` of the installed torch's own source, with buckets,
  torch's own byte cap (or ``--cap``), and our cost model as its runtime estimation, sizes that
  depend on data included;
- ``ours``: :class:`.ByCap` (HSDP's all-reduces, too), :func:`.apply_plan`, and
  :func:`.schedule` with ``Overlap()`` and ``PeakMemory`` at 1.02 times the peak of the graph
  without buckets.

Both results are timed by :class:`.Timeline` on the same machine: that of the plans, or with
``--measured`` one with tables of collectives (:mod:`h100_times`) and with fused kernels, which
nothing was planned for. The lower bound is :attr:`.Paths.bound_ms` of our bucketed graph. Pass
times are CPU seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from torch_ext_bucketing.reports.base import columns

from .bucketing import check_torch, parameter_groups, run_child
from .command import add_between, parser_of_graphs, words, write_json
from .graphs import Graph, chosen, load

if TYPE_CHECKING:
    from torch_ext_bucketing.planner.cost.machine import Machine
    from torch_ext_bucketing.planner.schedule.model import Model
    from torch_ext_bucketing.planner.schedule.policy import Policy

    Options = dict[str, Any]

WAYS = ("unpatched", "ours")
GIB = 2**30


def run_unpatched(graph: Graph, cap_mb: float | None, between: float | None = None) -> None:
    """Run torch's own bucketing and overlap with our costs."""
    from torch._inductor.fx_passes import overlap_scheduling

    from benchmarks.eager_parity.devices import nodes
    from torch_ext_bucketing.graph.sizes import SizeHints
    from torch_ext_bucketing.planner.cost.cost import Costs

    costs = Costs(nodes(between), SizeHints(graph.config.size_hints))
    # torch estimates every compute node itself before it calls our estimate, and needs a GPU
    # (or Triton) for that.
    overlap_scheduling.estimate_roofline_runtime_ms = costs

    def estimate(node: fx.Node, override_bytes: int | None) -> float:
        return costs(node) if override_bytes is None else costs.collective(node, override_bytes)

    overlap_scheduling.schedule_overlap_bucketing(
        graph.gm,
        collective_bucketing=True,
        custom_runtime_estimation=estimate,
        compute_estimator="analytical",
        pre_bucketing_fsdp_collectives_bucket_cap_mb=cap_mb,
    )


def what_ours_plans(
    graph: Graph, reference: int, bound: float = 1.02
) -> tuple[list[Policy], Options]:
    """Return our policies, under ``bound`` times a peak, and the options that choose buckets."""
    from torch_ext_bucketing.planner.schedule.policy import Overlap, PeakMemory

    keep = [*parameter_groups(graph)]
    keep += [name for name, group in graph.groups.items() if group.role == "replicate"]
    policies: list[Policy] = [Overlap(), PeakMemory(gib=bound * reference / GIB)]
    return policies, {
        "kinds": ("all_gather", "reduce_scatter", "all_reduce"),
        "groups": keep,
    }


def run_ours(
    graph: Graph,
    cap_mb: float | None,
    reference: int,
    between: float | None = None,
    by_tables: bool = False,
) -> dict[str, Any]:
    """Run our bucketing, then our schedule."""
    from benchmarks.eager_parity.devices import nodes
    from torch_ext_bucketing.bucketing.pack import apply_plan
    from torch_ext_bucketing.bucketing.plan import ByCap
    from torch_ext_bucketing.graph.analysis import GraphAnalysis
    from torch_ext_bucketing.planner.cap_search import BySearch
    from torch_ext_bucketing.planner.scheduling import schedule

    machine = nodes(between)
    if by_tables:  # as a pass plans that is called outside of a compile
        machine = machine.for_backend(None)
    policies, options = what_ours_plans(graph, reference)
    like = None
    if cap_mb is None:
        analysis = GraphAnalysis(graph.gm.graph, graph.config.size_hints)
        by_cap = ByCap(**options)
        search = BySearch(tuple(policies), by_cap, machine=machine, reference_bytes=reference)
        plan, found, like = search.search(analysis)
        caps = [c for _, cap in found.caps_mb for c in (cap if isinstance(cap, tuple) else (cap,))]
    else:
        plan = ByCap(cap_mb, **options).plan(GraphAnalysis(graph.gm.graph))
        caps = [cap_mb]
    apply_plan(GraphAnalysis(graph.gm.graph), plan)
    report = schedule(
        graph.gm.graph,  # its code is generated after all passes, as with torch's
        policies,
        machine=machine,
        reference_bytes=reference,
        size_hints=graph.config.size_hints,
        like=like,
    )
    return {
        "caps_mb": caps,
        "chosen": report.chosen,
        "missed": report.warnings,
    }


def measured() -> Machine:
    """Return nodes of 8 H100s with a table of collectives, which run fused kernels."""
    from h100_times import table

    from torch_ext_bucketing.planner.cost.machine import H100

    return replace(H100, name="H100, by tables", collectives=table(), fuses=True)


def child(
    way: str,
    name: str,
    cap_mb: float | None,
    layers: int | None,
    between: float | None,
    by_tables: bool,
) -> None:
    """Measure one way on one graph and print the result as JSON."""
    from benchmarks.eager_parity.devices import nodes
    from torch_ext_bucketing.graph.sizes import SizeHints
    from torch_ext_bucketing.planner.cost.cost import Costs
    from torch_ext_bucketing.planner.schedule.model import model_of
    from torch_ext_bucketing.planner.schedule.timeline import Timeline

    def model(graph: Graph) -> Model:
        machine = measured() if by_tables else nodes(between)
        return model_of(graph.gm.graph, Costs(machine, SizeHints(graph.config.size_hints)))

    logging.getLogger("torch._inductor.fx_passes").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    # Neither way is charged for imports.
    importlib.import_module("torch._inductor.fx_passes.overlap_scheduling")
    importlib.import_module("torch._inductor.fx_passes.overlap_preserving_bucketer")
    graph = load(name, layers, quiet=True)
    unbucketed = Timeline.of(model(graph))
    clock = time.process_time()
    extra = {}
    if way == "unpatched":
        run_unpatched(graph, cap_mb, between)
    else:
        extra = run_ours(graph, cap_mb, unbucketed.peak_bytes, between, by_tables)
    seconds = time.process_time() - clock
    check_torch(way)
    graph.gm.graph.lint()
    after = model(graph)
    reached = Timeline.of(after)
    result = {
        "step_ms": reached.step_ms,
        "bound_ms": after.paths.bound_ms,
        "peak_gib": reached.peak_bytes / GIB,
        "longest_run": reached.longest_run,
        "pass_s": seconds,
        "unbucketed_step_ms": unbucketed.step_ms,
        "unbucketed_peak_gib": unbucketed.peak_bytes / GIB,
        **extra,
    }
    print(json.dumps(result))


def measure(
    name: str,
    cap_mb: float | None,
    layers: int | None,
    between: float | None = None,
    by_tables: bool = False,
) -> dict[str, Any]:
    """Measure one row."""
    arguments = words(only=name, cap=cap_mb, layers=layers, between=between)
    arguments += words(measured=by_tables)
    found = {way: run_child("benchmarks.schedule", way, arguments) for way in WAYS}
    row = {"graph": name, **found["ours"]}
    for key in ("step_ms", "peak_gib", "longest_run", "pass_s"):
        row[f"unpatched_{key}"] = found["unpatched"][key]
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per graph, and the geometric mean over the bound."""
    head = ["graph", "cap", "bound", "ours", "unpatched", "unbucketed", "ours"]
    head += ["peak,", "ours", "unpatched", "run", "unpatched", "ours", "unpatched"]
    below = ["", "MiB", "ms", "ms", "ms", "ms", "/ bound"]
    below += ["unbucketed", "/ it", "/ it", "", "run", "s", "s"]
    lines = [[*head, "order"], [*below, "taken"]]
    times = ("bound_ms", "step_ms", "unpatched_step_ms", "unbucketed_step_ms")
    for r in rows:
        peak = r["unbucketed_peak_gib"]
        lines.append(
            [
                r["graph"],
                ", ".join(f"{cap:.3g}" for cap in sorted({*r["caps_mb"]})),
                *(f"{r[key]:.1f}" for key in times),
                f"{r['step_ms'] / r['bound_ms']:.3f}",
                f"{peak:.2f} GiB",
                *(f"{r[key] / peak:.3f}" for key in ("peak_gib", "unpatched_peak_gib")),
                *(str(r[key]) for key in ("longest_run", "unpatched_longest_run")),
                *(f"{r[key]:.2f}" for key in ("pass_s", "unpatched_pass_s")),
                r["chosen"],
            ]
        )
    ours, theirs = (_mean([r[key] / r["bound_ms"] for r in rows]) for key in times[1:3])
    return (
        f"{columns(lines)}\n\ngeometric mean of step / bound: ours {ours:.3f}, "
        f"unpatched {theirs:.3f}"
    )


def _mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.schedule", __doc__)
    parser.add_argument("--cap", type=float, metavar="MIB", help="bucket cap (default: chosen)")
    add_between(parser)
    parser.add_argument("--measured", action="store_true", help="score by tables of collectives")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    names = chosen(parser, args.only, bool(args.child))
    if args.between is not None and not 0 < args.between < math.inf:
        parser.error("--between takes a positive number")
    if args.child:
        layers, between = args.layers, args.between
        child(args.child, names[0], args.cap, layers, between, args.measured)
        return 0
    rows = []
    for name in names:
        print(name, file=sys.stderr, flush=True)
        between, by_tables = args.between, args.measured
        rows.append(measure(name, args.cap, args.layers, between, by_tables))
        write_json(args.json, rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
