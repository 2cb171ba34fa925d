"""Measure what each mechanism of the planner wins, by planning without it.

    python -m benchmarks.ablation                           the searches for caps and orders
    python -m benchmarks.ablation --keep 4,32               and what is kept, at these depths
    python -m benchmarks.ablation --layers 8 --only 'llama3_8b_*' --without 'caps between rungs'
    python -m benchmarks.ablation --bounds 0.7 0.9          under bounds that are out of reach
    python -m benchmarks.ablation --chunks blocks.ep32 --layers 4    steps of benchmarks.chunks

Each mechanism is patched away, and the same graphs are planned with it and without: graphs of
:mod:`.graphs`, on the default machine, with plans for times that are off (kernels by a fifth too
long and collectives too short, and the other way round) scored on the right ones, and on a slow
network. Bounds are relative to a graph's own peak. What is kept is chosen for bounds at 0, 1 and 2
quarters between the least peak and the peak with all activations saved.

A loss is how much longer the step is without the mechanism, in percent: mean and largest.
Where a bound is missed by more, the row has the largest difference in the peak. Lines are those of
the functions that would go. Seconds are CPU time of all plans relative to those with all
mechanisms.
"""

import contextlib
import inspect
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias
from unittest import mock

from benchmarks.eager_parity.devices import nodes
from torch_ext_bucketing.bucketing.plan import Bucket
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.planner import cap_search
from torch_ext_bucketing.planner.cap_search import BySearch
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import H100, Machine, job_machine
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.planner.schedule import list_schedule, orders, policy
from torch_ext_bucketing.planner.schedule.merged_model import merged_model
from torch_ext_bucketing.planner.schedule.model import Model, model_of
from torch_ext_bucketing.planner.schedule.orders import schedule_model
from torch_ext_bucketing.planner.schedule.timeline import step_ms
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.reports.planner import ScheduleReport

from . import chunks
from .command import add_names, document_of, parser_of_graphs, write_json, write_results
from .graphs import Graph, chosen, load
from .keep import Sharded
from .memory import by_hand
from .schedule import what_ours_plans

GRAPHS = ("llama3_8b_fsdp64.*", "llama3_70b_hsdp4x64.*", "deepseek_v3_fsdp64_ep8.*", "held_out_0*")
KEPT = ("llama3_8b_fsdp64", "llama3_70b_hsdp4x64")
_SLOW_GB_PER_S = 12.5
_OFF = 0.2


@dataclass(frozen=True)
class Mechanism:
    """A mechanism, the functions that would go with it, and patches that take it away."""

    functions: tuple[Any, ...]
    patches: tuple[tuple[Any, str, Any], ...]
    keeps: bool = False  # whether it chooses what is kept

    @property
    def lines(self) -> int:
        return sum(len(inspect.getsource(f).splitlines()) for f in self.functions)

    @contextlib.contextmanager
    def removed(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for owner, name, stands_in in self.patches:
                stack.enter_context(mock.patch.object(owner, name, stands_in))
            yield


def _few(self: policy.Overlap, case: Any, quick: bool) -> Iterator[tuple[str, policy.Options]]:
    for window in (0, self.window):
        yield f"window {window}", policy.Options(window=window, fill=self.window, depth=self.depth)


def _open(model: Any) -> list[int]:
    """Schedule by :class:`.ListScheduler` without a limit, as a plain list schedule has none."""
    most = len(model)
    options = policy.Options(window=most, fill=most, depth=most, max_prefetch=most, hold=False)
    return list_schedule.list_schedule(model, replace(options, deadlines=False))


def _one_rule(self: Any, name: str, options: policy.Options, free: policy.Options) -> Any:
    """Make no order whose nodes leave room as if none had gone ahead."""
    return _make(self, name, options, free) if options.room_for_open else None


_Search, _Orders, _LeastPeak = cap_search._Search, orders._Orders, orders._LeastPeak
_make = _Orders._make
MECHANISMS: Mapping[str, Mechanism] = {
    "caps between rungs": Mechanism(
        (_Search._try_between,), ((_Search, "_try_between", lambda self, ladder: None),)
    ),
    "plain schedules": Mechanism(
        (orders.plain_schedule,), ((orders, "plain_schedule", lambda model: [*range(len(model))]),)
    ),
    "plain schedules for open windows": Mechanism(
        (orders.plain_schedule,), ((orders, "plain_schedule", _open),)
    ),
    "slack": Mechanism(
        (orders._with_slack,), ((orders, "_with_slack", lambda model, best, misses, most: best),)
    ),
    "tightening": Mechanism(
        (_Orders._with_less_memory,), ((_Orders, "_with_less_memory", lambda self: []),)
    ),
    "launching sooner": Mechanism(
        (list_schedule.sooner_ms,), ((list_schedule, "sooner_ms", lambda *sends: 0.0),)
    ),
    "all but two orders": Mechanism((), ((policy.Overlap, "candidates", _few),)),
    "either rule of room": Mechanism((), ((_Orders, "_make", _one_rule),), keeps=True),
    "least peaks": Mechanism(
        (_LeastPeak,),
        (
            (_LeastPeak, "prove", lambda self: None),
            (_LeastPeak, "learn", lambda self, made: None),
        ),
    ),
    "orders far above a bound": Mechanism(
        (), ((orders, "FAR_ABOVE", 1e9), (cap_search, "FAR_ABOVE", 1e9))
    ),
    "orders that are equal": Mechanism(
        (list_schedule.ListScheduler.as_with,),
        ((list_schedule.ListScheduler, "as_with", lambda self, other: self.options == other),),
    ),
    "orders without idle nodes": Mechanism(
        (vars(Model)["_compact"].func, Model._may_go, Model.expanded),
        ((Model, "compact", property(lambda self: self)), (Model, "expanded", lambda self, o: o)),
        keeps=True,
    ),
    "climbing": Mechanism(
        (policy.Options.next_to,),
        ((policy.Options, "next_to", lambda self, other, windows: True),),
    ),
    "descent": Mechanism(
        (KeepPlanner._descend,),
        ((KeepPlanner, "_descend", lambda self, firsts, limit, left, near: min(firsts)),),
        keeps=True,
    ),
    "neighbours": Mechanism(
        (KeepPlanner._near,),
        ((KeepPlanner, "_near", lambda self, kept, room, ranked: iter(())),),
        keeps=True,
    ),
}


@dataclass
class Result:
    """Steps in ms by setting, peaks above the bound relative to it, and CPU seconds."""

    steps: dict[str, float]
    above: dict[str, float]
    seconds: float


def machines() -> dict[str, tuple[Machine, Machine]]:
    """Return, by setting, the machine that plans are made for, and the one that scores them."""
    slow = nodes(_SLOW_GB_PER_S)
    off = {
        name: replace(
            H100, factors=dict.fromkeys(kinds, 1 + _OFF) | dict.fromkeys(others, 1 - _OFF)
        )
        for name, kinds, others in (
            ("slow kernels", ("kernel",), _NETWORK),
            ("slow network", _NETWORK, ("kernel",)),
        )
    }
    return {
        "right times": (H100, H100),
        "12.5 GB/s": (slow, slow),
        **{f"planned for a {name}": (machine, H100) for name, machine in off.items()},
    }


_NETWORK = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


Planned: TypeAlias = tuple[Sequence[Bucket], ScheduleReport, list[int]]


def plan(analysis: GraphAnalysis, planned: Callable[[Machine], Planned]) -> Result:
    """Plan buckets and an order for the machine of each setting."""
    result = Result({}, {}, 0.0)
    for setting, (guess, true) in machines().items():
        clock = time.process_time()
        buckets, report, order = planned(guess)
        result.seconds += time.process_time() - clock
        result.steps[setting] = step_ms(merged(analysis, buckets, true), order)
        result.above[setting] = report.misses
    return result


def merged(analysis: GraphAnalysis, buckets: Sequence[Bucket], machine: Machine) -> Model:
    """Return the model of a graph with these buckets."""
    costs = Costs(machine, analysis.hints)
    model = model_of(analysis, costs)
    found = merged_model(model, buckets, costs) if buckets else model
    assert found is not None
    return found


def search(graph: Graph, bound: float, machine: Machine) -> Planned:
    """Choose caps and an order under a bound relative to the graph's peak."""
    analysis = GraphAnalysis(graph.gm.graph, graph.config.size_hints)
    reference = analysis.peak_bytes
    policies, options = what_ours_plans(graph, reference, bound)
    by_cap = cap_search.ByCap(**options)
    searched = BySearch(tuple(policies), by_cap, machine=machine, reference_bytes=reference).search(
        analysis
    )
    model = merged(analysis, searched.plan.buckets, machine)
    report, order, _ = schedule_model(model, policies, reference, like=searched.sort)
    return searched.plan.buckets, report, list(order)


def order_chunks(analysis: GraphAnalysis, names: Sequence[str], machine: Machine) -> Planned:
    """Order a step in chunks under the peak of torchtitan's order."""
    model = merged(analysis, (), machine)
    most = chunks.torchtitans_order(model, names).peak_bytes
    policies = [policy.Overlap(), policy.PeakMemory(gib=most / chunks.GIB)]
    report, order, _ = schedule_model(model, policies, most)
    return (), report, list(order)


def keep(sharded: Sharded, bounds: Sequence[int], machine: Machine) -> Result:
    """Choose what is kept under each bound."""
    clock, result = time.process_time(), Result({}, {}, 0.0)
    planner = sharded.planner(machine, activations=True)
    for place, bound in enumerate(bounds):
        outcome = planner.choose(bound)
        result.steps[f"bound {place}"] = outcome.step_ms
        result.above[f"bound {place}"] = outcome.above / bound
    result.seconds = time.process_time() - clock
    return result


def bounds_of(sharded: Sharded, machine: Machine) -> list[int]:
    """Return the bounds at 0, 1 and 2 quarters between the least peak and that of all saved."""
    planner = sharded.planner(machine, activations=True)
    least = planner.choose(0).peak_bytes
    most = by_hand(planner, planner.candidates).peak_bytes
    return [least + (most - least) * part // 4 for part in range(3)]


def compare(names: Sequence[str], keeps: bool, planned: Callable[[], Result]) -> dict[str, Result]:
    """Plan with all mechanisms (``""``), and without each."""
    results = {"": planned()}
    for name in names:
        if keeps or not MECHANISMS[name].keeps:
            with MECHANISMS[name].removed():
                results[name] = planned()
    return results


def table(found: Sequence[Mapping[str, Result]]) -> str:
    """Render one line per mechanism."""
    rows = [["without", "lines", "loss, %", "most", "wrong times", "most", "peak, %", "seconds"]]
    for name, mechanism in MECHANISMS.items():
        pairs = [(results[""], results[name]) for results in found if name in results]
        if not pairs:
            continue
        losses: dict[bool, list[float]] = {False: [], True: []}
        for full, without in pairs:
            for setting, ms in full.steps.items():
                loss = 100 * (without.steps[setting] / ms - 1)
                losses[setting.startswith("planned for")].append(loss)
        above = [
            100 * (without.above[setting] - missed)
            for full, without in pairs
            for setting, missed in full.above.items()
        ]
        seconds = [sum(result.seconds for result in side) for side in zip(*pairs, strict=True)]
        figures = [
            f"{value:.2f}"
            for some in losses.values()
            for value in ((statistics.fmean(some), max(some)) if some else (0.0, 0.0))
        ]
        lines = str(mechanism.lines or "-")
        rows.append([name, lines, *figures, f"{max(above):.2f}", f"{seconds[1] / seconds[0]:.2f}"])
    return columns(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of_graphs("python -m benchmarks.ablation", __doc__, GRAPHS, layers=8)
    parser.add_argument("--bounds", nargs="+", type=float, default=[1.02], metavar="RATIO")
    parser.add_argument("--keep", default="", metavar="LAYERS", help="depths, such as 4,32")
    parser.add_argument("--kept", nargs="+", default=KEPT, metavar="MODEL", help="for --keep")
    about = "steps of benchmarks.chunks, instead of graphs"
    parser.add_argument("--chunks", nargs="+", default=(), choices=chunks.CHUNKS, help=about)
    add_names(parser, "without", list(MECHANISMS), "mechanisms")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    document = document_of("python -m benchmarks.ablation", arguments)
    found: list[dict[str, Result]] = []

    def show(name: str, results: dict[str, Result]) -> None:
        found.append(results)
        document.setdefault("plans", {})[name] = {
            without: vars(result) for without, result in results.items()
        }
        steps = ", ".join(f"{ms:.2f}" for ms in results[""].steps.values())
        print(f"{name}: {steps} ms", file=sys.stderr, flush=True)
        write_json(args.json, document)

    if any(not MECHANISMS[name].keeps for name in args.without):
        for name in () if args.chunks else chosen(parser, args.only):
            graph = load(name, args.layers, quiet=True)
            analysis = GraphAnalysis(graph.gm.graph, graph.config.size_hints)
            for bound in args.bounds:
                planned = partial(search, graph, bound)
                results = compare(args.without, False, lambda: plan(analysis, planned))  # noqa: B023
                show(f"{name}, {bound:g} of its peak", results)
        for name in args.chunks:
            analysis, names, _ = chunks.traced_step(chunks.CHUNKS[name], args.layers)
            planned = partial(order_chunks, analysis, names)
            results = compare(args.without, False, lambda: plan(analysis, planned))  # noqa: B023
            show(name, results)
    machine = job_machine().for_backend(fuses=True)
    for layers in map(int, filter(None, args.keep.split(","))):
        for name in args.kept:
            sharded = Sharded(name, layers)
            bounds = bounds_of(sharded, machine)
            results = compare(args.without, True, lambda: keep(sharded, bounds, machine))  # noqa: B023
            show(f"{name}, {layers} layers", results)
    write_results(args.json, document, table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
