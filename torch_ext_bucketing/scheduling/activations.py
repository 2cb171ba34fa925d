"""What backward may compute again rather than read: the activations of a joint graph, in groups.

A group is what one unit of parameters computes of one sort: matrix products, attention, collectives
on activations, and all the rest, which is cheap. What a unit hands on to later ones is in no group:
it is saved, so that nothing is computed again for more than one unit at a time::

    unit 3   x -> norm -> mm -> silu -> mm -> add -> y        y, and x before it, are saved;
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^              the rest is in groups

In no group, either, are nodes that the user marked (``torch.utils.checkpoint``), that draw random
numbers, have effects, or make sizes that depend on data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.fx as fx

from .._torch import aot as _aot
from ..graph.collectives import (
    argument,
    is_collective,
    is_compute,
    is_number,
    is_view,
    is_wait,
    tensors_in,
)


class Activations:
    """The activations of a joint graph.

    Args:
        graph: tagged. It is only read.
        unit_of: the unit of a gather, a number and a name.
        moves: nodes between parameters and their uses, which are gathered again or not by
            themselves.

    Attributes:
        groups: the nodes by unit and sort, in the order of the graph.
        views: nodes that run no kernel on what is in a group: they are never saved.
        saved: what units hand on, and other nodes that must not run twice.
    """

    def __init__(
        self,
        graph: fx.Graph,
        unit_of: Callable[[fx.Node], tuple[int, str] | None],
        moves: Collection[fx.Node],
    ) -> None:
        self.groups: dict[tuple[tuple[int, str], str], list[fx.Node]] = {}
        self.views: dict[fx.Node, None] = {}
        self.saved: dict[fx.Node, None] = {}
        inside = _aot.forward_nodes(graph)
        self._nodes = [n for n in inside if n.op == "call_function" and n not in moves]
        self._inside = inside
        self._outputs = {a for n in graph.find_nodes(op="output") for a in n.all_input_nodes}
        self._moves = moves
        self._unit: dict[fx.Node, tuple[int, str]] = {}
        for node in inside:
            mine = unit_of(node)
            found = [self._unit[a] for a in node.all_input_nodes if a in self._unit]
            if found or mine is not None:
                self._unit[node] = max([*found, *([] if mine is None else [mine])])
        self._hand_down()
        for node in self._nodes:
            self._sort(node)

    def _later(self, node: fx.Node) -> bool:
        """Whether a later unit, or who calls the graph, reads the node."""
        mine = self._unit[node]
        users = (self._unit.get(u) for u in node.users if u in self._inside)
        return node in self._outputs or any(u is not None and u > mine for u in users)

    def _hand_down(self) -> None:
        """Let the first cheap nodes of a unit, such as a norm's before its weight is read, be its
        own: they read what an earlier unit hands on, and nobody else reads them."""
        unit, inside = self._unit, self._inside
        first: dict[fx.Node, tuple[int, str]] = {}
        ends: set[fx.Node] = set()  # what only backward reads
        for node in reversed(self._nodes):
            users = [u for u in node.users if u in inside and u not in ends]
            if not users and node not in self._outputs:
                ends.add(node)
            elif users and node not in self._outputs and node in unit and _is_cheap(node):
                later = min(first.get(u) or unit.get(u, unit[node]) for u in users)
                if later > unit[node]:
                    first[node] = later
        handed = {n for n in self._nodes if n in unit and self._later(n)}
        for node in self._nodes:
            args = [a for a in node.all_input_nodes if a in unit]
            if node in first and all(a in handed for a in args):
                handed.add(node)
                unit[node] = first[node]
            elif node in ends and args:
                unit[node] = max(unit[a] for a in args)

    def _sort(self, node: fx.Node) -> None:
        unit = self._unit.get(node)
        if unit is None or "recompute" in node.meta or is_number(node):
            return
        whole = node.args[0] if node.target is operator.getitem else node
        if self._later(node) or not _may_run_twice(node) or whole in self.saved:
            self.saved[node] = None
        elif is_view(node) and not is_wait(node) and whole is node:
            self.views[node] = None
        else:  # of several results each has a node, which goes with the one that makes them
            self.groups.setdefault((unit, _sort_of(whole)), []).append(node)


def _is_cheap(node: fx.Node) -> bool:
    return _sort_of(node) == "cheap"


def _sort_of(node: Any) -> str:
    if is_collective(node) or is_wait(node):
        return "communication"
    if "attention" in str(node.target):
        return "attention"
    return "products" if is_compute(node) else "cheap"


def _may_run_twice(node: fx.Node) -> bool:
    """Whether a node gives the same result again, and does nothing else."""
    if node.meta.get("unbacked_bindings") or not tensors_in(node.meta.get("val")):
        return False
    if is_wait(node) or is_collective(node):
        return True
    target = node.target
    tags = getattr(target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags:
        return _sort_of(node) == "attention" and not argument(node, "dropout_p")
    return not node.is_impure()
