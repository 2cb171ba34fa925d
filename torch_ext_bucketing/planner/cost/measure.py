"""Measure the networks and kernels of a cluster on all ranks of a process group.

Collectives are launched as compiled graphs launch them. Their time begins when the last rank has
arrived: the shortest of the ranks' times counts, which has no wait for peers, and the median of
several runs. The host's time for a launch is that of many in a row, while the GPU works; on the CPU
it is part of each operator's own. All ranks return the same numbers, those of the slowest group of
a mesh dimension and of the slowest rank.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..._torch.process_groups import ranks_of
from ...graph.nodes import COLLECTIVES
from .machine import Machine

_PRODUCT_SIZE = {"cuda": 8192, "cpu": 512}
# On CPU malloc reuses blocks of this size. It maps larger ones anew each time (M_MMAP_THRESHOLD is
# 32 MiB at most), which takes ten times as long.
_COPY_MIB = {"cuda": 1024, "cpu": 16}
_LAUNCHES = 200


def measure(
    mesh: Sequence[int],
    *,
    kib: Sequence[int] = (4, 64, 1024, 16384),
    repeats: int = 7,
    say: Callable[[str], None] = lambda text: None,
) -> Machine:
    """Measure the groups of a mesh over the default process group. Every rank must call it.

    The machine's ``ranks_per_node`` is torchrun's ``LOCAL_WORLD_SIZE``, else the number of ranks.
    Every rank gets the same machine.

    Args:
        mesh: sizes of its dimensions; their product is the number of ranks.
        kib: sizes in KiB of the whole buffer.
        repeats: runs of each size, after a warm-up.
        say: called with a line per measurement, for progress.
    """
    world = dist.get_world_size()
    if math.prod(mesh) != world:
        raise ValueError(f"a mesh of {'x'.join(map(str, mesh))} ranks does not fit {world} ranks")
    if not kib or min(kib) < 1 or repeats < 1:
        raise ValueError("sizes in KiB and the number of runs must be positive")
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    device_mesh = init_device_mesh(device, tuple(mesh))
    groups = [device_mesh.get_group(i) for i, size in enumerate(mesh) if size > 1]
    if len(groups) > 1:
        groups.append(dist.group.WORLD)
    machine = Machine(ranks_per_node=per_node)
    table: dict[Any, dict[int, float]] = {}
    host_ms: dict[str, float] = {}
    for group in groups:
        shape = machine.layout_of(ranks_of(group))
        for kind in COLLECTIVES:
            for size in sorted(set(kib)):
                nbytes, launch = _launcher(kind, size * 1024, group, device)
                ms = _collective_ms(launch, group, device, repeats)
                say(f"{kind} of {shape[0]} ranks on {shape[1]} nodes, {size} KiB: {ms:.3f} ms")
                points = table.setdefault((kind, shape), {})
                points[nbytes] = max(ms, points.get(nbytes, 0.0))
            _, launch = _launcher(kind, min(kib) * 1024, group, device)
            host_ms[kind] = max(_launch_ms(launch, device), host_ms.get(kind, 0.0))
    flops = {}
    for dtype in (torch.float32, torch.bfloat16):
        n = _PRODUCT_SIZE[device]
        a = torch.ones(n, n, dtype=dtype, device=device)
        ms = _kernel_ms(functools.partial(torch.matmul, a, a), device, repeats)
        flops[str(dtype).removeprefix("torch.")] = 2 * n**3 / ms * 1e3
    x = torch.ones(_COPY_MIB[device] * 2**20, dtype=torch.uint8, device=device)
    small = torch.ones(1, device=device)
    host = torch.empty_like(x, device="cpu", pin_memory=device == "cuda")
    # All ranks of a host copy at once, as they do in a step.
    both = [functools.partial(a.copy_, b, non_blocking=True) for a, b in ((host, x), (x, host))]
    copy_ms = max(_kernel_ms(copy, device, repeats) for copy in both)
    bandwidth = 2 * x.numel() / _kernel_ms(x.clone, device, repeats) * 1e3
    kernel_ms = _kernel_ms(small.neg, device, repeats)
    host_ms["kernel"] = _launch_ms(small.neg, device)
    say(f"products {flops['bfloat16'] / 1e12:.3g} TFLOP/s in bfloat16, copies {bandwidth:.3g} B/s")
    say(f"copies to and from host memory {x.numel() / copy_ms * 1e3:.3g} B/s")
    launches = ", ".join(f"{kind} {ms * 1e3:.1f}" for kind, ms in host_ms.items() if ms)
    say(f"launches by the host, us: {launches or 'part of each operator'}")
    return Machine(
        f"measured, {world} ranks, {dist.get_backend()}",
        flops,
        other_flops=flops["float32"],
        bandwidth=bandwidth,
        kernel_ms=kernel_ms,
        host_bandwidth=x.numel() / copy_ms * 1e3,
        host_ms=host_ms,
        collectives={key: tuple(sorted(points.items())) for key, points in table.items()},
        ranks_per_node=per_node,
    )


def _launcher(
    kind: str, nbytes: int, group: dist.ProcessGroup, device: str
) -> tuple[int, Callable[[], Any]]:
    """Return the bytes of input and output together, and a function that runs the collective."""
    n, row = group.size(), COLLECTIVES[kind]
    part = -(-nbytes // (4 * n))
    input_rows, output_rows = (
        part * n if whole else part for whole in (row.whole_input, row.whole_output)
    )
    sent = torch.ones(input_rows, device=device)
    wait, arguments = torch.ops._c10d_functional.wait_tensor.default, row.arguments(n, part)
    return 4 * (input_rows + output_rows), lambda: wait(
        row.targets[0](sent, *arguments, group.group_name)
    )


def _collective_ms(
    launch: Callable[[], Any], group: dist.ProcessGroup, device: str, repeats: int
) -> float:
    """Measure the median milliseconds of a collective, of the slowest rank."""
    runs = []
    for _ in range(1 + repeats):
        dist.barrier(group)
        runs.append(_timed(launch, device))
    times = torch.tensor(runs[1:], dtype=torch.float64, device=device)
    dist.all_reduce(times, dist.ReduceOp.MIN, group)  # the last rank to arrive did not wait
    return _slowest(statistics.median(times.tolist()), device)


def _kernel_ms(run: Callable[[], Any], device: str, repeats: int) -> float:
    run()
    return _slowest(statistics.median(_timed(run, device) for _ in range(repeats)), device)


def _launch_ms(launch: Callable[[], Any], device: str) -> float:
    """Time the host's part of a launch; 0 on the CPU, which is its own host."""
    if device == "cpu":
        return 0.0
    for _ in range(_LAUNCHES // 10):
        launch()
    torch.cuda.synchronize()
    clock = time.perf_counter()
    for _ in range(_LAUNCHES):
        launch()
    ms = (time.perf_counter() - clock) / _LAUNCHES * 1e3
    torch.cuda.synchronize()
    return _slowest(ms, device)


def _slowest(ms: float, device: str) -> float:
    """Return the largest of all ranks' numbers, on each rank."""
    value = torch.tensor([ms], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return max(float(value), 1e-6)


def _timed(run: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    clock = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - clock) * 1e3
