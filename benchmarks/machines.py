"""The machine with two network levels that estimates are for."""

from __future__ import annotations

from dataclasses import replace

from torch_ext_bucketing.scheduling.machine import H100, Level, Machine

__all__ = ["BETWEEN", "MACHINE", "PER_NODE", "nodes"]

PER_NODE = 8
BETWEEN = Level(40e9, 0.03)
MACHINE = Machine(
    "H100 nodes of 8",
    flops=H100.flops,
    bandwidth=H100.bandwidth,
    ranks_per_node=PER_NODE,
    # NVIDIA's data sheets: NVLink 4 moves 450 GB/s each way, a 400 Gbit/s adapter per GPU 50 GB/s.
    # About eight tenths of both are reached.
    intra=Level(360e9, 0.01),
    inter=BETWEEN,
)


def nodes(gb_per_s: float | None) -> Machine:
    """:data:`MACHINE` with so many GB/s of each rank between nodes; without a number, ``H100``,
    whose collectives take what torch's model of NCCL says, wherever their ranks are."""
    if gb_per_s is None:
        return H100
    return replace(MACHINE, inter=replace(BETWEEN, bandwidth=gb_per_s * 1e9))
