"""Compare launches between ranks through the store of the default process group.

A rank that launches something else than its peers makes them hang, or mixes the bytes of two
parameters. So before a compiled graph's first collective runs for the first time, the ranks of each
process group in the graph compare digests of their launches (:mod:`.launches`), of torch's version
and of this package's edition. A graph from a cache is compared, too: its launches travel with it.

The n-th comparison of one rank belongs to the n-th of the others, as ranks run a group's
collectives in one order. A frame that Dynamo compiles for the first time is always compared, as it
is on every rank; a recompiled one only if its launches are new to this rank. So one rank may
recompile alone, for another batch size, as long as it launches the same. Where programs break into
different frames, the comparison takes that for different launches; switch it off there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from .._source import package_digest
from .._torch import process_groups as groups
from ..errors import AgreementError, PlanMismatchError, RankMissingError
from .differences import Version, mismatch_text, ranks_text

_PREFIX = "torch_ext_bucketing/agreement"
# Limits in seconds. After a mismatch, late ranks get time to report their launches. After any
# failure, every rank gets time to read the reason: the first to exit may host the store.
_GATHER_S = 30.0
LINGER_S = 5.0
_MAX_SLEEP_S = 0.25


def this_environment() -> str:
    """Describe the versions of torch and of this package, which all ranks must share."""
    torch_version = torch.__version__.split("+")[0]
    return f"torch {torch_version}, torch_ext_bucketing {package_digest()[:12]}"


class _FailedError(Exception):
    """Carry the exchange that failed. Its ``bad`` key has the reason."""


@dataclass
class Exchange:
    """This rank's part in comparing one graph's launches on one process group.

    Keys in the store, under a prefix of the group's name, its ranks and ``number``::

        rank<r>      the digest of rank r, written when it arrives
        first        the digest of the first rank to arrive, which all compare theirs with
        text/<d>     the version with digest d, in full
        bad          why the exchange failed; the first reason stays
        arrived, confirmed, left, seen      counters
    """

    version: Version
    number: int
    ranks: tuple[int, ...]
    timeout: timedelta

    def __post_init__(self) -> None:
        self.rank = torch.distributed.get_rank()
        self.started = time.monotonic()
        members = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:8]
        prefix = f"{_PREFIX}/{self.version.of_group.group}/{members}/{self.number}"
        # A store, not collectives: nothing can mix with training's, and a waiting rank can name the
        # ranks that it waits for.
        self.store = torch.distributed.PrefixStore(prefix, groups.default_store())

    def has(self, name: str) -> bool:
        return self.store.check([name])

    def get(self, name: str) -> str:
        return self.store.get(name).decode()

    def count(self, name: str, more: int = 1) -> int:
        return self.store.add(name, more)

    def arrive(self) -> None:
        digest = self.version.digest
        if not self.has(f"text/{digest}"):
            self.store.set(f"text/{digest}", json.dumps(self.version))
        self.store.set(f"rank{self.rank}", digest)
        if self.store.compare_set("first", "", digest).decode() != digest:
            self.fail("mismatch", "")
        self.count("arrived")  # after fail(): a full count without "bad" means that all agree

    def leave(self) -> None:
        """Delete the keys once all ranks have left."""
        if self.count("left") < len(self.ranks):
            return
        # A later default group may use the same store and the same names.
        names = ["first", "arrived", "confirmed", "left", f"text/{self.version.digest}"]
        for name in (*names, *(f"rank{r}" for r in self.ranks)):
            self.store.delete_key(name)

    def fail(self, why: str, text: str) -> None:
        self.store.compare_set("bad", "", json.dumps([why, text]))

    def reached(self, name: str) -> bool:
        """Return whether all ranks have counted themselves; raise if the exchange failed."""
        complete = self.count(name, 0) == len(self.ranks)
        if not complete and time.monotonic() - self.started > self.timeout.total_seconds():
            self.fail("missing", self.missing_text())
        if self.has("bad"):
            raise _FailedError(self)
        return complete

    def missing(self) -> list[int]:
        return [r for r in self.ranks if not self.has(f"rank{r}")]

    def missing_text(self) -> str:
        missing, group = self.missing(), self.version.of_group.group
        text = (
            f"rank {self.rank} waited {self.timeout.total_seconds():g} s to compare the "
            f"{self.version.stage} graph's launches on process group {group!r}"
        )
        if not missing:
            return f"{text}: all its ranks arrived, but one still waits in another process group"
        return (
            f"{text} (comparison {self.number} there), and {ranks_text(missing)} did not arrive. "
            "The graph was stopped. A missing rank has failed or was killed (look at its own "
            "output), is still compiling (raise agree_timeout), or runs a graph that it compiled "
            "earlier, because only some ranks recompiled"
        )

    def mismatch_text(self) -> str:
        """Format the message for every rank, after a short wait for late ranks."""
        deadline = time.monotonic() + min(_GATHER_S, self.timeout.total_seconds())
        poll(lambda: not self.missing(), deadline)
        by_digest: dict[str, list[int]] = {}
        absent = self.missing()
        for rank in self.ranks:
            if rank not in absent:
                by_digest.setdefault(self.get(f"rank{rank}"), []).append(rank)
        versions = [
            (ranks, Version.from_json(self.get(f"text/{digest}")))
            for digest, ranks in by_digest.items()
        ]
        return mismatch_text(versions, absent, len(self.ranks))


def run_all(exchanges: Sequence[Exchange]) -> None:
    """Compare launches; raise an :class:`AgreementError` on all ranks or on none."""
    try:
        error = _meet(exchanges)
    except RuntimeError as problem:  # c10d's own errors are RuntimeErrors
        raise AgreementError(
            "the ranks' launches can't be compared, because the store of the default process group "
            f"can't be reached: {problem}. Usually the process that hosts it, rank 0 or the "
            "launcher, has ended: look at its output first"
        ) from problem
    if error is not None:
        raise error


def _meet(exchanges: Sequence[Exchange]) -> AgreementError | None:
    """Return what to raise on this rank, once the others know."""
    try:
        # Arrive everywhere before waiting anywhere, so that no two ranks wait for each other.
        for exchange in exchanges:
            exchange.arrive()
        poll(lambda: not [e for e in exchanges if not e.reached("arrived")])
        # The second count holds a rank back whose peer found a mismatch in another of its groups.
        for exchange in exchanges:
            exchange.count("confirmed")
        poll(lambda: not [e for e in exchanges if not e.reached("confirmed")])
    except _FailedError as failed:
        return _error(failed.args[0], exchanges)
    # The host of the store may have gone on and ended.
    with contextlib.suppress(RuntimeError):
        for exchange in exchanges:
            exchange.leave()
    return None


def _error(failed: Exchange, exchanges: Sequence[Exchange]) -> AgreementError:
    why, text = json.loads(failed.get("bad"))
    text = text or failed.mismatch_text()
    # From here on the store may go away: this rank has its reason to fail.
    with contextlib.suppress(RuntimeError):
        for other in exchanges:
            other.fail(why, text)
        deadline = time.monotonic() + LINGER_S
        expected = {id(e): len(e.ranks) - len(e.missing()) for e in exchanges}
        for each in exchanges:
            each.count("seen")
        poll(lambda: all(e.count("seen", 0) >= expected[id(e)] for e in exchanges), deadline)
    return PlanMismatchError(text) if why == "mismatch" else RankMissingError(text)


def poll(done: Callable[[], bool], deadline: float = math.inf) -> None:
    """Call ``done`` until it holds or the time is over, at a tenth of the time waited so far."""
    # A blocking wait would hold the store's one connection against other threads and Ctrl-C.
    started = time.monotonic()
    while not done() and (now := time.monotonic()) < deadline:
        time.sleep(min(_MAX_SLEEP_S, max(0.0005, (now - started) / 10)))
