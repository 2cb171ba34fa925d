"""Make random joint graphs, and planners of what stays gathered or saved for them."""

import random
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx
from random_graphs import Builder

from torch_ext_bucketing.fsdp.tagging import parameter_chains
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.nodes import Tag, set_tag
from torch_ext_bucketing.passes.reshard_to import make_smaller_group, what_fits
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import Level, Machine
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.planner.keep.partitioned import PartitionedModel

GROUP = "0"
_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


BLOCKS = Units.of([(f"layers.{number}",) for number in range(300)])


class JointBuilder(Builder):
    """A joint graph under construction; ``tag`` is the phase that tracing would mark nodes with."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.tag = "is_forward"

    def given(self, name: str, *shape: int) -> fx.Node:
        node = self.shaped(shape)
        node.name, node.target = name, name
        node.meta["partitioner_tag"] = self.tag
        return node

    def op(self, target: Any, *args: Any) -> fx.Node:
        node = super().op(target, *args)
        node.meta["partitioner_tag"] = self.tag
        return node

    def mm(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.op(_aten.mm.default, x, y)

    def t(self, x: fx.Node) -> fx.Node:
        return self.op(_aten.t.default, x)

    def gather(self, shard: fx.Node, fqn: str) -> fx.Node:
        start = self.op(_c10d.all_gather_into_tensor.default, shard, self.ranks, GROUP)
        set_tag(start, Tag("all_gather", (fqn,)))
        return self.op(_c10d.wait_tensor.default, start)

    def scatter(self, full: fx.Node, fqn: str) -> fx.Node:
        start = self.op(_c10d.reduce_scatter_tensor.default, full, "avg", self.ranks, GROUP)
        set_tag(start, Tag("reduce_scatter", (fqn,)))
        return self.op(_c10d.wait_tensor.default, start)


def random_joint(
    seed: int, units: int, ranks: int = 2, period: int = 0
) -> tuple[fx.Graph, Machine]:
    """Make a chain of layers of random widths, and a machine for it."""
    rng = random.Random(seed)
    j = JointBuilder(ranks)
    rows = 64 * rng.randint(1, 8)
    drawn = period or units
    widths = [64 * rng.randint(1, 8) for _ in range(drawn + (not period))]
    names: list[list[str]] = []
    shards: dict[str, fx.Node] = {}
    square: dict[int, fx.Node] = {}
    inner = [64 * rng.randint(1, 12) if rng.random() < 0.4 else 0 for _ in range(drawn)]
    more = [rng.choice((0, 0, 1, 3)) for _ in range(drawn)]
    relu = [rng.random() < 0.5 for _ in range(drawn)]
    again = -(-units // drawn)
    widths = (widths * again + widths[:1])[: units + 1] if period else widths
    inner, more, relu = inner * again, more * again, relu * again
    for k in range(units):
        sizes = [(widths[k], widths[k + 1])]
        if inner[k]:
            sizes = [(widths[k], inner[k]), (inner[k], widths[k + 1])]
        mine = [f"layers.{k}.w{i}" for i in range(len(sizes))]
        for name, (first, second) in zip(mine, sizes, strict=True):
            shards[name] = j.given(name.replace(".", "_"), first // ranks, second)
        names.append(mine)
        if more[k]:
            square[k] = j.given(f"square_{k}", widths[k + 1], widths[k + 1])
    x = j.given("x", rows, widths[0])
    tangent = j.given("tangents_1", rows, widths[-1])

    undo: list[tuple[str, fx.Node, fx.Node]] = []  # what backward does, last first
    for k in range(units):
        for name in names[k]:
            full = j.gather(shards[name], name)
            undo.append((name, x, full))
            x = j.mm(x, full)
        for _ in range(more[k]):
            undo.append(("", x, square[k]))
            x = j.mm(x, square[k])
        if relu[k]:
            x = j.op(_aten.relu.default, x)
            undo.append(("relu", x, x))
    loss = x

    j.tag = "is_backward"
    grad, gradients = tangent, {}
    for name, given, weight in reversed(undo):
        if name == "relu":
            grad = j.op(_aten.threshold_backward.default, grad, given, 0)
            continue
        if name:
            gradients[name] = j.scatter(j.mm(j.t(given), grad), name)
        grad = j.mm(grad, j.t(weight))
    j.graph.output((loss, *(gradients[name] for mine in names for name in mine)))

    rate = 1e12
    flops = sum(2.0 * rows * n.meta["val"].numel() for n in shards.values()) * ranks * 3
    nbytes = sum(4.0 * n.meta["val"].numel() for n in shards.values()) * ranks * 3
    bandwidth = nbytes / (flops / rate * rng.choice((0.25, 0.5, 1.0, 2.0, 4.0)))
    network = Level(bandwidth, latency_ms=1e-4)
    machine = Machine(
        name="random",
        flops={"float32": rate},
        bandwidth=1e15,
        kernel_ms=1e-6,
        ranks_per_node=ranks,
        intra=network,
        inter=network,
    )
    return j.graph, machine


def random_planner(
    seed: int,
    units: int,
    activations: bool = False,
    to: int = 0,
    more: int = 4,
    link: float = 0.0,
    period: int = 0,
) -> KeepPlanner:
    """Return the planner for a :func:`random_joint`, which with ``activations`` chooses these, too.

    With ``to``, the job has twice as many ranks, and backward may gather in a group of that size,
    whose network is ``more`` times as fast. 0: a job of two ranks. With ``link``, activations may be
    parked in host memory: forward's products take ``link`` times as long as copying their results.
    ``period``: see :func:`random_joint`.
    """
    graph, machine = random_joint(seed, units, 2 * max(1, to), period)
    smaller = None
    if to:
        network, group = machine.inter, make_smaller_group(to)
        assert network is not None
        assert group is not None
        fast = replace(network, bandwidth=network.bandwidth * more)
        machine = replace(machine, ranks_per_node=to, intra=fast)
        smaller = what_fits(parameter_chains(graph), group)
    if link:
        products = [
            n
            for n in graph.find_nodes(op="call_function", target=_aten.mm.default)
            if n.meta["partitioner_tag"] == "is_forward"
        ]
        seconds = sum(map(Costs(machine), products)) / 1e3
        nbytes = sum(n.meta["val"].nbytes for n in products)
        machine = replace(machine, host_bandwidth=link * nbytes / seconds)
    costs = Costs(machine)
    partitioned = PartitionedModel(graph, costs, BLOCKS, activations=activations, smaller=smaller)
    return KeepPlanner(partitioned, host_bytes=2**40 if link else 0)
