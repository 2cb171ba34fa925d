"""An autograd node of its own for what a unit is called with, as eager FSDP2 has it.

Eager FSDP2 passes the inputs of a unit that need a gradient through a node of its own, to learn
when the unit's backward has ended (``FSDPParamGroup._register_post_backward_hook``, torch 2.11 to
2.15). There the gradients of all uses inside the unit meet before they are added to those of other
uses. So the gradients of an activation that several units read are added unit by unit::

    x is read twice by unit a, twice by unit b, and then by r, outside of units
    use by use        (((r + b2) + b1) + a2) + a1
    eager FSDP2       (r + (b2 + b1)) + (a2 + a1)

A view to the same shape is such a node, too, made by a hook before ``forward``, which Dynamo traces
along with it. Eager FSDP2 has one node for all inputs of a call: where one of them gets a gradient,
those that the unit does not read get zeros, not None. So a second node joins the views of several
inputs, an operator that Dynamo takes into the graph as it is.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.fx.traceback import annotate

from .._torch.fsdp2 import WRAPS_DATACLASSES
from ..fqns import unwrapped
from .units import find_units

_KEY = "unit_input"


class _Join(torch.autograd.Function):
    """Hands on its inputs; in backward all have a gradient, or none."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients  # autograd has made zeros of those that are missing


_library = torch.library.Library("torch_ext_bucketing", "FRAGMENT")
_library.define("unit_inputs(Tensor[] inputs) -> Tensor[]")
_library.impl("unit_inputs", lambda inputs: list(_Join.apply(*inputs)), "CompositeImplicitAutograd")


def modules_with_nodes(
    model: nn.Module, units: Iterable[str | Sequence[str]]
) -> dict[str, nn.Module]:
    """The modules whose inputs get nodes, by FQN: of each unit that holds parameters the first one.
    That is eager FSDP2's choice where a unit's modules are called in the order of the unit."""
    held: set[nn.Parameter] = set()
    found = {}
    for names, modules in find_units(model, units):
        own = {p for module in modules for p in module.parameters()} - held
        if own:
            found[names[0]] = unwrapped(modules[0])
        held |= own
    return found


def give_nodes(modules: Iterable[nn.Module]) -> None:
    """Have every call of these modules give its inputs nodes of their own, from now on."""
    for module in modules:
        if _hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_hook, prepend=True, with_kwargs=True)


def is_unit_input(node: fx.Node) -> bool:
    """Whether a node makes a unit's input, or in backward the gradient of one."""
    return _KEY in (node.meta.get("custom") or {})


def _hook(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    # The last first: of a tensor that is given twice, eager adds the first one's gradient first,
    # and what is made last has its gradient first.
    with annotate({_KEY: True}):
        made = [tensor.view_as(tensor) for tensor in reversed(_tensors((args, kwargs)))]
        if len(made) > 1:
            made = list(torch.ops.torch_ext_bucketing.unit_inputs.default(made))
    return _replace(args, made), _replace(kwargs, made)


def _items(value: Any) -> list[Any]:
    """What eager FSDP2 looks into (``collect_grad_tensors``; ``tree_flatten`` in 2.11)."""
    if _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _is_dataclass(value: Any) -> bool:
    if not WRAPS_DATACLASSES or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return False
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    return [tensor for item in _items(value) for tensor in _tensors(item)]


def _replace(value: Any, made: list[torch.Tensor]) -> Any:
    """Put what is ``made``, the first one at its end, in the place of :func:`_tensors`."""
    if not _tensors(value):
        return value
    if isinstance(value, torch.Tensor):
        return made.pop()
    old = _items(value)
    new = [_replace(item, made) for item in old]
    cls: Any = type(value)
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        changes = {n: v for n, v, was in zip(names, new, old, strict=True) if _tensors(was)}
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict):
        changed = dict(zip(value.keys(), new, strict=True))
        if isinstance(value, defaultdict):  # at which eager FSDP2 fails, from 2.12 on
            return cls(value.default_factory, changed)
        return cls(changed)
    if hasattr(value, "_fields"):
        return cls(*new)
    return cls(new)
