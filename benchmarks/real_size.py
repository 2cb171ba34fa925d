"""Explain models of real size on a machine without GPUs; measure the time and memory that takes.

    python -m benchmarks.real_size                          all models
    python -m benchmarks.real_size --only 'llama3-8b*'      some of them
    python -m benchmarks.real_size --list                   the commands alone

Each command runs alone in a process: CPU seconds of all its threads, and its largest resident
memory. It fails above the limits of the table. DeepSeek-V3 has the defaults of transformers'
configuration, which are those of the model with 671 billion parameters, and needs transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch_ext_bucketing.__main__ import main as command_line
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

from .command import add_json, document_of, parser_of, write_results

ROWS: dict[str, tuple[str, float, float]] = {
    "llama3-8b": ("llama3-8b --mesh fsdp=64 --gpu h100", 60, 2),
    "llama3-8b, bound": (
        "llama3-8b --mesh fsdp=64 --gpu h100 --goal speed --memory-gib 20",
        120,
        2,
    ),
    "llama3-70b, bound": (
        "llama3-70b --mesh fsdp=64 --gpu h100 --goal speed --memory-gib 70",
        200,
        4,
    ),
    "llama3-405b": ("llama3-405b --mesh fsdp=512 --gpu h100", 300, 8),
    "llama3-405b, bound": (
        "llama3-405b --mesh fsdp=512 --gpu h100 --goal speed --memory-gib 70",
        300,
        8,
    ),
    "deepseek-v3": ("hf:deepseek_v3 --mesh fsdp=512 --gpu h100 --sequence 4096", 300, 8),
}
"""By name: arguments of ``explain``, and limits of CPU seconds and of GiB."""


def measure(rank: Rank, arguments: str) -> dict[str, Any]:
    """Explain in this process; return seconds, memory and the plan's figures."""
    start, clock, text = time.monotonic(), time.process_time(), io.StringIO()
    path = f"{rank.store_path}.json"
    with warnings.catch_warnings(), contextlib.redirect_stdout(text):
        warnings.simplefilter("ignore")
        status = command_line(["explain", *arguments.split(), "--brief", "--json", path])
    if status:
        raise RuntimeError(f"explain {arguments} ended with {status}")
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    return {
        "cpu_s": time.process_time() - clock,
        "wall_s": time.monotonic() - start,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "step_ms": sum(s["step_ms"][1] for s in report["schedules"]),
        "peak_bytes": max(s["peak_bytes"][1] for s in report["schedules"]),
        "collectives": [sum(report[f"collectives_{v}"].values()) for v in ("before", "after")],
        "passes_s": sum(p["seconds"] for p in report["passes"]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser: argparse.ArgumentParser = parser_of("python -m benchmarks.real_size", __doc__)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="names, with *")
    parser.add_argument("--list", action="store_true", help="print the commands")
    add_json(parser)
    args = parser.parse_args(argv)
    names = [name for name in ROWS if any(fnmatchcase(name, p) for p in args.only)]
    if args.list:
        print(
            *(f"{n}: python -m torch_ext_bucketing explain {ROWS[n][0]}" for n in names), sep="\n"
        )
        return 0
    if importlib.util.find_spec("transformers") is None:
        print("deepseek-v3 needs transformers: left out", file=sys.stderr)
        names = [name for name in names if name != "deepseek-v3"]
    document = document_of("python -m benchmarks.real_size", argv)
    document["rows"] = {}
    table = [["model", "CPU s", "limit", "GiB", "limit", "collectives", "step, ms", "peak, GiB"]]
    late = False
    for name in names:
        arguments, seconds, gib = ROWS[name]
        print(f"{name} ...", file=sys.stderr, flush=True)
        (row,) = run_ranks(measure, 1, arguments, timeout_s=3600)
        document["rows"][name] = {"arguments": arguments, **row}
        late |= row["cpu_s"] > seconds or row["gib"] > gib
        before, after = row["collectives"]
        table.append(
            [
                name,
                f"{row['cpu_s']:.0f}",
                f"{seconds:g}",
                f"{row['gib']:.2f}",
                f"{gib:g}",
                f"{before} -> {after}",
                f"{row['step_ms']:.0f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
            ]
        )
    write_results(args.json, document, columns(table))
    return int(late)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
