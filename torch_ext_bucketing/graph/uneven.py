"""Find the nodes that differ between ranks: shards of parameters whose rows do not divide evenly.

The last ranks have fewer rows, or none. They pad a shard before it is gathered, and cut gradients::

    rank 0    w [3] -> to bf16 ----------> all_gather      reduce_scatter -> wait ----------> output
    rank 1    w [2] -> to bf16 -> pad 1 -> all_gather      reduce_scatter -> wait -> [0:2] -> output

All ranks still must decide alike. So if a graph has such parameters, estimates ignore how a rank
handles its own shards:

- The nodes take no time.
- A shard has the bytes of the largest rank's: the rows after the pad, or before the cut.
- Copies between a shard and its gather have no bytes, except before a pad.

The norm of gradients and updates of parameters have the largest rank's cost instead
(:mod:`.work`): they take time.

Ranks with full shards find such parameters, too, since all ranks cut gathered parameters and pad
gradients before they are reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from .collectives import group_size, is_compute, is_wait, kind_of
from .moves import is_move
from .size_hints import SizeHints
from .work import work_of

_aten = torch.ops.aten
_Elements = Callable[[fx.Node], int]
"""The number of elements of a node's result."""


@dataclass(frozen=True)
class ShardSide:
    """The nodes of a graph that may be different on other ranks; none if all shards are even.

    Args:
        nodes: the nodes that only handle this rank's shards, inputs included: those before gathers
            without computation, and those between reductions and the outputs.
        elements: maps nodes to the number of elements that the largest rank has of the parameter or
            gradient. Nodes that only some ranks have, and unused inputs, have no entry.
    """

    nodes: dict[fx.Node, None] = field(default_factory=dict)
    elements: dict[fx.Node, int] = field(default_factory=dict)


def shard_side(graph: fx.Graph, hints: SizeHints | None = None) -> ShardSide:
    """Find the nodes of a graph that may be different on other ranks.

    ``hints`` only affect :attr:`ShardSide.elements`.
    """

    def elements(node: fx.Node) -> int:
        value = node.meta.get("val")
        return numbers(value.numel()) if isinstance(value, torch.Tensor) else 0

    numbers = hints or SizeHints()
    nodes = list(graph.nodes)
    starts = [n for n in nodes if kind_of(n) is not None]
    if not any(map(_is_uneven, starts)):
        return ShardSide()
    free: dict[fx.Node, bool] = {}  # depends on neither computation nor communication
    reduced: dict[fx.Node, None] = {}  # made from the result of one reduction alone
    for node in nodes:
        inputs = node.all_input_nodes
        if node.op != "call_function":
            free[node] = node.op in ("placeholder", "get_attr")
        elif is_wait(node):
            free[node] = False
            if kind_of(inputs[0]) in ("reduce_scatter", "all_reduce"):
                reduced[node] = None
        else:
            local = kind_of(node) is None and not is_compute(node)
            free[node] = local and all(free.get(n) for n in inputs)
            if local and len(inputs) == 1 and inputs[0] in reduced:
                reduced[node] = None
    ours: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        local = free[node] or (node in reduced and not is_wait(node))
        ours[node] = local and all(
            user.op == "output"
            or ours.get(user)
            or kind_of(user) == "all_gather"
            or work_of(user) is not None
            for user in node.users
        )
    # A gather's output buffer has the same size on every rank.
    buffers = dict.fromkeys(n.kwargs.get("out") for n in starts)
    found = {n: None for n in nodes if ours[n] and n not in buffers}
    return ShardSide(found, _parameters(found, elements) | _gradients(found, reduced, elements))


def _parameters(ours: dict[fx.Node, None], elements: _Elements) -> dict[fx.Node, int]:
    """Map each input to its largest number of elements on the way to its pack or gather."""
    largest: dict[fx.Node, int] = {}
    for node in reversed(ours):
        onwards = (user for user in node.users if _is_pad(user) or _one_to_one(user, elements))
        largest[node] = max([elements(node), *(largest.get(user, 0) for user in onwards)])
    return {n: largest[n] for n in ours if n.op in ("placeholder", "get_attr") and n.users}


def _gradients(
    ours: dict[fx.Node, None], reduced: dict[fx.Node, None], elements: _Elements
) -> dict[fx.Node, int]:
    """Map each gradient to its number of elements before it is cut."""
    whole: dict[fx.Node, int] = {}
    for node in ours:
        if node in reduced:
            whole[node] = elements(node)
            if _is_cut(node) or _one_to_one(node, elements):
                source = node.all_input_nodes[0]
                whole[node] = whole.get(source) or elements(source)
    return whole


def _one_to_one(node: fx.Node, elements: _Elements) -> bool:
    """Return whether ``node`` has the elements of its only input, in another shape or dtype."""
    if len(node.all_input_nodes) != 1 or not is_move(node):
        return False
    return elements(node) == elements(node.all_input_nodes[0])


def _is_uneven(start: fx.Node) -> bool:
    """Return whether a gather's result is cut, or a gradient padded to be reduced.

    Less than one row per rank is cut, alone or in a bucket. All ranks find the same.
    """
    kind = kind_of(start)
    if kind == "all_gather":
        stack = [start]
        while stack:
            node = stack.pop()
            for user in node.users:
                if _is_cut(user) and _misses_rows(node, user, group_size(start)):
                    return True
                if is_move(user):
                    stack.append(user)
    elif kind == "reduce_scatter":
        stack = list(start.all_input_nodes)
        while stack:
            node = stack.pop()
            if _is_pad(node):
                return True
            if is_move(node):
                stack += node.all_input_nodes
    return False


def _is_cut(node: fx.Node) -> bool:
    """Return whether ``node`` slices the first rows of its input."""
    return node.target is _aten.slice.Tensor and (*node.args, 0, 0)[1:3] == (0, 0)


def _is_pad(node: fx.Node) -> bool:
    """Return whether ``node`` pads its input, or concatenates it with a new tensor."""
    if node.target is _aten.cat.default:
        return any(not n.all_input_nodes and n.op == "call_function" for n in node.all_input_nodes)
    return node.target is _aten.constant_pad_nd.default


def _misses_rows(whole: fx.Node, cut: fx.Node, fewer_than: int) -> bool:
    """Return whether ``cut`` has fewer rows than ``whole``, but not by ``fewer_than`` or more."""
    before, after = (n.meta["val"].shape[0] for n in (whole, cut))
    if not isinstance(before, int) or not isinstance(after, int):
        return False  # an activation; a parameter's sizes are numbers
    return 0 < before - after < fewer_than
