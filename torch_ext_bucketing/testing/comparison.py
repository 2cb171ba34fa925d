"""Define the options, the result and the command of :func:`compare`, without importing torch."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..fqns import format_names
from ..reports.base import Report
from .ranks import Rank, RankError, run_ranks, sayer
from .target import TargetError, add_command, add_numbers, check_numbers, output_file

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


_DESCRIPTION = """\
Train a model as eager FSDP2 and compiled with recipe(model), on CPU ranks that this command
starts, and compare all weights after every step, bit for bit. If they differ, print the causes and
what to change.

MODULE:FUNCTION is called without arguments on every rank. It returns (model, inputs) or (model,
inputs, loss): the model is not sharded; inputs are a tensor, a tuple or a dict, or a callable of
step and rank that returns one; loss(output, inputs) defaults to the output, or its .loss.

Reductions add in the order of NCCL's rings over the simulated nodes."""

_EPILOG = """\
exit status: 0 if the weights are equal, 1 if not or if a rank failed, 2 for bad options."""


def add_parser(subparsers: Any) -> None:
    """Add ``compare`` to a command's subparsers."""
    about = "train your model as eager FSDP2 and compiled, and find why weights differ"
    parser = add_command(
        subparsers, "compare", run, help=about, description=_DESCRIPTION, epilog=_EPILOG
    )
    parser.add_argument("build", metavar="MODULE:FUNCTION", help="makes the model and its inputs")
    texts = {
        "ranks": "processes to start",
        "nodes": "simulated nodes; divides the ranks",
        "replicas": "hybrid sharding: groups of ranks that each hold the whole model",
        "steps": "optimizer steps",
        "timeout_s": "limit in seconds for all",
    }
    add_numbers(parser, CompareOptions, texts)
    option, dtypes = parser.add_argument, get_args(Dtype)
    option("--backend", choices=get_args(Backend), help="what compiles (default: aot_eager)")
    option("--param-dtype", choices=dtypes, help="of gathers (default: the parameters')")
    option("--reduce-dtype", choices=dtypes, help="of reductions (default: the parameters')")
    option("--json", type=output_file, metavar="FILE", help="also write the result to FILE")


def run(args: argparse.Namespace) -> int:
    """Compare; return the exit status."""
    names = [f.name for f in fields(CompareOptions) if getattr(args, f.name, None) is not None]
    try:
        options = CompareOptions(**{name: getattr(args, name) for name in names})
    except ValueError as error:
        args.parser.error(str(error))
    result = _compare(options, sayer())
    print(result.to_text(), end="")
    if args.json is not None:
        args.json.write_text(result.to_json() + "\n", encoding="utf-8")
    return 0 if result.equal else 1


def compare(
    build: Callable[[], Any] | str,
    *,
    progress: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> Comparison:
    """Train a model as eager FSDP2 and compiled on CPU ranks, and find why weights differ.

    A ``TargetError`` means that ``build`` can't be imported or trained, a ``RankError`` that a rank
    failed or was too slow.

    Args:
        build: returns the model and its inputs; see :class:`.CompareOptions`.
        progress: called with lines of text.
        options: other fields of :class:`.CompareOptions`.
    """
    return _compare(CompareOptions(build, **options), progress)


def _compare(options: CompareOptions, progress: Callable[[str], object]) -> Comparison:
    errors: list[TargetError] = []

    def on_message(rank: int, message: str | TargetError) -> None:
        if isinstance(message, TargetError):
            errors.append(message)
        else:
            progress(message)

    progress(f"starting {options.ranks} ranks")
    try:
        return run_ranks(
            _on_rank, options.ranks, options, timeout_s=options.timeout_s, on_message=on_message
        )[0]
    except RankError:
        if errors:
            raise errors[0] from None
        raise


def _on_rank(rank: Rank, options: CompareOptions) -> Comparison:
    # Only ranks import torch.
    from .experiments import compare_on_rank
    from .ring import RingTopology, ring_rank

    with ring_rank(rank, RingTopology(ranks_per_node=options.ranks // options.nodes)):
        try:
            return compare_on_rank(rank, options)
        except TargetError as error:
            rank.send(error)
            raise
