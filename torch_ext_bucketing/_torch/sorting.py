"""torch's topological sort of a graph."""

from __future__ import annotations

import torch.fx as fx

from .private import private_torch


def sort_topologically(graph: fx.Graph) -> None:
    """Move every node behind its inputs, leaving the order alone where it is legal."""
    with private_torch():
        from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
