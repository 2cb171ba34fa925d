"""The pass that frees gathered parameters between forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._torch import aot as _aot
from ..bucketing.units import UnitIndex
from ..tagging.tag_graph import parameter_chains
from ..tagging.tags import tag_of
from .base import Compilation, GraphLike, GraphPass, Stage, graph_of
from .code import call

__all__ = [
    "ReshardAfterForward",
]


class ReshardAfterForward(GraphPass):
    """Free gathered parameters after forward and gather them again for backward.

    Marks every node between a parameter and its first use in computation as ``MUST_RECOMPUTE``, so
    that the partitioner saves the shard and puts a second gather into the backward graph::

        forward   w -> all_gather -> wait -> t -> mm            saved: w
        backward  w -> all_gather -> wait -> t -> t -> mm

    Args:
        keep: FQNs of parameters or modules that stay gathered until backward, as eager FSDP2 keeps
            its root's. A name that no parameter has keeps none.

    Raises:
        TypeError: ``keep`` is a string, or holds something else than strings.
    """

    stage: Stage = "joint"

    def __init__(self, keep: Iterable[str] = ()) -> None:
        if isinstance(keep, str):
            raise TypeError(f"keep must be a list of FQNs, got the string {keep!r}")
        self.keep = tuple(keep)
        UnitIndex([self.keep])

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        kept = UnitIndex([self.keep])
        for start, chain in parameter_chains(graph_of(graph)).items():
            tag = tag_of(start)
            if tag is None or any(kept.unit_of(f) is not None for f in tag.fqns):
                continue
            for node in chain:
                _aot.mark_recompute(node)

    def __repr__(self) -> str:
        return call("ReshardAfterForward", keep=self.keep or None)

    def settings(self) -> tuple[Any, ...]:
        """What is kept."""
        return (self.keep,)
