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
        self.run = _Run(world, Path(self.folder.name), timeout_s=1.0)
        self.run.start(_serve, (self.tasks,), {})

    def call(
        self, task: tuple[Any, ...], timeout_s: float, topology: RingTopology | None
    ) -> list[Any]:
        self.run.timeout_s, self.run.deadline = timeout_s, time.monotonic() + timeout_s
        data = pickle.dumps(([*sys.path], pickle.dumps(task), timeout_s, topology))
        for path in self.tasks:
            Path(path).write_bytes(data)
        found: dict[int, Any] = {}

        def keep(rank: int, result: Any) -> None:
            found[rank] = result
            if len(found) == len(self.tasks):
                raise _Done

        with contextlib.suppress(_Done):
            self.run.collect(keep)
        return [found[rank] for rank in range(len(self.tasks))]

    def end(self) -> None:
        self.run.end()
        self.folder.cleanup()


def _serve(rank: Rank, tasks: list[str]) -> None:
    import torch

    number = 0
    while True:
        path, given, timeout_s, topology = pickle.loads(Path(tasks[rank.rank]).read_bytes())
        sys.path[:] = path
        function, args = pickle.loads(given)
        number += 1
        store, limit = f"{rank.store_path}{number}", timedelta(seconds=timeout_s)
        me = replace(rank, store_path=store, timeout=limit)
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
    pool = _pools[world] = _pools.get(world) or _Pool(world)
    try:
        return pool.call((function, args), timeout_s, topology)
    except BaseException:
        _pools.pop(world).end()
        raise


def end() -> None:
    """End all ranks."""
    while _pools:
        _pools.popitem()[1].end()
