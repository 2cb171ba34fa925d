"""Make an optimizer's state before its first step, and find its hooks."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from .private import private_torch


def make_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """Make the state of a parameter as the first ``step()`` does, without a step."""
    given, parameter.grad = parameter.grad, parameter.detach()  # only its presence matters
    try:
        alone = {**group, "params": [parameter]}
        with private_torch():
            make: Any = optimizer._init_group  # type: ignore[attr-defined]
        lists = len(inspect.signature(make).parameters) - 1  # which it fills
        make(alone, *([] for _ in range(lists)))
    finally:
        parameter.grad = given


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step()`` calls hooks of the optimizer, or of all optimizers."""
    with private_torch():
        from torch.optim import optimizer as common

        hooks: tuple[Any, ...] = (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            common._global_optimizer_pre_hooks,
            common._global_optimizer_post_hooks,
        )
    return any(hooks)
