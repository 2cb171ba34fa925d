"""Share the facts about one state of a graph among planning, merging, searching and reports.

Each fact takes a pass over the graph or more, and holds as long as the graph does not change::

    analysis = GraphAnalysis(graph)
    ByCap(25.0).plan(analysis)          writes
    BySearch(policies).plan(analysis)   writes, dependencies, live bytes
    apply_plan(analysis, plan)          the analysis is outdated now
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import cached_property

import torch
import torch.fx as fx

from .._torch import aot as _aot
from .._torch.aot import depends_on_data, stage_of
from .._torch.inductor import size_hint
from .._torch.process_groups import is_inside, ranks_of
from .dependencies import Dependencies, Writes, unused
from .fusion import Fused, fused
from .liveness import Storages, storages_of, with_fused
from .nodes import (
    KINDS,
    Kind,
    bucket_key,
    group_name,
    group_size,
    home_group,
    is_bucket,
    is_collective,
    is_compute,
    kind_of,
    only_wait,
    reduce_op,
    sent_as_bytes,
    tag_of,
    wire_bytes,
)
from .operators import Operators
from .sizes import (
    GivenHints,
    ShardSide,
    SizeHints,
    result_bytes,
    shard_side,
    unpadded_rows,
)
from .values import positions

_c10d = torch.ops._c10d_functional


def unmergeable(start: fx.Node) -> str:
    """Return why a collective can't be a member of any bucket; empty if it can."""
    if start.target is _c10d.all_reduce_.default:
        return "it works in place"
    result = start.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return "its shape is unknown (no meta['val'])"
    if "out" in start.kwargs or is_bucket(start):
        return "it is a bucket already"
    wait = only_wait(start)
    if wait is None:
        return "nodes other than one wait read its result"
    # torch's merging relies on the rest.
    if start.kwargs or wait.kwargs:
        return "its arguments are given by keyword"
    value = start.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "the shape of its input is unknown (no meta['val'])"
    if any(map(depends_on_data, (*value.shape, *result.shape))):
        return "its size depends on data"
    kind = kind_of(start)
    if kind != "all_reduce" and not value.ndim:
        return "its input has no dimension"
    if kind == "reduce_scatter" and isinstance(value.shape[0], int):
        size = group_size(start)
        if value.shape[0] % size:
            return f"its input's {value.shape[0]} rows can't be divided among {size} ranks"
    return ""


_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

UNTAGGED = "it serves no known parameter"
"""Why a collective without a tag is in no bucket."""


class Collective:
    """The facts about one collective, each read from the graph once, for any number of plans.

    Attributes:
        home: name of the process group that shards its parameter; see :func:`.home_group`.
        why_not: why it can't be merged; see :func:`unmergeable`.
        key: its bucket key, see :func:`.bucket_key`; None if it can't be merged.
        in_backward: whether autograd ran while it was traced, in the graph of a whole step.
    """

    def __init__(self, start: fx.Node, kind: Kind) -> None:
        self.start = start
        self.kind = kind
        self.group = group_name(start)
        self.home = home_group(start)
        self.tag = tag_of(start)
        self.why_not = unmergeable(start)
        self.key = None if self.why_not else bucket_key(start)
        self.reduce_op = reduce_op(start)
        self.in_backward = _aot.in_backward(start)

    @property
    def fqns(self) -> tuple[str, ...]:
        """FQNs of its parameters; empty without a tag."""
        return () if self.tag is None else self.tag.fqns

    @property
    def wait(self) -> fx.Node:
        """Its wait, if that is its only reader: if ``why_not`` is empty."""
        return next(iter(self.start.users))

    @cached_property
    def ranks(self) -> int:
        return group_size(self.start)

    @cached_property
    def wire_bytes(self) -> int:
        return wire_bytes(self.start)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of a gather's input or of a reduction's result, its part of one rank's buffer."""
        node = self.start.all_input_nodes[0] if self.kind == "all_gather" else self.start
        sizes = node.meta["val"].shape
        return tuple(size_hint(s, "the report of a bucket's payload") for s in sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """dtype of its values, even if they are sent as bytes."""
        return sent_as_bytes(self.start) or self.start.meta["val"].dtype

    @cached_property
    def rows(self) -> int | None:
        """Rows of the parameter or gradient, if the ranks' parts together have more; else None."""
        return unpadded_rows(self.start)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of :attr:`shape`."""
        return math.prod(self.shape) * self.dtype.itemsize


def _adds_gradients(c: Collective) -> bool:
    return (
        c.start.target in (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)
        and c.tag is not None
        and c.reduce_op in ("sum", "avg")
        and isinstance(value := c.start.meta.get("val"), torch.Tensor)
        and "val" in c.start.all_input_nodes[0].meta
        and value.dtype in _FLOATS
        and not c.start.kwargs
        and c.ranks > 1
        and only_wait(c.start) is not None
    )


class GraphAnalysis:
    """Facts about a graph, each computed once, at its first use.

    Args:
        graph: in topological order, with fake tensors in ``meta["val"]``. It must not change.
        size_hints: numbers for sizes that depend on data; see :func:`.backend`.
        donated: whether an input is freed at its last use; None: :func:`.donated_by_autograd`.
        external_live_bytes: bytes in memory during the whole run that are not inputs of the graph.
        fuses: whether Inductor runs the graph, so that its kernels replace operators.
    """

    def __init__(
        self,
        graph: fx.Graph,
        size_hints: SizeHints | GivenHints = None,
        *,
        donated: Callable[[fx.Node], bool] | None = None,
        external_live_bytes: int = 0,
        fuses: bool = False,
    ) -> None:
        self.graph = graph
        self.fuses = fuses
        self.hints = SizeHints.of(size_hints)
        self.external_live_bytes = external_live_bytes
        self._donated = donated
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.kinds: dict[fx.Node, Kind] = {n: k for n in self.nodes if (k := kind_of(n))}

    @cached_property
    def stage(self) -> str:
        return stage_of(self.graph)

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of collectives of each kind in the graph."""
        number = Counter[str](self.kinds.values())
        return {kind: number[kind] for kind in KINDS if number[kind]}

    @cached_property
    def collectives(self) -> dict[fx.Node, Collective]:
        """The record of each start, in graph order."""
        return {start: Collective(start, kind) for start, kind in self.kinds.items()}

    @cached_property
    def gradient_sums(self) -> dict[fx.Node, Collective]:
        """The reductions that add gradients over data-parallel ranks, by start."""
        # Not an all-reduce inside one data-parallel rank, such as tensor parallelism's, whose
        # result another reduction of the same parameter adds: eager FSDP2 leaves that to the
        # process group, too.
        sums = {start: c for start, c in self.collectives.items() if _adds_gradients(c)}
        groups: dict[str, dict[str, None]] = {}
        for c in sums.values():
            for fqn in c.fqns:
                groups.setdefault(fqn, {})[c.group] = None
        ranks = {group: ranks_of(group) for of_one in groups.values() for group in of_one}

        def inside(c: Collective) -> bool:
            others = (group for fqn in c.fqns for group in groups[fqn])
            return any(is_inside(ranks[c.group], ranks[other]) for other in others)

        return {n: c for n, c in sums.items() if c.kind != "all_reduce" or not inside(c)}

    @cached_property
    def groups(self) -> dict[fx.Node, str]:
        """Name of each start's process group, all-to-alls included, in graph order."""
        return {n: group_name(n) for n in self.nodes if is_collective(n)}

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """Place of every node in the graph, from 0."""
        return positions(self.graph)

    @cached_property
    def writes(self) -> Writes:
        """The writes of nodes to tensors, and the nodes that may share memory."""
        return Writes(self.nodes)

    @cached_property
    def compute_before(self) -> dict[fx.Node, int]:
        """Number of compute nodes, in graph order, up to the last one that each node depends on."""
        # A node's own place is less useful, since a sort may put all reduce-scatters at the end.
        reached: dict[fx.Node, int] = {}
        count = 0
        for node in self.nodes:
            reached[node] = max((reached[n] for n in node.all_input_nodes), default=0)
            if is_compute(node):
                count += 1
                reached[node] = count
        return reached

    @cached_property
    def shard_side(self) -> ShardSide:
        """Nodes that may be different on other ranks; see :mod:`.graph.sizes`."""
        return shard_side(self.graph, self.hints)

    @cached_property
    def free(self) -> set[fx.Node]:
        """Nodes that take no time: without a user, or on the :attr:`shard_side`."""
        return {*self.shard_side.nodes, *unused(self.dependencies.nodes)}

    @cached_property
    def dependencies(self) -> Dependencies:
        """The movable nodes, and the nodes that each one depends on."""
        return Dependencies(self.nodes, self.writes)

    @cached_property
    def liveness(self) -> Storages:
        """The storages that each movable node allocates and touches."""
        live = storages_of(
            self.graph,
            self.dependencies,
            self.shard_side,
            self.hints,
            self._donated,
            self.external_live_bytes,
        )
        if self.fused is None:
            return live
        return with_fused(live, self.dependencies, live.of_node, self.fused)

    @cached_property
    def fused(self) -> Fused | None:
        """The kernels that Inductor makes of the movable nodes, if it does."""
        if not self.fuses:
            return None
        kernels = fused(self.dependencies.nodes, Operators(self.result_bytes), self.free)
        kernels.within.update(unused(self.dependencies.nodes))  # Inductor drops them
        return kernels

    def result_bytes(self, node: fx.Node) -> int:
        """Count the bytes of the tensors that a node returns."""
        return result_bytes(node, self.hints)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of live bytes in the graph's order."""
        return self.liveness.peak(range(len(self.dependencies.nodes)))
