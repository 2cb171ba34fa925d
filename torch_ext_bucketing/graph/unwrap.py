"""A graph, given as such or in its module."""

from __future__ import annotations

from typing import TypeAlias

import torch.fx as fx

GraphLike: TypeAlias = fx.GraphModule | fx.Graph


def graph_of(gm: GraphLike) -> fx.Graph:
    """Return the graph of a module, or the graph itself."""
    return gm.graph if isinstance(gm, fx.GraphModule) else gm
