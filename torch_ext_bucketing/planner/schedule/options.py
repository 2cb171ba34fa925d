"""The options of the list scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace


@dataclass(frozen=True)
class Options:
    """Bounds and preferences for one order.

    Args:
        limit_bytes: live bytes that prefetching and overtaking stay under. A kernel that would
            exceed them first waits for collectives in flight, which frees their buffers. None: no
            limit.
        window: compute nodes among which the longest remaining path runs first; 0: the graph's
            order.
        fill: compute nodes after the oldest open one that may run while it waits.
        depth: gathers of one group that may be in flight or unused when the next one launches.
        max_prefetch: compute nodes that a gather may be ahead of its use.
        deadlines: whether gathers may launch earlier for their stream to end in time.
        hold: whether a kernel is held back while one with a longer path waits, if the path would be
            delayed.
        max_run: most compute nodes between two reduce-scatters; None: no bound.
        under: the place of the kernel to launch a gather right before, by the gather's place.
    """

    limit_bytes: int | None = None
    window: int = 0
    fill: int = 100
    depth: int = 1
    max_prefetch: int = 100
    deadlines: bool = True
    hold: bool = True
    max_run: int | None = None
    under: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def sort(self) -> Options:
        """The options without ``under``, whose places are those of one model.

        They can be compared between the model of planned buckets and that of the merged graph.
        """
        return replace(self, under={})

    def next_to(self, other: Options, windows: Sequence[int]) -> bool:
        """Return whether one preference differs, a window by one step of ``windows``.

        Orders without a window, those of the graph, are like no others, so they are next to all.
        """
        if not self.window:
            return True
        differ = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        step = abs(windows.index(self.window) - windows.index(other.window))
        return len(differ) <= 1 and step <= 1

    def tightened(self, *, limit_bytes: int | None = None, max_run: int | None = None) -> Options:
        """Return the options with further bounds. The tighter one of two bounds counts."""
        return replace(
            self,
            limit_bytes=_tighter(self.limit_bytes, limit_bytes),
            max_run=_tighter(self.max_run, max_run),
        )


def _tighter(one: int | None, other: int | None) -> int | None:
    given = [bound for bound in (one, other) if bound is not None]
    return min(given, default=None)


def at_least(bound: int | None, other: int | None) -> bool:
    """Return whether a bound allows what another one allows. None allows all."""
    return bound is None or (other is not None and bound >= other)
