"""Find calls in a graph, and insert calls with their fake values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx


def call(graph: fx.Graph, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Insert a call at the graph's insertion point, with the metadata of ``like`` but its value."""
    node = graph.call_function(target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
    node.meta["val"] = evaluate(node)
    return node


def contiguous_copy(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    """Insert a contiguous copy of ``value`` after it; see :func:`call` for ``like``."""
    with graph.inserting_after(value):
        layout = torch.contiguous_format
        return call(graph, torch.ops.aten.clone.default, value, memory_format=layout, like=like)


def evaluate(node: fx.Node, mode: Any = None) -> Any:
    """Compute a node's fake value from its inputs' values.

    Runs under ``mode``, or else under the fake mode of the first fake input.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    modes = (m for a in args if (m := getattr(a, "fake_mode", None)) is not None)
    target: Any = node.target
    with mode or next(modes, None) or torch.no_grad():
        return target(*args, **kwargs)


def ancestors(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return all calls that lead to ``nodes``, without these nodes themselves."""
    found: dict[fx.Node, None] = {}
    stack = [arg for node in nodes for arg in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in found and node.op == "call_function":
            found[node] = None
            stack += node.all_input_nodes
    return found
