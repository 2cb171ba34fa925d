"""Count the memory of a training step outside of compiled graphs, and measure the step's peak."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

from .._torch.fsdp2 import largest_shard_bytes, largest_shard_numel, unevenness
from ..errors import BoundNotKeptWarning
from ..fqns import format_names
from ..passes.base import Compilation
from ..reports.base import size_text
from ..reports.compile import UNEVEN
from ..reports.planner import KeepReport
from .schedule.policy import PeakMemory

_WARN_ABOVE = 1.03
"""Ratio of measured to predicted peak above which to warn."""


def state_bytes(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    per_parameter: float | None = None,
) -> int:
    """Return the bytes of optimizer state on the rank that has most, if the model is sharded.

    The ``optimizer`` is only read. If it has no state yet, an optimizer of its class takes a step
    on a small parameter of each of its groups. ``per_parameter``: bytes per element of a parameter
    instead. The default is 8: two values in fp32, as AdamW has.
    """
    if optimizer is not None and per_parameter is not None:
        raise ValueError("give optimizer= or state_bytes_per_parameter=, not both")
    if per_parameter is not None and not 0 <= per_parameter < float("inf"):
        raise ValueError(f"state_bytes_per_parameter must not be negative, got {per_parameter!r}")
    if optimizer is None:
        each = 8.0 if per_parameter is None else per_parameter
        trained = (p for p in model.parameters() if p.requires_grad)
        return int(each * sum(map(largest_shard_numel, trained)))
    check_parameters(optimizer, model)
    if optimizer.state:
        return sum(map(_tensor_bytes, optimizer.state.values()))
    # The class makes the state of a small parameter itself, whatever tensors it keeps.
    total = 0.0
    for group in optimizer.param_groups:
        for dtype in dict.fromkeys(p.dtype for p in group["params"]):
            shape = (64, 64)
            probe = nn.Parameter(torch.zeros(shape, dtype=dtype))
            probe.grad = torch.zeros(shape, dtype=dtype)
            like = type(optimizer)([probe])
            like.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
            like.step()
            each = sum(map(_tensor_bytes, like.state.values())) / probe.numel()
            alike = (p for p in group["params"] if p.dtype == dtype)
            total += each * sum(map(largest_shard_numel, alike))
    return int(total)


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise a ValueError if an optimizer has parameters that are not the model's."""
    parameters = set(model.parameters())
    foreign = [
        f"param_groups[{i}]['params'][{j}]"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p not in parameters
    ]
    if foreign:
        raise ValueError(
            f"{len(foreign)} parameter(s) of the optimizer are not in {type(model).__name__}: "
            f"{format_names(foreign)}. Make the optimizer after sharding the model, and give a "
            "module that has all of them"
        )


def _tensor_bytes(state: dict[str, object]) -> int:
    tensors = [v for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(largest_shard_bytes(t) for t in tensors if t.dim())  # without the step counter


def check_bound(model: nn.Module, memory: PeakMemory, state: int) -> int:
    """Return the bytes that ``memory`` leaves for activations and gathered parameters.

    That is the bound without shards, their gradients, buffers and ``state`` bytes of optimizer
    state, each on the rank that has most; 0 if the bound is a ratio. A bound below these is a
    ``ValueError``.
    """
    if memory.gib is None:
        return 0
    bound = memory.limit_bytes(0)
    parameters = sum(largest_shard_bytes(p) for p in model.parameters())
    gradients = sum(largest_shard_bytes(p) for p in model.parameters() if p.requires_grad)
    buffers = sum(largest_shard_bytes(b) for b in model.buffers())
    least = parameters + gradients + buffers + state
    if least > bound:
        raise ValueError(
            f"memory={memory!r} is less than a rank needs before any activation, "
            f"{size_text(least)}: {size_text(parameters)} of parameters, {size_text(gradients)} of "
            f"gradients, {size_text(state)} of optimizer state, {size_text(buffers)} of buffers. "
            f"{_way_to_less(model)}, or give a larger bound"
        )
    return bound - least


def _way_to_less(model: nn.Module) -> str:
    """Return a way for the rank with most to hold less."""
    named = dict(model.named_parameters())
    sizes = {name: (largest_shard_bytes(p), unevenness(p)) for name, p in named.items()}
    uneven = {name: size for name, (size, times) in sizes.items() if times > 1 + UNEVEN}
    more = sum(size * (1 - 1 / sizes[name][1]) for name, size in uneven.items())
    if more <= UNEVEN * sum(size for size, _ in sizes.values()):
        return "Shard over more ranks"
    most = max(uneven, key=lambda name: uneven[name])
    shape = " x ".join(map(str, named[most].shape))
    return (
        f"The first ranks hold {size_text(int(more))} above the mean, as {len(uneven)} parameters "
        f"have too few rows for the ranks, such as {most}, {shape}: shard them on another "
        "dimension, fully_shard(..., shard_placement_fn=...) with Shard(1), or over fewer ranks"
    )


def requested_peak() -> int | None:
    """Return the peak of bytes requested from CUDA's allocator; None without CUDA."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"])


def watch_peak(compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """Wrap ``compiled`` to compare the first step's peak on the device with the predicted one.

    A ``BoundNotKeptWarning`` follows if it is 3% above. A higher peak before the step hides it.
    """
    # The first step ends where the second one begins.
    peaks: list[int] = []

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        if len(peaks) < 2 and torch.is_grad_enabled():
            peaks.append(requested_peak() or 0)
            if len(peaks) == 2 and 0 < peaks[0] < peaks[1]:
                _compare(peaks[1], compilation)
        return compiled(*args, **kwargs)

    is_kept = any(isinstance(r, KeepReport) for r in compilation.report.rewrites)
    return run if is_kept else compiled


def _compare(measured: int, compilation: Compilation) -> None:
    """Note the device's peak in the report of the choice; warn if it is far above."""
    rewrites = compilation.report.rewrites
    for i, rewrite in enumerate(rewrites):
        if isinstance(rewrite, KeepReport):
            planned = compilation.report.peak_bytes or rewrite.peak_bytes[1]
            expected = planned + rewrite.state_bytes
            rewrites[i] = replace(rewrite, measured_bytes=measured, expected_bytes=expected)
            if measured > _WARN_ABOVE * expected:
                compilation.warn(
                    f"the first step's peak on the device is {size_text(measured)}, "
                    f"{measured / expected - 1:.0%} above the predicted {size_text(expected)}: "
                    "lower the bound by as much, or find what else the step holds",
                    BoundNotKeptWarning,
                )
