"""The movable nodes of a graph as columns, one entry per node: what orders are made of."""

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
        dependencies: the nodes, and what each one needs.
        liveness: what each one allocates and touches.
        ms: time on the node's stream; 0 for what :mod:`.graph.uneven` leaves out, and for what
            nothing reads.
        group: process group of a collective, or None.
        start_of: for a wait, the place of its collective, or -1.
        compute: whether it is a compute node.
        reduces: whether it is a reduce-scatter.
        view: whether it runs no kernel.
        graph: that the table is of, or was made from.
        members: of a bucket that is only planned, by the place of its start: the starts in it.
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
    graph: GraphAnalysis
    members: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ms)

    def streams_of(self, group: str | None) -> tuple[str | None, ...]:
        """What has to take one after the other, with a collective of that group, or with a kernel
        where it is None: its stream, and the network level if others share that."""
        level = None if group is None else self.shared.get(group)
        return (group,) if level is None else (group, level)

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
