"""Ranks compare what they are about to launch.

A rank that launches something else than its peers (another model, hook or torch) makes them hang,
or mixes the bytes of one parameter with those of another. So when a compiled graph runs for the
first time, and before its first collective, the ranks of each process group in it compare digests
of their launches (:mod:`.launches`) and of the torch and the edition of this package in use. A
graph from one of Inductor's caches is compared like any other, as its launches travel with it.

Ranks run their collectives on a group in the same order, so they meet new launches in the same
order, and the n-th comparison of one rank belongs to the n-th of the others. Two things call for a
comparison: a frame that Dynamo compiles for the first time, as it does on every rank of one
program; and launches that were not agreed on before. So a rank may compile a frame *again* (for
another batch size, say) while the others don't, as long as it launches the same. Where the ranks'
programs break into different frames, the comparison can't tell that from different launches; switch
it off there.

The exchange goes through the store of the default process group, not through collectives: nothing
could mix with those of the training, and a rank that waits can say for whom. Each rank writes its
digest; the first one is what all compare theirs with; a counter tells when all have come. That is a
handful of small messages per rank, group and graph, whatever the number of ranks. A second count
makes sure that no rank goes on while another one has found a mismatch in one of its other groups,
as a mesh of several dimensions has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from .._source import package_digest
from .._torch import process_groups as groups
from ..errors import AgreementError, PlanMismatchError, RankMissingError
from .differences import Version, mismatch_text, ranks_text

_PREFIX = "torch_ext_bucketing/agreement"
_GATHER_S = 30.0
"""After a mismatch was found, how long to wait for the rest, to say what each rank launches."""
_LINGER_S = 5.0
"""After a failure, how long to wait for the others to have read it: the process that ends first may
be the one that hosts the store."""
_MAX_SLEEP_S = 0.25


def this_environment() -> str:
    """The versions of torch and of this package, which must be the same on all ranks."""
    torch_version = torch.__version__.split("+")[0]
    return f"torch {torch_version}, torch_ext_bucketing {package_digest()[:12]}"


class _FailedError(Exception):
    """An exchange failed, and says why under its ``bad`` key."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange


class Exchange:
    """One group's comparison of one graph's launches, as this rank takes part in it.

    Keys, below a prefix of the group's name, its ranks and the number of the exchange::

        rank<r>      the digest of rank r, written when it arrives
        first        the digest of the first to arrive
        text/<d>     the version with digest d, in full
        bad          why it failed; the first reason stays
        arrived, confirmed, left, seen      counters
    """

    def __init__(
        self, version: Version, number: int, ranks: tuple[int, ...], timeout: timedelta
    ) -> None:
        self.version = version
        self.number = number
        self.ranks = ranks
        self.timeout = timeout
        self.rank = torch.distributed.get_rank()
        self.started = time.monotonic()
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:8]
        prefix = f"{_PREFIX}/{version.of_group.group}/{members}/{number}"
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
        self.count("arrived")  # whoever differs has said so before

    def leave(self) -> None:
        """Leave nothing behind: a later default group may use the same store and names."""
        if self.count("left") < len(self.ranks):
            return
        digest = self.version.digest
        names = ["first", "arrived", "confirmed", "left", f"text/{digest}"]
        for name in (*names, *(f"rank{r}" for r in self.ranks)):
            self.store.delete_key(name)

    def fail(self, why: str, text: str) -> None:
        self.store.compare_set("bad", "", json.dumps([why, text]))

    def reached(self, name: str) -> bool:
        """Whether all ranks have counted themselves; raises where the exchange failed, or its time
        is over."""
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
        what = f"the {self.version.stage} graph's launches on process group {group!r}"
        waited = f"rank {self.rank} waited {self.timeout.total_seconds():g} s"
        if not missing:
            return (
                f"{waited} to compare {what}: every rank of the group came, but one of them still "
                "waits for others in another process group"
            )
        names = ranks_text(missing)
        return (
            f"{waited} to compare {what} (comparison {self.number} there), and {names} did not "
            "come. The graph was stopped. A rank that does not come has failed or was killed "
            "(look at its own output), is still compiling (raise agree_timeout), or goes on "
            "with a graph that it compiled before, because only some ranks compiled anew"
        )

    def mismatch_text(self) -> str:
        """The message for every rank; waits a little for ranks that have not come yet."""
        deadline = time.monotonic() + min(_GATHER_S, self.timeout.total_seconds())
        _poll(lambda: not self.missing(), deadline)
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
    """Compare; raises on every rank alike."""
    try:
        error = _meet(exchanges)
    except RuntimeError as problem:  # c10d's own errors are RuntimeErrors
        raise AgreementError(
            "what the ranks launch can't be compared, because the store of the default process "
            f"group can't be reached: {problem}. Usually the process that hosts it, rank 0 or the "
            "launcher, has ended: look at its output first"
        ) from problem
    if error is not None:
        raise error


def _meet(exchanges: Sequence[Exchange]) -> AgreementError | None:
    """Returns what to raise on this rank, once the others know."""
    try:
        # All arrive everywhere before anyone waits, so that no two ranks wait for each other.
        for exchange in exchanges:
            exchange.arrive()
        _poll(lambda: not [e for e in exchanges if not e.reached("arrived")])
        for exchange in exchanges:
            exchange.count("confirmed")
        _poll(lambda: not [e for e in exchanges if not e.reached("confirmed")])
    except _FailedError as failed:
        return _error(failed.exchange, exchanges)
    # Whoever hosts the store may have gone on and ended.
    with contextlib.suppress(RuntimeError):
        for exchange in exchanges:
            exchange.leave()
    return None


def _error(failed: Exchange, exchanges: Sequence[Exchange]) -> AgreementError:
    why, text = json.loads(failed.get("bad"))
    text = text or failed.mismatch_text()
    # The store may go away from here on: with this rank's reason to fail, nothing is lost by that.
    with contextlib.suppress(RuntimeError):
        for other in exchanges:
            other.fail(why, text)
        deadline = time.monotonic() + _LINGER_S
        expected = {id(e): len(e.ranks) - len(e.missing()) for e in exchanges}
        for each in exchanges:
            each.count("seen")
        _poll(lambda: all(e.count("seen", 0) >= expected[id(e)] for e in exchanges), deadline)
    return PlanMismatchError(text) if why == "mismatch" else RankMissingError(text)


def _poll(done: Callable[[], bool], deadline: float = math.inf) -> None:
    """Ask until it is so or the time is over; at intervals of a tenth of what was waited. A
    blocking wait would hold the store's one connection against other threads, and against
    Ctrl-C."""
    started = time.monotonic()
    while not done() and (now := time.monotonic()) < deadline:
        time.sleep(min(_MAX_SLEEP_S, max(0.0005, (now - started) / 10)))
