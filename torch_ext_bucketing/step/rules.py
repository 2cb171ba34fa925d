"""Define the operator that updates parameters, and the optimizers that it knows.

One node updates the parameters of one bucket::

    update_(params, grads, state, numbers, lr, skip, fresh, places, rule, options)

It calls the function of ``torch.optim`` that the optimizer itself calls, on this rank's shards. So
bits are those of the variant that the optimizer is set to (``fused``, ``foreach`` or one tensor
after the other), and equal eager's on every device. Numbers such as the learning rate are read from
the optimizer's groups before every step, and reach the node as a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from .._torch.optimizers import MuonOfEach, has_hooks, make_state


class StackedMuon(MuonOfEach):
    """Update each matrix of a stack as ``torch.optim.Muon`` updates it alone.

    ``torch.optim.Muon`` refuses parameters that have not two dimensions. This one takes ``[stack,
    rows, columns]``, too, with its options. Its ``step()`` is torch's, one matrix after the other;
    its momentum has the parameter's shape.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__([torch.empty(0, 0)], **options)  # which refuses stacks
        self.param_groups.clear()
        groups = list(params)
        if not groups:
            raise ValueError("give StackedMuon at least one parameter")
        for group in groups if isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with two or three dimensions."""
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.ndim not in (2, 3):
                del self.param_groups[-1]
                raise ValueError(
                    "StackedMuon takes parameters of two or three dimensions, got one of shape "
                    f"{tuple(p.shape)}: give it to another optimizer"
                )


_library = torch.library.Library("torch_ext_bucketing", "FRAGMENT")


def operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """Define an operator that runs the kernels of ``run``, in Inductor's graphs as well.

    ``fake`` takes fake tensors; None: ``run`` does.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torch_ext_bucketing::{name}", fake or run, lib=_library)
    return getattr(torch.ops.torch_ext_bucketing, name).default


class Rule:
    """An optimizer that the operator knows."""

    # Entries of a group that are read before every step; a pair has several numbers.
    numbers: ClassVar[tuple[str, ...]]
    options: ClassVar[tuple[str, ...]]  # entries of a group that choose the kernels
    copies_at_first = False  # whether the first step copies gradients to the state

    def numbers_of(self, group: Mapping[str, Any]) -> list[float]:
        """Return the numbers of a group; an lr that is a tensor is passed as one."""
        numbers: list[float] = []
        for name in self.numbers:
            value = group[name]
            if name == "lr" and isinstance(value, Tensor):
                value = 0.0
            numbers += map(float, value if isinstance(value, tuple | list) else (value,))
        return numbers

    def key(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the settings that a graph depends on: options, state, the learning rate's kind."""
        return self.options_of(group), self.state(group), isinstance(group["lr"], Tensor)

    def options_of(self, group: Mapping[str, Any]) -> str:
        """Return the options of a group as text, such as ``"foreach=1 fused=-"``."""
        values = (group.get(name) for name in self.options)
        text = {True: "1", False: "0", None: "-"}
        return " ".join(f"{n}={text[v]}" for n, v in zip(self.options, values, strict=True))

    def state(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the tensors of a parameter's state, in the operator's order."""
        return ("momentum_buffer",)

    def copies(self, group: Mapping[str, Any], single: bool) -> int:
        """Count copies of a parameter's bytes that the kernels hold, the first step's, too.

        ``single``: the group is updated one parameter after the other.
        """
        return 0

    def run(self, options: dict[str, Any], fresh: list[bool], *lists: list[Tensor]) -> None:
        """Call the function of ``torch.optim`` on parameters, gradients, and each kind of state."""
        raise NotImplementedError("matrices have nodes of their own")


def one_by_one(options: str, device: torch.device) -> bool:
    """Return whether parameters are updated one after the other, which needs the least memory."""
    words = options.split()
    return "foreach=0" in words or ("foreach=-" in words and device.type == "cpu")


class _Adam(Rule):
    numbers = ("lr", "betas", "eps", "weight_decay")
    options = ("amsgrad", "maximize", "foreach", "capturable", "fused", "decoupled_weight_decay")

    def state(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        amsgrad = ("max_exp_avg_sq",) if group["amsgrad"] else ()
        return ("step", "exp_avg", "exp_avg_sq", *amsgrad)

    def copies(self, group: Mapping[str, Any], single: bool) -> int:
        """Count denominators, and gradients that are negated or decayed."""
        if group["fused"]:
            return 0
        if not single:
            return 1  # changed gradients are gone before the denominators
        decays = group["weight_decay"] and not group.get("decoupled_weight_decay")
        # A square root, its quotient, and the denominator of the parameter before.
        return 3 + int(bool(group["maximize"] or decays))

    def run(self, options: dict[str, Any], fresh: list[bool], *lists: list[Tensor]) -> None:
        params, grads, steps, exp_avgs, exp_avg_sqs, *amsgrad = lists
        has_complex = any(map(torch.is_complex, params))
        state = (exp_avgs, exp_avg_sqs, amsgrad[0] if amsgrad else [], steps)
        adam(params, grads, *state, has_complex=has_complex, **options)


class _SGD(Rule):
    numbers = ("lr", "momentum", "dampening", "weight_decay")
    options = ("nesterov", "maximize", "foreach", "fused")
    copies_at_first = True

    def state(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def copies(self, group: Mapping[str, Any], single: bool) -> int:
        """Count changed gradients, and the first step's for momentum."""
        first, decays = bool(group["momentum"]), bool(group["weight_decay"])
        if group["fused"]:
            return first
        if not single:
            return first + bool(decays or group["maximize"])
        # Negated gradients come before that of the last parameter is gone.
        return first + min(2, 2 * group["maximize"] + decays + group["nesterov"])

    def run(self, options: dict[str, Any], fresh: list[bool], *lists: list[Tensor]) -> None:
        params, grads, *state = lists
        momenta: Sequence[Tensor | None] = state[0] if state else [None] * len(params)
        # The first step copies the gradient, with the sign of its zeros.
        buffers = [None if new else b for b, new in zip(momenta, fresh, strict=True)]
        sgd(params, grads, buffers, **options)
        for result, buffer, new in zip(buffers, momenta, fresh, strict=True):
            if new and result is not None and buffer is not None:
                buffer.copy_(result)


class MatrixRule(Rule):
    """Muon, whose update is a function of whole matrices (:mod:`.matrix`), which have own nodes."""

    numbers = ("lr", "momentum", "weight_decay")
    options = ("nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")

    def numbers_of(self, group: Mapping[str, Any]) -> list[float]:
        """Return the numbers of a group; an lr that is a tensor is read, as the optimizer does."""
        return [float(group[name]) for name in self.numbers]

    def options_of(self, group: Mapping[str, Any]) -> str:
        """Return the options of a group as text."""
        return repr([group[name] for name in self.options])


RULES: dict[type, str] = {
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Muon: "muon",
    StackedMuon: "muon",
}
_SEVERAL = {"betas": ("beta1", "beta2")}  # entries of a group that are several keywords
BY_NAME: dict[str, Rule] = {"adam": _Adam(), "sgd": _SGD(), "muon": MatrixRule()}


def rule_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of an optimizer's rule; None if its ``step()`` has to run."""
    # A subclass may have another step, and hooks are called by ``step()`` alone.
    differentiable = any(group.get("differentiable") for group in optimizer.param_groups)
    return None if differentiable or has_hooks(optimizer) else RULES.get(type(optimizer))


def no_rule(names: str, after: str) -> str:
    """Return a warning of optimizers without a rule; ``after`` names the updater."""
    return (
        f"{names} has no rule for updates in a graph (its class is not one of "
        f"{', '.join(cls.__name__ for cls in RULES)}, or it has hooks, is differentiable, or has a "
        f"step() of its own): {after}"
    )


def state_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, names: Sequence[str]
) -> tuple[list[Tensor], bool]:
    """Return tensors of a parameter's state, and whether any is new."""
    if not names:
        return [], False
    # State that the class makes at the first step is made here in the same way; but a momentum
    # buffer is empty, since that step copies it from the gradient.
    state = optimizer.state[parameter]
    new = not state
    if new:
        make_state(optimizer, group, parameter)
    for name in names:
        if state.get(name) is not None:
            continue
        if name != "momentum_buffer":
            raise ValueError(
                f"{type(optimizer).__name__} has state of a parameter without {name}: an option "
                "such as amsgrad was changed after its first step, or a checkpoint is incomplete"
            )
        state[name], new = torch.empty_like(parameter), True
    return [state[name] for name in names], new


def _update(
    params: list[Tensor],
    grads: list[Tensor],
    state: list[Tensor],
    numbers: Tensor,
    lr: Tensor | None,
    skip: Tensor | None,
    fresh: Tensor | None,
    places: list[int],
    rule: str,
    options: str,
) -> None:
    values = {"1": True, "0": False, "-": None}
    arguments: dict[str, Any] = {
        name: values[v] for name, _, v in (o.partition("=") for o in options.split())
    }
    # Fused kernels read the flag on the device; others would update, so the host has to wait.
    on_device = bool(arguments.get("fused")) and skip is not None
    if skip is not None and not on_device and skip.item():
        return
    kinds = len(state) // len(params)
    columns = [list(state[k::kinds]) for k in range(kinds)]
    new = [False] * len(params) if fresh is None else fresh[places].tolist()
    update_rule = BY_NAME[rule]
    names = [n for number in update_rule.numbers for n in _SEVERAL.get(number, (number,))]
    arguments |= dict(zip(names, numbers.tolist(), strict=True))
    arguments |= {"found_inf": skip if on_device else None} | ({} if lr is None else {"lr": lr})
    update_rule.run(arguments, new, list(params), list(grads), *columns)


UPDATE = operator(
    "update_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor numbers, Tensor? lr, "
    "Tensor? skip, Tensor? fresh, int[] places, str rule, str options) -> ()",
    _update,
    lambda *args: None,
)
