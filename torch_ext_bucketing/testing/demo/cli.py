"""``python -m torch_ext_bucketing demo``: options, checks, progress, output, exit status."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from ..ranks import Rank, run_ranks, sayer
from ..target import add_command, add_options, options_of
from .results import RankReport, combine
from .settings import Settings
from .table import label, render

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


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to a command's subparsers."""
    about = "train a model on CPU ranks and compare its weights with eager FSDP2's, bit for bit"
    parser = add_command(
        subparsers, "demo", run, help=about, description=_DESCRIPTION, epilog=_EPILOG
    )
    add_options(parser, Settings)


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    settings = options_of(args, Settings)
    reports = run_ranks(
        _train_rank,
        settings.ranks,
        settings,
        timeout_s=settings.timeout_s,
        on_message=_progress(settings),
    )
    result = combine(settings, reports)
    print(render(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if result["passed"] else 1


def _train_rank(rank: Rank, settings: Settings) -> RankReport:
    # Imported by the ranks alone: this process never needs torch.
    from ..ring import RingTopology, ring_rank
    from .train import train_rank

    per_node = settings.ranks // settings.nodes
    with ring_rank(rank, RingTopology(per_node, settings.channels, settings.chunk_bytes)):
        return train_rank(rank, settings)


def _progress(settings: Settings) -> Callable[[int, tuple[int, str, str]], None]:
    """Takes each rank's ``(step, run, digest)``, step 0 before a run begins, and says how far the
    runs are and how often they were equal."""
    say, steps = sayer(), settings.steps
    shards: dict[tuple[int, str], dict[int, str]] = {}
    equal: dict[str, int] = {}
    say(f"starting {settings.ranks} ranks")

    def on_message(rank: int, message: tuple[int, str, str]) -> None:
        step, run, digest = message
        if run not in equal:
            equal[run] = 0
            say(f"first step of: {label(run)}")
        mine = shards.setdefault((step, run), {})
        mine[rank] = digest
        if step == 0 or len(mine) < settings.ranks:
            return
        equal[run] += mine == shards[step, "eager"]
        if run == list(equal)[-1] and (step % max(1, steps // 5) == 0 or step == steps):
            found = "; ".join(f"{label(name)}: {n}" for name, n in equal.items() if name != "eager")
            say(f"step {step} of {steps}, equal to eager so far: {found}")

    return on_message
