"""The machine that estimates are for."""

from dataclasses import replace

from torch_ext_bucketing.planner.cost.machine import H100, Level, Machine


def nodes(gb_per_s: float | None) -> Machine:
    """Nodes of 8 H100s, with so many GB/s of each rank between them; None: :data:`H100`'s."""
    if gb_per_s is None:
        return H100
    assert isinstance(H100.inter, Level)
    return replace(H100, inter=replace(H100.inter, bandwidth=gb_per_s * 1e9))
