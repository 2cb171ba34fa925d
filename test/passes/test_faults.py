"""Unusual graphs, faulty hooks and bad arguments: a right result, or an error and the same graph."""

import functools
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import (
    C10D,
    all_gather,
    all_reduce,
    assert_same,
    reduce_scatter,
    run_all_ranks,
    trace,
)
from examples import by_night
from random_graphs import odd_graph
from sharded_models import mesh_for
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

import torch_ext_bucketing as teb
from torch_ext_bucketing.bucketing import pack as merging
from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import ByCap, ByUnit
from torch_ext_bucketing.fsdp.tagging import tag_joint_graph
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.edits import Snapshot
from torch_ext_bucketing.graph.nodes import KINDS, Tag, kind_of, set_tag
from torch_ext_bucketing.passes.add_by_unit import AddByUnit
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.passes.combine_uses import CombineUses, MergeAmax
from torch_ext_bucketing.passes.reduce_scatter_first import ReduceScatterFirst
from torch_ext_bucketing.planner.schedule.model import peak_bytes
from torch_ext_bucketing.planner.scheduling import Estimate, schedule
from torch_ext_bucketing.runtime.agreement import agree

ODD: dict[str, Callable[[], fx.GraphModule]] = {}
CAN_RUN: set[str] = set()
"""Graphs that ``run_all_ranks`` can run on two ranks."""


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gather_start(x: torch.Tensor) -> torch.Tensor:
    return C10D.all_gather_into_tensor(x, world().size(), world().group_name)


def wait(start: torch.Tensor) -> torch.Tensor:
    return C10D.wait_tensor(start)


def tagged(gm: fx.GraphModule) -> fx.GraphModule:
    """Tag each collective with a parameter of its own in module ``m``."""
    for i, node in enumerate(gm.graph.nodes):
        kind = kind_of(node)
        if kind is not None:
            set_tag(node, Tag(kind, (f"m.w{i}",)))
    return gm


def odd(*shapes: tuple[int, ...], runs: bool = True) -> Callable[[Any], Any]:
    """Register the graph that a function traces to on inputs of these shapes."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        ODD[fn.__name__] = lambda: trace(fn, *map(torch.zeros, shapes))
        if runs:
            CAN_RUN.add(fn.__name__)
        return fn

    return register


def built(fn: Callable[[], fx.GraphModule]) -> Callable[[], fx.GraphModule]:
    ODD[fn.__name__] = fn
    return fn


def two_gathers() -> fx.GraphModule:
    return trace(lambda a, b: [all_gather(a, world()), all_gather(b, world())], *torch.zeros(2, 4))


@odd((4,), (4,), (4,))
def two_waits_on_a_start(a, b, c):
    start = gather_start(a)
    return [wait(start) + 1, wait(start) * 2, all_gather(b, world()), all_gather(c, world())]


@odd((4,), (4,), (4,))
def no_wait(a, b, c):
    return [gather_start(a), all_gather(b, world()), all_gather(c, world())]


@odd((), (), (4,), (4,), runs=False)
def scalars_gathered(*xs):
    return [all_gather(x, world()) for x in xs]


@odd((3,), (4,), (5, 2), (2, 2), runs=False)
def rows_that_can_not_be_divided(*xs):
    return [reduce_scatter(x, world()) for x in xs]


@odd((4,), (4,))
def reduced_in_place(p, q):
    x = p + 1
    a = wait(C10D.all_reduce_(x, "sum", world().group_name))
    return [a, all_reduce(x, world()), all_reduce(q, world())]


@built
def one_rank() -> fx.GraphModule:
    alone = dist.new_group([0])

    def fn(*xs):
        kinds = (all_gather, reduce_scatter, all_reduce)
        return [collective(x, alone) for collective in kinds for x in xs]

    return trace(fn, torch.zeros(3), torch.zeros(5, 2))


@built
def unhinted_sizes() -> fx.GraphModule:
    """Trace two buckets that can be merged, and one of sizes that depend on data."""

    def fn(x, y, n):
        rows = n.nonzero().shape[0]
        torch._check(rows >= 2)
        known = [all_gather(t + 1, world()) for t in (x, y)]
        x, y = x[:1].expand(rows, 3), y[:1].expand(rows, 3)
        reduced = [reduce_scatter(torch.cat([t, t]), world()) for t in (x, y)]
        return known + reduced + [all_gather(t.to(torch.float64), world()) for t in (x, y)]

    return make_fx(fn, tracing_mode="symbolic")(torch.zeros(6, 3), torch.zeros(6, 3), torch.ones(4))


@built
def empty() -> fx.GraphModule:
    return fx.GraphModule({}, fx.Graph())


@built
def no_output() -> fx.GraphModule:
    gm = two_gathers()
    gm.graph.erase_node(gm.graph.output_node())
    return gm


@built
def no_metadata() -> fx.GraphModule:
    gm = two_gathers()
    for node in gm.graph.nodes:
        node.meta.clear()
    return gm


@built
def inputs_without_metadata() -> fx.GraphModule:
    gm = two_gathers()
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.clear()
    return gm


@built
def arguments_by_keyword() -> fx.GraphModule:
    def fn(a, b):
        kinds = (all_gather, reduce_scatter, all_reduce)
        return [collective(x, world()) for collective in kinds for x in (a, b)]

    gm = trace(fn, torch.zeros(4), torch.zeros(4))
    for node in gm.graph.nodes:
        if kind_of(node) is not None or node.target is C10D.wait_tensor.default:
            names = [argument.name for argument in node.target._schema.arguments]
            node.args, node.kwargs = (), dict(zip(names, node.args, strict=False))
    return gm


@built
def modules_methods_and_constants() -> fx.GraphModule:
    gm = two_gathers()
    gm.relu = torch.nn.ReLU()
    gm.register_buffer("constant", torch.zeros(4))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        x = gm.graph.call_module("relu", (output.args[0][0],))
        y = gm.graph.call_method("add", (x, gm.graph.get_attr("constant")))
    output.args = ([*output.args[0], y],)
    gm.recompile()
    return gm


@built
def out_of_order() -> fx.GraphModule:
    gm = two_gathers()
    start = next(n for n in gm.graph.nodes if kind_of(n) is not None)
    start.append(next(iter(gm.graph.nodes)))
    return gm


pytestmark = pytest.mark.usefixtures("two_ranks")
KIND_NAMES = tuple(KINDS)


def described(gm: fx.GraphModule) -> list[Any]:
    """Describe each node: call, arguments, users, value and other metadata."""
    return [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), [u.name for u in n.users])
        + (id(n.meta.get("val")), sorted(n.meta), str(n.meta.get("custom")))
        for n in gm.graph.nodes
    ]


def run_pass(p: GraphPass, gm: fx.GraphModule) -> Any:
    report = p(gm)
    return [report, *report.schedules, *report.graphs][-1]


def by_cap(gm: fx.GraphModule, cap_mb: Any = 1.0, **options: Any) -> Any:
    return run_pass(teb.BucketByCap(cap_mb, **{"kinds": KIND_NAMES, **options}), gm)


BUCKETERS: dict[str, Callable[..., Any]] = {
    "BucketByUnit": lambda gm, **k: run_pass(teb.BucketByUnit([["m"]], KIND_NAMES, **k), gm),
    "BucketByCap": by_cap,
    "BucketAndSchedule": lambda gm, **k: run_pass(
        teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(gib=1)], **{"kinds": KIND_NAMES, **k}),
        gm,
    ),
}
FUNCTIONS: dict[str, Callable[[fx.GraphModule], Any]] = {
    **BUCKETERS,
    "torch's cap": lambda gm: by_cap(gm, None, eligible=bool),
    "Overlap": lambda gm: schedule(gm, teb.Overlap()),
    "MaxComputeRun": lambda gm: schedule(gm, teb.MaxComputeRun(1)),
    "PeakMemory": lambda gm: schedule(gm, teb.PeakMemory(ratio=0.5)),
    "Schedule": lambda gm: run_pass(teb.Schedule(teb.Overlap()), gm),
    "peak_bytes": peak_bytes,
    "tag_joint_graph": tag_joint_graph,
    "TagParameters": lambda gm: run_pass(teb.hooks.TagParameters(), gm),
    "ReshardAfterForward": lambda gm: run_pass(teb.ReshardAfterForward(), gm),
    "AddByUnit": lambda gm: run_pass(AddByUnit(Blocks(), ["layers.0", "norm"]), gm),
    "CombineUses": lambda gm: run_pass(CombineUses(), gm),
    "MergeAmax": lambda gm: run_pass(MergeAmax(), gm),
    "ReduceScatterFirst": lambda gm: run_pass(ReduceScatterFirst(), gm),
    "FixedOrderReduce": lambda gm: run_pass(teb.FixedOrderReduce(), gm),
    "Estimate": lambda gm: run_pass(Estimate(), gm),
    "SeparateGroups": lambda gm: run_pass(teb.SeparateGroups(init_device_mesh("cpu", (2,))), gm),
    "agree": agree,
}
PLANNERS = (*BUCKETERS, "torch's cap", "peak_bytes", "Estimate", "FixedOrderReduce")
# Errors of the functions in PLANNERS; scheduling warns with the same text.
RAISES = {
    "out_of_order": (
        (ValueError, RuntimeError),
        "stands before its input|before it has been defined",
    ),
}


def inputs_of(gm: fx.GraphModule) -> list[list[torch.Tensor]]:
    values = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return [
        [
            (torch.arange(v.numel()) + 3 * rank + i).to(v.dtype).view(v.shape)
            for i, v in enumerate(values)
        ]
        for rank in range(2)
    ]


# -- odd graphs -----------------------------------------------------------------------------------


def check_result(gm: fx.GraphModule, report: Any, expected: list[list[torch.Tensor]]) -> None:
    """Check that the graph is sound, computes ``expected``, and that its report can be shown."""
    gm.graph.lint()
    if expected:
        assert_same(run_all_ranks(gm, inputs_of(gm)), expected)
    for method in ("to_text", "summary"):
        if hasattr(report, method):
            assert isinstance(getattr(report, method)(), str)
    if hasattr(report, "to_json"):
        json.loads(report.to_json())


@pytest.mark.parametrize("name", ODD)
def test_odd_graphs(name):
    gm = tagged(ODD[name]())
    expected = run_all_ranks(gm, inputs_of(gm)) if name in CAN_RUN else []
    for function in FUNCTIONS:
        try:
            check_odd(name, function, expected)
        except Exception as error:
            error.add_note(f"check_odd({name!r}, {function!r}, ...)")
            raise


def check_odd(name: str, function: str, expected: list[list[torch.Tensor]]) -> None:
    """Check one function on one odd graph: a right result, or the graph is as it was."""
    gm = tagged(ODD[name]())
    before = described(gm)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if name in RAISES and function in PLANNERS:
            error, match = RAISES[name]
            with pytest.raises(error, match=match):
                FUNCTIONS[function](gm)
            assert described(gm) == before
            return
        report = FUNCTIONS[function](gm)
    said = [str(w.message) for w in warned if w.category is teb.errors.BoundNotKeptWarning]
    if name in RAISES:
        assert all(re.search(RAISES[name][1], text) for text in said)
        if function != "ReshardAfterForward":  # it only marks nodes
            assert described(gm) == before
        return
    assert not any("keeps its order" in text for text in said), said
    check_result(gm, report, expected)


def results_of(gm: fx.GraphModule) -> list[list[torch.Tensor]]:
    try:
        return run_all_ranks(gm, inputs_of(gm))
    except RuntimeError:  # a copy between overlapping tensors
        return []


def check_random(function: str, seed: int, expected: list[list[torch.Tensor]]) -> bool:
    """Check one random graph: the function succeeds, or it raises and changes nothing."""
    gm, _ = odd_graph(seed, ("0", world().group_name))
    before = described(gm)
    try:
        gm.graph.lint()
        ordered = True
    except RuntimeError:
        ordered = False
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            report = FUNCTIONS[function](gm)
        except (TypeError, ValueError, RuntimeError):
            assert described(gm) == before, "it raised and changed the graph"
            return False
    if ordered:
        assert not [w for w in warned if "keeps its order" in str(w.message)]
        check_result(gm, report, expected)
    return True


def test_random_odd_graphs():
    done, seeds = Counter[str](), range(20_000, 20_040 if by_night() else 20_016)
    for seed in seeds:
        gm, runs = odd_graph(seed, ("0", world().group_name))
        expected = results_of(gm) if runs else []
        for function in FUNCTIONS:
            try:
                done[function] += check_random(function, seed, expected)
            except Exception as error:
                error.add_note(f"check_random({function!r}, {seed}, ...)")
                raise
    assert min(done[function] for function in FUNCTIONS) > 0.7 * len(seeds)


def why_left(name: str) -> set[str]:
    report = by_cap(tagged(ODD[name]()))
    return {left.reason for left in report.ineligible}


def test_odd_collectives_are_left_alone_with_a_reason():
    assert why_left("two_waits_on_a_start") == {
        "nodes other than one wait read its result",
    }
    assert why_left("no_wait") == why_left("two_waits_on_a_start")
    assert why_left("scalars_gathered") == {"its input has no dimension"}
    assert why_left("rows_that_can_not_be_divided") == {
        "its input's 3 rows can't be divided among 2 ranks",
        "its input's 5 rows can't be divided among 2 ranks",
    }
    assert why_left("reduced_in_place") == {"it works in place"}
    assert why_left("no_metadata") == {"its shape is unknown (no meta['val'])"}
    assert why_left("inputs_without_metadata") == {
        "the shape of its input is unknown (no meta['val'])"
    }
    assert why_left("unhinted_sizes") == {"its size depends on data"}
    assert why_left("arguments_by_keyword") == {"its arguments are given by keyword"}


def test_a_graph_without_output_can_be_scheduled():
    gm = tagged(ODD["no_output"]())
    names = sorted(n.name for n in gm.graph.nodes)
    report = schedule(gm, teb.Overlap(depth=2))
    assert report.order
    assert sorted(n.name for n in gm.graph.nodes) == names
    gm.graph.lint()


def test_one_gather_that_can_not_be_merged_costs_no_other_bucket():
    """torch's merging fails at scalars; gathers with dimensions still merge."""
    report = by_cap(tagged(ODD["scalars_gathered"]()))
    assert [len(b.members) for b in report.buckets] == [2]


# -- undoing changes -----------------------------------------------------------------------------------


def gathers_and_scatters() -> fx.GraphModule:
    """Copy a graph of two units, each with a bucket of all-gathers and one of reduce-scatters."""
    traced, graph, new = two_units(), fx.Graph(), dict[fx.Node, fx.Node]()
    for node in traced.graph.nodes:
        new[node] = graph.node_copy(node, new.__getitem__)
    return fx.GraphModule(traced, graph)


@functools.cache
def two_units() -> fx.GraphModule:
    def step(*xs):
        full = [all_gather(x, world()) for x in xs]
        return [reduce_scatter(f * 2, world()) for f in full]

    gm = trace(step, *(torch.zeros(n) for n in (2, 4, 6, 8)))
    for start in gm.graph.nodes:
        kind = kind_of(start)
        if kind is not None:
            unit = "ab"[start.all_input_nodes[0].meta["val"].numel() > (4 if "gat" in kind else 8)]
            set_tag(start, Tag(kind, (f"m.{unit}.{start.name}",)))
    return gm


UNITS = [["m.a"], ["m.b"]]


def test_a_failure_while_merging_leaves_the_graph_as_it_was(monkeypatch):
    gm = gathers_and_scatters()
    before, nodes = described(gm), list(gm.graph.nodes)
    plan = ByUnit(Units(UNITS)).plan(GraphAnalysis(gm.graph))
    assert len(plan.buckets) == 4
    pack, calls = merging.pack, []

    def fails_late(*args, **kwargs):
        calls.append(args)
        if len(calls) == 4:
            raise MemoryError("no more")
        return pack(*args, **kwargs)

    monkeypatch.setattr(merging, "pack", fails_late)
    with pytest.raises(MemoryError, match="no more"):
        apply_plan(GraphAnalysis(gm.graph), plan)
    assert described(gm) == before
    assert [n.op for n in gm.graph.nodes] == [n.op for n in nodes]
    gm.graph.lint()
    gm.recompile()
    monkeypatch.undo()
    # The same plan works after the failure.
    assert (
        len(apply_plan(GraphAnalysis(gm.graph), ByUnit(Units(UNITS)).plan(GraphAnalysis(gm.graph))))
        == 4
    )
    gm.graph.lint()


CHANGES: dict[str, Callable[[fx.Graph], None]] = {
    "a node more": lambda g: _insert(g),
    "a node less": lambda g: _erase(g),
    "another place": lambda g: g.output_node().prepend(next(n for n in g.nodes if kind_of(n))),
    "other arguments": lambda g: _swap(g),
    "another target": lambda g: setattr(_sum(g), "target", torch.ops.aten.sub.Tensor),
    "another name": lambda g: setattr(_sum(g), "name", "stranger"),
}


def _insert(graph: fx.Graph) -> None:
    first = next(n for n in graph.nodes if kind_of(n))
    with graph.inserting_before(first):
        new = graph.call_function(torch.ops.aten.neg.default, (first.args[0],))
    first.replace_input_with(first.args[0], new)


def _sum(graph: fx.Graph) -> fx.Node:
    return next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor)


def _erase(graph: fx.Graph) -> None:
    node = _sum(graph)
    node.replace_all_uses_with(node.args[0])
    graph.erase_node(node)


def _swap(graph: fx.Graph) -> None:
    first, second = graph.find_nodes(op="placeholder")[:2]
    (user,) = second.users
    user.replace_input_with(second, first)


@pytest.mark.parametrize("change", CHANGES)
def test_snapshots_see_and_undo_every_change(change):
    gm = gathers_and_scatters()
    before = described(gm)
    snapshot = Snapshot(gm.graph)
    assert snapshot.difference() == ""
    CHANGES[change](gm.graph)
    assert snapshot.difference()
    assert described(gm) != before
    snapshot.restore()
    assert described(gm) == before
    gm.graph.lint()


@dataclass(frozen=True)
class Fails(GraphPass):
    """A pass of a user that fails halfway."""

    stage = "forward_backward"

    def run(self, graph: fx.Graph, compilation: Any) -> None:
        for change in CHANGES.values():
            change(graph)
        raise KeyError("halfway")


def test_a_pass_that_fails_leaves_the_graph_as_it_was():
    gm = gathers_and_scatters()
    before = described(gm)
    with pytest.raises(KeyError, match="halfway"):
        Fails()(gm)
    assert described(gm) == before


# -- hooks: payload order -------------------------------------------------------------------------


def collective(start: fx.Node) -> int:
    dist.all_reduce(torch.ones(1))
    return 0


def functional(start: fx.Node) -> int:
    return int(C10D.wait_tensor(C10D.all_reduce(torch.ones(1), "sum", "0")))


def once(name: str) -> Callable[[fx.Node], int]:
    """Make a payload key that changes the graph in its first call."""
    done: set[fx.Graph] = set()

    def key(start: fx.Node) -> int:
        if start.graph not in done:
            done.add(start.graph)
            CHANGES[name](start.graph)
        return 0

    return key


BAD_KEYS: dict[str, tuple[Callable[[fx.Node], Any], str]] = {
    "raises": (lambda n: {}["nothing"], "failed at .*call_function"),
    "raises late": (lambda n: 1 / (n.target is C10D.all_gather_into_tensor.default), "failed at"),
    "NaN": (lambda n: math.nan, "(can't be sorted|with keys).*nan"),
    "mixed types": (
        lambda n: n.name if n.name[-1].isdigit() else 1,
        "(can't be sorted: .*: 1|with keys)",
    ),
    "complex": (lambda n: 1j, "(can't be sorted|with keys)"),
    "no order": (lambda n: object(), "(can't be sorted|with keys)"),
    "communicates": (collective, "failed at"),
    "communicates in a graph": (functional, "failed at"),
    **{name: (once(name), r"changed the graph \(.*was restored") for name in CHANGES},
}
HARMLESS_KEYS: dict[str, Callable[[fx.Node], Any]] = {
    "None": lambda n: None,
    "some None": lambda n: None if n.name[-1].isdigit() else 1,
    "huge": lambda n: 10**400,
    "infinite": lambda n: math.inf,
    "writes metadata": lambda n: n.meta.__setitem__("seen", True),
}


def refused(
    call: Callable[[fx.GraphModule], Any],
    error: type[Exception],
    match: str,
    same_nodes: bool = True,
) -> Exception:
    """Check that a call raises and leaves the graph unchanged; return the error."""
    gm = gathers_and_scatters()
    before, nodes = described(gm), list(gm.graph.nodes)
    with pytest.raises(error, match=match) as caught:
        call(gm)
    assert described(gm) == before
    assert not same_nodes or list(gm.graph.nodes) == nodes
    return caught.value


@pytest.mark.parametrize("road", BUCKETERS)
def test_bad_payload_keys(road):
    for bad, (key, match) in BAD_KEYS.items():
        call = partial(BUCKETERS[road], payload_order=key)
        found = refused(call, RuntimeError, f"payload_order.*{match}", bad not in CHANGES)
        communicates = bad.startswith("communicates")
        assert ("called the collective" in str(found.__cause__)) == communicates, bad


@pytest.mark.parametrize("road", BUCKETERS)
def test_harmless_payload_keys_keep_graph_order(road):
    plain = gathers_and_scatters()
    BUCKETERS[road](plain)
    for harmless, key in HARMLESS_KEYS.items():
        hooked = gathers_and_scatters()
        BUCKETERS[road](hooked, payload_order=key)
        assert str(hooked.graph) == str(plain.graph), harmless


def test_choosing_caps_asks_the_key_about_the_graph_itself():
    gm = gathers_and_scatters()
    rank = {n: -i for i, n in enumerate(gm.graph.nodes)}
    report = BUCKETERS["BucketAndSchedule"](gm, payload_order=rank.__getitem__)
    names = [[m.fqns[0] for m in b.members] for b in report.buckets]
    assert names
    assert all(len(n) > 1 for n in names)


# -- hooks: group filter, caps, eligibility -------------------------------------------------------


CAP_ROADS = {name: f for name, f in BUCKETERS.items() if name != "BucketByUnit"}


def but_for_order(road: str, gm: fx.GraphModule) -> list[Any]:
    """Describe each node, by name where the pass may order a graph without buckets, too."""
    return sorted(described(gm)) if road == "BucketAndSchedule" else described(gm)


@pytest.mark.parametrize("road", CAP_ROADS)
def test_groups_that_a_graph_has_not(road):
    gm = gathers_and_scatters()
    before = but_for_order(road, gm)
    for groups in ((), ["7"], list(map(str, range(1, 10**5)))):
        assert CAP_ROADS[road](gm, groups=groups).buckets == ()
        assert but_for_order(road, gm) == before


BAD_CAPS: dict[str, tuple[Any, type[Exception], str]] = {
    "raises": (lambda i: 1 / 0, RuntimeError, r"cap_mb failed for bucket 0 of the all_gather"),
    "raises late": (lambda i: 1 / (1 - i) * 1e-6, RuntimeError, r"cap_mb failed for bucket 1"),
    "NaN": (lambda i: math.nan, ValueError, "the cap of bucket 0 must be a positive"),
    "None": (lambda i: None, ValueError, "the cap of bucket 0"),
    "a string": (lambda i: "25", ValueError, "the cap of bucket 0"),
    "infinite": (lambda i: math.inf, ValueError, "the cap of bucket 0"),
    "True": (lambda i: True, ValueError, "the cap of bucket 0"),
    "collective": (lambda i: collective(None), RuntimeError, "cap_mb failed"),
    "in a mapping": ({"0": lambda i: -1.0}, ValueError, "the cap of bucket 0"),
    "NaN in a mapping": ({("0", "all_gather"): math.nan}, ValueError, "cap_mb of group"),
    "zero": (0, ValueError, "cap_mb must be a positive"),
    "text": ("25", ValueError, "cap_mb must be a positive"),
    "a list": ([25.0], ValueError, "cap_mb must be a positive"),
}


@pytest.mark.parametrize("bad", BAD_CAPS)
def test_bad_caps(bad):
    cap, error, match = BAD_CAPS[bad]
    refused(lambda gm: by_cap(gm, cap), error, match)
    refused(lambda gm: ByCap(cap).plan(GraphAnalysis(gm.graph)), error, match)


@pytest.mark.parametrize("cap", [1e308, 10**400, 1e-300, {"unheard of": 1.0}, {}])
def test_caps_of_any_size(cap):
    gm = gathers_and_scatters()
    report = by_cap(gm, cap)
    assert bool(report.buckets) == (cap != 1e-300)
    gm.graph.lint()


@pytest.mark.parametrize("road", CAP_ROADS)
def test_eligibility_that_fails(road):
    for eligible, text in (
        (lambda n: {}[n], r"failed at .*all_gather_into_tensor"),
        (lambda n: torch.ones(2), "failed at"),  # has no truth value
        (lambda n: _insert(n.graph) or True, "changed the graph"),
    ):
        call = partial(CAP_ROADS[road], eligible=eligible)
        refused(call, RuntimeError, f"eligible {text}", same_nodes=False)
    gm = gathers_and_scatters()
    before = but_for_order(road, gm)
    assert CAP_ROADS[road](gm, eligible=lambda n: None).buckets == ()
    assert but_for_order(road, gm) == before


# -- plans ----------------------------------------------------------------------------------------


class Blocks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.norm = torch.nn.LayerNorm(4)


BAD_CALLS: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    ValueError: [
        ("needs a bound: memory=PeakMemory", lambda: teb.ReshardAfterForward("auto")),
        (
            "memory= belongs to 'auto', got True",
            lambda: teb.ReshardAfterForward(keep=["a"], memory=teb.PeakMemory(gib=1)),
        ),
        ("a positive number", lambda: teb.PeakMemory(ratio=math.nan)),
        ("either gib or ratio", lambda: teb.PeakMemory()),
        ("either gib or ratio", lambda: teb.PeakMemory(host_gib=1)),
        ("must be a positive number", lambda: teb.PeakMemory(gib=1, host_gib=0)),
        (
            "host_gib is for activations: give activations=True",
            lambda: teb.ReshardAfterForward("auto", memory=teb.PeakMemory(gib=1, host_gib=1)),
        ),
        ("max_consecutive", lambda: teb.MaxComputeRun(0)),
        ("two Overlap", lambda: teb.Schedule([teb.Overlap(), teb.Overlap(depth=2)])),
        ("depth", lambda: teb.Overlap(depth=-1)),
        ("no measurement", lambda: teb.Machine(collectives={("all_gather", 2): ()})),
        ("kernel_ms must be a time", lambda: teb.Machine(kernel_ms=math.nan)),
        (
            r"\(0, 1.0\) is not \(bytes above 0, ms\)",
            lambda: teb.Machine(collectives={("all_gather", 2): [(0, 1.0)]}),
        ),
        ("size_hints must be", lambda: teb.backend("aot_eager", size_hints=-1)),
        ("kinds must be some of", lambda: teb.BucketByUnit([["a"]], kinds=("gather",))),
        ("caps_mb is empty", lambda: teb.BucketAndSchedule([], caps_mb=())),
        (
            "each of caps_mb must be a positive number",
            lambda: teb.BucketAndSchedule([], caps_mb=("x",)),
        ),
    ],
    TypeError: [
        ("or 'auto', got 'head'", lambda: teb.ReshardAfterForward("head")),
        (r"keep=\[\.\.\.\]", lambda: teb.ReshardAfterForward(["head"])),
        ("must be a list of FQNs, got 'head'", lambda: teb.ReshardAfterForward(keep="head")),
        ("groups must be a list of names", lambda: teb.BucketByCap(groups="0")),
        ("groups must be names", lambda: teb.BucketByCap(groups=["0", 1])),
        ("eligibel", lambda: teb.BucketAndSchedule([], eligibel="tag")),
        ("is not a pass", lambda: teb.backend("aot_eager", [print])),
    ],
    RuntimeError: [("nothing has been compiled", lambda: teb.backend("aot_eager").last_report())],
}
"""Calls with the text of their errors; plans and orders have tests of their own."""


@pytest.mark.parametrize(
    ("error", "match", "call"), [(e, *row) for e, rows in BAD_CALLS.items() for row in rows]
)
def test_bad_calls(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_units_that_no_parameter_has_are_no_units():
    """A misspelt unit leaves parameters uncovered, and a warning names these."""
    gm = gathers_and_scatters()
    before = described(gm)
    buckets = teb.BucketByUnit([["m.c"], ["m.b.nothing"]])
    with pytest.warns(UserWarning, match="8 parameter.s. are in no unit.*m.a.all_gather"):
        report = run_pass(buckets, gm)
    assert described(gm) == before
    assert len(report.uncovered) == 8


def test_caps_by_group_and_by_kind_can_be_mixed():
    pass_ = teb.BucketByCap({"0": 1.0, ("0", "all_gather"): 2.0})
    assert pass_.uuid() == teb.BucketByCap({("0", "all_gather"): 2.0, "0": 1.0}).uuid()
    report = run_pass(pass_, gathers_and_scatters())
    assert {(b.kind, b.cap_bytes) for b in report.buckets} == {
        ("all_gather", 2 * 2**20),
        ("reduce_scatter", 2**20),
    }


@pytest.mark.parametrize("policy", [teb.PeakMemory(gib=1e308), teb.PeakMemory(ratio=1e308)])
def test_memory_bounds_of_any_size(policy):
    gm = gathers_and_scatters()
    assert schedule(gm, policy).misses == 0
    small = teb.PeakMemory(gib=1e-300)
    with pytest.warns(
        teb.errors.BoundNotKeptWarning,
        match=r"PeakMemory: (\S+ \S+) live at .* above the bound of (?!\1;)",
    ):
        assert schedule(gm, small).misses > 0


@pytest.mark.parametrize("mode", ["fully_shard", "hybrid_shard"])
def test_scalars_are_not_sharded_and_nothing_else_is_then(mode):
    model = Blocks()
    model.scale = torch.nn.Parameter(torch.tensor(1.0))
    names = [n for n, _ in model.named_parameters()]
    mesh = mesh_for(mode, 2)
    with pytest.raises(ValueError, match="Change scale to a 1D tensor"):
        teb.data_parallel(model, mesh, mode)
    for bad in ({"param_dtype": "bf16"}, {"reduce_dtype": 16}):
        with pytest.raises(TypeError, match="_dtype must be a dtype or None, got"):
            teb.data_parallel(model, mesh, mode, **bad)
    with pytest.raises(TypeError, match="must be a DeviceMesh"):
        teb.data_parallel(model, None, mode)
    assert [n for n, _ in model.named_parameters()] == names
