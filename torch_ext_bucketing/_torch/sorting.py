"""Order a graph's nodes: torch's topological sort, and Inductor's control dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.fx as fx

from .private import private_torch

with private_torch():
    from torch.utils._ordered_set import OrderedSet


def sort_topologically(graph: fx.Graph) -> None:
    """Move nodes after their inputs, and keep the order where it is valid."""
    with private_torch():
        from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)


def run_after(graph: fx.Graph, before: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor run each node after its nodes in ``before``, which precede it in the graph.

    Wrapped nodes become submodules of the graph's ``GraphModule``.
    """
    with private_torch():
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    preserve_node_ordering(graph, {node: OrderedSet(first) for node, first in before.items()})
