"""Reductions whose bits no bucket changes: an all-to-all, and a sum over the ranks in their order.

A ring adds an element's contributions in an order that depends on where the element lies in the
buffer, and rounds each partial sum to the wire's dtype. Here every rank gets all contributions to
its own part and adds them itself. Of the packed buffer ``g`` of n ranks::

    before    g [n * k] ----------> reduce_scatter avg -> wait ------------------------> [k]

    after     g [n * k] ----------> all_to_all -> wait -> sum in rank order -----------> [k]

    before    g [m] --------------> all_reduce avg -> wait ----------------------------> [m]

    after     g [m] -> pad [n * k] -> all_to_all -> wait -> sum in rank order -> [k]
                                   -> all_gather -> wait -> slice ---------------------> [m]

    after     g [m] --------------> all_gather -> wait -> sum in rank order -----------> [m]
    (n = 2)

The sum is a chain of additions, not a ``sum`` over a dimension, whose order is up to the kernel. It
is one operator (:func:`.sum_in_rank_order`), so that a graph is as large for 512 ranks as for 2,
and for Inductor one kernel that reads the buffer once (:mod:`._torch.lowering`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.fx as fx

from .._torch.aot import in_backward, mark_backward
from .._torch.process_groups import ranks_of
from ..fsdp.all_to_all import SUM, steps_of
from ..fsdp.tags import Tag, mark_replaced, tag_of
from ..graph.collectives import argument, group_name, group_size, kind_of, only_wait, reduce_op
from .groups import is_inside
from .pack import Writer

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def reduce_by_all_to_all(graph: fx.Graph, accumulate: torch.dtype) -> None:
    """Replace the reductions of a graph that add up gradients.

    Args:
        graph: a tagged graph, changed in place.
        accumulate: the dtype of the sums.
    """
    for start in replaceable(graph.nodes):
        _replace(graph, start, accumulate)


def replaceable(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    """The reductions among the nodes of a graph that add up gradients over data-parallel ranks.

    Not an all-reduce inside one of these ranks, as of tensor parallelism, whose result another
    reduction of the same parameter adds up: a process group adds it for eager FSDP2 as well.
    """
    tags = {n: tag for n in nodes if _adds(n) and (tag := tag_of(n)) is not None}
    groups: dict[str, dict[str, None]] = {}
    for node, tag in tags.items():
        for fqn in tag.fqns:
            groups.setdefault(fqn, {})[group_name(node)] = None
    ranks = {group: ranks_of(group) for of_one in groups.values() for group in of_one}

    def inside(start: fx.Node, tag: Tag) -> bool:
        mine, others = ranks[group_name(start)], (g for fqn in tag.fqns for g in groups[fqn])
        return any(is_inside(mine, ranks[other]) for other in others)

    return {n: None for n, tag in tags.items() if tag.kind != "all_reduce" or not inside(n, tag)}


def _adds(start: fx.Node) -> bool:
    """Whether it adds up over ranks in floating point, and one wait alone reads it."""
    return (
        start.target in (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)
        and reduce_op(start) in ("sum", "avg")
        and start.meta["val"].dtype in _DTYPES
        and group_size(start) > 1
        and only_wait(start) is not None
    )


def _replace(graph: fx.Graph, start: fx.Node, accumulate: torch.dtype) -> None:
    """Replace a reduction. Its start becomes that of the all-to-all or the gather, under the same
    name, by which reports know it; the sum stands behind its wait."""
    (wait,) = start.users
    readers = list(wait.users)
    ranks, group = group_size(start), argument(start, "group_name")
    average, kind = reduce_op(start) == "avg", kind_of(start)
    assert kind is not None
    value = start.all_input_nodes[0]
    dtype = value.meta["val"].dtype
    w = Writer(graph, [start])
    shape = w.shape(wait)
    with graph.inserting_before(start):
        size = w.numel(value)
        flat = w.reshape(value, [size])
        steps = steps_of(kind, ranks, isinstance(size, int))
        if kind == "reduce_scatter":
            part = w.divided(size, ranks)
        elif steps == ("all_gather",) or not isinstance(size, int):
            part = size
        else:
            part = -(-size // ranks)
            if part * ranks > size:
                padding = [flat, [0, part * ranks - size]]
                flat = w.new(_aten.constant_pad_nd.default, padding, dtype, [part * ranks])
    mark_replaced(start)
    if steps == ("all_gather",):
        w.change(start, _c10d.all_gather_into_tensor.default, flat, ranks, group)
    else:
        splits = [part] * ranks
        w.change(start, _c10d.all_to_all_single.default, flat, splits, list(splits), group)
    w.change(wait, _c10d.wait_tensor.default, start)
    with graph.inserting_before(wait.next):
        result = w.new(SUM, [wait, ranks, accumulate, average], dtype, [part])
        if len(steps) > 1:
            whole = w.times(part, ranks)
            arguments = [result, ranks, group]
            gather = w.new(_c10d.all_gather_into_tensor.default, arguments, dtype, [whole])
            result = w.wait(gather, [whole])
            if whole != size:
                result = w.view(_aten.slice.Tensor, [result, 0, 0, size], [size])
        if shape != [size if kind == "all_reduce" else part]:
            result = w.viewed(result, shape)
    for reader in readers:
        reader.replace_input_with(wait, result)
    if in_backward(start):
        mark_backward(w.nodes)
