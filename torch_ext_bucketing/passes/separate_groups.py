"""Move reductions to process groups of their own, so that they overlap with all-gathers.

A process group's collectives run one after the other, on one stream. In the backward of FSDP the
all-gather of the next unit waits for the reduce-scatter of the last one, and the other way round.
They overlap if reductions have a group of their own, of the same ranks::

    one group     AG(2) RS(3) AG(1) RS(2)           two groups    AG(2) AG(1)
                                                                     RS(3) RS(2)

They still share the network's bandwidth, and NCCL keeps buffers for each group.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from .._torch.process_groups import new_groups
from ..errors import check_argument
from ..graph.nodes import FSDP_KINDS, Kind, check_kinds, group_name, kind_of, set_group_name, tag_of
from .base import BUCKETS, ORDER, Compilation, GraphPass


@dataclass(frozen=True, eq=False, repr=False)
class SeparateGroups(GraphPass):
    """Move reductions of gradients to process groups of their own, with the same ranks.

    Put it before the passes that bucket. Create it after the mesh, on every rank at the same point
    of the program, since it creates process groups. Collectives without a tag, and collectives on
    groups that are not in the mesh, do not move.

    Args:
        mesh: each of its dimensions gets a second group. Give a part, such as ``mesh["shard"]``, to
            leave the other dimensions alone.
        kinds: the kinds that move; reduce-scatters by default.
    """

    stage = "forward_backward"
    conflicts_with = frozenset({BUCKETS, ORDER})
    mesh: DeviceMesh
    kinds: Collection[Kind] = FSDP_KINDS[1:]
    second: dict[str, str] = field(init=False, default_factory=dict)
    """Maps the name of each group to the name of its second group."""
    _groups: list[dist.ProcessGroup] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        mesh = self.mesh
        check_argument("mesh", mesh, DeviceMesh)
        self._set(kinds=check_kinds(self.kinds))
        for dim in range(mesh.ndim):
            group = mesh.get_group(dim)
            rows = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            second = new_groups(rows, dist.get_backend(group))
            self.second[group.group_name] = second.group_name
            self._groups.append(second)

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        for node in graph.nodes:
            if kind_of(node) in self.kinds and tag_of(node) is not None:
                second = self.second.get(group_name(node))
                if second is not None:
                    set_group_name(node, second)

    def settings(self) -> tuple[Any, ...]:
        """Return the kinds that move, and the groups that they move to."""
        return (self.kinds, tuple(self.second.items()))
