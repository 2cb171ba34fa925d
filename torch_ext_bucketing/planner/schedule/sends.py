"""The next collective after each kernel, and which of two kernels runs first for it.

Longest paths don't decide this. Two chunks of tokens have equally long paths, so their kernels
would alternate, and the stream of both chunks' collectives would be idle until both are ready::

    compute    | a | b | a | b |              | a     | b     |
    group                   [ of a ][ of b ]          [ of a ][ of b ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .nodes import NodeTable


class Send(NamedTuple):
    """The next collective on a node's longest path that its own kernels can't hide.

    Args:
        compute_ms: milliseconds of the node and of the path up to the collective, collectives
            that kernels hide included; of the node alone without a collective.
        group: the collective's process group; None without one.
        ms: its milliseconds; 0 without one.
        tail: least milliseconds from its begin to the end of the step.
    """

    compute_ms: float
    group: str | None
    ms: float
    tail: float


def sends_of(model: NodeTable, tail: Sequence[float]) -> list[Send]:
    """Find the next collective of each node, by place; see :class:`.Paths` for ``tail``."""
    size, ms, group = len(model), model.ms, model.group
    ahead, start = [0.0] * size, [-1] * size
    for i in reversed(range(size)):
        users = model.dependencies.needed_by[i]
        if group[i] is not None:
            users = [j for j in users if model.needs_end(i, j)]
        after = max(users, key=tail.__getitem__, default=-1)
        if after >= 0 and group[after] is not None:
            start[i] = after
        elif after >= 0:
            ahead[i], start[i] = ahead[after], start[after]
        if group[i] is not None:  # its path begins after it
            continue
        ahead[i] += ms[i]
        while (at := start[i]) >= 0 and ms[at] < ahead[i]:
            ahead[i] += ms[at] + ahead[at]
            start[i] = start[at]
    return [
        Send(ms[i], None, 0.0, tail[i] - ms[i])
        if at < 0
        else Send(ahead[i], group[at], ms[at], tail[at])
        for i, at in enumerate(start)
    ]


def sooner_ms(first: Send, second: Send, busy_first: float, busy_second: float) -> float:
    """Compute how much sooner the step ends with the first kernel's path ahead of the second's.

    Both paths run through to their next collectives. Collectives of one group run one after the
    other.

    Args:
        first: the next collective of the first kernel.
        second: that of the second kernel.
        busy_first: milliseconds until the first collective's stream is free; 0 without a group.
        busy_second: the same for the second one's.

    Returns:
        Milliseconds, negative where the second path had better go ahead.
    """
    # This runs for each pair of ready kernels, so it calls nothing, not even max().
    compute, group, ms, tail = first
    other_compute, other_group, other_ms, other_tail = second
    both = compute + other_compute
    begin = compute if compute > busy_first else busy_first
    other_begin = other_compute if other_compute > busy_second else busy_second
    free, other_free = busy_second, busy_first
    if group == other_group:
        free, other_free = begin + ms, other_begin + other_ms
    ahead, after = begin + tail, (both if both > free else free) + other_tail
    end = ahead if ahead > after else after
    ahead, after = other_begin + other_tail, (both if both > other_free else other_free) + tail
    return (ahead if ahead > after else after) - end
