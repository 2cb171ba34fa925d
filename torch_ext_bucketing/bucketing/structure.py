"""Which collectives are FSDP's by their place in the graph, for graphs without tags."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from ..graph.collectives import group_name, is_wait, kind_of

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


def fsdp_starts(graph: fx.Graph) -> dict[fx.Node, None]:
    """The starts that torch takes for FSDP's by structure, in graph order.

    A gather that derives from exactly one placeholder (``is_fsdp_all_gather``), a reduce-scatter
    whose result reaches nothing but outputs, by operators of one input
    (``is_fsdp_reduce_scatter_wait``), and an all-reduce on the group of such a gather
    (``bucket_fsdp_all_reduce``). torch walks the graph once per collective; this is one walk each
    way for all of them.
    """
    nodes = list(graph.nodes)
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

    gathers = [n for n in nodes if kind_of(n) == "all_gather"]
    gathers = [n for n in gathers if source[n] is not None and source[n] is not several]
    groups = dict.fromkeys(group_name(n) for n in gathers)
    ours = dict.fromkeys(gathers)
    found_starts: dict[fx.Node, None] = {}
    for node in nodes:
        kind = kind_of(node)
        if kind == "reduce_scatter":
            waits = [u for u in node.users if is_wait(u)]
            matches = bool(waits) and all(w.users and only_outputs[w] for w in waits)
        elif kind == "all_reduce":
            matches = group_name(node) in groups
        else:
            matches = node in ours
        if matches:
            found_starts[node] = None
    return found_starts
