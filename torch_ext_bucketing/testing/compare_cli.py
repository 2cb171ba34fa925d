"""``python -m torch_ext_bucketing compare``, and the same from Python: :func:`compare`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_args

from .comparison import Backend, Comparison, Dtype, Options
from .ranks import Rank, RankError, run_ranks, sayer
from .target import TargetError, output_file

_DESCRIPTION = """\
Train a model as eager FSDP2 and compiled with recipe(model), on CPU ranks that this command
starts, and compare all weights after every step, bit for bit. Where they differ, say why, and what
to change.

MODULE:FUNCTION is called without arguments on every rank. It returns (model, inputs) or (model,
inputs, loss): the model is not sharded; inputs are a tensor, a tuple or a dict, or a callable of
step and rank that returns one; loss(output, inputs) defaults to the output, or its .loss.

Reductions add in the order of NCCL's rings over the simulated nodes."""

_EPILOG = """\
exit status: 0 if the weights are equal, 1 if not or if a rank failed, 2 for bad options."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``compare`` to a command's subparsers; the arguments carry ``run(args) -> int``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "compare",
        help="train a model of yours as eager FSDP2 and compiled, and say why weights differ",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("build", metavar="MODULE:FUNCTION", help="makes the model and its inputs")
    for name, text in (
        ("ranks", "processes to start"),
        ("nodes", "simulated nodes; divides the ranks"),
        ("replicas", "hybrid sharding: groups of ranks that each hold the whole model"),
        ("steps", "optimizer steps"),
    ):
        value = getattr(Options, name)
        parser.add_argument(
            f"--{name}", type=int, default=value, metavar="N", help=f"{text} (default: {value})"
        )
    parser.add_argument("--backend", choices=get_args(Backend), default=Options.backend)
    for name in ("param-dtype", "reduce-dtype"):
        parser.add_argument(f"--{name}", choices=get_args(Dtype), help="default: the parameters'")
    parser.add_argument("--timeout", type=float, default=Options.timeout_s, dest="timeout_s")
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the result to FILE"
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compare; returns the exit status. Bad options end in ``parser.error`` (status 2)."""
    given = {f.name: getattr(args, f.name) for f in fields(Options) if hasattr(args, f.name)}
    try:
        options = Options(**given)
    except ValueError as error:
        args.parser.error(str(error))
    try:
        found = _compare(options, sayer())
        print(found.to_text(), end="")
        if args.json is not None:
            args.json.write_text(found.to_json() + "\n", encoding="utf-8")
    except (TargetError, RankError, OSError) as error:
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0 if found.equal else 1


def compare(
    build: Callable[[], Any] | str,
    *,
    progress: Callable[[str], object] = lambda line: None,
    **options: Any,
) -> Comparison:
    """Train a model as eager FSDP2 and compiled, side by side on CPU ranks, and say why weights
    differ, if they do.

    Args:
        build: returns the model and its inputs, see :class:`.Options`.
        progress: gets a line of text for each thing that is done next.
        options: the other fields of :class:`.Options`.

    Raises:
        TargetError: ``build`` is not found or raises, or its result can't be trained.
        TypeError: an unknown option.
        ValueError: as of :class:`.Options`.
        RankError: a rank failed or was too slow.
    """
    return _compare(Options(build, **options), progress)


def _compare(options: Options, progress: Callable[[str], object]) -> Comparison:
    errors: list[TargetError] = []

    def on_message(rank: int, message: str | TargetError) -> None:
        if isinstance(message, TargetError):
            errors.append(message)
        else:
            progress(message)

    progress(f"starting {options.ranks} ranks")
    try:
        found = run_ranks(
            _on_rank, options.ranks, options, timeout_s=options.timeout_s, on_message=on_message
        )
    except RankError:
        if errors:
            raise errors[0] from None
        raise
    return found[0]


def _on_rank(rank: Rank, options: Options) -> Comparison:
    # Imported by the ranks alone: the command's process never needs torch.
    from .experiments import compare_on_rank
    from .ring import RingTopology, ring_rank

    with ring_rank(rank, RingTopology(ranks_per_node=options.ranks // options.nodes)):
        try:
            return compare_on_rank(rank, options)
        except TargetError as error:
            rank.send(error)
            raise
