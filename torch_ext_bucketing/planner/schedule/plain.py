"""The plain list schedule: of the nodes that can begin first, the longest path goes ahead.

It knows no limit on memory, no window and no depth of prefetching, so no order of
:mod:`.list_schedule` that is chosen may be longer, where the bounds allow this one.
"""

from __future__ import annotations

import heapq

from .model import Model
from .streams import Streams


def plain_schedule(model: Model) -> list[int]:
    """Return the places of all nodes in the order of the plain list schedule."""
    tail, ms, group, start_of = model.paths.tail, model.ms, model.group, model.start_of
    missing = [len(needs) for needs in model.dependencies.needs]
    streams = Streams(group, ms, model.shared)
    starts: list[tuple[float, int]] = []
    ready: list[tuple[float, int]] = []
    waiting: list[tuple[float, float, int]] = []  # by the end of their collectives
    order: list[int] = []
    now = 0.0

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
            streams.launch(i, now)
        else:
            i = heapq.heappop(ready)[1] if ready else heapq.heappop(waiting)[2]
            if start_of[i] >= 0:
                now = max(now, streams.end[start_of[i]])
            now += ms[i]
        order.append(i)
        for j in model.dependencies.needed_by[i]:
            missing[j] -= 1
            if not missing[j]:
                add(j)
    return order
