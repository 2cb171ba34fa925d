"""Time cold and warm starts: seconds from the start of the processes to the first step.

    python -m benchmarks.warm                         2 and 4 ranks, 3 warm starts of each way
    python -m benchmarks.warm --ranks 2 --warm 1 --json out.json
    python -m benchmarks.warm --ranks 8 --warm 1 --ways ours
    python -m benchmarks.warm --ranks 2 --delay 100         as on a slow file system

A transformer of two layers, sharded by ``data_parallel``, forward and backward under
``torch.compile`` on CPU ranks over gloo. Every way has a cache folder of its own, empty before its
first start:

- ``plain``: ``backend="inductor"`` as it is, without this package (but for the modules of the model
  and of ``data_parallel``, which need none of the rest);
- ``plain, one hash seed``: the same under ``PYTHONHASHSEED=0``, as torch's keys have the salted
  hash of a device mesh where something asked the mesh for it;
- ``ours``: ``teb.backend("inductor", ...)``, one bucket per unit of FSDP2, ``Schedule(Overlap())``.

The ways take turns, start by start. A time is that of the slowest rank; CPU seconds are the mean
over the ranks, and tell more than wall time where other programs run. AOTAutograd's cache is told
to take custom autograd functions, which ``data_parallel`` has, in every way. The hits are those of
``torch._dynamo.utils.counters``, ``"inductor"`` and ``"aot_autograd"``.

Exit status: 0, or 1 if a rank failed or a warm start of ours missed; times decide nothing.
"""

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh

from .command import add_json, document_of, parser_of, write_json, write_results

HASH_SEEDS = {"plain": None, "plain, one hash seed": "0", "ours": None}
LIMIT_S = 1200


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.warm", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--warm", type=int, default=3, help="warm starts of each way")
    parser.add_argument("--ways", nargs="+", choices=HASH_SEEDS, default=list(HASH_SEEDS))
    add_json(parser)
    parser.add_argument(
        "--delay", type=float, default=0.0, metavar="MS", help="of what is done in the cache folder"
    )
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        slow_down(os.environ["TORCHINDUCTOR_CACHE_DIR"], args.delay / 1000)
        way, rank, world, port = args.rank
        run_rank(way, int(rank), int(world), int(port))
    document = document_of("python -m benchmarks.warm", argv)
    document |= {"delay_ms": args.delay, "starts": []}
    for world in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            for number in range(1 + args.warm):
                for way in args.ways:
                    if way == "plain" and number > 1:
                        continue
                    result = start(
                        way,
                        world,
                        Path(folder) / way.replace(", ", "-").replace(" ", "-"),
                        args.delay,
                    )
                    document["starts"].append({"number": number, **result})
        write_json(args.json, document)
    write_results(args.json, document, table(document))
    missed = [
        s for s in document["starts"] if s["way"] == "ours" and s["number"] and s["graphs"][1]
    ]
    return 1 if missed else 0


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a rank that has its caches in this folder."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")}
    env.pop("PYTHONHASHSEED", None)
    return env | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}


def start(way: str, world: int, cache: Path, delay_ms: float = 0.0) -> dict[str, Any]:
    """Start the ranks and wait for them."""
    env = environment(cache)
    # Where bytecode is never kept, each start of ours compiles this package: no user's would.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    if HASH_SEEDS[way] is not None:
        env["PYTHONHASHSEED"] = str(HASH_SEEDS[way])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"rank{r}" for r in range(world)]
        began = time.time()
        processes = []
        for r, file in enumerate(files):
            command = [sys.executable, "-m", __spec__.name, "--delay", str(delay_ms)]
            command += ["--rank", way, str(r), str(world), port]
            with open(file, "w") as out:
                processes.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
        try:
            while any(p.poll() is None for p in processes):
                failed = any(p.returncode for p in processes)
                if failed or time.time() - began > LIMIT_S:
                    break
                time.sleep(0.1)
        finally:
            for p in processes:
                p.kill()
                p.wait()
        texts = [file.read_text() for file in files]
    for r, (p, text) in enumerate(zip(processes, texts, strict=True)):
        if p.returncode:
            raise RuntimeError(f"rank {r} of {way!r} ended with {p.returncode}:\n{text[-4000:]}")
    ranks = [json.loads(text.splitlines()[-1]) for text in texts]
    entries = [f for f in (cache / "fxgraph").rglob("*") if f.is_file()]
    return {
        "way": way,
        "ranks": world,
        "seconds": round(max(r["finished"] for r in ranks) - began, 2),
        "cpu_seconds": round(statistics.mean(r["cpu_seconds"] for r in ranks), 2),
        "graphs": [sum(r["graphs"][i] for r in ranks) for i in range(3)],
        "aot": [sum(r["aot"][i] for r in ranks) for i in range(3)],
        "entries": len(entries),
        "delayed": sum(r["delayed"] for r in ranks),
    }


_delayed: list[str] = []


def slow_down(folder: str, seconds: float) -> None:
    """Delay each opening, renaming, removing or listing of something in ``folder``."""

    def wait(event: str, args: tuple[Any, ...]) -> None:
        if event != "open" and not event.startswith("os."):
            return
        if args and isinstance(args[0], str) and args[0].startswith(folder):
            _delayed.append(event)
            time.sleep(seconds)

    if seconds:
        sys.addaudithook(wait)


def run_rank(way: str, rank: int, world: int, port: int) -> None:
    """Run one rank's first step, print when it was done, and end the process."""
    if way != "ours":
        # Its modules can be imported, and what importing the package does is not done.
        spec = importlib.util.find_spec("torch_ext_bucketing")
        assert spec is not None
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    from torch_ext_bucketing.fsdp.shard import data_parallel
    from torch_ext_bucketing.testing.training import ModelConfig, Transformer

    torch.set_num_threads(1)
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world)
    model = Transformer(ModelConfig(layers=2))
    if way == "ours":
        import torch_ext_bucketing as teb

        order = teb.FSDPParamOrder.from_model(model, units=model.unit_names())
        passes = [teb.BucketByUnit(order), teb.Schedule(teb.Overlap())]
        compiler: Any = teb.backend("inductor", passes)
    else:
        compiler = "inductor"
    data_parallel(model, init_device_mesh("cpu", (world,)))
    tokens = torch.arange(128).view(2, 64)
    torch.compile(model, backend=compiler)(tokens).logsumexp(-1).mean().backward()
    finished, times = time.time(), os.times()
    cpu_seconds = times.user + times.system + times.children_user + times.children_system
    result: dict[str, Any] = {"finished": finished, "cpu_seconds": cpu_seconds}
    result |= {"delayed": len(_delayed), **cache_counts()}
    print(json.dumps(result), flush=True)
    dist.barrier()
    os._exit(0)


def cache_counts() -> dict[str, list[int]]:
    """Return hits, misses and bypasses of this process: the FX graph cache's and AOTAutograd's."""
    states = ("hit", "miss", "bypass")
    return {
        "graphs": [counters["inductor"][f"fxgraph_cache_{s}"] for s in states],
        "aot": [counters["aot_autograd"][f"autograd_cache_{s}"] for s in states],
    }


def counted(result: dict[str, Any]) -> list[str]:
    """Format :func:`cache_counts` as two cells of a table."""
    return ["/".join(map(str, result[kind])) for kind in ("graphs", "aot")]


def table(document: dict[str, Any]) -> str:
    """Render all starts of each way, and the cost of our warm start relative to plain torch."""
    from torch_ext_bucketing.reports.base import columns

    lines: list[str] = []
    for world in dict.fromkeys(s["ranks"] for s in document["starts"]):
        mine = [s for s in document["starts"] if s["ranks"] == world]
        rows = [["way", "start", "seconds", "CPU s", "graphs", "AOT", "entries", "delayed"]]
        for s in sorted(mine, key=lambda s: list(HASH_SEEDS).index(s["way"])):
            times = [f"{s['seconds']:.1f}", f"{s['cpu_seconds']:.1f}"]
            last = [str(s["entries"]), str(s["delayed"] or "")]
            when = "warm" if s["number"] else "cold"
            rows.append([s["way"], when, *times, *counted(s), *last])
        lines += [""] if lines else []
        lines += [f"{world} ranks; hit/miss/bypass of all ranks together", "", columns(rows)]
        for what in ("seconds", "cpu_seconds"):
            middle = {
                way: statistics.median(s[what] for s in mine if s["way"] == way and s["number"])
                for way in dict.fromkeys(s["way"] for s in mine if s["number"])
            }
            if {"ours", "plain, one hash seed"} <= middle.keys():
                ratio = middle["ours"] / middle["plain, one hash seed"]
                lines.append(
                    f"warm, ours / plain with one hash seed, medians of {what}: {ratio:.2f}"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
