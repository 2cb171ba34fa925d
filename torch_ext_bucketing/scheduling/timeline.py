"""The times of an order, on one compute stream and one stream per process group.

The CPU is taken to run ahead, so kernels start when their stream and their inputs are ready. A
collective starts when its group's stream is free and the compute stream has come to it
(:mod:`.streams`); a wait holds the compute stream until its collective is done::

    compute    mm   cat   mm  mm  |exposed| wait  mm
    group 0              [ reduce_scatter ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .model import Model
from .streams import Streams

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
        streams = Streams(model.group, model.ms, model.shared)
        begin, end = streams.begin, streams.end
        now = busy = 0.0
        for i in order:
            if model.group[i] is not None:
                streams.launch(i, now)
                continue
            start = model.start_of[i]
            if start >= 0 and end[start] > now:
                now = end[start]
            begin[i] = now
            now += model.ms[i]
            busy += model.ms[i]
            end[i] = now
        step = max(now, streams.last_end())
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
    """Most compute nodes between two reduce-scatter starts; see :attr:`Timeline.longest_run`."""
    run = longest = 0
    for i in order:
        run += model.compute[i]
        if model.reduces[i]:
            longest = max(longest, run)
            run = 0
    return longest


def lower_bound(model: Model) -> float:
    """Milliseconds that no order can beat: :attr:`.ModelAnalysis.busiest_ms`, or the collectives of
    a longest path with all that has to be computed between them.

    A path has one node after the other. Between two of its collectives there is more: whatever
    needs the first one's result and is needed by the second runs on the one compute stream::

        all_to_all -> wait -> mm1 -> mul -> all_to_all      path: mm1, mul
                           `-> mm2 -----^                   between them: mm1, mm2, mul
    """
    return max(model.analysis.busiest_ms, _serial_ms(model, _longest_path(model)))


def _longest_path(model: Model) -> list[int]:
    """The places of the nodes of a longest path, first to last."""
    done, before = [0.0] * len(model), [-1] * len(model)
    for i, needs in enumerate(model.dependencies.needs):
        longest = 0.0
        for j in needs:
            if done[j] > longest and model.needs_end(j, i):
                longest, before[i] = done[j], j
        done[i] = model.ms[i] + longest
    path = [max(range(len(done)), key=done.__getitem__)] if done else []
    while path and before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return path[::-1]


def _serial_ms(model: Model, path: Sequence[int]) -> float:
    """The time of the collectives of a path, and of what is computed before, between and after."""
    if not path:
        return 0.0
    needs, needed_by = model.dependencies.needs, model.dependencies.needed_by
    total, after = 0.0, -1  # the last collective, as far as the path has gone
    for node in (*path, -1):
        if node >= 0 and model.group[node] is None:
            continue
        ahead = _reached(model, node, needs, after) if node >= 0 else None
        last = node if node >= 0 else len(model)
        behind = _reached(model, after, needed_by, last) if after >= 0 else None
        if ahead is None:
            between = behind if behind is not None else set(range(len(model)))
        else:
            between = ahead if behind is None else ahead & behind
        total += sum(model.ms[i] for i in sorted(between) if model.group[i] is None)
        total += model.ms[node] if node >= 0 else 0.0
        after = node
    return total


def _reached(model: Model, start: int, edges: Sequence[Sequence[int]], last: int) -> set[int]:
    """The nodes that ``start`` waits for, or that wait for it, along ``edges`` up to ``last``."""
    back = last < start
    found, stack = set[int](), [start]
    while stack:
        node = stack.pop()
        for other in edges[node]:
            if other in found or (other <= last if back else other >= last):
                continue
            if model.needs_end(other, node) if back else model.needs_end(node, other):
                found.add(other)
                stack.append(other)
    return found
