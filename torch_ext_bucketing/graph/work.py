"""Note what a node costs where its sizes depend on the rank, so that all ranks plan alike."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

_KEY = "bucketing_work"


@dataclass(frozen=True)
class Work:
    """The cost of a node on the most expensive rank.

    Args:
        flops: floating-point operations in bfloat16.
        moved: bytes that it reads and writes.
        result: bytes of its result.
    """

    flops: int
    moved: int
    result: int


def set_work(node: fx.Node, work: Work) -> None:
    """Note what ``node`` costs, in place of what its own sizes are."""
    node.meta[_KEY] = work


def work_of(node: fx.Node) -> Work | None:
    """Return what was noted; None for nodes that cost what their sizes are."""
    found: Work | None = node.meta.get(_KEY)
    return found
