"""Count the collectives left after bucketing, and time it, beside the unpatched torch.

    python -m benchmarks.bucketing                           every graph at its cap, prints a table
    python -m benchmarks.bucketing --only 'llama3_8b_*' --cap 25 --json out.json

Each row is one graph of :mod:`.graphs` at one cap. Four ways, each in a process of its own, one
after the other on the same graph:

- ``unpatched``: torch's ``pre_bucket_fsdp_collectives`` from the installed torch's own source;
- ``unset``: the same function of the patched torch, with no entry set;
- ``hooks``: the same function of the patched torch, with ``bucket_max_collectives_between`` and, as
  ``fsdp_group_filter``, the groups that share parameters;
- ``ours``: :class:`.ByCap`, then :func:`.apply_plan`.

Counts are of all-gathers and reduce-scatters on those groups. The byte lower bound is what bytes
alone force: per bucket key, one bucket for each member above the cap, and the others' bytes over
the cap, rounded up. Times are CPU seconds, medians over ``--repeat`` fresh loads of the graph; peak
memory is what the process's maximum resident size grew by during the pass.
"""

import argparse
import json
import logging
import math
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.reports.base import columns

from .command import add_number, parser_of_graphs, words, write_json
from .graphs import Graph, chosen, load

WAYS = ("unpatched", "unset", "hooks", "ours")
PARAMETER_ROLES = ("fsdp", "expert_fsdp")


# What a child runs for the patched torch.
_PATCHED = """
import sys
from torch_ext_bucketing import hooks
hooks.install()
from {module} import main
sys.exit(main())
"""


def run_child(module: str, way: str, arguments: Sequence[str]) -> Any:
    """Run ``module``'s ``main`` with ``--child way`` in another process; return its JSON."""
    program = ["-m", module] if way == "unpatched" else ["-c", _PATCHED.format(module=module)]
    command = [sys.executable, *program, "--child", way, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join([module, way, *arguments])}:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def check_torch(way: str) -> None:
    """Raise if this process does not run the torch that ``way`` is about."""
    from torch._inductor import config

    patched = hasattr(config.aten_distributed_optimizations, "bucket_max_collectives_between")
    if patched == (way == "unpatched"):
        raise RuntimeError(f"{way}: the bucketing module is {'patched' if patched else 'original'}")


def default_cap(name: str) -> float:
    """Return the cap in MiB: 25 for LLaMA-3 8B, as others report it; else 500, torch's ceiling."""
    return 25.0 if name.startswith("llama3_8b") else 500.0


def parameter_groups(graph: Graph) -> list[str]:
    return [name for name, group in graph.groups.items() if group.role in PARAMETER_ROLES]


def counts(graph: Graph) -> dict[str, int]:
    """Count all-gathers and reduce-scatters on the parameters' groups, per kind."""
    from torch_ext_bucketing.graph.nodes import group_name, kind_of

    found = Counter(
        kind_of(n)
        for n in graph.gm.graph.nodes
        if kind_of(n) in ("all_gather", "reduce_scatter")
        and group_name(n) in parameter_groups(graph)
    )
    return {kind: found[kind] for kind in ("all_gather", "reduce_scatter") if found[kind]}


def byte_lower_bound(graph: Graph, cap_mb: float) -> dict[str, int]:
    """Return the least number of collectives per kind that bytes allow (see the module)."""
    from torch_ext_bucketing.graph.nodes import bucket_key, group_name, kind_of, wire_bytes

    cap = int(cap_mb * 1024 * 1024)
    sizes: dict[tuple[str, Any], list[int]] = {}
    for node in graph.gm.graph.nodes:
        kind = kind_of(node)
        if kind in ("all_gather", "reduce_scatter") and group_name(node) in parameter_groups(graph):
            sizes.setdefault((kind, bucket_key(node)), []).append(wire_bytes(node))
    bound: dict[str, int] = {}
    for (of, _), members in sizes.items():
        small = [s for s in members if s <= cap]
        bound[of] = bound.get(of, 0) + len(members) - len(small) + math.ceil(sum(small) / cap)
    return bound


def run_torchs(
    graph: Graph, cap_mb: float, mode: Literal["default", "custom_ops"] = "custom_ops"
) -> dict[str, float]:
    from torch._inductor.fx_passes.fsdp import pre_bucket_fsdp_collectives

    started = time.process_time()
    pre_bucket_fsdp_collectives(graph.gm, mode, cap_mb)
    return {"pass_s": time.process_time() - started}


def run_hooks(graph: Graph, cap_mb: float) -> dict[str, float]:
    from torch._inductor import config
    from torch.distributed.distributed_c10d import _resolve_process_group

    prefix = "aten_distributed_optimizations."
    hooks = {
        prefix + "bucket_max_collectives_between": None,
        prefix + "fsdp_group_filter": [
            _resolve_process_group(name).group_desc for name in parameter_groups(graph)
        ],
    }
    with config.patch(hooks):
        return run_torchs(graph, cap_mb)


def run_ours(graph: Graph, cap_mb: float) -> dict[str, Any]:
    from torch_ext_bucketing.bucketing.pack import apply_plan
    from torch_ext_bucketing.bucketing.plan import ByCap

    keep = parameter_groups(graph)
    started = time.process_time()
    plan = ByCap(
        cap_mb,
        kinds=("all_gather", "reduce_scatter"),
        groups=keep,
    ).plan(GraphAnalysis(graph.gm.graph))
    planned = time.process_time()
    apply_plan(GraphAnalysis(graph.gm.graph), plan)
    done = time.process_time()
    closed = Counter([*(b.closed_by for b in plan.buckets), *(u.closed_by for u in plan.unmerged)])
    return {"plan_s": planned - started, "pass_s": done - started, "closed": dict(closed)}


def child(way: str, name: str, cap_mb: float, repeat: int, layers: int | None) -> None:
    """Measure one way on one graph and print the result as JSON."""
    logging.getLogger("torch._inductor.fx_passes.fsdp").setLevel(logging.WARNING)
    run = {"hooks": run_hooks, "ours": run_ours}.get(way, run_torchs)
    results: list[dict[str, Any]] = []
    for _ in range(repeat):
        graph = load(name, layers, quiet=True)
        before = counts(graph)
        bound = byte_lower_bound(graph, cap_mb)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        timed = run(graph, cap_mb)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident
        results.append({**timed, "grown_mib": grown / 1024, "after": counts(graph)})
        graph.gm.graph.lint() if way == "ours" else None
    check_torch(way)
    print(json.dumps({"before": before, "byte_lower_bound": bound, "runs": results}))


def measure(name: str, cap_mb: float, repeat: int, layers: int | None) -> dict[str, Any]:
    """Measure one row, each way in its own process."""
    row: dict[str, Any] = {"graph": name, "cap_mb": cap_mb}
    for way in WAYS:
        arguments = words(only=name, cap=cap_mb, repeat=repeat, layers=layers)
        result = run_child("benchmarks.bucketing", way, arguments)
        runs = result["runs"]
        row["before"], row["byte_lower_bound"] = result["before"], result["byte_lower_bound"]
        prefix = "" if way == "ours" else f"{way}_"
        row[f"{prefix}after"] = runs[-1]["after"]
        for key in ("plan_s", "pass_s", "grown_mib"):
            if key in runs[0]:
                row[f"{prefix}{key}"] = statistics.median(r[key] for r in runs)
        if "closed" in runs[-1]:
            row["closed"] = runs[-1]["closed"]
    return row


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per graph, cap and kind."""
    head: list[str] = ["graph", "cap", "kind", "before", "bound", "unpatched", "hooks", "ours"]
    head += ["plan s", "pass s", "unpatched s", "unset s", "MiB", "unpatched MiB", "closed by"]
    seconds = ("plan_s", "pass_s", "unpatched_pass_s", "unset_pass_s")
    lines = [head]
    for row in rows:
        about = [row["graph"], f"{row['cap_mb']:g}"]
        measured = [f"{row[key]:.2f}" for key in seconds]
        measured += [f"{row[key]:.0f}" for key in ("grown_mib", "unpatched_grown_mib")]
        measured.append(", ".join(f"{v} {k}" for k, v in row["closed"].items()))
        for kind, before in row["before"].items():
            counts = [before, row["byte_lower_bound"][kind]]
            ways = ("unpatched_after", "hooks_after", "after")
            counts += [row[way].get(kind, 0) for way in ways]
            lines.append([*about, kind, *map(str, counts), *measured])
            about, measured = [""] * len(about), [""] * len(measured)
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.bucketing", __doc__)
    parser.add_argument("--cap", type=float, nargs="+", metavar="MIB", help="bucket caps")
    add_number(parser, "repeat", 3, "loads per way")
    parser.add_argument("--child", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    names = chosen(parser, args.only, bool(args.child))
    if args.repeat < 1:
        parser.error("--repeat must be at least 1")
    if args.child:
        child(args.child, names[0], args.cap[0], args.repeat, args.layers)
        return 0
    rows = []
    for name in names:
        for cap in args.cap or [default_cap(name)]:
            print(f"{name} at {cap:g} MiB", file=sys.stderr, flush=True)
            rows.append(measure(name, cap, args.repeat, args.layers))
            write_json(args.json, rows)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
