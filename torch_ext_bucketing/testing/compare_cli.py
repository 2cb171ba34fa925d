"""Run ``python -m torch_ext_bucketing compare``, or :func:`compare` from Python."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

from .comparison import Backend, CompareOptions, Comparison, Dtype
from .ranks import Rank, RankError, run_ranks, sayer
from .target import TargetError, add_command, add_numbers, output_file

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
