"""The machine with two network levels that estimates are for."""

from __future__ import annotations

from dataclasses import replace

from torch_ext_bucketing.scheduling.machine import H100, Level, Machine

__all__ = ["BETWEEN", "FLAT", "MACHINE", "PER_NODE", "nodes"]

PER_NODE = 8
BETWEEN = Level(40e9, 0.03)
# The other figures are H100's. Of 40 GB/s rather than 42, and 0.01 ms, as first measured with.
MACHINE = replace(H100, name="H100 nodes of 8", intra=Level(360e9, 0.01), inter=BETWEEN)
FLAT = replace(H100, ranks_per_node=None, intra=None, inter=None)


def nodes(gb_per_s: float | None) -> Machine:
    """:data:`MACHINE` with so many GB/s of each rank between nodes; without a number, :data:`FLAT`,
    whose collectives take what torch's model of NCCL says, wherever their ranks are."""
    if gb_per_s is None:
        return FLAT
    return replace(MACHINE, inter=replace(BETWEEN, bandwidth=gb_per_s * 1e9))
