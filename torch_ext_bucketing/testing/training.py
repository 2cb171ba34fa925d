"""Train with a digest of the weights per step, and count collectives."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch.sharded import parts_of
from ..fqns import canonical_fqn


def digest(model: nn.Module) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes and bytes of this rank's shards."""
    total = hashlib.sha256()
    for name, parameter in sorted(
        (canonical_fqn(name), parameter) for name, parameter in model.named_parameters()
    ):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        total.update(f"{name} {local.dtype} {tuple(local.shape)} ".encode())
        total.update(raw_bytes(local))
    return total.hexdigest()


@dataclass
class Trained:
    """One rank's run: per step the :func:`digest`, the loss, and wall time in milliseconds."""

    digests: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)


class Training:
    """AdamW training of a model, with the record of the steps taken in ``done``.

    ``step`` takes the step's number, runs forward and backward and returns the scalar loss.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[int], torch.Tensor], lr: float = 1e-3
    ) -> None:
        self.model, self.step, self.done = model, step, Trained()
        groups: dict[bool, list[nn.Parameter]] = {}  # no foreach kernel takes both
        for parameter in model.parameters():
            groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        parameters = [{"params": group} for group in groups.values()]
        self.optimizer = torch.optim.AdamW(parameters, lr=lr, foreach=True)

    def take(self, recompiles: bool = False) -> None:
        """Take the next step; unless ``recompiles``, raise if a step after the first compiles."""
        # Such a compile could run under other settings, and would be in another report.
        number = len(self.done.loss)
        compiled = number > 0 and not recompiles
        begin = time.perf_counter()
        with torch.compiler.set_stance("fail_on_recompile" if compiled else "default"):
            loss = self.step(number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done.step_ms.append((time.perf_counter() - begin) * 1e3)
        self.done.loss.append(loss.item())
        self.done.digests.append(digest(self.model))


def train(
    model: nn.Module,
    step: Callable[[int], torch.Tensor],
    steps: int,
    *,
    lr: float = 1e-3,
    recompiles: bool = False,
    stop_unlike: Sequence[str] | None = None,
) -> Trained:
    """Take ``steps`` steps of a :class:`Training`.

    With ``stop_unlike``, the digests of another run, stop after the first step whose weights differ
    on some rank.
    """
    training = Training(model, step, lr)
    for number in range(steps):
        training.take(recompiles)
        if stop_unlike is not None:
            differs = torch.tensor([int(training.done.digests[-1] != stop_unlike[number])])
            differs = differs.to(next(model.parameters()).device)
            dist.all_reduce(differs, op=dist.ReduceOp.MAX)
            if differs.item():
                break
    return training.done


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Copy a tensor's bytes."""
    # Without numpy, which torch does not require.
    parts = [part.detach().cpu().contiguous() for part in parts_of(tensor)]
    return b"".join(ctypes.string_at(part.data_ptr(), part.nbytes) for part in parts)


_CALLS = {
    "all_gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce_scatter": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all_reduce": ("all_reduce",),
}
"""Functions of ``torch.distributed`` that eager FSDP2 calls, newest name first."""


@contextlib.contextmanager
def count_collectives() -> Iterator[dict[str, int]]:
    """Count calls of ``torch.distributed`` functions in the block, by kind."""
    counts = dict.fromkeys(_CALLS, 0)

    def call(kind: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for kind, names in _CALLS.items():
            for name in filter(partial(hasattr, dist), names):
                counting = partial(call, kind, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, counting))
        yield counts
