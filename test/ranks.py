"""Ranks of tests that start at once: forked from a server that has imported torch and the package.

Every rank is a process of its own, as new as one that was started with ``spawn``, without the
seconds of imports. What is about a process's start or its end (``atexit``, which such a rank skips),
its environment at import or its hash seed needs a process started otherwise.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.ring import init_ring_process_group

LIMIT_S = 240


@functools.cache
def fork_server() -> BaseContext:
    """A ``multiprocessing`` context; its server starts with the first process."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_imports"])
    # The server takes over the environment of its start, and not sys.path (before Python 3.14).
    here = Path(__file__).resolve().parent
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    paths = [str(here), str(here.parent), *filter(None, [before["PYTHONPATH"]])]
    os.environ.update(PYTHONPATH=os.pathsep.join(paths), OMP_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return context


def on_ranks(
    function: Callable[..., Any], *args: object, world: int = 2, timeout_s: float = LIMIT_S
) -> list[Any]:
    """Results by rank of ``function(rank, *args)`` on ranks of one ring group."""
    return run_ranks(_ring_rank, world, function, *args, timeout_s=timeout_s, context=fork_server())


def _ring_rank(rank: Rank, function: Callable[..., Any], *args: object) -> Any:
    torch.set_num_threads(1)
    # Not plain gloo: its threads can corrupt a rank's memory (see torch_ext_bucketing/testing/gloo.py).
    init_ring_process_group(rank.rank, rank.world_size, init_method=f"file://{rank.store_path}")
    try:
        result = function(rank.rank, *args)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
