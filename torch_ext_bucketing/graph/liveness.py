"""Count live bytes of a graph, with every storage freed at its last use.

Bytes are counted per storage, so that views and other aliases count once. A storage is live from
the node that allocates it to the last node that touches it; outputs, and inputs that the caller
keeps, stay. The operands of a collective, or of a copy to or from host memory, are live until its
wait. Host memory does not count. Where Inductor runs the graph, its kernels count instead of
operators (:func:`with_fused`).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
import torch.fx as fx

from .._torch import aot as _aot
from .._torch.aot import stage_of
from .._torch.inductor import cublas_workspace_bytes
from .._torch.without_device import stands_for_cuda
from .dependencies import Dependencies, Place, Precedence, written_values
from .fusion import Fused
from .layout import Layout
from .nodes import (
    buffer_bytes,
    is_collective,
    is_compute,
    is_number,
    is_on_host,
    is_plain_view,
    is_view,
    launched_by,
    tensors_in,
)
from .operators import is_fused, is_reduction
from .sizes import ShardSide, SizeHints, shard_side, work_of

_NEVER = 2**62  # uses of a storage that is never freed


def donated_by_autograd(graph: fx.Graph) -> Callable[[fx.Node], bool]:
    """Return a test for the inputs that are freed at their last use: saved values."""
    # Not tangents, which autograd holds.
    return _aot.is_saved if _aot.stage_of(graph) == "backward" else lambda node: False


def kept_inputs(graph: fx.Graph, hints: SizeHints) -> dict[str, int]:
    """Map the name of each input that the caller keeps to its bytes; shared ones count once."""
    donated = donated_by_autograd(graph)
    side = shard_side(graph, hints)
    seen: set[int] = set()
    nbytes = {}
    for node in graph.find_nodes(op="placeholder"):
        if not donated(node) and not is_number(node):
            values = {value.untyped_storage()._cdata: value for value in _values(node)}
            new = [value for address, value in values.items() if address not in seen]
            seen.update(values)
            nbytes[node.name] = sum(_storage_bytes(node, value, side, hints) for value in new)
    return nbytes


def _values(node: fx.Node) -> list[torch.Tensor]:
    return [v for v in tensors_in(node.meta.get("val")) if v.device.type != "meta"]


def _storage_bytes(node: fx.Node, value: torch.Tensor, side: ShardSide, hints: SizeHints) -> int:
    """Return the bytes of a storage of ``node`` on the rank that has most."""
    if (work := work_of(node)) is not None:
        return work.result
    if node in side.nodes:
        return side.elements.get(node, 0) * value.itemsize
    return hints(value.untyped_storage().nbytes())


Range: TypeAlias = tuple[int, int, int]
"""Bytes that are live from node ``begin`` of an order on, and not from node ``end`` on, as
``(bytes, begin, end)``. Negative bytes shorten a live range, or take it away."""


@dataclass(eq=False, repr=False)
class Storages:
    """The storages that nodes use, each node by its place."""

    size: list[int]  # bytes of each storage
    allocates: list[tuple[int, ...]]  # per node, the storages that are new with it
    touches: list[tuple[int, ...]]  # per node, the storages that must be live while it runs
    kept: dict[int, None]  # storages that are never freed
    at_start: int  # bytes of the inputs and constants, and of other memory beside the graph
    # Per node of the graph, the storages that hold its result.
    of_node: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def uses(self) -> list[int]:
        """The number of nodes that touch each storage, before which it can't be freed."""
        uses = Counter(itertools.chain.from_iterable(self.touches))
        return [_NEVER if s in self.kept else uses[s] for s in range(len(self.size))]

    @cached_property
    def own_profile(self) -> list[int]:
        """Bytes live while each node runs, in the order of the places."""
        return self.profile(range(len(self.touches)))

    def profile(self, order: Sequence[int]) -> list[int]:
        """Return the bytes live while each node of ``order`` runs."""
        run = LiveBytes(self).run
        return [run(i) for i in order]

    def peak(self, order: Sequence[int]) -> int:
        """Return the largest number of bytes live at any time."""
        return max(self.profile(order), default=self.at_start)

    def peak_with(self, ranges: Iterable[Range]) -> int:
        """Return the peak in the order of the places with further live ranges."""
        steps = [0] * (len(self.touches) + 1)
        for nbytes, begin, end in ranges:
            steps[begin] += nbytes
            steps[end] -= nbytes
        return max(map(operator.add, self.own_profile, itertools.accumulate(steps)), default=0)


def with_fused(
    live: Storages,
    dependencies: Precedence,
    of_node: Mapping[fx.Node, tuple[int, ...]],
    kernels: Fused,
) -> Storages:
    """Return the storages of nodes that run as fused kernels; ``live`` has the unfused storages.

    - A result that no other kernel reads takes no bytes.
    - A kernel's inputs are live until it has run. A value computed inside its readers so leaves its
      own inputs live for them. A view runs no kernel.
    - A kernel allocates all its results where it runs.
    - A buffer that a kernel reads last, in any order, holds a result of equal size.
    """
    at_start = {s for touched in live.touches for s in touched}
    size, touches, row = list(live.size), list[tuple[int, ...]](), dict[fx.Node, Place]()
    for i, (node, new) in enumerate(zip(dependencies.nodes, live.allocates, strict=True)):
        at_start.difference_update(new)
        row.setdefault(node, Place(i))
    # A half of a joint graph does not have the storages of the other half.
    present = {*at_start, *(s for new in live.allocates for s in new)}
    # Storages that hold no node's result, such as a bucket's buffer, keep their uses.
    others = present.difference(s for used in of_node.values() for s in used)
    touched_by: dict[int, list[Place]] = {}  # by storage
    for i, (node, new, used) in enumerate(
        zip(dependencies.nodes, live.allocates, live.touches, strict=True)
    ):
        if row[node] == i:
            if node in kernels.within:
                for s in new:
                    size[s] = 0
            if node in kernels.within or node in kernels.written:
                results = (s for s in of_node.get(node, ()) if s in present)
                used = tuple(dict.fromkeys((*new, *results, *sorted(others.intersection(used)))))
            elif is_plain_view(node):
                used = new  # its kernel's readers keep the input live, not the view
            reads = kernels.reads.get(node, ())
            more = [s for b in reads for s in of_node.get(b, ()) if s in present]
            used = tuple(dict.fromkeys((*used, *more)))
        touches.append(used)
        for s in used:
            touched_by.setdefault(s, []).append(Place(i))
    allocates = list(live.allocates)
    runs_at = {n: first for n, first in kernels.runs_at.items() if n in row and first in row}
    for node, first in runs_at.items():
        new, place = allocates[row[node]], row[first]
        allocates[row[node]], allocates[place] = (), (*allocates[place], *new)
        touches[place] = tuple(dict.fromkeys((*touches[place], *new)))
    instead: dict[int, int] = {}  # storage -> the one that holds its bytes
    free = {s for s in present if s not in live.kept and s not in at_start}
    for node, buffers in kernels.reused.items():
        used = tuple(s for s in of_node.get(node, ()) if s in free) if node in row else ()
        if len(used) != 1 or not size[used[0]]:
            continue
        # The first buffer whose last use is this kernel, in whatever order nodes run, is written
        # over. A chain of such kernels shares the first buffer of the chain.
        for buffer in buffers:
            buffer_storages = of_node.get(buffer, ())
            s = buffer_storages[0] if len(buffer_storages) == 1 else -1
            first = instead.get(s, s)
            if s not in free or s == used[0] or size[first] != size[used[0]]:
                continue
            if dependencies.runs_after(row[runs_at.get(node, node)], touched_by[s]):
                instead[used[0]] = first
                size[used[0]] = 0
                free.discard(s)
                break
    # Nodes that touch a result without bytes keep the storage that holds the result live.
    if instead:
        for i, used in enumerate(touches):
            more = [instead[s] for s in used if s in instead]
            touches[i] = tuple(dict.fromkeys((*used, *more))) if more else used
    return Storages(size, allocates, touches, live.kept, live.at_start, live.of_node)


def with_packed(
    live: Storages,
    dependencies: Precedence,
    members: Mapping[int, Sequence[fx.Node]],
    of_node: Mapping[fx.Node, tuple[int, ...]],
    kernels: Fused,
) -> Storages:
    """Return the storages of :func:`with_fused` where kernels read and write buckets' buffers.

    ``members``: the starts in each bucket, by the place of the bucket's start.

    - An elementwise value that only a bucket reads takes no bytes, and packing reads what its
      kernel reads::

        mm -> cast -> pack -> RS        mm -> pack (cast) -> RS

    - A gathered value that only fused kernels read is not copied out of the buffer, which stays
      live for these kernels.
    """
    nodes, size, touches = dependencies.nodes, list(live.size), list(live.touches)
    row = {n: i for i, n in enumerate(nodes)}  # of a gather's wait, its copy out of the buffer
    instead: dict[int, tuple[int, ...]] = {}  # a value's storage -> the buffer that holds the value
    written_over = {buffer for buffers in kernels.reused.values() for buffer in buffers}
    for start, starts in members.items():
        # Packing has the node of the first member; a single collective packs nothing.
        pack = next((i for i in dependencies.needs[start] if nodes[i] is starts[0]), -1)
        if pack < 0:
            continue
        layout = Layout.of(starts)
        buffer = live.allocates[pack if layout.in_place else start][:1]
        for piece in layout.pieces:
            value = piece.writer
            if value in row and value in kernels.reads and not is_reduction(value):
                for s in of_node[value]:
                    size[s] = 0
                touches[pack] = tuple(dict.fromkeys((*touches[pack], *touches[row[value]])))
            wait = next(iter(piece.start.users))
            copied = live.allocates[row[wait]] if piece.copied and wait in row else ()
            if wait not in written_over and is_read_by_fused(wait):
                for s in (s for s in copied if s not in live.kept):
                    size[s], instead[s] = 0, buffer
    if instead:
        for i, touched in enumerate(touches):
            more = [b for s in touched if s in instead for b in instead[s]]
            touches[i] = tuple(dict.fromkeys((*touched, *more))) if more else touched
    return replace(live, size=size, touches=touches)


def is_read_by_fused(node: fx.Node) -> bool:
    """Return whether only fused kernels read a value; views are looked through."""
    return bool(node.users) and all(
        is_read_by_fused(u) if is_view(u) else is_fused(u) for u in node.users
    )


class LiveBytes:
    """Live bytes as nodes run one after the other."""

    def __init__(self, liveness: Storages) -> None:
        self._size, self._uses_left = liveness.size, list(liveness.uses)
        self._allocates, self._touches = liveness.allocates, liveness.touches
        self.now = liveness.at_start

    def run(self, i: int) -> int:
        """Run node ``i`` and return the bytes live while it runs; ``now`` is the bytes left."""
        # This runs for each node of each order.
        size, uses_left, live = self._size, self._uses_left, self.now
        for s in self._allocates[i]:
            live += size[s]
        during = live
        for s in self._touches[i]:
            uses_left[s] -= 1
            if not uses_left[s]:
                live -= size[s]
        self.now = live
        return during

    def last_use(self, storages: Iterable[int]) -> int:
        """Return the bytes of ``storages`` that one more node frees."""
        size, uses_left = self._size, self._uses_left
        return sum(size[s] for s in storages if uses_left[s] == 1)

    def after(self, nodes: Sequence[int]) -> tuple[int, int]:
        """Return the most bytes live while ``nodes`` would run next, and the bytes after them."""
        before, most = self.now, self.now
        for i in nodes:
            most = max(most, self.run(i))
        live_after, self.now = self.now, before
        for i in nodes:
            for s in self._touches[i]:
                self._uses_left[s] += 1
        return most, live_after


def storages_of(
    graph: fx.Graph,
    dependencies: Dependencies,
    side: ShardSide,
    hints: SizeHints,
    donated: Callable[[fx.Node], bool] | None = None,
    external_live_bytes: int = 0,
) -> Storages:
    """Find the storages of a graph by places of nodes; arguments as :class:`.GraphAnalysis`."""
    donated = donated or donated_by_autograd(graph)
    live = Storages([], [], [], {}, external_live_bytes)
    ids: dict[Any, int] = {}
    seen: set[int] = set()
    for node in graph.nodes:
        read_storages = [s for arg in node.all_input_nodes for s in live.of_node[arg]]
        if node.op == "output":
            live.kept.update(dict.fromkeys(read_storages))
            continue
        touched = live.of_node[node] = _result_storages(node, live, ids, side, hints)
        new = tuple(s for s in touched if s not in seen)
        seen.update(new)
        if node not in dependencies.index:  # an input or a constant
            live.at_start += sum(live.size[s] for s in new)
            # A donated input is freed at its last use, like a value of the graph.
            if not (node.op == "placeholder" and donated(node)):
                live.kept.update(dict.fromkeys(touched))
            continue
        if (buffers := buffer_bytes(node)) > 0:
            new = (*new, len(live.size))
            touched = (*touched, len(live.size))
            live.size.append(buffers)
        # A wait touches the operands of its collective or copy, too: until then these are needed.
        start = launched_by(node)
        read = () if start is None else start.all_input_nodes
        sent = (s for arg in read for s in live.of_node[arg])
        live.allocates.append(new)
        live.touches.append(tuple(dict.fromkeys((*touched, *read_storages, *sent))))
    return live


def _result_storages(
    node: fx.Node, live: Storages, ids: dict[Any, int], side: ShardSide, hints: SizeHints
) -> tuple[int, ...]:
    """Return the storages of a node's result, and number new ones in ``ids``, by address."""
    if is_number(node) or is_on_host(node):
        return ()
    values = _values(node)
    returned = _returned_input(node)
    if returned is not None and len(live.of_node[returned]) == 1:
        shared = live.of_node[returned]
        for value in values:
            ids.setdefault(value.untyped_storage()._cdata, shared[0])
        return shared
    numbers: dict[int, None] = {}
    for value in values:
        number = ids.setdefault(value.untyped_storage()._cdata, len(live.size))
        if number == len(live.size):
            live.size.append(_storage_bytes(node, value, side, hints))
        numbers[number] = None
    return tuple(numbers)


def _returned_input(node: fx.Node) -> fx.Node | None:
    """Return the input that shares its memory with the result, where fake tensors don't show it."""
    # Fake results of collectives and waits are copies. A view's is still a view of what its input
    # was before bucketing.
    start = launched_by(node)
    if start is not None:
        return start
    if is_collective(node):
        return next(iter(written_values(node)), None)
    views = is_view(node) and node.op == "call_function"
    return next(iter(node.all_input_nodes), None) if views else None


BLOCK_BYTES = 512
"""Bytes; the allocator rounds each block up to a multiple of them."""


def workspace_bytes(graph: fx.Graph) -> int:
    """Return the bytes of cuBLAS's workspaces; 0 without products on CUDA."""
    # torch's CUDA allocator keeps one for each handle and stream. Each thread has a handle of its
    # own, and autograd runs backward in another thread than forward, so a training step holds two
    # from its first backward on. NCCL allocates its buffers itself, with ``cudaMalloc``.
    return _workspaces(graph) * cublas_workspace_bytes()


def workspace_text(graph: fx.Graph) -> str:
    """Name the memory that is assumed beside the graph; empty where nothing is on CUDA."""
    number = _workspaces(graph)
    if not number:
        return ""
    size = cublas_workspace_bytes() / 2**20
    return (
        f"bytes have {number} workspaces of cuBLAS of {size:.4g} MiB; they have neither NCCL's own "
        f"buffers nor what is lost to blocks' rounding to {BLOCK_BYTES} bytes and between blocks"
    )


def _workspaces(graph: fx.Graph) -> int:
    stands = stands_for_cuda()
    on_cuda = any(
        is_compute(node) and any(stands or t.is_cuda for t in tensors_in(node.meta.get("val")))
        for node in graph.nodes
    )
    return 0 if not on_cuda else 1 if stage_of(graph) == "inference" else 2
