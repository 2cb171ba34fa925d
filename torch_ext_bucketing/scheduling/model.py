"""A graph as the scheduler sees it: nodes by place, with costs, dependencies and live bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch.fx as fx

from ..fsdp.tags import replaced_kind
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import Kind, is_compute, is_view, kind_of, started_by
from ..graph.dependencies import Precedence, unused
from ..graph.graph_of import GraphLike, graph_of
from ..graph.liveness import Storages
from ..graph.size_hints import GivenHints, SizeHints
from ..graph.uneven import ShardSide
from .cost import H100, Costs, Machine
from .model_analysis import ModelAnalysis

__all__ = [
    "Model",
    "model_of",
    "peak_bytes",
]


def model_of(graph: GraphLike | GraphAnalysis, machine: Machine | Costs = H100) -> Model:
    """The model of a graph, in its own order.

    Args:
        graph: a graph, or what is known of it already.
        machine: what nodes are timed for, or the costs of one, so that several models share them.
            They take sizes that depend on data as ``graph`` does where that is an analysis.

    Raises:
        ValueError: the graph is not in topological order.
    """
    if isinstance(machine, Costs):
        costs = machine
        if not isinstance(graph, GraphAnalysis):
            graph = GraphAnalysis(graph_of(graph), costs.hints)
    else:
        graph = GraphAnalysis.of(graph)
        costs = Costs(machine, graph.hints)
    dependencies = graph.dependencies
    free = {*graph.shard_side.nodes, *unused(dependencies.nodes)}
    nodes, index = dependencies.nodes, dependencies.index
    return Model(
        dependencies=dependencies,
        liveness=graph.liveness,
        ms=[0.0 if n in free else costs(n) for n in nodes],
        group=[dependencies.group.get(i) for i in range(len(nodes))],
        start_of=[-1 if (s := started_by(n)) is None else index[s] for n in nodes],
        compute=[is_compute(n) for n in nodes],
        reduces=[replaced_kind(n) == "reduce_scatter" for n in nodes],
        view=[is_view(n) for n in nodes],
        shard_side=graph.shard_side,
        hints=costs.hints,
        shared=costs.shared_levels(dependencies.group.values()),
    )


def peak_bytes(
    gm: GraphLike,
    donated: Callable[[fx.Node], bool] | None = None,
    size_hints: SizeHints | GivenHints = None,
    external_live_bytes: int = 0,
) -> int:
    """The estimated peak of live bytes of a graph in its own order; see :mod:`.graph.liveness`.

    Args:
        gm: a graph with fake tensors in ``meta["val"]``.
        donated: see :class:`.GraphAnalysis`.
        size_hints: as of :func:`.backend`.
        external_live_bytes: see :class:`.GraphAnalysis`.

    Raises:
        TypeError: ``size_hints`` is no whole number and no callable.
        ValueError: the graph is not in topological order, or ``size_hints`` is negative.
    """
    return GraphAnalysis(
        graph_of(gm), size_hints, donated=donated, external_live_bytes=external_live_bytes
    ).peak_bytes


@dataclass(frozen=True, eq=False)
class Model:
    """The movable nodes of a graph, by place, as the scheduler sees them; see :func:`.model_of`.

    Args:
        dependencies: the nodes, and what each one needs.
        liveness: what each one allocates and touches.
        ms: time on the node's stream; 0 for what :mod:`.graph.uneven` leaves out, and for what
            nothing reads.
        group: process group of a collective, or None.
        start_of: for a wait, the place of its collective, or -1.
        compute: whether it is a compute node.
        reduces: whether it is a reduce-scatter.
        view: whether it runs no kernel.
        shard_side: what :mod:`.graph.uneven` finds in the graph.
        members: of a bucket that is only planned, by the place of its start: the starts in it.
        hints: what sizes that depend on data were taken as.
        shared: the network level of each group that is not alone on its level.
    """

    dependencies: Precedence
    liveness: Storages
    ms: list[float]
    group: list[str | None]
    start_of: list[int]
    compute: list[bool]
    reduces: list[bool]
    view: list[bool]
    shard_side: ShardSide
    members: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    hints: SizeHints = field(default_factory=SizeHints)
    shared: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ms)

    @cached_property
    def analysis(self) -> ModelAnalysis:
        """Facts that every order of the model has in common, computed once."""
        return ModelAnalysis(self)

    def part(self, places: Sequence[int], liveness: Storages) -> Model:
        """The model of some of the nodes.

        Args:
            places: of the nodes, in their new order. Collectives of one group and kind are launched
                in this order; of the other dependencies those among these nodes stay.
            liveness: of these nodes.
        """
        nodes = self.dependencies.nodes
        at = [-1] * len(self)
        needs: list[set[int]] = []
        last: dict[tuple[str, Kind | None], int] = {}
        for new, i in enumerate(places):
            at[i] = new
            mine = self.dependencies.needs[i]
            needs.append({at[j] for j in mine if at[j] >= 0 and not self.only_ordered(j, i)})
            group = self.group[i]
            if group is not None:
                key = group, kind_of(nodes[i])
                if key in last:
                    needs[new].add(last[key])
                last[key] = new
        return replace(
            self,
            dependencies=Precedence([nodes[i] for i in places], needs),
            liveness=liveness,
            ms=[self.ms[i] for i in places],
            group=[self.group[i] for i in places],
            start_of=[-1 if self.start_of[i] < 0 else at[self.start_of[i]] for i in places],
            compute=[self.compute[i] for i in places],
            reduces=[self.reduces[i] for i in places],
            view=[self.view[i] for i in places],
            members={at[i]: m for i, m in self.members.items() if at[i] >= 0},
        )

    def only_ordered(self, before: int, after: int) -> bool:
        """Whether the two are starts: then ``after`` needs ``before`` for the launch order alone,
        and not its end."""
        return self.group[before] is not None and self.group[after] is not None

    def needs_end(self, before: int, after: int) -> bool:
        """Whether ``after``, which needs ``before``, can't begin before it has ended: not where
        ``before`` is a start that ``after`` does not wait for, such as a write to its input."""
        if self.group[before] is None:
            return True
        start = self.start_of[after]
        return start == before if start >= 0 else self.view[after]
