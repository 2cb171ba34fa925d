"""Merge the all-reduces that find the parameters' largest values (amax).

A weight that is scaled to 8 bits by its largest value needs the maximum over all shards first. That
is a small all-reduce before every all-gather, each as long as the network's latency. This merges
them into one per process group::

    w1 -> max -> all_reduce -> wait -> ... -> mul -> ag      w1 -> max \
                                                                        cat -> all_reduce -> ...
    w2 -> max -> all_reduce -> wait -> ... -> mul -> ag      w2 -> max /

A maximum is exact, so bits do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from .._torch.inductor import sort_topologically
from ..bucketing.pack import pack
from ..graph.analysis import unmergeable
from ..graph.dependencies import Writes
from ..graph.edits import ancestors
from ..graph.nodes import bucket_key, kind_of, reduce_op, tag_of
from ..reports.base import LeftAlone
from ..reports.compile import RewriteReport
from .base import Compilation, GraphPass


@dataclass(frozen=True)
class AmaxReport(RewriteReport):
    """The number of all-reduces in each merged one; the parameters of others are ``left``."""

    rewrite = heading = "largest values merged"
    merged: tuple[int, ...] = ()

    def _lines(self) -> list[str]:
        return [f"{number} all-reduces -> 1" for number in self.merged]


@dataclass(frozen=True, eq=False, repr=False)
class MergeAmax(GraphPass):
    """Find the largest values of all parameters with one all-reduce per process group.

    The first all-gather in 8 bits then waits for all values. See :mod:`.passes.merge_amax`.
    """

    stage = "joint"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        # Only maxima that gathers of parameters wait for: others may be the model's own.
        fqns: dict[fx.Node, dict[str, None]] = {}  # by all-reduce
        for start in graph.nodes:
            tag = tag_of(start)
            if tag is not None and kind_of(start) == "all_gather":
                for node in ancestors([start]):
                    if kind_of(node) == "all_reduce" and reduce_op(node) in ("max", "min"):
                        fqns.setdefault(node, {}).update(dict.fromkeys(tag.fqns))
        groups: dict[Any, list[fx.Node]] = {}
        left_alone: list[LeftAlone] = []
        # Merging moves the reads of all members to one place, so that no write may lie between.
        writes = Writes(graph.nodes).unordered
        for node in [n for n in graph.nodes if n in fqns]:
            why = "the graph writes to tensors" if writes else unmergeable(node)
            if not why and any(ancestor in fqns for ancestor in ancestors([node])):
                why = "it depends on another of these all-reduces"
            if why:
                left_alone.append(LeftAlone(tuple(fqns[node]), why, node.name))
            else:
                groups.setdefault(bucket_key(node), []).append(node)
        merged = [members for members in groups.values() if len(members) > 1]
        for members in merged:
            pack(graph, members, members, members[-1].next)
        if merged:
            sort_topologically(graph)
            graph.lint()
        if merged or left_alone:
            report = AmaxReport(tuple(map(len, merged)), left=tuple(left_alone))
            compilation.report.rewrites.append(report)
