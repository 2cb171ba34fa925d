"""Bring all ranks to one point of the program, or stop all of them with one reason.

Ranks meet through the store of the default process group, not by a collective: nothing can mix with
training's, and a waiting rank can name those that it waits for. Keys of the n-th point::

    n/<r>         the value of rank r, or of a rank that failed on its way nothing
    n/arrived     the number of ranks that came
    n/outcome     "go", or why not; the first rank to write it decides for all
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .._torch import process_groups as groups
from ..errors import TuningError
from ..runtime.agreement import LINGER_S, poll
from ..runtime.launches import ranks_text

_GO = "go"
_NO_STORE = (
    "the store of the default process group can't be reached. Usually the process that hosts it, "
    "rank 0 or the launcher, has ended: look at its output first"
)
_numbers = itertools.count()  # ranks make their meetings in one order


class Meeting:
    """This rank's part in the points of one program.

    Args:
        timeout: how long a rank waits for the others at a point; None: the default group's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        group = groups.default_group()
        self.rank, self.size = 0, 1
        self.candidate = ""
        self._point = 0
        self._stopped: TuningError | None = None
        if group is None or not groups.has_peers(group):
            return
        self.rank, self.size = group.rank(), group.size()
        self._timeout_s = (timeout or groups.group_timeout(group)).total_seconds()
        # torchrun may keep one store for a job and its restarts.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"torch_ext_bucketing/tuning/{start}/{next(_numbers)}"
        self._store = dist.PrefixStore(prefix, groups.default_store())

    def meet(self, point: str, value: str = "") -> list[str]:
        """Wait for all ranks at a point, named for errors; return their values by rank.

        Raises:
            TuningError: on every rank: one did not come in time, or failed on its way.
        """
        if self._stopped is not None:
            raise self._stopped
        if self.size == 1:
            return [value]
        self._point += 1
        n, deadline = self._point, time.monotonic() + self._timeout_s

        def is_decided() -> bool:
            if self._store.add(f"{n}/arrived", 0) == self.size:
                self._decide(_GO)
            elif time.monotonic() > deadline:
                late = self._missing()
                text = f"{ranks_text(late)} did not come to {point} in {self._timeout_s:g} s"
                self._decide(self._reason(text, late))
            return self._has_outcome()

        try:
            self._store.set(f"{n}/{self.rank}", value)
            self._store.add(f"{n}/arrived", 1)
            poll(is_decided)
            outcome = self._store.get(f"{n}/outcome").decode()
            if outcome == _GO:
                values = self._store.multi_get([f"{n}/{r}" for r in range(self.size)])
                self._forget(n - 1)
                return [v.decode() for v in values]
        except RuntimeError as error:  # c10d's own errors are RuntimeErrors
            text = f"candidate {self.candidate!r}: at {point} {_NO_STORE} ({error})"
            self._stopped = TuningError(text, self.candidate)
            raise self._stopped from error
        raise self._error(outcome)

    def failed(self, error: Exception, where: str) -> TuningError:
        """Return the error to raise for one on the way to the next point; stop the other ranks."""
        if self._stopped is not None:  # and the error came of that, such as from Dynamo
            return self._stopped
        text = f"rank {self.rank} failed {where}: {type(error).__name__}: {error}"
        reason = self._reason(text, [self.rank])
        if self.size > 1:
            self._point += 1
            try:
                self._store.set(f"{self._point}/{self.rank}", "")
                if isinstance(error, RuntimeError):
                    # A collective of torch fails if a peer has ended. Had that one raised an error,
                    # it would have left word; others that see its end will, soon.
                    deadline = time.monotonic() + LINGER_S
                    poll(lambda: self._has_outcome() or not self._missing(), deadline)
                    if silent := self._missing():
                        text += f" ({ranks_text(silent)} did not get to that point, either)"
                        reason = self._reason(text, [self.rank, *silent])
                reason = self._decide(reason)
            except RuntimeError:
                reason = self._reason(f"{text} ({_NO_STORE})", [self.rank])
        return self._error(reason)

    def _decide(self, outcome: str) -> str:
        """Write the outcome of the present point unless there is one; return the outcome."""
        return self._store.compare_set(f"{self._point}/outcome", "", outcome).decode()

    def _has_outcome(self) -> bool:
        return self._store.check([f"{self._point}/outcome"])

    def _reason(self, text: str, ranks: Sequence[int]) -> str:
        return json.dumps([text, self.candidate, ranks])

    def _missing(self) -> list[int]:
        return [r for r in range(self.size) if not self._store.check([f"{self._point}/{r}"])]

    def _error(self, reason: str) -> TuningError:
        text, candidate, ranks = json.loads(reason)
        if self.size > 1:
            # The process that hosts the store may end first: give the others time to read.
            with contextlib.suppress(RuntimeError):
                self._store.add("seen", 1)
                deadline = time.monotonic() + LINGER_S
                poll(lambda: self._store.add("seen", 0) == self.size, deadline)
        self._stopped = TuningError(f"candidate {candidate!r}: {text}", candidate, ranks)
        return self._stopped

    def _forget(self, n: int) -> None:
        """Delete the keys of a point that all ranks have left."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(f"{n}/{self.rank}")
            if self.rank == 0:
                self._store.delete_key(f"{n}/arrived")
                self._store.delete_key(f"{n}/outcome")
