"""Show what a bucket that passes over other collectives costs in memory.

    python -m benchmarks.between                   the backward graph of a mixture of experts
    python -m benchmarks.between --only 'llama3_8b_*.backward.recompute' --cap 25

The patched torch's ``pre_bucket_fsdp_collectives`` runs on the graph for each value of
``bucket_max_collectives_between``, then the sort that the overlap scheduler begins with. Peak
memory and step are those of that order on the package's cost model; "torch's GiB" is the peak by
torch's own estimate. Every buffer lives from its node to its last reader there. The longest run
counts compute nodes (matmuls, attention) between two starts of reduce-scatters. The last row has
the rules of the planner that AutoParallel puts in the place of torch's (``plan_by_span``).
"""

import argparse
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from collective_graphs import MAX_BETWEEN

from torch_ext_bucketing.reports.base import columns

from .bucketing import check_torch, counts, default_cap, run_child, run_torchs
from .command import document_of, parser_of_graphs, words, write_results
from .graphs import chosen, load

VALUES = (0, 8, 32, None)
GIB = 2**30
SPAN = 1500  # nodes of the graph, AutoParallel's default


def plan_by_span(
    gm: Any,
    cap_mb: Callable[[int], float],
    is_kind: Callable[[Any], bool],
    key_of: Callable[[Any], Any],
    takes_wait: Callable[[Any], bool] | None = None,
) -> list[list[Any]]:
    """Plan buckets whose first and last start have at most ``SPAN`` nodes between them.

    What lies between does not count, and buckets of other keys are not looked at. As in
    ``auto_bucketing.py`` of meta-pytorch/autoparallel at a54c2529.
    """
    from torch._inductor.fx_passes import bucketing

    nodes = list(gm.graph.nodes)
    by_key: dict[Any, list[Any]] = defaultdict(list)
    for wait in nodes:
        taken = bucketing.is_wait_tensor(wait) and is_kind(wait.args[0])
        if taken and (takes_wait is None or takes_wait(wait)):
            by_key[key_of(wait.args[0])].append(wait.args[0])
    position = {node: i for i, node in enumerate(nodes)}
    reachability = bucketing._BucketPlanReachability(
        bucketing.topo_sort(nodes), [start for starts in by_key.values() for start in starts]
    )
    buckets: list[list[Any]] = []
    for starts in by_key.values():
        bucket: list[Any] = []
        size = members = 0
        for start in starts:
            index = reachability.endpoint_to_idx[start]
            if reachability.endpoint_ancestors[index] & members:
                continue
            values = start.meta["val"], start.all_input_nodes[0].meta["val"]
            added = max(v.numel() * v.element_size() for v in values)
            if bucket and (
                size + added > cap_mb(0) * 2**20 or position[start] - position[bucket[0]] > SPAN
            ):
                buckets.append(bucket)
                bucket, size, members = [], 0, 0
            bucket.append(start)
            size += added
            members |= 1 << index
        buckets.append(bucket)
    return [bucket for bucket in buckets if len(bucket) > 1]


def child(name: str, cap_mb: float, layers: int | None) -> None:
    """Bucket the graph with each value, and print what is left as JSON."""
    from torch._inductor import config
    from torch._inductor.fx_passes import bucketing
    from torch._inductor.fx_passes.memory_estimator import build_memory_profile
    from torch._inductor.pattern_matcher import stable_topological_sort

    from benchmarks.eager_parity.devices import nodes
    from torch_ext_bucketing.graph.sizes import SizeHints
    from torch_ext_bucketing.planner.cost.cost import Costs
    from torch_ext_bucketing.planner.schedule.model import model_of
    from torch_ext_bucketing.planner.schedule.timeline import Timeline

    logging.getLogger("torch._inductor.fx_passes").setLevel(logging.ERROR)
    check_torch("unset")
    rows = []
    for value in ("unbucketed", *VALUES, "by span"):
        graph = load(name, layers, quiet=True)
        timed = {"pass_s": 0.0}
        if value == "by span":
            with mock.patch.object(bucketing, "greedy_bucket_collective_by_mb", plan_by_span):
                timed = run_torchs(graph, cap_mb)
        elif value != "unbucketed":
            with config.patch({MAX_BETWEEN: value}):
                timed = run_torchs(graph, cap_mb)
        stable_topological_sort(graph.gm.graph)
        costs = Costs(nodes(None), SizeHints(graph.config.size_hints))
        reached = Timeline.of(model_of(graph.gm.graph, costs))
        profile = build_memory_profile(graph.gm.graph, lambda n: not n.name.startswith("primals"))
        rows.append(
            {
                "graph": name,
                "cap_mb": cap_mb,
                "between": value,
                **counts(graph),
                **timed,
                "peak_gib": reached.peak_bytes / GIB,
                "torchs_gib": max(profile) / GIB,
                "step_ms": reached.step_ms,
                "longest_run": reached.longest_run,
            }
        )
    print(json.dumps(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Render one line per graph and value."""
    head = ["graph", "cap", "between", "AG", "RS", "pass s", "peak GiB", "torch's GiB"]
    lines = [[*head, "step ms", "longest run"]]
    for r in rows:
        kinds = [str(r.get(kind, 0)) for kind in ("all_gather", "reduce_scatter")]
        lines.append(
            [r["graph"], f"{r['cap_mb']:g}", str(r["between"]), *kinds]
            + [f"{r[key]:.2f}" for key in ("pass_s", "peak_gib", "torchs_gib")]
            + [f"{r['step_ms']:.0f}", str(r["longest_run"])]
        )
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    default = ["deepseek_v3_fsdp64_ep8.backward.recompute"]
    parser = parser_of_graphs("python -m benchmarks.between", __doc__, default)
    parser.add_argument("--cap", type=float, metavar="MIB", help="bucket cap")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    names = chosen(parser, args.only, bool(args.child))
    if args.child:
        child(names[0], args.cap, args.layers)
        return 0
    document = document_of("python -m benchmarks.between", arguments)
    document["rows"] = rows = []
    for name in names:
        given = words(only=name, cap=args.cap or default_cap(name), layers=args.layers)
        rows += run_child("benchmarks.between", "patched", given)
    write_results(args.json, document, table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
