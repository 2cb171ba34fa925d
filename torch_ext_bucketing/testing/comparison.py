"""What :func:`.compare` found: data, and its words. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..fqns import format_names
from ..reports.base import Report
from .target import option

if TYPE_CHECKING:
    import torch
    import torch.nn as nn
    from torch.distributed.device_mesh import DeviceMesh

    from ..passes.base import GraphPass

Backend = Literal["aot_eager", "inductor"]
Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class Options:
    """What is compared, and how; what is not told below, the options' texts say. Functions travel
    to the ranks by name: they have to be importable there.

    Args:
        build: a function, or ``"module:function"``. Every rank calls it, seeded by the rank. It
            returns ``(model, inputs)`` or ``(model, inputs, loss)``: the model before it is
            sharded, of which all take rank 0's weights; ``inputs``, a tensor, a tuple or a dict of
            what the model is called with, or a callable of step (from 0) and rank that returns one;
            ``loss(output, inputs)``, by default the output, or its ``.loss``.
        passes: of the sharded model; None for :func:`.recipe`'s.
        units: the modules of each ``fully_shard`` call of the eager training, and of the recipe;
            None takes :func:`.transformer_block_plan`'s.
        shard: of the model and the mesh, shards what is compiled, in place; None for
            :func:`.data_parallel`.
        nodes: reductions add in the order of NCCL's rings over them.
        replicas: divides ``ranks``; with more than 1 the mesh has the replicas first.
        steps: of AdamW. Random numbers of a step (dropout) are the same both ways.
        param_dtype: as of FSDP2's ``MixedPrecisionPolicy``, or its name, like ``reduce_dtype``;
            None: each parameter's.

    Raises:
        ValueError: a value is out of range; the message starts with the option's name.
    """

    build: Callable[[], Any] | str
    passes: Callable[[nn.Module], Sequence[GraphPass]] | None = None
    units: Sequence[str | Sequence[str]] | None = None
    shard: Callable[[nn.Module, DeviceMesh], object] | None = None
    ranks: int = option(4, "processes to start")
    nodes: int = option(2, "simulated nodes; divides the ranks")
    replicas: int = option(1, "hybrid sharding: groups of ranks that each hold the whole model")
    steps: int = option(10, "optimizer steps")
    backend: Backend = option("aot_eager", "what compiles", choices=get_args(Backend))  # noqa: RUF009
    param_dtype: torch.dtype | Dtype | None = option(None, "of gathers", choices=get_args(Dtype))  # noqa: RUF009
    reduce_dtype: torch.dtype | Dtype | None = option(  # noqa: RUF009
        None, "of reductions", choices=get_args(Dtype)
    )
    timeout_s: float = option(900.0, "limit in seconds for all", "S")

    def __post_init__(self) -> None:
        for name in ("ranks", "nodes", "replicas", "steps", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("nodes", "replicas"):
            if self.ranks % getattr(self, name):
                raise ValueError(
                    f"{name} must divide ranks ({self.ranks}) evenly, got {getattr(self, name)}"
                )
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            object.__setattr__(self, name, value and str(value).removeprefix("torch."))
        for name, known in (("backend", Backend), ("param_dtype", Dtype), ("reduce_dtype", Dtype)):
            value = getattr(self, name)
            if value not in get_args(known) and (value is not None or name == "backend"):
                raise ValueError(
                    f"{name} must be one of {', '.join(get_args(known))}, got {value!r}"
                )


@dataclass(frozen=True)
class Cause:
    """One thing that, switched alone, changes the gradients of ``parameters``, the first in
    backward first: its name in a word or two, what was seen, and what to change."""

    name: str
    parameters: tuple[str, ...]
    found: str
    advice: str


@dataclass(frozen=True)
class Comparison(Report):
    """A model trained by eager FSDP2, and compiled: whether all weights are the same bits after
    every step, on every rank.

    Args:
        steps: that were asked for.
        first_step: the first step after which weights differ, from 1; None where none does.
        parameters: those with another gradient in that step, the first in backward first.
        causes: in the order in which they are looked for; empty where all is equal.
        notes: what else to know, such as warnings of the compile.
    """

    equal: bool
    steps: int
    first_step: int | None = None
    parameters: tuple[str, ...] = ()
    causes: tuple[Cause, ...] = ()
    notes: tuple[str, ...] = ()

    def to_text(self) -> str:
        """The verdict, each cause with what to change, and the notes."""
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
        lines += [f"\nNote: {note}" for note in self.notes]
        return "\n".join(lines) + "\n"
