"""Writes to tensors, and which nodes may share memory: what a graph's edges do not say.

Read from the operators' schemas. :mod:`.contraction` keeps merging from moving nodes past a write,
and :mod:`.dependencies` keeps reordering from it.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from .collectives import is_collective


def unordered_writes(nodes: list[fx.Node]) -> list[fx.Node]:
    """The nodes that write to a tensor and are not ordered against its readers by edges.

    A write is ordered where every other node that touches the tensor leads to it by views alone, or
    gets the tensor from it, as with the output buffer of a bucketed all-gather. A collective may
    lead to it by way of anything, as a reduction in place does; a cast may not, for a bucket casts
    on its own::

        empty -> slice -> copy_ -> all_gather_into_tensor_out(out=empty) -> wait -> view
        mm -> all_reduce(mm) -> wait -> copy_(mm, wait) -> add

    Args:
        nodes: of one graph, in topological order.
    """
    writers = [(n, written) for n in nodes if (written := written_values(n))]
    if not writers:
        return []
    position = {node: i for i, node in enumerate(nodes)}
    roots, aliases = aliases_of(nodes)
    return [
        node
        for node, written in writers
        if any(
            not _is_ordered(node, aliases[root], position)
            for value in written
            for root in roots.get(value, ())
        )
    ]


def written_roots(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes whose memory a later node writes to, if only by way of a view.

    Args:
        nodes: of one graph, in topological order.
    """
    written = [v for n in nodes for v in written_values(n)]
    roots = aliases_of(nodes)[0] if written else {}
    return {root for value in written for root in roots.get(value, ())}


def _is_ordered(write: fx.Node, aliases: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    at = position[write]
    after: dict[fx.Node, None] = {write: None}
    inside = dict.fromkeys(aliases)
    for alias in aliases:
        if alias is not write and any(arg in after for arg in alias.all_input_nodes):
            after[alias] = None
    for alias in aliases:
        if alias in after:
            continue
        for user in alias.users:
            if user is write or user in after:
                continue
            if position[user] > at:
                if not any(arg in after for arg in user.all_input_nodes):
                    return False
            elif user not in inside and not (
                is_collective(user) and _leads_to(user, write, position)
            ):
                return False
    return True


def _leads_to(node: fx.Node, later: fx.Node, position: dict[fx.Node, int]) -> bool:
    seen, stack = {later: None}, [later]
    while stack and node not in seen:
        for arg in stack.pop().all_input_nodes:
            if arg not in seen and position[arg] >= position[node]:
                seen[arg] = None
                stack.append(arg)
    return node in seen


def aliases_of(
    nodes: list[fx.Node],
) -> tuple[dict[fx.Node, tuple[fx.Node, ...]], dict[fx.Node, list[fx.Node]]]:
    """For every node the nodes whose memory it may be, and for these all nodes that may be it."""
    roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
    aliases: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if node.op == "output":
            continue
        shared = [v for v in _aliased(node) if v in roots]
        mine = tuple(dict.fromkeys(r for v in shared for r in roots[v])) or (node,)
        roots[node] = mine
        for root in mine:
            aliases.setdefault(root, []).append(node)
    return roots, aliases


def _schema_values(node: fx.Node, *, writes: bool) -> list[fx.Node]:
    """Inputs that the schema says are written to, or else those that the result may alias."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    values: list[fx.Node] = []
    for i, argument in enumerate(node.target._schema.arguments):
        info = argument.alias_info
        if info is None or (writes and not info.is_write):
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, fx.Node):
                values.append(value)
    return values


def written_values(node: fx.Node) -> list[fx.Node]:
    """The inputs that a node writes to."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, torch._ops.OpOverload):
        return _schema_values(node, writes=True) if node.target._schema.is_mutable else []
    # The one higher-order operator that AOTAutograd leaves unfunctionalized in the end.
    if getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation":
        return node.all_input_nodes
    return []


def _aliased(node: fx.Node) -> list[fx.Node]:
    if node.op == "call_function" and node.target is operator.getitem:
        return node.all_input_nodes[:1]
    if node.op == "call_function" and node.target is torch.ops._c10d_functional.wait_tensor.default:
        return node.all_input_nodes
    return _schema_values(node, writes=False)
