"""Orders are topological, equal in every process, and within the bounds reported as kept."""

import gc
import math
import random
import re
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.utils._pytree as pytree
from examples import examples
from expecttest import assert_expected_inline
from generated_memory import generated_code
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import (
    DIM,
    OPTIONS,
    Trainer,
    backward_graph,
    choose_caps,
    demo_graphs,
    forward_graph,
    layered_graph,
    machine,
    order_of,
    random_graph,
)
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch_features import has_simple_overlap

from torch_ext_bucketing._torch import paused_gc, with_room_for_frames
from torch_ext_bucketing._torch.inductor import NO_HOLDS, CustomGraphPass, nccl_estimate_ms
from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import ByCap, CapPlanner
from torch_ext_bucketing.errors import BoundNotKeptWarning, NotBucketedWarning
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.dependencies import Dependencies
from torch_ext_bucketing.graph.liveness import donated_by_autograd
from torch_ext_bucketing.graph.nodes import (
    COLLECTIVES,
    collective_kind,
    group_name,
    is_collective,
    kind_of,
    started_by,
)
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.pin import pin_order
from torch_ext_bucketing.planner import cap_search
from torch_ext_bucketing.planner.cap_search import BySearch
from torch_ext_bucketing.planner.cost.cost import Costs, Machine
from torch_ext_bucketing.planner.cost.machine import Level
from torch_ext_bucketing.planner.schedule import orders
from torch_ext_bucketing.planner.schedule.list_schedule import (
    ROUNDING,
    ListScheduler,
    list_schedule,
    plain_schedule,
)
from torch_ext_bucketing.planner.schedule.merged_model import merged_model
from torch_ext_bucketing.planner.schedule.model import Model, model_of, peak_bytes
from torch_ext_bucketing.planner.schedule.orders import schedule_model
from torch_ext_bucketing.planner.schedule.policy import (
    Bounds,
    MaxComputeRun,
    Options,
    Overlap,
    PeakMemory,
)
from torch_ext_bucketing.planner.schedule.timeline import Timeline
from torch_ext_bucketing.planner.scheduling import BucketAndSchedule, Schedule, schedule
from torch_ext_bucketing.reports.base import sizes_text

_aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("two_ranks")


# --- snapshots -----------------------------------------------------------------------------------


Drawn = tuple[list[fx.Node], Machine]


def layers(b: Trainer) -> Drawn:
    """Make gathers that launch one layer ahead, then reductions whose waits come late."""
    x, w, reduced = b.matrix(), b.matrix(), []
    for shard in [b.matrix(DIM // 2) for _ in range(3)]:
        x = b.mm(x, b.start("all_gather", shard))
    for _ in range(3):
        x = b.mm(x, w)
        reduced.append(b.start("reduce_scatter", x))
    return reduced, machine()


def one_collective_of_anothers_result(b: Trainer) -> Drawn:
    """Make a gather of a reduction's result, which delays no kernel."""
    x, w = b.matrix(), b.matrix()
    reduced = b.start("all_gather", b.start("reduce_scatter", b.mm(x, w)))
    return [reduced, b.mm(b.mm(x, w), w)], machine()


def a_short_wait_for_a_long_one(b: Trainer) -> Drawn:
    """Make a long gather of a short reduction, which must not wait for the second product."""
    x, w, tall = b.matrix(), b.matrix(), b.matrix(10 * DIM)
    sent = b.start("all_gather", b.start("reduce_scatter", b.mm(x, w)))
    times = {"reduce_scatter": 0.1, "all_gather": 9.0}
    on = {(k, 2): ((1, ms), (2**40, ms)) for k, ms in times.items()}
    return [sent, b.mm(tall, w)], replace(machine(), collectives=on)


def chunks_of_tokens(b: Trainer) -> Drawn:
    """Make two chunks of tokens that go to their experts and back, one after the other."""
    x, w = b.matrix(), b.matrix()
    there = [b.start("all_to_all", b.mm(x, w)) for _ in range(2)]
    return [b.start("all_to_all", b.mm(tokens, w)) for tokens in there], machine()


def two_collectives_of_a_path(b: Trainer) -> Drawn:
    """Make kernels between two collectives, which the bound includes."""
    x, w = b.matrix(DIM // 2), b.matrix()
    x = b.start("all_gather", b.mm(x, w))  # 0.5 + 2
    x = b.start("reduce_scatter", b.mm(b.mm(x, w), b.mm(x, w)))  # 3 + 2, on a path only 2 + 2
    return [b.mm(x, w), b.mm(w, w)], machine(2.0)  # 0.5, and 1 beside them


def a_stream_that_begins_late(b: Trainer) -> Drawn:
    """Make a kernel before the first of three reductions, which the bound includes."""
    x, w = b.matrix(), b.matrix()
    y = b.mm(x, w)  # 1, and then three reductions of 2 each on one stream, beside two kernels
    return [b.start("reduce_scatter", z) for z in (y, b.mm(y, w), b.mm(y, w))], machine(2.0)


def products_that_fit_into_no_wait(b: Trainer) -> Drawn:
    """Make products without a user, which run under the last reduction, not before it."""
    x, w = b.matrix(DIM // 2), b.matrix()
    free = [b.mm(b.matrix(4 * DIM), w) for _ in range(2)]  # 4 each
    y = b.start("all_gather", b.mm(x, w))  # 0.5 + 2
    last = b.start("reduce_scatter", b.mm(y, w))  # 1 + 8
    (start,) = last.all_input_nodes
    return [*free, last], replace(machine(2.0), estimate=lambda n, _: 8.0 if n is start else None)


def two_paths_to_a_stream(b: Trainer) -> Drawn:
    """Make a longer path after a product of 4 ms, which would leave the stream idle first."""
    x, w = b.matrix(), b.matrix()
    products = [b.mm(x, w) for _ in range(2)]
    on = replace(machine(4.0), estimate=lambda n, _: 4.0 if n is products[0] else None)
    return [b.mm(b.start("all_to_all", product), w) for product in products], on


def a_deadline_within_a_kernel(b: Trainer) -> Drawn:
    """Make a second gather whose deadline, 2.5 ms, is within a product."""
    x, w, halves = b.matrix(), b.matrix(), [b.matrix(DIM // 2) for _ in range(2)]
    for _ in range(3):
        x = b.mm(x, w)
    for half in halves:
        x = b.mm(x, b.start("all_gather", half))
    return [x], machine(1.5)


@pytest.mark.parametrize(
    ("draw", "given_ms", "bound_ms", "step_ms"),
    [
        (layers, 12, 8, 8),
        (one_collective_of_anothers_result, 5, 3, 3),
        (a_short_wait_for_a_long_one, 20.1, 11, 11.1),
        (chunks_of_tokens, 8, 5, 5),
        (two_collectives_of_a_path, 9, 8, 8),
        (a_stream_that_begins_late, 9, 7, 7),
        (products_that_fit_into_no_wait, 19.5, 11.5, 11.5),  # 13.5 with a product in the wait
        (two_paths_to_a_stream, 15, 10, 10),  # 13 with the longer path first
        (a_deadline_within_a_kernel, 8, 5, 5),
    ],
)
def test_an_order_takes_what_one_would_draw(draw, given_ms, bound_ms, step_ms):
    b = Trainer()
    outputs, on = draw(b)
    model = model_of(b.finish(outputs).graph, on)
    assert Timeline.of(model).step_ms == pytest.approx(given_ms, abs=0.01)
    assert model.paths.bound_ms == pytest.approx(bound_ms, abs=0.01)
    for order in (
        list_schedule(model, Options(window=100)),
        schedule_model(model, Overlap(), None)[1],
    ):
        assert Timeline.of(model, order).step_ms == pytest.approx(step_ms, abs=0.01)


def test_what_a_kernel_needs_runs_in_the_order_of_the_graph():
    b = Trainer()
    x, y, half = b.matrix(), b.matrix(), b.matrix(DIM // 2)
    made = b.add(x, y)  # like an embedding: a kernel that needs none
    turned = []
    for node in (b.start("all_gather", half), made):
        turned.append(b.graph.call_function(_aten.t.default, (node,)))
        turned[-1].meta["val"] = node.meta["val"].t()
    gm = b.finish([b.mm(*reversed(turned))])
    on = replace(machine(), estimate=lambda n, _: 1.0 if n is made else None)
    model = model_of(gm.graph, on)
    order = list_schedule(model, Options())  # not gather, wait, made: that takes 2 ms
    assert Timeline.of(model, order).step_ms == pytest.approx(1.0, abs=0.01)


def test_of_orders_with_equal_steps_the_one_with_slack_is_taken():
    b = Trainer()
    x, w = b.matrix(), b.matrix()
    free = [b.mm(b.matrix(), w) for _ in range(3)]
    gm = b.finish([*free, b.start("reduce_scatter", b.mm(x, w))])
    model = model_of(gm.graph, machine())
    found = [schedule_model(model, Overlap(), None, quick=few).order for few in (True, False)]
    for collective_ms, expected in ((1.0, [4.0, 4.0]), (1.7, [4.7, 4.0])):
        real = model_of(gm.graph, machine(collective_ms))
        assert [Timeline.of(real, order).step_ms for order in found] == pytest.approx(
            expected, abs=0.01
        )


@pytest.mark.parametrize(
    ("long_ms", "lost_ms", "with_slack"),
    [(0.55, 0.01, True), (0.55, 0.04, False), (0.12, 0.009, False)],
    ids=["gains more", "above half a percent", "gains less"],
)
def test_slack_is_worth_half_a_percent_of_a_step(long_ms, lost_ms, with_slack):
    b = Trainer()
    x, w = b.matrix(), b.matrix()
    short = b.start("all_gather", b.mm(x, w))
    after = b.mm(short, w)
    long = b.start("reduce_scatter", b.mm(x, w))
    gm = b.finish([after, long])
    times = {"reduce_scatter": long_ms, "all_gather": 0.1}
    on = replace(
        machine(),
        collectives={(kind, 2): ((1, ms), (2**40, ms)) for kind, ms in times.items()},
        estimate=lambda node, _: long_ms - 0.1 + lost_ms if node is after else None,
    )
    # With slack the long one is first: the step is 2 + long_ms + lost_ms instead of 2 + long_ms, and
    # where collectives are slower 2 + 0.17 + long_ms - 0.1 + lost_ms instead of 2 + 1.7 * long_ms.
    for final in (False, True):
        report = schedule_model(model_of(gm.graph, on), Overlap(), None, final=final).report
        assert report.step_ms[1] == pytest.approx(2 + long_ms + lost_ms * with_slack, abs=1e-3)


def test_a_wait_is_filled_with_what_needs_no_computation():
    """Lazy nodes run late, to hold no memory, but fill a wait."""
    b = Trainer()
    x, w, half = b.matrix(), b.matrix(), b.matrix(DIM // 2)
    gathered = b.start("all_gather", b.mm(half, w), "activation")
    table = b.graph.call_function(_aten.sin.default, (x,))
    table.meta["val"] = x.meta["val"]
    product = b.mm(b.mm(gathered, w), table)
    aside = b.graph.call_function(_aten.cos.default, (half,))  # reaches no kernel
    aside.meta["val"] = half.meta["val"]
    gm = b.finish([product, b.start("all_gather", aside)])
    model = model_of(gm.graph, replace(machine(collective_ms=2.0), kernel_ms=1.0))
    names = [n.name for n in model.dependencies.nodes]

    def order(options: Options) -> list[str]:
        return [names[i] for i in list_schedule(model, options)]

    first, launch, wait, late, second, third, *rest = names
    wide = Options(window=8)
    assert order(wide) == [first, launch, late, wait, second, third, *rest]
    exposed = [Timeline.of(model, list_schedule(model, o)).exposed_ms for o in (Options(), wide)]
    assert exposed == pytest.approx([4.0, 3.0])  # 2 at the end
    late_again = [first, launch, wait, second, late, third, *rest]
    assert order(Options(window=8, limit_bytes=1)) == order(Options(window=0)) == late_again


def test_runs_between_reduce_scatters_are_capped():
    report = schedule(backward_graph(), MaxComputeRun(4))
    assert report.longest_run == (16, 4)
    assert report.bounds[0].forced_run == 4
    assert not report.warnings


# --- bounds that can't be kept -------------------------------------------------------------------


def test_nothing_that_goes_wrong_loses_the_graph(monkeypatch):
    gm = forward_graph()
    before = order_of(gm)

    def broken(*args: Any) -> list[int]:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(orders, "ListScheduler", broken)
    with pytest.warns(BoundNotKeptWarning, match="keeps its order: ZeroDivisionError: no"):
        report = schedule(gm, Overlap(), machine=machine())
    assert order_of(gm) == before
    assert report.warnings
    monkeypatch.undo()
    monkeypatch.setattr(Dependencies, "is_order", lambda self, order: False)
    with pytest.warns(BoundNotKeptWarning, match="keeps its order"):
        schedule(gm, Overlap(), machine=machine())
    assert order_of(gm) == before


# --- places by name ------------------------------------------------------------------------------


def test_a_gather_runs_under_the_computation_that_was_named():
    gm = forward_graph(4)
    asked = Overlap(depth=0, prefetch_under={"layers.3": "layers.1", "layers.0": "layers.2"})
    options = machine(collective_ms=0.5)
    report = schedule(gm, [asked, PeakMemory(ratio=4)], machine=options)
    names = order_of(gm).split()
    launched = names.index("all_gather_into_tensor_default_3")
    assert names.index("mm_default") < launched < names.index("mm_default_1")
    assert report.notes == ("prefetch_under: layers.0 is used before layers.2 in this graph",)


# --- properties ----------------------------------------------------------------------------------

SEEDS = st.integers(0, 10**6)


@given(seed=SEEDS, size=st.integers(1, 16), options=OPTIONS)
@examples(150)
def test_every_order_is_topological(seed: int, size: int, options: Options):
    gm = random_graph(seed, size, ["0"], share=False)
    model = model_of(gm.graph)
    order = list_schedule(model, options)
    assert model.dependencies.is_order(order)
    starts = [model.dependencies.nodes[i] for i in order if model.group[i] is not None]
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        before = [n for n in gm.graph.nodes if kind_of(n) == kind]
        assert [n for n in starts if kind_of(n) == kind] == before


def random_training(seed: int) -> fx.GraphModule:
    """Make products of gathered, reduced or multiplied values."""
    rng, b = random.Random(seed), Trainer()
    values = [b.matrix() for _ in range(2)]
    halves = [b.matrix(DIM // 2) for _ in range(4)]
    for _ in range(30):
        x = rng.choice(values[-6:])
        match rng.randrange(6):
            case 0:
                values.append(b.start("all_gather", rng.choice(halves)))
            case 1:
                halves.append(b.start("reduce_scatter", x))
            case 2:
                table = b.graph.call_function(_aten.sin.default, (values[0],))
                table.meta["val"] = values[0].meta["val"]
                values.append(table)
            case _:
                values.append(b.mm(x, rng.choice(values)))
    return b.finish([v for v in (*values, *halves) if not v.users and v.op != "placeholder"])


@given(
    seed=SEEDS,
    limit=st.one_of(st.none(), st.floats(0.9, 1.2)),
    run=st.one_of(st.none(), st.integers(1, 9)),
    shorter=st.one_of(st.just(1.0), st.floats(0.8, 1.1)),
    one_level=st.booleans(),
)
@examples(100)
def test_no_pass_is_left_out_that_would_give_another_order(seed, limit, run, shorter, one_level):
    gm = random_training(seed)
    model = model_of(gm.graph, replace(machine(collective_ms=2.0), kernel_ms=0.5))
    model = on_one_level(model) if one_level else model
    limit = None if limit is None else int(limit * Timeline.of(model).peak_bytes)
    options = Options(window=8, fill=8, depth=1, limit_bytes=limit, max_run=run)
    made = ListScheduler(model, options)
    order = made.run()
    changes: list[dict[str, Any]] = [{"window": w, "fill": 8} for w in (0, 1, 2, 4)]
    changes += [{"depth": 2}, {"deadlines": False}, {"limit_bytes": None}, {"max_run": None}]
    changes += [{"hold": False}, {"room_for_open": False}]
    for change in changes:
        other = replace(options, **change)
        if made.as_with(other):
            assert list_schedule(model, other) == order, change
    step = Timeline.of(model, order).step_ms
    early = ListScheduler(model, options, shorter * step).run()
    assert early == order or (early is None and shorter < 1)


@pytest.mark.parametrize(
    ("seed", "ratio", "for_all"),
    [(32, 1.1, True), (42, 1.1, True), (44, 1.0, True), (31, 1.0, False), (59, 1.1, False)],
)
def test_gathers_go_ahead_by_the_rule_of_room_with_the_shorter_step(seed, ratio, for_all):
    model = model_of(random_training(seed).graph, replace(machine(1.0), kernel_ms=0.5))
    limit = int(ratio * Timeline.of(model).peak_bytes)
    orders = [
        Timeline.of(model, list_schedule(model, Options(limit_bytes=limit, room_for_open=each)))
        for each in (True, False)
    ]
    assert orders[for_all].step_ms < orders[not for_all].step_ms
    assert orders[for_all].peak_bytes <= limit
    policies = [Overlap(), PeakMemory(gib=limit / 2**30)]
    report = schedule_model(model, policies, None, quick=True).report
    assert report.step_ms[1] <= orders[for_all].step_ms
    assert report.peak_bytes[1] <= limit


def of_two_groups(model: Model, slower: float = 1.0) -> Model:
    """Put reductions into another group than gathers, which is ``slower``."""
    slow = [m * slower if r else m for m, r in zip(model.ms, model.reduces, strict=True)]
    group = [g and str(int(r)) for g, r in zip(model.group, model.reduces, strict=True)]
    return replace(model, ms=slow, group=group)


def on_one_level(model: Model) -> Model:
    return replace(of_two_groups(model), shared=dict.fromkeys("01", "between nodes"))


def by_longest_path(model: Model) -> list[int]:
    """Run collectives at once; of the nodes that can begin first, the one with the longest path."""
    needs, tail, end, free = model.dependencies.needs, model.paths.tail, {}, dict[str, float]()
    order, left, now = list[int](), set(range(len(model))), 0.0
    while left:
        begin = {
            i: max(now, end.get(model.start_of[i], 0.0)) for i in left if left.isdisjoint(needs[i])
        }
        starts = [i for i in begin if model.group[i] is not None]
        i = min(starts or begin, key=lambda i: (begin[i], -tail[i], i))
        left.remove(i)
        order.append(i)
        if (group := model.group[i]) is not None:
            end[i] = free[group] = max(now, free.get(group, 0.0)) + model.ms[i]
        else:
            now = begin[i] + model.ms[i]
    return order


@given(seed=SEEDS, slower=st.sampled_from([0.5, 2.0, 4.0, 10.0]))
@settings(max_examples=60)
def test_no_step_is_longer_than_that_of_a_plain_list_schedule(seed, slower):
    """Nine in ten of these graphs lost up to half of their step."""
    model = model_of(random_training(seed).graph, replace(machine(1.0), kernel_ms=0.5))
    model = of_two_groups(model, slower)
    plain = Timeline.of(model, by_longest_path(model))
    report = schedule_model(model, [Overlap(), PeakMemory(gib=1)], None).report
    assert report.step_ms[1] <= plain.step_ms * (1 + 1e-9)


def test_on_one_level_no_order_is_given_up_for_what_runs_beside_the_rest():
    """A long reduction without a user and a gather of another group come before products."""
    b = Trainer()
    w = b.matrix()
    long = b.start("reduce_scatter", b.mm(b.matrix(), w))
    y = b.start("all_gather", b.mm(b.matrix(DIM // 2), w))
    for _ in range(12):
        y = b.mm(y, w)
    (start,) = long.all_input_nodes
    on = replace(machine(1.0), estimate=lambda n, _: 10.0 if n is start else None)
    model = on_one_level(model_of(b.finish([long, y]).graph, on))
    order = ListScheduler(model, Options()).run()
    step = Timeline.of(model, order).step_ms
    assert step < 20
    assert ListScheduler(model, Options(), step).run() == order


def test_a_sort_that_misses_a_bound_is_not_the_only_one_tried():
    graph, bounds = random_training(68).graph, [Overlap(), PeakMemory(ratio=1.0)]
    on, wide = machine(2.0), Options(window=100)
    alone = schedule_model(model_of(graph, on), bounds, None, like=wide, near=False)[0]
    assert alone.chosen == "as given"
    report = schedule(graph, bounds, machine=on, like=wide)
    assert not report.misses
    assert report.step_ms[1] < 0.9 * alone.step_ms[1]


def test_of_equal_steps_the_lowest_peak_is_taken_in_the_end():
    model = model_of(random_training(27).graph, replace(machine(2.0), kernel_ms=0.5))
    bounds = [Overlap(), PeakMemory(ratio=1.3)]  # the plain list schedule needs more
    taken, first = (schedule_model(model, bounds, None, final=end)[0] for end in (True, False))
    assert taken.step_ms == first.step_ms
    assert taken.peak_bytes[1] < first.peak_bytes[1]


@pytest.mark.parametrize(
    ("quick", "seed", "ratio", "step"),
    [(True, 20, 0.9, 32.0), (True, 21, 1.0, 29.0), (False, 21, 1.0, 29.0)],
)
def test_a_lower_limit_is_tried_with_either_rule_of_room(quick, seed, ratio, step):
    graph = random_training(seed).graph
    model, policies = model_of(graph, machine(2.0)), [Overlap(), PeakMemory(ratio=ratio)]
    report = schedule_model(model, policies, peak_bytes(graph), quick=quick).report
    # The fastest order that misses the bound misses it under the lower limit, too (seed 20), or
    # takes 31 ms (21). The one with the other rule keeps it.
    assert not report.misses
    assert report.step_ms[1] == pytest.approx(step, abs=0.01)


@given(seed=SEEDS, size=st.integers(1, 14))
@examples(100)
def test_no_order_has_shorter_runs_than_are_called_forced(seed: int, size: int):
    gm = backward_graph(1 + seed % 5, 1 + size % 7)
    model = model_of(gm.graph)
    forced = model.forced_run
    for limit in (1, 4, 100):
        order = list_schedule(model, Options(max_run=limit))
        assert Timeline.of(model, order).longest_run >= forced
    best = Timeline.of(model, list_schedule(model, Options(max_run=1))).longest_run
    assert best == forced, "on a chain the bound is reached"


# --- dependencies that edges do not show ---------------------------------------------------------


def test_sizes_are_told_in_units_that_show_the_difference():
    assert sizes_text(72 * 2**30, 70 * 2**30) == ["72.000 GiB", "70.000 GiB"]
    assert sizes_text(2**20 + 2**15, 2**20, 0) == ["1.031 MiB", "1.000 MiB", "0.000 MiB"]
    assert sizes_text(2**30 + 2**15, 2**30) == ["1.00003 GiB", "1.00000 GiB"]
    assert sizes_text(2**30 + 1, 2**30) == [f"{2**30 + 1} B", f"{2**30} B"]
    assert sizes_text(900, 880) == ["900 B", "880 B"]


# --- memory: the estimate against a run ----------------------------------------------------------


class Live(fx.Interpreter):
    """Run on zeros and count live bytes; ``peak`` is the most of them."""

    def __init__(self, gm: fx.GraphModule, donated: Callable[[fx.Node], bool]) -> None:
        super().__init__(gm)
        self.peak, self.held, self.donated = 0, [], donated
        last: dict[fx.Node, fx.Node | None] = {}
        for node in gm.graph.nodes:
            if node.op == "output":
                break  # results stay
            start = started_by(node)
            read = [] if start is None else start.all_input_nodes
            last |= dict.fromkeys([node, *node.all_input_nodes, *read], node)
        last |= dict.fromkeys(gm.graph.output_node().all_input_nodes)
        self.user_to_last_uses = {
            user: [value for value in last if last[value] is user] for user in gm.graph.nodes
        }

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return None
        if n.op == "placeholder":
            value = super().run_node(n)
            self.held += [] if self.donated(n) else [value]
        elif started_by(n) is not None:
            value = self.env[n.args[0]]
        elif is_collective(n):
            out = n.kwargs.get("out")
            value = real_tensor(n.meta["val"], {}) if out is None else self.env[out]
        else:
            value = super().run_node(n)
        values = pytree.tree_leaves([self.env, self.held, value])
        storages = [v.untyped_storage() for v in values if isinstance(v, torch.Tensor)]
        self.peak = max(self.peak, sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        return value


def real_tensor(fake: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """Make zeros that share memory as the fake tensors do."""
    new = torch.zeros(fake.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    storage = storages.setdefault(fake.untyped_storage()._cdata, new)
    empty = torch.empty(0, dtype=fake.dtype)
    return empty.set_(storage, fake.storage_offset(), fake.shape, fake.stride())


@pytest.mark.torch
@pytest.mark.parametrize("bucketed", [False, True], ids=["unbucketed", "bucketed"])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_estimated_peak_equals_a_run_on_the_demo_model(stage: str, bucketed: bool):
    gm = demo_graphs()[stage]
    if bucketed:
        apply_plan(
            GraphAnalysis(gm.graph),
            ByCap(0.2, kinds=("all_gather", "reduce_scatter")).plan(GraphAnalysis(gm.graph)),
        )
        schedule(gm, [Overlap(), PeakMemory(ratio=1.6)])
    donated = donated_by_autograd(gm.graph)
    storages: dict[int, torch.UntypedStorage] = {}
    fakes = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    run = Live(gm, donated)
    run.run(*(real_tensor(v, storages) if torch.is_tensor(v) else v for v in fakes))
    assert peak_bytes(gm) == pytest.approx(run.peak, rel=0.02)
    if stage == "backward":
        assert any(donated(n) for n in gm.graph.find_nodes(op="placeholder"))


# --- cost model ----------------------------------------------------------------------------------


def test_measured_tables_are_interpolated_and_extrapolated():
    table = {("all_gather", 2): ((1000, 1.0), (3000, 2.0))}
    costs = Costs(Machine(collectives=table))
    gm = forward_graph(1)
    (start,) = [n for n in gm.graph.nodes if kind_of(n)]
    for nbytes, ms in ((10, 1.0), (1000, 1.0), (2000, 1.5), (3000, 2.0), (6000, 4.0)):
        assert costs.collective(start, nbytes) == pytest.approx(ms)
    estimate = Costs(Machine()).collective(start, 10**8)
    assert estimate == pytest.approx(nccl_estimate_ms(start, 10**8))


# --- caps chosen here ----------------------------------------------------------------------------


SHARD = 1.5 * DIM * DIM * 4 / 2**20  # MiB, input and output of one gather
RUNGS = tuple(n * SHARD for n in (1, 2, 4, 8))


@pytest.mark.parametrize("seed", [3, 5, 8, 9])
def test_caps_are_ranked_by_all_orders(seed):
    """Ranking by a few orders was up to a sixth slower without spare memory."""
    graph, bounds = random_training(seed).graph, [Overlap(), PeakMemory(ratio=1.0)]
    caps = [n * DIM * DIM * 4 / 2**20 for n in (1, 2, 4, 8, 64)]
    analysis, costs = GraphAnalysis(graph), Costs(machine(2.0))
    options: dict[str, Any] = {"eligible": bool}
    _, report = choose_caps(analysis, bounds, caps_mb=caps, machine=costs.machine, **options)
    planner, unmerged = CapPlanner(analysis, ByCap(**options)), model_of(analysis, costs)
    for cap in caps:
        model = merged_model(unmerged, planner.plan(cap).buckets, costs)
        found = schedule_model(model, bounds, analysis.peak_bytes).report
        shortest = min(tried.step_ms for tried in report.tried if not tried.misses)
        assert found.misses or shortest <= found.step_ms[1] * (1 + 1e-9)


def test_caps_between_the_rungs_are_tried_where_none_were_given(monkeypatch):
    """A cap between rungs gives buckets of 4 and 4 members instead of 3, 3 and 2."""
    gm, bounds = forward_graph(8), [Overlap(), PeakMemory(ratio=1.6)]
    monkeypatch.setattr(cap_search, "CAPS_MB", RUNGS)
    steps = []
    for tried in (RUNGS, None):
        _, report = choose_caps(gm.graph, bounds, caps_mb=tried, machine=machine(2.0))
        assert not report.chosen.misses
        steps.append(report.chosen.step_ms)
    assert steps == [pytest.approx(14, abs=1e-3), pytest.approx(12, abs=1e-3)]


def uneven_training(seed: int, layers: int = 8, rows: int = 512) -> fx.GraphModule:
    """Make layers of a gather and a product on the critical path, and an uneven reduction."""
    rng, b = random.Random(seed), Trainer()
    x, reductions = b.matrix(rows), []
    for i in range(layers):
        x = b.mm(x, b.start("all_gather", b.matrix(DIM // 2), f"layers.{i}.w"))
        activation = b.matrix()
        with b.mode:
            activation.meta["val"] = torch.empty(2 * rng.randint(8, 200), rows)
        reductions.append(b.start("reduce_scatter", b.mm(activation, x), f"layers.{i}.v"))
    return b.finish([x, *reductions])


@pytest.fixture
def few_caps(monkeypatch):
    monkeypatch.setattr(cap_search, "CAPS_MB", (0.02, 0.0625, 0.2, 1.25))


def on_network(level: Level) -> Machine:
    return Machine(
        flops={"float32": 2e9}, kernel_ms=0.01, ranks_per_node=1, intra=level, inter=level
    )


TIGHT = [Overlap(), PeakMemory(ratio=1.1)]


@pytest.mark.parametrize("policies", [[Overlap()], TIGHT], ids=["unbounded", "bounded"])
@pytest.mark.parametrize("final", [False, True])
def test_slack_costs_no_memory(policies, final):
    graph = uneven_training(14).graph
    model = model_of(graph, on_network(Level(12e6, 1.0)))
    report, order, _ = schedule_model(model, policies, peak_bytes(graph), final=final)
    assert report.chosen.endswith(", with slack")
    equal = [peak for _, ms, peak in report.alternatives if ms == pytest.approx(report.step_ms[1])]
    assert Timeline.of(model, order).peak_bytes <= min(equal)


def off_by(true: Costs, seed: int) -> Machine:
    """Make a machine with log-normal errors, of one factor per kernel or collective of a kind."""
    factors: dict[tuple[Any, ...], float] = {}

    def estimate(node: fx.Node, nbytes: int | None) -> float:
        sort: tuple[Any, ...] = (str(node.target),)
        if is_collective(node):
            sort += (group_name(node),)
            ms = true.collective(node, nbytes)
        else:
            sort += tuple(str(n.meta["val"].shape) for n in node.all_input_nodes)
            ms = true(node)
        drawn = math.exp(random.Random(f"{seed} {sort}").gauss(0.0, 0.3))
        return ms * factors.setdefault(sort, drawn)

    return replace(true.machine, estimate=estimate)


@pytest.mark.usefixtures("few_caps")
@pytest.mark.parametrize("level", [Level(6e6, 2.0), Level(3e6, 4.0)], ids=["fast", "slow"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_times_that_are_off_beat_the_true_ones(level, seed):
    """Plans made with wrong times win by at most 1%, and by what a chosen plan may lose."""
    analysis = GraphAnalysis(uneven_training(seed).graph)
    true, reference = Costs(on_network(level)), analysis.peak_bytes

    def step_ms(by: Machine) -> float:
        search = BySearch(TIGHT, ByCap(), machine=by, reference_bytes=reference)
        buckets = search.plan(analysis).buckets
        of = [
            merged_model(model_of(analysis, costs), buckets, costs) for costs in (Costs(by), true)
        ]
        return Timeline.of(of[1], schedule_model(of[0], TIGHT, reference).order).step_ms

    off = min(step_ms(off_by(true, draw)) for draw in range(20))
    assert off >= 0.99 * step_ms(true.machine) / cap_search._NEAR


def test_a_report_in_words():
    gm = backward_graph(layers=2, products=9)
    with pytest.warns(BoundNotKeptWarning):
        report = schedule(
            gm,
            [Overlap(prefetch_under={"a": "b"}), MaxComputeRun(8), PeakMemory(gib=1e-4)],
            machine=machine(),
        )
    assert_expected_inline(
        report.to_text(),
        """\
                         before       after
step, ms                  22.00       21.00  lower bound 21.00, window 100, depth 1, by deadline, with slack
exposed, ms                2.00        1.00
busy, ms                              20.00  compute, group 0 2.00
peak                 80.000 KiB  88.000 KiB  unreordered 80.000 KiB, bound 104.857 KiB
largest block                      16.0 KiB  of mm_default
longest compute run          20          10  bound 8, dependencies force 10
times are for: machine, nodes unknown
prefetch_under: no gather in this graph serves a
MaxComputeRun(8): 10 compute nodes in a row before reduce_scatter_tensor_default; dependencies force a run of at least 10. Smaller reduce-scatter buckets make shorter runs.
""",
    )
    data = report.as_dict()
    figures = {"limit_bytes": 107374, "max_run": 8, "forced_run": 10}
    assert figures.items() <= {k: v for bound in data["bounds"] for k, v in bound.items()}.items()
    assert data["limit_bytes"] == 107374


def test_the_collector_runs_again_after_an_error_and_only_if_it_did():
    seen = [gc.isenabled()]
    with pytest.raises(LookupError), paused_gc():  # noqa: PT012
        seen.append(gc.isenabled())
        with paused_gc():
            seen.append(gc.isenabled())
        seen.append(gc.isenabled())
        raise LookupError
    assert [*seen, gc.isenabled()] == [True, False, False, False, True]


def _most_faults(calls, depth=100, most=0):
    """Return the most page faults that ``calls`` takes at a depth of the stack."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    calls()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return _most_faults(calls, depth - 1, max(most, faults)) if depth else max(most, faults)


def test_calls_map_no_memory_where_frames_fill_a_chunk():
    def calls():
        for _ in range(1000):
            len([*map(lambda i: i, range(2))])  # noqa: C417

    # At some depth the frames of what is called have a chunk of their own.
    assert _most_faults(calls) > 1000
    assert _most_faults(with_room_for_frames(calls)) < 100


@pytest.mark.parametrize(
    ("bound", "longest"), [(MaxComputeRun(8), 8), (PeakMemory(ratio=1.2), 20)], ids=repr
)
def test_buckets_leave_short_runs_where_a_bound_needs_them(bound, longest):
    """Each layer has three products."""
    gm = backward_graph(layers=6, products=3)
    cap = 64 * DIM * DIM * 4 / 2**20
    options: dict[str, Any] = {"eligible": lambda start: True, "machine": machine(2.0)}
    plan, report = choose_caps(gm.graph, [Overlap(), bound], caps_mb=[cap], **options)
    assert report.chosen.misses == 0
    assert report.chosen.longest_run <= longest
    assert {b.closed_by for b in plan.buckets} == {"run", "end"}
    assert [c for t in report.tried for _, c in t.caps_mb] == [cap]


# --- after bucketing -----------------------------------------------------------------------------


def test_scheduling_twice_changes_nothing_more():
    gm = layered_graph(600, 60, ["0", "0"], share=False)
    first = schedule(gm, Overlap())
    order = order_of(gm)
    second = schedule_model(model_of(gm.graph), Overlap(), first.reference_bytes)[0]
    assert second.step_ms[1] <= first.step_ms[1] + 1e-9
    assert order_of(gm) == order


# --- Inductor ------------------------------------------------------------------------------------


def _generated(model: torch.nn.Module, compiler: Any) -> tuple[list[list[str]], list[list[str]]]:
    """List collectives, waits and products of both graphs, as planned and in generated code."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    def step() -> None:
        torch.compile(model, backend=compiler)(torch.randn(DIM, DIM)).sum().backward()

    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(step)
    what = r"(all_gather_into_tensor|reduce_scatter_tensor|wait_tensor|mm)"
    schedules = [] if isinstance(compiler, str) else compiler.last_report().schedules
    planned = [
        [
            m[1]
            for name in report.order
            if (m := re.fullmatch(what + r"(?:_default)?(?:_\d+)?", name))
        ]
        for report in schedules
    ]
    call = r"(?:torch\.ops\._c10d_functional|extern_kernels)\." + what + r"(?:\.default)?\("
    return planned, [re.findall(call, code) for code in codes]


def _four_products() -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(DIM, DIM, bias=False) for _ in range(4)))
    return data_parallel(model, init_device_mesh("cpu", (2,)))


@pytest.mark.torch
def test_a_bucket_of_reductions_is_packed_when_all_of_it_is_there():
    """Otherwise Inductor may allocate the bucket for its first part, before the products."""
    group = dist.group.WORLD.group_name

    def packed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, last = x.sum(0), x @ y @ y
        parts = [first.view(2, -1), last.view(2, -1), (last * y).sum(0).exp().view(2, -1)]
        bucket = torch.cat(parts, 1).flatten()
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(bucket, "sum", 2, group)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    gm = make_fx(packed, tracing_mode="fake")(torch.randn(DIM, DIM), torch.randn(DIM, DIM))
    assert pin_order(gm.graph) == 1  # the reduction waits for the bucket
    assert _pinned_after(gm) == {"aten.cat.default": ["mm_1", "sum_2"]}
    (pack,) = (n for n in gm.graph.nodes if str(n.target) == "control_deps")
    assert pack.meta["dislike_padding"]  # rows of a bucket have no gaps between them


@pytest.mark.torch
def test_a_bucket_of_gathers_is_packed_where_it_is_planned():
    """Otherwise Inductor packs all shards first, and holds the packed ones until their gathers."""
    group = dist.group.WORLD.group_name

    def step(x: torch.Tensor, *shards: torch.Tensor) -> torch.Tensor:
        for shard in shards:
            packed = torch.cat([shard.flatten(), shard.flatten()])
            whole = torch.empty(2 * packed.numel())
            part = whole[: packed.numel()].copy_(packed)
            gather = torch.ops._c10d_functional.all_gather_into_tensor_out
            gathered = torch.ops._c10d_functional.wait_tensor(gather(part, 2, group, out=whole))
            x = x @ gathered[: DIM * DIM].view(DIM, DIM)
        return x

    shards = [torch.randn(DIM // 2, DIM) for _ in range(2)]
    gm = make_fx(step, tracing_mode="fake")(torch.randn(DIM, DIM), *shards)
    pin_order(gm.graph)
    after = _pinned_after(gm)
    assert after["aten.cat.default"] == ["mm"]
    assert after["aten.empty.memory_format"] == ["mm"]


@pytest.mark.torch
def test_a_kernel_that_reads_a_value_last_runs_before_the_next_product():
    """Otherwise Inductor may run the sum at the bucket, and the product stays live until then."""

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x @ y
        bias, scaled = first.sum(0), first.exp()
        return bias, x @ y @ scaled

    gm = make_fx(step, tracing_mode="fake")(torch.randn(DIM, DIM), torch.randn(DIM, DIM))
    pin_order(gm.graph)
    assert "sum_1" in _pinned_after(gm)["aten.mm.default"]


@pytest.mark.torch
def test_the_gradient_of_an_embedding_runs_where_it_is_planned():
    """Otherwise its kernel may fuse with one before the reduction, and allocate the table there."""
    group = dist.group.WORLD.group_name

    def step(x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = x.sum(0).view(2, -1)
        bucket = torch.cat([first, first], 1).flatten()
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(bucket, "sum", 2, group)
        table = torch.zeros(4 * DIM, DIM).index_put((places,), x, accumulate=True)
        return table, torch.ops._c10d_functional.wait_tensor(reduced)

    gm = make_fx(step, tracing_mode="fake")(torch.randn(DIM, DIM), torch.arange(DIM))
    pin_order(gm.graph)
    after = _pinned_after(gm)
    assert after["aten.index_put.default"] == ["reduce_scatter_tensor"]
    assert after["_c10d_functional.wait_tensor.default"] == ["index_put"]


@pytest.mark.torch
def test_a_value_that_pinned_products_share_is_written_once():
    """Otherwise each product writes it: Inductor doesn't see what a wrapped node reads."""

    def step(x, y, weights, ends):
        shared = (x.float() * 2 + y).bfloat16() * x
        first = torch._grouped_mm(x, weights, offs=ends)
        second = torch._grouped_mm(shared, weights, offs=ends)
        return second, torch._grouped_mm(shared.t(), first, offs=ends)

    mode = FakeTensorMode()
    with mode:
        x, weights = (
            torch.empty(*shape, dtype=torch.bfloat16) for shape in ((64, 32), (4, 32, 32))
        )
        inputs = x, torch.empty(64, 32), weights, torch.empty(4, dtype=torch.int32)
        gm = make_fx(step, decomposition_table=select_decomp_table())(*inputs)
    pinned = []

    class Pinned(CustomGraphPass):
        def __call__(self, graph):
            pinned.append(pin_order(graph))

        def uuid(self):
            return None

    options = {"post_grad_custom_post_pass": Pinned(), "compile_threads": 1, **NO_HOLDS}
    code = generated_code(gm, mode, False, options)
    assert pinned == [2]
    assert code.count("= empty_strided_cpu(") == 1


def _pinned_after(gm: fx.GraphModule) -> dict[str, list[str]]:
    """Return the nodes that wrapped operators run after."""
    return {
        str(inner.target): [n.name for n in node.args[0]]
        for node in gm.graph.nodes
        if str(node.target) == "control_deps"
        for inner in getattr(gm, node.args[1].target).graph.nodes
        if inner.op == "call_function"
    }


def test_kernels_before_a_bucket_are_visited_once():
    group = dist.group.WORLD.group_name

    def packed(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):  # 2 ** 20 paths lead through it
            x = x * x.exp()
        bucket = torch.cat([x.view(2, -1), x.view(2, -1)], 1).flatten()
        reduced = torch.ops._c10d_functional.reduce_scatter_tensor(bucket, "sum", 2, group)
        return torch.ops._c10d_functional.wait_tensor(reduced)

    gm = make_fx(packed, tracing_mode="fake")(torch.randn(DIM, DIM))
    begin = time.process_time()
    pin_order(gm.graph)
    assert time.process_time() - begin < 3


@pytest.mark.torch
@has_simple_overlap
def test_inductors_own_overlap_leaves_the_planned_order():
    """By default torch 2.15 moves collectives up and waits down after all passes."""
    from torch._inductor import config

    assert config.aten_distributed_optimizations.enable_simple_overlap
    _, moved = _generated(_four_products(), "inductor")
    with config.patch({"aten_distributed_optimizations.enable_simple_overlap": False}):
        _, plain = _generated(_four_products(), "inductor")
    assert moved != plain  # it does move something
    # Only memory counts, so each gather stands at its use, from where it would be moved.
    compiler = backend("inductor", passes=[Schedule([PeakMemory(ratio=1.0)], machine())])
    planned, generated = _generated(_four_products(), compiler)
    assert planned == generated
    assert generated != moved


# --- the host ------------------------------------------------------------------------------------

HOST_MS = {"kernel": 0.4, **dict.fromkeys(COLLECTIVES, 0.7)}


@given(seed=SEEDS, size=st.integers(1, 16))
@settings(max_examples=50)
def test_the_host_launches_one_node_after_the_other(seed, size):
    model = model_of(random_graph(seed, size, ["0"]), replace(machine(), host_ms=HOST_MS))
    kinds = [collective_kind(node) for node in model.dependencies.nodes]
    kernels = sum(ms > 0 and kind is None for ms, kind in zip(model.ms, kinds, strict=True))
    total = 0.4 * kernels + 0.7 * sum(kind is not None for kind in kinds)
    assert sum(model.host) == pytest.approx(total)
    plain = plain_schedule(model)
    assert plain is not None
    for order in (range(len(model)), plain, list_schedule(model, Options(window=8))):
        line = Timeline.of(model, order)
        assert model.paths.bound_ms <= line.step_ms * ROUNDING
        assert total <= line.step_ms * ROUNDING
        for i, launched in zip(order, line.launched, strict=True):
            assert line.begin[i] >= launched - 1e-9 or not model.host[i]


def test_a_step_that_the_host_bounds_and_one_in_a_cuda_graph():
    on = replace(machine(), host_ms={"kernel": 5.0, "all_gather": 7.0})
    report = schedule(forward_graph(3), Overlap(), machine=on)
    assert report.step_ms[1] == pytest.approx(3 * 12.0 + 1.0)  # the last product runs after that
    assert report.host_ms == pytest.approx(36.0)
    text = "compute, host 36.00, group 0 3.00; the host bounds the step\n"
    assert text in report.to_text()
    captured = schedule(forward_graph(3), Overlap(), machine=on.for_backend(False, captured=True))
    free = schedule(forward_graph(3), Overlap(), machine=machine())
    assert captured.step_ms == free.step_ms
    assert "host" not in captured.to_text()


# --- on machines that are as plausible -----------------------------------------------------------


def by_bytes(ms: float, latency_ms: float = 0.0) -> Machine:
    """Return a machine where a product takes 1, a gather its latency and ``ms`` a parameter."""
    nbytes = 4 * DIM * DIM * 3 // 2
    series = [(n, latency_ms + n / nbytes * ms) for n in (1, nbytes, 64 * nbytes)]
    return replace(machine(), collectives={("all_gather", 2): series})


@pytest.mark.parametrize(
    ("ms", "latency_ms", "sizes"),
    [(0.003, 0.0, [8]), (0.015, 0.0, []), (0.01, 0.85, [8])],
    ids=["fewest of equal losses", "best", "best with slow collectives"],
)
def test_the_plan_that_loses_least_on_plausible_machines(ms, latency_ms, sizes):
    # The first bucket is exposed. Single gathers of 0.86 are hidden by products of 1, and would not
    # be if they took 1.7 times as long.
    gm = forward_graph(8)
    plan, report = choose_caps(gm.graph, Overlap(), caps_mb=RUNGS, machine=by_bytes(ms, latency_ms))
    assert [len(bucket.members) for bucket in plan.buckets] == sizes
    best_ms, chosen_ms = (8.0 + latency_ms + n * ms for n in (1, max([1, *sizes])))
    assert report.chosen.step_ms == pytest.approx(chosen_ms, rel=1e-5)
    assert min(t.step_ms for t in report.tried) == pytest.approx(best_ms, rel=1e-5)
    assert {u.closed_by for u in plan.unmerged} <= {"search", "end"}


def test_a_search_that_merges_nothing_warns_of_nothing(recwarn):
    one = BucketAndSchedule(Overlap(), caps_mb=RUNGS, eligible=bool, machine=by_bytes(0.3))
    report = one(forward_graph(8)).graphs[-1]
    assert not report.buckets
    assert not [w for w in recwarn if issubclass(w.category, NotBucketedWarning)]


# --- bounds out of reach -------------------------------------------------------------------------


@pytest.fixture
def passes(monkeypatch):
    made: list[ListScheduler] = []
    run = ListScheduler.run
    monkeypatch.setattr(ListScheduler, "run", lambda self: made.append(self) or run(self))
    return made


def logits_first() -> fx.Graph:
    """Make a graph that begins with the logits, so that no order has a lower peak."""
    b = Trainer()
    shards = [b.matrix(DIM // 2) for _ in range(24)]
    x = b.mm(b.matrix(), b.shaped((DIM, 64 * DIM)))
    x = b.mm(x, b.shaped((64 * DIM, DIM)))
    for i, shard in enumerate(shards):
        x = b.mm(x, b.start("all_gather", shard, f"layers.{i}.w"))
    return b.finish([x]).graph


def test_a_bound_out_of_reach_costs_no_search(passes):
    graph, found = logits_first(), []
    for ratio in (10, 0.7):
        passes.clear()
        _, report = choose_caps(
            graph, [Overlap(), PeakMemory(ratio=ratio)], caps_mb=RUNGS, machine=machine(0.8)
        )
        found.append((sum(len(one.order) for one in passes), report.chosen.step_ms))
    (free, step), (bounded, bounded_step) = found
    assert bounded_step < 1.01 * step
    assert bounded <= 6 * free  # nodes placed; free is at its lower bound in one pass a plan


@pytest.mark.parametrize("seed", range(4))
def test_no_order_has_less_live_than_the_least(seed):
    model = model_of(random_training(seed).graph, machine(0.3))
    sorts = [Options(window=w, depth=w, deadlines=w < 9) for w in (0, 1, 4, 16)]
    orders = [range(len(model)), *(list_schedule(model, sort) for sort in sorts)]
    profiles = [dict(zip(o, model.liveness.profile(o), strict=True)) for o in orders]
    for i in range(len(model)):
        assert 0 <= model.least_bytes_at(i) <= min(live[i] for live in profiles)


def test_plans_far_above_a_bound_cost_little_and_are_not_missed(passes):
    """Buckets of several parameters hold more than the bound in any order."""
    b = Trainer()
    x = b.matrix()
    for i, shard in enumerate([b.matrix(DIM // 2) for _ in range(24)]):
        x = b.mm(x, b.start("all_gather", shard, f"layers.{i}.w"))
    graph = b.finish([x]).graph
    placed = {"together": 0, "alone": 0}
    for ratio in (0.7, 1.0, 1.3, 2.0):
        found = []
        for caps in (RUNGS, *((cap,) for cap in RUNGS)):
            passes.clear()
            bounds = [Overlap(), PeakMemory(ratio=ratio)]
            _, report = choose_caps(graph, bounds, caps_mb=caps, machine=machine(0.8))
            way = "together" if caps is RUNGS else "alone"
            placed[way] += sum(len(one.order) for one in passes)
            found.append(round(report.chosen.misses, 9))
        assert found[0] <= min(found[1:])
    assert placed["together"] < placed["alone"]


@pytest.mark.parametrize("seed", range(6))
def test_a_bound_out_of_reach_is_missed_by_as_little_as_in_any_order_to_try(seed):
    """The search gives a bound up once some orders show that none has a lower peak."""
    graph = random_training(seed).graph
    model, peak = model_of(graph, machine(0.3)), GraphAnalysis(graph).peak_bytes
    for ratio in (0.5, 0.9, 1.0):
        bounds = Bounds(model, [Overlap(), PeakMemory(ratio=ratio)], peak)
        sorts = [free for p in bounds.policies for _, free in p.candidates(bounds.case, False)]
        peaks = [model.liveness.peak(list_schedule(model, bounds.ask(free))) for free in sorts]
        reached = schedule_model(model, bounds.policies, peak).report.peak_bytes[1]
        assert reached <= max(bounds.limit_bytes, min(peaks))


def test_an_order_by_longest_paths_may_keep_a_bound_alone():
    """The head's gradient comes first in the graph, and makes each order in its sequence peak."""
    b = Trainer()
    x, saved = b.matrix(), []
    for _ in range(8):
        x = b.mm(x, b.matrix())
        saved.append(x)
    logits = b.mm(x, b.shaped((DIM, 4 * DIM)))
    gradient = b.mm(x, logits)
    x = b.mm(logits, b.shaped((4 * DIM, DIM)))
    for one in reversed(saved):
        x = b.mm(x, one)
    graph = b.finish([x, gradient]).graph
    model, peak = model_of(graph, machine(0.3)), GraphAnalysis(graph).peak_bytes
    least = model.liveness.peak(plain_schedule(model))
    assert least < 0.92 * peak
    report = schedule_model(model, [Overlap(), PeakMemory(ratio=0.92)], peak).report
    assert (report.misses, report.peak_bytes[1]) == (0.0, least)
    report = schedule_model(model, [Overlap(), PeakMemory(ratio=0.8)], peak).report
    assert report.peak_bytes[1] == least
