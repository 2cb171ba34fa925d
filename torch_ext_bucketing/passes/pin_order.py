"""Make Inductor keep an order.

Inductor's scheduler may move a node to anywhere after its inputs. This pins how collectives, waits
and compute nodes interleave; the kernels between them may still fuse::

    mm1  rs  mm2  wait  mm3         rs after mm1, mm2 after rs, wait after mm2, mm3 after wait

It also pins where a bucket of reductions is packed. Inductor allocates the whole buffer for the
first kernel that writes a part of it. That kernel may fuse with the one that computes the part,
long before the other parts exist::

    sum  ...  mm1  cat(sum, mm1)  rs         cat after mm1, with all kernels that copy into it
"""

from __future__ import annotations

import torch
import torch.fx as fx

from .._torch.sorting import run_after
from ..graph.collectives import is_collective, is_compute, is_view, started_by


def pin_order(graph: fx.Graph) -> int:
    """Make Inductor keep the graph's order of collectives, waits and compute nodes.

    Args:
        graph: graph of a ``GraphModule``; wrapped nodes become its submodules.

    Returns:
        Number of wrapped nodes.
    """
    packs = {_pack(node) for node in graph.nodes if is_collective(node)} - {None}
    wanted: dict[fx.Node, list[fx.Node]] = {}
    compute: fx.Node | None = None
    since: list[fx.Node] = []  # collectives and waits since then
    for node in graph.nodes:
        if node in packs:
            if compute is not None or since:
                wanted[node] = since[-1:] or [compute]
        elif is_compute(node):
            if since:
                wanted[node] = since
            compute, since = node, []
        elif is_collective(node) or started_by(node) is not None:
            before = [since[-1]] if since else [compute] if compute is not None else []
            if before and before[0] not in node.all_input_nodes:
                wanted[node] = before
            since = [node]
    run_after(graph, wanted)
    return len(wanted)


def _pack(start: fx.Node) -> fx.Node | None:
    """Find the ``cat`` that packs the buffer of a collective and of nothing else."""
    node = start
    while node is start or is_view(node):
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
        if len(node.users) > 1:
            return None
    return node if node.target == torch.ops.aten.cat.default else None
