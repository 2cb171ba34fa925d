"""Compute the dependencies between a graph's nodes, with those that its edges do not show.

A node depends on its inputs. In addition, these nodes keep their order:

- A write to a tensor, and every node that touches the tensor before or after it (:mod:`.writes`). A
  collective reads its input until its wait::

      start(p) -> wait        copy_(p, new)        copy_ stays after wait, not only after start

- Calls that draw random numbers from the generator's state, among themselves. Operators that are
  not known to be pure (:mod:`.purity`) count: one without tags may draw, or read and write state.
- An assertion on a size or another number, and the nodes after it that use the number, or the
  tensor whose size it is. They must not run unchecked.
- The marks of profiled ranges, among themselves. After scheduling, a range no longer shows where
  the nodes between its marks run.
- Operators with other side effects, or with unknown ones, against all nodes.
- The starts of one process group and kind. Ranks meet in a group in launch order, so each kind
  keeps the graph's order, which is the same on every rank. All-gathers may overtake reductions, and
  all-to-alls, such as those of experts' tokens in chunks, may overtake each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from .._torch.draws import draws
from .collectives import (
    group_name,
    is_assertion,
    is_collective,
    is_number,
    is_view,
    is_wait,
    kind_of,
)
from .host_copies import host_stream, is_host_wait, launched_by
from .purity import FUNCTIONAL, is_known
from .writes import Writes, written_values

_READ_CONTENTS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class Precedence:
    """Dependencies between nodes in topological order, by their places from 0.

    Attributes:
        needs: per node, the places of the nodes that it depends on, ascending.
        needed_by: per node, the places of the nodes that depend on it, ascending.
    """

    def __init__(self, nodes: list[fx.Node], needs: Iterable[Collection[int]]) -> None:
        self.nodes = nodes
        self.needs = [sorted(places) for places in needs]
        self.needed_by: list[list[int]] = [[] for _ in nodes]
        for i, mine in enumerate(self.needs):
            for j in mine:
                self.needed_by[j].append(i)

    def is_order(self, order: Sequence[int]) -> bool:
        """Return whether ``order`` has every node once, after all nodes that it depends on."""
        place = {i: at for at, i in enumerate(order)}
        return len(place) == len(order) == len(self.nodes) and all(
            i in place and all(place[j] < place[i] for j in mine)
            for i, mine in enumerate(self.needs)
        )

    def runs_after(self, i: int, others: Collection[int]) -> bool:
        """Return whether node ``i`` depends on all ``others``, itself among them or not."""
        left = {j for j in others if j != i}
        first, seen, stack = min(left, default=i), {i}, [i]
        while stack and left:
            for j in self.needs[stack.pop()]:
                if j >= first and j not in seen:
                    left.discard(j)
                    seen.add(j)
                    stack.append(j)
        return not left


class Dependencies(Precedence):
    """The dependencies between a graph's movable nodes.

    All nodes are movable but placeholders, ``get_attr`` and the output.

    Attributes:
        index: place of each movable node among them.
        group: name of the process group, by the place of each collective; of a host copy, its
            stream.

    Raises:
        ValueError: a node stands before one of its inputs.
    """

    def __init__(self, everything: list[fx.Node], writes: Writes) -> None:
        self.nodes = [n for n in everything if n.op not in ("placeholder", "get_attr", "output")]
        self.index: dict[fx.Node, int] = {n: i for i, n in enumerate(self.nodes)}
        self.group: dict[int, str] = {}
        needs: list[dict[int, None]] = []
        before: set[fx.Node] = set()
        for node in everything:
            for arg in node.all_input_nodes:
                if arg not in before:
                    raise ValueError(f"{node.name} stands before its input {arg.name}")
            before.add(node)
            if node in self.index:
                found = (self.index.get(arg) for arg in node.all_input_nodes)
                needs.append(dict.fromkeys(at for at in found if at is not None))
        self._order_writes(writes, needs)
        self._order_assertions(needs)
        self._order_chains(needs)
        super().__init__(self.nodes, needs)

    def _order_writes(self, writes: Writes, needs: list[dict[int, None]]) -> None:
        for write in writes.unordered:
            at = self.index[write]
            aliases = (a for root in writes.by_writer[write] for a in writes.aliases[root])
            for node in dict.fromkeys(n for a in aliases for n in (a, *a.users)):
                other = self.index.get(node)
                if other is not None and other < at:
                    needs[at][other] = None
                elif other is not None and other > at:
                    needs[other][at] = None
                if is_collective(node) or host_stream(node):
                    # A collective, or a copy, reads its input until its wait.
                    waits = (self.index[w] for w in node.users if launched_by(w) is node)
                    needs[at].update(dict.fromkeys(w for w in waits if w < at))

    def _order_assertions(self, needs: list[dict[int, None]]) -> None:
        for i, node in enumerate(self.nodes):
            if not is_assertion(node):
                continue
            for value in _asserted(node):
                for user in value.users:
                    at = self.index.get(user, -1)
                    if at > i and not is_assertion(user):
                        needs[at][i] = None

    def _order_chains(self, needs: list[dict[int, None]]) -> None:
        last: dict[Any, int] = {}
        barrier = -1
        for i, node in enumerate(self.nodes):
            if barrier >= 0:
                needs[i][barrier] = None
            if _is_barrier(node):
                # The nodes since the last barrier come before this one, and all later ones after.
                for j in range(barrier + 1, i):
                    needs[i][j] = None
                barrier = i
                continue
            chain: Any = None
            if is_collective(node):
                self.group[i] = group_name(node)
                # All-to-alls have no kind that buckets merge, and may overtake each other.
                kind = kind_of(node)
                chain = kind and (self.group[i], kind)
            elif stream := host_stream(node):
                self.group[i] = stream  # copies may overtake each other
            elif draws(node) or not is_known(node):
                chain = "random"
            elif _is_profiler_mark(node):
                chain = "profiler"
            if chain is not None:
                if chain in last:
                    needs[i][last[chain]] = None
                last[chain] = i


def unused(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Find nodes, among all of a graph, that change neither its results nor anything else.

    torch's partitioner leaves some, such as the inputs of a collective that it removed. Inductor
    generates no code for them.
    """
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "call_function" and found.issuperset(node.users) and not _acts(node):
            found.add(node)
    return found


def _acts(node: fx.Node) -> bool:
    """Return whether a call has an effect beside its result."""
    return (
        is_collective(node)
        or is_wait(node)
        or is_assertion(node)
        or _is_barrier(node)
        or _is_profiler_mark(node)
        or draws(node)
        or bool(written_values(node))
    )


def _is_barrier(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    if is_assertion(node) or _is_profiler_mark(node) or is_host_wait(node):
        return False
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() not in FUNCTIONAL and not draws(node)
    if not isinstance(target, torch._ops.OpOverload):
        return not is_view(node)
    # Writes and random numbers have finer rules than a barrier.
    finer = target.namespace == "_c10d_functional" or target._schema.is_mutable
    return not finer and node.is_impure(impure_random=False)


def _asserted(assertion: fx.Node) -> list[fx.Node]:
    """List the nodes that an assertion checks: its inputs, and the tensors whose sizes they are.

    Numbers that are inputs of the graph do not count if other numbers are compared with them. They
    are known before the graph runs, and nearly all nodes use the batch size.
    """
    found: dict[fx.Node, None] = {}
    given, made = [], False
    stack = list(assertion.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found[node] = None
        if node.op == "placeholder" and is_number(node):
            given.append(node)
        elif is_number(node) and node.target not in _READ_CONTENTS:
            stack += node.all_input_nodes
        else:
            made = True
    for node in given if made else ():
        del found[node]
    return list(found)


def _is_profiler_mark(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "profiler"
