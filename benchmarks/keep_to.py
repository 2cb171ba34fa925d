"""Backward's gathers in a smaller group (``ReshardAfterForward(to=...)``): memory and time.

    python -m benchmarks.keep_to                    graphs of real size, on a cost model
    python -m benchmarks.keep_to --layers 4         with fewer layers, in a minute
    python -m benchmarks.keep_to --between 10       with 10 GB/s of each rank between nodes

Traces forward and backward in three ways (gathered again over all ranks, again inside a node, and
kept gathered), buckets and schedules each on a machine with two network levels, and prints the time
of forward and backward and the larger of their peaks. Parameters that backward does not read are
added to its peak, for they are there as well. Bits on real ranks: ``benchmarks/parity.py --rows
'reshard_to/*'``.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.collectives import group_size, kind_of
from torch_ext_bucketing.graph.tags import tag_of
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.testing.demo.table import columns

from .command import add_json, add_names, parser_of, write_json
from .graphs import CONFIGS, builder
from .machines import nodes
from .parallel import start_world
from .tracing import trace_model

GIB = 2**30

MODELS = ("llama3_8b_fsdp64", "deepseek_v3_fsdp64_ep8")


def estimate(
    name: str, layers: int | None = None, machine: teb.Machine = H100
) -> list[dict[str, Any]]:
    """The three ways of one configuration, whose ``fsdp`` ranks are neighbours: times of the
    scheduled forward and backward, the larger of their peaks, and backward's gathers by the ranks
    of their group, unbucketed. Starts the fake world that it belongs to."""
    config = CONFIGS[name]
    if layers is not None:
        config = replace(config, model=replace(config.model, layers=layers))
    build, model = builder(config, start_world(config.layout)), config.model

    node = machine.ranks_per_node
    ways = {
        "again, all ranks": [teb.ReshardAfterForward()],
        f"again, {node} ranks": [teb.ReshardAfterForward(to=node)],
        "kept": [],
    }
    graphs = trace_model(build, (model.batch, model.seq), lambda stage: None, ways)
    found = []
    for way in ways:
        forward, backward = graphs["forward", way], graphs["backward", way]
        gathers = Counter(_gather_sizes(backward))
        idle = _left_out(forward, backward)
        (forward_ms, forward_peak), (backward_ms, backward_peak) = (
            _scheduled(gm, machine) for gm in (forward, backward)
        )
        found.append(
            {
                "graph": name,
                "way": way,
                "forward_ms": forward_ms,
                "backward_ms": backward_ms,
                "peak_bytes": max(forward_peak, backward_peak + idle),
                "backward_gathers": dict(gathers),
            }
        )
    return found


def _gather_sizes(gm: fx.GraphModule) -> Iterator[int]:
    for node in gm.graph.nodes:
        if kind_of(node) == "all_gather" and tag_of(node) is not None:
            yield group_size(node)


def _left_out(forward: fx.GraphModule, backward: fx.GraphModule) -> int:
    """Bytes of forward's inputs that are none of backward's."""
    there = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    inputs = forward.graph.find_nodes(op="placeholder")
    values = (n.meta.get("val") for n in inputs if n.name not in there)
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor))


def _scheduled(gm: fx.GraphModule, machine: teb.Machine) -> tuple[float, int]:
    """Milliseconds and peak bytes of a graph, bucketed up to chosen caps and scheduled."""
    one = teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(ratio=1.02)], machine=machine)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", teb.BoundNotKeptWarning)
        (report,) = one(gm).schedules
    return report.step_ms[1], report.peak_bytes[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("python -m benchmarks.keep_to", __doc__)
    add_names(parser, "only", MODELS, "models")
    parser.add_argument("--layers", type=int, help="instead of each model's own number")
    parser.add_argument("--between", type=float, help="GB/s of a rank between nodes (default: 42)")
    add_json(parser)
    options = parser.parse_args(arguments)
    machine = nodes(options.between)
    found = [e for name in options.only for e in estimate(name, options.layers, machine)]
    lines = [["graph", "gathered", "forward ms", "backward ms", "step ms", "peak GiB", "gathers"]]
    for e in found:
        gathers = ", ".join(f"{n} of {k}" for k, n in sorted(e["backward_gathers"].items()))
        forward, backward = e["forward_ms"], e["backward_ms"]
        times = [f"{ms:.1f}" for ms in (forward, backward, forward + backward)]
        peak = f"{e['peak_bytes'] / GIB:.2f}"
        lines.append([e["graph"], e["way"], *times, peak, gathers or "-"])
    print(f"torch {torch.__version__}\n{columns(lines)}")
    write_json(options.json, {"torch": torch.__version__, "rows": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
