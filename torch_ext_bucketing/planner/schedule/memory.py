"""Bound the memory of an order by a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...reports.base import sizes_text
from .policy import Case, Options, Policy, PolicyReport
from .timeline import Timeline

_GIB = 2**30
_ALL = 2**63  # bytes: more than any graph needs
_OWN_SEGMENT = 10 * 2**20
"""torch's CUDA allocator has a segment of its own for each block that is at least as large."""


@dataclass(frozen=True)
class PeakMemory(Policy):
    """Bound the estimated peak of live bytes.

    Args:
        gib: the bound in GiB; give it or ``ratio``. It includes inputs, saved values and constants
            of the graph, in backward the parameters that only forward reads, and cuBLAS's
            workspaces on CUDA.
        ratio: the bound relative to the graph's peak before bucketing and reordering.
        host_gib: pinned host memory of each rank in GiB that may hold activations from forward to
            backward; None: none. For ``recipe()`` and ``ReshardAfterForward("auto")``, which choose
            them; the order of a graph does not depend on it.
    """

    gib: float | None = None
    ratio: float | None = None
    host_gib: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        given = [v for v in (self.gib, self.ratio) if v is not None]
        if len(given) != 1:
            raise ValueError(
                f"give either gib or ratio, got gib={self.gib!r} and ratio={self.ratio!r}"
            )
        for bound in (*given, *([] if self.host_gib is None else [self.host_gib])):
            number = isinstance(bound, (int, float)) and not isinstance(bound, bool)
            if not number or not 0 < bound < float("inf"):
                raise ValueError(f"the bound must be a positive number, got {bound!r}")

    @property
    def host_bytes(self) -> int:
        """The bound on pinned host memory in bytes; 0 without one."""
        return int(min((self.host_gib or 0) * _GIB, _ALL))

    def limit_bytes(self, reference: int) -> int:
        """Return the bound in bytes, for a graph whose peak was ``reference`` bytes."""
        if self.gib is not None:
            return int(min(self.gib * _GIB, _ALL))
        assert self.ratio is not None
        return int(min(self.ratio * reference, _ALL))

    def ask(self, case: Case, options: Options) -> Options:
        """Keep prefetching and overtaking under the bound."""
        return options.tightened(limit_bytes=self.limit_bytes(case.reference_bytes))

    def misses(self, case: Case, timeline: Timeline) -> float:
        """Return the peak's excess over the bound, relative to the bound."""
        limit = self.limit_bytes(case.reference_bytes)
        return max(0, timeline.peak_bytes - limit) / max(1, limit)

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        """Report the bound in bytes, and the place of a peak above it."""
        limit = self.limit_bytes(case.reference_bytes)
        figures = {"limit_bytes": limit}
        if timeline.peak_bytes <= limit:
            # A ratio names no card's memory.
            large = "" if self.gib is None else _large(*case.model.largest, limit)
            return PolicyReport(repr(self), figures, warning=large)
        nodes = case.model.dependencies.nodes
        at = timeline.live.index(timeline.peak_bytes) if timeline.live else 0
        where = nodes[timeline.order[at]].name if timeline.live else "the inputs"
        reached, bound, given = sizes_text(timeline.peak_bytes, limit, case.model.liveness.at_start)
        warning = (
            f"PeakMemory: {reached} live at {where}, above the bound of {bound}; inputs, saved "
            f"values and constants are {given} of it, and no order tried needs less. Smaller "
            "buckets and more recomputation need less."
        )
        return PolicyReport(repr(self), figures, warning=warning)


def _large(name: str, nbytes: int, limit: int) -> str:
    """Return a warning if one block is a large part of the bound."""
    if nbytes <= max(_OWN_SEGMENT, limit / 4):
        return ""
    block, bound = sizes_text(nbytes, limit)
    return (
        f"PeakMemory: one block of {block}, of {name}, is over a quarter of the bound of {bound}; "
        "the allocator needs as much in one piece, and may hold more than live bytes for that "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids it)"
    )


def within(policies: Sequence[Policy], limit_bytes: int, reference: int) -> tuple[Policy, ...]:
    """Return ``policies`` with a bound on memory, or their own one if that is tighter."""
    own = [p.limit_bytes(reference) for p in policies if isinstance(p, PeakMemory)]
    bound = PeakMemory(gib=max(1, min([limit_bytes, *own])) / _GIB)
    return (*(p for p in policies if not isinstance(p, PeakMemory)), bound)
