"""Explain models of real size on a machine without GPUs; measure the time and memory that takes.

    python -m benchmarks.real_size                          all models
    python -m benchmarks.real_size --only 'llama3-8b*'      some of them
    python -m benchmarks.real_size --list                   the commands alone

Each command runs alone in a process: CPU seconds of all its threads, and its largest resident
memory. It fails above the limits of the table. Rows with ``hf:`` need transformers; DeepSeek-V3 has
the defaults of its configuration there, which are those of the model with 671 billion parameters,
and other rows have those of :data:`CONFIGURATIONS`.

``choice`` is the CPU time of choosing what is kept. ``over bins`` are the collectives that are
left, relative to the bins that first-fit decreasing needs at the same byte caps, in forward and in
backward. That is a lower bound without dependencies.
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
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from unittest import mock

from torch_ext_bucketing.__main__ import main as command_line
from torch_ext_bucketing.planner.resharding import ReshardAfterForward
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

from .command import add_json, document_of, parser_of, write_results

_ON_64 = "--mesh fsdp=64 --gpu h100 --goal speed --sequence 4096"
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
    "qwen3-32b, 16 layers": (f"hf:qwen3-16 {_ON_64} --memory-gib 30", 120, 4),
    "qwen3-32b, 64 layers": (f"hf:qwen3-64 {_ON_64} --memory-gib 70", 120, 4),
    "llama, 8 layers": (f"hf:llama-8 {_ON_64} --memory-gib 12", 120, 4),
    "gemma3-12b, 8 layers": (f"hf:gemma3-8 {_ON_64} --memory-gib 16", 120, 4),
    "gpt-oss-20b": (f"hf:gpt_oss-24 {_ON_64}", 90, 4),
    "deepseek-v3, 4 layers": (f"hf:deepseek_v3-4 {_ON_64}", 120, 4),
    "vit-huge": ("hf:vit-32 --mesh fsdp=64 --gpu h100 --goal speed --batch 32", 120, 4),
}
"""By name: arguments of ``explain``, and limits of CPU seconds and of GiB."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 1024,
    },
    "gpt_oss": {"num_local_experts": 32},
    "deepseek_v3": {"first_k_dense_replace": 1},
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "hidden_size": 1280,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "patch_size": 14,
    },
}
"""Fields of transformers' configurations, by the name in a row, there with a number of layers."""


def configured(arguments: str, folder: Path) -> str:
    """Write the configuration that a row names; return the row with its file."""
    model, _, options = arguments.partition(" ")
    name, _, layers = model.removeprefix("hf:").partition("-")
    if name not in CONFIGURATIONS or not layers:
        return arguments
    file = folder / f"{name}-{layers}.json"
    config = {"model_type": name, "num_hidden_layers": int(layers)} | CONFIGURATIONS[name]
    file.write_text(json.dumps(config), encoding="utf-8")
    return f"hf:{file} {options}"


def bins(nbytes: Sequence[int], cap: int) -> int:
    """Return the number of bins of first-fit decreasing; what exceeds the cap has its own."""
    filled: list[int] = []
    for n in sorted(nbytes, reverse=True):
        at = next((i for i, there in enumerate(filled) if there + n <= cap), len(filled))
        filled[at : at + 1] = [(filled[at] if at < len(filled) else 0) + n]
    return len(filled)


def over_bins(graph: Mapping[str, Any], schedule: Mapping[str, Any]) -> float:
    """Return a graph's bucketed and single collectives over the bins for the chosen caps."""
    found = 0
    sizes: dict[str, list[int]] = {}
    for one in (*graph["buckets"], *graph["unmerged"]):
        found += 1
        members = one.get("members")
        ranks = one.get("group_size", 1)
        mine = [one["wire_bytes"]] if members is None else [m["nbytes"] * ranks for m in members]
        sizes.setdefault(f"{one['group']} {one['kind']}", []).extend(mine)
    caps = dict(schedule["caps"]["chosen"]["caps_mb"])
    least = sum(bins(mine, int(caps[key] * 2**20)) for key, mine in sizes.items())
    return found / least


def measure(rank: Rank, arguments: str) -> dict[str, Any]:
    """Explain in this process; return seconds, memory and the plan's figures."""
    start, clock, text = time.monotonic(), time.process_time(), io.StringIO()
    path = f"{rank.store_path}.json"
    arguments = configured(arguments, Path(path).parent)
    choices: list[float] = []
    choose = ReshardAfterForward._choose

    def timed(*args: Any) -> Any:
        begin = time.process_time()
        chosen = choose(*args)
        choices.append(time.process_time() - begin)
        return chosen

    with warnings.catch_warnings(), contextlib.redirect_stdout(text), contextlib.ExitStack() as on:
        warnings.simplefilter("ignore")
        on.enter_context(mock.patch.object(ReshardAfterForward, "_choose", timed))
        status = command_line(["explain", *arguments.split(), "--brief", "--json", path])
    if status:
        raise RuntimeError(f"explain {arguments} ended with {status}")
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    pairs = zip(report["graphs"], report["schedules"], strict=True)
    speed = [(graph, schedule) for graph, schedule in pairs if schedule["caps"]]
    return {
        "choice_s": sum(choices),
        "over_bins": [over_bins(*pair) for pair in speed],
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
        foreign = [name for name in names if ROWS[name][0].startswith("hf:")]
        print(f"transformers is not installed: left out {', '.join(foreign)}", file=sys.stderr)
        names = [name for name in names if name not in foreign]
    document = document_of("python -m benchmarks.real_size", argv)
    document["rows"] = {}
    table = [["model", "CPU s", "limit", "GiB", "limit", "collectives", "over bins"]]
    table[0] += ["choice, s", "step, ms", "peak, GiB"]
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
                ", ".join(f"{part:.3f}" for part in row["over_bins"]),
                f"{row['choice_s']:.1f}",
                f"{row['step_ms']:.0f}",
                f"{row['peak_bytes'] / 2**30:.1f}",
            ]
        )
    write_results(args.json, document, columns(table))
    return int(late)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
