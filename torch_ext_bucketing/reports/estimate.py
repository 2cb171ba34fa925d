"""The cost model's times of one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .base import Record


@dataclass(frozen=True)
class EstimateReport(Record):
    """A graph as it was compiled, on the machine of the cost model; times in milliseconds.

    Args:
        stage: of the graph, such as ``"forward"``.
        machine: the machine, and its ranks per node.
        step_ms: the end of the last stream.
        kernels_ms: time that kernels keep the compute stream busy.
        busy_ms: sum over the collectives of each kind.
        exposed_ms: the part of it that the compute stream waits for.
        peak_bytes: most live bytes.
    """

    stage: str
    machine: str
    step_ms: float
    kernels_ms: float
    busy_ms: Mapping[str, float]
    exposed_ms: Mapping[str, float]
    peak_bytes: int
