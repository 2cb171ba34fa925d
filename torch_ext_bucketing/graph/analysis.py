"""Share facts about one state of a graph among planning, searching and scheduling.

All three need dependencies, writes and live bytes. Computing each of these takes a pass over the
graph or more, and the result is valid as long as the graph does not change::

    analysis = GraphAnalysis(graph)
    ByCap(25.0).plan(analysis)          writes
    BySearch(policies).plan(analysis)   writes, dependencies, live bytes
    apply_plan(graph, plan)             the analysis is outdated now
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch.fx as fx

from .._torch.aot import stage_of
from .collectives import KINDS, Kind, group_name, is_collective, is_compute, kind_of
from .dependencies import Dependencies, unused
from .fusion import Fused, fused
from .liveness import Storages, storages_of, with_fused
from .records import Collective, gradient_sums
from .regions import positions
from .size_hints import GivenHints, SizeHints
from .uneven import ShardSide, shard_side
from .unwrap import GraphLike, graph_of
from .work import result_bytes
from .writes import Writes


class GraphAnalysis:
    """Facts about a graph, each computed once, at its first use.

    Args:
        graph: in topological order, with fake tensors in ``meta["val"]``. It must not change.
        size_hints: numbers for sizes that depend on data; see :func:`.backend`.
        donated: whether an input is freed at its last use; None: :func:`.donated_by_autograd`.
        external_live_bytes: bytes in memory during the whole run that are not inputs of the graph.
        fuses: whether Inductor runs the graph, so that elementwise operators and reductions are its
            kernels.
    """

    def __init__(
        self,
        graph: fx.Graph,
        size_hints: SizeHints | GivenHints = None,
        *,
        donated: Callable[[fx.Node], bool] | None = None,
        external_live_bytes: int = 0,
        fuses: bool = False,
    ) -> None:
        self.graph = graph
        self.fuses = fuses
        self.hints = SizeHints.of(size_hints)
        self.external_live_bytes = external_live_bytes
        self._donated = donated
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.kinds: dict[fx.Node, Kind] = {n: k for n in self.nodes if (k := kind_of(n))}

    @staticmethod
    def of(graph: GraphLike | GraphAnalysis) -> GraphAnalysis:
        """Return an analysis as it is; analyze a graph, without size hints."""
        return graph if isinstance(graph, GraphAnalysis) else GraphAnalysis(graph_of(graph))

    @cached_property
    def stage(self) -> str:
        return stage_of(self.graph)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of collectives of each kind in the graph."""
        found = Counter[str](self.kinds.values())
        return {kind: found[kind] for kind in KINDS if found[kind]}

    @cached_property
    def collectives(self) -> dict[fx.Node, Collective]:
        """The record of each start, in graph order."""
        return {start: Collective(start, kind) for start, kind in self.kinds.items()}

    @cached_property
    def gradient_sums(self) -> dict[fx.Node, Collective]:
        """The reductions that add gradients, by start; see :func:`.gradient_sums`."""
        return gradient_sums(self.collectives)

    @cached_property
    def groups(self) -> dict[fx.Node, str]:
        """Name of each start's process group, all-to-alls included, in graph order."""
        return {n: group_name(n) for n in self.nodes if is_collective(n)}

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """Place of every node in the graph, from 0."""
        return positions(self.graph)

    @cached_property
    def writes(self) -> Writes:
        """Which nodes write to tensors, and which may share memory."""
        return Writes(self.nodes)

    @cached_property
    def compute_before(self) -> dict[fx.Node, int]:
        """Number of compute nodes, in graph order, up to the last one that each node depends on.

        A node's own place is less useful, since a sort may put all reduce-scatters at the end.
        """
        reached: dict[fx.Node, int] = {}
        count = 0
        for node in self.nodes:
            reached[node] = max((reached[n] for n in node.all_input_nodes), default=0)
            if is_compute(node):
                count += 1
                reached[node] = count
        return reached

    @cached_property
    def shard_side(self) -> ShardSide:
        """Nodes that may be different on other ranks; see :mod:`.uneven`."""
        return shard_side(self.graph, self.hints)

    @cached_property
    def free(self) -> set[fx.Node]:
        """Nodes that take no time: those of :attr:`shard_side`, and those without a user."""
        return {*self.shard_side.nodes, *unused(self.dependencies.nodes)}

    @cached_property
    def dependencies(self) -> Dependencies:
        """The movable nodes, and the nodes that each one depends on."""
        return Dependencies(self.nodes, self.writes)

    @cached_property
    def liveness(self) -> Storages:
        """The storages that each movable node allocates and touches."""
        live = storages_of(
            self.graph,
            self.dependencies,
            self.shard_side,
            self.hints,
            self._donated,
            self.external_live_bytes,
        )
        if self.fused is None:
            return live
        return with_fused(live, self.dependencies, live.of_node, self.fused)

    @cached_property
    def fused(self) -> Fused | None:
        """The kernels that Inductor makes of the movable nodes, if it does."""
        if not self.fuses:
            return None
        found = fused(self.dependencies.nodes, self.result_bytes, self.free)
        found.within.update(unused(self.dependencies.nodes))  # Inductor drops them
        return found

    def result_bytes(self, node: fx.Node) -> int:
        """Count the bytes of the tensors that a node returns."""
        return result_bytes(node, self.hints)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of live bytes in the graph's order."""
        return self.liveness.peak(range(len(self.dependencies.nodes)))
