"""What ranks do in the tests of benchmarks/nccl.py's launcher. Nothing here imports torch, so that
these ranks start at once."""

from __future__ import annotations

import time

from benchmarks.nccl_cells import Key, Settings, TimedReport
from torch_ext_bucketing.testing.ranks import Rank


def fails_on_one(rank: Rank, keys: list[Key], settings: Settings) -> None:
    rank.send(("end", keys[0], TimedReport(["a"], [1.0], step_ms=[1.0])))
    time.sleep(0.5)
    if rank.rank == 1:
        raise LookupError("this rank has no such weight")
    time.sleep(600)  # as in a collective that the failed rank never joins


def never_ends(rank: Rank, keys: list[Key], settings: Settings) -> None:
    time.sleep(600)
