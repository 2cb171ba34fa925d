"""Choices of what stays gathered against all that there are, on random models.

Each choice that can be more than 2% faster than the one that was made, by what no order can beat,
is scheduled, unless what it keeps is above the bound before backward begins: so whether the choice
is within 2% of the best is known, and the best where it is not. Where it is, the best is only known
as far as it was looked at.
"""

from __future__ import annotations

import heapq
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from torch_ext_bucketing._gc import paused_gc
from torch_ext_bucketing.scheduling.keep import KeepPlanner
from torch_ext_bucketing.scheduling.model import Model

from .keep_models import random_planner

CLOSE = 1.02


def against_all(
    models: int,
    most: int,
    least: int = 2,
    first: int = 0,
    activations: bool = False,
    to: int = 0,
) -> dict[str, Any]:
    """Random models of ``least`` to ``most`` units, each with a bound between keep-nothing and
    keep-all: the choice over the best of all choices.

    Args:
        models: how many.
        most: units.
        least: units.
        first: seed of the first model; the next has the next.
        activations: whether activations are saved by choice, too.
        to: as of :func:`.random_planner`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2 * max(1, to))
    ratios: list[float] = []
    units: list[int] = []
    choices = scheduled = 0
    choosing, clock = 0.0, time.process_time()
    for seed in range(first, first + models):
        rng = random.Random(seed)
        planner = random_planner(seed, rng.randint(least, most), activations, to)
        everything = planner.scheduled(planner.candidates, 2**60)
        low = planner.reference_bytes
        limit = int(low + rng.random() * max(0, everything.peak_bytes - low))
        start = time.process_time()
        best = chosen = planner.choose(limit)
        choosing += time.process_time() - start
        before = planner.tried
        worth = chosen.step_ms / CLOSE
        with paused_gc():
            for floor_ms, kept in _fitting(planner, limit):
                if floor_ms < min(best.step_ms, worth) or best.above:
                    best = min(best, planner.scheduled(kept, limit), key=lambda o: o.rank)
        parts = sum(k in planner.partitioned.parts for k in planner.candidates)
        choices += 2 ** (len(planner.candidates) - 2 * parts) * 3**parts
        scheduled += planner.tried - before
        ratios.append(chosen.step_ms / best.step_ms)
        units.append(len(planner.candidates))
        if sys.stderr.isatty() or len(units) % 20 == 0:
            print(f"{len(units)} of {models}", file=sys.stderr, flush=True)
    return {
        "models": models,
        "first_seed": first,
        "units": f"{min(units)} to {max(units)}, {statistics.mean(units):.1f} on average",
        "choices": choices,
        "scheduled": scheduled,
        "within_2_percent": sum(r <= CLOSE for r in ratios) / len(ratios),
        "worst": max(ratios),
        "choosing_s": choosing / models,
        "seconds": time.process_time() - clock,
        "ratios": [round(r, 4) for r in ratios if r > 1],
    }


def _fitting(planner: KeepPlanner, limit: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Choices with the least time that they can take. What is kept is there when backward begins,
    so those that are above the bound with that alone are left out."""
    forward_ms = least_ms(planner.partitioned.forward)
    for bits in range(2 ** len(planner.candidates)):
        kept = tuple(k for i, k in enumerate(planner.candidates) if bits >> i & 1)
        if len(planner.partitioned.distinct(kept)) < len(kept):
            continue
        backward = planner.partitioned.models(kept)[1]
        if backward.liveness.at_start <= limit:
            yield forward_ms + least_ms(backward), kept


def least_ms(model: Model) -> float:
    """Milliseconds that no order of a model can beat, on streams that share no network level.

    For each stream alone: its nodes become ready at the end of the longest path to them, may be
    interrupted, and are followed by the longest path behind them. Then the one with the most behind
    it goes first, always (Jackson's preemptive rule).
    """
    needs, needed_by = model.dependencies.needs, model.dependencies.needed_by

    def follows(before: int, after: int) -> bool:
        same = model.group[before] == model.group[after]
        return same if model.only_ordered(before, after) else model.needs_end(before, after)

    ready, behind = [0.0] * len(model), [0.0] * len(model)
    for i, mine in enumerate(needs):
        ready[i] = max((ready[j] + model.ms[j] for j in mine if follows(j, i)), default=0.0)
    for i in reversed(range(len(model))):
        ends = (behind[j] + model.ms[j] for j in needed_by[i] if follows(i, j))
        behind[i] = max(ends, default=0.0)
    streams: dict[str | None, list[int]] = {}
    for i, ms in enumerate(model.ms):
        if ms:
            streams.setdefault(model.group[i], []).append(i)
    return max((_jackson(model, nodes, ready, behind) for nodes in streams.values()), default=0.0)


def _jackson(model: Model, nodes: list[int], ready: list[float], behind: list[float]) -> float:
    coming = sorted(nodes, key=lambda i: (-ready[i], -i))
    waiting: list[tuple[float, int, float]] = []  # most behind it first, with what is left of it
    now = found = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            i = coming.pop()
            heapq.heappush(waiting, (-behind[i], i, model.ms[i]))
        tail, i, left = heapq.heappop(waiting)
        until = ready[coming[-1]] if coming else float("inf")
        if now + left > until:
            heapq.heappush(waiting, (tail, i, left - (until - now)))
            now = until
        else:
            now += left
            found = max(found, now - tail)
    return found
