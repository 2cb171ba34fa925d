"""What kernels are on the way to, and which of two goes first for that.

A path alone does not say it: of two chunks of tokens, whose paths are equally long, each would get
a few kernels in turn, and the stream that both send on would stand idle until both are there::

    compute    | a | b | a | b |              | a     | b     |
    group                   [ of a ][ of b ]          [ of a ][ of b ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .nodes import NodeTable


class Send(NamedTuple):
    """The next collective on a node's longest path that takes no less than what is ahead of it.
    What takes less can hide under that, and counts as a part of it.

    Args:
        compute_ms: what is ahead of it, with the node; of the node alone where no collective
            follows.
        group: its process group; None where none follows.
        ms: that it takes; 0 where none follows.
        tail: milliseconds from then to the end at least.
    """

    compute_ms: float
    group: str | None
    ms: float
    tail: float


def sends_of(model: NodeTable, tail: Sequence[float]) -> list[Send]:
    """For each node by place; ``tail`` is as of :class:`.Paths`."""
    size, ms = len(model), model.ms
    ahead, start = [0.0] * size, [-1] * size
    for i in reversed(range(size)):
        users = [j for j in model.dependencies.needed_by[i] if model.needs_end(i, j)]
        after = max(users, key=tail.__getitem__, default=-1)
        if after >= 0 and model.group[after] is not None:
            start[i] = after
        elif after >= 0:
            ahead[i], start[i] = ahead[after], start[after]
        if model.group[i] is not None:  # what is behind it
            continue
        ahead[i] += ms[i]
        while (at := start[i]) >= 0 and ms[at] < ahead[i]:
            ahead[i] += ms[at] + ahead[at]
            start[i] = start[at]
    return [
        Send(ms[i], None, 0.0, tail[i] - ms[i])
        if at < 0
        else Send(ahead[i], model.group[at], ms[at], tail[at])
        for i, at in enumerate(start)
    ]


def sooner_ms(first: Send, second: Send, busy_first: float, busy_second: float) -> float:
    """By how many milliseconds all that follows two kernels is done sooner with the first one ahead
    than with the second one, each run through to what it is on the way to. Collectives of one group
    go one after the other.

    Args:
        first: what the first kernel is on the way to.
        second: what the second one is.
        busy_first: how long the stream of the first one's group is still busy; 0 without a group.
        busy_second: that of the second one's.
    """
    # A schedule asks this for each two of the kernels that could be next: without calls.
    compute, group, ms, tail = first
    other_compute, other_group, other_ms, other_tail = second
    both = compute + other_compute
    begin = compute if compute > busy_first else busy_first
    other_begin = other_compute if other_compute > busy_second else busy_second
    free, other_free = busy_second, busy_first
    if group == other_group:
        free, other_free = begin + ms, other_begin + other_ms
    ahead, behind = begin + tail, (both if both > free else free) + other_tail
    end = ahead if ahead > behind else behind
    ahead, behind = other_begin + other_tail, (both if both > other_free else other_free) + tail
    return (ahead if ahead > behind else behind) - end
