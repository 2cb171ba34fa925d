"""Ranks that stay up for the whole run of tests: forking some and a first compile take seconds."""

import contextlib
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch_ext_bucketing.testing.ranks import Rank, _Run
from torch_ext_bucketing.testing.ring import RingTopology, ring_rank

_LEAST = 4
"""Ranks of a pool. Runs of fewer ranks share them: each rank's first compile takes seconds."""
_pools: dict[int, "_Pool"] = {}


class _Done(Exception):
    """All ranks have sent their results."""


class _Pool:
    """Ranks that wait for functions to run. A failure on one of them ends all."""

    def __init__(self, world: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="torch-ext-bucketing-pool-")
        self.tasks = [f"{self.folder.name}/tasks{rank}" for rank in range(world)]
        for path in self.tasks:
            os.mkfifo(path)
        self.number = 0
        self.run = _Run(world, Path(self.folder.name), timeout_s=1.0)
        self.run.start(_serve, (self.tasks,), {})

    def call(
        self, task: tuple[Any, ...], world: int, timeout_s: float, topology: RingTopology | None
    ) -> list[Any]:
        """Run a task on the first ``world`` ranks."""
        self.run.timeout_s, self.run.deadline = timeout_s, time.monotonic() + timeout_s
        self.number += 1
        store = f"{self.folder.name}/store{self.number}"
        data = pickle.dumps(([*sys.path], pickle.dumps(task), world, store, timeout_s, topology))
        for path in self.tasks[:world]:
            Path(path).write_bytes(data)
        found: dict[int, Any] = {}

        def keep(rank: int, result: Any) -> None:
            found[rank] = result
            if len(found) == world:
                raise _Done

        with contextlib.suppress(_Done):
            self.run.collect(keep)
        return [found[rank] for rank in range(world)]

    def end(self) -> None:
        self.run.end()
        self.folder.cleanup()


def _serve(rank: Rank, tasks: list[str]) -> None:
    import torch

    while True:
        path, given, world, store, timeout_s, topology = pickle.loads(
            Path(tasks[rank.rank]).read_bytes()
        )
        sys.path[:] = path
        function, args = pickle.loads(given)
        limit = timedelta(seconds=timeout_s)
        me = replace(rank, world_size=world, store_path=store, timeout=limit)
        torch._dynamo.reset()
        torch.manual_seed(0)
        random.seed(0)
        with ring_rank(me, topology, caches=True), warnings.catch_warnings():
            result = function(rank.rank, *args)
        rank.send(result)


def on_ranks(
    function: Callable[..., Any],
    *args: object,
    world: int = 2,
    timeout_s: float = 240,
    topology: RingTopology | None = None,
) -> list[Any]:
    """Do as :func:`torch_ext_bucketing.testing.ring.on_ranks`, on ranks that stay up."""
    size = max(world, _LEAST)
    pool = _pools[size] = _pools.get(size) or _Pool(size)
    try:
        return pool.call((function, args), world, timeout_s, topology)
    except BaseException:
        _pools.pop(size).end()
        raise


def end() -> None:
    """End all ranks."""
    while _pools:
        _pools.popitem()[1].end()
