"""Run ``python -m torch_ext_bucketing demo``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..testing.ranks import Rank, run_ranks, sayer
from ..testing.target import add_command, add_options, options_of
from .demo_results import RankReport, Settings, demo_result, render

_DESCRIPTION = """\
Train one LLaMA-style model on real text in three ways, side by side, on ranks that this command
starts on the CPU, and compare all weights after every step:

  eager FSDP2            fully_shard per block, then the root
  compiled, FSDP2 order  one collective per parameter, merged per unit by the compiler, each bucket
                         packed as FSDP2 packs its unit
  compiled, graph order  the same with each bucket packed in graph order

Reductions add in the order of NCCL's rings over the simulated nodes."""

_EPILOG = """\
exit status: 0 if the run in FSDP2's order equals eager after every step, 1 if not or if a rank
failed, 2 for bad options."""


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to a command's subparsers."""
    about = "train a model on CPU ranks and compare its weights with eager FSDP2's, bit for bit"
    parser = add_command(
        subparsers, "demo", run, help=about, description=_DESCRIPTION, epilog=_EPILOG
    )
    add_options(parser, Settings)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    settings, say = options_of(args, Settings), sayer()
    say(f"starting {settings.ranks} ranks")
    reports = run_ranks(
        _train_rank,
        settings.ranks,
        settings,
        timeout_s=settings.timeout_s,
        on_message=lambda rank, text: say(text),
    )
    result = demo_result(settings, reports)
    print(render(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


def _train_rank(rank: Rank, settings: Settings) -> RankReport:
    # Only ranks import torch.
    from ..testing.ring import RingTopology, ring_rank
    from .demo_train import train_rank

    per_node = settings.ranks // settings.nodes
    with ring_rank(rank, RingTopology(per_node, settings.channels, settings.chunk_bytes)):
        return train_rank(rank, settings)
