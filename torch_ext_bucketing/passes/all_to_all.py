"""Reductions whose bits no bucket changes: an all-to-all, and a sum over the ranks in their order.

A ring adds an element's contributions in an order that depends on where the element lies in the
buffer, and rounds each partial sum to the wire's dtype. Here every rank gets all contributions to
its own part and adds them itself. Of the packed buffer ``g`` of n ranks::

    before    g [n * k] ----------> reduce_scatter avg -> wait ------------------------> [k]

    after     g [n * k] ----------> all_to_all -> wait -> split -> p0 [k] -> fp32 \\
                                                                    p1 [k] ------- + \\
                                                                    p2 [k] ---------- + ... -> * 1/n
                                                                     -> round to g's dtype -> [k]

    before    g [m] --------------> all_reduce avg -> wait ----------------------------> [m]

    after     g [m] -> pad [n * k] -> all_to_all -> wait -> split -> sum as above -> [k]
                                   -> all_gather -> wait -> slice ---------------------> [m]

    after     g [m] --------------> all_gather -> wait -> split -> sum as above -------> [m]
    (n = 2)

The sum is a chain of additions, not a ``sum`` over a dimension, whose order is up to the kernel.
ATen and Inductor keep a chain's order, and Inductor makes one kernel of it that reads the buffer
once. It has a node per rank and bucket: 64 ranks in one bucket compile in a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from ..bucketing.merge import BACKWARD
from ..bucketing.pack import Writer, packed_value
from ..fsdp.all_to_all import check_accumulate
from ..fsdp.tags import mark_replaced, tag_of
from ..graph.collectives import argument, group_size, is_wait, kind_of, reduce_op
from ..graph.snapshot import unchanged_on_error
from .base import Compilation, GraphLike, GraphPass, Order, RankOrder, Stage, Tags, graph_of
from .code import call

__all__ = ["ReduceByAllToAll"]

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_convert = torch.ops.prims.convert_element_type.default


class ReduceByAllToAll(GraphPass):
    """Let gradients be reduced by all-to-alls and local sums in the order of the ranks; see
    :mod:`.passes.all_to_all` for the graphs.

    The bits of a gradient are then a function of the ranks' values alone: byte caps, units, the
    payload's and the graph's order may change between two steps. The number of ranks may not. Eager
    FSDP2 has the same bits with :class:`.AllToAllReduceScatter`.

    The bytes sent are those of the reduction that is replaced (of a ring's), in its dtype. A rank
    also holds what it receives, as large as the packed gradients, until it has been added.

    Comes after the passes that bucket and before :class:`.Schedule`; ``BucketAndSchedule`` takes it
    as ``reduce=``. Sums and averages of parameters' gradients in floating point are replaced,
    bucketed or not; other reductions and those on a group of one rank stay.

    Args:
        accumulate: the dtype of the sums, ``torch.float32`` or ``torch.float64``; that of the
            gradients where this is wider.

    Raises:
        ValueError: another dtype.
    """

    stage: Stage = "forward_backward"
    needs = (Tags,)
    gives = (RankOrder(),)
    undoes = (Order,)

    def __init__(self, accumulate: torch.dtype = torch.float32) -> None:
        self.accumulate = check_accumulate(accumulate)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        with unchanged_on_error(g):
            for start in [node for node in g.nodes if _is_replaced(node)]:
                _replace(g, start, self.accumulate)
            g.lint()

    def __repr__(self) -> str:
        changed = None if self.accumulate is torch.float32 else self.accumulate
        return call("ReduceByAllToAll", accumulate=changed)

    def settings(self) -> tuple[Any, ...]:
        """The dtype of the sums."""
        return (str(self.accumulate),)


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _is_replaced(start: fx.Node) -> bool:
    """Whether it adds up gradients of parameters, and one wait alone reads it."""
    if start.target not in (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default):
        return False
    return (
        tag_of(start) is not None
        and reduce_op(start) in ("sum", "avg")
        and start.meta["val"].dtype in _DTYPES
        and group_size(start) > 1
        and len(start.users) == 1
        and is_wait(next(iter(start.users)))
    )


def _replace(graph: fx.Graph, start: fx.Node, accumulate: torch.dtype) -> None:
    """Replace a reduction. Its start becomes that of the all-to-all or the gather, under the same
    name, by which reports know it; the sum stands behind its wait."""
    (wait,) = start.users
    readers = list(wait.users)
    ranks, group = group_size(start), argument(start, "group_name")
    average, kind = reduce_op(start) == "avg", kind_of(start)
    value = packed_value(start)
    dtype = value.meta["val"].dtype
    w = Writer(graph, [start])
    shape = w.shape(wait)
    with graph.inserting_before(start):
        size = w.numel(value)
        flat = w.reshape(value, [size])
        # Of an all-reduce, what each rank adds: its own part, which is then gathered, or all. With
        # two ranks either moves as much. A part of what has no fixed size is not worth its nodes.
        gathers = kind == "all_reduce" and (ranks == 2 or not isinstance(size, int))
        if kind == "reduce_scatter":
            part = w.divided(size, ranks)
        elif gathers or not isinstance(size, int):
            part = size
        else:
            part = -(-size // ranks)
            if part * ranks > size:
                padding = [flat, [0, part * ranks - size]]
                flat = w.new(_aten.constant_pad_nd.default, padding, {}, dtype, [part * ranks])
    mark_replaced(start)
    if gathers:
        w.change(start, _c10d.all_gather_into_tensor.default, flat, ranks, group)
    else:
        splits = [part] * ranks
        w.change(start, _c10d.all_to_all_single.default, flat, splits, list(splits), group)
    w.change(wait, _c10d.wait_tensor.default, start)
    with graph.inserting_before(wait.next):
        result = _sum(w, w.split(wait, [part] * ranks, dim=0), part, dtype, accumulate, average)
        if kind == "all_reduce" and not gathers:
            gather = w.new(
                _c10d.all_gather_into_tensor.default,
                [result, ranks, group],
                {},
                dtype,
                [w.times(part, ranks)],
            )
            result = w.wait(gather, [w.times(part, ranks)])
            if w.times(part, ranks) != size:
                result = w.view(_aten.slice.Tensor, [result, 0, 0, size], [size])
        if shape != [size if kind == "all_reduce" else part]:
            result = w.view(_aten.view.default, [result, shape], shape)
    for reader in readers:
        reader.replace_input_with(wait, result)
    if BACKWARD in start.meta:
        for node in w.nodes:
            node.meta[BACKWARD] = True


def _sum(
    w: Writer,
    parts: Sequence[fx.Node],
    size: int | fx.Node,
    dtype: torch.dtype,
    accumulate: torch.dtype,
    average: bool,
) -> fx.Node:
    """The nodes of :func:`.sum_in_rank_order` for parts of ``size`` elements of ``dtype``."""
    wide = torch.promote_types(dtype, accumulate)
    total = parts[0]
    if wide is not dtype:
        total = w.new(_convert, [total, wide], {}, wide, [size])
    for part in parts[1:]:
        total = w.new(_aten.add.Tensor, [total, part], {}, wide, [size])
    if average:
        total = w.new(_aten.mul.Tensor, [total, 1 / len(parts)], {}, wide, [size])
    if wide is not dtype:
        total = w.new(_convert, [total, dtype], {}, dtype, [size])
    if dtype.itemsize == 2:
        # Inductor leaves out a rounding to 16 bits where the same kernel goes on with the value.
        # Before bits can be seen as an integer they must have been rounded.
        total = w.call(_aten.view.dtype, w.call(_aten.view.dtype, total, torch.int16), dtype)
    return total
