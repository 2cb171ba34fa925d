"""The pass that frees gathered parameters between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .._torch import aot as _aot
from ..bucketing.units import UnitIndex
from ..reports.rewrites import ReshardReport
from ..rewrites.reshard_to import reshard_to
from ..tagging.tag_graph import parameter_chains
from ..tagging.tags import Tag, tag_of
from .base import Compilation, GraphLike, GraphPass, Stage, graph_of
from .code import call
from .reshard_to import ReadFirstGathers, make_smaller_group

__all__ = [
    "ReshardAfterForward",
]


class ReshardAfterForward(GraphPass):
    """Free gathered parameters after forward and gather them again for backward.

    Marks every node between a parameter and its first use in computation as ``MUST_RECOMPUTE``, so
    that the partitioner saves the shard and puts a second gather into the backward graph::

        forward   w -> all_gather -> wait -> t -> mm            saved: w
        backward  w -> all_gather -> wait -> t -> t -> mm

    With ``to``, that gather is in a smaller group, usually a node's, of a copy that forward leaves
    sharded over it, as with a number as ``reshard_after_forward`` of eager FSDP2, bit for bit (see
    :mod:`.rewrites.reshard_to`). Put it behind :class:`.CombineUses`, so that a parameter with
    several uses leaves one copy; and into :func:`.backend`, which takes the second gather out of
    the forward graph again.

    Args:
        keep: FQNs of parameters or modules that stay gathered until backward, as eager FSDP2 keeps
            its root's. A name that no parameter has keeps none.
        to: the smaller group; None: none, backward gathers over all ranks that share a parameter.
            A number of ranks, for sharding over neighbouring ranks of the job: ranks 0 to
            ``to - 1``, the next ``to``, and so on. It creates process groups: make the pass on
            every rank at the same point of the program. Or a mesh, whose last dimension is meant,
            for shards that lie otherwise, such as around tensor parallelism. All ranks of the
            group that shares a parameter, and no others, are in a row of ``to``: then backward
            gathers as without it. One rank keeps everything, with a warning, as in eager FSDP2.
            Parameters of other groups, such as experts on a mesh of their own, are gathered over
            those; the report lists them.

    Raises:
        TypeError: ``keep`` is a string, or holds something else than strings; ``to`` is no number
            and no mesh.
        ValueError: ``to`` does not divide the ranks of the job, or there is no process group yet.
            In a compile: ``to`` divides no group that parameters are sharded over.
    """

    stage: Stage = "joint"

    def __init__(self, keep: Iterable[str] = (), *, to: DeviceMesh | int | None = None) -> None:
        if isinstance(keep, str):
            raise TypeError(f"keep must be a list of FQNs, got the string {keep!r}")
        self.keep = tuple(keep)
        UnitIndex([self.keep])
        self.to = to
        self._smaller = None if to is None else make_smaller_group(to)
        self.last_report: ReshardReport | None = None

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        kept = UnitIndex([self.keep])

        def is_freed(tag: Tag) -> bool:
            return all(kept.unit_of(f) is None for f in tag.fqns)

        g = graph_of(graph)
        if self.to is not None:
            if self._smaller is not None and _aot.stage_of(g) != "inference":
                self.last_report = reshard_to(g, self._smaller, is_freed)
                if compilation is not None:
                    compilation.report.rewrites.append(self.last_report)
            return
        for start, chain in parameter_chains(g).items():
            tag = tag_of(start)
            if tag is not None and is_freed(tag):
                for node in chain:
                    _aot.mark_recompute(node)

    def follow_ups(self) -> tuple[GraphPass, ...]:
        """With ``to``, what takes the second gathers out of the forward graph."""
        return () if self._smaller is None else (ReadFirstGathers(),)

    def __repr__(self) -> str:
        return call("ReshardAfterForward", keep=self.keep or None, to=self.to)

    def settings(self) -> tuple[Any, ...]:
        """What is kept, and the smaller group with this rank's place in it."""
        return (self.keep, self.to is None, self._smaller)
