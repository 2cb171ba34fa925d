"""Nodes that keep their order without an edge, and nodes that only seem to have to."""

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import OPTIONS, Builder
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.dependencies import Dependencies, unused
from torch_ext_bucketing.graph.nodes import is_view
from torch_ext_bucketing.planner.schedule.list_schedule import list_schedule
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.policy import Options
from torch_ext_bucketing.planner.schedule.timeline import Timeline

_aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("two_ranks")


class Numbers(Builder):
    """Builds graphs that read numbers from tensors and assert on them."""

    def __init__(self) -> None:
        super().__init__()
        self.env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.env)

    def number(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.env.create_unbacked_symint()
        return node

    def check(self, number: fx.Node, least: int) -> fx.Node:
        """Assert ``number >= least``."""
        holds = self.graph.call_function(torch.ops.aten.ge.Scalar, (number, least))
        holds.target, holds.meta["val"] = (lambda a, b: a >= b), number.meta["val"] >= least
        holds.target.__module__ = "_operator"
        return self.graph.call_function(_aten._assert_scalar.default, (holds, "too small"))

    def times(self, x: fx.Node, number: Any) -> fx.Node:
        return self.call(_aten.mul.Scalar, (x, number), x.meta["val"].numel(), torch.float32)


def needed(dependencies: Dependencies, node: fx.Node) -> set[fx.Node]:
    """Return the names of all nodes that must precede a node."""
    stack, found = [dependencies.index[node]], set()
    while stack:
        for j in dependencies.needs[stack.pop()]:
            if j not in found:
                found.add(j)
                stack.append(j)
    return {dependencies.nodes[j] for j in found}


def test_an_assertion_holds_up_only_what_relies_on_it():
    b = Numbers()
    p, q = b.leaf(8, torch.float32), b.leaf(1, torch.float32)
    before = b.add(p, p)
    n = b.number(_aten._local_scalar_dense.default, q)
    early = b.times(p, n)
    check = b.check(n, 0)
    late = b.times(p, n)
    total = b.number(torch.sym_sum, [n, n])
    apart = b.add(p, p)
    gm = b.finish([before, early, late, apart, b.times(p, total)])
    dependencies = GraphAnalysis(gm.graph).dependencies
    assert check in needed(dependencies, late)
    assert check not in needed(dependencies, early)
    assert check in needed(dependencies, total), "it computes with the number that is checked"
    assert needed(dependencies, apart) == set()
    assert needed(dependencies, check) == {n, check.args[0]}


def test_a_write_stays_after_the_wait_of_the_tensors_reader():
    """A collective reads its input until its wait, unless the graph itself writes sooner."""
    b = Builder()
    p, q = b.leaf(8, torch.float32), b.leaf(8, torch.float32)
    part = b.collective("all_gather", p, "0")
    wait = part.all_input_nodes[0]
    view = b.call(_aten.view.default, (p, [8]), 8, torch.float32)
    write = b.write(view, q)
    late = b.call(
        torch.ops._c10d_functional.all_gather_into_tensor.default, (q, 2, "0"), 16, torch.float32
    )
    early_write = b.write(q, p)
    late_wait = b.call(torch.ops._c10d_functional.wait_tensor.default, (late,), 16, torch.float32)
    after = b.add(q, q)
    b.finish([part, late_wait, after])
    dependencies = GraphAnalysis(b.graph).dependencies
    assert {wait, wait.all_input_nodes[0]} <= needed(dependencies, write)
    assert late in needed(dependencies, early_write)
    assert late_wait not in needed(dependencies, early_write)
    assert early_write in needed(dependencies, after)
    model = model_of(b.graph)
    at = dependencies.index
    assert not model.needs_end(at[late], at[early_write])
    assert model.needs_end(at[late], at[late_wait])
    assert model.paths.bound_ms <= Timeline.of(model).step_ms


@pytest.mark.parametrize(
    "target",
    [
        _aten._assert_scalar.default,
        _aten._assert_async.msg,
        _aten._assert_tensor_metadata.default,
        _aten.sym_constrain_range.default,
        _aten.sym_constrain_range_for_size.default,
        torch.sym_sum,
        torch.sym_max,
        torch.ops.profiler._record_function_enter_new.default,
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(value),
)
def test_no_barrier(target):
    b = Builder()
    p, q = b.leaf(8, torch.float32), b.leaf(8, torch.float32)
    before = b.add(p, p)
    b.graph.call_function(target, (q,))
    after = b.add(p, p)
    dependencies = GraphAnalysis(b.finish([before, after]).graph).dependencies
    assert dependencies.needs == [[], [], []]


def test_profiled_ranges_stay_nested():
    b = Builder()
    enter = torch.ops.profiler._record_function_enter_new.default
    marks = [b.graph.call_function(enter, (name,)) for name in "ab"]
    ends = [
        b.graph.call_function(torch.ops.profiler._record_function_exit._RecordFunction, (m,))
        for m in reversed(marks)
    ]
    dependencies = GraphAnalysis(b.finish([b.leaf(8, torch.float32)]).graph).dependencies
    assert [dependencies.nodes[i] for i in range(4)] == [*marks, *ends]
    assert dependencies.needs == [[], [0], [1], [0, 2]]


def test_what_checks_and_counts_on_the_cpu_takes_no_time_and_no_memory():
    b = Numbers()
    p = b.leaf(8, torch.float32)
    made = b.add(p, p)
    size = b.number(_aten.sym_size.int, made, 0)
    b.check(size, 1)
    gm = b.finish([b.times(p, size)])
    model = model_of(gm.graph)
    nodes = model.dependencies.nodes
    assert all(is_view(n) == (n not in (made, nodes[-1])) for n in nodes)
    liveness = GraphAnalysis(gm.graph).liveness
    assert liveness.touches[nodes.index(nodes[-1])] != liveness.touches[nodes.index(made)]
    # The tensor is free once its size is known.
    assert liveness.profile(range(len(nodes))) == [64, 64, 32, 32, 64]


@given(value=st.integers(0, 4), options=OPTIONS, numbers=st.integers(1, 4))
@settings(max_examples=60)
def test_the_same_values_and_the_same_failures(value: int, options: Options, numbers: int):
    """An assertion that fails in the graph's order fails in every order."""
    b = Numbers()
    p, q = b.leaf(8, torch.float32), b.leaf(1, torch.float32)
    x, results = p, []
    for k in range(numbers):
        x = b.add(x, p)
        n = b.number(_aten._local_scalar_dense.default, q)
        b.check(n, k)
        results.append(b.times(x, n))
        results.append(b.add(x, x))
    gm = b.finish(results)
    inputs = (torch.arange(8.0), torch.tensor([float(value)]))
    order = list_schedule(model_of(gm.graph), options)
    nodes = model_of(gm.graph).dependencies.nodes
    expected = outcome(gm, inputs)
    output = gm.graph.output_node()
    for i in order:
        output.prepend(nodes[i])
    gm.graph.lint()
    gm.recompile()
    assert outcome(gm, inputs) == expected
    assert ("too small" in str(expected)) == (value < numbers - 1)


def outcome(gm: fx.GraphModule, inputs: Any) -> Any:
    try:
        return [v.tolist() for v in fx.Interpreter(gm).run(*inputs)]
    except RuntimeError as error:
        return str(error).split("\n")[0]


# --- nodes that nothing uses ---------------------------------------------------------------------


@pytest.mark.parametrize("read_late", [False, True])
def test_what_takes_one_of_several_results_comes_at_its_place(read_late):
    """Otherwise a dead or late ``getitem`` keeps the tuple's storages alive."""
    b = Builder()
    p = b.leaf(64, torch.float32)
    product = b.call(_aten.mm.default, (p, p), 64, torch.float32)
    pair = b.call(_aten.sort.default, (product,), 64, torch.float32)
    pair.meta["val"] = (b.fake(64, torch.float32), b.fake(64, torch.int64))
    used, dead = (b.call(operator.getitem, (pair, i), 64, torch.float32) for i in (0, 1))
    for i, node in enumerate((used, dead)):
        node.meta["val"] = pair.meta["val"][i]
    x = b.add(used, p)
    for _ in range(6):
        x = b.add(x, p)
    gm = b.finish([b.add(x, dead) if read_late else x])
    model = model_of(gm.graph)
    order = [model.dependencies.nodes[i] for i in list_schedule(model, Options())]
    assert {used, dead} == {*order[order.index(pair) + 1 :][:2]}
    assert model.liveness.peak(list_schedule(model, Options())) == model.liveness.peak(
        range(len(model))
    )


def test_what_nothing_reads_takes_no_time():
    """torch's partitioner removes unused collectives, but not the nodes before them."""
    b = Builder()
    p = b.leaf(64, torch.float32)
    dead = b.add(b.add(p, p), p)
    random = b.call(_aten.rand_like.default, (p,), 64, torch.float32)
    used = b.add(p, p)
    gathered = b.collective("all_reduce", p, "0")
    write = b.call(_aten.copy_.default, (p, used), 64, torch.float32)
    gm = b.finish([used])
    model = model_of(gm.graph)
    found = dict(zip(model.dependencies.nodes, model.ms, strict=True))
    assert found[dead] == found[dead.args[0]] == 0.0
    assert all(found[n] > 0 for n in (random, used, gathered.args[0], write))
    assert unused(model.dependencies.nodes) == {dead, dead.args[0]}


library = torch.library.Library("dependencies_test", "FRAGMENT")
library.define("untagged(Tensor x) -> Tensor")
library.define("pointwise(Tensor x) -> Tensor", tags=(torch.Tag.pointwise,))


def test_operators_that_may_draw_keep_their_order():
    """Others, and attention without dropout, may be moved past them."""
    b, ops = Builder(), torch.ops.dependencies_test
    p = b.leaf(64, torch.float32)
    x = b.call(_aten.view.default, (p, [1, 1, 8, 8]), 64, torch.float32)
    cudnn = _aten._scaled_dot_product_cudnn_attention.default
    calls = [
        b.call(_aten.rand_like.default, (p,), 64, torch.float32),
        b.call(ops.untagged.default, (p,), 64, torch.float32),
        b.call(ops.pointwise.default, (p,), 64, torch.float32),
        b.call(cudnn, (x, x, x, None, True), 64, torch.float32),
        b.call(cudnn, (x, x, x, None, True, 0.1), 64, torch.float32),
        b.call(ops.untagged.default, (p,), 64, torch.float32),
    ]
    rand, first, _, _, drops, _ = calls
    dependencies = GraphAnalysis(b.finish(calls).graph).dependencies
    mine = [needed(dependencies, node).intersection(calls) for node in calls]
    assert mine == [set(), {rand}, set(), set(), {rand, first}, {rand, first, drops}]
