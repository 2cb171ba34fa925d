"""Calls that a rewrite puts into a graph, each with the value that it gives."""

from __future__ import annotations

import contextlib
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


def evaluate(node: fx.Node) -> Any:
    """The value of ``node`` for the fake values of its inputs."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next((m for a in args if (m := getattr(a, "fake_mode", None)) is not None), None)
    target: Any = node.target
    with mode or contextlib.nullcontext():
        return target(*args, **kwargs)
