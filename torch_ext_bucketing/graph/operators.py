"""Say of operators how Inductor makes kernels of them, as torch 2.15's ``_inductor`` does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from .._torch.aot import depends_on_data
from .nodes import is_view

_aten = torch.ops.aten
REARRANGES = frozenset(
    {
        _aten._unsafe_index.Tensor,
        _aten.cat.default,
        _aten.constant_pad_nd.default,
        _aten.embedding.default,
        _aten.flip.default,
        _aten.gather.default,
        _aten.index.Tensor,
        _aten.repeat.default,
        _aten.select_scatter.default,
        _aten.slice_scatter.default,
    }
)
"""Operators that read other elements than those at the place that they write."""
INDEXED = frozenset({_aten.embedding.default, _aten.gather.default, _aten.index.Tensor})
"""Those of them that read their first input at places that the others hold."""
CASTS = frozenset({_aten._to_copy.default, torch.ops.prims.convert_element_type.default})
"""Operators that cast to another dtype."""
_CONSTANTS = frozenset({_aten.full.default, _aten.scalar_tensor.default})
_LOADS = frozenset({_aten.clone.default, _aten.embedding.default, _aten.index.Tensor})
"""Operators that compute nothing."""
_MORE_POINTWISE = (
    REARRANGES
    | CASTS
    | _CONSTANTS
    | {_aten.clone.default, _aten.copy_.default, torch.ops.prims.iota.default}
)
"""Operators without torch's tag ``pointwise`` that Inductor fuses like those with it."""
SCATTERS = {
    _aten._unsafe_masked_index_put_accumulate.default: 3,
    _aten.index_put.default: 2,
    _aten.scatter.src: 3,
    _aten.scatter_add.default: 3,
}
"""Operators that add or write to a copy of their first argument, and the place of the values."""
SUMS = frozenset({_aten.prod.dim_int, _aten.sum.dim_IntList})
"""Reductions of columns that may share a kernel with one of rows."""
_INDEX_PUTS = (
    _aten._unsafe_masked_index_put_accumulate.default,
    _aten.index_put.default,
)
"""Operators that the gradient of an embedding is."""
_SEVERAL = frozenset(
    {
        "aten::max.dim",
        "aten::min.dim",
        "aten::var_mean.correction",
        "prims::prepare_softmax_online",  # Inductor registers it
    }
)
"""Names of reductions with several results of one shape, without torch's tag ``reduction``."""


class Operator(NamedTuple):
    """The properties of a node that decide on its kernel."""

    view: bool
    fused: bool
    reduces: bool
    inputs: list[fx.Node]
    size: int  # bytes of the result
    numel: int  # elements of the result, by its bytes: sizes may depend on data
    several: bool  # whether there are several results
    operations: int  # those of an element, as Inductor counts them
    constants: tuple[Any, ...]  # numbers that the operations read
    terms: int  # elements that a reduction reads for each of its results


class Operators(dict[fx.Node, Operator]):
    """The operators of a graph's nodes, each read once for all walks over the graph.

    ``size`` returns the bytes of a node's result; ``counts`` are those of :mod:`.inlined`.
    """

    def __init__(self, size: Callable[[fx.Node], int]) -> None:
        super().__init__()
        self._size = size
        self._contiguous: dict[fx.Node, bool] = {}
        self.counts: dict[tuple[fx.Node, ...], Any] = {}

    def __missing__(self, node: fx.Node) -> Operator:
        value, size = node.meta.get("val"), self._size(node)
        several = isinstance(value, (list, tuple))
        numel = 0
        if isinstance(value, torch.Tensor):
            numel = size // value.dtype.itemsize
        elif _has_several(node.target):
            numel = size // sum(v.dtype.itemsize for v in value)
        inputs, reduces = node.all_input_nodes, is_reduction(node)
        operations, constants = _operations(node, inputs)
        terms = max(self[inputs[0]].numel // max(numel, 1), 1) if reduces else 1
        operator = self[node] = Operator(
            is_view(node),
            is_fused(node),
            reduces,
            inputs,
            size,
            numel,
            several,
            operations,
            constants,
            terms,
        )
        return operator

    def is_contiguous(self, node: fx.Node) -> bool:
        """Return whether a node's result is one contiguous tensor."""
        # Not a field: of a size that depends on data it may not be known.
        found = self._contiguous.get(node)
        if found is None:
            value = node.meta.get("val")
            found = isinstance(value, torch.Tensor) and value.is_contiguous()
            self._contiguous[node] = found
        return found


def _operations(node: fx.Node, inputs: Sequence[fx.Node]) -> tuple[int, tuple[Any, ...]]:
    """Return the number of operations of an element, and the constants that they read."""
    target, numbers = node.target, tuple(a for a in node.args if isinstance(a, (int, float)))
    if target in _CONSTANTS:
        return 0, numbers
    if target is _aten.cat.default:
        # Each input has a range to compare with, and is selected by it.
        return 3 + 4 * len(inputs), ()
    if target in _LOADS:
        return 0, ()
    if target in REARRANGES or not inputs or target is _aten.pow.Tensor_Scalar:
        return 1, ()
    return 1, numbers


def is_fused(node: fx.Node) -> bool:
    """Return whether a node is part of a kernel that Inductor generates."""
    if _has_several(node.target):
        return True
    is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
    return is_tensor and not is_view(node) and _is_fused(node.target)


@functools.lru_cache(maxsize=1024)
def _has_several(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target.name() in _SEVERAL


@functools.lru_cache(maxsize=1024)
def _is_fused(target: Any) -> bool:
    tags = getattr(target, "tags", ())
    listed = target in SCATTERS or target in _MORE_POINTWISE
    return listed or torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def read_once(node: fx.Node) -> fx.Node | None:
    """Return the result of a fused kernel that a node is the only reader's view of, if any."""
    while len(node.users) == 1 and is_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    once = len(node.users) == 1 and is_fused(node) and node.target not in SCATTERS
    return node if once else None


def adds_to_larger(node: fx.Node) -> bool:
    """Return whether a node adds values to a larger tensor, as the gradient of an embedding does.

    Where nodes are pinned, such a node is, too (:mod:`.passes.pin`), and shares no kernel.
    """
    if node.target not in _INDEX_PUTS:
        return False
    added = node.args[SCATTERS[node.target]]
    assert isinstance(added, fx.Node)
    values, result = added.meta.get("val"), node.meta.get("val")
    if not (isinstance(values, torch.Tensor) and isinstance(result, torch.Tensor)):
        return False
    if any(map(depends_on_data, (*values.shape, *result.shape))):
        return False
    return values.numel() < result.numel()


def is_reduction(node: fx.Node) -> bool:
    """Return whether an operator reduces its input."""
    return _has_several(node.target) or torch.Tag.reduction in getattr(node.target, "tags", ())
