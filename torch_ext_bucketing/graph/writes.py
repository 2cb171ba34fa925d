"""Find writes to tensors and nodes that may share memory, which a graph's edges do not show.

Both are read from the operators' schemas. :mod:`.contraction` prevents merging from moving nodes
past a write, :mod:`.dependencies` prevents reordering from it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
import torch.fx as fx

from .collectives import is_collective


class Writes:
    """Writes and aliases among the nodes of a graph.

    Args:
        nodes: in topological order.

    Attributes:
        roots: maps each node to the nodes whose memory it may share. Empty if no node writes.
        aliases: maps each of these to the nodes that may share its memory.
        by_writer: maps each writer to the roots that it writes to, directly or through a view.
        written: all roots that are written to.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._nodes = list(nodes)
        self.roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.aliases: dict[fx.Node, list[fx.Node]] = {}
        writers = {n: written for n in self._nodes if (written := written_values(n))}
        inputs: dict[int, fx.Node] = {}
        for node in self._nodes if writers else ():
            if node.op == "output":
                continue
            shared = [v for v in _aliased(node) if v in self.roots]
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                # An input may be a view of another one, for instance of an updated parameter.
                first = inputs.setdefault(value.untyped_storage()._cdata, node)
                shared = [first] if first is not node else shared
            mine = tuple(dict.fromkeys(r for v in shared for r in self.roots[v])) or (node,)
            self.roots[node] = mine
            for root in mine:
                self.aliases.setdefault(root, []).append(node)
        self.by_writer = {
            writer: dict.fromkeys(root for value in written for root in self.roots.get(value, ()))
            for writer, written in writers.items()
        }
        self.written = {root for roots in self.by_writer.values() for root in roots}

    @functools.cached_property
    def unordered(self) -> list[fx.Node]:
        """The writers that edges do not order against all other readers of the tensor.

        Edges order a write if every other node that touches the tensor either leads to the write
        through views alone, or reads the write's result, as for the output buffer of a bucketed
        all-gather. A collective may lead to the write through any nodes; a cast may not, since a
        bucket casts its inputs again::

            empty -> slice -> copy_ -> all_gather_into_tensor_out(out=empty) -> wait -> view
            mm -> all_reduce(mm) -> wait -> copy_(mm, wait) -> add
        """
        position = {node: i for i, node in enumerate(self._nodes)} if self.by_writer else {}
        return [
            writer
            for writer, roots in self.by_writer.items()
            if not all(_is_ordered(writer, self.aliases[root], position) for root in roots)
        ]

    def is_written(self, node: fx.Node) -> bool:
        """Return whether any node of the graph writes to the memory of ``node``.

        Writes through other aliases count only if the graph has unordered writes.
        """
        roots = self.roots.get(node, ()) if self.unordered else (node,)
        return not self.written.isdisjoint(roots)


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


def _schema_values(node: fx.Node, *, writes: bool) -> list[fx.Node]:
    """List the inputs that a node's schema marks as written, or those that its result may alias."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema, values = node.target._schema, list[fx.Node]()
    if writes and not schema.is_mutable:
        return []
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or (writes and not info.is_write):
            continue
        given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for value in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(value, fx.Node):
                values.append(value)
    return values


def written_values(node: fx.Node) -> list[fx.Node]:
    """List the inputs that a node writes to."""
    # The only higher-order operator that still writes to its inputs after AOTAutograd.
    if getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation":
        return node.all_input_nodes
    return _schema_values(node, writes=True)


def _aliased(node: fx.Node) -> list[fx.Node]:
    if node.op == "call_function" and node.target is operator.getitem:
        return node.all_input_nodes[:1]
    if node.op == "call_function" and node.target is torch.ops._c10d_functional.wait_tensor.default:
        return node.all_input_nodes
    return _schema_values(node, writes=False)
