"""A graph as it was, to go back to when something fails on the way.

with unchanged_on_error(graph):
    ...  # what raises leaves the graph as it was here, node for node
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.fx as fx


@dataclass(frozen=True)
class _Saved:
    node: fx.Node
    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    type: Any
    users: tuple[fx.Node, ...]
    meta: dict[str, Any]


class Snapshot:
    """The nodes of a graph in order, each with its operator, arguments, users and metadata.

    Holds references only: arguments are replaced in ``fx``, never changed, so two are the same
    where they are one object. Of the metadata one level is kept.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._saved = [
            _Saved(
                n, n.op, n.name, n.target, n.args, n.kwargs, n.type, tuple(n.users), dict(n.meta)
            )
            for n in graph.nodes
        ]

    def difference(self) -> str:
        """The first difference between the graph and the snapshot, in words; empty if there is
        none. Metadata does not count."""
        nodes = list(self._graph.nodes)
        known = {saved.node for saved in self._saved}
        for node in nodes:
            if node not in known:
                return f"{node.name} is new"
        there = dict.fromkeys(nodes)
        for saved in self._saved:
            if saved.node not in there:
                return f"{saved.name} is gone"
        for node, saved in zip(nodes, self._saved, strict=True):
            if node is not saved.node:
                return f"{node.name} stands where {saved.name} stood"
            if _is_other(node, saved):
                return f"{saved.name} is another call"
        return ""

    def restore(self) -> None:
        """Make the graph what it was. A node that was erased since comes back as a new object with
        the old name; all others are the same objects."""
        graph = self._graph
        nodes = list(graph.nodes)
        there = dict.fromkeys(nodes)
        known = {saved.node for saved in self._saved}
        extra = [n for n in nodes if n not in known]
        lost = {saved.node for saved in self._saved if saved.node not in there}
        touched = [s for s in self._saved if s.node in there and _is_other(s.node, s)]
        for node in (*extra, *(s.node for s in touched)):
            node.args, node.kwargs = (), {}  # so that nobody uses what goes
        for node in extra:
            graph.erase_node(node)
        now = {saved.node: saved.node for saved in self._saved}
        for saved in self._saved:
            if saved.node in lost:
                now[saved.node] = graph.create_node(saved.op, saved.target)
        for saved in self._saved:
            node = now[saved.node]
            node.op, node.name, node.target, node.type = (
                saved.op,
                saved.name,
                saved.target,
                saved.type,
            )
            node.meta.clear()
            node.meta.update(saved.meta)
            if node.args is saved.args and node.kwargs is saved.kwargs:
                continue
            node.args, node.kwargs = fx.map_arg((saved.args, saved.kwargs), now.__getitem__)
        for saved in self._saved:
            users = tuple(now[user] for user in saved.users)
            node = now[saved.node]
            if users != tuple(node.users):
                node.users.clear()
                node.users.update(dict.fromkeys(users))
        self._reorder([now[saved.node] for saved in self._saved])

    def _reorder(self, wanted: list[fx.Node]) -> None:
        if not wanted or wanted == list(self._graph.nodes):
            return
        next(iter(self._graph.nodes)).prepend(wanted[0])
        for before, node in itertools.pairwise(wanted):
            before.append(node)


def _is_other(node: fx.Node, saved: _Saved) -> bool:
    return (
        node.args is not saved.args
        or node.kwargs is not saved.kwargs
        or node.target is not saved.target
        or (node.op, node.name) != (saved.op, saved.name)
    )


@contextlib.contextmanager
def unchanged_on_error(graph: fx.Graph) -> Iterator[None]:
    """Put the graph back to what it was where something is raised inside, and let that go on."""
    snapshot = Snapshot(graph)
    try:
        yield
    except BaseException:
        snapshot.restore()
        raise
