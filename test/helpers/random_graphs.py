"""Build graphs of collectives: random ones, and graphs shaped like those of training."""

import copy
import functools
import random
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from collective_graphs import C10D
from hypothesis import strategies as st
from sharded_models import Keep
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.bucketing.plan import ByCap, Eligible, MergePlan
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import KINDS, Kind, Tag, kind_of, set_tag
from torch_ext_bucketing.planner.cap_search import BySearch
from torch_ext_bucketing.planner.schedule.policy import Options, Policy, policies_of
from torch_ext_bucketing.reports.planner import CapsReport
from torch_ext_bucketing.testing.training import ModelConfig, Transformer

WORLD = 2
DTYPES = (torch.float32, torch.bfloat16)
_aten = torch.ops.aten
_MODE = FakeTensorMode()


def fresh(numel: int, dtype: torch.dtype) -> torch.Tensor:
    with _MODE:
        return torch.empty(numel, dtype=dtype)


shared = functools.cache(fresh)

OPTIONS = st.builds(
    Options,
    limit_bytes=st.one_of(st.none(), st.integers(0, 5000)),
    window=st.integers(0, 30),
    fill=st.integers(0, 30),
    depth=st.integers(0, 3),
    max_prefetch=st.integers(0, 50),
    deadlines=st.booleans(),
    max_run=st.one_of(st.none(), st.integers(1, 9)),
)


class Builder:
    """Builds a graph of vectors with ``WORLD * n`` elements, which every collective accepts."""

    def __init__(self, share: bool = False, mode: FakeTensorMode = _MODE) -> None:
        self.graph = fx.Graph()
        self.fake = shared if share else fresh
        self.mode = mode
        self.leaves: list[fx.Node] = []

    def shaped(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> fx.Node:
        """Add an input of this shape."""
        node = self.graph.placeholder(f"p{len(self.leaves)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.leaves.append(node)
        return node

    def op(self, target: Any, *args: Any) -> fx.Node:
        """Add a call; run the operator on fake tensors for its value."""
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def call(self, target, args, numel, dtype) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = self.fake(numel, dtype)
        return node

    def leaf(self, numel: int, dtype: torch.dtype) -> fx.Node:
        node = self.graph.placeholder(f"p{len(self.leaves)}")
        node.meta["val"] = self.fake(numel, dtype)
        self.leaves.append(node)
        return node

    def collective(self, kind: str, x: fx.Node, group: str, op: str = "sum") -> fx.Node:
        """Add a start and its wait; return a node with as many elements as ``x``."""
        n, dtype = x.meta["val"].numel(), x.meta["val"].dtype
        if kind == "all_gather":
            start = self.call(
                C10D.all_gather_into_tensor.default, (x, WORLD, group), n * WORLD, dtype
            )
            wait = self.call(C10D.wait_tensor.default, (start,), n * WORLD, dtype)
            return self.call(_aten.slice.Tensor, (wait, 0, 0, n), n, dtype)
        if kind == "reduce_scatter":
            start = self.call(
                C10D.reduce_scatter_tensor.default, (x, op, WORLD, group), n // WORLD, dtype
            )
            wait = self.call(C10D.wait_tensor.default, (start,), n // WORLD, dtype)
            return self.call(_aten.cat.default, ([wait] * WORLD,), n, dtype)
        start = self.call(C10D.all_reduce.default, (x, op, group), n, dtype)
        return self.call(C10D.wait_tensor.default, (start,), n, dtype)

    def add(self, x: fx.Node, y: fx.Node) -> fx.Node:
        val = x.meta["val"]
        return self.call(_aten.add.Tensor, (x, y), val.numel(), val.dtype)

    def write(self, x: fx.Node, value: fx.Node) -> fx.Node:
        val = x.meta["val"]
        return self.call(_aten.copy_.default, (x, value), val.numel(), val.dtype)

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        self.graph.output(list(outputs))
        return fx.GraphModule({}, self.graph)


def random_graph(
    seed: int, collectives: int, groups: Sequence[str], writes: bool = True, share: bool = True
) -> fx.GraphModule:
    """Build a graph of collectives of three kinds and two dtypes on ``groups``, with sums between."""
    rng = random.Random(seed)
    builder = Builder(share)
    values = [builder.leaf(WORLD * rng.randint(1, 40), rng.choice(DTYPES)) for _ in range(6)]
    leaves = list(values)
    pending: list[tuple[str, fx.Node, str]] = []
    outputs: list[fx.Node] = []

    def same(x: fx.Node) -> list[fx.Node]:
        return [v for v in values if kept(v) == kept(x)]

    def kept(v: fx.Node) -> tuple[int, torch.dtype]:
        return v.meta["val"].numel(), v.meta["val"].dtype

    for _ in range(collectives):
        # Mostly an input, like a parameter; otherwise a value that depends on collectives.
        x = rng.choice(leaves if rng.random() < 0.6 else values)
        pending.append((rng.choice(KINDS), x, rng.choice(groups)))
        if rng.random() < 0.3:
            continue
        while pending:
            values.append(builder.collective(*pending.pop(rng.randrange(len(pending)))))
            outputs.append(values[-1])
            if rng.random() < 0.5:
                values.append(builder.add(values[-1], rng.choice(same(values[-1]))))
                outputs.append(values[-1])
            if writes and rng.random() < 0.08:
                leaf = rng.choice(leaves)
                builder.write(leaf, rng.choice(same(leaf)))
    while pending:
        outputs.append(builder.collective(*pending.pop()))
    gm = builder.finish(outputs)
    for i, node in enumerate(gm.graph.nodes):
        kind = kind_of(node)
        if kind is not None and rng.random() < 0.75:
            set_tag(node, Tag(kind, (f"w{i}",)))
    return gm


def odd_graph(seed: int, groups: Sequence[str]) -> tuple[fx.GraphModule, bool]:
    """Build a graph of unusual features on ``groups``, tagged with parameters of module ``m``."""
    rng = random.Random(seed)
    b = Builder()
    runs = True
    values: list[fx.Node] = []
    for _ in range(rng.randint(0, 5)):
        dims = rng.choice((0, 1, 1, 1, 2, 2))
        shape = tuple(rng.choice((0, 1, 2, 2, 4, 6)) for _ in range(dims))
        values.append(b.shaped(shape, rng.choice((*DTYPES, torch.float32, torch.int64))))
    outputs: list[fx.Node] = []
    for _ in range(rng.randint(0, 14) if values else 0):
        x = rng.choice(b.leaves if rng.random() < 0.5 else values)
        val, group = x.meta["val"], rng.choice(groups)
        alike = [v for v in values if v.meta["val"].shape == val.shape]
        what = rng.random()
        if what < 0.55:
            kind, op = rng.choice(KINDS), rng.choice(("sum", "sum", "avg"))
            divides = val.ndim and val.shape[0] % WORLD == 0
            if kind == "reduce_scatter" and not divides:
                if not val.ndim or rng.random() < 0.8:
                    continue
                runs = False  # chunks of unequal size
            if kind == "all_gather" and not val.ndim:
                runs = False
            target, *args = {
                "all_gather": (C10D.all_gather_into_tensor.default, WORLD),
                "reduce_scatter": (C10D.reduce_scatter_tensor.default, op, WORLD),
                "all_reduce": (C10D.all_reduce.default, op),
            }[kind]
            start = b.op(target, x, *args, group)
            for _ in range(rng.choice((0, 1, 1, 1, 1, 1, 1, 1, 2))):
                values.append(b.op(C10D.wait_tensor.default, start))
                outputs += [values[-1]] * (rng.random() < 0.8)
            if rng.random() < 0.05:
                outputs.append(start)
        elif what < 0.7:
            values.append(b.op(_aten.mul.Tensor, x, 2))
        elif what < 0.8:
            values.append(b.op(_aten.add.Tensor, x, rng.choice(alike)))
        elif what < 0.87 and val.ndim == 2:
            values.append(b.op(_aten.t.default, x))
        elif what < 0.9 and val.ndim == 2 and val.dtype is not torch.int64:
            values.append(b.op(_aten.mm.default, x, b.op(_aten.t.default, x)))
        elif what < 0.96:
            same = [v for v in alike if v.meta["val"].dtype == val.dtype]
            b.op(_aten.copy_.default, x, rng.choice(same))
        elif val.is_contiguous():
            outputs.append(b.op(C10D.all_reduce_.default, x, "sum", group))
        else:
            values.append(b.op(C10D.wait_tensor.default, x))
    for node in b.graph.nodes:
        kind = kind_of(node)
        if kind is not None and rng.random() < 0.8:
            set_tag(node, Tag(kind, (f"m.{rng.choice('abc')}.w{rng.randrange(4)}",)))
    if rng.random() < 0.95 or not any(n.op == "call_function" for n in b.graph.nodes):
        b.graph.output(outputs)
    else:
        runs = False
    nodes = list(b.graph.nodes)
    if rng.random() < 0.04 and len(nodes) > 2:  # out of order
        rng.choice(nodes[:-1]).append(rng.choice(nodes[:-1]))
        runs = False
    if rng.random() < 0.04:
        for node in rng.sample(nodes, len(nodes) // 2):
            node.meta.pop("val", None)
        runs = False
    return fx.GraphModule({}, b.graph), runs


def real_inputs(gm: fx.GraphModule, world: int = WORLD) -> list[list[torch.Tensor]]:
    """Make inputs per rank: integers so small that sums are exact in bfloat16, in any order."""
    leaves = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return [
        [
            ((torch.arange(v.numel()) * (i + 2) + rank) % 3).to(v.dtype).view(v.shape)
            for i, v in enumerate(leaves)
        ]
        for rank in range(world)
    ]


def layered_graph(
    nodes: int, collectives: int, groups: Sequence[str], share: bool = True
) -> fx.GraphModule:
    """Build a graph shaped like a training step, with about this many nodes and collectives."""
    builder = Builder(share)
    per_layer = 10  # 6 all-gathers, 2 all-reduces on the path, 2 reduce-scatters
    layers = max(1, collectives // per_layer)
    compute = max(1, (nodes - 2 * collectives - 6 * layers) // layers - 8)
    shards = [[builder.leaf(64, DTYPES[1]) for _ in range(6)] for _ in range(layers)]
    x = builder.leaf(64, DTYPES[1])
    outputs = []
    for layer in shards:
        full = [builder.collective("all_gather", p, groups[0]) for p in layer]
        for i in range(compute):
            x = builder.add(x, full[i % 6])
            if i in (compute // 3, 2 * compute // 3):
                x = builder.collective("all_reduce", x, groups[1])
            if i % 7 == 0:
                outputs.append(x)
        outputs += [builder.collective("reduce_scatter", v, groups[0], "avg") for v in full[:2]]
        outputs += [builder.collective("reduce_scatter", x, groups[0], "avg") for _ in range(1)]
    gm = builder.finish(outputs)
    for i, node in enumerate(gm.graph.nodes):
        kind = kind_of(node)
        if kind in ("all_gather", "reduce_scatter"):
            set_tag(node, Tag(kind, (f"w{i}",)))
    return gm


# --- graphs for schedulers ------------------------------------------------------------------------

DIM = 64


class Trainer(Builder):
    """Builds graphs of matrix products and collectives of matrices."""

    def mm(self, x: fx.Node, w: fx.Node) -> fx.Node:
        node = self.graph.call_function(_aten.mm.default, (x, w))
        with self.mode:
            node.meta["val"] = torch.empty(
                x.meta["val"].shape[0], w.meta["val"].shape[1], dtype=x.meta["val"].dtype
            )
        return node

    def start(self, kind: str, x: fx.Node, fqn: str = "") -> fx.Node:
        rows, columns = x.meta["val"].shape
        if kind == "all_gather":
            target, args, rows = C10D.all_gather_into_tensor.default, (x, 2, "0"), rows * 2
        elif kind == "all_to_all":
            sizes = [rows // 2] * 2
            target, args = C10D.all_to_all_single.default, (x, sizes, sizes, "0")
        else:
            target, args = C10D.reduce_scatter_tensor.default, (x, "sum", 2, "0")
            rows //= 2
        start = self.graph.call_function(target, args)
        wait = self.graph.call_function(C10D.wait_tensor.default, (start,))
        for node in (start, wait):
            with self.mode:
                node.meta["val"] = torch.empty(rows, columns)
        if fqn:
            set_tag(start, Tag(kind, (fqn,)))
        return wait

    def matrix(self, rows: int = DIM) -> fx.Node:
        return self.shaped((rows, DIM))


def forward_graph(layers: int = 3) -> fx.GraphModule:
    """Build all-gather, product, all-gather, product, ...: eager order without prefetch."""
    b = Trainer()
    shards = [b.matrix(DIM // 2) for _ in range(layers)]
    x = b.matrix()
    for i, shard in enumerate(shards):
        x = b.mm(x, b.start("all_gather", shard, f"layers.{i}.w"))
    return b.finish([x])


def backward_graph(layers: int = 4, products: int = 3) -> fx.GraphModule:
    """Build layers of products, and all reduce-scatters at the end, as a topological sort does."""
    b = Trainer()
    x, w = b.matrix(), b.matrix()
    gradients = []
    for _ in range(layers):
        for _ in range(products):
            x = b.mm(x, w)
        gradients.append(b.mm(x, w))
    return b.finish(
        [b.start("reduce_scatter", g, f"layers.{i}.w") for i, g in enumerate(gradients)]
    )


def machine(collective_ms: float = 1.0, mm_ms: float = 1.0) -> teb.Machine:
    """Make a machine with these times for DIM x DIM products and for collectives."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return teb.Machine(
        flops={"float32": 2 * DIM**3 / (mm_ms * 1e-3)},
        bandwidth=1e18,
        kernel_ms=1e-6,
        collectives={(k, 2): ((1, collective_ms), (2**40, collective_ms)) for k in kinds},
    )


def order_of(gm: fx.GraphModule) -> str:
    skip = ("placeholder", "output", "get_attr")
    return " ".join(n.name for n in gm.graph.nodes if n.op not in skip)


def demo_graphs() -> dict[str, fx.GraphModule]:
    """Copy the demo model's forward and backward graphs, with one collective per parameter."""
    return {stage: copy.deepcopy(gm) for stage, gm in _traced_demo().items()}


@functools.cache
def _traced_demo() -> dict[str, fx.GraphModule]:
    found = Keep()
    torch._dynamo.reset()
    config = ModelConfig(layers=2)
    model = teb.data_parallel(Transformer(config), init_device_mesh("cpu", (2,)))
    compiled = torch.compile(model, backend=teb.backend(found, [teb.ReshardAfterForward()]))
    compiled(torch.zeros(2, config.max_seq, dtype=torch.long)).sum().backward()
    return {stage: fx.GraphModule(gm, copy.deepcopy(gm.graph)) for stage, gm in found.items()}


def choose_caps(
    graph: fx.Graph | GraphAnalysis,
    policies: Policy | Sequence[Policy],
    *,
    kinds: Sequence[Kind] = KINDS[:2],
    eligible: Eligible = "tag",
    **options: Any,
) -> tuple[MergePlan, CapsReport]:
    """Search for byte caps of these kinds; return the plan and the report of the search."""
    by_cap = ByCap(kinds=kinds, eligible=eligible)
    analysis = graph if isinstance(graph, GraphAnalysis) else GraphAnalysis(graph)
    found = BySearch(policies_of(policies), by_cap, **options).search(analysis)
    return found.plan, found.report
