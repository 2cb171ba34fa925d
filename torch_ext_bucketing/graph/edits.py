"""Insert calls with their fake values, and restore a graph that was changed."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

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
    """Compute a node's fake value under ``mode``, or else under that of the first fake input."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    modes = (m for a in args if (m := getattr(a, "fake_mode", None)) is not None)
    target: Any = node.target
    with mode or next(modes, None) or torch.no_grad():
        return target(*args, **kwargs)


def ancestors(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """Return all calls that lead to ``nodes``, without these nodes themselves."""
    above: dict[fx.Node, None] = {}
    stack = [arg for node in nodes for arg in node.all_input_nodes]
    while stack:
        node = stack.pop()
        if node not in above and node.op == "call_function":
            above[node] = None
            stack += node.all_input_nodes
    return above


class _Saved(NamedTuple):
    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    type: Any
    users: tuple[fx.Node, ...]
    meta: dict[str, Any]

    def is_other(self, node: fx.Node) -> bool:
        """Return whether the node's operator, name, target or arguments have changed."""
        same = (self.args is node.args, self.kwargs is node.kwargs, self.target is node.target)
        return not all(same) or (self.op, self.name) != (node.op, node.name)


class Snapshot:
    """The nodes of a graph in order, with arguments, users and metadata, copied one level deep."""

    def __init__(self, graph: fx.Graph) -> None:
        # ``fx`` replaces arguments and never modifies them, so references are enough.
        self._graph = graph
        self._saved = {
            n: _Saved(
                n.op, n.name, n.target, n.args, n.kwargs, n.type, tuple(n.users), dict(n.meta)
            )
            for n in graph.nodes
        }

    def difference(self) -> str:
        """Return the name of the first node that differs, metadata aside; empty without one."""
        for node, was in itertools.zip_longest(self._graph.nodes, self._saved):
            if node is not was or self._saved[node].is_other(node):
                return str((node or was).name)
        return ""

    def restore(self) -> None:
        """Restore the graph, with the same nodes; an erased one comes back as a new object."""
        graph = self._graph
        # Extra nodes can be erased once nothing reads them, so changed nodes let go of arguments.
        present = dict.fromkeys(graph.nodes)
        extra = [n for n in present if n not in self._saved]
        for node in present:
            if node not in self._saved or self._saved[node].is_other(node):
                node.args, node.kwargs = (), {}  # so that no node uses the ones to be erased
        for node in extra:
            graph.erase_node(node)
        # First all nodes, then arguments, which may name later ones, then users in their old order.
        restored = {
            node: node if node in present else graph.create_node(saved.op, saved.target)
            for node, saved in self._saved.items()
        }
        for was, saved in self._saved.items():
            node = restored[was]
            node.op, node.name, node.target, node.type = saved[:3] + (saved.type,)
            node.meta.clear()
            node.meta.update(saved.meta)
            if node.args is not saved.args or node.kwargs is not saved.kwargs:
                node.args, node.kwargs = fx.map_arg(
                    (saved.args, saved.kwargs), restored.__getitem__
                )
        for was, saved in self._saved.items():
            users = tuple(restored[user] for user in saved.users)
            if users != tuple(restored[was].users):
                restored[was].users.clear()
                restored[was].users.update(dict.fromkeys(users))
        wanted = list(restored.values())
        if wanted != list(graph.nodes):
            next(iter(graph.nodes)).prepend(wanted[0])
            for before, node in itertools.pairwise(wanted):
                before.append(node)


@contextlib.contextmanager
def unchanged_on_error(graph: fx.Graph) -> Iterator[None]:
    """Restore the graph if the block raises, and raise on."""
    snapshot = Snapshot(graph)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
