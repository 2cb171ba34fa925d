"""Choose activations and gathered parameters under one memory bound; compare with fixed choices.

    python -m benchmarks.memory                              every model, 8 layers
    python -m benchmarks.memory --only 'llama3_8b_*' --layers 32
    python -m benchmarks.memory --to 8 --between 12.5        gathered again inside nodes, too
    python -m benchmarks.memory --bounds 16                  whether more memory is ever slower
    python -m benchmarks.memory --host-gib 200               host memory as the third choice
    python -m benchmarks.memory --depths 4 64 --between 3    the same gain at any depth?

For each model of :mod:`.graphs`, the joint graph as in :mod:`.keep`: every block computed again,
every second one, all but matrix products and attention, nothing; and what torch's own partitioner
saves for some values of ``torch._functorch.config.activation_memory_budget``; each with all
parameters gathered again, scheduled under the peak that it has in the graph's own order. Then
``ReshardAfterForward("auto", activations=True)`` chooses under the peak that each came to.
``--bounds`` makes each choice anew, from the least peak to that with all activations saved.
With ``--to`` it may also gather again in that group, if the parameters are sharded over several,
and is compared with the choice without, under bounds in parts of the peak with nothing kept.
``--host-gib`` compares choices with and without host memory under bounds from nine tenths of the
least peak to that with all saved, and under the peaks of fixed choices: all computed again, all
parked, all but the last block's parked. It fails if one with host memory is longer than any other,
exceeds a bound that the one without keeps, or parks more than it may.
``--depths`` chooses at each number of layers under the bound halfway between the peaks with
everything made again and everything kept; the gain is the part of the step that the choice saves.
``at most`` is an upper bound of any choice's gain, ``of least`` the step over the lower bound that
it comes of (:func:`least_ms`). With ``--to`` and ``--host-gib`` both are of choices without these.
Steps are those of forward and backward, scheduled with one bucket per unit, on the default
machine's H100s; planning is CPU time over that of ``BucketAndSchedule``.
"""

import functools
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from benchmarks.eager_parity.devices import nodes
from torch_ext_bucketing.fsdp.tagging import parameter_chains
from torch_ext_bucketing.passes.reshard_to import Smaller, make_smaller_group, what_fits
from torch_ext_bucketing.planner.cost.machine import Machine, job_machine
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.planner.keep.outcome import Outcome
from torch_ext_bucketing.reports.base import columns

from .command import add_between, add_number, matching, parser_of_graphs, write_json
from .graphs import available
from .keep import GIB, MODELS, Sharded
from .tracing import copy_graph

_UNBOUNDED = 2**62
PARTS = (1.0, 1.05, 1.1, 1.25)
"""Bounds for choices with and without ``--to``."""
BUDGETS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of torch's partitioner: what may be saved between nothing and all that it would."""

WAYS: dict[str, Callable[[str], bool]] = {
    "all computed again": lambda name: False,
    "every second block": lambda name: int((re.findall(r"\d+", name) or ["0"])[0]) % 2 == 1,
    "products, attention saved": lambda name: not name.endswith("cheap"),
    "nothing computed again": lambda name: True,
}
"""Fixed choices: whether the activations of that name are saved."""


def saved_by_torch(joint: fx.Graph, outputs: int, budget: float) -> set[str]:
    """Return the names that torch's partitioner saves under a budget of 0 to 1."""
    gm = fx.GraphModule({}, copy_graph(joint))
    for chain in parameter_chains(gm.graph).values():
        for node in chain:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    settings = {
        "activation_memory_budget": budget,
        "cse": False,  # else it would be another graph
        "unsafe_treat_script_objects_as_zero_size": True,  # process groups
    }
    with functorch_config.patch(settings), warnings.catch_warnings():
        forward, _ = min_cut_rematerialization_partition(gm, None, num_fwd_outputs=outputs)
    (output,) = forward.graph.find_nodes(op="output")
    return {node.name for node in output.args[0][outputs:]}


def by_hand(planner: KeepPlanner, kept: Sequence[int], parked: Sequence[int] = ()) -> Outcome:
    """Schedule a fixed choice under the peak that it has in the graph's own order."""
    halves = planner.partitioned.with_parked(kept, parked)
    limit = max(half.liveness.peak(range(len(half))) for half in halves)
    return planner.scheduled(kept, limit, parked)


def saving(joint: fx.Graph, saved: set[str]) -> fx.Graph:
    """Mark all for recomputation but the names in ``saved``, in a copy."""
    graph = copy_graph(joint)
    for node in graph.nodes:
        if node.op == "call_function" and node.name not in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return graph


def smaller_group(joint: fx.Graph, to: int) -> Smaller | None:
    """Return the group of ``to`` neighbours, if shards over other ranks can be gathered in it."""
    group = make_smaller_group(to)
    try:
        return None if group is None else what_fits(parameter_chains(joint), group)
    except ValueError:
        return None


def measure(
    name: str, layers: int | None, to: int | None = None, machine: Machine | None = None
) -> dict[str, Any]:
    """Measure all ways on one model."""
    sharded = Sharded(name, layers)
    joint = sharded.joint
    machine = machine or job_machine()
    smaller = None if to is None else smaller_group(joint, to)
    known = sharded.planner(machine, activations=True)
    units = known.partitioned.keepables
    activations = [k for k in known.candidates if not units[k].starts]
    pass_s = sharded.scheduling_s(machine)
    fixed_ways = {
        way: by_hand(known, [k for k in activations if is_saved(units[k].name)])
        for way, is_saved in WAYS.items()
    }
    for budget in BUDGETS:
        graph = saving(joint, saved_by_torch(joint, sharded.outputs, budget))
        fixed_ways[f"torch's budget {budget}"] = by_hand(sharded.planner(machine, graph), ())
    bounds = {way: fixed.peak_bytes for way, fixed in fixed_ways.items()}
    for part in PARTS if smaller is not None else ():
        way = f"chosen without --to, {part:g}"
        bounds[way] = int(part * known.reference_bytes)
        fixed_ways[way] = known.choose(bounds[way])
    rows = []
    for way, fixed in fixed_ways.items():
        clock = time.process_time()
        planner = sharded.planner(machine, activations=True, smaller=smaller)
        chosen = planner.choose(bounds[way])
        seconds = time.process_time() - clock
        rows.append(
            {
                "way": way,
                "bound_gib": bounds[way] / GIB,
                "step_ms": fixed.step_ms,
                "chosen_ms": chosen.step_ms,
                "chosen_gib": chosen.peak_bytes / GIB,
                "gathered": sum(k < len(units) and bool(units[k].starts) for k in chosen.kept),
                "in_part": sum(k in planner.partitioned.parts for k in chosen.kept),
                "saved": sum(k < len(units) and not units[k].starts for k in chosen.kept),
                "planning": seconds / pass_s,
            }
        )
    return {"model": name, "activations": len(activations), "units": len(units), "rows": rows}


def under_bounds(name: str, layers: int | None, number: int) -> dict[str, Any]:
    """Choose under ``number`` bounds, each with a planner of its own, as a compile does."""
    sharded = Sharded(name, layers)

    def planner() -> KeepPlanner:
        return sharded.planner(job_machine(), activations=True)

    least, known = planner().choose(0).peak_bytes, planner()
    most = known.scheduled(known.candidates, _UNBOUNDED).peak_bytes
    bounds = [least + (most - least) * k // max(1, number - 1) for k in range(number)]
    steps = [planner().choose(bound).step_ms for bound in bounds]
    longer = (ms / min(steps[: k + 1]) for k, ms in enumerate(steps))
    return {
        "model": name,
        "bounds_gib": [bound / GIB for bound in bounds],
        "steps_ms": steps,
        "most_longer": max(longer),
    }


def by_depth(name: str, layers: int, made: Callable[[], KeepPlanner]) -> dict[str, Any]:
    """Choose halfway between everything made again and everything kept."""
    clock = time.process_time()
    planner = made()
    low, high = planner.reference_bytes, by_hand(planner, planner.candidates).peak_bytes
    bound = (low + high) // 2
    nothing, before = planner.scheduled((), bound), planner.tried
    chosen = planner.choose(bound)
    seconds = time.process_time() - clock
    least = least_ms(planner, bound)
    return {
        "model": name,
        "layers": layers,
        "bound_gib": bound / GIB,
        "again_ms": nothing.step_ms,
        "chosen_ms": chosen.step_ms,
        "gain": 1 - chosen.step_ms / nothing.step_ms,
        "most_gain": 1 - least / nothing.step_ms,
        "of_least": chosen.step_ms / least,
        "kept": len(chosen.kept),
        "of": len(planner.candidates),
        "scheduled": planner.tried - before,
        "seconds": seconds,
        "worse": bool(chosen.above),
    }


def least_ms(planner: KeepPlanner, bound: int) -> float:
    """Estimate the shortest time of a choice under a bound, whatever the order.

    Forward takes its lower bound. In backward each stream runs one node after the other, and all
    that is kept is in memory when it begins. So of the kernels and one stream of gathers the longer
    one ends no sooner than if any share of each keepable could be kept. For a sum of both with
    fixed weights the best shares are those of a knapsack: the most time per byte first.

    Bytes are those of each keepable alone. What two of them save may be less than their sum, so a
    choice may beat this time: by up to 6% where the network bounds the step.
    """
    partitioned, units = planner.partitioned, planner.partitioned.keepables
    backward = partitioned.backward
    rest = partitioned.models(planner.candidates)[1].paths.rest
    fixed = {stream: found.ms + found.after_ms for stream, found in rest.items()}
    again: dict[str | None, dict[int, float]] = {stream: {} for stream in (None, *backward.group)}
    for i, k in enumerate(partitioned.keepable_of_place(backward)):
        if k is None or k not in planner.candidates:
            continue
        for stream in backward.streams_of(backward.group[i]):
            mine = again.setdefault(stream, {})
            mine[k] = mine.get(k, 0.0) + backward.ms[i]
    room = bound - backward.liveness.at_start

    def least(weights: dict[str | None, float]) -> float:
        ms = dict.fromkeys(planner.candidates, 0.0)
        for stream, weight in weights.items():
            for k, part in again[stream].items():
                ms[k] += weight * part
        total, left = sum(ms.values()), room
        for k in sorted(ms, key=lambda k: -ms[k] / units[k].nbytes):
            share = min(1.0, left / units[k].nbytes)
            total, left = total - share * ms[k], left - int(share * units[k].nbytes)
        return total + sum(w * fixed.get(stream, 0.0) for stream, w in weights.items())

    both = ({None: n / 50, stream: 1 - n / 50} for stream in again if stream for n in range(51))
    return partitioned.forward.paths.bound_ms + max(map(least, both))


def with_host(name: str, layers: int | None, host_bytes: int) -> dict[str, Any]:
    """Choose with and without host memory."""
    sharded, machine = Sharded(name, layers), job_machine()
    known = sharded.planner(machine, activations=True)
    least = known.choose(0).peak_bytes
    most = by_hand(known, known.candidates).peak_bytes
    bounds = {
        "0.9 of the least peak": int(0.9 * least),
        **{f"{k}/4": least + (most - least) * k // 4 for k in range(4)},
    }
    fixed = ways_by_hand(known)
    rows = []
    for way, bound in (bounds | {way: one.peak_bytes for way, one in fixed.items()}).items():
        outcomes, seconds = list[Outcome](), list[float]()
        for host in (0, host_bytes):
            clock = time.process_time()
            planner = sharded.planner(machine, host_bytes=host, activations=True)
            outcomes.append(planner.choose(bound))
            seconds.append(time.process_time() - clock)
        without, chosen = outcomes
        row = {"way": way, "bound_gib": bound / GIB, "planning": seconds[1] / seconds[0]}
        longer = way in fixed and chosen.step_ms > fixed[way].step_ms
        row["worse"] = longer or without < chosen or chosen.host_bytes > host_bytes
        for key, one in (("by_hand", fixed.get(way)), ("without", without), ("with", chosen)):
            if one is not None:
                row |= {f"{key}_ms": one.step_ms, f"{key}_gib": one.peak_bytes / GIB}
                row[f"{key}_host_gib"] = one.host_bytes / GIB
        rows.append(row)
    return {"model": name, "rows": rows}


def ways_by_hand(known: KeepPlanner) -> dict[str, Outcome]:
    """Schedule fixed choices with host memory, and all computed again.

    The third one parks what torchtitan's graph trainer does: all but the last block's
    (``cpu_offload.py:tag_all_offloadable_activations``). Its rules for the order, a layer ahead
    and a layer late, are left to the schedule.
    """
    units, partitioned = known.partitioned.keepables, known.partitioned
    saved = [k for k in known.candidates if not units[k].starts]
    last = max(_block(units[k].name) for k in saved)
    rest = partitioned.could_park([k for k in saved if _block(units[k].name) != last])
    parked = partitioned.could_park(saved)
    return {
        "all computed again": by_hand(known, ()),
        "all parked": by_hand(known, saved, [*parked]),
        "all but the last block's parked": by_hand(known, saved, [s for s in parked if s in rest]),
    }


def _block(name: str) -> tuple[int, ...]:
    """Return the first number of a name."""
    return tuple(map(int, re.findall(r"\d+", name)[:1]))


def table_with_host(found: Sequence[dict[str, Any]]) -> str:
    """Render one line per bound."""
    keys = [f"{way}_{unit}" for way in ("by_hand", "without", "with") for unit in ("ms", "gib")]
    keys = ["bound_gib", keys[0], "by_hand_host_gib", *keys[2:], "with_host_gib", "planning"]
    heads = ["model", "bound: peak of", "GiB", "by hand, ms", "parked", "without, ms", "GiB"]
    lines = [[*heads, "with host memory, ms", "GiB", "parked", "planning"]]
    for one in found:
        for row in one["rows"]:
            figures = (f"{row[key]:.2f}" if key in row else "" for key in keys)
            lines.append([one["model"], row["way"], *figures])
    return columns(lines)


def table_by_depth(found: Sequence[dict[str, Any]]) -> str:
    """Render one line per depth."""
    heads = [
        "model",
        "layers",
        "bound, GiB",
        "again, ms",
        "chosen",
        "gain",
        "at most",
        "of least",
        "kept",
        "scheduled",
        "s",
    ]
    lines = [heads]
    for row in (row for one in found for row in one["rows"]):
        figures = (f"{row[key]:.2f}" for key in ("bound_gib", "again_ms", "chosen_ms"))
        kept = f"{row['kept']} of {row['of']}"
        gains = (f"{row[key]:.3f}" for key in ("gain", "most_gain", "of_least"))
        last = kept, str(row["scheduled"]), f"{row['seconds']:.1f}"
        lines.append([row["model"], str(row["layers"]), *figures, *gains, *last])
    return columns(lines)


def table(found: Sequence[dict[str, Any]]) -> str:
    """Render one line per bound."""
    lines = [
        ["model", "", "GiB", "ms", "chosen ms", "GiB", "gathered", "in part", "saved", "planning"]
    ]
    for one in found:
        for row in one["rows"]:
            gathers = one["units"] - one["activations"]
            lines.append(
                [
                    one["model"],
                    row["way"],
                    f"{row['bound_gib']:.2f}",
                    f"{row['step_ms']:.1f}",
                    f"{row['chosen_ms']:.1f}",
                    f"{row['chosen_gib']:.2f}",
                    f"{row['gathered']} of {gathers}",
                    str(row["in_part"]),
                    f"{row['saved']} of {one['activations']}",
                    f"{row['planning']:.2f}",
                ]
            )
    return columns(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.memory", __doc__, layers=8)
    add_number(parser, "to", 0, "ranks among which backward may gather; 0: none")
    add_between(parser)
    parser.add_argument("--depths", nargs="+", type=int, metavar="N", help="numbers of layers")
    parser.add_argument("--bounds", type=int, metavar="N", help="N single choices instead")
    add_number(parser, "host-gib", 0, "of host memory of a rank; 0: none")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    found = []
    for name in available(matching(parser, MODELS, args.only)):
        print(name, file=sys.stderr, flush=True)
        machine = None if args.between is None else nodes(args.between)
        if args.depths:
            rows = []
            for layers in args.depths:
                sharded = Sharded(name, layers)
                how: dict[str, Any] = {"activations": True, "host_bytes": args.host_gib * GIB}
                if args.to:
                    how["smaller"] = smaller_group(sharded.joint, args.to)
                make = functools.partial(sharded.planner, machine or job_machine(), **how)
                rows.append(by_depth(name, layers, make))
            found.append({"rows": rows})
        elif args.host_gib:
            found.append(with_host(name, args.layers, args.host_gib * GIB))
        elif args.bounds:
            found.append(one := under_bounds(name, args.layers, args.bounds))
            steps = " ".join(f"{ms:.1f}" for ms in one["steps_ms"])
            print(f"{name}: at most {one['most_longer']:.4f} of one under less: {steps}")
        else:
            found.append(measure(name, args.layers, args.to or None, machine))
    if args.depths:
        print(table_by_depth(found))
    elif args.host_gib:
        print(table_with_host(found))
    elif not args.bounds:
        print(table(found))
    write_json(args.json, found)
    return int(any(row.get("worse") for one in found for row in one.get("rows", ())))


if __name__ == "__main__":
    sys.exit(main())
