"""Test packed buckets: values, layouts, and Inductor's kernels."""

import random

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
import torch.nn as nn
from collective_graphs import (
    all_gather,
    all_reduce,
    assert_same,
    reduce_scatter,
    run_all_ranks,
    starts,
    trace,
)
from marks import at_night
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import init_device_mesh
from torch_features import CONFIG

from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import Bucket, MergePlan
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.fsdp.units import FSDPParamOrder
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import bucket_key, kind_of
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.bucketing import BucketByUnit

WORLD = 4
MUL = torch.ops.aten.mul.Tensor
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def random_members(seed: int) -> tuple[fx.GraphModule, list[tuple[torch.Size, torch.dtype]]]:
    """Make gathers with and without casts, and reductions of contiguous, transposed and empty tensors."""
    rng = random.Random(seed)
    group = dist.group.WORLD
    shapes, makers = [], []
    for _ in range(rng.randrange(2, 9)):
        kind = rng.choice(("gather", "cast", "scatter", "transposed", "reduce"))
        rows = rng.choice((0, 1, 2, 5)) if kind in ("gather", "cast", "reduce") else 4
        rest = [rng.choice((0, 1, 3, 8)) for _ in range(rng.randrange(0, 3))]
        shapes.append((*rest[::-1], rows) if kind == "transposed" else (rows, *rest))
        makers.append(kind)

    def step(*values: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for value, kind in zip(values, makers, strict=True):
            if kind == "gather":
                out.append(all_gather(value, group))
            elif kind == "cast":
                out.append(all_gather(value.to(torch.bfloat16), group))
            elif kind == "reduce":
                out.append(all_reduce(value, group))
            elif kind == "scatter":
                out.append(reduce_scatter(value, group))
            else:
                out.append(reduce_scatter(value.permute(*reversed(range(value.ndim))), group))
        return [x * 1 for x in out]

    dtypes = [rng.choice(DTYPES) for _ in shapes]
    gm = trace(step, *(torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)))
    return gm, [(torch.Size(s), d) for s, d in zip(shapes, dtypes, strict=True)]


def merge_all(gm: fx.GraphModule, seed: int) -> None:
    """Merge one bucket per key, packed in random order."""
    buckets: dict[object, list[fx.Node]] = {}
    for start in starts(gm):
        buckets.setdefault(bucket_key(start), []).append(start)
    plan = MergePlan(
        tuple(
            Bucket(kind_of(members[0]), None, tuple(members))
            for members in buckets.values()
            if len(members) > 1
        )
    )
    rng = random.Random(seed)
    keys = {start: rng.random() for start in starts(gm)}
    apply_plan(GraphAnalysis(gm.graph), plan, keys.__getitem__)


def layout(value: FakeTensor) -> tuple[object, ...]:
    place = (value.shape, value.stride(), value.storage_offset())
    return (*place, value.dtype, value.device)


def check_layouts(graph: fx.Graph) -> None:
    """Check that each value has the layout and storage that running its operator gives."""
    seen: dict[int, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with value.fake_mode:
            wanted = node.target(*args, **kwargs)
        assert layout(value) == layout(wanted), node.format_node()
        inputs = {
            v.untyped_storage()._cdata
            for n in node.all_input_nodes
            for v in [n.meta["val"]]
            if isinstance(v, torch.Tensor)
        }
        mine, theirs = (v.untyped_storage()._cdata for v in (value, wanted))
        if theirs in inputs:
            assert mine == theirs, f"{node.name} is a view"
        elif isinstance(wanted, torch.Tensor) and node.target.__name__ != "getitem":
            assert mine not in seen, f"{node.name} lies in the storage of another node"
        seen[mine] = 1


@pytest.mark.parametrize("seed", range(40))
def test_values_and_layouts(fake_world, seed):
    """With odd seeds one rank compiles for all, so no rank's place in a buffer is a constant."""
    assert fake_world == WORLD
    for_all = seed % 2 == 1
    gm, inputs = random_members(seed)
    torch.manual_seed(seed)
    values = [[torch.randint(-8, 8, s).to(d) for s, d in inputs] for _ in range(WORLD)]
    expected = run_all_ranks(gm, values)
    results = [n.args[0] for n in gm.graph.find_nodes(op="call_function", target=MUL)]
    wanted = [layout(n.meta["val"]) for n in results]
    with CONFIG.patch(compile_on_one_rank=for_all):
        merge_all(gm, seed)
    in_place = gm.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor_out.default
    )
    assert not (for_all and in_place)
    gm.graph.lint()
    check_layouts(gm.graph)
    results = [n.args[0] for n in gm.graph.find_nodes(op="call_function", target=MUL)]
    for node, (shape, stride, _, *same) in zip(results, wanted, strict=True):
        value = node.meta["val"]
        assert [value.shape, value.stride(), value.dtype, value.device] == [shape, stride, *same]
    assert_same(run_all_ranks(gm, values), expected)


def test_members_keep_where_they_come_from(fake_world):
    gm = trace(
        lambda a, b: [all_gather(x, dist.group.WORLD) for x in (a, b)],
        torch.zeros(2, 3),
        torch.zeros(4),
    )
    first, second = starts(gm)
    first.meta["stack_trace"], first.meta["custom"] = "here", {"mine": 1}
    merge_all(gm, 0)
    (start,) = starts(gm)
    assert start.meta["stack_trace"] == "here"
    assert start.meta["custom"]["mine"] == 1
    assert [s.name for s in start.meta["from_node"]] == [first.name, second.name]


def test_members_of_different_devices_share_no_bucket(fake_world):
    gm = trace(
        lambda a, b: [all_gather(x, dist.group.WORLD) for x in (a, b)],
        torch.zeros(2),
        torch.zeros(2, device="meta"),
    )
    assert len({bucket_key(start) for start in starts(gm)}) == 2


class Experts(nn.Module):
    """Stacked experts that forward views as one matrix."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.inner = nn.Parameter(torch.randn(experts, 3, 2))
        self.outer = nn.Parameter(torch.randn(experts, 3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.inner.view(-1, 2).t() @ self.outer.view(-1, 2)


def test_views_of_merged_members_hold_no_memory_of_their_own(fake_world):
    """Their fake tensors are still views of the members' results, which are gone."""
    group, values = dist.group.WORLD, (torch.zeros(2, 3), torch.zeros(2, 3))
    gm = trace(lambda *xs: [all_gather(x, group).t() * 2 for x in xs], *values)
    merge_all(gm, 0)
    of_node = GraphAnalysis(gm.graph).liveness.of_node
    turned = [n for n in gm.graph.nodes if n.target is torch.ops.aten.t.default]
    assert len(turned) == 2
    assert all(of_node[n] == of_node[n.args[0]] for n in turned)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("compiler", "rows"),
    [
        ("inductor", 1),
        at_night("aot_eager", 1),
        at_night("inductor", 2),
    ],
)
def test_a_gathered_parameter_can_be_viewed_whatever_the_rows_of_a_shard(
    fake_world: int, rows: int, compiler: str
):
    """A shard of one row could be a strided view of the bucket, which the model could not view."""
    torch._dynamo.reset()
    model = Experts(rows * fake_world)
    order = FSDPParamOrder.from_model(model)
    data_parallel(model, init_device_mesh("cpu", (fake_world,)))
    passes = backend(compiler, passes=[BucketByUnit(order)], model=model)
    torch.compile(model, backend=passes, fullgraph=True)(torch.randn(5, 2)).sum().backward()
    assert passes.last_report().collectives_after == {"all_gather": 1, "reduce_scatter": 1}


@pytest.mark.torch
def test_inductor_packs_a_bucket_with_one_kernel(fake_world):
    """One kernel reads, casts and writes, for a bucket of gathers and for one of reductions."""
    torch._dynamo.reset()
    model = Experts(2 * fake_world)
    order = FSDPParamOrder.from_model(model)
    mesh = init_device_mesh("cpu", (fake_world,))
    data_parallel(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    compiled = torch.compile(model, backend=backend("inductor", [BucketByUnit(order)], model=model))

    def step() -> None:
        compiled(torch.randn(5, 2, dtype=torch.bfloat16)).sum().backward()

    _, (forward, backward) = run_and_get_code(step)
    before_gather = forward[forward.index("def call") :].split("all_gather_into_tensor_out")[0]
    assert before_gather.count("cpp_fused_") == 1, before_gather
    assert "aten.cat" not in forward + backward
    before_scatter = backward[backward.index("def call") :].split("reduce_scatter_tensor")[0]
    assert before_scatter.count("cpp_fused_") == 1, before_scatter
