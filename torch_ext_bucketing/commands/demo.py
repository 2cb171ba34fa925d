"""Run ``python -m torch_ext_bucketing demo``: its options, and the text of its result."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..reports.base import columns
from ..testing.comparison import whole_digest
from ..testing.ranks import Rank, run_ranks, sayer
from ..testing.target import add_command, add_numbers, check_numbers

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

LABELS = {
    "eager": "eager FSDP2",
    "fsdp_order": "compiled, FSDP2 order",
    "graph_order": "compiled, graph order",
}
_WARMUP_STEPS = 3  # not timed: compilation, lazy initialization, first touches of memory
_HASH_DIGITS = 12
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Settings:
    """Options of the demo."""

    ranks: int = 4
    nodes: int = 2
    steps: int = 25
    layers: int = 4

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks must be at least 2, got {self.ranks}")
        check_numbers(self, "nodes", "steps", "layers", divide_ranks=("nodes",))


@dataclass
class Run:
    """One run: per step hashes of all weights, mean losses, and one rank's time in milliseconds.

    ``before`` and ``after`` are collectives per step before and after bucketing.
    """

    digests: list[str]
    loss: list[float]
    step_ms: list[float]
    before: int
    after: int

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Run:
        """Combine the ranks' fields; their digests are of their own shards."""
        digests = map(whole_digest, zip(*(fields["digests"] for fields in ranks), strict=True))
        loss = map(statistics.fmean, zip(*(fields["loss"] for fields in ranks), strict=True))
        return cls(**{**ranks[0], "digests": list(digests), "loss": list(loss)})

    def unlike(self, other: Run) -> list[int]:
        """List the steps, from 1, after which weights differ."""
        pairs = zip(self.digests, other.digests, strict=True)
        return [step for step, (ours, others) in enumerate(pairs, 1) if ours != others]


def add_parser(subparsers: Any) -> None:
    """Add ``demo`` to a command's subparsers."""
    about = "train a model on CPU ranks and compare its weights with eager FSDP2's, bit for bit"
    parser = add_command(
        subparsers, "demo", run, help=about, description=_DESCRIPTION, epilog=_EPILOG
    )
    texts = {
        "ranks": "processes to start",
        "nodes": "simulated nodes; divides the ranks",
        "steps": "optimizer steps",
        "layers": "transformer blocks",
    }
    add_numbers(parser, Settings, texts)


def run(args: argparse.Namespace) -> int:
    """Run the demo; return the exit status."""
    try:
        settings = Settings(args.ranks, args.nodes, args.steps, args.layers)
    except ValueError as error:
        args.parser.error(str(error))
    say = sayer()
    say(f"starting {settings.ranks} ranks")
    by_rank = run_ranks(
        _train_rank,
        settings.ranks,
        settings,
        timeout_s=_TIMEOUT_S,
        on_message=lambda rank, text: say(text),
    )
    result = {name: Run.of([runs[name] for runs in by_rank]) for name in LABELS}
    print(text_of(settings, result))
    return 0 if result["fsdp_order"].digests == result["eager"].digests else 1


def _train_rank(rank: Rank, settings: Settings) -> dict[str, dict[str, Any]]:
    # Only ranks import torch.
    from ..testing.ring import RingTopology, ring_rank
    from .demo_train import train_rank

    with ring_rank(rank, RingTopology(settings.ranks // settings.nodes)):
        return train_rank(rank, settings.steps, settings.layers, LABELS)


def text_of(settings: Settings, runs: Mapping[str, Run]) -> str:
    """Format the hashes, a table of the runs, and the verdict."""
    eager, steps = runs["eager"], settings.steps
    heading = (
        f"LLaMA-style model of {settings.layers} blocks in bf16, AdamW; {settings.ranks} ranks on "
        f"{settings.nodes} simulated nodes; torch {metadata.version('torch')}"
    )
    hashes = [["step", *LABELS.values()]]
    for step, (of_eager, *others) in enumerate(
        zip(*(runs[name].digests for name in LABELS), strict=True), 1
    ):
        cells = ["equal" if h == of_eager else h[:_HASH_DIGITS] for h in others]
        hashes.append([f"{step:>4}", of_eager[:_HASH_DIGITS], *cells])
    table = [
        ["", "collectives", "per step", "loss", "", "weights equal", "first", "step time"],
        ["", "before", "after", "step 1", f"step {steps}", "to eager", "difference", "/ eager"],
    ]
    for name, run in runs.items():
        unlike = run.unlike(eager)
        equal = [f"{steps - len(unlike)} of {steps}", f"step {unlike[0]}" if unlike else "none"]
        table.append(
            [
                LABELS[name],
                str(run.before),
                str(run.after),
                f"{run.loss[0]:.6f}",
                f"{run.loss[-1]:.6f}",
                *(["", ""] if name == "eager" else equal),
                f"{_median_ms(run) / _median_ms(eager):.2f}",
            ]
        )
    about = f"sha256 of all weights after each step (first {_HASH_DIGITS} digits)"
    passed = not runs["fsdp_order"].unlike(eager)
    verdict = f"{'PASS' if passed else 'FAIL'}: FSDP2's payload order must give eager's weights."
    if not runs["graph_order"].unlike(eager):
        verdict += (
            " The control, graph order, gives them, too: on one node all channels have the same "
            "ring, with two ranks a + b is b + a, and a few steps may be equal by chance."
        )
    return "\n\n".join([heading, f"{about}\n{columns(hashes)}", columns(table), verdict])


def _median_ms(run: Run) -> float:
    return statistics.median(run.step_ms[min(_WARMUP_STEPS, len(run.step_ms) - 1) :])
