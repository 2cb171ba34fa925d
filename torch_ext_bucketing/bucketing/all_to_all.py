"""Replace reductions by all-to-alls and sums in rank order, whose bits do not depend on buckets.

A ring adds an element's contributions in an order that depends on the element's offset in the
buffer, and rounds each partial sum to the wire's dtype. Here every rank receives all contributions
to its own part and adds them itself. For n ranks with a packed buffer ``g`` each::

    before    g [n * k] ----------> reduce_scatter avg -> wait ------------------------> [k]

    after     g [n * k] ----------> all_to_all -> wait -> sum in rank order -----------> [k]

    before    g [m] --------------> all_reduce avg -> wait ----------------------------> [m]

    after     g [m] -> pad [n * k] -> all_to_all -> wait -> sum in rank order -> [k]
                                   -> all_gather -> wait -> slice ---------------------> [m]

    after     g [m] --------------> all_gather -> wait -> sum in rank order -----------> [m]
    (n = 2)

The sum is a chain of additions: a kernel may choose the order of a ``sum`` over a dimension. The
chain is one operator (:func:`.sum_in_rank_order`), so the size of a graph does not depend on the
number of ranks, and Inductor makes one kernel of it (:mod:`._torch.inductor`).
"""

from __future__ import annotations

import torch
import torch.fx as fx

from .._torch.aot import in_backward, mark_backward
from ..fsdp.rank_order import SUM, steps_of
from ..graph.analysis import Collective, GraphAnalysis
from ..graph.nodes import argument
from ..graph.tags import mark_replaced
from .pack import Writer

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def reduce_by_all_to_all(graph: fx.Graph, accumulate: torch.dtype) -> None:
    """Replace the gradient reductions of a tagged graph, with sums in the dtype ``accumulate``."""
    for c in GraphAnalysis(graph).gradient_sums.values():
        _replace(graph, c, accumulate)


def _replace(graph: fx.Graph, c: Collective, accumulate: torch.dtype) -> None:
    """Replace one reduction; the new start keeps the old one's name, which reports use."""
    start, wait, kind, ranks = c.start, c.wait, c.kind, c.ranks
    readers = list(wait.users)
    average, group = c.reduce_op == "avg", argument(start, "group_name")
    value = start.all_input_nodes[0]
    dtype = value.meta["val"].dtype
    w = Writer(graph, [start])
    with graph.inserting_before(start):
        # Output shape; sizes that depend on data are fx nodes.
        shape = w.shape(value)
        if kind == "reduce_scatter":
            shape = [w.divided(shape[0], ranks), *shape[1:]]
        size = w.numel(value)
        flat = w.reshape(value, [size])
        steps = steps_of(kind, ranks, isinstance(size, int))
        # An all-reduce is summed in parts only where padding to whole parts is known now.
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
