"""Find calls in a graph, and put calls into it, each with its value."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """A call where the graph inserts nodes, with the metadata of ``like`` but for its value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
    node.meta["val"] = evaluate(node)
    return node


def contiguous_copy(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    """A copy of ``value`` in one piece, behind it, as of :func:`call`."""
    with graph.inserting_after(value):
        layout = torch.contiguous_format
        return call(graph, torch.ops.aten.clone.default, value, memory_format=layout, like=like)


def evaluate(node: fx.Node, mode: Any = None) -> Any:
    """The value of ``node`` for those of its inputs, in ``mode`` or that of a fake one of these."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    modes = (m for a in args if (m := getattr(a, "fake_mode", None)) is not None)
    target: Any = node.target
    with mode or next(modes, None) or torch.no_grad():
        return target(*args, **kwargs)


def nodes_behind(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """All calls that lead to ``nodes``, without these."""
    found: dict[fx.Node, None] = {}
    stack = [arg for node in nodes for arg in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function":
            found[node] = None
            stack += node.all_input_nodes
    return found
