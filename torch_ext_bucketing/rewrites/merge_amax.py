"""One all-reduce for the largest values of all parameters that are gathered scaled by them.

A weight that is scaled to 8 bits by its own largest value needs that of all shards first: a small
all-reduce in front of every gather, each as long as the network's latency. Together they are one::

    w1 -> max -> all_reduce -> wait -> ... -> mul -> ag      w1 -> max \\
                                                                        cat -> all_reduce -> ...
    w2 -> max -> all_reduce -> wait -> ... -> mul -> ag      w2 -> max /

A maximum is exact: the bits stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch.fx as fx

from .._torch.sorting import sort_topologically
from ..bucketing.pack import pack
from ..graph.calls import nodes_behind
from ..graph.collectives import bucket_key, kind_of, reduce_op
from ..graph.mergeable import unmergeable
from ..graph.snapshot import unchanged_on_error
from ..graph.tags import tag_of
from ..graph.unwrap import GraphLike, graph_of
from ..graph.writes import Writes
from ..passes.base import GraphPass, Stage
from ..passes.facts import Tags
from ..reports.rewrites import AmaxReport, LeftAlone

if TYPE_CHECKING:
    from ..passes.compilation import Compilation


@dataclass(frozen=True, eq=False, repr=False)
class MergeAmax(GraphPass):
    """One all-reduce per group for the largest values of all parameters that are gathered in 8 bits
    scaled by them; see :mod:`.rewrites.merge_amax`.

    The first gather then waits for all of them. Put it behind :class:`.CombineUses`.
    """

    stage: ClassVar[Stage] = "joint"
    requires = (Tags,)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        found: dict[fx.Node, dict[str, None]] = {}
        for start in g.nodes:
            tag = tag_of(start)
            if tag is not None and kind_of(start) == "all_gather":
                for node in nodes_behind([start]):
                    if kind_of(node) == "all_reduce" and reduce_op(node) in ("max", "min"):
                        found.setdefault(node, {}).update(dict.fromkeys(tag.fqns))
        if not found:
            return
        groups: dict[Any, list[fx.Node]] = {}
        left: list[LeftAlone] = []
        writes = Writes(g.nodes).unordered
        for node in [n for n in g.nodes if n in found]:
            why = "the graph writes to its values" if writes else unmergeable(node)
            if not why and any(other in found for other in nodes_behind([node])):
                why = "it waits for another one"
            if why:
                left.append(LeftAlone(tuple(found[node]), why, node.name))
            else:
                groups.setdefault(bucket_key(node), []).append(node)
        merged = [members for members in groups.values() if len(members) > 1]
        with unchanged_on_error(g):
            for members in merged:
                pack(g, members, members, members[-1].next)
            if merged:
                sort_topologically(g)
                g.lint()
        if merged or left:
            report = AmaxReport(tuple(map(len, merged)), tuple(left))
            compilation.report.rewrites.append(report)
