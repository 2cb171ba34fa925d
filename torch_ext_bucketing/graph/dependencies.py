"""Dependencies between the nodes of a graph, those included that its edges do not show.

A node depends on its inputs. Besides, these keep their order whatever the edges say:

- a write to a tensor, and everything that touches the tensor before or after it (:mod:`.writes`); a
  collective reads its input until it is waited for::

      start(p) -> wait        copy_(p, new)        copy_ stays behind wait, not behind start alone

- operators that draw random numbers from the generator's state, among themselves;
- an assertion on a size or another number, and what uses that number, or the tensor whose size it
  is, after the assertion: what stood behind the check must not run unchecked;
- the marks of profiled ranges, among themselves: after scheduling a range no longer says where the
  nodes between them run;
- operators that have other side effects, or are not known to have none, against everything;
- the starts of one process group and kind. Ranks meet in a group in the order in which they launch,
  so the order that the graph came with, which is the same on every rank, is kept per kind; gathers
  may overtake reductions, and all-to-alls, as of experts' tokens in chunks, each other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from .collectives import (
    group_name,
    is_assertion,
    is_collective,
    is_number,
    is_view,
    is_wait,
    kind_of,
)
from .writes import Writes, written_values

# Higher-order operators that compute their results and do nothing else.
_FUNCTIONAL = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "triton_kernel_wrapper_functional",
    }
)

_READ_CONTENTS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class Precedence:
    """Nodes in topological order, by their place from 0: the places of those that each one
    ``needs``, ascending, and of those that it is ``needed_by``."""

    def __init__(self, nodes: list[fx.Node], needs: Iterable[Collection[int]]) -> None:
        self.nodes = nodes
        self.needs = [sorted(places) for places in needs]
        self.needed_by: list[list[int]] = [[] for _ in nodes]
        for i, mine in enumerate(self.needs):
            for j in mine:
                self.needed_by[j].append(i)

    def is_order(self, order: Sequence[int]) -> bool:
        """Whether ``order`` has every node once, and behind all that it needs."""
        place = {i: at for at, i in enumerate(order)}
        return len(place) == len(order) == len(self.nodes) and all(
            i in place and all(place[j] < place[i] for j in mine)
            for i, mine in enumerate(self.needs)
        )


class Dependencies(Precedence):
    """The movable nodes of a graph, by their place among these (``index``), and what each one
    needs; all but placeholders, ``get_attr`` and the output. ``group`` is the process group's name
    of each collective. A ValueError where a node stands before one of its inputs.
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
                if is_collective(node):
                    waits = (self.index[w] for w in node.users if is_wait(w))
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
                for j in range(barrier + 1, i):
                    needs[i][j] = None
                barrier = i
                continue
            chain: Any = None
            if is_collective(node):
                self.group[i] = group_name(node)
                kind = kind_of(node)
                chain = kind and (self.group[i], kind)
            elif _draws_random_numbers(node):
                chain = "random"
            elif _is_profiler_mark(node):
                chain = "profiler"
            if chain is not None:
                if chain in last:
                    needs[i][last[chain]] = None
                last[chain] = i


def unused(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes, out of all of a graph, that do nothing for its results. Inductor makes no code for
    them, torch's partitioner leaves them: what led to a collective that it has removed, for one."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "call_function" and found.issuperset(node.users) and not _acts(node):
            found.add(node)
    return found


def _acts(node: fx.Node) -> bool:
    """Whether a call does something else than to compute its result."""
    return (
        is_collective(node)
        or is_wait(node)
        or is_assertion(node)
        or _is_barrier(node)
        or _is_profiler_mark(node)
        or _draws_random_numbers(node)
        or bool(written_values(node))
    )


def _is_barrier(node: fx.Node) -> bool:
    if node.op != "call_function":
        return True
    if is_assertion(node) or _is_profiler_mark(node):
        return False
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() not in _FUNCTIONAL
    if not isinstance(target, torch._ops.OpOverload):
        return not is_view(node)
    # Writes and random numbers are ordered more finely than by a barrier.
    finer = target.namespace == "_c10d_functional" or target._schema.is_mutable
    return not finer and not _draws_random_numbers(node) and node.is_impure()


def _asserted(assertion: fx.Node) -> list[fx.Node]:
    """The nodes that an assertion is about: its inputs, and what they are sizes and numbers of.

    Numbers that are inputs of the graph are left out where others are compared with them: nearly
    everything uses the batch size, and it is known before the graph runs.
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


def _draws_random_numbers(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in target.tags
    )
