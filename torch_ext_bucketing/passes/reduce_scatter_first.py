"""The pass that gives hybrid sharding the order of eager FSDP2's reductions."""

from __future__ import annotations

from ..reports.rewrites import ScatterReport
from ..rewrites.reduce_scatter_first import reduce_scatter_first
from .base import Compilation, GraphLike, GraphPass, Stage, Tags, graph_of

__all__ = ["ReduceScatterFirst"]


class ReduceScatterFirst(GraphPass):
    """Reduce-scatter over the shards before all-reducing over the replicas (HSDP).

    torchtitan's ``hybrid_shard`` does it the other way round, and so sends whole gradients over the
    replicas' network: as many times the bytes as there are shards, and other bits than eager
    FSDP2's. See :mod:`.rewrites.reduce_scatter_first`. A graph in eager's order already is left as
    it is.
    """

    stage: Stage = "joint"
    needs = (Tags,)

    def __init__(self) -> None:
        self.last_report: ScatterReport | None = None

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        self.last_report = reduce_scatter_first(graph_of(graph))
        compilation.report.rewrites.append(self.last_report)

    def __repr__(self) -> str:
        return "ReduceScatterFirst()"
