r"""Recognize operators that move, cast or scale values, and regions of a graph made of them.

A parameter's values pass through such operators on the way to its uses, and its gradient on the way
back. A region turns one value into another by linear steps alone::

    mm -> t -> _to_copy -> split -> pad -\
                               \--> pad --> cat -> reduce_scatter -> wait -> view -> (end)
          ^       ^                          ^           ^            ^       ^
          cuts: all that reaches the end goes through this one node

The sum of two such ends equals, but for rounding, the end of one region whose first value is the
sum of the first values.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from .._torch.aot import same_shape
from .nodes import group_name, group_size, is_wait, kind_of, reduce_op

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_COPIES = frozenset(
    {
        _aten._to_copy.default,
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.detach.default,
        _aten.reshape.default,
        _aten.view.default,
        torch.ops.prims.convert_element_type.default,
    }
)
# Other views are recognized by their schema (``OpOverload.is_view``).
_MOVES = _COPIES | {
    operator.getitem,
    _aten.cat.default,
    _aten.constant_pad_nd.default,
    _aten.lift_fresh_copy.default,
    _aten.stack.default,
    _aten.split_with_sizes_copy.default,
    _c10d.wait_tensor.default,
}
SCALES = frozenset(
    {
        _aten.div.Scalar,
        _aten.div.Tensor,
        _aten.div_.Tensor,
        _aten.mul.Scalar,
        _aten.mul.Tensor,
        _aten.mul_.Tensor,
    }
)
_ZEROS = frozenset({_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default})
_FULL = {_aten.full.default: 1, _aten.new_full.default: 2}  # index of the argument for the value
CONSTANTS = _ZEROS | _FULL.keys() | {_aten.empty.memory_format, _aten.new_empty.default}


def is_move(node: fx.Node) -> bool:
    """Return whether ``node`` only rearranges, copies or casts its inputs, or waits for one."""
    if node.target in _MOVES:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_zeros(node: fx.Node) -> bool:
    """Return whether ``node`` creates a tensor of zeros."""
    fill_argument = _FULL.get(node.target)  # type: ignore[arg-type]
    if fill_argument is not None:
        return len(node.args) > fill_argument and node.args[fill_argument] == 0
    return node.target in _ZEROS


def is_linear(node: fx.Node) -> bool:
    """Return whether ``node`` is linear but for rounding: ``f(a) + f(b) == f(a + b)``."""
    if node.op != "call_function":
        return False
    if node.target is _aten.constant_pad_nd.default:
        return len(node.args) < 3 or node.args[2] == 0
    if node.target in SCALES:
        return len(node.all_input_nodes) == 1 and node.args[0] is node.all_input_nodes[0]
    return is_move(node) or node.target is _aten.slice_backward.default


def keeps_values(node: fx.Node) -> bool:
    """Return whether the result has the shape, dtype and values of the input, as a copy has."""
    if node.op != "call_function" or node.target not in _COPIES:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return same_shape(before.shape, after.shape) and before.dtype == after.dtype


@dataclass(frozen=True)
class Cut:
    """A node through which all values pass on their way to the end of a region."""

    node: fx.Node
    # The nodes after it up to the end, which is included, in reverse order.
    inside: tuple[fx.Node, ...] = ()
    reductions: tuple[fx.Node, ...] = ()  # the reductions in ``inside``


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
    """Yield the cuts of the region that ends in ``end``, from ``end`` itself backwards."""
    pending = {end: None}
    inside: list[fx.Node] = []
    reductions: list[fx.Node] = []
    # The last pending node first: where it is alone, all values pass through it.
    while pending:
        node = max(pending, key=position.__getitem__)
        if len(pending) == 1:
            yield Cut(node, tuple(inside), tuple(reductions))
        if kind_of(node):
            added = reduce_op(node) in ("sum", "avg")
            if not added or node.target is _c10d.all_reduce_.default:
                return
            reductions.append(node)
        elif not is_linear(node):
            return
        del pending[node]
        inside.append(node)
        # A collective's process group may be a node of the graph, too.
        for arg in node.all_input_nodes[:1] if kind_of(node) else node.all_input_nodes:
            if is_zeros(arg):  # padding adds nothing to a sum
                inside.append(arg)
            else:
                pending[arg] = None


def outside_reader(cut: Cut, end: fx.Node) -> fx.Node | None:
    """Find a node outside a region that reads inside it, the end and constants aside."""
    inside = dict.fromkeys(cut.inside)
    ours = (n for n in cut.inside if n is not end and n.target not in CONSTANTS)
    return next((user for node in ours for user in node.users if user not in inside), None)


class StructuralIds:
    """Number regions; equal IDs mean equal operations on the first value, on every rank."""

    def __init__(self, position: Mapping[fx.Node, int]) -> None:
        self._position = position
        self._ids: dict[tuple[Any, ...], int] = {}

    def of(self, cut: Cut, end: fx.Node, *, name: object = "first value") -> int:
        """Return the ID of the region from ``cut`` to ``end``, whose first value is ``name``."""
        ids: dict[fx.Node, int] = {cut.node: self._id("value", name)}
        for node in sorted(dict.fromkeys(cut.inside), key=self._position.__getitem__):
            value = node.meta.get("val")
            # Autograd leaves copies, and views to the same shape, out where they would do nothing.
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
