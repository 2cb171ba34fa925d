"""The operators of an update that is a function of whole matrices.

They number the matrices of all their parameters in one row: a parameter ``[stack, rows, columns]``
is a stack of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch.optimizers import adjusted_lr, matrices_in, newton_schulz
from .exchange import Block

SENT = torch.bfloat16
"""The dtype of what travels."""

_library = torch.library.Library("torch_ext_bucketing", "FRAGMENT")


def _operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_ext_bucketing::{name}", fake, lib=_library)
    return getattr(torch.ops.torch_ext_bucketing, name).default


def _send_momentum(
    momentum: list[Tensor],
    grads: list[Tensor],
    numbers: list[Tensor],
    skip: Tensor | None,
    order: list[int],
    nesterov: bool,
) -> Tensor:
    """Update momentum as ``torch.optim.Muon`` does; pack what is to be orthogonalized."""
    out = _packed(grads, order)
    if skip is not None and skip.item():
        return out.zero_()
    parts: dict[int, list[Tensor]] = {}
    sizes = [m.numel() for m in matrices_in(grads)]
    for i, part in zip(order, out.split([sizes[i] for i in order]), strict=True):
        parts.setdefault(i, []).append(part)
    place = itertools.count()
    for buffer, grad, of in zip(momentum, grads, numbers, strict=True):
        factor = of[1].item()
        buffer.lerp_(grad, 1 - factor)
        update = grad.lerp(buffer, factor) if nesterov else buffer
        for matrix in matrices_in([update]):
            for part in parts.get(next(place), ()):
                part.view(matrix.shape).copy_(matrix)
    return out


def _packed(grads: list[Tensor], order: list[int]) -> Tensor:
    sizes = [m.numel() for m in matrices_in(grads)]
    return grads[0].new_empty([sum(sizes[i] for i in order)], dtype=SENT)


def _repack(buffer: Tensor, sizes: list[int], order: list[int]) -> Tensor:
    """Pack parts of a buffer in another order, some of them several times or not at all."""
    parts = buffer.split(sizes)
    return torch.cat([parts[i] for i in order]) if order else buffer.new_empty([0])


def _orthogonalize(
    received: Tensor,
    shapes: list[int],
    given: list[int],
    wanted: list[int],
    coefficients: list[float],
    eps: float,
    steps: int,
) -> Tensor:
    """Orthogonalize the whole matrices whose parts are in a buffer.

    Args:
        received: the parts, one after the other.
        shapes: rows and columns of each matrix.
        given: place of the matrix, row, column, rows and columns of each part in ``received``.
        wanted: the same of each part in the result.
    """
    out = _orthogonal(received, wanted)
    parts = [
        [(v[0], Block(*v[1:]), p) for v, p in zip(of, buffer.split(_sizes(of)), strict=True)]
        for of, buffer in ((_fives(given), received), (_fives(wanted), out))
    ]
    for i in range(len(shapes) // 2):
        whole = received.new_empty(shapes[2 * i : 2 * i + 2])
        for _, b, part in (p for p in parts[0] if p[0] == i):
            _at(whole, b).copy_(part.view(b.rows, b.columns))
        update = newton_schulz(whole, tuple(coefficients), steps, eps)
        for _, b, part in (p for p in parts[1] if p[0] == i):
            part.view(b.rows, b.columns).copy_(_at(update, b))
    return out


def _orthogonal(received: Tensor, wanted: list[int]) -> Tensor:
    return received.new_empty([sum(_sizes(_fives(wanted)))])


def _fives(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(numbers[i : i + 5]) for i in range(0, len(numbers), 5)]


def _sizes(parts: Sequence[Sequence[int]]) -> list[int]:
    return [rows * columns for _, _, _, rows, columns in parts]


def _at(matrix: Tensor, b: Block) -> Tensor:
    return matrix[b.row : b.row + b.rows, b.column : b.column + b.columns]


def _add_updates(
    params: list[Tensor],
    received: Tensor,
    numbers: list[Tensor],
    skip: Tensor | None,
    order: list[int],
    shapes: list[int],
    adjust: str | None,
) -> None:
    """Decay parameters and add their updates as ``torch.optim.Muon`` does.

    Args:
        order: places of the matrices whose parts are in ``received``, in its order.
        shapes: rows and columns of each parameter's whole matrices.
    """
    if skip is not None and skip.item():
        return
    mine = matrices_in(params)
    whose = [k for k, p in enumerate(params) for _ in matrices_in([p])]
    for i, part in zip(order, received.split([mine[i].numel() for i in order]), strict=True):
        k = whose[i]
        lr, _, decay = numbers[k].tolist()
        mine[i].mul_(1 - lr * decay)
        scale = adjusted_lr(lr, adjust, torch.Size(shapes[2 * k : 2 * k + 2]))
        mine[i].add_(part.view(mine[i].shape), alpha=-scale)


SEND = _operator(
    "send_momentum_(Tensor(a!)[] momentum, Tensor[] grads, Tensor[] numbers, Tensor? skip, "
    "int[] order, bool nesterov) -> Tensor",
    _send_momentum,
    lambda momentum, grads, numbers, skip, order, nesterov: _packed(grads, order),
)
REPACK = _operator("repack(Tensor buffer, int[] sizes, int[] order) -> Tensor", _repack, _repack)
ORTHOGONALIZE = _operator(
    "orthogonalize(Tensor received, int[] shapes, int[] given, int[] wanted, "
    "float[] coefficients, float eps, int steps) -> Tensor",
    _orthogonalize,
    lambda received, shapes, given, wanted, *numbers: _orthogonal(received, wanted),
)
ADD = _operator(
    "add_updates_(Tensor(a!)[] params, Tensor received, Tensor[] numbers, Tensor? skip, "
    "int[] order, int[] shapes, str? adjust) -> ()",
    _add_updates,
    lambda *args: None,
)
