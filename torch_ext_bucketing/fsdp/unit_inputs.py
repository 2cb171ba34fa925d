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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torch.fx.traceback import annotate

from .._torch.fsdp2 import CASTS_EACH_MODULE, WRAPS_DATACLASSES, Casts

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


def register_input_nodes(modules: Iterable[nn.Module]) -> None:
    """Give the inputs of every future call of these modules autograd nodes."""
    for module in modules:
        if _hook not in module._forward_pre_hooks.values():
            run_first(module, _hook)


def run_first(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Register a forward pre-hook that runs before all others, but after casts of inputs."""
    # Eager FSDP2 casts first, which decides the order of a repeated input's gradients.
    module.register_forward_pre_hook(hook, with_kwargs=True)
    hooks = module._forward_pre_hooks
    *before, added = hooks.items()
    casts = [] if isinstance(hook, _CastInputs) else before
    casts = [item for item in casts if getattr(item[1], "casts_inputs", False)]
    # Not `prepend=True`: torch 2.11 guards hooks by their places in the dict below an OrderedDict,
    # where the added one stays last.
    ordered = dict([*casts, added, *before])
    hooks.clear()
    hooks.update(ordered)


def is_unit_input(node: fx.Node) -> bool:
    """Return whether a node makes a unit's input, or in backward the gradient of one."""
    return _KEY in (node.meta.get("custom") or {})


def _hook(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace the inputs of a unit by views, so that their gradients are added per unit."""
    if not torch.is_grad_enabled():
        return None
    # In reverse: eager adds the first gradient of a repeated tensor first, and autograd computes
    # the gradient of the last view first.
    inputs = (args, kwargs)
    with annotate({_KEY: True}):
        views = [tensor.view_as(tensor) for tensor in reversed(_tensors(inputs, _differentiable))]
        if len(views) > 1:
            views = list(torch.ops.torch_ext_bucketing.unit_inputs.default(views))
    return _map(lambda _: views.pop(), inputs, _differentiable)


def _differentiable(value: Any) -> bool | None:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    # FSDP2 looks for gradients in dataclasses since 2.12 (``collect_grad_tensors``), and before by
    # ``tree_flatten``.
    return None if WRAPS_DATACLASSES or not _is_dataclass(value) else False


def _items(value: Any) -> list[Any]:
    """List a container's items, like FSDP2 (``_apply_to_tensors``, ``torch/distributed/utils``)."""
    if _is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []


def _is_dataclass(value: Any) -> bool:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return False
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _tensors(value: Any, selects: Callable[[Any], bool | None]) -> list[torch.Tensor]:
    """List the selected tensors in nested containers; ``selects`` returns None for containers."""
    answer = selects(value)
    if answer is None:
        return [tensor for item in _items(value) for tensor in _tensors(item, selects)]
    return [value] if answer else []


def _map(
    function: Callable[[torch.Tensor], torch.Tensor],
    value: Any,
    selects: Callable[[Any], bool | None],
) -> Any:
    """Replace the tensors that :func:`_tensors` lists; containers without any stay as they are."""
    if not _tensors(value, selects):
        return value
    if isinstance(value, torch.Tensor):
        return function(value)
    new = [_map(function, item, selects) for item in _items(value)]
    cls: Any = type(value)
    if _is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        changes = {
            name: item
            for name, item in zip(names, new, strict=True)
            if _tensors(getattr(value, name), selects)
        }
        return dataclasses.replace(value, **changes)
    if isinstance(value, dict):
        changed = dict(zip(value.keys(), new, strict=True))
        if isinstance(value, defaultdict):  # eager FSDP2 fails with one, from 2.12 on
            return cls(value.default_factory, changed)
        return cls(changed)
    if hasattr(value, "_fields"):
        return cls(*new)
    return cls(new)


def register_casts(modules: Sequence[nn.Module], casts: Casts) -> None:
    """Cast the floating-point inputs and outputs of a unit's modules in every future call."""
    for module in modules if casts.inputs is not None else ():
        run_first(module, _CastInputs(casts, module is modules[0]))
    for module in modules if casts.outputs is not None else ():
        module.register_forward_hook(_CastOutputs(casts, module is modules[-1]))


def cast_inputs(casts: Casts, is_first: bool, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast the inputs of a unit's module; ``is_first``: the first one in the unit."""
    if casts.inputs is None or not (is_first or CASTS_EACH_MODULE):
        return args, kwargs
    return _cast(args, casts.inputs), _cast(kwargs, casts.inputs)


def cast_outputs(casts: Casts, is_last: bool, output: Any) -> Any:
    """Cast the outputs of a unit's module; ``is_last``: the last one in the unit."""
    if casts.outputs is None or not (is_last or CASTS_EACH_MODULE):
        return output
    return _cast(output, casts.outputs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def wanted(item: Any) -> bool | None:
        if not isinstance(item, torch.Tensor):
            return None
        return item.is_floating_point() and item.dtype != dtype

    return _map(lambda tensor: tensor.to(dtype), value, wanted)


@dataclasses.dataclass(frozen=True)
class _CastInputs:
    casts: Casts
    is_first: bool
    casts_inputs = True  # see `run_first`

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return cast_inputs(self.casts, self.is_first, args, kwargs)


@dataclasses.dataclass(frozen=True)
class _CastOutputs:
    casts: Casts
    is_last: bool

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_outputs(self.casts, self.is_last, output)
