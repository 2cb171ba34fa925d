"""``python -m torch_ext_bucketing demo``: options, checks, output, exit status."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..ranks import Rank, RankError, run_ranks
from .progress import Progress
from .results import RankReport, combine
from .settings import BACKENDS, REDUCE_DTYPES, Settings
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


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add ``demo`` to a command's subparsers; the parsed arguments carry ``run(args) -> int``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "demo",
        help="train a model on CPU ranks and compare its weights with eager FSDP2's, bit for bit",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Settings()

    def option(name: str, kind: type, text: str, **more: Any) -> None:
        value = getattr(default, more.get("dest", name.replace("-", "_")))
        parser.add_argument(
            f"--{name}", type=kind, default=value, help=f"{text} (default: {value})", **more
        )

    option("ranks", int, "processes to start", metavar="N")
    option("nodes", int, "simulated nodes; divides the ranks", metavar="N")
    option("steps", int, "optimizer steps", metavar="N")
    option("layers", int, "transformer blocks", metavar="N")
    option("dim", int, "model width, a multiple of 64", metavar="N")
    option("backend", str, "what compiles the graphs", choices=BACKENDS)
    option("reduce-dtype", str, "dtype that gradients are reduced in", choices=REDUCE_DTYPES)
    option("seed", int, "of the weights and of the choice of text", metavar="N")
    option("timeout", float, "limit in seconds for all", metavar="S", dest="timeout_s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to FILE")
    parser.set_defaults(run=run, parser=parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status. Bad options end in ``parser.error`` (status 2)."""
    try:
        settings = Settings(
            ranks=args.ranks,
            nodes=args.nodes,
            steps=args.steps,
            layers=args.layers,
            dim=args.dim,
            backend=args.backend,
            reduce_dtype=args.reduce_dtype,
            seed=args.seed,
            timeout_s=args.timeout_s,
        )
        if args.json is not None:
            _check_writable(args.json)
    except ValueError as error:
        args.parser.error(str(error))

    progress = Progress(settings)
    progress.start()
    try:
        reports = run_ranks(
            _train_rank,
            settings.ranks,
            settings,
            timeout_s=settings.timeout_s,
            on_message=progress.on_message,
        )
    except RankError as error:
        progress.end()
        print(f"{args.parser.prog}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        progress.end()
        print(f"{args.parser.prog}: interrupted, all ranks ended", file=sys.stderr)
        return 130
    progress.end()
    result = combine(settings, reports)
    print(render(result))
    if args.json is not None:
        try:
            _write(args.json, result)
        except OSError as error:
            print(f"{args.parser.prog}: cannot write {args.json}: {error}", file=sys.stderr)
            return 1
    return 0 if result["passed"] else 1


def _train_rank(rank: Rank, settings: Settings) -> RankReport:
    # Imported by the ranks alone: this process never needs torch.
    from .train import train_rank

    return train_rank(rank, settings)


def _check_writable(path: Path) -> None:
    """Find out before minutes of work whether the result can be written after them."""
    folder = path.parent
    if path.is_dir():
        raise ValueError(f"--json: {path} is a folder; name a file")
    if not folder.is_dir():
        raise ValueError(f"--json: the folder {folder} does not exist; create it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--json: no permission to write {path}")


def _write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
