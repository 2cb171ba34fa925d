"""Bytes that are live while a graph runs in some order, with everything freed at its last use.

Counted per storage, so that views and other aliases count once. A storage is live from the node
that allocates it to the last node that touches it; then it is freed, unless it is an output or an
input that the caller keeps. What a collective reads and writes is live until its wait.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from .._torch import aot as _aot
from .collectives import is_collective, is_number, is_view, started_by, tensors_in
from .dependencies import Dependencies
from .size_hints import SizeHints
from .uneven import ShardSide, shard_side
from .writes import written_values


def donated_by_autograd(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Which inputs of a graph are freed at their last use: what forward saved for a backward graph,
    which AOTAutograd hands over, but not the tangents, which autograd holds in backward."""
    return _aot.is_saved if _aot.stage_of(graph) == "backward" else lambda node: False


def kept_inputs(graph: fx.Graph, hints: SizeHints) -> dict[str, int]:
    """Bytes by name of the inputs that the caller keeps; memory of several counts for the first."""
    donated = donated_by_autograd(graph)
    side = shard_side(graph, hints)
    seen: set[int] = set()
    found = {}
    for node in graph.find_nodes(op="placeholder"):
        if donated(node) or is_number(node):
            continue
        found[node.name] = 0
        for value in _values(node):
            at = value.untyped_storage()._cdata
            if at not in seen:
                seen.add(at)
                found[node.name] += _storage_bytes(node, value, side, hints)
    return found


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [v for v in tensors_in(node.meta.get("val")) if v.device.type != "meta"]


def _storage_bytes(node: fx.Node, value: torch.Tensor, side: ShardSide, hints: SizeHints) -> int:
    """Bytes of a storage of ``node``; of an uneven shard, those of the largest rank."""
    if node in side.nodes:
        return side.elements.get(node, 0) * value.itemsize
    return hints(value.untyped_storage().nbytes())


@dataclass(eq=False, repr=False)
class Storages:
    """The storages that nodes use.

    Args:
        size: bytes of each storage.
        allocates: per node, the storages that are new with it.
        touches: per node, the storages that must be live while it runs.
        kept: storages that are never freed.
        at_start: bytes of the inputs and constants, and of what is in memory beside them.
    """

    size: list[int]
    allocates: list[tuple[int, ...]]
    touches: list[tuple[int, ...]]
    kept: dict[int, None]
    at_start: int

    def __post_init__(self) -> None:
        uses = Counter(itertools.chain.from_iterable(self.touches))
        self.uses = [uses[s] for s in range(len(self.size))]

    def profile(self, order: Sequence[int]) -> list[int]:
        """Bytes live while each node of ``order`` runs."""
        live = LiveBytes(self)
        return [live.run(i) for i in order]

    def peak(self, order: Sequence[int]) -> int:
        """The largest number of bytes live at any time."""
        return max(self.profile(order), default=self.at_start)


class Liveness(Storages):
    """The storages of a graph with fake tensors in ``meta["val"]``, by the place of its movable
    nodes; arguments are those of :class:`.GraphAnalysis`."""

    def __init__(
        self,
        graph: fx.Graph,
        dependencies: Dependencies,
        side: ShardSide,
        hints: SizeHints,
        donated: Callable[[fx.Node], bool] | None = None,
        external_live_bytes: int = 0,
    ) -> None:
        self._hint, self._side = hints, side
        donated = donated or donated_by_autograd(graph)
        self.size: list[int] = []
        self._ids: dict[Any, int] = {}
        self._of_node: dict[fx.Node, tuple[int, ...]] = {}
        at_start = external_live_bytes
        allocates: list[tuple[int, ...]] = []
        touches: list[tuple[int, ...]] = []
        kept: dict[int, None] = {}
        seen: set[int] = set()
        for node in graph.nodes:
            given = (s for arg in node.all_input_nodes for s in self._of_node[arg])
            if node.op == "output":
                kept.update(dict.fromkeys(given))
                continue
            mine = self._of_node[node] = self._storages(node)
            new = tuple(s for s in mine if s not in seen)
            seen.update(new)
            if node not in dependencies.index:
                at_start += sum(self.size[s] for s in new)
                if not (node.op == "placeholder" and donated(node)):
                    kept.update(dict.fromkeys(mine))
                continue
            start = started_by(node)
            read = () if start is None else start.all_input_nodes
            sent = (s for arg in read for s in self._of_node[arg])
            allocates.append(new)
            touches.append(tuple(dict.fromkeys((*mine, *given, *sent))))
        super().__init__(self.size, allocates, touches, kept, at_start)

    def storages_of(self, node: fx.Node) -> tuple[int, ...]:
        """The storages that hold the result of a node of the graph."""
        return self._of_node[node]

    def _storages(self, node: fx.Node) -> tuple[int, ...]:
        if is_number(node):
            return ()
        values = _values(node)
        returned = _returned_input(node)
        if returned is not None and len(self._of_node[returned]) == 1:
            mine = self._of_node[returned]
            for value in values if mine else ():
                self._ids.setdefault(value.untyped_storage()._cdata, mine[0])
            return mine
        found: dict[int, None] = {}
        for value in values:
            cdata = value.untyped_storage()._cdata
            at = self._ids.get(cdata)
            if at is None:
                at = self._ids[cdata] = len(self.size)
                self.size.append(_storage_bytes(node, value, self._side, self._hint))
            found[at] = None
        return tuple(found)


def _returned_input(node: fx.Node) -> fx.Node | None:
    """The input whose memory the result is, where the fake tensors do not tell: a collective's and
    a wait's are copies, and a view's is still a view of what its input was before bucketing."""
    start = started_by(node)
    if start is not None:
        return start
    if is_collective(node):
        return next(iter(written_values(node)), None)
    views = is_view(node) and node.op == "call_function"
    return next(iter(node.all_input_nodes), None) if views else None


class LiveBytes:
    """Live bytes as nodes run one after the other."""

    def __init__(self, liveness: Storages) -> None:
        self._liveness = liveness
        self._left = list(liveness.uses)
        self.now = liveness.at_start
        self.peak = self.now

    def run(self, i: int) -> int:
        """Run node ``i``; returns the bytes live while it runs. ``now`` is what is left after."""
        liveness = self._liveness
        size, left = liveness.size, self._left
        for s in liveness.allocates[i]:
            self.now += size[s]
        during = self.now
        if during > self.peak:
            self.peak = during
        for s in liveness.touches[i]:
            left[s] -= 1
            if left[s] == 0 and s not in liveness.kept:
                self.now -= size[s]
        return during

    def last_use(self, storages: Iterable[int]) -> int:
        """Bytes of those that one more node frees."""
        size, kept = self._liveness.size, self._liveness.kept
        return sum(size[s] for s in storages if self._left[s] == 1 and s not in kept)

    def after(self, nodes: Iterable[int]) -> tuple[int, int]:
        """The most bytes live while ``nodes`` would run next, and what would be left."""
        liveness = self._liveness
        size, now, most = liveness.size, self.now, self.now
        read: dict[int, int] = {}
        for i in nodes:
            for s in liveness.allocates[i]:
                now += size[s]
            most = max(most, now)
            for s in liveness.touches[i]:
                read[s] = read.get(s, 0) + 1
                if read[s] == self._left[s] and s not in liveness.kept:
                    now -= size[s]
        return most, now
