"""How long each node of a graph takes on a described machine.

Compute nodes take what torch's FLOP counter counts, over the machine's rate for their dtype, or the
time to move their bytes if that is longer; other kernels move their bytes; views take nothing.
Collectives take what the machine's table or its network levels say (:mod:`.machine`), else what
torch's model of NCCL says (``torch._inductor.comm_analysis``, which follows NCCL's tuning model).
Before all that a machine's own ``estimate`` is asked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx

from ..._torch.estimates import nccl_estimate_ms
from ..._torch.process_groups import group_by_name, ranks_of
from ...fsdp.all_to_all import SUM, steps_of
from ...graph.collectives import (
    COLLECTIVES,
    collective_kind,
    group_name,
    group_size,
    is_collective,
    is_compute,
    is_grouped_product,
    is_view,
    kind_of,
    tensors_in,
)
from ...graph.size_hints import SizeHints
from ...graph.tags import replaced_kind
from .machine import H100, Machine, is_time

_SLICE_COPY = torch.ops.aten.slice_copy.Tensor


class Costs:
    """Milliseconds per node.

    Args:
        machine: what it runs on.
        hints: numbers for sizes that depend on data.
    """

    def __init__(self, machine: Machine = H100, hints: SizeHints | None = None) -> None:
        self.machine = machine
        self.hints = hints or SizeHints()
        self.by_torch: set[str] = set()
        """Kinds of collectives of which the machine told nothing."""
        self._known: dict[Any, float] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}

    def __call__(self, node: fx.Node) -> float:
        """Milliseconds that ``node`` keeps its stream busy; 0 for a view or a wait."""
        if is_view(node):
            return 0.0
        if is_collective(node):
            return self.collective(node)
        machine = self.machine
        given = self._estimated(node, None)
        if given is not None:
            return given
        inputs = sum(map(self.result_bytes, node.all_input_nodes))
        if node.target is _SLICE_COPY:
            inputs = self.result_bytes(node)  # the rest is not read
        ms = self.kernel(self.result_bytes(node) + inputs)
        if is_compute(node):
            # Of what is multiplied: products of 8-bit values give wider ones.
            values = (
                t for n in (*node.all_input_nodes, node) for t in tensors_in(n.meta.get("val"))
            )
            dtype = next((t.dtype for t in values), torch.float32)
            rate = machine.flops.get(str(dtype).removeprefix("torch."), machine.other_flops)
            ms = max(ms, self._flops(node) / rate * 1e3)
        return ms

    def kernel(self, nbytes: int) -> float:
        """Milliseconds of a kernel that reads and writes so many bytes and does little else."""
        return max(nbytes / self.machine.bandwidth * 1e3, self.machine.kernel_ms)

    def copy(self, nbytes: int) -> float:
        """Milliseconds of a copy of so many bytes, as into or out of a bucket."""
        return self.kernel(2 * nbytes)

    def pack(self, given: int, packed: int) -> float:
        """Milliseconds of packing a gather bucket: torch concatenates the ``given`` bytes, then
        copies and casts them into this rank's part of the buffer, ``packed`` bytes."""
        return self.copy(given) + self.kernel(given + 2 * packed)

    def bucket(self, members: Sequence[fx.Node]) -> float:
        """Milliseconds of the collective that ``members`` make together."""
        if len(members) == 1:
            return self.collective(members[0])
        return self.collective(members[0], sum(map(self.collective_bytes, members)))

    def collective(self, node: fx.Node, nbytes: int | None = None) -> float:
        """Milliseconds of a collective; ``nbytes``: as if it moved so many, input and output.

        Raises:
            ValueError: the machine's ``estimate`` returned something else than a time or None.
        """
        given = self._estimated(node, nbytes)
        if given is not None:
            return given
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
            self._known[key] = ms
        return self._known[key]

    def as_kind(self, kind: str, like: fx.Node, nbytes: int, group: str | None = None) -> float:
        """Milliseconds of a collective that is not in the graph.

        Args:
            kind: as of :class:`.Machine`.
            like: one with such values, which is in the graph.
            nbytes: input and output.
            group: its group; None: that of ``like``.

        Raises:
            ValueError: as of :meth:`collective`.
        """
        graph, row = fx.Graph(), COLLECTIVES[kind]
        value = graph.placeholder("value")
        ranks = group_size(like) if group is None else len(self._ranks_of(group))
        rest = (*row.arguments(ranks, 0), group_name(like) if group is None else group)
        node = graph.call_function(row.targets[0], (value, *rest))
        value.meta["val"] = node.meta["val"] = like.meta["val"]
        return self.collective(node, nbytes)

    def in_rank_order(self, members: Sequence[fx.Node]) -> list[tuple[int, float]]:
        """What an all-to-all, or what else :func:`.steps_of` says, would make of reductions.

        Args:
            members: of one bucket.

        Returns:
            For each collective the bytes that a rank receives, and milliseconds. The first one's
            are added up behind it.
        """
        first, found = members[0], list[tuple[int, float]]()
        kind, ranks = kind_of(first), group_size(first)
        assert kind is not None
        whole = sum(self.collective_bytes(m) - self.result_bytes(m) for m in members)
        for step in steps_of(kind, ranks):
            sent = -(-whole // ranks) if found else whole
            received = whole * ranks if step == "all_gather" and not found else whole
            found.append((received, self.as_kind(step, first, sent + received)))
        return found

    def with_rings(self, nodes: Sequence[fx.Node], ms: Sequence[float]) -> list[float]:
        """``ms`` of ``nodes``, but with reductions where they are sums in rank order."""
        found = list(ms)
        for i, node in enumerate(nodes):
            kind = replaced_kind(node)
            if node.target is SUM or (kind is not None and node.args[0].target is SUM):  # type: ignore[union-attr]
                found[i] = 0.0
            elif kind is not None and kind != kind_of(node):
                sent = self.result_bytes(node.all_input_nodes[0])
                result = sent if COLLECTIVES[kind].whole_output else sent // group_size(node)
                found[i] = self.as_kind(kind, node, sent + result)
        return found

    def _ranks_of(self, group: str) -> tuple[int, ...]:
        if group not in self._ranks:
            self._ranks[group] = ranks_of(group_by_name(group))
        return self._ranks[group]

    def shared_levels(self, groups: Iterable[str]) -> dict[str, str]:
        """The network level of each group that is not the only one on it: inside nodes, or between
        them. None where the machine does not know which ranks are on one node."""
        if self.machine.ranks_per_node is None:
            return {}
        found: dict[str, list[str]] = {}
        for group in dict.fromkeys(groups):
            ranks = self._ranks_of(group)
            if len(ranks) > 1:
                _, nodes = self.machine.layout_of(ranks)
                found.setdefault("inside nodes" if nodes == 1 else "between nodes", []).append(
                    group
                )
        return {g: level for level, mine in found.items() if len(mine) > 1 for g in mine}

    def _estimated(self, node: fx.Node, nbytes: int | None) -> float | None:
        if self.machine.estimate is None:
            return None
        ms = self.machine.estimate(node, nbytes)
        if ms is None:
            return None
        if not is_time(ms):
            raise ValueError(
                f"the machine's estimate returned {ms!r} for {node.name}: give milliseconds of at "
                "least 0, or None"
            )
        return float(ms)

    def collective_bytes(self, node: fx.Node) -> int:
        """Bytes that a collective moves, input and output together."""
        out = node.kwargs.get("out")
        inputs = (a for a in node.all_input_nodes if a is not out)
        return self.result_bytes(node) + sum(map(self.result_bytes, inputs))

    def result_bytes(self, node: fx.Node) -> int:
        """Bytes of the tensors that a node returns."""
        tensors = tensors_in(node.meta.get("val"))
        return sum(self.hints(t.numel()) * t.dtype.itemsize for t in tensors)

    def _flops(self, node: fx.Node) -> float:
        from torch.utils.flop_counter import flop_registry

        if is_grouped_product(node):
            return self._grouped_flops(node)
        target: Any = node.target
        count = flop_registry.get(getattr(target, "overloadpacket", None)) or flop_registry[target]
        # Torch's formulas compare sizes, which ones that depend on data don't let them.
        known = self.hints.concrete
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known(n.meta.get("val")))
        try:
            return float(count(*args, **kwargs, out_val=known(node.meta.get("val"))))
        except (TypeError, AssertionError, ValueError, AttributeError):
            return 0.0  # an overload that torch's formula does not take: its bytes are what counts

    def _grouped_flops(self, node: fx.Node) -> float:
        """Each group's rows, columns or terms are multiplied once, however they are divided."""
        # (rows, k) x (groups, k, n)       a group has some of the rows
        # (m, k) x (k, n)                  some of the terms: the gradient of the experts
        # (groups, m, k) x (k, columns)    some of the columns
        # (groups, m, k) x (groups, k, n)
        a, b = (self._shape(arg) for arg in node.args[:2])
        rows = a[:-2] if len(b) == 3 else []
        return 2.0 * math.prod([*rows, *a[-2:], b[-1]])

    def _shape(self, node: Any) -> list[int]:
        return [self.hints(size) for size in node.meta["val"].shape]
