"""Give each unit's inputs an autograd node, as eager FSDP2 does.

Eager FSDP2 passes the inputs of a unit that need a gradient through an autograd node, to find out
when the unit's backward has ended (``FSDPParamGroup._register_post_backward_hook``, torch 2.11 to
2.15). That node sums the gradients of all uses inside the unit before other uses are added. So the
gradients of an activation that several units read are added unit by unit::

    x is read twice by unit a, twice by unit b, and then by r, outside of units
    use by use        (((r + b2) + b1) + a2) + a1
    eager FSDP2       (r + (b2 + b1)) + (a2 + a1)

Here the node is a view to the same shape, made by a forward pre-hook that Dynamo traces. Eager
FSDP2 has one node for all inputs of a call: if one input gets a gradient, inputs that the unit does
not read get zeros, not None. So an operator, which Dynamo puts into the graph as it is, joins the
views of several inputs.
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
    """Identity; in backward either all inputs have a gradient or none has."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients  # autograd has replaced missing ones by zeros


_library = torch.library.Library("torch_ext_bucketing", "FRAGMENT")
_library.define("unit_inputs(Tensor[] inputs) -> Tensor[]")
_library.impl("unit_inputs", lambda inputs: list(_Join.apply(*inputs)), "CompositeImplicitAutograd")


def modules_with_input_nodes(
    model: nn.Module, units: Iterable[str | Sequence[str]]
) -> dict[str, nn.Module]:
    """Find the modules whose inputs get nodes, by FQN: the first of each unit with parameters.

    Eager FSDP2 chooses the same one if a unit's modules are called in the order of the unit.
    """
    held: set[nn.Parameter] = set()
    found = {}
    for names, modules in find_units(model, units):
        own = {p for module in modules for p in module.parameters()} - held
        if own:
            found[names[0]] = unwrapped(modules[0])
        held |= own
    return found


def register_input_nodes(modules: Iterable[nn.Module]) -> None:
    """Give the inputs of every future call of these modules autograd nodes."""
    for module in modules:
        if _hook not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_hook, prepend=True, with_kwargs=True)


def is_unit_input(node: fx.Node) -> bool:
    """Return whether a node makes a unit's input, or in backward the gradient of one."""
    return _KEY in (node.meta.get("custom") or {})


def _hook(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    if not torch.is_grad_enabled():
        return None
    # In reverse: eager adds the first gradient of a repeated tensor first, and autograd computes
    # the gradient of the last view first.
    with annotate({_KEY: True}):
        made = [tensor.view_as(tensor) for tensor in reversed(_tensors((args, kwargs)))]
        if len(made) > 1:
            made = list(torch.ops.torch_ext_bucketing.unit_inputs.default(made))
    return _replace(args, made), _replace(kwargs, made)


def _items(value: Any) -> list[Any]:
    """List a container's items, like FSDP2 (``collect_grad_tensors``; ``tree_flatten`` in 2.11)."""
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
    """List the tensors that need a gradient."""
    if isinstance(value, torch.Tensor):
        return [value] if value.requires_grad else []
    return [tensor for item in _items(value) for tensor in _tensors(item)]


def _replace(value: Any, made: list[torch.Tensor]) -> Any:
    """Replace :func:`_tensors` by ``made``, which is in reverse order."""
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
        if isinstance(value, defaultdict):  # eager FSDP2 fails with one, from 2.12 on
            return cls(value.default_factory, changed)
        return cls(changed)
    if hasattr(value, "_fields"):
        return cls(*new)
    return cls(new)
