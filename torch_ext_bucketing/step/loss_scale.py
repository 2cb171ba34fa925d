"""Append the division of gradients by a loss scale, and the search for infinite values.

Both are those of ``torch.amp.GradScaler``::

    grad, 1 / scale -> unscale_ -> found \\
    grad, 1 / scale -> unscale_ -> found -> any -> stack -> all_reduce(max) -> wait -> update_
                                                            (per mesh dimension)

Each optimizer is skipped by its own gradients; the stack has one element per optimizer. Norms have
a reduction of their own: rings would round them differently with one more element beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx
from torch import Tensor

from .._torch.process_groups import as_argument, mesh_group
from .norm import STACK, Call, by_mesh
from .rules import operator

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional


def _unscale(grads: list[Tensor], inverse: Tensor, optimizer: int) -> Tensor:
    # ``optimizer`` keeps calls apart whose flags skip different optimizers (see `group_calls`).
    found = torch.zeros((), device=grads[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
    return found


def _any(found: list[Tensor]) -> Tensor:
    return torch.stack(found).amax(0)


UNSCALE = operator(
    "unscale_(Tensor(a!)[] grads, Tensor inverse, int optimizer) -> Tensor", _unscale
)
ANY = operator("any(Tensor[] found) -> Tensor", _any)


def inverse_scale(scaler: torch.amp.GradScaler, device: torch.device) -> Tensor:
    """Return 1 / scale as a scalar in float32, rounded as ``GradScaler.unscale_`` does."""
    scale: Tensor = scaler.scale(torch.ones((), device=device))
    return scale.double().reciprocal().float()


def append_unscale(
    call: Call,
    inverse: fx.Node,
    gradients: Sequence[fx.Node],
    parameters: Sequence[torch.Tensor],
    optimizers: Sequence[torch.optim.Optimizer | None],
) -> dict[torch.optim.Optimizer, fx.Node]:
    """Divide gradients in place, except gradients without an optimizer.

    Each optimizer gets a scalar in float32, above zero if any rank has a gradient of the optimizer
    that is not finite.
    """
    found: dict[torch.optim.Optimizer, list[fx.Node]] = {}
    number = {o: k for k, o in enumerate(dict.fromkeys(optimizers))}
    parts = {
        i: call(UNSCALE, [gradient], inverse, number[optimizer])
        for i, (gradient, optimizer) in enumerate(zip(gradients, optimizers, strict=True))
        if optimizer is not None
    }
    for dims, places in by_mesh(parameters):
        mine: dict[torch.optim.Optimizer, list[fx.Node]] = {}
        for i in places:
            if (optimizer := optimizers[i]) is not None:
                mine.setdefault(optimizer, []).append(parts[i])
        if not mine:
            continue
        vector = call(STACK, [call(ANY, of) for of in mine.values()], [1.0] * len(mine))
        for mesh, dim in dims:
            group = as_argument(mesh_group(mesh, dim))
            vector = call(_c10d.all_reduce.default, vector, "max", group)
            vector = call(_c10d.wait_tensor.default, vector)
        for k, optimizer in enumerate(mine):
            found.setdefault(optimizer, []).append(call(_aten.select.int, vector, 0, k))
    return {o: of[0] if len(of) == 1 else call(ANY, of) for o, of in found.items()}
