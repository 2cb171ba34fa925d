"""Reduce-scatter inside the shard group before all-reducing across replicas, as eager FSDP2 does.

DTensor, and so torchtitan's ``hybrid_shard``, all-reduces the whole of a gradient that is partial
over replicas and over shards across the replicas first, although a rank keeps one shard of it: as
many times the bytes as there are shards. Swapped, the replicas' network carries the shard alone::

    g -> all_reduce -> wait -> split -> pad -> cat -> reduce_scatter -> wait -> slice -> gradient

    g -> split -> pad -> cat -> reduce_scatter -> wait -> all_reduce -> wait -> slice -> gradient

What pads and arranges the gradient for the reduce-scatter stays before it, what cuts the pad off
stays behind: the all-reduce runs over the padded shard, so that those of a unit, bucketed, are the
whole output buffer of its reduce-scatter, as eager FSDP2 all-reduces it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.fx as fx

from .._torch.process_groups import is_inside, ranks_of
from .._torch.sorting import sort_topologically
from ..graph.calls import contiguous_copy
from ..graph.collectives import group_name, kind_of, nbytes_of, only_wait, reduce_op, started_by
from ..graph.moves import SCALES, is_move
from ..graph.regions import Cut, cuts_behind, outside_reader, positions
from ..graph.snapshot import unchanged_on_error
from ..graph.tags import tag_of
from ..graph.unwrap import GraphLike, graph_of
from ..graph.writes import Writes
from ..passes.base import GraphPass, Stage
from ..passes.facts import Tags
from ..reports.rewrites import LeftAlone, ReducedShard, ScatterReport

if TYPE_CHECKING:
    from ..passes.compilation import Compilation

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True, eq=False, repr=False)
class ReduceScatterFirst(GraphPass):
    """Reduce-scatter over the shards before all-reducing over the replicas (HSDP), with the bits of
    eager FSDP2; see :mod:`.rewrites.reduce_scatter_first`. One in eager's order already stays so.

    Swapped are an all-reduce of a parameter's gradient and the reduce-scatter that follows it where
    both are sums or averages, where nothing but moves and pads with zeros stands between them,
    where nothing else reads what is in between, and where the two groups are the rows and the
    columns of one grid of ranks, the replicas outside. Others stay, and the report says why.
    """

    stage: ClassVar[Stage] = "joint"
    requires = (Tags,)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        compilation.report.rewrites.append(reduce_scatter_first(graph_of(graph)))


def reduce_scatter_first(graph: fx.Graph) -> ScatterReport:
    """:class:`ReduceScatterFirst` on a tagged joint graph, which stays in topological order."""
    swapped: list[ReducedShard] = []
    left: list[LeftAlone] = []
    position = positions(graph)
    written = Writes(graph.nodes).written
    with unchanged_on_error(graph):
        for reduce in list(graph.nodes):
            tag = tag_of(reduce)
            if tag is None or kind_of(reduce) != "all_reduce":
                continue
            scatter = _scatter_behind(reduce)
            if scatter is None:
                continue
            cuts = cuts_behind(scatter.all_input_nodes[0], position)
            cut = next((c for c in cuts if started_by(c.node) is reduce), None)
            reason = _why_not(reduce, scatter, cut, written)
            if reason or cut is None:
                left.append(LeftAlone(tag.fqns, f"{reduce.name}, {scatter.name}: {reason}"))
                continue
            before = nbytes_of(reduce)
            _swap(graph, reduce, scatter, cut)
            swapped.append(ReducedShard(tag.fqns, (before, nbytes_of(reduce))))
        if swapped:
            sort_topologically(graph)
            graph.lint()
    return ScatterReport(tuple(swapped), tuple(left))


def _scatter_behind(reduce: fx.Node) -> fx.Node | None:
    """The first reduce-scatter that an all-reduced gradient leads to on its way, if any."""
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
    """The reason why the two can't be swapped; empty if they can."""
    if reduce.target is not _c10d.all_reduce.default:
        return f"{reduce.name} works in place"
    for start in (reduce, scatter):
        if reduce_op(start) not in ("sum", "avg"):
            return f"{start.name} is no sum and no average"
        if only_wait(start) is None:
            return f"the result of {start.name} is used by other nodes than one wait"
    if cut is None:
        return "what stands between them is more than moving values and padding with zeros"
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
        return f"{reader.name} reads what is between them"
    chain = (reduce.all_input_nodes[0], reduce, wait, *cut.inside, scatter, last)
    touched = next((n for n in chain if n in written), None)
    if touched is not None:
        return f"a node writes to {touched.name}"
    replicas, shards = (ranks_of(group_name(start)) for start in (reduce, scatter))
    if not on_one_grid(replicas, shards):
        return "their process groups are not the rows and columns of one grid of ranks"
    if is_inside(replicas, shards):
        return "it adds up inside one rank of the shards, as tensor parallelism does"
    return ""


def on_one_grid(replicas: Sequence[int], shards: Sequence[int]) -> bool:
    """True where a rank's two groups, ranks ascending, are a row and a column of one regular grid.

    Then all ranks of its replica group are at the same place in their shard groups, and get the
    same part of a reduce-scatter; else a swap would add different parts up::

        ranks 0 1 2 3, shards {0, 1} {2, 3}, replicas {0, 2} {1, 3}     a grid
                                             replicas {0, 3} {1, 2}     none
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
    """Move the all-reduce and its wait behind those of the reduce-scatter."""
    (wait,), (scattered,) = reduce.users, scatter.users
    gradient = reduce.all_input_nodes[0]
    if gradient.meta["val"].stride() != wait.meta["val"].stride():
        # The all-reduce gave its result in one piece, which the reduce-scatter counts on.
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
