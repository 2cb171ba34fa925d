"""Check which operators the cost model takes for one kernel, and what these read and write."""

import operator

import pytest
import torch
from random_graphs import Builder
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.fusion import fused
from torch_ext_bucketing.graph.kernel_order import kernel_order
from torch_ext_bucketing.graph.operators import Operators
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import Machine

pytestmark = pytest.mark.torch

aten = torch.ops.aten
ROWS, COLUMNS = 64, 128
FULL = 4 * ROWS * COLUMNS


class Graph(Builder):
    """A graph of fake tensors, on CUDA unless said otherwise."""

    def __init__(self, device="cuda"):
        super().__init__()
        self.device = device

    def input(self, *shape):
        return self.shaped(shape or (ROWS, COLUMNS))

    def kernels(self, *outputs, absent=()):
        """Return each kernel's nodes and bytes."""
        self.graph.output(outputs)
        for node in self.graph.nodes:
            if self.device == "cuda" and isinstance(value := node.meta.get("val"), torch.Tensor):
                value.fake_device = torch.device("cuda:0")
        nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        found = fused(nodes, Operators(Costs().result_bytes), absent).kernels
        return [(list(k.shares), k.nbytes) for k in found]


@pytest.fixture
def g():
    return Graph()


def test_chain_of_elementwise_operators_reads_and_writes_once(g):
    x = g.input()
    flat = g.op(aten.view.default, g.op(aten.neg.default, x), [ROWS * COLUMNS])  # is free
    last = g.op(aten.exp.default, g.op(aten.abs.default, flat))
    assert g.kernels(last) == [([last], 2 * FULL)]


def test_row_reduction_fuses_with_producers_and_consumers(g):
    x = g.input()
    mean = g.op(aten.mean.dim, g.op(aten.mul.Tensor, x, x), [1], True)
    last = g.op(aten.mul.Tensor, x, g.op(aten.rsqrt.default, mean))
    assert g.kernels(last) == [([mean, last], 2 * FULL)]


def test_value_of_which_a_view_is_returned_is_written(g):
    x = g.input()
    value = g.op(aten.neg.default, x)
    flat = g.op(aten.view.default, value, [ROWS * COLUMNS])
    last = g.op(aten.exp.default, value)  # reads it in the same kernel
    assert g.kernels(flat, last) == [([value, last], 3 * FULL)]


@pytest.mark.parametrize("terms", [7, 8])
def test_a_sum_of_few_elements_is_computed_inside_its_reader(g, terms):
    total = g.op(aten.sum.dim_IntList, g.input(ROWS, COLUMNS, terms), [2])
    last = g.op(aten.neg.default, total)
    ((nodes, _),) = g.kernels(last)
    assert nodes == ([last] if terms < 8 else [total, last])


def test_another_iteration_space_is_another_kernel(g):
    x, y = g.input(), g.input(7)
    both = [g.op(aten.neg.default, n) for n in (x, y)]
    assert g.kernels(*both) == [([both[0]], 2 * FULL), ([both[1]], 2 * 28)]


def test_readers_of_one_buffer_share_a_kernel(g):
    x = g.input()
    both = [g.op(op, x) for op in (aten.neg.default, aten.exp.default)]
    assert g.kernels(*both) == [(both, 3 * FULL)]


def test_no_kernel_stands_before_and_after_a_product(g):
    x, w = g.input(), g.input(COLUMNS, COLUMNS)
    first = g.op(aten.neg.default, x)
    last = g.op(aten.add.Tensor, g.op(aten.mm.default, first, w), x)
    assert g.kernels(last) == [([first], 2 * FULL), ([last], 3 * FULL)]


def test_value_of_few_reads_is_computed_again_in_each_kernel(g):
    x, w = g.input(), g.input(COLUMNS, COLUMNS)
    cast = g.op(aten.neg.default, x)
    product = g.op(aten.mm.default, g.op(aten.exp.default, cast), w)
    last = g.op(aten.add.Tensor, product, cast)
    assert [nodes for nodes, _ in g.kernels(last)] == [[product.args[0]], [last]]


def test_value_of_many_reads_is_written_for_its_readers(g):
    total = g.input()
    for _ in range(5):
        total = g.op(aten.add.Tensor, total, g.input())
    last = [g.op(op, total) for op in (aten.neg.default, aten.exp.default)]
    assert g.kernels(*last) == [([total, *last], 8 * FULL)]


def test_sums_of_rows_and_of_columns_are_two_kernels(g):
    x, y = g.input(), g.input()
    product = g.op(aten.mul.Tensor, x, y)
    rows = g.op(aten.sum.dim_IntList, product, [1])
    columns = g.op(aten.sum.dim_IntList, product, [0])
    found = [([rows], 2 * FULL + 4 * ROWS), ([columns], 2 * FULL + 4 * COLUMNS)]
    assert g.kernels(rows, columns) == found


@pytest.mark.parametrize(
    ("rows", "columns", "op", "of_columns", "kernels"),
    [
        (8192, 4096, aten.sum.dim_IntList, aten.sum.dim_IntList, 1),
        (8192, 4096, aten.amax.default, aten.sum.dim_IntList, 1),
        (8192, 4096, aten.sum.dim_IntList, aten.amax.default, 2),  # only sums are split by rows
        (4096, 4096, aten.sum.dim_IntList, aten.sum.dim_IntList, 1),
        (2048, 4096, aten.sum.dim_IntList, aten.sum.dim_IntList, 2),  # few rows
        (4096, 1024, aten.sum.dim_IntList, aten.sum.dim_IntList, 2),  # few elements
        (4096, 32768, aten.sum.dim_IntList, aten.sum.dim_IntList, 2),  # long rows
    ],
)
@pytest.mark.parametrize("columns_first", [False, True])
def test_large_sums_of_rows_and_of_columns_are_one_kernel(
    g, rows, columns, op, of_columns, kernels, columns_first
):
    x = g.input(rows, columns)
    sums = [(op, 1), (of_columns, 0)]
    made = [g.op(target, x, [dim]) for target, dim in sums[:: -1 if columns_first else 1]]
    assert len(g.kernels(*made)) == kernels


def test_a_sum_of_columns_that_reads_the_sums_of_rows_is_another_kernel(g):
    x = g.input(8192, 4096)
    scaled = g.op(aten.mul.Tensor, x, g.op(aten.sum.dim_IntList, x, [1], True))
    assert len(g.kernels(g.op(aten.sum.dim_IntList, scaled, [0]))) == 2


@pytest.mark.parametrize(("between", "kernels"), [(30, 1), (70, 2)])
def test_readers_of_one_buffer_that_are_far_away_share_no_kernel(g, between, kernels):
    x, other = g.input(), g.input(7, 7)
    read = g.op(aten.mm.default, g.op(aten.neg.default, x), g.input(COLUMNS, 1))
    for _ in range(between):
        other = g.op(aten.mm.default, other, other)
    assert len(g.kernels(read, other, g.op(aten.exp.default, x))) == kernels


def test_a_reader_of_a_kernels_result_joins_it_from_far_away(g):
    x, other = g.input(), g.input(7, 7)
    first = g.op(aten.neg.default, x)
    read = g.op(aten.mm.default, first, g.input(COLUMNS, 1))
    for _ in range(70):
        other = g.op(aten.mm.default, other, other)
    assert len(g.kernels(read, other, g.op(aten.exp.default, first))) == 1


@pytest.mark.parametrize(("device", "kernels"), [("cuda", 1), ("cpu", 3)])
def test_concatenation_is_a_loop_per_input_on_the_cpu(device, kernels):
    g = Graph(device)
    parts = [g.op(aten.neg.default, g.input()) for _ in range(2)]
    last = g.op(aten.exp.default, g.op(aten.cat.default, parts))
    found = g.kernels(last)
    assert len(found) == kernels
    assert sum(n for _, n in found) == (4 if kernels == 1 else 8) * FULL


def test_long_concatenation_is_a_kernel_for_inputs_and_one_each_other_part(g):
    given, made = [g.input() for _ in range(5)], [g.input() for _ in range(5)]
    parts = [g.op(aten.neg.default, n) for n in made]
    last = g.op(aten.cat.default, [*given, *parts])
    assert g.kernels(last) == [([last], 10 * FULL)] + 5 * [([last], 2 * FULL)]


def test_readers_of_different_parts_are_kernels_of_their_own(g):
    whole = g.op(aten.mm.default, g.input(), g.input(COLUMNS, COLUMNS))
    parts = [g.op(aten.slice.Tensor, whole, 0, at, at + ROWS // 2) for at in (0, ROWS // 2)]
    both = [g.op(aten.neg.default, part) for part in parts]
    assert g.kernels(*both) == [([n], FULL) for n in both]


@pytest.mark.parametrize(("device", "kernels"), [("cuda", 1), ("cpu", 2)])
def test_flat_producer_joins_no_reduction_on_the_cpu(device, kernels):
    g = Graph(device)
    first = g.op(aten.neg.default, g.input())
    last = g.op(aten.sum.dim_IntList, first, [1])
    assert len(g.kernels(first, last)) == kernels


def test_embeddings_gradient_is_filled_then_added_to(g):
    table = g.op(aten.full.default, [1000, COLUMNS], 0.0)
    values, places = g.input(), g.input(ROWS)
    places.meta["val"] = g.mode.from_tensor(torch.zeros(ROWS, dtype=torch.int64))
    added = g.op(aten.index_put.default, table, [places], values, True)
    whole, ids = 4 * 1000 * COLUMNS, 8 * ROWS
    assert g.kernels(added) == [([added], whole), ([added], 3 * FULL + ids)]


def test_a_scatter_writes_a_copy_of_its_first_argument(g):
    zeros, values, places = g.op(aten.full.default, [ROWS, COLUMNS], 0.0), g.input(), g.input()
    places.meta["val"] = g.mode.from_tensor(torch.zeros(ROWS, COLUMNS, dtype=torch.int64))
    last = g.op(aten.scatter.src, zeros, 1, places, values)
    assert g.kernels(last) == [([last], FULL), ([last], (2 + 1 + 1) * FULL)]  # places of 8 bytes


@pytest.mark.parametrize(("operators", "written"), [(29, False), (30, True)])
def test_a_value_of_many_operations_is_computed_once(g, operators, written):
    value = g.input()
    for _ in range(operators):
        value = g.op(aten.neg.default, value)
    readers = [g.op(aten.sum.dim_IntList, value, [1]), g.op(aten.abs.default, value)]
    ((nodes, _),) = g.kernels(*readers)
    assert nodes == [value] * written + readers


def test_a_value_of_two_concatenated_ones_has_eleven_operations_more(g):
    value = g.op(aten.cat.default, [g.input(), g.input()], 1)  # two loads
    for _ in range(18):
        value = g.op(aten.neg.default, value)
    ((nodes, _),) = g.kernels(g.op(aten.sum.dim_IntList, value, [1]), g.op(aten.abs.default, value))
    assert nodes[0] is value


def test_embedding_reads_no_more_than_it_returns(g):
    places = g.input(ROWS)
    places.meta["val"] = g.mode.from_tensor(torch.zeros(ROWS, dtype=torch.int64))
    last = g.op(aten.embedding.default, g.input(1000, COLUMNS), places)
    assert g.kernels(last) == [([last], 2 * FULL + 8 * ROWS)]


@pytest.mark.parametrize(("columns", "written"), [(COLUMNS, False), (4096, True)])
def test_a_kernel_of_long_rows_writes_values_that_it_reads_again(g, columns, written):
    parts = [g.input(ROWS, columns) for _ in range(5)]
    total = parts[0]
    for part in parts[1:]:
        total = g.op(aten.add.Tensor, total, part)
    most = g.op(aten.amax.default, total, [1], True)
    last = g.op(aten.exp.default, g.op(aten.sub.Tensor, total, most))
    full = 4 * ROWS * columns
    ((nodes, nbytes),) = g.kernels(last)
    assert nodes == [total, most, last]
    assert nbytes == (6 + written) * full


@pytest.mark.parametrize("target", ["prims.prepare_softmax_online", "aten.max"])
def test_a_reduction_with_two_results_is_fused(g, target):
    import torch._inductor.inductor_prims

    x = g.input()
    softmax = target == "prims.prepare_softmax_online"
    op = torch.ops.prims.prepare_softmax_online.default if softmax else aten.max.dim
    both = g.op(op, g.op(aten.mul.Tensor, x, x), 1, *(() if softmax else (True,)))
    most = g.graph.call_function(operator.getitem, (both, 0))
    most.meta["val"] = both.meta["val"][0]
    last = g.op(aten.sub.Tensor, x, most)
    ((nodes, _),) = g.kernels(last)
    assert nodes == [both, last]


def test_nodes_that_differ_on_other_ranks_change_nothing(g):
    x = g.input()
    last = g.op(aten.neg.default, x)
    absent = {g.op(aten.exp.default, last), g.op(aten.exp.default, x)}
    assert g.kernels(last, *absent, absent=absent) == [([last], 2 * FULL)]


def test_getitem_of_a_call_is_a_buffer(g):
    top = g.op(aten.topk.default, g.input(), 2)
    values = g.graph.call_function(operator.getitem, (top, 0))
    values.meta["val"] = top.meta["val"][0]
    last = g.op(aten.neg.default, values)
    assert g.kernels(last) == [([last], 2 * 4 * ROWS * 2)]


def test_times_of_a_kernel_are_divided_by_bytes(g):
    x = g.input()
    mean = g.op(aten.mean.dim, g.op(aten.mul.Tensor, x, x), [1], True)
    last = g.op(aten.mul.Tensor, x, mean)
    nodes = [n for n in g.graph.nodes if n.op == "call_function"]
    g.graph.output((last, mean))
    machine = Machine(bandwidth=1e9, kernel_ms=0.0, factors={"kernel": 2.0})
    fused, _ = Costs(Machine(**{**vars(machine), "fuses": True})).times(nodes)
    assert fused[0] == 0.0
    assert sum(fused) == pytest.approx(2 * (2 * FULL + 4 * ROWS) / 1e9 * 1e3)
    costs = Costs(machine)
    assert costs.times(nodes)[0] == [costs(n) for n in nodes]
    assert costs.times(nodes, absent={last})[0][-1] == 0.0


@pytest.mark.parametrize("given", [None, True, False])
def test_backend_decides_unless_the_machine_is_given(given):
    machine = Machine(fuses=given)
    assert [machine.for_backend(f).fuses for f in (True, False)] == (
        [True, False] if given is None else [given, given]
    )
    assert Costs(machine).machine.fuses is given


def test_estimates_come_before_fused_times(g):
    first = g.op(aten.neg.default, g.input())
    last = g.op(aten.exp.default, first)
    g.graph.output(last)
    machine = Machine(fuses=True, estimate=lambda n, nbytes: 5.0 if n is first else None)
    assert Costs(machine).times([first, last])[0][0] == 5.0


def kernel_names(step, *inputs):
    """Return the names of a step's nodes in the order of :func:`.kernel_order`."""
    analysis = GraphAnalysis(make_fx(step, tracing_mode="fake")(*inputs).graph, fuses=True)
    live, dependencies, kernels = analysis.liveness, analysis.dependencies, analysis.fused
    order = kernel_order(live, dependencies, kernels)
    assert dependencies.is_order(order)
    return [dependencies.nodes[i].name for i in order]


def test_nodes_of_a_kernel_stand_where_it_runs():
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        largest = x.amax(1, keepdim=True)
        product = x @ y
        return product, (x - largest).exp() @ y

    names = kernel_names(step, torch.randn(8, 8), torch.randn(8, 8))
    assert names == ["amax", "sub", "exp", "mm", "mm_1"]


@pytest.mark.parametrize("frees", [False, True])
def test_a_kernel_that_frees_nothing_runs_before_the_first_node_that_needs_it(frees):
    """Inductor writes a value where it must, and the pass pins kernels that free others."""

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        source = x @ x if frees else x
        early = (source.exp() + 1).t()
        return y @ y, early @ y

    names = kernel_names(step, torch.randn(8, 8), torch.randn(8, 8))
    kernel, last = ["exp", "add"], ["t", "mm_2" if frees else "mm_1"]
    assert names == (["mm", *kernel, "mm_1", *last] if frees else ["mm", *kernel, *last])


@pytest.mark.parametrize("lowers", [False, True])
def test_kernels_that_alone_read_a_value_run_right_after_it_if_the_peak_is_lower(lowers):
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = x @ x
        product = y @ y
        dtype = torch.float16 if lowers else torch.float64
        halves = (half.t().clone().to(dtype) for half in gathered.split(16, 1))
        return product.sum(), *halves

    names = kernel_names(step, torch.randn(32, 32), torch.randn(64, 64))
    assert (names.index("clone_1") < names.index("mm_1")) == lowers


@pytest.mark.parametrize("between", [False, True])
def test_products_keep_their_order(between):
    """A kernel that reads a product runs after it, so no earlier product can read its results."""

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cosine = x.cos()
        first = cosine @ y if between else y @ y
        product = x @ y
        return cosine, product * x, first, cosine @ product

    graph = make_fx(step, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 8)).graph
    analysis = GraphAnalysis(graph, fuses=True)
    assert [[n.name for n in k.shares] for k in analysis.fused.kernels] == (
        [["cos"], ["mul"]] if between else [["cos", "mul"]]
    )
