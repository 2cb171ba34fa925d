"""Random small models, plans and policies, one after the other in the same processes.

    python -m benchmarks.soak                                   200 models on 2 ranks
    python -m benchmarks.soak --models 20 --minutes 5 --seed 7
    python -m benchmarks.soak --models 5 --wrong-order          the control: has to find mismatches

Each model is trained by eager FSDP2 and compiled, with random units, dtypes, caps, spans, bounds
and resharding (:mod:`.soak_ranks`), on a process group that adds in the order of simulated rings.
With ``aot_eager`` weights and losses must be equal bit for bit after every step, and every bucket's
members and byte offsets FSDP2's; with Inductor, whose kernels round differently, the latter.
Resident memory is read after each model, when what torch itself keeps of every compile has been
dropped. What remains of a model, or of its backend, counts as a failure, and so does growth above
``--growth-mib`` per model over the last half of the run.

Exit status: 0, 1 where anything mismatched, was kept or grew, 2 for bad options.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.command import add_json, add_number, document_of, parser_of, title, write_json
from torch_ext_bucketing.testing.ranks import Rank, RankError, preload, run_ranks

_MIB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("models", "steps", "ranks"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.ranks % 2:
        parser.error(f"--ranks must be even, for two simulated nodes, got {args.ranks}")
    if not args.minutes > 0:
        parser.error(f"--minutes must be positive, got {args.minutes}")
    try:
        result = run(args)
    except RankError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    write_json(args.json, result)
    print(render(result))
    return 1 if result["failures"] else 0


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One group of ranks from start to end."""
    cases: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    begin = time.monotonic()

    def on_message(rank: int, message: Any) -> None:
        if isinstance(message, tuple):
            texts[rank] = message[1]
            return
        if message.mismatches or message.kept_alive:
            found = [*message.mismatches, *(f"kept alive: {w}" for w in message.kept_alive)]
            print(f"rank {rank}, {message.text}: {'; '.join(found)[:2000]}", file=sys.stderr)
        cases.append({"rank": rank, **asdict(message)})
        if rank == 0 and message.index % 10 == 9:
            now, mib = time.monotonic() - begin, message.rss_bytes / _MIB
            print(f"[{now:5.0f} s] model {message.index}: {mib:.0f} MiB", file=sys.stderr)

    try:
        run_ranks(
            _rank,
            args.ranks,
            args,
            timeout_s=60 * args.minutes + 300,
            # torch's flight recorder keeps the code that launched a collective, and so models.
            environment={"TORCH_FR_BUFFER_SIZE": "0"},
            on_message=on_message,
        )
    except RankError as error:
        raise RankError(f"{error}\nlast started: {texts.get(0, 'none')}") from error
    return _summed(args, cases, time.monotonic() - begin)


def _rank(rank: Rank, args: argparse.Namespace) -> None:
    # Imported by the ranks alone: this process never needs torch.
    from .soak_ranks import soak_rank

    soak_rank(rank, args)


def _summed(
    args: argparse.Namespace, cases: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    mine = [c for c in cases if c["rank"] == 0]
    growth = _growth_mib([c["rss_bytes"] for c in mine])
    mismatches = sum(len(c["mismatches"]) for c in cases)
    kept = sum(len(c["kept_alive"]) for c in cases)
    failures = [f"{mismatches} mismatches"] if mismatches else []
    failures += [f"{kept} objects were kept alive"] if kept else []
    if growth is not None and growth > args.growth_mib:
        failures.append(f"memory grows by {growth:.2f} MiB per model, above {args.growth_mib}")
    if len(mine) < args.models:
        print(f"soak: time was up after {len(mine)} of {args.models} models", file=sys.stderr)
    return {
        **document_of("python -m benchmarks.soak", None),
        "ranks": args.ranks,
        "models": len(mine),
        "steps": sum(c["steps"] for c in mine),
        "buckets": sum(c["buckets"] for c in mine),
        "collectives": [sum(c["collectives"][i] for c in mine) for i in (0, 1)],
        "mismatches": mismatches,
        "kept_alive": kept,
        "rss_mib": [round(c["rss_bytes"] / _MIB) for c in mine[:: max(1, len(mine) - 1)]],
        "growth_mib_per_model": growth,
        "seconds": seconds,
        "failures": failures,
        "cases": cases,
    }


def _growth_mib(resident: Sequence[int]) -> float | None:
    """MiB per model over the last half, by the medians of its two halves; None for short runs."""
    late = resident[len(resident) // 2 :]
    if len(late) < 10:
        return None
    half = len(late) // 2
    rise = statistics.median(late[-half:]) - statistics.median(late[:half])
    return float(rise / (len(late) - half) / _MIB)


def render(result: dict[str, Any]) -> str:
    """What was done and found, in a few lines."""
    before, after = result["collectives"]
    growth = result["growth_mib_per_model"]
    rose = "too short a run to tell its growth" if growth is None else f"{growth:+.2f} per model"
    lines = [
        title(result),
        "",
        f"models      {result['models']}, on {result['ranks']} ranks, in {result['seconds']:.0f} s",
        f"steps       {result['steps']}",
        f"buckets     {result['buckets']}, of {before} collectives {after} are left",
        f"mismatches  {result['mismatches']}",
        f"kept alive  {result['kept_alive']}",
        f"memory      {' to '.join(map(str, result['rss_mib']))} MiB, over the last half {rose}",
        "",
        "FAIL: " + "; ".join(result["failures"]) if result["failures"] else "PASS",
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("python -m benchmarks.soak", __doc__)
    add_number(parser, "models", 200, "models")
    add_number(parser, "ranks", 2, "ranks, an even number")
    add_number(parser, "steps", 3, "optimizer steps of each")
    add_number(parser, "seed", 0, "of all models")
    add_number(parser, "first", 0, "number of the first model")
    add_number(parser, "inductor-every", 20, "every so many models one for Inductor, 0: none")
    parser.add_argument("--minutes", type=float, default=60.0, metavar="M", help="default: 60")
    parser.add_argument(
        "--growth-mib", type=float, default=0.5, metavar="MIB", help="per model (default: 0.5)"
    )
    parser.add_argument("--wrong-order", action="store_true", help="pack in reverse: the control")
    add_json(parser, "also write all cases to FILE")
    return parser


if __name__ == "__main__":
    preload("benchmarks.soak_ranks")
    sys.exit(main())
