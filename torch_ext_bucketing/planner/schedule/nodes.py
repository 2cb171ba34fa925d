"""The movable nodes of a graph as columns, one entry per node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.liveness import Storages


@dataclass(frozen=True, eq=False)
class NodeTable:
    """The movable nodes of a graph, by place; see :func:`.model_of`.

    Args:
        dependencies: the nodes and their dependencies.
        liveness: the storages that each node allocates and touches.
        ms: milliseconds on the node's stream; 0 for nodes of uneven shards (:mod:`.graph.uneven`)
            and for nodes without a user.
        group: a collective's process group, or None.
        start_of: the place of a wait's collective, or -1.
        compute: whether the node is a compute node.
        reduces: whether it is a reduce-scatter.
        view: whether it runs no kernel.
        host: milliseconds that the host takes to launch the node.
        graph: the analysis of the graph that the table was made from.
        members: the starts in a planned bucket, by the place of the bucket's start.
        shared: the network level of each group that shares it with others.
    """

    dependencies: Precedence
    liveness: Storages
    ms: list[float]
    group: list[str | None]
    start_of: list[int]
    compute: list[bool]
    reduces: list[bool]
    view: list[bool]
    host: list[float]
    graph: GraphAnalysis
    members: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ms)

    def streams_of(self, group: str | None) -> tuple[str | None, ...]:
        """List the streams that a collective of ``group`` keeps busy, or a kernel (None).

        A group that shares its network level keeps that busy, too.
        """
        level = None if group is None else self.shared.get(group)
        return (group,) if level is None else (group, level)

    def only_ordered(self, before: int, after: int) -> bool:
        """Return whether both are starts: ``after`` then only launches after ``before``."""
        return self.group[before] is not None and self.group[after] is not None

    def needs_end(self, before: int, after: int) -> bool:
        """Return whether ``after``, which needs ``before``, can't begin before it has ended.

        A start is an exception unless ``after`` is its wait: a write to its input, for one, only
        needs its launch.
        """
        if self.group[before] is None:
            return True
        start = self.start_of[after]
        return start == before if start >= 0 else self.view[after]
