"""Define the options and the result of :func:`.compare`, without importing torch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..fqns import format_names
from ..reports.base import Report
from .target import check_numbers

if TYPE_CHECKING:
    import torch
    import torch.nn as nn
    from torch.distributed.device_mesh import DeviceMesh

    from ..passes.base import GraphPass

Backend = Literal["aot_eager", "inductor"]
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class CompareOptions:
    """Options of :func:`.compare`. Functions must be importable by name on the ranks.

    Args:
        build: a function, or ``"module:function"``. Every rank calls it, seeded by the rank. It
            returns ``(model, inputs)`` or ``(model, inputs, loss)``. The model is not sharded, and
            gets rank 0's weights. ``inputs`` are a tensor, a tuple or a dict, or a callable of step
            (from 0) and rank that returns one. ``loss(output, inputs)`` defaults to the output, or
            its ``.loss``.
        passes: passes for the sharded model; None takes those of :func:`.recipe`.
        units: modules of each ``fully_shard`` call, for the eager training and the recipe; None
            takes :func:`.transformer_block_plan`.
        shard: shards the model to compile on a mesh, in place; None takes :func:`.data_parallel`.
        nodes: reductions add in the order of NCCL's rings over these nodes; divides ``ranks``.
        replicas: with more than 1, the mesh's first dimension; divides ``ranks``.
        steps: AdamW steps. Both trainings draw the same random numbers (dropout) in a step.
        param_dtype: dtype of gathers as in FSDP2's ``MixedPrecisionPolicy``, or its name;
            ``reduce_dtype`` likewise. None keeps each parameter's dtype.
    """

    build: Callable[[], Any] | str
    passes: Callable[[nn.Module], Sequence[GraphPass]] | None = None
    units: Sequence[str | Sequence[str]] | None = None
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None
    ranks: int = 4
    nodes: int = 2
    replicas: int = 1
    steps: int = 10
    backend: Backend = "aot_eager"
    param_dtype: torch.dtype | Dtype | None = None
    reduce_dtype: torch.dtype | Dtype | None = None
    timeout_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            object.__setattr__(self, name, value and str(value).removeprefix("torch."))
        dtypes = (*get_args(Dtype), None)
        choices = {"backend": get_args(Backend), "param_dtype": dtypes, "reduce_dtype": dtypes}
        for name, accepted in choices.items():
            if (value := getattr(self, name)) not in accepted:
                listed = ", ".join(filter(None, accepted))
                raise ValueError(f"{name} must be one of {listed}, got {value!r}")
        numbers = ("ranks", "nodes", "replicas", "steps", "timeout_s")
        check_numbers(self, *numbers, divide_ranks=("nodes", "replicas"))


@dataclass(frozen=True)
class Cause:
    """One difference that alone changes the gradients of ``parameters``, in backward's order.

    ``found`` is the observation, ``advice`` the change to make.
    """

    name: str
    parameters: tuple[str, ...]
    found: str
    advice: str


@dataclass(frozen=True)
class Comparison(Report):
    """Result of training a model by eager FSDP2 and compiled."""

    equal: bool  # whether all weights have the same bits after every step, on every rank
    steps: int
    first_step: int | None = None  # the first step after which weights differ, from 1, or None
    # Parameters whose gradients differ in that step, in the order of backward.
    parameters: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()  # in the order of the experiments; empty if all is equal
    notes: tuple[str, ...] = ()  # such as warnings of the compile

    def lines(self, members: bool = True) -> list[str]:
        """List the verdict, each cause with its advice, and the notes."""
        if self.equal:
            lines = [f"EQUAL: eager FSDP2's weights after {self.steps} of {self.steps} steps."]
        else:
            lines = [
                f"DIFFERENT: other weights than eager FSDP2's after step {self.first_step} of "
                f"{self.steps}.",
                f"{len(self.parameters)} gradients differ in it; in the order of backward: "
                f"{format_names(self.parameters)}",
            ]
        for cause in self.causes:
            lines += ["", f"Cause: {cause.name}", f"  {cause.found}."]
            if cause.parameters:
                names = format_names(cause.parameters)
                lines.append(f"  It changes {len(cause.parameters)} gradients: {names}")
            lines.append(f"  To change: {cause.advice}.")
        return lines + [f"\nNote: {note}" for note in self.notes]


def whole_digest(shards: Sequence[str]) -> str:
    """Hash all weights, given the hash of each rank's shards."""
    return hashlib.sha256("".join(shards).encode()).hexdigest()
