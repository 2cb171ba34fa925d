"""What kernels are on the way to, and which of two goes first for that.

A path alone does not say it: of two chunks of tokens, whose paths are equally long, each would get
a few kernels in turn, and the stream that both send on would stand idle until both are there::

    compute    | a | b | a | b |              | a     | b     |
    group                   [ of a ][ of b ]          [ of a ][ of b ]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .model import Model


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


def sends_of(model: Model, tail: Sequence[float]) -> list[Send]:
    """For each node by place; ``tail`` is as of :class:`.ModelAnalysis`."""
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


def end_of_both(first: Send, second: Send, busy_first: float, busy_second: float) -> float:
    """Milliseconds until all is done that follows two kernels, each run through to what it is on
    the way to. Collectives of one group go one after the other.

    Args:
        first: what the first kernel is on the way to.
        second: what the second one is.
        busy_first: how long the stream of the first one's group is still busy; 0 without a group.
        busy_second: that of the second one's.
    """
    begin = max(first.compute_ms, busy_first)
    free = begin + first.ms if first.group == second.group else busy_second
    behind = max(first.compute_ms + second.compute_ms, free)
    return max(begin + first.tail, behind + second.tail)
