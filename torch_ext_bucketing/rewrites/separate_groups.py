"""A second process group for reductions, so that they and the gathers need not queue up.

A process group's collectives run one after the other, on one stream. In the backward of FSDP the
gather of the next unit's parameters waits for the reduction of the last one's gradients to end, and
the other way round. With reductions on a group of their own, of the same ranks, they overlap::

    one group     AG(2) RS(3) AG(1) RS(2)           two groups    AG(2) AG(1)
                                                                     RS(3) RS(2)

They share the network's bandwidth all the same, and NCCL keeps buffers for each group.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.process_groups import new_groups
from ..graph.collectives import Kind, check_kinds, group_name, kind_of, set_group_name
from ..graph.tags import tag_of
from ..graph.unwrap import GraphLike, graph_of
from ..passes.base import GraphPass, Stage
from ..passes.facts import Buckets, Order, Tags

if TYPE_CHECKING:
    from ..passes.compilation import Compilation

_REDUCTIONS: tuple[Kind, ...] = ("reduce_scatter",)


@dataclass(frozen=True, eq=False, repr=False)
class SeparateGroups(GraphPass):
    """Move reductions of parameters' gradients to process groups of their own, of the same ranks.

    Comes before the passes that bucket. Make it after the mesh, on every rank at the same point of
    the program: it creates process groups, which all ranks have to do together. Collectives without
    a tag, and those on groups that the mesh does not have, stay where they are.

    Args:
        mesh: whose groups get a second one, dimension after dimension.
        kinds: which collectives move; reduce-scatters by default.
        dims: names or numbers of the dimensions of ``mesh`` that matter; None: all of them.

    Raises:
        ValueError: an unknown kind or dimension.
    """

    stage: ClassVar[Stage] = "forward_backward"
    requires = (Tags,)
    conflicts_with = (Buckets, Order)
    mesh: DeviceMesh
    kinds: Collection[Kind] = _REDUCTIONS
    dims: Iterable[str | int] | None = None
    second: dict[str, str] = field(init=False, default_factory=dict)
    """The second group's name by the first one's."""
    _groups: list[dist.ProcessGroup] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        mesh, dims = self.mesh, None if self.dims is None else tuple(self.dims)
        self._set(kinds=check_kinds(self.kinds), dims=dims)
        given = range(mesh.ndim) if dims is None else dims
        for dim in dict.fromkeys([_number_of(dim, mesh) for dim in given]):
            mine = mesh.get_group(dim)
            rows = mesh.mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
            second = new_groups(rows, dist.get_backend(mine))
            self.second[mine.group_name] = second.group_name
            self._groups.append(second)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        for node in g.nodes:
            if kind_of(node) in self.kinds and tag_of(node) is not None:
                second = self.second.get(group_name(node))
                if second is not None:
                    set_group_name(node, second)

    def settings(self) -> tuple[Any, ...]:
        """The kinds that move, and the groups that they move to."""
        return (self.kinds, tuple(self.second.items()))


def _number_of(dim: str | int, mesh: DeviceMesh) -> int:
    """The number of a mesh's dimension."""
    names = mesh.mesh_dim_names or ()
    if isinstance(dim, str) and dim in names:
        return names.index(dim)
    if isinstance(dim, int) and not isinstance(dim, bool) and 0 <= dim < mesh.ndim:
        return dim
    known = f"; its names are {', '.join(names)}" if names else ""
    raise ValueError(f"the mesh has {mesh.ndim} dimension(s) and none {dim!r}{known}")
