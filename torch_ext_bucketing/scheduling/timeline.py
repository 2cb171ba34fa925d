"""What an order costs: when each node runs, on one compute stream and one stream per process group.

The CPU is taken to run ahead, so kernels start when their stream and their inputs are ready. A
collective starts when its group's stream is free and the compute stream has come to it; a wait
holds the compute stream until its collective is done::

    compute    mm   cat   mm  mm  |exposed| wait  mm
    group 0              [ reduce_scatter ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .model import Model

__all__ = [
    "Timeline",
    "longest_compute_run",
    "lower_bound",
]


@dataclass(frozen=True)
class Timeline:
    """An order on a machine.

    Args:
        order: places of the nodes.
        begin: when each node begins, in milliseconds, by place.
        end: when it ends.
        step_ms: when the last stream is done.
        compute_ms: time that the compute stream is busy.
        exposed_ms: time that it waits for communication, before and after its last kernel.
        live: bytes live while each node of ``order`` runs.
        peak_bytes: the most of them.
        longest_run: most compute nodes between two reduce-scatter starts; before the first counts,
            after the last does not. 0 without reduce-scatters.
    """

    order: tuple[int, ...]
    begin: tuple[float, ...]
    end: tuple[float, ...]
    step_ms: float
    compute_ms: float
    exposed_ms: float
    live: tuple[int, ...]
    peak_bytes: int
    longest_run: int

    @staticmethod
    def of(model: Model, order: Sequence[int] | None = None) -> Timeline:
        """The timeline of ``order``; of the graph's own when None."""
        order = range(len(model)) if order is None else order
        begin, end = [0.0] * len(model), [0.0] * len(model)
        free: dict[str, float] = {}
        now = busy = 0.0
        for i in order:
            group = model.group[i]
            if group is not None:
                begin[i] = max(now, free.get(group, 0.0))
                end[i] = free[group] = begin[i] + model.ms[i]
                continue
            start = model.start_of[i]
            if start >= 0 and end[start] > now:
                now = end[start]
            begin[i] = now
            now += model.ms[i]
            busy += model.ms[i]
            end[i] = now
        step = max([now, *free.values()])
        live = model.liveness.profile(order)
        return Timeline(
            tuple(order),
            tuple(begin),
            tuple(end),
            step,
            busy,
            step - busy,
            tuple(live),
            max(live, default=model.liveness.at_start),
            longest_compute_run(model, order),
        )


def longest_compute_run(model: Model, order: Sequence[int]) -> int:
    """See :attr:`Timeline.longest_run`."""
    run = longest = 0
    for i in order:
        run += model.compute[i]
        if model.reduces[i]:
            longest = max(longest, run)
            run = 0
    return longest


def lower_bound(model: Model) -> float:
    """Milliseconds that no order can beat: the largest of the longest path through the graph, all
    compute, and all communication of the busiest process group."""
    done = [0.0] * len(model)
    streams: dict[str, float] = {}
    for i, needs in enumerate(model.dependencies.needs):
        ahead = [done[j] for j in needs if model.needs_end(j, i)]
        done[i] = model.ms[i] + max(ahead, default=0.0)
        name = model.group[i] or ""
        streams[name] = streams.get(name, 0.0) + model.ms[i]
    return max([0.0, *done, *streams.values()])
