"""Write joint graphs of sharded parameters as functions; trace, tag and run them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import C10D, run_all_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ext_bucketing.graph.nodes import Tag, group_name, kind_of, set_group_name, set_tag


class Joint:
    """Records parameters of collectives in a trace, for ``replicas`` groups of ``shards`` ranks."""

    def __init__(self, shards: int, replicas: int = 1) -> None:
        self.shards, self.replicas = shards, replicas
        self.world = shards * replicas
        self._served: list[tuple[str, ...]] = []
        self.groups = {"shards": "shards", "replicas": "replicas"}
        if replicas > 1 or dist.is_initialized():
            across = dist.new_group([i * shards for i in range(replicas)])
            along = dist.new_group(list(range(shards)))
            self.groups = {"shards": along.group_name, "replicas": across.group_name}

    def gather(self, fqn: str, shard: torch.Tensor) -> torch.Tensor:
        """All-gather over the shard group."""
        self._served.append((fqn,))
        group = self.groups["shards"]
        return C10D.wait_tensor(C10D.all_gather_into_tensor(shard, self.shards, group))

    def scatter(self, fqn: str, full: torch.Tensor, op: str = "avg") -> torch.Tensor:
        """Reduce-scatter over the shard group."""
        self._served.append((fqn,))
        group = self.groups["shards"]
        return C10D.wait_tensor(C10D.reduce_scatter_tensor(full, op, self.shards, group))

    def reduce(self, fqn: str, value: torch.Tensor, op: str = "avg") -> torch.Tensor:
        """All-reduce over the replica group."""
        self._served.append((fqn,))
        return C10D.wait_tensor(C10D.all_reduce(value, op, self.groups["replicas"]))

    def trace(self, fn: Callable[..., Any], *inputs: torch.Tensor) -> fx.GraphModule:
        """Trace ``fn`` and tag its collectives, which stand in the order of the calls."""
        self._served.clear()
        with FakeTensorMode() as mode:
            gm = make_fx(fn)(*(mode.from_tensor(x) for x in inputs))
        starts = [n for n in gm.graph.nodes if kind_of(n) is not None]
        for start, fqns in zip(starts, self._served, strict=True):
            set_tag(start, Tag(kind_of(start), fqns))
        return gm

    def named(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Copy the graph with fixed group names: real ones count all groups of the process."""
        names = {name: said for said, name in self.groups.items()}
        graph = fx.Graph()
        graph.output(graph.graph_copy(gm.graph, {}))
        for node in graph.nodes:
            if kind_of(node) is not None:
                set_group_name(node, names[group_name(node)])
        return fx.GraphModule(gm, graph)

    def peers(self, rank: int, group: str) -> list[int]:
        """List the ranks of the group that ``rank`` is in."""
        if group == self.groups["shards"]:
            first = rank - rank % self.shards
            return list(range(first, first + self.shards))
        return list(range(rank % self.shards, self.world, self.shards))

    def run(
        self, gm: fx.GraphModule, inputs: Sequence[Sequence[torch.Tensor]]
    ) -> list[list[torch.Tensor]]:
        """Run the graph on all ranks in lockstep and return the flat outputs of each."""
        return run_all_ranks(gm, inputs, self.peers)

    def inputs(
        self, *shapes: tuple[tuple[int, ...], torch.dtype], seed: int = 0, integers: bool = False
    ) -> list[list[torch.Tensor]]:
        """Draw the inputs of every rank; sums of small integers are exact in any order."""
        generator = torch.Generator().manual_seed(seed)

        def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            if integers:
                return torch.randint(-3, 4, shape, generator=generator).to(dtype)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        return [[draw(*shape) for shape in shapes] for _ in range(self.world)]


def mark_accumulations(gm: fx.GraphModule) -> None:
    """Mark every addition as a gradient accumulation, as AOTAutograd's tracing does."""
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.add.Tensor:
            node.meta["is_gradient_acc"] = True


def collectives(gm: fx.GraphModule) -> list[str]:
    """List the kinds of the collectives in graph order."""
    return [kind for n in gm.graph.nodes if (kind := kind_of(n)) is not None]
