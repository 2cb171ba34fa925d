"""What backward may compute again rather than read: the activations of a joint graph, in groups.

A group is what one stretch of forward computes of one sort: matrix products, attention, collectives
on activations, and all the rest, which is cheap. A stretch is what reads the parameters of a unit,
and what that leads to, up to where the next unit's are read; a unit that is read in two places has
two, such as a root with embedding and head. What a stretch hands on is in no group: it is saved, so
that nothing is computed again for more than one of them at a time::

    block 3   x -> norm -> mm -> silu -> mm -> add -> y       y, and x before it, are saved;
              ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^             the rest is in groups

In no group, either, are nodes that the user marked (``torch.utils.checkpoint``), that draw random
numbers, have effects, or make sizes that depend on data.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ..._torch import aot as _aot
from ...graph.collectives import (
    argument,
    is_collective,
    is_compute,
    is_number,
    is_view,
    is_wait,
    tensors_in,
)


class Stretch(NamedTuple):
    """A part of forward between two units.

    Args:
        number: which one it is, in the order of the graph.
        unit: whose parameters it reads.
        nth: of the unit, from 1 on.
    """

    number: int
    unit: str
    nth: int

    @property
    def name(self) -> str:
        return self.unit if self.nth == 1 else f"{self.unit} ({self.nth})"


class Activations:
    """The activations of a joint graph.

    Args:
        graph: tagged. It is only read.
        unit_of: the name of a gather's unit.
        moves: nodes between parameters and their uses, which are gathered again or not by
            themselves.

    Attributes:
        groups: the nodes by stretch and sort, in the order of the graph.
        views: nodes that run no kernel on what is in a group: they are never saved.
        saved: what stretches hand on, and other nodes that must not run twice.
    """

    def __init__(
        self,
        graph: fx.Graph,
        unit_of: Callable[[fx.Node], str | None],
        moves: Collection[fx.Node],
    ) -> None:
        self.groups: dict[tuple[Stretch, str], list[fx.Node]] = {}
        self.views: dict[fx.Node, None] = {}
        self.saved: dict[fx.Node, None] = {}
        inside = _aot.forward_nodes(graph)
        self._nodes = [n for n in inside if n.op == "call_function" and n not in moves]
        self._inside = inside
        self._outputs = {a for n in graph.find_nodes(op="output") for a in n.all_input_nodes}
        self._moves = moves
        self._stretch: dict[fx.Node, Stretch] = {}
        self._units: dict[fx.Node, str] = {}  # of what comes of parameters alone
        self._find_stretches(unit_of)
        self._hand_down()
        for node in self._nodes:
            self._sort(node)

    def _find_stretches(self, unit_of: Callable[[fx.Node], str | None]) -> None:
        """A node is in the latest stretch that it reads of; where it reads parameters of another
        unit, in the latest of that unit if it is behind, and else in a new one."""
        stretch, units = self._stretch, self._units
        latest: dict[str, Stretch] = {}
        for node in self._inside:
            args = [a for a in node.all_input_nodes if a.op != "get_attr"]
            unit = unit_of(node) or next((units[a] for a in args if a in units), None)
            before = max((stretch[a] for a in args if a in stretch), default=None)
            if unit is None or (before is not None and before.unit == unit):
                if before is not None:
                    stretch[node] = before
            elif before is None and (node in self._moves or all(a in units for a in args)):
                units[node] = unit
            else:
                last = latest.get(unit)
                if last is None or (before is not None and last < before):
                    number = 1 + max((s.number for s in latest.values()), default=-1)
                    last = latest[unit] = Stretch(number, unit, 1 + (last.nth if last else 0))
                stretch[node] = last
        for node in reversed(units):  # such as a sum of weights: where it is read first
            readers = [stretch[u] for u in node.users if u in stretch]
            if readers and node not in self._moves:
                stretch[node] = min(readers)

    def _later(self, node: fx.Node) -> bool:
        """Whether a later stretch, or who calls the graph, reads the node."""
        mine = self._stretch[node]
        users = (self._stretch.get(u) for u in node.users if u in self._inside)
        return node in self._outputs or any(u is not None and u > mine for u in users)

    def _hand_down(self) -> None:
        """Let the first cheap nodes of a stretch, such as a norm's before its weight is read, be
        its own: they read what an earlier one hands on, and nobody else reads them."""
        stretch, inside = self._stretch, self._inside
        first: dict[fx.Node, Stretch] = {}
        ends: set[fx.Node] = set()  # what only backward reads
        for node in reversed(self._nodes):
            users = [u for u in node.users if u in inside and u not in ends]
            if not users and node not in self._outputs:
                ends.add(node)
            elif users and node not in self._outputs and node in stretch and _is_cheap(node):
                later = min(first.get(u) or stretch.get(u, stretch[node]) for u in users)
                if later > stretch[node]:
                    first[node] = later
        handed = {n for n in self._nodes if n in stretch and self._later(n)}
        for node in self._nodes:
            args = [a for a in node.all_input_nodes if a in stretch]
            weights = any(a in self._units for a in node.all_input_nodes)
            if node in first and not weights and all(a in handed for a in args):
                handed.add(node)
                stretch[node] = first[node]
            elif node in ends and args:
                stretch[node] = max(stretch[a] for a in args)

    def _sort(self, node: fx.Node) -> None:
        stretch = self._stretch.get(node)
        if stretch is None or "recompute" in node.meta or is_number(node):
            return
        whole = node.args[0] if node.target is operator.getitem else node
        if self._later(node) or not _may_run_twice(node) or whole in self.saved:
            self.saved[node] = None
        elif is_view(node) and not is_wait(node) and whole is node:
            self.views[node] = None
        else:  # of several results each has a node, which goes with the one that makes them
            self.groups.setdefault((stretch, _sort_of(whole)), []).append(node)


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
