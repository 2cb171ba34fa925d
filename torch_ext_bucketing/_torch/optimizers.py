"""Read optimizers, run Muon's functions, and change the private schedule of a pipeline."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import private_torch

with private_torch():
    from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

adjusted_lr: Callable[..., float] = _adjust_lr
"""Return the learning rate that ``torch.optim.Muon`` takes for a matrix of a shape."""
newton_schulz: Callable[..., Tensor] = _zeropower_via_newtonschulz
"""Orthogonalize a matrix in bfloat16 as ``torch.optim.Muon`` does; may change it."""


def make_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor
) -> None:
    """Make the state of a parameter as the first ``step()`` does, without a step."""
    gradient, parameter.grad = parameter.grad, parameter.detach()  # only its presence matters
    try:
        alone = {**group, "params": [parameter]}
        owner: Any = optimizer
        if isinstance(optimizer, MuonOfEach):
            owner = super(MuonOfEach, optimizer)  # of the stack, not of each matrix
        with private_torch():
            make = owner._init_group
        lists = len(inspect.signature(make).parameters) - 1  # which it fills
        make(alone, *([] for _ in range(lists)))
    finally:
        parameter.grad = gradient


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


def update_scale(
    scaler: torch.amp.GradScaler, found_inf: Mapping[torch.optim.Optimizer, Tensor]
) -> None:
    """Update a loss scale after steps of optimizers whose gradients were divided by it.

    ``found_inf``: by optimizer a scalar, above zero if the scaler skipped it.
    """
    with private_torch():
        from torch.amp.grad_scaler import OptState

        for optimizer, flag in found_inf.items():
            state = scaler._per_optimizer_states[id(optimizer)]
            state |= {"stage": OptState.STEPPED, "found_inf_per_device": {flag.device: flag}}
    scaler.update()


class MuonOfEach(torch.optim.Muon):
    """Muon whose ``step()`` updates each matrix of a stack by itself."""

    def _init_group(
        self, group: Any, params: list[Tensor], grads: list[Tensor], momentum: list[Tensor]
    ) -> bool:
        lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        is_complex = super()._init_group(group, *lists)
        for out, tensors in zip((params, grads, momentum), lists, strict=True):
            out += matrices_in(tensors)
        return is_complex


def matrices_in(tensors: Iterable[Tensor]) -> list[Tensor]:
    """List matrices; matrices of stacks are views, in order."""
    return [m for t in tensors for m in (t.unbind() if t.dim() == 3 else (t,))]


def by_dtype(gradients: Sequence[torch.Tensor]) -> list[int]:
    """Return places of gradients in the order of ``clip_grad_norm_``'s stack of norms."""
    # One group of a device and dtype after the other, in the order of a hash table.
    groups = _group_tensors_by_device_and_dtype([list(gradients)], with_indices=True)
    return [place for _, places in groups.values() for place in places]


_BETWEEN_RANKS = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "WAIT_SEND_F", "WAIT_SEND_B")


def actions_of(schedule: Any) -> list[tuple[tuple[int, str], ...]]:
    """Return this rank's actions in a step: stage and kind, of both if two overlap."""
    return [
        tuple((sub.stage_index, sub.computation_type.value) for sub in a.sub_actions or (a,))
        for a in schedule.pipeline_order_with_comms[schedule.rank]
    ]


def replace_actions(schedule: Any, actions: Sequence[tuple[tuple[int, str], ...] | int]) -> None:
    """Replace this rank's actions after its first one on a stage, which runs now.

    ::

        RECV_F  UNSHARD  F ..           UNSHARD runs: it and the actions before it stay
        RECV_F  UNSHARD  the rest of `actions`

    ``actions`` describe a whole step: indices into its list, and new actions of one stage.
    """
    schedules: Any = importlib.import_module("torch.distributed.pipelining.schedules")
    order = schedule.pipeline_order_with_comms[schedule.rank]
    kinds = [action.computation_type.value for action in order]
    begun = next(i for i, kind in enumerate(kinds) if kind not in _BETWEEN_RANKS) + 1
    order[begun:] = [  # in place: the running step iterates over the list
        order[a]
        if isinstance(a, int)
        else schedules._Action(a[0][0], schedules._ComputationType(a[0][1]), None)
        for a in actions
        if not isinstance(a, int) or a >= begun
    ]
