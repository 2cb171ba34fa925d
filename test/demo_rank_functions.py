"""What ranks do in the tests of ``testing.ranks``. Nothing here imports torch, so that they start at
once."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

from torch_ext_bucketing.testing.ranks import Rank


def square(rank: Rank, offset: int) -> int:
    rank.send(f"hello from {rank.rank}")
    return rank.rank**2 + offset


def raise_on_last(rank: Rank) -> None:
    if rank.rank == rank.world_size - 1:
        raise LookupError("no such weight")
    time.sleep(60)


def die_on_last(rank: Rank, how: str) -> None:
    rank.send(os.getpid())
    if rank.rank < rank.world_size - 1:
        time.sleep(60)
    print("last words", flush=True)
    if how == "exit":
        os._exit(7)
    if how == "abort":
        print("Fatal Python error: Aborted\n  File ...\nExtension modules:", "numpy._core, " * 1000)
        sys.stdout.flush()
        os._exit(134)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_with_the_interpreters_lock(rank: Rank) -> None:
    # PyDLL, other than CDLL, calls without releasing the lock: no thread of this rank can run.
    rank.send((os.getpid(),))
    ctypes.PyDLL(None).sleep(600)


def hang_in_here(rank: Rank) -> None:
    # A grandchild: what a rank started must go with it.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rank.send((os.getpid(), child.pid))
    time.sleep(600)
