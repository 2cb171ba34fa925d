"""Time a graph's nodes on a described machine.

A compute node takes its FLOPs, counted by torch's FLOP counter, over the machine's rate for their
dtype, or the time to move its bytes if that is longer. Other kernels move their bytes; views take
no time. Where Inductor runs the graph, operators that it fuses are one kernel
(:mod:`.graph.fusion`). A collective takes the time of the machine's table or network levels
(:mod:`.machine`), else of torch's model of NCCL (``torch._inductor.comm_analysis``, which follows
NCCL's tuning model). A machine's own ``estimate`` comes first.

The host launches each collective and each kernel, a fused one once (:attr:`.Machine.host_ms`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ..._torch.inductor import nccl_estimate_ms
from ..._torch.process_groups import group_by_name, ranks_of
from ...fsdp.rank_order import SUM, steps_of
from ...graph.dependencies import written_values
from ...graph.fusion import Fused, fused
from ...graph.layout import Layout, Packing
from ...graph.nodes import (
    COLLECTIVES,
    FROM_HOST,
    TO_HOST,
    collective_kind,
    group_name,
    group_size,
    host_stream,
    is_collective,
    is_compute,
    is_grouped_product,
    is_view,
    kind_of,
    replaced_kind,
    tensors_in,
)
from ...graph.operators import Operators
from ...graph.sizes import SizeHints, result_bytes, work_of
from .machine import H100, Machine, is_time

_SLICE_COPY = torch.ops.aten.slice_copy.Tensor


class Costs:
    """Milliseconds of nodes and of planned buckets; torch's model timed kinds ``by_torch``."""

    def __init__(self, machine: Machine = H100, hints: SizeHints | None = None) -> None:
        self.machine = machine
        self.hints = hints or SizeHints()
        self.by_torch: set[str] = set()
        self.operators = Operators(self.result_bytes)
        self._known: dict[Any, float] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def __call__(self, node: fx.Node) -> float:
        """Return the milliseconds that ``node`` keeps its stream busy; 0 for a view or a wait."""
        if is_view(node):
            return 0.0
        if is_collective(node):
            return self.collective(node)
        machine = self.machine
        estimated_ms = self._estimated(node, None)
        if estimated_ms is not None:
            return estimated_ms
        if host_stream(node):
            return self.host_copy(self.result_bytes(node))
        work = work_of(node)
        if work is not None and work.moved is not None:
            rate = machine.flops.get("bfloat16", machine.other_flops)
            ms = work.flops / rate * 1e3 * self._factor("kernel")
            return max(self.kernel(work.moved), ms)
        # A kernel takes the longer of its memory traffic and its FLOPs (a roofline).
        inputs = sum(map(self.result_bytes, node.all_input_nodes))
        if node.target is _SLICE_COPY:
            inputs = self.result_bytes(node)  # the rest is not read
        written = self.result_bytes(node)
        if node.meta.get("val") is None:  # it returns nothing: it writes to its inputs
            written = sum(map(self.result_bytes, written_values(node)))
        ms = self.kernel(written + inputs)
        if is_compute(node):
            # The rate is that of the factors: products of 8-bit values have a wider dtype.
            values = (
                t for n in (*node.all_input_nodes, node) for t in tensors_in(n.meta.get("val"))
            )
            dtype = next((t.dtype for t in values), torch.float32)
            rate = machine.flops.get(str(dtype).removeprefix("torch."), machine.other_flops)
            ms = max(ms, self._flops(node) / rate * 1e3 * self._factor("kernel"))
        return ms

    def times(
        self, nodes: Sequence[fx.Node], absent: Collection[fx.Node] = (), known: Fused | None = None
    ) -> tuple[list[float], list[float]]:
        """Time nodes that run together: milliseconds of each, and of its launch by the host.

        Both are 0 for ``absent`` ones, which differ from rank to rank or don't run. Where the
        machine's kernels are fused, the time of a fused one is divided among the values that it
        writes, by the bytes that it moves for each; values inside take 0. ``found``: their kernels,
        if these are known.
        """
        shares: dict[fx.Node, list[tuple[float, float]]] = {}
        if self.machine.fuses:
            for node in nodes:
                fuses = self.operators[node].fused
                if node not in absent and fuses and self._estimated(node, None) is None:
                    shares[node] = []
            for kernel in (known or fused(nodes, self.operators, absent)).kernels:
                whole = max(kernel.nbytes, 1)
                kernel_ms, launch_ms = self.kernel(kernel.nbytes) / whole, self.launch() / whole
                for node, nbytes in kernel.shares.items():
                    if node in shares:
                        shares[node].append((kernel_ms * nbytes, launch_ms * nbytes))
        ms, host = list[float](), list[float]()
        for node in nodes:
            if node in absent:
                parts = []
            elif node in shares:
                parts = shares[node]
            else:
                alone_ms = self(node)
                parts = [(alone_ms, self.launch(node) if alone_ms else 0.0)]
            ms.append(math.fsum(part for part, _ in parts))
            host.append(math.fsum(part for _, part in parts))
        return ms, host

    def launch(self, start: fx.Node | None = None) -> float:
        """Time the host's launch of a collective with its wait, or of a kernel, in ms."""
        host_ms = self.machine.host_ms
        kind = None if start is None else collective_kind(start)
        if kind is not None:
            return host_ms.get(kind, 0.0)
        kernel_ms = host_ms.get("kernel", 0.0)
        return host_ms.get("generated", kernel_ms) if self.machine.fuses else kernel_ms

    def traffic(self, nbytes: int) -> float:
        """Time the bytes that a memory-bound kernel reads and writes, in milliseconds."""
        return nbytes / self.machine.bandwidth * 1e3 * self._factor("kernel")

    def kernel(self, nbytes: int) -> float:
        """Time a memory-bound kernel that reads and writes ``nbytes`` together, in milliseconds."""
        return max(self.traffic(nbytes), self.machine.kernel_ms * self._factor("kernel"))

    def copy(self, nbytes: int) -> float:
        """Time a copy of ``nbytes`` into or out of a bucket, in milliseconds."""
        return self.kernel(2 * nbytes)

    def host_copy(self, nbytes: int) -> float:
        """Time a copy of ``nbytes`` to or from host memory, in milliseconds."""
        return self.machine.kernel_ms + nbytes / self.machine.host_bandwidth * 1e3

    def packing(self, kernels: Packing) -> tuple[float, float]:
        """Time the packing of a bucket, and its launches by the host, in milliseconds."""
        return sum(map(self.kernel, kernels.moved)), kernels.launches * self.launch()

    def bucket(self, layout: Layout) -> float:
        """Time the collective of a bucket, in milliseconds."""
        nbytes = layout.sent(self.result_bytes) + layout.received(self.result_bytes)
        return self.collective(layout.pieces[0].start, nbytes if len(layout.pieces) > 1 else None)

    def collective(self, node: fx.Node, nbytes: int | None = None) -> float:
        """Time a collective in milliseconds; ``nbytes``: input and output, if not the node's."""
        estimated_ms = self._estimated(node, nbytes)
        if estimated_ms is not None:
            return estimated_ms
        if nbytes is None:
            nbytes = self.collective_bytes(node)
        group = group_name(node)
        key = (node.target, group, nbytes)
        if key not in self._known:
            ranks = self._ranks_of(group)
            kind = collective_kind(node)
            assert kind is not None
            ms = self.machine.network_ms(kind, ranks, nbytes)
            if ms is None:
                self.by_torch.add(kind)
                ms = nccl_estimate_ms(node, nbytes)
            self._known[key] = ms * self._factor(kind)
        return self._known[key]

    def as_kind(self, kind: str, like: fx.Node, nbytes: int, group: str | None = None) -> float:
        """Time a collective that is not in the graph, in milliseconds.

        It has the dtype and device of the collective ``like``, whose group is the default.
        ``nbytes`` is input and output together.
        """
        # A graph of one node: a machine's estimate and torch's model of NCCL read nodes.
        graph, row = fx.Graph(), COLLECTIVES[kind]
        value = graph.placeholder("value")
        ranks = group_size(like) if group is None else len(self._ranks_of(group))
        rest = (*row.arguments(ranks, 0), group_name(like) if group is None else group)
        node = graph.call_function(row.targets[0], (value, *rest))
        value.meta["val"] = node.meta["val"] = like.meta["val"]
        return self.collective(node, nbytes)

    def in_rank_order(self, layout: Layout) -> list[tuple[int, float]]:
        """Time the collectives of :func:`.steps_of` that replace the reductions of a bucket.

        Each has the bytes that a rank receives, and milliseconds. The sum comes after the first
        one.
        """
        first, ranks, timed = layout.pieces[0].start, layout.ranks, list[tuple[int, float]]()
        whole = layout.sent(self.result_bytes)
        for step in steps_of(layout.kind, ranks):
            # After the first step a rank sends its own part of the sum alone.
            sent = -(-whole // ranks) if timed else whole
            received = whole * ranks if step == "all_gather" and not timed else whole
            timed.append((received, self.as_kind(step, first, sent + received)))
        return timed

    def with_rings(
        self, nodes: Sequence[fx.Node], ms: Sequence[float], host: Sequence[float]
    ) -> tuple[list[float], list[float]]:
        """Return the times of ``nodes`` as if sums in rank order were reductions again."""
        times, launches = list(ms), list(host)
        for i, node in enumerate(nodes):
            kind = replaced_kind(node)
            if node.target is SUM or (kind is not None and node.args[0].target is SUM):  # type: ignore[union-attr]
                times[i] = launches[i] = 0.0
            elif kind is not None and kind != kind_of(node):
                sent = self.result_bytes(node.all_input_nodes[0])
                result = sent if COLLECTIVES[kind].whole_output else sent // group_size(node)
                times[i] = self.as_kind(kind, node, sent + result)
                launches[i] = self.machine.host_ms.get(kind, 0.0)
        return times, launches

    def _factor(self, kind: str) -> float:
        return self.machine.factors.get(kind, 1.0)

    def _ranks_of(self, group: str) -> tuple[int, ...]:
        if group not in self._ranks:
            self._ranks[group] = ranks_of(group_by_name(group))
        return self._ranks[group]

    def shared_levels(self, groups: Iterable[str]) -> dict[str, str]:
        """Map each group that shares its network level with others to that level."""
        if self.machine.ranks_per_node is None:
            return {}
        by_level: dict[str, list[str]] = {}
        for group in dict.fromkeys(g for g in groups if g not in (TO_HOST, FROM_HOST)):
            ranks = self._ranks_of(group)
            if len(ranks) > 1:
                _, nodes = self.machine.layout_of(ranks)
                level = "inside nodes" if nodes == 1 else "between nodes"
                by_level.setdefault(level, []).append(group)
        return {
            g: level for level, sharing in by_level.items() if len(sharing) > 1 for g in sharing
        }

    def _estimated(self, node: fx.Node, nbytes: int | None) -> float | None:
        estimate = self.machine.estimate
        ms = None if estimate is None else estimate(node, nbytes)
        if ms is None:
            return None
        if not is_time(ms):
            raise ValueError(
                f"the machine's estimate returned {ms!r} for {node.name}: give milliseconds of at "
                "least 0, or None"
            )
        return float(ms)

    def collective_bytes(self, node: fx.Node) -> int:
        """Count the bytes that a collective moves, input and output together."""
        out = node.kwargs.get("out")
        inputs = (a for a in node.all_input_nodes if a is not out)
        return self.result_bytes(node) + sum(map(self.result_bytes, inputs))

    def result_bytes(self, node: fx.Node) -> int:
        """Count the bytes of the tensors that a node returns."""
        return result_bytes(node, self.hints)

    def _flops(self, node: fx.Node) -> float:
        from torch.utils.flop_counter import flop_registry

        if is_grouped_product(node):
            return self._grouped_flops(node)
        target: Any = node.target
        count = flop_registry.get(getattr(target, "overloadpacket", None)) or flop_registry[target]
        # torch's formulas compare sizes, so sizes that depend on data need numbers.
        concrete = self.hints.concrete
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: concrete(n.meta.get("val")))
        try:
            return float(count(*args, **kwargs, out_val=concrete(node.meta.get("val"))))
        except (TypeError, AssertionError, ValueError, AttributeError):
            return 0.0  # the formula does not take this overload: its bytes count alone

    def _grouped_flops(self, node: fx.Node) -> float:
        """Count the FLOPs of a grouped product, which do not depend on the groups' sizes."""
        # (rows, k) x (groups, k, n)       a group has some of the rows
        # (m, k) x (k, n)                  some of the terms: the gradient of the experts
        # (groups, m, k) x (k, columns)    some of the columns
        # (groups, m, k) x (groups, k, n)
        a, b = (list(map(self.hints, arg.meta["val"].shape)) for arg in node.args[:2])  # type: ignore[union-attr]
        rows = a[:-2] if len(b) == 3 else []
        return 2.0 * math.prod([*rows, *a[-2:], b[-1]])
