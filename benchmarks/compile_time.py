"""Measure the CPU time of a compile by depth: LLaMA-3 8B on 64 ranks, without weights or GPUs.

    python -m benchmarks.compile_time --layers 8 16 32

Dynamo traces a training step on fake tensors with an H100's operators, AOTAutograd and Inductor
make the graphs, and Inductor lowers them and makes its schedule of kernels. It stops there: the
code of the kernels would be the CPU's. Seconds are those of the process on all threads::

    Dynamo      from the call to the backend
    our passes  all passes of the recipe, on the joint graph and on both halves
    Inductor    lowering and schedule of kernels
    AOTAutograd the rest: tracing of the joint graph, partitioner, Inductor's own passes

Without passes the same backend compiles for plain torch, and there leaves Python's cycle collector
on, as torch does. Each row is a process of its own.
"""

import argparse
import contextlib
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._inductor.graph import GraphLowering
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch import inductor
from torch_ext_bucketing._torch.without_device import OnCpu, Planned, fake_tensors
from torch_ext_bucketing.passes import backends
from torch_ext_bucketing.passes.backends import BucketingBackend
from torch_ext_bucketing.passes.pipeline import Pipeline
from torch_ext_bucketing.testing.configured import configured
from torch_ext_bucketing.testing.target import LLAMA3

RANKS = 64
WAYS = ("plain torch", "parity", "speed, 60 GiB")


class Clock:
    """Seconds of the process by part; a part's own, without parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = time.process_time()

    def _switch(self) -> None:
        now = time.process_time()
        if self._open:
            part = self._open[-1]
            self.seconds[part] = self.seconds.get(part, 0.0) + now - self._since
        self._since = now

    def around(self, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run``, with its time in ``part``."""

        @functools.wraps(run)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._open.append(part)
            try:
                return run(*args, **kwargs)
            finally:
                self._switch()
                self._open.pop()

        return timed


class UntilKernels(BucketingBackend):
    """Stops once Inductor has made its schedule of kernels; empty tensors are the results."""

    only_plans = True


def _stop(graph: GraphLowering) -> None:
    graph.init_wrapper_code()
    graph._update_scheduler()
    raise Planned(graph.graph)


def measure(way: str, layers: int) -> dict[str, float]:
    """Compile a step one way; return seconds by part."""
    _, dim, heads, hidden = LLAMA3["llama3-8b"]
    LLAMA3["llama3-8b"] = (layers, dim, heads, hidden)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    clock = Clock()
    with fake_tensors("H100"):
        mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
        with OnCpu():
            model, (tokens,), _ = configured("llama3-8b", mesh, 8192, 1)
        passes: Sequence[teb.GraphPass] = ()
        if way == "plain torch":
            for module in (backends, inductor):
                module.paused_gc = contextlib.nullcontext  # type: ignore[attr-defined]
        elif way == "parity":
            passes = teb.recipe(model)
        else:
            passes = teb.recipe(model, "speed", memory=teb.PeakMemory(gib=60))
        backend = UntilKernels("inductor", passes, model)

        def after(run: Callable[..., Any]) -> Callable[..., Any]:
            # Graphs that the passes have planned go on to Inductor.
            def planned(*args: Any, **kwargs: Any) -> Any:
                made = run(*args, **kwargs)
                backend.only_plans = args[1] == "joint"  # type: ignore[misc]
                return made

            return planned

        Pipeline.run = after(clock.around("our passes", Pipeline.run))  # type: ignore[method-assign]
        GraphLowering.run = clock.around("Inductor", GraphLowering.run)
        GraphLowering.codegen = clock.around("Inductor", _stop)
        UntilKernels.__call__ = clock.around("AOTAutograd", UntilKernels.__call__)  # type: ignore[method-assign]

        def step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())

        compiled = torch.compile(step, backend=backend)
        loss = clock.around("Dynamo", compiled)(model, tokens)
        clock.around("AOTAutograd", loss.backward)()
    dist.destroy_process_group()
    return clock.seconds


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each depth and way."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--way", choices=WAYS, help="one row, in this process")
    args = parser.parse_args(argv)
    parts = ("Dynamo", "AOTAutograd", "our passes", "Inductor")
    if args.way:
        found = measure(args.way, args.layers[0])
        print(*(f"{found.get(part, 0.0):.2f}" for part in parts))
        return 0
    print("| layers | compile | " + " | ".join(parts) + " | all, CPU s | of plain torch |")
    print("| --: | --- |" + " --: |" * 6)
    for layers in args.layers:
        plain = 0.0
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.compile_time", "--way", way]
            run = [*command, "--layers", str(layers)]
            out = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
            seconds = [float(each) for each in out.split()]
            total = sum(seconds)
            plain = plain or total
            cells = " | ".join(f"{each:.1f}" for each in seconds)
            print(f"| {layers} | {way} | {cells} | {total:.1f} | {total / plain:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
