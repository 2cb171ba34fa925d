"""The part of a graph through which one value becomes another by linear steps alone.

::

    mm -> t -> _to_copy -> split -> pad -\\
                               \\--> pad --> cat -> reduce_scatter -> wait -> view -> (end)
          ^       ^                          ^           ^            ^       ^
          cuts: all that reaches the end goes through this one node

A sum of two such ends is the end of one such part whose first value is the sum, but for rounding.
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
    """A ``node`` through which everything goes that reaches the end of a region; what is ``inside``
    behind it, from the end, which is included, backwards; and the ``reductions`` among these."""

    node: fx.Node
    inside: tuple[fx.Node, ...] = ()
    reductions: tuple[fx.Node, ...] = ()


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    """The place of every node in the graph, from 0."""
    return {node: i for i, node in enumerate(graph.nodes)}


def erase_unused(nodes: Iterable[fx.Node]) -> None:
    """Erase those that nothing reads, and then what only they read."""
    stack = list(nodes)
    erased: dict[fx.Node, None] = {}
    while stack:
        node = stack.pop()
        if node not in erased and not node.users and node.op == "call_function":
            stack += node.all_input_nodes
            node.graph.erase_node(node)
            erased[node] = None


def cuts_behind(end: fx.Node, position: Mapping[fx.Node, int]) -> Iterator[Cut]:
    """The cuts of the region that ends in ``end``, from ``end`` itself backwards. Sums and averages
    over ranks are linear; zeros that are put beside a value do not count as an input."""
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
        # The process group of a collective may be a node of the graph, too.
        for arg in node.all_input_nodes[:1] if kind_of(node) else node.all_input_nodes:
            if is_zeros(arg):
                inside.append(arg)
            else:
                pending[arg] = None


def outside_reader(cut: Cut, end: fx.Node) -> fx.Node | None:
    """A node outside of a region that reads what is inside before its end, if any; zeros aside."""
    inside = dict.fromkeys(cut.inside)
    ours = (n for n in cut.inside if n is not end and n.target not in CONSTANTS)
    return next((user for node in ours for user in node.users if user not in inside), None)


class Structures:
    """Tells whether two regions do the same to their first values.

    Numbers are equal where structures are. Steps that leave values alone (copies, views to the same
    shape) do not count: autograd leaves them out where they would do nothing.
    """

    def __init__(self, position: Mapping[fx.Node, int]) -> None:
        self._position = position
        self._numbers: dict[tuple[Any, ...], int] = {}

    def of(self, cut: Cut, end: fx.Node, *, name: object = "first value") -> int:
        """The number of the region from ``cut`` to ``end``; ``name`` stands for the first value."""
        numbers: dict[fx.Node, int] = {cut.node: self._number(("value", name))}
        for node in sorted(dict.fromkeys(cut.inside), key=self._position.__getitem__):
            value = node.meta.get("val")
            if keeps_values(node) and not is_wait(node):
                numbers[node] = numbers[node.all_input_nodes[0]]
            elif is_zeros(node):
                how = node if value is None else (tuple(map(str, value.shape)), value.dtype)
                numbers[node] = self._number(("zeros", how))
            elif kind_of(node):
                how = (kind_of(node), reduce_op(node), group_name(node), group_size(node))
                numbers[node] = self._number((*how, numbers[node.all_input_nodes[0]]))
            else:
                kwargs = dict(node.kwargs)
                if isinstance(kwargs.get("dtype"), torch.dtype):
                    kwargs = {"dtype": kwargs["dtype"]}  # a cast; the rest says where it is already
                said = fx.map_arg((node.args, kwargs), lambda n: ("node", numbers[n]))
                numbers[node] = self._number((str(node.target), repr(said)))
        return numbers[end]

    def from_source(self, value: fx.Node) -> tuple[Cut, int]:
        """The region behind a value from its first value, and the number of what is done to it."""
        source = list(cuts_behind(value, self._position))[-1]
        return source, self.of(source, value, name=source.node)

    def _number(self, key: tuple[Any, ...]) -> int:
        return self._numbers.setdefault(key, len(self._numbers))
