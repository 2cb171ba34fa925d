"""Choices of what stays gathered against all that there are, on small random joint graphs.

Each choice that can be more than 2% faster than the one that was made, by what no order can beat,
is scheduled, unless what it keeps is above the bound before backward begins: so whether the choice
is within 2% of the best is known, and the best where it is not. Where it is, the best is only known
as far as it was looked at.
"""

import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_ext_bucketing._gc import paused_gc
from torch_ext_bucketing.fsdp.chains import parameter_chains
from torch_ext_bucketing.fsdp.units import Units
from torch_ext_bucketing.graph.tags import Tag, set_tag
from torch_ext_bucketing.planner.cost.machine import Level, Machine
from torch_ext_bucketing.planner.keep.keep import KeepPlanner
from torch_ext_bucketing.rewrites.reshard_to import make_smaller_group, what_fits

GROUP = "0"
_MODE = FakeTensorMode()
_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


BLOCKS = Units.of([(f"layers.{number}",) for number in range(100)])


class _Joint:
    """A joint graph in the making; ``tag`` is what tracing would mark its nodes with."""

    def __init__(self, ranks: int) -> None:
        self.graph = fx.Graph()
        self.ranks = ranks
        self.tag = "is_forward"

    def given(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        with _MODE:
            node.meta = {"val": torch.empty(shape), "partitioner_tag": self.tag}
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with _MODE:
            value = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        node.meta = {"val": value, "partitioner_tag": self.tag}
        return node

    def mm(self, x: fx.Node, y: fx.Node) -> fx.Node:
        return self.call(_aten.mm.default, x, y)

    def t(self, x: fx.Node) -> fx.Node:
        return self.call(_aten.t.default, x)

    def gather(self, shard: fx.Node, fqn: str) -> fx.Node:
        start = self.call(_c10d.all_gather_into_tensor.default, shard, self.ranks, GROUP)
        set_tag(start, Tag("all_gather", (fqn,)))
        return self.call(_c10d.wait_tensor.default, start)

    def scatter(self, full: fx.Node, fqn: str) -> fx.Node:
        start = self.call(_c10d.reduce_scatter_tensor.default, full, "avg", self.ranks, GROUP)
        set_tag(start, Tag("reduce_scatter", (fqn,)))
        return self.call(_c10d.wait_tensor.default, start)


def random_joint(seed: int, units: int, ranks: int = 2) -> tuple[fx.Graph, Machine]:
    """A chain of layers of random widths, and a machine on which communication takes between a
    quarter and four times as long as computation.

    Each layer is a unit: one or two sharded matrices, and up to three products with a matrix that
    is not sharded. Some layers are followed by a wide activation that is saved.
    """
    rng = random.Random(seed)
    j = _Joint(ranks)
    rows = 64 * rng.randint(1, 8)
    widths = [64 * rng.randint(1, 8) for _ in range(units + 1)]
    names: list[list[str]] = []
    shards: dict[str, fx.Node] = {}
    square: dict[int, fx.Node] = {}
    inner = [64 * rng.randint(1, 12) if rng.random() < 0.4 else 0 for _ in range(units)]
    more = [rng.choice((0, 0, 1, 3)) for _ in range(units)]
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
        if rng.random() < 0.5:
            x = j.call(_aten.relu.default, x)
            undo.append(("relu", x, x))
    loss = x

    j.tag = "is_backward"
    grad, gradients = tangent, {}
    for name, given, weight in reversed(undo):
        if name == "relu":
            grad = j.call(_aten.threshold_backward.default, grad, given, 0)
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
    seed: int, units: int, activations: bool = False, to: int = 0, more: int = 4
) -> KeepPlanner:
    """What chooses for one of :func:`random_joint`, ``activations`` that are saved, too. With
    ``to``, in a job of twice as many ranks, backward may gather in a group of that size, whose
    network is ``more`` times as fast; 0: a job of two ranks."""
    graph, machine = random_joint(seed, units, 2 * max(1, to))
    smaller = None
    if to:
        network, group = machine.inter, make_smaller_group(to)
        assert network is not None
        assert group is not None
        fast = replace(network, bandwidth=network.bandwidth * more)
        machine = replace(machine, ranks_per_node=to, intra=fast)
        smaller = what_fits(parameter_chains(graph), group)
    return KeepPlanner(graph, BLOCKS, machine=machine, activations=activations, smaller=smaller)


CLOSE = 1.02


def against_all(
    models: int,
    most: int,
    least: int = 2,
    first: int = 0,
    activations: bool = False,
    to: int = 0,
) -> dict[str, Any]:
    """Random models of ``least`` to ``most`` units, with seeds from ``first`` on, each with a bound
    between keep-nothing and keep-all: the choice over the best of all choices."""
    dist.init_process_group("fake", rank=0, world_size=2 * max(1, to))
    ratios: list[float] = []
    units: list[int] = []
    choices = scheduled = 0
    choosing, clock = 0.0, time.process_time()
    for seed in range(first, first + models):
        rng = random.Random(seed)
        planner = random_planner(seed, rng.randint(least, most), activations, to)
        everything = planner.scheduled(planner.candidates, 2**60)
        low = planner.reference_bytes
        limit = int(low + rng.random() * max(0, everything.peak_bytes - low))
        start = time.process_time()
        best = chosen = planner.choose(limit)
        choosing += time.process_time() - start
        before = planner.tried
        worth = chosen.step_ms / CLOSE
        with paused_gc():
            for floor_ms, kept in _fitting(planner, limit):
                if floor_ms < min(best.step_ms, worth) or best.above:
                    best = min(best, planner.scheduled(kept, limit), key=lambda o: o.rank)
        parts = sum(k in planner.partitioned.parts for k in planner.candidates)
        choices += 2 ** (len(planner.candidates) - 2 * parts) * 3**parts
        scheduled += planner.tried - before
        ratios.append(chosen.step_ms / best.step_ms)
        units.append(len(planner.candidates))
        if sys.stderr.isatty() or len(units) % 20 == 0:
            print(f"{len(units)} of {models}", file=sys.stderr, flush=True)
    return {
        "models": models,
        "first_seed": first,
        "units": f"{min(units)} to {max(units)}, {statistics.mean(units):.1f} on average",
        "choices": choices,
        "scheduled": scheduled,
        "within_2_percent": sum(r <= CLOSE for r in ratios) / len(ratios),
        "worst": max(ratios),
        "choosing_s": choosing / models,
        "seconds": time.process_time() - clock,
        "ratios": [round(r, 4) for r in ratios if r > 1],
    }


def _fitting(planner: KeepPlanner, limit: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Choices with the least time that they can take. What is kept is there when backward begins,
    so those that are above the bound with that alone are left out."""
    forward_ms = planner.partitioned.forward.paths.bound_ms
    for bits in range(2 ** len(planner.candidates)):
        kept = tuple(k for i, k in enumerate(planner.candidates) if bits >> i & 1)
        if len(planner.partitioned.distinct(kept)) < len(kept):
            continue
        backward = planner.partitioned.models(kept)[1]
        if backward.liveness.at_start <= limit:
            yield forward_ms + backward.paths.bound_ms, kept
