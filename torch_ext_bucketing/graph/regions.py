"""Regions of a graph that turn one value into another by linear steps alone.

::

    mm -> t -> _to_copy -> split -> pad -\\
                               \\--> pad --> cat -> reduce_scatter -> wait -> view -> (end)
          ^       ^                          ^           ^            ^       ^
          cuts: all that reaches the end goes through this one node

The sum of two such ends equals, but for rounding, the end of one region whose first value is the
sum of the first values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from .collectives import group_name, group_size, is_wait, kind_of, reduce_op
from .moves import CONSTANTS, is_linear, is_zeros, keeps_values


@dataclass(frozen=True)
class Cut:
    """A node through which all values pass on their way to the end of a region.

    Args:
        node: the node.
        inside: the nodes after it up to the end, which is included, in reverse order.
        reductions: the reductions in ``inside``.
    """

    node: fx.Node
    inside: tuple[fx.Node, ...] = ()
    reductions: tuple[fx.Node, ...] = ()


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Map each node to its place in the graph, from 0."""
    return {node: i for i, node in enumerate(graph.nodes)}


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase the nodes that nothing reads, and then the nodes that only they read."""
    stack = list(nodes)
    erased: dict[fx.Node, None] = {}
    while stack:
        node = stack.pop()
        if node not in erased and not node.users and node.op == "call_function":
            stack += node.all_input_nodes
            node.graph.erase_node(node)
            erased[node] = None


def cuts_before(end: fx.Node, position: Mapping[fx.Node, int]) -> Iterator[Cut]:
    """Yield the cuts of the region that ends in ``end``, from ``end`` itself backwards.

    Sums and averages over ranks are linear. Zeros that a value is padded with are not an input.
    """
    pending = {end: None}
    inside: list[fx.Node] = []
    reductions: list[fx.Node] = []
    while pending:
        node = max(pending, key=position.__getitem__)
        if len(pending) == 1:
            yield Cut(node, tuple(inside), tuple(reductions))
        if kind_of(node):
            added = reduce_op(node) in ("sum", "avg")
            if not added or node.target is torch.ops._c10d_functional.all_reduce_.default:
                return
            reductions.append(node)
        elif not is_linear(node):
            return
        del pending[node]
        inside.append(node)
        # A collective's process group may be a node of the graph, too.
        for arg in node.all_input_nodes[:1] if kind_of(node) else node.all_input_nodes:
            if is_zeros(arg):
                inside.append(arg)
            else:
                pending[arg] = None


def outside_reader(cut: Cut, end: fx.Node) -> fx.Node | None:
    """Return a node outside a region that reads a node inside it; None without one.

    The region's end and its constants may have other readers.
    """
    inside = dict.fromkeys(cut.inside)
    ours = (n for n in cut.inside if n is not end and n.target not in CONSTANTS)
    return next((user for node in ours for user in node.users if user not in inside), None)


class StructuralIds:
    """IDs of regions: equal IDs mean equal operations on the first value, on every rank.

    Steps that keep values (copies, views to the same shape) do not count, since autograd leaves
    them out where they would do nothing.
    """

    def __init__(self, position: Mapping[fx.Node, int]) -> None:
        self._position = position
        self._ids: dict[tuple[Any, ...], int] = {}

    def of(self, cut: Cut, end: fx.Node, *, name: object = "first value") -> int:
        """Return the ID of the region from ``cut`` to ``end``; ``name`` identifies its first value.

        By default all first values count as equal.
        """
        ids: dict[fx.Node, int] = {cut.node: self._id("value", name)}
        for node in sorted(dict.fromkeys(cut.inside), key=self._position.__getitem__):
            value = node.meta.get("val")
            if keeps_values(node) and not is_wait(node):
                ids[node] = ids[node.all_input_nodes[0]]
            elif is_zeros(node):
                how = node if value is None else (tuple(map(str, value.shape)), value.dtype)
                ids[node] = self._id("zeros", how)
            elif kind_of(node):
                how = (kind_of(node), reduce_op(node), group_name(node), group_size(node))
                ids[node] = self._id(*how, ids[node.all_input_nodes[0]])
            else:
                kwargs = dict(node.kwargs)
                if isinstance(kwargs.get("dtype"), torch.dtype):
                    # A cast; the other arguments repeat the input's layout and device.
                    kwargs = {"dtype": kwargs["dtype"]}
                args = fx.map_arg((node.args, kwargs), lambda n: ("node", ids[n]))
                ids[node] = self._id(str(node.target), repr(args))
        return ids[end]

    def from_source(self, value: fx.Node) -> tuple[Cut, int]:
        """Return the longest region that ends in ``value``, and its ID with that first value."""
        source = list(cuts_before(value, self._position))[-1]
        return source, self.of(source, value, name=source.node)

    def _id(self, *key: Any) -> int:
        return self._ids.setdefault(key, len(self._ids))
