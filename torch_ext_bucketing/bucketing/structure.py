"""Which collectives are FSDP's by their place in the graph, for graphs without tags."""

from __future__ import annotations

import torch.fx as fx

from ..graph.analysis import GraphAnalysis
from ..graph.collectives import is_wait
from ..graph.records import Collective


def fsdp_starts(analysis: GraphAnalysis) -> dict[fx.Node, None]:
    """The starts that torch takes for FSDP's by structure, in graph order.

    A gather that derives from exactly one placeholder (``is_fsdp_all_gather``), a reduce-scatter
    whose result reaches nothing but outputs, by operators of one input
    (``is_fsdp_reduce_scatter_wait``), and an all-reduce on the group of such a gather
    (``bucket_fsdp_all_reduce``). torch walks the graph once per collective; this is one walk each
    way for all of them.
    """
    nodes = analysis.nodes
    sources: dict[fx.Node, list[fx.Node]] = {}  # the placeholders behind a node, two at most
    for node in nodes:
        found = dict.fromkeys(s for arg in node.all_input_nodes for s in sources[arg])
        sources[node] = [node] if node.op == "placeholder" else list(found)[:2]
    only_outputs: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        only_outputs[node] = all(
            user.op == "output" or (len(user.all_input_nodes) == 1 and only_outputs[user])
            for user in node.users
        )
    all_gathers = (c for c in analysis.collectives.values() if c.kind == "all_gather")
    gathers = {c.start: c for c in all_gathers if len(sources[c.start]) == 1}
    groups = {c.group for c in gathers.values()}

    def is_ours(c: Collective) -> bool:
        if c.kind == "reduce_scatter":
            waits = [user for user in c.start.users if is_wait(user)]
            return bool(waits) and all(wait.users and only_outputs[wait] for wait in waits)
        return c.start in gathers or (c.kind == "all_reduce" and c.group in groups)

    return {start: None for start, c in analysis.collectives.items() if is_ours(c)}
