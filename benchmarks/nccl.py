"""Parity with eager FSDP2, step time and memory on real NCCL, in one call.

    python benchmarks/nccl.py
    python benchmarks/nccl.py --ranks 4 --only '4/hsdp/inductor/*' --json nccl.json
    python benchmarks/nccl.py --backend gloo --ranks 2 --steps 3

Trains one model with eager FSDP2 and compiled: without buckets, with the unpatched torch's buckets,
and with ours, payload order off and on; FSDP and HSDP; ``aot_eager`` and ``inductor``. After every
step the weights of all ranks are hashed. With a GPU for every rank each takes one; otherwise the
ranks share what there is, as separate simulated hosts that talk over the loopback interface. Step
times of ranks that share a GPU say nothing of a real network.

Exit status: 0 if the weights of every run in FSDP2's payload order are eager FSDP2's, bit for bit,
after every step (with ATen's kernels in place of Inductor's where those round differently), 1 if
not, or if a rank failed or the time was up, 2 for bad options or where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.nccl_cells import (
    Key,
    RunResult,
    Settings,
    combine,
    problems,
    render,
    select,
    soft_limit,
)
from torch_ext_bucketing.testing.ranks import Rank, RankError, run_ranks

SIZES = {
    # layers, width, sequences per rank and step
    "nccl": (1, 1024, 16),
    "gloo": (1, 64, 2),
}
TIMED_STEPS = 10


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    command = " ".join(["benchmarks/nccl.py", *(sys.argv[1:] if argv is None else argv)])
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json: the folder of {args.json} does not exist")
    if args.json is not None and args.json.is_dir():
        parser.error(f"--json: {args.json} is a folder")
    keys = select(args.ranks, args.only)
    if not keys:
        parser.error("no run is left by these options; names look like 4/hsdp/inductor/ours")
    if args.backend == "nccl":
        why = _why_no_nccl()
        if why:
            parser.error(f"{why}; --backend gloo runs the same on the CPU")
    layers, dim, batch = SIZES[args.backend]
    layers, dim = args.layers or layers, args.dim or dim
    if dim % 64:
        parser.error(f"--dim must be a multiple of 64, got {dim}")
    header = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "steps": args.steps,
        "layers": layers,
        "dim": dim,
        "batch": batch,
    }
    results: dict[Key, RunResult] = {}
    began = time.monotonic()
    failed = False
    for position, ranks in enumerate(args.ranks):
        mine = [key for key in keys if key.ranks == ranks]
        left = args.timeout - (time.monotonic() - began)
        if not mine or left <= 0:
            continue
        to_come = [
            other for other in args.ranks[position + 1 :] if any(k.ranks == other for k in keys)
        ]
        settings = Settings(
            args.backend,
            args.steps,
            min(args.steps, TIMED_STEPS),
            layers,
            dim,
            batch,
            soft_limit(left, ranks, to_come),
        )
        launch = _Launch(ranks, results, header, began, args.json)
        try:
            launch.run(mine, settings, left)
        except RankError as error:
            print(f"nccl.py: {ranks} ranks: {error}", file=sys.stderr, flush=True)
            failed = True
    _save(args.json, header, results, [])
    wrong = problems(results, keys, args.steps)
    _save(args.json, header, results, wrong)
    print(render(header, results))
    skipped = sum(bool(result.skipped) for result in results.values())
    done = f"{len(keys) - len(wrong) - skipped} of {len(keys)} runs are as they must be"
    late = f", {skipped} were skipped to keep the time limit" if skipped else ""
    print("\n".join(["", *wrong, done + late]))
    return 1 if failed or wrong else 0


class _Launch:
    """One set of ranks; results are kept as they come, so that a later failure loses none."""

    def __init__(
        self,
        ranks: int,
        results: dict[Key, RunResult],
        header: dict[str, Any],
        began: float,
        path: Path | None,
    ) -> None:
        self.ranks = ranks
        self.results = results
        self.header = header
        self.began = began
        self.path = path
        self.reports: dict[Key, list[Any]] = {}

    def run(self, keys: Sequence[Key], settings: Settings, timeout_s: float) -> None:
        """Run ``keys``.

        Raises:
            RankError: a rank failed or the time limit passed; no rank is left.
        """
        run_ranks(
            run_on_rank,
            self.ranks,
            list(keys),
            settings,
            timeout_s=timeout_s,
            on_message=self._on_message,
        )

    def _on_message(self, rank: int, message: tuple[Any, ...]) -> None:
        if message[0] == "about":
            self.header.update(message[1])
            return
        kind, key, *rest = message
        if kind == "begin":
            if rank == 0:
                self._say(key.name)
            return
        by_rank = self.reports.setdefault(key, [None] * self.ranks)
        (by_rank[rank],) = rest
        if None not in by_rank:
            if isinstance(by_rank[0], str):
                self.results[key] = RunResult(key, skipped=by_rank[0])
            else:
                self.results[key] = combine(key, by_rank)
            del self.reports[key]
            _save(self.path, self.header, self.results, [])

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)


def run_on_rank(rank: Rank, keys: list[Key], settings: Settings) -> None:
    """What a rank process runs: the ranks alone import torch."""
    from benchmarks.nccl_ranks import run_rank

    run_rank(rank, keys, settings)


def _why_no_nccl() -> str:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    return ""


def _save(
    path: Path | None, header: dict[str, Any], results: dict[Key, RunResult], wrong: list[str]
) -> None:
    if path is None:
        return
    runs = [{**asdict(r), "key": asdict(key), "name": key.name} for key, r in results.items()]
    partial = path.with_name(path.name + ".part")
    document = {**header, "problems": wrong, "runs": runs}
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _ranks(given: str) -> list[int]:
    try:
        numbers = [int(part) for part in given.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is no list of numbers such as 2,4,8") from None
    if any(number < 2 for number in numbers):
        raise argparse.ArgumentTypeError("sharding needs 2 ranks or more")
    return list(dict.fromkeys(numbers))


def _positive(given: str) -> int:
    try:
        number = int(given)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is no positive number")
    return number


def _seconds(given: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{given!r} is no positive number of seconds")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nccl.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend", choices=tuple(SIZES), default="nccl", help="gloo: on the CPU, smaller"
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=[2, 4, 8], metavar="LIST", help="default: 2,4,8"
    )
    parser.add_argument("--steps", type=_positive, default=25, metavar="N", help="default: 25")
    parser.add_argument("--layers", type=_positive, metavar="N", help="blocks (default: 1)")
    parser.add_argument(
        "--dim", type=_positive, metavar="N", help="width (default: 1024, with gloo 64)"
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose name matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every run")
    parser.add_argument(
        "--timeout", type=_seconds, default=570.0, metavar="S", help="for all (default: 570)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
