"""Append the norm of all gradients, and the division of gradients by a loss scale.

The norm is that of ``clip_grad_norm_`` on sharded parameters. Eager takes a norm per gradient on
the local shard, stacks them, and all-reduces the stack over each mesh dimension that shards them
(``_NormPartial`` in torch's ``_math_ops.py``)::

    [n] local norms -> ** p -> all_reduce(sum) -> ** (1 / p) -> norm of the n norms

Norms of infinity and zero need no powers, and the largest, least or sum of the ranks' norms. The
norms of several meshes, such as that of experts, are added at last.

The division, and the search for infinite values, are those of ``torch.amp.GradScaler``::

    grad, 1 / scale -> unscale_ -> found \\
    grad, 1 / scale -> unscale_ -> found -> any -> stack -> all_reduce(max) -> wait -> update_
                                                            (per mesh dimension)

Each optimizer is skipped by its own gradients; the stack has one element per optimizer. Norms have
a reduction of their own: rings would round them differently with one more element beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem, itemgetter
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from .._torch.fsdp2 import mesh_of, shard_of, sharded_dims
from .._torch.optimizers import by_dtype
from .._torch.process_groups import as_argument, mesh_group
from .rules import operator

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_EPS = 1e-6  # of torch.nn.utils.clip_grads_with_norm_


def _stack(norms: list[Tensor], shares: list[float]) -> Tensor:
    # Not a division of the stack: eager's, by a number, may round otherwise.
    return torch.stack([n if s == 1.0 else n / s for n, s in zip(norms, shares, strict=True)])


def _total_norm(vectors: list[Tensor], norm_type: float) -> Tensor:
    """Compute the norm of all gradients from the norms of each mesh."""
    totals = [torch.linalg.vector_norm(v, norm_type) for v in vectors]
    if len(totals) == 1:
        return totals[0]
    if norm_type in _WITHOUT_POWERS:
        return torch.linalg.vector_norm(torch.stack(totals), norm_type)
    # Eager adds no norms of several meshes. torchtitan's _clip_grad_norm_with_ep does, like this.
    return sum(t**norm_type for t in totals) ** (1.0 / norm_type)  # type: ignore[return-value]


def _norms(grads: list[Tensor], norm_type: float) -> list[Tensor]:
    if math.isinf(norm_type):  # a rank without rows has no largest value
        none = 0.0 if norm_type > 0 else math.inf
        grads = [g if g.numel() else g.new_full((1,), none) for g in grads]
    return list(torch._foreach_norm(grads, norm_type))


NORMS = operator("norms(Tensor[] grads, float norm_type) -> Tensor[]", _norms)
STACK = operator("stack(Tensor[] norms, float[] shares) -> Tensor", _stack)
_TOTAL = operator("total_norm(Tensor[] vectors, float norm_type) -> Tensor", _total_norm)
_COEFFICIENT = operator(
    "coefficient(Tensor total, float max_norm) -> Tensor",
    lambda total, max_norm: torch.clamp(max_norm / (total + _EPS), max=1.0),
)


def _clamp(grads: list[Tensor], most: float) -> None:
    torch._foreach_clamp_min_(grads, -most)
    torch._foreach_clamp_max_(grads, most)


CLAMP = operator("clamp_(Tensor(a!)[] grads, float most) -> ()", _clamp)
"""``torch.nn.utils.clip_grad_value_``."""
NOT_FINITE = operator(
    "not_finite(Tensor total) -> Tensor", lambda total: total.isfinite().logical_not().float()
)

# norm_strategy in torch's _math_ops.py
_WITHOUT_POWERS = {math.inf: "max", -math.inf: "min", 0.0: "sum"}

Call = Callable[..., fx.Node]


def by_mesh(
    parameters: Sequence[torch.Tensor],
) -> list[tuple[tuple[tuple[Any, int], ...], list[int]]]:
    """Group parameters by mesh, whose norms are stacked.

    Each mesh has the dimensions that shard any of its parameters, and places in the stack's order.
    """
    groups: dict[Any, list[int]] = {}
    for i, parameter in enumerate(parameters):
        groups.setdefault(mesh_of(parameter), []).append(i)
    meshes = []
    for places in groups.values():
        dims = {d for i in places for d in sharded_dims(parameters[i])}
        order = by_dtype([shard_of(parameters[i]) for i in places])
        meshes.append((tuple(sorted(dims, key=itemgetter(1))), [places[k] for k in order]))
    return meshes


def append_norms(
    call: Call,
    gradients: Sequence[fx.Node],
    parameters: Sequence[torch.Tensor],
    norm_type: float,
) -> list[tuple[fx.Node, list[int]]]:
    """Append the norms of ``gradients``; return a vector of norms per mesh, with their places."""
    vectors = []
    reduce = _WITHOUT_POWERS.get(norm_type)
    for dims, places in by_mesh(parameters):
        norms, shares = [], []
        for i in places:
            norm = call(NORMS, [gradients[i]], norm_type)
            norms.append(call(getitem, norm, 0))
            copies = [m.size(d) for m, d in dims if (m, d) not in sharded_dims(parameters[i])]
            shares.append(_share(math.prod(copies), norm_type))
        vector = call(STACK, norms, shares)
        for mesh, dim in dims:
            group = as_argument(mesh_group(mesh, dim))
            if reduce is None:
                vector = call(_aten.pow.Tensor_Scalar, vector, norm_type)
            vector = call(_c10d.all_reduce.default, vector, reduce or "sum", group)
            vector = call(_c10d.wait_tensor.default, vector)
            if reduce is None:
                vector = call(_aten.pow.Tensor_Scalar, vector, 1.0 / norm_type)
        vectors.append((vector, places))
    return vectors


def _share(ranks: int, norm_type: float) -> float:
    """Return the divisor of a norm that several ranks have: their parts add up to it."""
    if norm_type in _WITHOUT_POWERS:
        return float(ranks) if norm_type == 0.0 else 1.0
    return math.pow(ranks, 1.0 / norm_type)


@dataclass(frozen=True)
class Norm:
    """Clip gradients as :func:`torch.nn.utils.clip_grad_norm_` does.

    With ``skip``, a step whose norm is not finite changes nothing.
    """

    max_norm: float
    norm_type: float = 2.0
    skip: bool = False

    def total(self, call: Call, vectors: Sequence[fx.Node]) -> fx.Node:
        """Append the norm of all gradients, from the vectors of :func:`append_norms`."""
        return call(_TOTAL, list(vectors), self.norm_type)

    def coefficient(self, call: Call, total: fx.Node) -> fx.Node:
        """Append the factor that scales gradients."""
        return call(_COEFFICIENT, total, self.max_norm)


def _unscale(grads: list[Tensor], inverse: Tensor, optimizer: int) -> Tensor:
    # ``optimizer`` keeps calls apart whose flags skip different optimizers (see `group_calls`).
    flag = torch.zeros((), device=grads[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, flag, inverse)
    return flag


UNSCALE = operator(
    "unscale_(Tensor(a!)[] grads, Tensor inverse, int optimizer) -> Tensor", _unscale
)
ANY = operator("any(Tensor[] found) -> Tensor", lambda found: torch.stack(found).amax(0))


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
    flags: dict[torch.optim.Optimizer, list[fx.Node]] = {}
    number = {o: k for k, o in enumerate(dict.fromkeys(optimizers))}
    parts = {
        i: call(UNSCALE, [gradient], inverse, number[optimizer])
        for i, (gradient, optimizer) in enumerate(zip(gradients, optimizers, strict=True))
        if optimizer is not None
    }
    for dims, places in by_mesh(parameters):
        nonfinite: dict[torch.optim.Optimizer, list[fx.Node]] = {}
        for i in places:
            if (optimizer := optimizers[i]) is not None:
                nonfinite.setdefault(optimizer, []).append(parts[i])
        if not nonfinite:
            continue
        vector = call(STACK, [call(ANY, v) for v in nonfinite.values()], [1.0] * len(nonfinite))
        for mesh, dim in dims:
            group = as_argument(mesh_group(mesh, dim))
            vector = call(_c10d.all_reduce.default, vector, "max", group)
            vector = call(_c10d.wait_tensor.default, vector)
        for k, optimizer in enumerate(nonfinite):
            flags.setdefault(optimizer, []).append(call(_aten.select.int, vector, 0, k))
    return {o: v[0] if len(v) == 1 else call(ANY, v) for o, v in flags.items()}
