"""``python -m torch_ext_bucketing demo``: options, checks, output, exit status."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from typing import Any

from ..ranks import Rank, RankError, run_ranks
from ..target import output_file
from .progress import on_messages
from .results import RankReport, combine
from .settings import Settings
from .table import render

_DESCRIPTION = """\
Train one LLaMA-style model on real text in three ways, side by side, on ranks that this command
starts on the CPU, and compare all weights after every step:

  eager FSDP2            fully_shard per block, then the root
  compiled, FSDP2 order  one collective per parameter, merged per unit by the compiler, each bucket
                         packed as FSDP2 packs its unit
  compiled, graph order  the same with each bucket packed in graph order

Reductions add in the order of NCCL's rings over the simulated nodes."""

_EPILOG = """\
exit status: 0 if the run in FSDP2's order matches eager after every step (inductor: if its layout
is eager's and it is reproducible), 1 if not or if a rank failed, 2 for bad options."""

_OPTIONS = [field for field in fields(Settings) if field.metadata]


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``demo`` to a command's subparsers; the parsed arguments carry ``run(args) -> int``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train a model on CPU ranks and compare its weights with eager FSDP2's, bit for bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in _OPTIONS:
        about = dict(option.metadata)
        about["help"] = f"{about['help']} (default: {option.default})"
        about |= {"type": type(option.default), "default": option.default, "dest": option.name}
        name = option.name.removesuffix("_s").replace("_", "-")
        parser.add_argument(f"--{name}", **about)
    parser.add_argument(
        "--json", type=output_file, metavar="FILE", help="also write the result to FILE"
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. Bad options end in ``parser.error`` (status 2)."""
    try:
        settings = Settings(**{option.name: getattr(args, option.name) for option in _OPTIONS})
    except ValueError as error:
        args.parser.error(str(error))

    try:
        reports = run_ranks(
            _train_rank,
            settings.ranks,
            settings,
            timeout_s=settings.timeout_s,
            on_message=on_messages(settings),
        )
    except RankError as error:
        print(f"{args.parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{args.parser.prog}: interrupted, all ranks ended", file=sys.stderr)
        return 130
    result = combine(settings, reports)
    print(render(result))
    if args.json is not None:
        text = json.dumps(result, indent=2) + "\n"
        try:
            args.json.write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"{args.parser.prog}: cannot write {args.json}: {error}", file=sys.stderr)
            return 1
    return 0 if result["passed"] else 1


def _train_rank(rank: Rank, settings: Settings) -> RankReport:
    # Imported by the ranks alone: this process never needs torch.
    from .train import train_rank

    return train_rank(rank, settings)
