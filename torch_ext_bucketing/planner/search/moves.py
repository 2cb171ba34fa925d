"""Change one bucket of a plan at a time, for the search in small graphs."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ...bucketing.plan import MergePlan
from ...graph.records import Collective

_MIB = 2**20
Key: TypeAlias = tuple[str, str]
"""Process group and kind."""
Caps: TypeAlias = dict[Key, tuple[float, ...]]
"""Byte caps in MiB for each bucket, in fill order."""


def moves(runs: Sequence[Sequence[Collective]], plan: MergePlan) -> list[Iterator[Caps]]:
    """Return, for each bucket of a plan, the caps of plans that change this bucket.

    Args:
        runs: mergeable collectives of one bucket key each, in fill order.
        plan: a plan of :class:`.ByCap` for them. Unmerged members count as buckets.
    """
    sizes, cuts = layout(runs, plan)

    def caps_of(key: Key, at: int) -> Iterator[Caps]:
        for moved in _moved(sizes[key], cuts[key], at):
            yield {
                k: tuple(sum(sizes[k][i:j]) / _MIB for i, j in itertools.pairwise(found))
                for k, found in {**cuts, key: moved}.items()
            }

    return [caps_of(key, at) for key, found in cuts.items() for at in range(len(found) - 1)]


def layout(
    runs: Sequence[Sequence[Collective]], plan: MergePlan
) -> tuple[dict[Key, list[int]], dict[Key, list[int]]]:
    """Return the bytes of members in fill order, and the cuts between buckets."""
    bucket_of = {m: i for i, bucket in enumerate(plan.buckets) for m in bucket.members}
    keys = Counter[Key]((run[0].group, run[0].kind) for run in runs)
    sizes: dict[Key, list[int]] = {}
    cuts: dict[Key, list[int]] = {}
    for run in runs:
        key = (run[0].group, run[0].kind)
        if keys[key] == 1:  # caps don't distinguish several bucket keys of a group and kind
            names = [bucket_of.get(c.start, c.start) for c in run]
            sizes[key] = [c.wire_bytes for c in run]
            ends = [i for i in range(1, len(run)) if names[i] != names[i - 1]]
            cuts[key] = [0, *ends, len(run)]
    return sizes, cuts


def _moved(sizes: list[int], cuts: list[int], at: int) -> Iterator[list[int]]:
    """Yield the cuts between buckets with bucket ``at`` changed.

    It takes the next bucket's first member, hands over its last one, is cut in two, or is joined to
    the next one.
    """
    begin, end = cuts[at : at + 2]
    before, after = cuts[: at + 1], cuts[at + 2 :]
    if after and after[0] - end > 1:
        yield [*before, end + 1, *after]
    if after and end - begin > 1:
        yield [*before, end - 1, *after]
    if end - begin > 1:
        mine = sizes[begin:end]
        half = max(1, bisect.bisect(list(itertools.accumulate(mine)), sum(mine) / 2))
        yield [*before, begin + half, end, *after]
    if after:
        yield [*before, *after]
