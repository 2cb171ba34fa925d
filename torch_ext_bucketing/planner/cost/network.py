"""Time collectives on a network of two levels by NCCL's tuning model.

NCCL sends by one of three protocols. LL and LL128 write a flag beside the data, so a step takes
little and bandwidth is lost; Simple waits for whole chunks. An estimate takes the fastest. Formulas
and latencies are those of NCCL's ``src/graph/tuning.cc``, which torch's
``torch/_inductor/comm_analysis.py`` has, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...graph.nodes import CollectiveType

_TREE_SHARE = 0.6
"""A tree's share of a ring's bandwidth.

NCCL's ``treeCorrectionFactor`` falls from 0.9 to 0.4 or 0.5 and comes back, by size and protocol.
"""


class Protocol(NamedTuple):
    """Bandwidth and latencies of one of NCCL's protocols on one level of a network."""

    base_ms: float  # milliseconds of a collective without its steps
    ring_ms: float  # milliseconds of a step of a ring
    # Milliseconds of a step of a tree, and of a ring with one rank on each node, where nothing
    # hides the network.
    tree_ms: float
    share: float = 1.0  # of the level's bandwidth
    # Bytes per second that a whole group reaches at most; None: no such limit.
    limit: float | None = None

    def reached(self, bandwidth: float) -> float:
        """Return the bytes per second that the protocol reaches at ``bandwidth``."""
        return min(bandwidth * self.share, math.inf if self.limit is None else self.limit)


@dataclass(frozen=True)
class Level:
    """One level of a network.

    Args:
        bandwidth: bytes per second that each rank sends and, at the same time, receives.
        latency_ms: milliseconds of the smallest message, a step of a ring.
        protocols: in place of ``latency_ms``, those of NCCL, in the same order on both levels of a
            machine.
    """

    bandwidth: float
    latency_ms: float = 0.0
    protocols: tuple[Protocol, ...] = ()

    def __post_init__(self) -> None:
        check_rate("bandwidth", self.bandwidth)
        check_time("latency_ms", self.latency_ms)
        if self.protocols and self.latency_ms:
            raise ValueError("give latency_ms or protocols, not both")
        for protocol in self.protocols:
            if not isinstance(protocol, Protocol):
                raise ValueError(f"protocols must be Protocol(...), got {protocol!r}")
            for name in ("base_ms", "ring_ms", "tree_ms"):
                check_time(name, getattr(protocol, name))
            check_rate("share", protocol.share)
            if protocol.limit is not None:
                check_rate("limit", protocol.limit)


def nvlink(limit: float) -> tuple[Protocol, ...]:
    """Return NCCL's LL, LL128 and Simple on NVLink; LL reaches ``limit`` bytes per second."""
    return (
        Protocol(0.0066, 0.0006, 0.0006, 0.5, limit),
        Protocol(0.014, 0.0019, 0.00125, 0.92),
        Protocol(0.0084, 0.0034, 0.004),
    )


INFINIBAND = (
    Protocol(0.0066, 0.0027, 0.005, 0.5, 20.4e9),
    Protocol(0.014, 0.004, 0.0085, 0.92),
    Protocol(0.0084, 0.014, 0.014),
)
"""The same between nodes. LL's limit is that of four nodes or more."""


def levels_ms(
    kind: CollectiveType, members: Sequence[int], nbytes: int, intra: Level, inter: Level
) -> float:
    """Estimate the milliseconds of a collective.

    A ring moves (n - 1) / n of the buffer past every one of n ranks, for an all-reduce twice, at
    the bandwidth of the slower level: ``intra``'s, or the sum of ``inter``'s over the ranks of a
    node. Of its n - 1 steps, k - 1 have the latency between k nodes. A tree, which NCCL has for
    all-reduces between nodes, goes up and down log2(k) steps between them. In an all-to-all each
    rank sends one message to each level at the same time.

    ``members``: ranks of the group on each of its nodes, at least two in all. ``nbytes``: input and
    output together.
    """
    n, nodes, fewest, most = sum(members), len(members), min(members), max(members)
    count = max(len(intra.protocols), len(inter.protocols), 1)
    pairs = list(zip(_protocols(intra, count), _protocols(inter, count), strict=False))
    if not kind.rounds:
        near, far = nbytes / 2 * (most - 1) / n, nbytes / 2 * (n - fewest) / n
        parts = ((near, 0, intra.bandwidth), (far, 1, inter.bandwidth))
        return max(
            min(
                pair[i].base_ms + pair[i].ring_ms + part / pair[i].reached(speed) * 1e3
                for pair in pairs
            )
            for part, i, speed in parts
            if part
        )
    whole = (n if kind.whole_input else 1) + (n if kind.whole_output else 1)
    buffer = nbytes * n / whole
    trees = kind.rounds == 2 and nodes > 1 and intra.protocols and inter.protocols
    estimates = []
    for inside, between in pairs:  # a ring is as fast as its slowest hop
        speeds = [inside.reached(intra.bandwidth)] if most > 1 else []
        speeds += [between.reached(fewest * inter.bandwidth)] if nodes > 1 else []
        base = max(inside.base_ms, between.base_ms) if nodes > 1 else inside.base_ms
        step = between.ring_ms if most > 1 else between.tree_ms
        steps = (n - nodes) * inside.ring_ms + (nodes - 1) * step
        moving = buffer / min(speeds) * 1e3
        estimates.append(base + kind.rounds * (moving * (n - 1) / n + steps))
        if trees:
            steps = (most - 1) * inside.tree_ms + math.log2(nodes) * between.tree_ms
            estimates.append(base + 2 * (moving / _TREE_SHARE + steps))
    return min(estimates)


def _protocols(level: Level, count: int) -> Sequence[Protocol]:
    return level.protocols or [Protocol(0.0, level.latency_ms, level.latency_ms)] * count


def is_time(value: Any) -> bool:
    """Return whether ``value`` is a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def check_rate(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a positive rate per second."""
    if not is_time(value) or not value:
        raise ValueError(f"{name} must be a positive rate per second, got {value!r}")


def check_time(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a time of at least 0."""
    if not is_time(value):
        raise ValueError(f"{name} must be a time of at least 0, got {value!r}")
