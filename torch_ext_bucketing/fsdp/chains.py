"""Find the nodes between a parameter and its uses, through its all-gather."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch.fx as fx

from .._torch.aot import backward_nodes
from ..graph.collectives import is_compute, kind_of
from ..graph.moves import CONSTANTS, is_move
from ..graph.purity import may_run_twice
from ..graph.tags import tag_of

T = TypeVar("T")
Chains: TypeAlias = Mapping[fx.Node, Sequence[fx.Node]]
"""The result of :func:`parameter_chains`."""


def parameter_chains(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Map each tagged all-gather to the nodes between the parameter and its first computation.

    ::

        w -> _to_copy -> all_gather -> wait -> slice -> t -> mm
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    With an all-gather extension, the nodes that compute the full parameter after the gather belong
    to the chain. Those that compute the gather's input do not, since they are as small as a shard::

        w -> abs -> max -> ... -> mul -> all_gather -> wait -> sub -> mul -> t -> mm
                                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    Starts, and the nodes of each chain, are in graph order.
    """
    before: dict[fx.Node, dict[fx.Node, None]] = {}
    ahead: dict[fx.Node, dict[fx.Node, None]] = {}
    chains: dict[fx.Node, dict[fx.Node, None]] = {}
    made_of: dict[fx.Node, fx.Node] = {}  # the only input that an ungathered value depends on
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
            chains[node] = {**union(before, inputs), node: None}
            ahead[node] = {**served, node: None}
            continue
        moves = is_move(node) or node.target in CONSTANTS
        if moves and not served:
            if all(i.op == "placeholder" or i in before for i in inputs):
                before[node] = {**union(before, inputs), node: None}
            continue
        if served and not moves and not is_compute(node) and may_run_twice(node):
            # An all-gather extension may compute the full parameter here.
            made = {made_of.get(start.all_input_nodes[0]) for start in served}
            alone = all(i in ahead or i in made_of or i.target in CONSTANTS for i in inputs)
            moves = alone and made.issuperset(sources) and all(map(in_other_form, served))
        if moves:
            ahead[node] = served
            for start in served:
                chains[start][node] = None
    return {start: tuple(chain) for start, chain in chains.items()}


def read_in_forward(chains: Chains) -> dict[fx.Node, None]:
    """Find the all-gathers of a joint graph that forward reads.

    Keeping the results of others, such as data scaled along other rows for products of backward,
    would take memory and save nothing.
    """
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
    """Return whether an all-gather extension computed the input, such as 8-bit data or scales."""
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
    """Merge the sets of some nodes, in their order."""
    merged: dict[T, None] = {}
    for node in nodes:
        merged.update(of.get(node, {}))
    return merged
