"""Append the norm of all gradients, as ``clip_grad_norm_`` computes it on sharded parameters.

Eager takes a norm per gradient on the local shard, stacks them, and all-reduces the stack over
each mesh dimension that shards them (``_NormPartial`` in torch's ``_math_ops.py``)::

    [n] local norms -> ** p -> all_reduce(sum) -> ** (1 / p) -> norm of the n norms
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from .._torch.process_groups import as_argument, mesh_group
from .._torch.sharded import sharded_dims

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_EPS = 1e-6  # of torch.nn.utils.clip_grads_with_norm_

Call = Callable[..., fx.Node]


@dataclass(frozen=True)
class Norm:
    """How gradients are clipped.

    Args:
        max_norm: as in :func:`torch.nn.utils.clip_grad_norm_`; so is ``norm_type``.
        skip: whether a step whose norm is not finite changes nothing.
    """

    max_norm: float
    norm_type: float = 2.0
    skip: bool = False

    def append(
        self, call: Call, gradients: Sequence[fx.Node], parameters: Sequence[torch.Tensor]
    ) -> fx.Node:
        """Append the total norm of ``gradients``, in the order given; return its node."""
        by_mesh: dict[Any, list[fx.Node]] = {}
        for gradient, parameter in zip(gradients, parameters, strict=True):
            norms = call(_aten._foreach_norm.Scalar, [gradient], self.norm_type)
            local = call(operator.getitem, norms, 0)
            by_mesh.setdefault(sharded_dims(parameter), []).append(local)
        totals = []
        for dims, norms in by_mesh.items():
            stacked = call(_aten.stack.default, norms)
            for mesh, dim in dims:
                group = as_argument(mesh_group(mesh, dim))
                stacked = call(_aten.pow.Tensor_Scalar, stacked, self.norm_type)
                stacked = call(_c10d.all_reduce.default, stacked, "sum", group)
                stacked = call(_c10d.wait_tensor.default, stacked)
                stacked = call(_aten.pow.Tensor_Scalar, stacked, 1.0 / self.norm_type)
            totals.append(call(_aten.linalg_vector_norm.default, stacked, self.norm_type))
        if len(totals) == 1:
            return totals[0]
        return call(
            _aten.linalg_vector_norm.default, call(_aten.stack.default, totals), self.norm_type
        )

    def coefficient(self, call: Call, total: fx.Node) -> fx.Node:
        """Append what gradients are multiplied with."""
        inverse = call(_aten.reciprocal.default, call(_aten.add.Tensor, total, _EPS))
        scaled = call(_aten.mul.Tensor, inverse, self.max_norm)
        return call(_aten.clamp.default, scaled, None, 1.0)
