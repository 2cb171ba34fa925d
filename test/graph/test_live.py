"""Check the live bytes of graphs that Inductor runs, against expected bytes and its own code."""

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from generated_memory import generated_code, live_of
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ext_bucketing._torch.inductor import CustomGraphPass, cublas_workspace_bytes
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.kernel_order import kernel_order
from torch_ext_bucketing.graph.liveness import workspace_bytes, workspace_text
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.policy import Case, PeakMemory
from torch_ext_bucketing.planner.schedule.timeline import Timeline

aten, c10d, MIB = torch.ops.aten, torch.ops._c10d_functional, 2**20
ROWS, COLUMNS = 64, 128
FULL, ROW = 4 * ROWS * COLUMNS, 4 * ROWS
SQUARE = (ROWS, ROWS), torch.float32


def graph_of(fn, *inputs):
    with FakeTensorMode():
        return make_fx(fn)(*(torch.empty(shape, dtype=dtype) for shape, dtype in inputs))


def peaks(gm):
    """Return the peaks of live bytes with and without fused kernels."""
    return tuple(GraphAnalysis(gm.graph, fuses=fuses).peak_bytes for fuses in (True, False))


def test_a_value_inside_a_kernel_takes_no_memory():
    gm = graph_of(
        lambda x: aten.sum(aten.exp(aten.mul(x, x)), [1]), ((ROWS, COLUMNS), torch.float32)
    )
    assert peaks(gm) == (FULL + ROW, FULL + 2 * FULL)


def test_a_result_is_not_written_into_what_another_kernel_reads():
    def fn(x, w):
        first = aten.mm(x, w)
        return aten.mm(aten.relu(first), w), aten.mm(first, w)

    gm = graph_of(fn, SQUARE, SQUARE)
    square = 4 * ROWS * ROWS
    profile = GraphAnalysis(gm.graph, fuses=True).liveness.own_profile
    assert profile == [3 * square, 4 * square, 5 * square, 5 * square]


def test_the_buffers_to_write_into_are_in_the_order_of_reads():
    """Ranks must choose alike, so nothing may depend on nodes' hashes."""
    gm = graph_of(lambda *xs: sum(reversed(xs[:-1]), xs[-1]), *[SQUARE] * 7)
    (buffers,) = GraphAnalysis(gm.graph, fuses=True).fused.reused.values()
    assert [n.name for n in buffers] == [f"arg{i}_1" for i in range(6, -1, -1)]


def test_a_kernel_allocates_all_its_results_where_it_runs():
    def fn(x, w):
        first, second = aten.mm(x, w), aten.mm(w, x)
        early = aten.mm(aten.mul(first, second), w)
        return early, aten.mm(aten.add(first, second), w)

    profile = GraphAnalysis(graph_of(fn, SQUARE, SQUARE).graph, fuses=True).liveness.own_profile
    square = 4 * ROWS * ROWS
    # One kernel writes the product and the sum.
    assert profile == [n * square for n in (3, 4, 6, 5, 4, 5)]


@pytest.mark.parametrize(("rows", "early"), [(ROWS, True), (ROWS + 1, False)])
def test_a_constant_that_is_added_to_is_there_before_the_added_values(rows, early):
    """But for a larger one, such as the gradient of an embedding, which is pinned."""

    def fn(x, w, places):
        values = aten.sum(aten.mm(x, w).view(ROWS, ROWS, 1).expand(-1, -1, ROWS), [1])
        table = aten.full([rows, ROWS], 0.0)
        return aten.index_put(table, [places], values, True)

    gm = graph_of(fn, SQUARE, SQUARE, ((ROWS,), torch.int64))
    found = GraphAnalysis(gm.graph, fuses=True)
    places = {n.name: i for i, n in enumerate(found.dependencies.nodes)}
    assert len(found.liveness.allocates[places["sum_1"]]) == 1 + early
    assert len(found.liveness.allocates[places["index_put"]]) == 1 - early


@pytest.mark.parametrize(
    ("rows", "reads", "earlier"),
    [(ROWS, True, True), (16 * ROWS, True, False), (ROWS, False, False)],
)
def test_a_wait_goes_ahead_of_a_product_whose_reader_may_run_before_it(
    two_ranks, rows, reads, earlier
):
    """Inductor doesn't know that the wait frees a bucket; where there is room the wait stays."""
    group = dist.group.WORLD.group_name

    def fn(x, w, gradient, large):
        most = aten.sum(aten.mm(large, w))
        start = c10d.reduce_scatter_tensor(aten.mm(gradient, w), "sum", 2, group)
        first = aten.mm(x, w)
        shard = c10d.wait_tensor(start)
        read = first if reads else x
        scaled = aten.mul(aten.exp(read), aten.sum(read, [1], True))
        return shard, most, aten.mm(scaled, w), *(() if reads else (first,))

    more = (((n, ROWS), torch.float32) for n in (4 * ROWS, rows))
    gm = graph_of(fn, SQUARE, SQUARE, *more)
    found = GraphAnalysis(gm.graph, fuses=True)
    order = kernel_order(found.liveness, found.dependencies, found.fused)
    names = [found.dependencies.nodes[i].name for i in order]
    assert (names.index("wait_tensor") < names.index("mm_2")) is earlier
    assert found.dependencies.is_order(order)


def block(x, w1, w2, w3):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    h = x + torch.nn.functional.silu(normed @ w1) * (normed @ w2) @ w3
    logits = h @ w1
    return logits, torch.log_softmax(logits, -1)[:, 0].sum()


def deep(x, w1, w2, w3):
    for _ in range(3):
        x = block(x, w1, w2, w3)[0] @ w3
    return x, x.sum(0)


def plain(x, w1, w2, w3):
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (x + (torch.relu(normed @ w1) * (normed @ w2)) @ w3).square().sum()


def backward(x, w1, w2, w3):
    with torch.enable_grad():
        given = [t.detach().requires_grad_() for t in (x, w1, w2, w3)]
        return torch.autograd.grad(plain(*given), given)


@pytest.mark.torch
@pytest.mark.parametrize("fn", [block, deep, backward])
def test_the_peak_is_that_of_the_generated_code(fn):
    shapes = (256, 96), (96, 320), (96, 320), (320, 96)
    mode = FakeTensorMode()
    with mode:
        inputs = [torch.empty(shape) for shape in shapes]
        gm = make_fx(fn, decomposition_table=select_decomp_table())(*inputs)
    found = {}

    class Planned(CustomGraphPass):
        def __call__(self, graph: fx.Graph):
            found["fused"] = GraphAnalysis(graph, fuses=True).peak_bytes
            found["given"] = sum(
                n.meta["val"].untyped_storage().nbytes() for n in graph.find_nodes(op="placeholder")
            )

        def uuid(self):
            return None

    options = {"post_grad_custom_post_pass": Planned(), "compile_threads": 1}
    code = generated_code(gm, mode, False, options)
    true = live_of(code, inputs, [True] * len(inputs)).peak
    assert 0.97 <= found["fused"] / true <= 1.03
    assert found["fused"] > found["given"]


def product(device, *, stage="inference", size=64, target=aten.mm.default):
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, x))
    with mode:
        for one in (x, node):
            one.meta["val"] = torch.empty(size, size, device=device)
    if stage != "inference":
        node.meta["partitioner_tag"] = f"is_{stage}"
    graph.output((node,))
    return graph


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [(None, 32 * MIB), (":4096:8", 32 * MIB), (":16:8", 128 * 1024), (":4096:2:16:8", 8519680)],
)
def test_a_workspace_is_as_large_as_configured(monkeypatch, config, nbytes):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cublas_workspace_bytes() == nbytes


def test_workspaces_count_once_for_each_thread_with_products(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    assert workspace_bytes(product("cpu")) == 0
    assert workspace_text(product("cpu")) == ""
    assert workspace_bytes(product("cuda", target=aten.add.Tensor)) == 0
    assert workspace_bytes(product("cuda")) == MIB
    training = product("cuda", stage="forward")
    assert workspace_bytes(training) == 2 * MIB
    assert "2 workspaces of cuBLAS of 1 MiB" in workspace_text(training)


def test_a_bound_covers_workspaces(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:3")
    graph, compilation = product("cuda"), Compilation()
    compilation.measure(graph)
    values = 2 * 4 * 64 * 64
    assert compilation.baseline.peak_bytes == values + 3 * MIB


@pytest.mark.parametrize(("factor", "warns"), [(3.9, True), (4.1, False)])
def test_one_block_over_a_quarter_of_the_bound_is_named(factor, warns):
    size = 2048
    model = model_of(product("cpu", size=size))
    block = 4 * size * size
    assert model.largest == ("mm_default", block)
    line = Timeline.of(model)
    report = PeakMemory(gib=factor * block / 2**30).report(Case(model, line, 0), line)
    assert bool(report.warning) == warns
    assert not warns or "one block of 16.000 MiB, of mm_default" in report.warning
    # A ratio names no card's memory.
    assert not PeakMemory(ratio=1.0).report(Case(model, line, line.peak_bytes), line).warning
