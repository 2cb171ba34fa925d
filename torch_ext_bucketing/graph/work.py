"""Note what a node costs where its sizes depend on the rank, so that all ranks plan alike."""

from __future__ import annotations

from typing import NamedTuple

import torch.fx as fx

from .collectives import tensors_in
from .size_hints import SizeHints
from .tags import note, noted

_KEY = "bucketing_work"


class Work(NamedTuple):
    """The cost of a node on the most expensive rank.

    Args:
        result: bytes of its result.
        moved: bytes that it reads and writes; None: those of its inputs and its result.
        flops: floating-point operations in bfloat16, where ``moved`` is given.
    """

    result: int
    moved: int | None = None
    flops: int = 0


def set_work(node: fx.Node, work: Work) -> None:
    """Note what ``node`` costs, in place of what its own sizes are."""
    note(node, _KEY, work)


def work_of(node: fx.Node) -> Work | None:
    """Return what was noted; None for nodes that cost what their sizes are."""
    found: Work | None = noted(node, _KEY)
    return found


def result_bytes(node: fx.Node, hints: SizeHints) -> int:
    """Count the bytes of the tensors that a node returns."""
    work = work_of(node)
    if work is not None:
        return work.result
    values = tensors_in(node.meta.get("val"))
    return sum(hints(t.numel()) * t.dtype.itemsize for t in values)
