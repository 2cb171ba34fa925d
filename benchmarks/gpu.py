"""Run the checks of the other benchmarks on GPUs in a few minutes.

    python -m benchmarks.gpu                            one to eight cards, at most 8 minutes
    python -m benchmarks.gpu --only bits,steps          some of the parts
    python -m benchmarks.gpu --device cpu --quick       the same commands on CPU ranks, small

The parts are commands of their own, with a share of the time each:

- ``attention``: Inductor under a bound on memory with each attention kernel: compiles, peaks,
  losses (``attention_ranks``);
- ``rows``: weights against eager FSDP2's with clipping and optimizers in the planned step, Muon,
  and under bounds on memory (``parity.py``);
- ``bits``: the same with FSDP, HSDP and tensor parallelism alone;
- ``parking``: a step with activations in host memory beside one without, on torch 2.13 and later
  (``attention_ranks --park``);
- ``steps``: times and memory of steps of eager FSDP2, torch and ours, one of them tuned; times
  of collectives and of the host, as measured for the machine model; its steps beside the
  measured (``train``);
- ``peaks``: memory that ranks allocate against the estimate (``keep_ranks``);
- ``float8``: weights with gathers in float8, on cards that have it (needs torchao);
- ``sums``: one result of gradients added in rank order by all-to-alls (``rank_order.py``).

The most valuable part comes first. What a part leaves of its time is given to the next one.
With fewer cards than ranks the ranks share them, each as a host of its own
(``.eager_parity.devices``); times say nothing of a real network then. Everything goes to one text
file with versions, date and command, which is complete after every part.

Exit status: 0 if all parts pass, 1 if one fails or runs out of time, 2 for bad options.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.eager_parity.devices import why_no_nccl

from .command import add_names, add_number, document_of, parser_of, sayer, title

ROOT = Path(__file__).resolve().parent.parent
PARITY_ROWS = (
    "step/clip/adamw",
    "muon/fsdp",
    "memory/llama/1.1",
    "step/clip/moe",
    "muon/experts_hsdp",
    "memory/moe/1.5",
    "step/clip/hsdp",
    "step/clip/fsdp+tp",
    "step/adamw_fused",
    "muon/hsdp",
)
"""Rows of four ranks."""
FLOAT8_SINCE = (8, 9)
"""Compute capability of the first cards with products in float8 (Ada; Hopper has 9.0)."""


@dataclass(frozen=True)
class Part:
    """One command and the most seconds that it may take."""

    command: str
    limit_s: int
    why_left_out: str = ""


def parts(device: str, ranks: int, quick: bool) -> dict[str, Part]:
    """Return the parts by name."""
    on = f"--device {device}"
    steps = 1 if quick else 5
    sizes = "--layers 4 --dim 1024 --batch 8 --seq 256 --steps 10"
    if quick:
        sizes = "--layers 1 --dim 64 --batch 1 --seq 32 --steps 2 --ways units,tuned"
    cells = f"--topologies {ranks // 2}x2 --models llama --reduce-dtype bf16"
    kinds = f"--backends aot_eager --parallelism {'fsdp' if quick else 'fsdp,hsdp,fsdp+tp'}"
    run = f"benchmarks/parity.py {on} --steps {steps}"
    attention = f"-m benchmarks.attention_ranks {on}"
    # A kernel that hangs leaves time for the next one.
    small = " --quick --kernels math --backend aot_eager" if quick else " --timeout 65"
    return {
        "attention": Part(f"{attention} --ratios 1.0{small}", 130),
        "rows": Part(f"{run} --rows {','.join(PARITY_ROWS[:1] if quick else PARITY_ROWS)}", 100),
        "bits": Part(f"{run} {cells} {kinds}", 50),
        "parking": Part(
            f"{attention} --park --ratios --kernels flash --backend aot_eager{' --quick' * quick}",
            30,
            why_no_parking(),
        ),
        "steps": Part(
            f"-m benchmarks.train {on} --ranks {ranks} --backend aot_eager --predict {sizes}",
            80,
        ),
        "peaks": Part(f"-m benchmarks.keep_ranks {on} --world {ranks} --ratios 1.06", 30),
        "float8": Part(f"{run} --rows 'float8/*'", 30, why_no_float8(device)),
        "sums": Part(
            f"benchmarks/rank_order.py {on} --models llama --topologies 2x2 --schedules overlap "
            f"--steps {steps}",
            30,
        ),
    }


def why_no_parking() -> str:
    """Return why nothing can be parked here, ``""`` if it can."""
    if find_spec("torch._functorch._activation_offloading") is None:
        return f"torch {torch.__version__} has no copies to host memory in graphs"
    return ""


def why_no_float8(device: str) -> str:
    """Return why float8 is left out here, ``""`` if it is not."""
    if find_spec("torchao") is None:
        return "needs torchao, which is not installed"
    if device == "cuda" and (has := torch.cuda.get_device_capability()) < FLOAT8_SINCE:
        return f"the card has compute capability {has}, products in float8 need {FLOAT8_SINCE}"
    return ""


def used_cards(visible: Sequence[str]) -> list[str]:
    """Return the cards to use: as many as can share 4 or 8 ranks evenly."""
    return list(visible[: max(n for n in (1, 2, 4, 8) if n <= len(visible))])


def visible_cards() -> list[str]:
    """Return the cards as ``CUDA_VISIBLE_DEVICES`` names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    count = torch.cuda.device_count()
    return given.split(",")[:count] if given else [str(number) for number in range(count)]


def run(part: Part, environment: dict[str, str], limit_s: float) -> tuple[str, str]:
    """Run a part's command; return its output and a verdict."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *shlex.split(part.command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
        verdict = "passed" if process.returncode == 0 else f"FAILED, status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        output, errors = process.communicate()
        verdict = f"FAILED, not finished after {limit_s:.0f} s"
    if verdict != "passed":
        output += f"\n{errors[-4000:]}"
    return output.strip(), f"{verdict} ({time.monotonic() - begin:.0f} s)"


def heading(argv: Sequence[str] | None, device: str, ranks: int, cards: Sequence[str]) -> str:
    """Return date, versions, command and machine, the first lines of the results."""
    document: dict[str, Any] = document_of("python -m benchmarks.gpu", argv)
    lines = [title(document)]
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        lines.append(f"CUDA {torch.version.cuda}, NCCL {nccl}, {torch.cuda.get_device_name()}")
    if find_spec("torchao") is not None:
        lines.append(f"torchao {version('torchao')}")
    shared = f"on {len(cards)} cards" if cards else "on the CPU"
    return "\n".join([*lines, f"{ranks} ranks {shared}"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    cuda = args.device == "cuda"
    if cuda and (why := why_no_nccl()):
        parser.error(f"{why}; --device cpu runs the same commands on CPU ranks")
    cards = used_cards(visible_cards()) if cuda else []
    ranks = max(4, len(cards))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ",".join(cards)} if cuda else {})
    begin = time.monotonic()
    say = sayer(begin)
    texts, failed = [heading(argv, args.device, ranks, cards)], False
    until = begin
    for name, part in parts(args.device, ranks, args.quick).items():
        if name not in args.only:
            continue
        command = f"python {part.command}".rstrip()
        until += part.limit_s * args.seconds / 480  # a share grows with the time for all
        left_s = begin + args.seconds - time.monotonic()
        if part.why_left_out or left_s < 1:
            output, verdict = "", f"left out: {part.why_left_out or 'no time is left'}"
            failed = failed or not part.why_left_out
        else:
            limit_s = max(until - time.monotonic(), part.limit_s * args.seconds / 480)
            output, verdict = run(part, environment, min(left_s, limit_s))
            failed = failed or not verdict.startswith("passed")
        say(f"{name}: {verdict}")
        texts.append(f"## {name}: {verdict}\n\n{command}\n\n{output}".rstrip())
        args.results.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    print("\n\n".join(texts))
    say(f"results: {args.results}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m benchmarks.gpu", __doc__)
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="NCCL or CPU ranks (default: cuda)",
    )
    add_names(parser, "only", tuple(parts("cpu", 4, False)), "parts")
    parser.add_argument("--quick", action="store_true", help="fewer steps and smaller models")
    add_number(parser, "seconds", 480, "the most that all parts take")
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("gpu.txt"),
        metavar="FILE",
        help="the text file of the results (default: gpu.txt)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
