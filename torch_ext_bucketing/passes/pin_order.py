"""Make Inductor keep an order.

Inductor's scheduler may move a node to anywhere after its inputs: to lower the peak of memory
(``reorder_for_peak_memory``), to start collectives earlier (``enable_simple_overlap``), to have
fewer partitions for CUDA graphs. This pins the order of collectives, copies to and from host
memory, waits and compute nodes. Kernels between them may still fuse and move::

    mm1  mm2  rs  mm3  wait         mm2 after mm1, rs after mm2, mm3 after rs, wait after mm3

It also pins where a bucket of reductions is packed. Inductor allocates the whole buffer for the
first kernel that writes a part of it. That kernel may fuse with the one that computes the part,
long before the other parts exist::

    sum  ...  mm1  cat(sum, mm1)  rs         cat after mm1, with all kernels that copy into it
"""

from __future__ import annotations

import torch
import torch.fx as fx

from .._torch.inductor import run_after
from ..graph.nodes import host_stream, is_collective, is_compute, is_number, is_view, launched_by


def pin_order(graph: fx.Graph) -> int:
    """Pin collectives, waits and compute nodes; return the number of wrapped nodes."""
    packs = {_pack(node) for node in graph.nodes if is_collective(node)} - {None}
    wanted: dict[fx.Node, list[fx.Node]] = {}
    pinned: list[fx.Node] = []
    after: dict[fx.Node, int] = {}  # how many of the pinned nodes run before a node and with it
    for node in graph.nodes:
        # A bucket is packed part by part, so each part counts.
        last = min if node in packs else max
        # A number, such as a size, needs no kernel of the node that it is read from.
        after[node] = (
            0 if is_number(node) else last(map(after.__getitem__, node.all_input_nodes), default=0)
        )
        starts = is_collective(node) or host_stream(node) is not None
        in_order = starts or launched_by(node) is not None or is_compute(node)
        if (in_order or node in packs) and after[node] < len(pinned):
            wanted[node] = pinned[-1:]
            after[node] = len(pinned)
        if in_order:
            pinned.append(node)
            after[node] = len(pinned)
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
