"""A rank killed while it writes to a cache folder that ranks share, and the start after it.

    python -m benchmarks.warm_kills                   50 kills
    python -m benchmarks.warm_kills --kills 5 --json out.json

Two gloo ranks compile a small model, forward and backward, into one folder. Rank 1 kills itself
(SIGKILL) at its n-th opening of a file to write, or renaming of one, in that folder, at once or up
to 2 ms later, for n over all of them in turn. Then, as ``torchrun`` does, rank 0 is ended; in every
tenth round it is left alone, and must end by itself with an error that names rank 1. Two more ranks
start with what was left in the folder: they must end in time, with the values of the model that
isn't compiled. The ranks are forks of one process, which has imported torch.

Exit status: 0, or 1 if a rank hung, failed otherwise or computed other values.
"""

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb

from .command import add_json, add_number, document_of, parser_of, title, write_results
from .warm import cache_counts, pair, step_of_pair

ENTRIES = ("fxgraph", "aotautograd")
LIMIT_S = 300
AGREE_S = 40
TENTH = 10


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("python -m benchmarks.warm_kills", __doc__)
    add_number(parser, "kills", 50, "kills")
    add_json(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    inductor_config.compile_threads = 1  # no processes or threads before a fork
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or each fork tries what the compiler can do
    rng = random.Random(0)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
        compile_here()
        # The kernels of this start stay, the entries are removed before every round.
        run_ranks(folder)
        remove_entries(folder)
        writes = run_ranks(folder)[1]["writes"]
        expected = run_ranks(folder, compiled=False)
        for i in range(args.kills):
            remove_entries(folder)
            at, later = i * writes // args.kills, rng.choice((0.0, rng.uniform(0.0, 0.002)))
            killed = run_ranks(folder, (at, later), end_peer=i % TENTH != 0)
            after = run_ranks(folder)
            rounds.append(
                {
                    "killed at write": at,
                    "ms later": round(later * 1000, 2),
                    "rank 1": killed[1]["end"],
                    "rank 0": killed[0]["end"],
                    "after": [r["end"] for r in after],
                    "graphs": [r.get("graphs") for r in after],
                    "right": right(after, expected),
                }
            )
            print(rounds[-1], flush=True)
    document = document_of("python -m benchmarks.warm_kills", argv)
    document |= {"writes": writes, "rounds": rounds}
    text, well = summary(document)
    write_results(args.json, document, text)
    return 0 if well else 1


def compile_here() -> None:
    """Let what a compile imports be imported before the forks."""
    dist.init_process_group("fake", rank=0, world_size=3)
    step(3, compiled=True)
    dist.destroy_process_group()
    torch._dynamo.reset()


def remove_entries(folder: Path) -> None:
    for name in ENTRIES:
        shutil.rmtree(folder / "cache" / name, ignore_errors=True)


def right(ranks: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Whether every rank came to its end with the values of the model that isn't compiled."""
    return all(
        r["end"] == "done"
        and all(
            torch.allclose(torch.tensor(v), torch.tensor(w))
            for v, w in zip(r["values"], e["values"], strict=True)
        )
        for r, e in zip(ranks, expected, strict=True)
    )


def run_ranks(
    folder: Path,
    kill: tuple[int, float] | None = None,
    end_peer: bool = True,
    compiled: bool = True,
) -> list[dict[str, Any]]:
    """What two forks did, of which rank 1 kills itself at the write and after the seconds of
    ``kill``; with ``end_peer`` the other is ended when one has ended badly."""
    forks = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        pipes = [forks.Pipe(duplex=False) for _ in range(2)]
        running = {}
        for rank, (_, sent) in enumerate(pipes):
            mine = (rank, Path(name), kill if rank else None, compiled, sent)
            running[rank] = forks.Process(target=run_rank, args=mine)
            running[rank].start()
        results: list[dict[str, Any]] = [{"end": "killed"}, {"end": "killed"}]
        deadline = time.monotonic() + LIMIT_S
        while running:
            for rank, process in list(running.items()):
                if process.is_alive():
                    continue
                del running[rank]
                if pipes[rank][0].poll():
                    results[rank] = pipes[rank][0].recv()
                if end_peer and results[rank]["end"] != "done":
                    for other, peer in running.items():
                        results[other] = {"end": "ended as by torchrun"}
                        peer.kill()
            if time.monotonic() > deadline:
                for rank, process in running.items():
                    results[rank] = {"end": "HUNG"}
                    process.kill()
            time.sleep(0.02)
    return results


def run_rank(
    rank: int, folder: Path, kill: tuple[int, float] | None, compiled: bool, sent: Connection
) -> None:
    """One rank: a step; sends what came of it, and ends the process."""
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)
    counters.clear()
    result: dict[str, Any] = {"end": "done"}
    try:
        store = dist.FileStore(str(folder / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        writes = Writes(os.environ["TORCHINDUCTOR_CACHE_DIR"], kill)
        sys.addaudithook(writes)
        result["values"] = step(2, compiled)
        result |= {"graphs": cache_counts()["graphs"], "writes": writes.number}
        dist.barrier()
    except BaseException as error:
        result["end"] = f"{type(error).__name__}: {error}"
    sent.send(result)
    os._exit(0)


def step(world: int, compiled: bool) -> list[list[float]]:
    """The output, and this rank's gradients."""
    model = pair()
    teb.data_parallel(model, init_device_mesh("cpu", (world,)))
    run = model
    if compiled:
        passes = [teb.BucketUnits(teb.FSDPParamOrder.from_fqns([["a.weight", "b.weight"]]))]
        timeout = timedelta(seconds=AGREE_S)
        run = torch.compile(model, backend=teb.backend("inductor", passes, agree_timeout=timeout))
    return [t.flatten().tolist() for t in step_of_pair(model, run)]


class Writes:
    """An audit hook that counts what is opened to be written, and renamed, in a folder, and kills
    the process at the write of a number, after so many seconds."""

    def __init__(self, folder: str, kill: tuple[int, float] | None) -> None:
        self.folder = folder
        self.kill = kill
        self.number = 0

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            flags = args[2] if isinstance(args[2], int) else 0
            if not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event != "os.rename":
            return
        if not str(args[0]).startswith(self.folder):
            return
        number, self.number = self.number, self.number + 1
        if self.kill is not None and number == self.kill[0]:
            if self.kill[1]:
                threading.Timer(self.kill[1], os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                os.kill(os.getpid(), signal.SIGKILL)


def summary(document: dict[str, Any]) -> tuple[str, bool]:
    """The outcomes, counted, and whether all is well."""
    rounds = document["rounds"]
    peers = Counter(r["rank 0"].partition(":")[0] for r in rounds)
    hits = Counter(str(r["graphs"]) for r in rounds)
    alone = [r["rank 0"] for r in rounds[::TENTH]]
    well = (
        all(r["right"] and r["rank 1"] == "killed" for r in rounds)
        and "HUNG" not in peers
        and "done" not in peers
        and all("rank 1" in text or "closed" in text or "reset" in text for text in alone)
    )
    lines = [
        title(document),
        "",
        f"rank 1 writes {document['writes']} times to the folder; killed at "
        f"{len({r['killed at write'] for r in rounds})} of them, in {len(rounds)} rounds",
        f"killed: {sum(r['rank 1'] == 'killed' for r in rounds)}",
        "rank 0 then: " + ", ".join(f"{n} x {name}" for name, n in peers.most_common()),
        f"both ranks of the next start done, with the right values: "
        f"{sum(r['right'] for r in rounds)}",
        "its graphs, hit/miss/bypass of rank 0 and rank 1:",
        *(f"    {n:3} x {state}" for state, n in hits.most_common()),
        "what rank 0 says, left alone:",
        *(f"    {text[:300]}" for text in dict.fromkeys(alone)),
    ]
    return "\n".join(lines), well


if __name__ == "__main__":
    sys.exit(main())
