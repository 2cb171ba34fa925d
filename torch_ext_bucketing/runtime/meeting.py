"""Meet the other ranks through the store of the default process group.

A store, not collectives: nothing can mix with training's, and a waiting rank can name the ranks
that it waits for.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist

from .._torch import process_groups as groups

NO_STORE = (
    "the store of the default process group can't be reached. Usually the process that hosts it, "
    "rank 0 or the launcher, has ended: look at its output first"
)
LINGER_S = 5.0  # seconds that ranks get to learn why others stop
_MAX_SLEEP_S = 0.25


class Point:
    """A point of a program that ranks come to, each with a text, and where they stop or go on.

    Keys in the store, under a prefix that is the point's own::

        rank<r>          the text of rank r, written when it arrives or fails on its way
        outcome          how the point ended; the first rank that writes it decides for all
        arrived, seen    numbers of ranks that came, and that know the outcome
    """

    def __init__(self, prefix: str, ranks: Sequence[int], timeout: timedelta) -> None:
        self.rank, self.ranks = dist.get_rank(), ranks
        self.timeout_s = timeout.total_seconds()
        self.store = dist.PrefixStore(f"torch_ext_bucketing/{prefix}", groups.default_store())
        self._deadline = time.monotonic() + self.timeout_s

    def write(self, text: str) -> None:
        """Leave this rank's text."""
        self.store.set(f"rank{self.rank}", text)

    def arrive(self, text: str) -> None:
        """Leave this rank's text, and count this rank."""
        self.write(text)
        self.count("arrived")

    def texts(self, ranks: Iterable[int]) -> list[str]:
        """Return the texts of ranks that have left one."""
        return [text.decode() for text in self.store.multi_get([f"rank{r}" for r in ranks])]

    def missing(self) -> list[int]:
        """List the ranks that have left no text."""
        return [r for r in self.ranks if not self.store.check([f"rank{r}"])]

    def count(self, name: str, amount: int = 1) -> int:
        """Add to a counter, and return its value."""
        return self.store.add(name, amount)

    def is_complete(self, name: str = "arrived") -> bool:
        """Return whether a counter has counted all ranks."""
        return self.count(name, 0) == len(self.ranks)

    @property
    def is_late(self) -> bool:
        """Whether this rank has waited for as long as it may."""
        return time.monotonic() > self._deadline

    def decide(self, outcome: str) -> str:
        """Write the outcome unless there is one; return the outcome."""
        return self.store.compare_set("outcome", "", outcome).decode()

    def outcome(self) -> str | None:
        """Return the outcome; None as long as no rank has decided."""
        return self.store.get("outcome").decode() if self.store.check(["outcome"]) else None

    def forget(self, *names: str) -> None:
        """Delete some keys."""
        # A later default group may use the same store and the same names.
        for name in names:
            self.store.delete_key(name)


def linger(points: Sequence[Point], expected: Sequence[int]) -> None:
    """Wait until as many ranks as expected know how each point failed, or for 5 s."""
    # The first process to exit may host the store, and take the reason with it.
    with contextlib.suppress(RuntimeError):
        for point in points:
            point.count("seen")
        pairs = list(zip(points, expected, strict=True))
        poll(lambda: all(p.count("seen", 0) >= n for p, n in pairs), LINGER_S)


def poll(done: Callable[[], bool], seconds: float = math.inf) -> None:
    """Call ``done`` until it holds or the time is over, at a tenth of the time waited so far."""
    # A blocking wait would hold the store's one connection against other threads and Ctrl-C.
    started = time.monotonic()
    while not done() and (waited := time.monotonic() - started) < seconds:
        time.sleep(min(_MAX_SLEEP_S, max(0.0005, waited / 10)))
