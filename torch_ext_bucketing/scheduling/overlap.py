"""How communication is hidden: what torch's scheduler is told, and an overlap of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "DEFAULT_PREFETCH",
    "Overlap",
    "PrefetchDepth",
]


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
        _check_count("compute_nodes", self.compute_nodes)


@dataclass(frozen=True)
class Overlap:
    """Gathers launch ahead of their use, reductions are waited for late, for
    :func:`.schedule`.

    Several orders are tried on the cost model, from the graph's own order of computation to one
    that lets the longest remaining path go first, and the fastest within the bounds is taken.

    Args:
        depth: gathers of one process group that may be under way or unused ahead of the next.
        window: compute nodes by which computation may overtake other computation, to fill the time
            of a wait or to launch communication earlier. 0 keeps the order of computation. Without
            such a bound memory may grow several times over.
        max_prefetch: compute nodes that a gather may be ahead of its use.
        prefetch_under: says for some gathers under which computation they are to run: the name of
            a parameter or module whose gather it is, to the name of a parameter or module under
            whose computation it is launched, as in ``{"layers.4": "layers.3"}``.

    Raises:
        TypeError: ``prefetch_under`` is no mapping of names to names.
        ValueError: a negative or fractional number.
    """

    depth: int = 1
    window: int = 100
    max_prefetch: int = 100
    prefetch_under: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("depth", "window", "max_prefetch"):
            _check_count(name, getattr(self, name))
        under = self.prefetch_under
        if not isinstance(under, Mapping) or not all(
            isinstance(name, str) for name in (*under, *under.values())
        ):
            raise TypeError(f"prefetch_under must map names to names, got {under!r}")


def _check_count(name: str, number: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {number!r}")


DEFAULT_PREFETCH = PrefetchDepth()
