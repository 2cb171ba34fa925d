"""The plain list schedule: of the nodes that can begin first, the longest path goes ahead.

It knows no limit on memory, no window and no depth of prefetching, so no order of
:mod:`.list_schedule` that is chosen may be longer, where the bounds allow this one.
"""

from __future__ import annotations

import heapq
import math

from .list_schedule import ROUNDING
from .model import Model
from .timeline import Streams


def plain_schedule(model: Model, at_most_ms: float = math.inf) -> list[int] | None:
    """Return the places of all nodes in the order of the plain list schedule.

    None: the step is known to take longer than ``at_most_ms``.
    """
    at_most_ms *= ROUNDING
    tail, ms, group, start_of = model.paths.tail, model.ms, model.group, model.start_of
    host, launched = model.host, 0.0
    missing = [len(needs) for needs in model.dependencies.needs]
    streams = Streams(group, ms, model.shared)
    starts: list[tuple[float, int]] = []
    ready: list[tuple[float, int]] = []
    waiting: list[tuple[float, float, int]] = []  # by the end of their collectives
    order: list[int] = []
    now, left = 0.0, model.paths.kernels_ms

    def add(i: int) -> None:
        if group[i] is not None:
            heapq.heappush(starts, (-tail[i], i))
        elif start_of[i] >= 0:
            heapq.heappush(waiting, (streams.end[start_of[i]], -tail[i], i))
        else:
            heapq.heappush(ready, (-tail[i], i))

    for i, needs in enumerate(missing):
        if not needs:
            add(i)
    while starts or ready or waiting:
        while waiting and waiting[0][0] <= now:
            heapq.heappush(ready, heapq.heappop(waiting)[1:])
        if starts:
            _, i = heapq.heappop(starts)
            launched += host[i]
            now = max(now, launched)
            streams.launch(i, now)
            late = streams.end[i] + tail[i] - ms[i] > at_most_ms
        else:
            i = heapq.heappop(ready)[1] if ready else heapq.heappop(waiting)[2]
            launched += host[i]
            now = max(now, launched)
            if start_of[i] >= 0:
                now = max(now, streams.end[start_of[i]])
            late = now + max(left, tail[i]) > at_most_ms
            now += ms[i]
            left -= ms[i]
        if late:
            return None
        order.append(i)
        for j in model.dependencies.needed_by[i]:
            missing[j] -= 1
            if not missing[j]:
                add(j)
    return order
