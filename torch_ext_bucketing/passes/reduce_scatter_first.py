"""Reduce-scatter inside the shard group before all-reducing across replicas, as eager FSDP2 does.

If a gradient is partial over replicas and over shards, DTensor, and so torchtitan's
``hybrid_shard``, first all-reduces the whole gradient across the replicas, although each rank keeps
only its shard. With the two swapped, the network between replicas carries the shard alone::

    g -> all_reduce -> wait -> split -> pad -> cat -> reduce_scatter -> wait -> slice -> gradient

    g -> split -> pad -> cat -> reduce_scatter -> wait -> all_reduce -> wait -> slice -> gradient

Nodes that pad and arrange the gradient stay before the reduce-scatter, nodes that cut the padding
off stay after it. So the all-reduce runs over the padded shard, and a unit's bucket of all-reduces
is the whole output buffer of its reduce-scatter, which eager FSDP2 all-reduces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from .._torch.inductor import sort_topologically
from .._torch.process_groups import is_inside, ranks_of
from ..graph.dependencies import Writes
from ..graph.edits import contiguous_copy
from ..graph.nodes import group_name, kind_of, nbytes_of, only_wait, reduce_op, started_by, tag_of
from ..graph.values import SCALES, Cut, cuts_before, is_move, outside_reader, positions
from ..reports.base import LeftAlone, size_text
from ..reports.compile import RewriteReport
from .base import Compilation, GraphPass

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class ReducedShard:
    """A gradient that is scattered first; ``replica_bytes`` are all-reduced, before and after."""

    fqns: tuple[str, ...]
    replica_bytes: tuple[int, int]


@dataclass(frozen=True)
class ScatterReport(RewriteReport):
    """The swapped gradients in graph order, and all-reduces that a reduce-scatter still follows."""

    derived = ("rewrite", "replica_bytes")
    rewrite = heading = "reduce-scatter first"
    swapped: tuple[ReducedShard, ...] = ()

    @property
    def replica_bytes(self) -> tuple[int, int]:
        """Sum over the swapped gradients, before and after."""
        nbytes = [s.replica_bytes for s in self.swapped]
        return sum(before for before, _ in nbytes), sum(after for _, after in nbytes)

    def _lines(self) -> list[str]:
        before, after = map(size_text, self.replica_bytes)
        line = f"{len(self.swapped)} gradients; all-reduced over the replicas: {before} -> {after}"
        return [line] if self.swapped else []


@dataclass(frozen=True, eq=False, repr=False)
class ReduceScatterFirst(GraphPass):
    """Reduce-scatter over the shards before all-reducing over the replicas (HSDP).

    Gradients get eager FSDP2's bits; see :mod:`.passes.reduce_scatter_first`. The pass swaps an
    all-reduce of a parameter's gradient and the reduce-scatter after it if both are sums or
    averages, only moves and zero padding stand between them, no other node reads a value between
    them, and the two groups are the rows and columns of one grid of ranks, replicas outside. The
    report gives the reason for each pair that stays. Pairs in eager's order already stay, too.
    """

    stage = "joint"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        compilation.report.rewrites.append(reduce_scatter_first(graph))


def reduce_scatter_first(graph: fx.Graph) -> ScatterReport:
    """Run :class:`ReduceScatterFirst` on a tagged joint graph, which stays in topological order."""
    swapped: list[ReducedShard] = []
    left_alone: list[LeftAlone] = []
    position = positions(graph)
    written = Writes(graph.nodes).written
    for reduce in list(graph.nodes):
        tag = tag_of(reduce)
        if tag is None or kind_of(reduce) != "all_reduce":
            continue
        scatter = _scatter_after(reduce)
        if scatter is None:
            continue
        # All values that the reduce-scatter reads have to pass through the all-reduce's wait.
        cuts = cuts_before(scatter.all_input_nodes[0], position)
        cut = next((c for c in cuts if started_by(c.node) is reduce), None)
        reason = _why_not(reduce, scatter, cut, written)
        if reason or cut is None:
            left_alone.append(LeftAlone(tag.fqns, f"{reduce.name}, {scatter.name}: {reason}"))
            continue
        before = nbytes_of(reduce)
        _swap(graph, reduce, scatter, cut)
        swapped.append(ReducedShard(tag.fqns, (before, nbytes_of(reduce))))
    if swapped:
        sort_topologically(graph)
        graph.lint()
    return ScatterReport(tuple(swapped), left=tuple(left_alone))


def _scatter_after(reduce: fx.Node) -> fx.Node | None:
    """Find the first reduce-scatter that an all-reduced gradient reaches by moves and scaling."""
    reached = {reduce: None}
    stack = [reduce]
    while stack:
        for user in stack.pop().users:
            if kind_of(user) == "reduce_scatter":
                return user if tag_of(user) is not None else None
            moves = user.op == "call_function" and (is_move(user) or user.target in SCALES)
            if moves and user not in reached:
                reached[user] = None
                stack.append(user)
    return None


def _why_not(reduce: fx.Node, scatter: fx.Node, cut: Cut | None, written: set[fx.Node]) -> str:
    """Return why the two can't be swapped; empty if they can."""
    if reduce.target is not _c10d.all_reduce.default:
        return f"{reduce.name} works in place"
    for start in (reduce, scatter):
        if reduce_op(start) not in ("sum", "avg"):
            return f"{start.name} is neither a sum nor an average"
        if only_wait(start) is None:
            return f"nodes other than one wait read {start.name}"
    if cut is None:
        return "nodes between them do more than move values and pad with zeros"
    # With a scale or a cast between the two, a swap would round other values.
    dtype = reduce.meta["val"].dtype
    for node in cut.inside:
        value = node.meta.get("val")
        if node.target in SCALES:
            return f"{node.name} scales between them"
        if isinstance(value, torch.Tensor) and value.dtype is not dtype:
            return f"{node.name} casts between them"
    (wait,), (last,) = reduce.users, scatter.users
    end = scatter.all_input_nodes[0]
    inside = {*cut.inside, scatter}
    readers = (user for node in (wait, end) for user in node.users if user not in inside)
    reader = next(readers, None) or outside_reader(cut, end)
    if reader is not None:
        return f"{reader.name} reads a value between them"
    chain = (reduce.all_input_nodes[0], reduce, wait, *cut.inside, scatter, last)
    touched = next((n for n in chain if n in written), None)
    if touched is not None:
        return f"a node writes to {touched.name}"
    replicas, shards = (ranks_of(group_name(start)) for start in (reduce, scatter))
    if not on_one_grid(replicas, shards):
        return "their process groups are not the rows and columns of one grid of ranks"
    if is_inside(replicas, shards):
        return "its group lies inside one rank of the shards, as with tensor parallelism"
    return ""


def on_one_grid(replicas: Sequence[int], shards: Sequence[int]) -> bool:
    """Return whether a rank's two groups are a row and a column of one regular grid of ranks.

    Then all ranks of its replica group have the same place in their shard groups, and get the same
    part of a reduce-scatter. Otherwise a swap would add different parts::

        ranks 0 1 2 3, shards {0, 1} {2, 3}, replicas {0, 2} {1, 3}     a grid
                                             replicas {0, 3} {1, 2}     not a grid

    ``replicas`` and ``shards`` are the ranks of the groups, ascending.
    """
    if len(set(replicas) & set(shards)) != 1:
        return False
    dims: list[tuple[int, Sequence[int]]] = []
    for ranks in (replicas, shards):
        steps = {b - a for a, b in itertools.pairwise(ranks)}
        if len(steps) > 1:
            return False
        dims.append((steps.pop() if steps else 0, ranks))
    (inner, inside), (outer, _) = sorted(dims, key=lambda dim: dim[0])
    if not inner:
        return True  # a group of one rank
    begin = all(ranks[0] // stride % len(ranks) == 0 for stride, ranks in dims)
    return begin and outer % (inner * len(inside)) == 0


def _swap(graph: fx.Graph, reduce: fx.Node, scatter: fx.Node, cut: Cut) -> None:
    """Move the all-reduce and its wait after the reduce-scatter's wait."""
    (wait,), (scattered,) = reduce.users, scatter.users
    gradient = reduce.all_input_nodes[0]
    if gradient.meta["val"].stride() != wait.meta["val"].stride():
        # The reduce-scatter requires a contiguous input, which the all-reduce's result was.
        gradient = contiguous_copy(graph, gradient, like=wait)
        gradient.meta.pop("custom", None)
    wait.replace_all_uses_with(gradient)
    scattered.append(reduce)
    reduce.append(wait)
    scattered.replace_all_uses_with(wait)
    reduce.replace_input_with(reduce.all_input_nodes[0], scattered)
    for node in (reduce, wait):
        node.meta["val"] = scattered.meta["val"]
        node.meta.pop("tensor_meta", None)
