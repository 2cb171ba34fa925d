"""Which collectives are FSDP's by their place in the graph, for graphs without tags."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from ..graph.analysis import GraphAnalysis
from ..graph.collectives import is_wait


def fsdp_starts(analysis: GraphAnalysis) -> dict[fx.Node, None]:
    """The starts that torch takes for FSDP's by structure, in graph order.

    A gather that derives from exactly one placeholder (``is_fsdp_all_gather``), a reduce-scatter
    whose result reaches nothing but outputs, by operators of one input
    (``is_fsdp_reduce_scatter_wait``), and an all-reduce on the group of such a gather
    (``bucket_fsdp_all_reduce``). torch walks the graph once per collective; this is one walk each
    way for all of them.
    """
    nodes = analysis.nodes
    several: Any = object()
    source: dict[fx.Node, Any] = {}  # the only placeholder behind a node, None, or several
    for node in nodes:
        if node.op == "placeholder":
            source[node] = node
            continue
        found = None
        for arg in node.all_input_nodes:
            theirs = source.get(arg)
            if theirs is None or theirs is found:
                continue
            if found is not None:
                found = several
                break
            found = theirs
        source[node] = found
    only_outputs: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        only_outputs[node] = all(
            user.op == "output" or (len(user.all_input_nodes) == 1 and only_outputs[user])
            for user in node.users
        )

    gathers = [c for c in analysis.collectives.values() if c.kind == "all_gather"]
    gathers = [c for c in gathers if source[c.start] not in (None, several)]
    groups = dict.fromkeys(c.group for c in gathers)
    ours = dict.fromkeys(c.start for c in gathers)
    starts: dict[fx.Node, None] = {}
    for start, c in analysis.collectives.items():
        if c.kind == "reduce_scatter":
            waits = [u for u in start.users if is_wait(u)]
            matches = bool(waits) and all(w.users and only_outputs[w] for w in waits)
        elif c.kind == "all_reduce":
            matches = c.group in groups
        else:
            matches = start in ours
        if matches:
            starts[start] = None
    return starts
