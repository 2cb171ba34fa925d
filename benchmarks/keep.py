"""Measure step time and peak over the memory bound, for graphs of real size.

    python -m benchmarks.keep                               every model, prints tables
    python -m benchmarks.keep --only 'llama3_8b_*' --json out.json
    python -m benchmarks.keep --layers 8 --between 12.5     a slower network

For each model of :mod:`.graphs` the joint graph is rebuilt from its forward and backward graphs,
and ``ReshardAfterForward("auto")`` chooses for bounds of 1.0 to 2.0 times the peak with
everything gathered again. Each choice is then carried out, and measured on what comes of it:

- forward and backward as the default partitioner leaves them, in a model made for them alone, with
  one bucket per unit, scheduled by ``Schedule([Overlap(), PeakMemory])`` under the bound;
- ``step`` is the sum of both, ``peak`` the larger one, with all shards of parameters in it.

The table begins with keep-nothing and ends with keep-all, without a bound. Planning is the CPU time
of one bound on a model that exists already, over that of ``BucketAndSchedule`` on both graphs; the
model's own time, once per graph, stands beside it.
"""

import itertools
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

import torch_ext_bucketing as teb
from benchmarks.eager_parity.devices import nodes
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.sizes import SizeHints
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.planner.keep.keep import CURVE, KeepPlanner
from torch_ext_bucketing.planner.keep.outcome import Outcome
from torch_ext_bucketing.planner.keep.partitioned import PartitionedModel
from torch_ext_bucketing.planner.schedule.model import peak_bytes
from torch_ext_bucketing.planner.schedule.orders import schedule_model
from torch_ext_bucketing.reports.base import columns

from .command import add_between, matching, parser_of_graphs, write_json
from .graphs import CONFIGS, available, load
from .tracing import Phase

GIB = 2**30
MODELS = tuple(CONFIGS)


class Sharded:
    """A model of :data:`MODELS`: its graphs by phase, and the joint graph they were cut from."""

    def __init__(self, name: str, layers: int | None, device: str | None = None) -> None:
        phases: tuple[Phase, ...] = ("forward", "backward")
        self.graphs = {
            (phase, again): load(
                f"{name}.{phase}{again * '.recompute'}", layers, device=device, quiet=True
            ).gm
            for phase in phases
            for again in (False, True)
        }
        self.joint = joint_of(*(self.graphs[phase, False].graph for phase in phases))
        self.size_hints = CONFIGS[name].size_hints

    @property
    def outputs(self) -> int:
        """The number of forward's outputs that backward does not read."""
        (output,) = self.graphs["forward", False].graph.find_nodes(op="output")
        backward = self.graphs["backward", False].graph
        read = {n.name for n in backward.find_nodes(op="placeholder")}
        return sum(n.name not in read for n in output.args[0])

    def planner(
        self,
        machine: teb.Machine,
        joint: fx.Graph | None = None,
        host_bytes: int = 0,
        **more: Any,
    ) -> KeepPlanner:
        """Return the planner for the joint graph, or for one like it."""
        graph = joint or self.joint
        costs = Costs(machine, SizeHints.of(self.size_hints))
        partitioned = PartitionedModel(graph, costs, UNITS, **more)
        return KeepPlanner(partitioned, host_bytes=host_bytes)

    def scheduling_s(self, machine: teb.Machine) -> float:
        """Return CPU seconds of ``BucketAndSchedule`` on both graphs with all gathered again."""
        total, hint = 0.0, self.size_hints
        for (_, again), gm in self.graphs.items():
            if again:
                bound = teb.PeakMemory(gib=1.02 * peak_bytes(gm, size_hints=hint) / GIB)
                clock = time.process_time()
                scheduled = teb.BucketAndSchedule([teb.Overlap(), bound], machine=machine)
                scheduled(gm, Compilation(size_hints=hint))
                total += time.process_time() - clock
        return total


def joint_of(forward: fx.Graph, backward: fx.Graph) -> fx.Graph:
    """Rebuild the joint graph that the partitioner cut in two, if nothing was recomputed.

    ::

        forward     p ... saved -> output        backward     saved, tangents ... -> output
        joint       p, tangents ... saved ...                 -> output
    """
    joint, new = fx.Graph(), dict[fx.Node, fx.Node]()
    (first,) = forward.find_nodes(op="output")
    (second,) = backward.find_nodes(op="output")
    tangents = [n for n in backward.find_nodes(op="placeholder") if "tangents" in n.name]
    for node in (*forward.find_nodes(op="placeholder"), *tangents):
        new[node] = joint.node_copy(node, new.__getitem__)
    for node in forward.nodes:
        if node is not first and node not in new:
            new[node] = joint.node_copy(node, new.__getitem__)
    by_name = {n.name: copied for n, copied in new.items()}
    saved = set()
    for node in backward.nodes:
        if node.op == "placeholder" and node not in new:
            new[node] = by_name[node.name]
            saved.add(node.name)
        elif node is not second and node not in new:
            new[node] = joint.node_copy(node, new.__getitem__)
    outputs = [new[a] for a in first.all_input_nodes if a.name not in saved]
    joint.output((*outputs, *(new[a] for a in second.all_input_nodes)))
    return joint


UNITS = Units.of(
    [("tok_embeddings",), *((f"layers.{i}",) for i in range(1000)), ("norm", "output")]
)
"""Units as trainers form them: embedding, blocks, norm with head."""


def carried_out(planner: KeepPlanner, outcome: Outcome, limit: int) -> tuple[float, int]:
    """Return step and peak, with every order tried that ``Schedule`` tries."""
    step, peak = 0.0, 0
    for model in planner.partitioned.models(outcome.kept):
        policies = [teb.Overlap(), teb.PeakMemory(gib=limit / GIB)]
        report = schedule_model(model, policies, None).report
        step += report.step_ms[1]
        peak = max(peak, report.peak_bytes[1])
    return step, peak


def measure(name: str, layers: int | None, machine: teb.Machine = H100) -> dict[str, Any]:
    """Measure all bounds on one model."""
    sharded = Sharded(name, layers)
    sharded.planner(machine)  # Nobody pays for imports.
    clock = time.process_time()
    planner = sharded.planner(machine)
    model_s = time.process_time() - clock
    reference = planner.reference_bytes
    rows: list[dict[str, Any]] = []
    carried: dict[frozenset[int], tuple[int, float, int]] = {}
    last: Outcome | None = None
    for part in CURVE:
        limit = int(part * reference)
        clock = time.process_time()
        outcome = planner.choose(limit)
        seconds = time.process_time() - clock
        if last is not None and (0, last.step_ms) < (outcome.above, outcome.step_ms):
            outcome = last  # what was good for a smaller bound
        last = outcome
        rows.append(_row(planner, f"{part:g}", limit, outcome, seconds, carried))
    nothing = planner.scheduled((), reference)
    rows.insert(0, _row(planner, "nothing", reference, nothing, 0.0, {}))
    everything, unbounded = planner.scheduled(planner.candidates, 2**62), 2**62
    rows.append(_row(planner, "all", unbounded, everything, 0.0, carried))
    return {
        "model": name,
        "units": len(planner.candidates),
        "reference_gib": reference / GIB,
        "model_s": model_s,
        "scheduling_s": sharded.scheduling_s(machine),
        "rows": rows,
    }


def _row(
    planner: KeepPlanner,
    part: str,
    limit: int,
    outcome: Outcome,
    seconds: float,
    carried: dict[frozenset[int], tuple[int, float, int]],
) -> dict[str, Any]:
    known = carried.get(outcome.kept)
    if known is not None and known[2] < 0.95 * known[0]:
        _, step, peak = known  # a smaller bound that left so much room was none
    else:
        step, peak = carried_out(planner, outcome, limit)
        carried[outcome.kept] = limit, step, peak
    return {
        "bound": part,
        "bound_gib": limit / GIB,
        "kept": len(outcome.kept),
        "step_ms": outcome.step_ms,
        "peak_gib": outcome.peak_bytes / GIB,
        "carried_out_ms": step,
        "carried_out_gib": peak / GIB,
        "planning_s": seconds,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Render one line per bound."""
    head = ["model", "bound", "GiB", "kept", "of", "step ms", "peak GiB", "scheduled ms", "GiB"]
    lines = [[*head, "planning s", "/ scheduling"]]
    for one in found:
        for row in one["rows"]:
            bounded = row["bound"] != "all"
            planned = bounded and row["bound"] != "nothing"
            lines.append(
                [
                    one["model"],
                    row["bound"],
                    f"{row['bound_gib']:.2f}" if bounded else "-",
                    str(row["kept"]),
                    str(one["units"]),
                    f"{row['step_ms']:.1f}",
                    f"{row['peak_gib']:.2f}",
                    f"{row['carried_out_ms']:.1f}",
                    f"{row['carried_out_gib']:.2f}",
                    f"{row['planning_s']:.2f}" if planned else "-",
                    f"{row['planning_s'] / one['scheduling_s']:.3f}" if planned else "-",
                ]
            )
    notes = [
        f"{one['model']}: the model of the joint graph takes {one['model_s']:.2f} s once, "
        f"BucketAndSchedule {one['scheduling_s']:.2f} s"
        for one in found
    ]
    return "\n".join([columns(lines), "", *notes, *(w for one in found for w in wrong(one))])


def wrong(one: dict[str, Any]) -> list[str]:
    """List what fails for a model: bounds kept, more memory never slower, the two ends."""
    rows, found = one["rows"], []
    bounded = rows[1:-1]
    for row in bounded:
        if max(row["peak_gib"], row["carried_out_gib"]) > row["bound_gib"] * (1 + 1e-9):
            found.append(f"WRONG {one['model']} {row['bound']}: above the bound")
    for key in ("step_ms", "carried_out_ms"):
        steps = [row[key] for row in bounded]
        if any(b > a * (1 + 1e-9) for a, b in itertools.pairwise(steps)):
            found.append(f"WRONG {one['model']}: {key} is not monotone")
    if bounded[0]["step_ms"] > rows[0]["step_ms"] * (1 + 1e-9):
        found.append(f"WRONG {one['model']}: slower than keep-nothing")
    full = [r for r in bounded if r["kept"] == one["units"]]
    if full and full[-1]["step_ms"] > rows[-1]["step_ms"] * (1 + 1e-9):
        found.append(f"WRONG {one['model']}: slower than keep-all")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.keep", __doc__)
    add_between(parser)
    args = parser.parse_args(arguments)
    names = available(matching(parser, MODELS, args.only))
    warnings.simplefilter("ignore")
    found = []
    for name in names:
        print(name, file=sys.stderr, flush=True)
        found.append(measure(name, args.layers, nodes(args.between)))
        print(table(found[-1:]), flush=True)
    if len(found) > 1:
        print(table(found))
    write_json(args.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
