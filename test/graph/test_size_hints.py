"""Sizes that depend on data: their numbers in estimates, and passes on such graphs."""

import itertools
import json
import operator
import random
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from collective_graphs import C10D, all_gather, assert_same, run_all_ranks, trace
from hypothesis import example, given, settings
from hypothesis import strategies as st
from marks import at_night
from random_graphs import Builder, choose_caps
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_ext_bucketing as teb
from torch_ext_bucketing.bucketing.plan import ByCap
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import Tag, is_collective, set_tag
from torch_ext_bucketing.graph.sizes import DEFAULT, SizeHints
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.planner.cost.cost import Costs, Machine
from torch_ext_bucketing.planner.schedule.model import peak_bytes
from torch_ext_bucketing.planner.schedule.policy import Policy
from torch_ext_bucketing.planner.scheduling import schedule

pytestmark = pytest.mark.torch

_aten = torch.ops.aten


class Experts(nn.Module):
    """Each expert computes the tokens that the router sends it, without dropping or padding."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
            for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.router(x).softmax(-1)
        chosen = weight.argmax(-1)
        out = x
        for i, expert in enumerate(self.experts):
            mine = torch.nonzero(chosen == i).squeeze(-1)
            out = out.index_add(0, mine, expert(x[mine]) * weight[mine, i : i + 1])
        return out


class MoE(nn.Module):
    def __init__(self, dim: int = 8, vocabulary: int = 12, experts: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([Experts(dim, experts)])
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return teb.data_parallel(MoE(), mesh)


@pytest.fixture
def whole_graph():
    """Trace ``nonzero`` without a graph break."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


PASSES = {
    "peak": lambda model: [
        CombineUses(),
        teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(gib=1), teb.MaxComputeRun(100)]),
    ],
    "parity": lambda model: teb.recipe(model, "parity"),
}


@pytest.mark.parametrize(
    "passes",
    [at_night(n) if n == "parity" else n for n in PASSES],
)
def test_a_dropless_mixture_of_experts_is_bucketed_and_scheduled(passes, fake_world, whole_graph):
    model = sharded()
    backend = teb.backend("aot_eager", passes=PASSES[passes](model), size_hints=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", teb.errors.BoundNotKeptWarning)
        torch.compile(model, backend=backend, fullgraph=True)(torch.arange(12)).sum().backward()
    report = backend.last_report()
    assert len(report.schedules) == 2
    for scheduled in report.schedules:
        assert scheduled.order
        assert scheduled.size_hints == ("sizes that depend on data, as given: 5 for u0, u1")
        assert scheduled.size_hints in scheduled.to_text()
    assert report.collectives_after["all_gather"] < report.collectives_before["all_gather"]


# ---------------------------------------------------------------- the numbers


@pytest.fixture
def env():
    return ShapeEnv()


def unbacked(env, least=None, most=None):
    size = env.create_unbacked_symint()
    if least is not None or most is not None:
        torch.fx.experimental.symbolic_shapes._constrain_range_for_size(size, least, most)
    return size


def test_a_number_stands_for_each_symbol_and_sizes_stay_in_proportion(env):
    tokens, others = unbacked(env), unbacked(env)
    hints = SizeHints(16)
    assert [hints(n) for n in (7, tokens, 8 * tokens, tokens + others)] == [7, 16, 128, 32]
    assert hints.used == {"u0": 16, "u1": 16}
    assert SizeHints(0)(64 // tokens) == DEFAULT  # without a value for the number
    most = unbacked(env, most=64)
    assert [SizeHints(n)(most) for n in (10_000, lambda symbol: 10_000, None)] == [64] * 3
    asked = []
    hints = SizeHints(lambda symbol: asked.append(str(symbol)) or 3)
    assert [hints(tokens), hints(2 * tokens), hints(tokens)] == [3, 6, 3]
    assert asked == ["u0"]


@pytest.mark.parametrize("answer", [lambda s: 1 / 0, lambda s: "many", lambda s: -1, lambda s: 1.5])
def test_a_callable_that_fails_costs_no_compile_and_is_reported(env, answer):
    hints = SizeHints(answer)
    assert hints(unbacked(env)) == DEFAULT
    (problem,) = hints.problems
    assert problem.startswith("size_hints(u0): ")


@settings(max_examples=25)
@given(st.lists(st.sampled_from(["+", "*", "//"]), min_size=1, max_size=5), st.integers(0, 9))
def test_any_expression_has_a_number_and_no_guard(operations, number):
    env = ShapeEnv()
    size = env.create_unbacked_symint()
    value, constants = size, itertools.cycle([3, 2, 5])
    expected = number
    for operation, constant in zip(operations, constants, strict=False):
        value = eval(f"a {operation} b", {"a": value, "b": constant})
        expected = eval(f"a {operation} b", {"a": expected, "b": constant})
    assert SizeHints(number)(value) == expected
    assert not env.guards
    assert not env.deferred_runtime_asserts


@pytest.fixture
def product(env):
    """Trace a product with one row per data row, at most a million."""
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    graph.output((product,))
    with FakeTensorMode(shape_env=env):
        a.meta["val"] = torch.empty(unbacked(env, 0, 10**6), 1024)
        b.meta["val"] = torch.empty(1024, 512)
        product.meta["val"] = a.meta["val"] @ b.meta["val"]
    return product


def test_flops_of_sizes_that_depend_on_data(product):
    machine = Machine(other_flops=1e12, bandwidth=1e15, kernel_ms=0.0)
    assert Costs(machine, SizeHints(1000))(product) == pytest.approx(2 * 1000 * 1024 * 512 / 1e9)


def test_memory_follows_the_hint_and_the_report_names_it(product):
    graph = product.graph
    assert peak_bytes(graph, size_hints=100) == 4 * (100 * 1024 + 1024 * 512 + 100 * 512)
    report = schedule(graph, teb.Overlap(), size_hints=lambda symbol: 100)
    assert report.peak_bytes[1] == peak_bytes(graph, size_hints=100)
    assert report.size_hints == "sizes that depend on data, as given: 100 for u0"
    default = schedule(graph, teb.Overlap())
    assert default.size_hints == f"sizes that depend on data, by default: {DEFAULT} for u0"
    assert default.size_hints in default.to_text()


# ---------------------------------------------------------------- plans, caches, ranks


def test_an_estimate_that_fails_leaves_the_caps_to_torch(fake_world):
    class Broken(Policy):
        def misses(self, case, timeline):
            raise LookupError("no such time")

    def two(a, b):
        group = dist.group.WORLD
        return all_gather(a, group).sum() + all_gather(b, group).sum()

    graph = trace(two, torch.zeros(3, 4), torch.zeros(5, 4)).graph
    with pytest.warns(teb.errors.BoundNotKeptWarning, match="caps are torch's own.*no such time"):
        plan, report = choose_caps(graph, Broken(), eligible=bool)
    assert plan.buckets == ByCap(eligible=bool).plan(GraphAnalysis(graph)).buckets != ()
    assert "no such time" in report.warning


def test_hints_are_part_of_the_cache_key_and_of_what_ranks_compare():
    from torch_ext_bucketing.passes.backends import Compilation, _Compile, _InductorPass
    from torch_ext_bucketing.passes.pipeline import Pipeline
    from torch_ext_bucketing.runtime.launches import (
        GraphLaunches,
        GroupLaunches,
        Version,
        mismatch_text,
    )

    taken = teb.backend(passes=[teb.Schedule(teb.Overlap())])
    manager = taken.pipeline

    def key(hints):
        return _InductorPass(_Compile(taken, Compilation(size_hints=hints)), "joint").uuid()

    assert len({key(None), key(1), key(2)}) == 3
    assert key(lambda symbol: 1) is None

    bases = [manager.planned_with(Compilation(size_hints=hints)) for hints in (None, 64)]
    assert bases[0].startswith("machine H100, for want of a CUDA device ")
    assert bases[1].endswith("size hints 64")
    assert Pipeline([teb.BucketByCap()]).planned_with(Compilation(size_hints=64)) == ""
    of_group = GroupLaunches("0", ())
    launches = GraphLaunches("forward", (of_group,), bases[1])
    assert GraphLaunches.decode(launches.encode()) == launches
    versions = [Version("torch", "forward", of_group, basis) for basis in bases]
    assert versions[0].digest != versions[1].digest
    assert Version.from_json(json.dumps(versions[1])) == versions[1]
    text = mismatch_text([([0], versions[0]), ([1], versions[1])], [], 2)
    assert "They planned with different times or size hints" in text
    assert "rank 1: machine H100, for want of" in text
    assert "size hints 64" in text


def _data_dependent_graph(seed: int) -> fx.GraphModule:
    """Trace gathers and reductions between rows selected by value, with assertions."""
    rng = random.Random(seed)
    b = Builder(mode=FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))
    op = b.op
    vectors = [b.shaped((4,)) for _ in range(4)]
    counts, outputs = [], []
    for i in range(rng.randint(3, 12)):
        x = rng.choice(vectors)
        if rng.random() < 0.5:
            if rng.random() < 0.5:
                start = op(C10D.all_gather_into_tensor.default, x, 2, "0")
            else:
                whole = op(_aten.cat.default, [x, x])
                start = op(C10D.reduce_scatter_tensor.default, whole, "sum", 2, "0")
            if rng.random() < 0.8:
                kind = "all_gather" if "gather" in str(start.target) else "reduce_scatter"
                set_tag(start, Tag(kind, (f"w{i}",)))
            wait = op(C10D.wait_tensor.default, start)
            vectors.append(op(_aten.slice.Tensor, wait, 0, 0, 4))
            outputs.append(vectors[-1])
            continue
        places = op(_aten.nonzero.default, x)
        count = op(_aten.sym_size.int, places, 0)
        counts.append(count)
        if rng.random() < 0.7:
            op(_aten._assert_scalar.default, op(operator.ge, count, 0), "no rows")
        if rng.random() < 0.5:
            total = op(torch.sym_sum, [count, *rng.sample(counts, rng.randint(1, len(counts)))])
            op(_aten._assert_scalar.default, op(operator.ge, total, 0), "no rows in all")
        rows = op(
            _aten.index_select.default, rng.choice(vectors), 0, op(_aten.squeeze.dim, places, 1)
        )
        square = op(
            _aten.mm.default,
            op(_aten.view.default, rows, [1, count]),
            op(_aten.view.default, rows, [count, 1]),
        )
        vectors.append(op(_aten.expand.default, op(_aten.view.default, square, [1]), [4]))
        outputs += [rows, square]
    return b.finish(outputs)


def test_random_graphs_with_sizes_that_depend_on_data(two_ranks):
    """No node is lost, no value changes, and nothing warns."""
    merged: list[int] = []

    @settings(max_examples=20)
    @given(st.integers(0, 10**6), st.sampled_from([None, 0, 3, lambda expression: 7]))
    @example(233978, None)  # a gather that no kernel uses, before others of its group
    def run(seed, hints):
        merged.append(_merged(seed, hints))

    run()
    assert any(merged)


def _merged(seed, hints):
    """Bucket and schedule a random graph; return the number of collectives saved."""
    gm = _data_dependent_graph(seed)
    inputs = [[(torch.arange(4.0) * (i + 2) + rank) % 3 for i in range(4)] for rank in range(2)]
    expected = run_all_ranks(gm, inputs)
    asserted = len(gm.graph.find_nodes(op="call_function", target=_aten._assert_scalar.default))
    calls = Counter(str(n.target) for n in gm.graph.nodes)
    collectives = sum(map(is_collective, gm.graph.nodes))
    compilation = Compilation(size_hints=hints)
    scheduler = teb.BucketAndSchedule([teb.Overlap(), teb.PeakMemory(ratio=2)], caps_mb=(1e-5, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler(gm, compilation)
    gm.graph.lint()
    left = Counter(str(n.target) for n in gm.graph.nodes)
    assert left["aten._assert_scalar.default"] == asserted
    assert left["aten.nonzero.default"] == calls["aten.nonzero.default"]
    (report,) = compilation.report.schedules
    assert not report.warnings
    assert_same(run_all_ranks(gm, inputs), expected)
    return collectives - sum(map(is_collective, gm.graph.nodes))
