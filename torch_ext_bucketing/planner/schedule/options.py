"""The options of the list scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Options:
    """Bounds and preferences for one order.

    Args:
        limit_bytes: live bytes that prefetching and overtaking must stay under; where what follows
            the order of the graph would not, collectives under way are waited for first, and what
            they use is freed. None: no bound.
        window: compute nodes within which the longest remaining path decides; 0: the graph's order.
        fill: compute nodes ahead of the oldest open one that may run while it would have to wait.
        depth: gathers of one group that may be under way or unused ahead of the next one.
        max_prefetch: compute nodes that a gather may be ahead of its use.
        deadlines: whether gathers may also go as early as their stream needs to be done in time.
        max_run: most compute nodes between two reduce-scatters; None: no bound.
        under: for a gather, by place, the place of the kernel before which it must be launched and
            not long before.
    """

    limit_bytes: int | None = None
    window: int = 0
    fill: int = 100
    depth: int = 1
    max_prefetch: int = 100
    deadlines: bool = True
    max_run: int | None = None
    under: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def sort(self) -> Options:
        """These options without ``under``, whose places are of one model, so that they can be
        compared between the model of planned buckets and that of the merged graph."""
        return replace(self, under={})

    def tightened(self, *, limit_bytes: int | None = None, max_run: int | None = None) -> Options:
        """These options with further bounds; of two bounds of one sort the tighter one holds."""
        return replace(
            self,
            limit_bytes=_tighter(self.limit_bytes, limit_bytes),
            max_run=_tighter(self.max_run, max_run),
        )


def _tighter(one: int | None, other: int | None) -> int | None:
    given = [bound for bound in (one, other) if bound is not None]
    return min(given, default=None)
