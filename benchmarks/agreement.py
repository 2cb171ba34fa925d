"""What it costs that ranks compare what they launch.

``python -m benchmarks.agreement [--ranks 2,4] [--backend aot_eager] [--steps 40]``

Prints, for each number of ranks on this machine (gloo, a TCP store):

- the time of one comparison, of launches as many as those of LLaMA-3 8B's backward graph (32 blocks
  of 9 parameters, gathered and reduced), when all ranks arrive at once;
- the time of what stays in every later step: the operator in Inductor's graphs, the call around the
  others;
- step time of the demo model compiled with the comparison over step time without, the two steps in
  turn in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.agreement import op as _agree_op  # noqa: F401  (defines the operator)
from torch_ext_bucketing.agreement.before_run import agree_on_launches, before_first_run
from torch_ext_bucketing.agreement.launches import GraphLaunches, GroupLaunches, Launch, Member
from torch_ext_bucketing.testing.model import ModelConfig, Transformer
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

Compiler = Literal["aot_eager", "inductor"]

BLOCKS, PARAMETERS = 32, 9
COMPARISONS = 30
CALLS = 2000


def large_graph(number: int) -> GraphLaunches:
    """Launches that differ from those of other numbers."""
    launches = []
    for kind in ("all_gather", "reduce_scatter"):
        for block in range(BLOCKS):
            members = tuple(
                Member((f"layers.{block}.module{i}.weight",), 4096 * i, 4096 + number, "bfloat16")
                for i in range(PARAMETERS)
            )
            launches.append(Launch(kind, None, "bfloat16", True, members))
    return GraphLaunches("backward", (GroupLaunches(dist.group.WORLD.group_name, tuple(launches)),))


def comparisons_ms() -> list[float]:
    """Milliseconds of each of several comparisons on this rank."""
    times = []
    for number in range(COMPARISONS):
        launches = large_graph(number)
        dist.barrier()
        started = time.perf_counter()
        agree_on_launches(launches)
        times.append(1e3 * (time.perf_counter() - started))
    return times


def call_us(function: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    started = time.perf_counter()
    for _ in range(CALLS):
        function()
    return 1e6 * (time.perf_counter() - started) / CALLS


def later_us() -> tuple[float, float]:
    """Microseconds of the operator and of the call around, once launches were agreed on."""
    launches = large_graph(0)
    x, digest, text = torch.zeros(8), launches.digest(), launches.encode()
    op = torch.ops.torch_ext_bucketing.agree.default
    run = before_first_run(lambda args: None, launches, None, False)
    return call_us(lambda: op(x, digest, text, -1.0)), call_us(lambda: run([]))


def step_times_s(backend: Compiler, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, without the comparison and with it."""
    compiled = []
    for agree in (False, True):
        torch.manual_seed(0)
        config = ModelConfig()
        model = teb.data_parallel(
            Transformer(config), init_device_mesh("cpu", (dist.get_world_size(),))
        )
        order = teb.FSDPParamOrder.from_model(
            Transformer(config), units=teb.transformer_block_plan(Transformer(config))
        )
        passes = [teb.ReshardAfterForward(), teb.BucketUnits(order)]
        torch._dynamo.reset()
        compiled.append(torch.compile(model, backend=teb.backend(backend, passes, agree=agree)))
    tokens = torch.zeros(2, 32, dtype=torch.long)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + 2):
        for which, run in enumerate(compiled):
            dist.barrier()
            started = time.perf_counter()
            run(tokens).float().sum().backward()
            if step >= 2:  # the first ones compile
                times[which].append(time.perf_counter() - started)
    return times


def measure(rank: Rank, backend: Compiler, steps: int) -> dict[str, float]:
    """On one rank."""
    port = Path(rank.store_path).with_name("port")
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, rank.world_size, True, wait_for_workers=False)
        port.with_name("port.new").write_text(str(store.port))
        port.with_name("port.new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), rank.world_size, False)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank.rank,
        world_size=rank.world_size,
        timeout=timedelta(seconds=300),
    )
    compared = comparisons_ms()
    op, call = later_us()
    without, with_it = step_times_s(backend, steps)
    dist.barrier()
    return {
        "compare": statistics.median(compared),
        "worst": max(compared),
        "op": op,
        "call": call,
        "without": 1e3 * statistics.median(without),
        "with": 1e3 * statistics.median(with_it),
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description="What it costs that ranks compare what they launch."
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks (default: 2,4)")
    parser.add_argument("--backend", default="aot_eager", choices=("aot_eager", "inductor"))
    parser.add_argument("--steps", type=int, default=40, help="steps of each kind (default: 40)")
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}, {arguments.backend}, medians of rank 0")
    print("ranks  comparison ms  slowest ms  later: op us  call us  step ms without  with  ratio")
    for world in map(int, arguments.ranks.split(",")):
        found = run_ranks(measure, world, arguments.backend, arguments.steps, timeout_s=900)[0]
        print(
            f"{world:5d}  {found['compare']:13.2f}  {found['worst']:10.2f}  {found['op']:12.1f}"
            f"  {found['call']:7.1f}  {found['without']:15.1f}  {found['with']:4.1f}"
            f"  {found['with'] / found['without']:5.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
