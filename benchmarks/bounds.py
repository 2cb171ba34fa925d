"""What no order of a graph can beat: what the schedules of the tables are measured by."""

from __future__ import annotations

from collections.abc import Sequence

from torch_ext_bucketing.scheduling.model import Model

__all__ = ["lower_bound"]


def lower_bound(model: Model) -> float:
    """Milliseconds that no order can beat: :attr:`.ModelAnalysis.bound_ms`, or the collectives of a
    longest path with all that has to be computed between them.

    A path has one node after the other. Between two of its collectives there is more: whatever
    needs the first one's result and is needed by the second runs on the one compute stream::

        all_to_all -> wait -> mm1 -> mul -> all_to_all      path: mm1, mul
                           `-> mm2 -----^                   between them: mm1, mm2, mul
    """
    return max(model.analysis.bound_ms, _serial_ms(model, _longest_path(model)))


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
