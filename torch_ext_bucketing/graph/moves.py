"""Classify operators that move, cast or scale values without combining different elements.

A parameter's values pass through such operators on the way to its uses, and its gradient on the way
back.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from .._torch.symbols import same_shape

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_COPIES = frozenset(
    {
        _aten._to_copy.default,
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.clone.default,
        _aten.contiguous.default,
        _aten.detach.default,
        _aten.reshape.default,
        _aten.view.default,
        torch.ops.prims.convert_element_type.default,
    }
)
# Other views are recognized by their schema (``OpOverload.is_view``).
_MOVES = _COPIES | {
    operator.getitem,
    _aten.cat.default,
    _aten.constant_pad_nd.default,
    _aten.lift_fresh_copy.default,
    _aten.stack.default,
    _aten.split_with_sizes_copy.default,
    _c10d.wait_tensor.default,
}
SCALES = frozenset(
    {
        _aten.div.Scalar,
        _aten.div.Tensor,
        _aten.div_.Tensor,
        _aten.mul.Scalar,
        _aten.mul.Tensor,
        _aten.mul_.Tensor,
    }
)
_ZEROS = frozenset({_aten.new_zeros.default, _aten.zeros.default, _aten.zeros_like.default})
_FULL = {_aten.full.default: 1, _aten.new_full.default: 2}  # index of the argument for the value
CONSTANTS = _ZEROS | _FULL.keys() | {_aten.empty.memory_format, _aten.new_empty.default}


def is_move(node: fx.Node) -> bool:
    """Return whether ``node`` only rearranges, copies or casts its inputs, or waits for one."""
    if node.target in _MOVES:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def is_zeros(node: fx.Node) -> bool:
    """Return whether ``node`` creates a tensor of zeros."""
    at = _FULL.get(node.target)  # type: ignore[arg-type]
    if at is not None:
        return len(node.args) > at and node.args[at] == 0
    return node.target in _ZEROS


def is_linear(node: fx.Node) -> bool:
    """Return whether ``node`` is linear but for rounding: ``f(a) + f(b) == f(a + b)``.

    Moves are, except padding with values other than zero, and so is scaling by a number.
    """
    if node.op != "call_function":
        return False
    if node.target is _aten.constant_pad_nd.default:
        return len(node.args) < 3 or node.args[2] == 0
    if node.target in SCALES:
        return len(node.all_input_nodes) == 1 and node.args[0] is node.all_input_nodes[0]
    return is_move(node) or node.target is _aten.slice_backward.default


def keeps_values(node: fx.Node) -> bool:
    """Return whether the result has the shape, dtype and values of the input.

    That is so for a copy, a view to the same shape, and a cast to the same dtype.
    """
    if node.op != "call_function" or node.target not in _COPIES:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return same_shape(before.shape, after.shape) and before.dtype == after.dtype
