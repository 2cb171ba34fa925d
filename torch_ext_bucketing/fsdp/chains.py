"""The nodes between a parameter and what is computed with it, by way of its gather."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch.fx as fx

from .._torch.aot import backward_nodes
from ..graph.collectives import is_compute, kind_of
from ..graph.moves import CONSTANTS, is_move
from ..graph.tags import tag_of

T = TypeVar("T")
Chains: TypeAlias = Mapping[fx.Node, Sequence[fx.Node]]
"""What :func:`parameter_chains` gives."""


def parameter_chains(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Map every tagged gather to the nodes from the parameter to its last mere rearrangement.

    ::

        w -> _to_copy -> all_gather -> wait -> slice -> t -> mm
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    Of a parameter that is gathered in another form, the nodes that make the full parameter of it
    belong to the chain. What is computed before the gather does not: it is small, as a shard is::

        w -> abs -> max -> ... -> mul -> all_gather -> wait -> sub -> mul -> t -> mm
                                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    Starts in graph order; the nodes of a chain in graph order.
    """
    behind: dict[fx.Node, dict[fx.Node, None]] = {}
    ahead: dict[fx.Node, dict[fx.Node, None]] = {}
    chains: dict[fx.Node, dict[fx.Node, None]] = {}
    made_of: dict[fx.Node, fx.Node] = {}  # the one input that an ungathered value is computed from
    for node in graph.nodes:
        if node.op == "placeholder":
            made_of[node] = node
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        served = union(ahead, inputs)
        sources = {made_of[i]: None for i in inputs if i in made_of}
        if not served and len(sources) == 1 and all(i in made_of for i in inputs):
            made_of.update(dict.fromkeys([node], *sources))
        if kind_of(node) == "all_gather" and tag_of(node) is not None:
            made_of.pop(node, None)
            chains[node] = {**union(behind, inputs), node: None}
            ahead[node] = {**served, node: None}
            continue
        moves = is_move(node) or node.target in CONSTANTS
        if moves and not served:
            if all(i.op == "placeholder" or i in behind for i in inputs):
                behind[node] = {**union(behind, inputs), node: None}
            continue
        if served and not moves and not is_compute(node):  # makes a parameter of another form?
            made = {made_of.get(start.all_input_nodes[0]) for start in served}
            alone = all(i in ahead or i in made_of or i.target in CONSTANTS for i in inputs)
            moves = alone and made.issuperset(sources) and all(map(in_other_form, served))
        if moves:
            ahead[node] = served
            for start in served:
                chains[start][node] = None
    return {start: tuple(chain) for start, chain in chains.items()}


def read_in_forward(chains: Chains) -> dict[fx.Node, None]:
    """The gathers of a joint graph that forward reads. To keep what others make, as of data that is
    scaled along other rows for backward's products, would cost memory and save nothing."""
    if not chains:
        return {}
    late = backward_nodes(next(iter(chains)).graph)
    linked = {node for chain in chains.values() for node in chain}
    return {
        start: None
        for start, chain in chains.items()
        if any(
            user.op == "output" or (user not in late and user not in linked)
            for node in chain[chain.index(start) :]
            for user in node.users
        )
    }


def in_other_form(gather: fx.Node) -> bool:
    """Whether what is gathered is not a parameter's values, but such as 8-bit data and scales."""
    dtype = gather.meta["val"].dtype
    if dtype.itemsize == 1 or not dtype.is_floating_point:
        return True
    stack = gather.all_input_nodes[:1]
    while stack:
        node = stack.pop()
        if is_move(node):
            stack += node.all_input_nodes
        elif node.op == "call_function" and node.target not in CONSTANTS:
            return kind_of(node) != "all_gather"
    return False


def union(of: Mapping[fx.Node, dict[T, None]], nodes: Iterable[fx.Node]) -> dict[T, None]:
    """All that a mapping has for some nodes, in their order."""
    merged: dict[T, None] = {}
    for node in nodes:
        merged.update(of.get(node, {}))
    return merged
