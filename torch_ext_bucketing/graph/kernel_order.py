"""Find where Inductor runs the kernels of an order.

Inductor writes an elementwise value where the first node needs it in memory, and runs a fused
kernel where the first of its parts stands, unless a pinned node waits for it (:mod:`.passes.pin`)::

    exp(x)  mm1  mm2(exp)                 mm1  exp(x)  mm2(exp)
    max  bmm  exp(x, max)  mm(exp)        max  exp(x, max)  bmm  mm(exp)

Of two orders it takes the one with the lower peak: kernels that alone read a value stand where they
stood, or right after the value, which so is freed early::

    wait  mm1  copy1(wait)  mm2(copy1)  copy2(wait)        wait  copy1  copy2  mm1  mm2

It doesn't know that a wait frees a bucket's buffer, and may run the kernels after a wait before it.
Where these would exceed the peak, the wait goes ahead of the product that they read::

    mm  wait  sum(mm)                                      wait  mm  sum(mm)
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence

import torch.fx as fx

from .dependencies import Precedence
from .fusion import Fused
from .liveness import LiveBytes, Storages, is_read_by_fused
from .nodes import (
    host_stream,
    is_collective,
    is_compute,
    is_plain_view,
    is_view,
    launched_by,
    viewed,
)
from .operators import adds_to_larger, is_fused


def is_pinned(node: fx.Node) -> bool:
    """Return whether a node keeps its place among others; see :mod:`.passes.pin`."""
    return (
        is_collective(node)
        or host_stream(node) is not None
        or launched_by(node) is not None
        or is_compute(node)
        or adds_to_larger(node)
    )


def last_readers(
    kernels: Fused, nodes: Iterable[tuple[fx.Node, Iterable[fx.Node]]]
) -> dict[fx.Node, fx.Node]:
    """Map each value to its last reader, of nodes with their inputs; a view reads nothing.

    A kernel is its node in :attr:`.Fused.reads`.
    """
    last, viewed = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node, inputs in nodes:
        values = [viewed.get(n, n) for n in inputs]
        if is_view(node) and node.op == "call_function" and values:
            viewed[node] = values[0]
        elif not is_fused(node):
            last.update(dict.fromkeys(values, node))
        last.update(dict.fromkeys(kernels.reads.get(node, ()), node))
    return last


def kernel_order(live: Storages, dependencies: Precedence, kernels: Fused) -> list[int]:
    """Return the places of all nodes in order, the nodes of each kernel where the kernel runs.

    ``live``: the storages of :func:`.with_fused`.
    """
    nodes = _Order(live, dependencies, kernels)
    late = nodes.late()
    orders = map(nodes.sorted, (late, late | nodes.early()))
    return nodes.waits_first(min(orders, key=live.peak))


class _Order:
    """The nodes of a graph, to be sorted by times: places, or times between two."""

    def __init__(self, live: Storages, dependencies: Precedence, kernels: Fused) -> None:
        self._live, self._kernels = live, kernels
        self._nodes, self._needs = dependencies.nodes, dependencies.needs
        self._row = row = {node: i for i, node in enumerate(self._nodes)}
        self._parts: dict[int, list[int]] = {}  # by the node where a kernel runs, its other nodes
        for node, first in kernels.runs_at.items():
            self._parts.setdefault(row[first], []).append(row[node])

    def late(self) -> dict[int, float]:
        """Map places to the time before which a node need not run; infinity: before its readers."""
        kernels = self._kernels
        last = last_readers(kernels, ((node, node.all_input_nodes) for node in self._nodes))
        times = dict[int, float]()
        for i, node in enumerate(self._nodes):
            if node in kernels.late:
                # A pinned node waits for a kernel that reads a value which is free by then.
                buffers = kernels.reads.get(kernels.runs_at.get(node, node), ())
                after = (self._row[last[b]] + 0.5 for b in buffers if self._is_freed(b))
                times[i] = max(i, min(after, default=math.inf))
            else:
                inside = node in kernels.within and node not in kernels.written
                times[i] = math.inf if inside or is_plain_view(node) else i
        return times

    def early(self) -> dict[int, float]:
        """Map the nodes of kernels that alone read a value to the place of the value."""
        readers: dict[int, list[int]] = {}
        for first, buffers in self._kernels.reads.items():
            kernel = self._row[first], *self._parts.get(self._row[first], ())
            for value in dict.fromkeys(map(viewed, buffers)):
                if value in self._row and self._is_freed(value) and is_read_by_fused(value):
                    readers.setdefault(self._row[value], []).extend(kernel)
        times = dict[int, float]()
        for made, kernels in readers.items():
            if self._move(self._needed(kernels, after=made)):
                times.update(dict.fromkeys(kernels, made))
        return times

    def sorted(self, times: Mapping[int, float]) -> list[int]:
        """Sort the places by times, with the nodes of each kernel together."""
        first_use = dict(times)  # no node runs after one that needs it
        for i in reversed(range(len(self._nodes))):
            for j in self._needs[i]:
                first_use[j] = min(first_use[j], first_use[i])
        placed = dict[int, None]()
        for i in sorted(range(len(self._nodes)), key=first_use.__getitem__):
            node = self._nodes[i]
            first = self._row.get(self._kernels.runs_at.get(node, node), i)
            for j in (first, i, *self._parts.get(first, ())):
                needed = self._needed([j], placed)
                if j == i or self._move(needed):
                    placed |= dict.fromkeys(sorted(needed))
        return list(placed)

    def waits_first(self, order: Sequence[int]) -> list[int]:
        """Move a wait ahead of a pinned kernel if a reader of it, run before the wait, has no room.

        A reader that is written late stays after the wait, as it stands before a pinned node.
        """
        live, peak = LiveBytes(self._live), self._live.peak(order)
        rank = {i: number for number, i in enumerate(order)}
        earlier: dict[int, list[int]] = {}  # by pinned kernel, the waits that go ahead of it
        pinned, waits, freed = -1, list[int](), 0  # the last pinned kernel, and the waits after it
        for i in order:
            node, before, during = self._nodes[i], live.now, live.run(i)
            if launched_by(node) is not None:
                if pinned >= 0 and all(rank[j] < rank[pinned] for j in self._needs[i]):
                    waits.append(i)
                    freed += before - live.now
            elif is_compute(node) or adds_to_larger(node):
                pinned, waits, freed = i, [], 0
            elif freed > 0 and during + freed > peak and node not in self._kernels.late:
                before_pinned = {*order[: rank[pinned]]}
                if not is_pinned(node) and pinned in self._needed([i], before_pinned):
                    earlier.setdefault(pinned, []).extend(waits)
                    waits, freed = [], 0
        moved = {i for waits in earlier.values() for i in waits}
        return [j for i in order if i not in moved for j in (*earlier.get(i, ()), i)]

    def _is_freed(self, node: fx.Node) -> bool:
        return self._live.kept.keys().isdisjoint(self._live.of_node[node])

    def _needed(
        self, places: Iterable[int], placed: Container[int] = (), *, after: int = -1
    ) -> set[int]:
        """Return places with all that they need, without placed ones and places to ``after``."""
        needed, stack = set[int](), list(places)
        while stack:
            i = stack.pop()
            if i not in needed and i not in placed and i > after:
                needed.add(i)
                stack += self._needs[i]
        return needed

    def _move(self, places: Iterable[int]) -> bool:
        """Return whether all nodes are parts of kernels, or run none."""
        return all(is_fused(n) or is_plain_view(n) for n in (self._nodes[i] for i in places))
