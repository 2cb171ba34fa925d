"""Pin the order of a graph for Inductor.

Inductor's scheduler may move a node to anywhere after its inputs: to lower the peak of memory
(``reorder_for_peak_memory``), to start collectives earlier (``enable_simple_overlap``), to have
fewer partitions for CUDA graphs. So :func:`pin_order` pins the order of collectives, copies to and
from host memory, waits and compute nodes. Kernels between them may still fuse and move::

    mm1  mm2  rs  mm3  wait         mm2 after mm1, rs after mm2, mm3 after rs, wait after mm3

It also pins where a bucket is packed. Inductor allocates the whole buffer for the first kernel that
writes a part of it. For a reduction, that kernel may fuse with the one that computes the part, long
before the other parts exist, and before kernels that read large values for the last time. The
shards of a gather are there from the start, so all gathers would be packed at once::

    sum1  ...  mm1  sum2  cat(sum1, mm1, sum2)  rs      cat after mm1 and sum2, with all kernels
                                                        that copy into it
    mm1  cat(shards)  mm2  empty  copy_  all_gather     cat after mm1, empty after mm2

And it pins the gradient of an embedding. Its kernel may fuse with a small one, such as that of a
norm's gradient in the first block, and so allocate the whole table before the bucket of the block::

    sum  cat(sum, ...)  rs  table.index_put(values)     index_put after rs

A kernel that reads a value for the last time runs before the next pinned node, too. Inductor places
a fused kernel where the first of its parts stood, with all kernels that it needs. Others then run
later, and their inputs stay live until then::

    bmm1  sum(bmm1)  exp(bmm1)  bmm2(exp)  cat(sum)     bmm2 after sum and exp: bmm1 is freed

An elementwise value that several nodes read is written once::

    exp  bmm1(exp)  bmm2(exp)                           not exp for bmm1, and exp again for bmm2
"""

from __future__ import annotations

import heapq

import torch.fx as fx

from .._torch.inductor import keep_dense, run_after, write_once
from ..graph.analysis import GraphAnalysis
from ..graph.kernel_order import is_pinned, last_readers
from ..graph.layout import pack_of
from ..graph.liveness import donated_by_autograd
from ..graph.nodes import is_collective, is_number, is_view, viewed
from ..graph.operators import is_fused, is_reduction, read_once


def pin_order(graph: fx.Graph) -> int:
    """Pin collectives, waits and compute nodes; return the number of wrapped nodes."""
    # A gather's ``empty`` is allocated on its own, wherever the copy into it runs.
    starts = [n for n in graph.nodes if is_collective(n)]
    packs = {p for n in starts for p in (pack_of(n), n.kwargs.get("out")) if isinstance(p, fx.Node)}
    keep_dense(packs)
    earlier: dict[fx.Node, list[fx.Node]] = {}
    pinned: list[fx.Node] = []
    after: dict[fx.Node, int] = {}  # how many of the pinned nodes run before a node and with it
    last_reads = _LastReads(graph)
    for node in graph.nodes:
        # A bucket is packed part by part, so each part counts.
        last = min if node in packs else max
        # A number, such as a size, needs no kernel of the node that it is read from.
        after[node] = (
            0 if is_number(node) else last(map(after.__getitem__, node.all_input_nodes), default=0)
        )
        in_order = is_pinned(node)
        if in_order or node in packs:
            first = last_reads.before(node)
            if after[node] < len(pinned):
                first += pinned[-1:]
                after[node] = len(pinned)
            if node in packs:
                first += [n for n in _sums(node) if not pinned or n > pinned[-1]]
            if first:
                earlier[node] = sorted(dict.fromkeys(first))
        if in_order:
            pinned.append(node)
            after[node] = len(pinned)
    read = (n for node in earlier if not is_fused(node) for n in node.all_input_nodes)
    shared = (viewed(n) for n in read if read_once(n) is None)
    write_once(n for n in shared if is_fused(n) and not is_reduction(n))
    run_after(graph, earlier)
    return len(earlier)


class _LastReads:
    """The fused kernels that read a value for the last time, by the places of a graph's nodes."""

    def __init__(self, graph: fx.Graph) -> None:
        kernels = GraphAnalysis(graph, fuses=True).fused
        assert kernels is not None
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        donated = donated_by_autograd(graph)
        freed = {n for n in graph.nodes if n.op == "call_function" or donated(n)}
        last = last_readers(kernels, ((n, n.all_input_nodes) for n in graph.nodes))
        together: dict[fx.Node, list[fx.Node]] = {}
        for node, first in kernels.runs_at.items():
            together.setdefault(first, [first]).append(node)
        # A heap, by the place of the last reader of a buffer that the kernel reads.
        self._waiting: list[tuple[int, int, list[fx.Node]]] = []
        for first, buffers in kernels.reads.items():
            places = [self._place[last[b]] for b in buffers if b in freed]
            if places:
                nodes = together.get(first, [first])
                heapq.heappush(self._waiting, (min(places), self._place[first], nodes))

    def before(self, node: fx.Node) -> list[fx.Node]:
        """Return nodes of kernels that free a value before ``node``, each once; not its inputs."""
        nodes: list[fx.Node] = []
        place = self._place
        while self._waiting and self._waiting[0][0] < place[node]:
            kernel = heapq.heappop(self._waiting)[-1]
            nodes += [n for n in kernel if place[n] < place[node]]
        earliest = min((place[n] for n in nodes), default=place[node])
        needed, stack = set[fx.Node](), [node]
        while stack:
            for n in stack.pop().all_input_nodes:
                if n not in needed and place[n] >= earliest:
                    needed.add(n)
                    stack.append(n)
        return [n for n in nodes if n not in needed]


def _sums(pack: fx.Node) -> list[fx.Node]:
    """Return the reductions that a buffer is packed from; a fused kernel packs other values."""
    sums: list[fx.Node] = []
    visited, stack = set[fx.Node](), list(pack.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in visited:
            continue
        visited.add(node)
        if is_reduction(node):
            sums.append(node)
        elif is_fused(node) or (is_view(node) and node.op == "call_function"):
            stack += node.all_input_nodes
    return sums
