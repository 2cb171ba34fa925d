"""Order a graph's nodes: a topological sort, and Inductor's control dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.fx as fx

from .private import private_torch

with private_torch():
    from torch.utils._ordered_set import OrderedSet


def sort_topologically(graph: fx.Graph) -> None:
    """Move nodes after their inputs, and keep the order where it is valid.

    The order is that of Inductor's ``stable_topological_sort``, whose module takes longer to import
    than a graph to plan.

    Raises:
        ValueError: the graph has a cycle.
    """
    placed: dict[fx.Node, None] = {}
    waiting: dict[fx.Node, list[fx.Node]] = {}
    left = [node for node in reversed(graph.nodes) if node.op != "output"]
    size = len(left)
    while left:
        node = left.pop()
        if any(need not in placed for need in node.all_input_nodes):
            needs: list[fx.Node] = []
            fx.map_arg((node.args, node.kwargs), needs.append)
            last = next(need for need in reversed(needs) if need not in placed)
            waiting.setdefault(last, []).append(node)
            continue
        before = next(reversed(placed), None)
        if before is not None and before.next is not node:
            before.append(node)
        placed[node] = None
        left += reversed(waiting.pop(node, []))
    if len(placed) != size:
        raise ValueError("the graph has a cycle")


def run_after(graph: fx.Graph, before: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor run each node after its nodes in ``before``, which precede it in the graph.

    Wrapped nodes become submodules of the graph's ``GraphModule``.
    """
    with private_torch():
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    preserve_node_ordering(graph, {node: OrderedSet(first) for node, first in before.items()})
