"""What torch's overlap scheduler is told."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_PREFETCH", "PrefetchDepth"]


@dataclass(frozen=True)
class PrefetchDepth:
    """How far ahead of its use torch's overlap scheduler may launch a gather.

    The default hides all-gathers of 5 to 7 ms under the matmuls of about three transformer layers;
    the figure is AutoParallel's (AutoParallel PR 481), where it took 20 ms off a step of 385 ms of
    LLaMA-3 8B on 128 H100. torch's own default, 200, lets gathered parameters pile up.

    Args:
        compute_nodes: bound on the number of compute nodes (matrix products, attention) between
            launch and use: ``aten_distributed_optimizations.max_compute_pre_fetch``.

    Raises:
        ValueError: a negative or fractional number.
    """

    compute_nodes: int = 50

    def __post_init__(self) -> None:
        number = self.compute_nodes
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(
                f"compute_nodes must be a whole number of at least 0, got {self.compute_nodes!r}"
            )


DEFAULT_PREFETCH = PrefetchDepth()
