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

Inductor's caches keep a graph's code and nothing else that a backend knows about it. So in its
graphs the launches are an argument of an operator, through which the first collective's input
passes::

    x -> agree(x, digest, launches, timeout_s) -> all_gather -> wait -> ...

No scheduler can move the collective before it, and Inductor keeps the order of the others. The
operator returns a view of its input, and does nothing else after its first run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.fx as fx

from .._source import package_digest
from .._torch import process_groups as groups
from .._torch.aot import stage_of
from ..errors import AgreementError, PlanMismatchError, RankMissingError
from ..graph.nodes import collective_group, graph_of
from .launches import GraphLaunches, Version, launches_of, mismatch_text, ranks_text
from .meeting import NO_STORE, Point, linger, poll

# Seconds that late ranks get to report their launches after a mismatch.
_GATHER_S = 30.0


class _FailedError(Exception):
    """Carry the exchange that failed, whose outcome has the reason."""


class Exchange(Point):
    """This rank's part in comparing one graph's launches on one process group.

    A rank's text is the digest of its launches. Further keys::

        first               the digest of the first rank to arrive, which all compare theirs with
        launches/<d>        the version with digest d, in full
        confirmed, left     counters
    """

    def __init__(
        self, version: Version, number: int, ranks: tuple[int, ...], timeout: timedelta
    ) -> None:
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:8]
        super().__init__(f"agreement/{version.of_group.group}/{members}/{number}", ranks, timeout)
        self.version, self.number = version, number

    def compare(self) -> None:
        """Arrive, and end the exchange if another rank has other launches."""
        digest = self.version.digest
        if not self.store.check([f"launches/{digest}"]):
            self.store.set(f"launches/{digest}", json.dumps(self.version))
        if self.store.compare_set("first", "", digest).decode() != digest:
            self.fail("mismatch", "")
        self.arrive(digest)  # last: a full count without an outcome means that all agree

    def leave(self) -> None:
        """Delete the keys once all ranks have left."""
        if self.count("left") == len(self.ranks):
            names = ("first", "arrived", "confirmed", "left", f"launches/{self.version.digest}")
            self.forget(*names, *(f"rank{r}" for r in self.ranks))

    def fail(self, why: str, text: str) -> None:
        """End the exchange, unless it has ended."""
        self.decide(json.dumps([why, text]))

    def reached(self, name: str) -> bool:
        """Return whether all ranks have counted themselves; raise if the exchange failed."""
        complete = self.is_complete(name)
        if not complete and self.is_late:
            self.fail("missing", self.missing_text())
        if self.outcome() is not None:
            raise _FailedError(self)
        return complete

    def missing_text(self) -> str:
        missing, group = self.missing(), self.version.of_group.group
        text = (
            f"rank {self.rank} waited {self.timeout_s:g} s to compare the {self.version.stage} "
            f"graph's launches on process group {group!r}"
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
        poll(lambda: not self.missing(), min(_GATHER_S, self.timeout_s))
        absent = self.missing()
        arrived = [rank for rank in self.ranks if rank not in absent]
        by_digest: dict[str, list[int]] = {}
        for rank, digest in zip(arrived, self.texts(arrived), strict=True):
            by_digest.setdefault(digest, []).append(rank)
        versions = [
            (ranks, Version.from_json(self.store.get(f"launches/{digest}").decode()))
            for digest, ranks in by_digest.items()
        ]
        return mismatch_text(versions, absent, len(self.ranks))


def run_all(exchanges: Sequence[Exchange]) -> None:
    """Compare launches; raise an :class:`AgreementError` on all ranks or on none."""
    try:
        error = _meet(exchanges)
    except RuntimeError as problem:  # c10d's own errors are RuntimeErrors
        raise AgreementError(
            f"the ranks' launches can't be compared: {NO_STORE} ({problem})"
        ) from problem
    if error is not None:
        raise error


def _meet(exchanges: Sequence[Exchange]) -> AgreementError | None:
    """Return the error of this rank, once the others know it; None if all agree."""
    try:
        # Arrive everywhere before waiting anywhere, so that no two ranks wait for each other.
        for exchange in exchanges:
            exchange.compare()
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
    """Tell the other ranks that an exchange failed, and return the error to raise."""
    why, text = json.loads(failed.outcome() or "")
    text = text or failed.mismatch_text()
    # From here on the store may go away: this rank has its reason to fail.
    with contextlib.suppress(RuntimeError):
        for exchange in exchanges:
            exchange.fail(why, text)
        linger(exchanges, [len(e.ranks) - len(e.missing()) for e in exchanges])
    return PlanMismatchError(text) if why == "mismatch" else RankMissingError(text)


def agree(graph: fx.GraphModule | fx.Graph, timeout: timedelta | None = None) -> None:
    """Compare a graph's launches with the other ranks now; the graph is bucketed and scheduled.

    For graphs that are compiled without a backend of this package; :func:`.backend` compares by
    itself. Every rank must call it for its graphs in the same order. ``timeout``: how long to wait
    for other ranks; None takes each process group's own timeout. A ``PlanMismatchError`` comes on
    every rank, a ``RankMissingError`` where a rank is late.
    """
    g = graph_of(graph)
    agree_on_launches(launches_of(g, stage_of(g)), timeout, fresh=True)


def before_first_run(
    compiled: Callable[..., Any], launches: GraphLaunches, timeout: timedelta | None
) -> Callable[..., Any]:
    """Wrap ``compiled`` so that its ranks agree on ``launches`` before it first runs."""
    if not launches.groups:
        return compiled
    digest = launches.digest()

    def run(*args: Any) -> Any:
        agree_once(digest, lambda: launches, timeout)
        return compiled(*args)

    run._boxed_call = getattr(compiled, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def as_fresh_frame(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a frame's ``compiled`` so that its first run compares as for a fresh frame."""
    first = True

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not first:
            return compiled(*args, **kwargs)
        first, _running.fresh = False, True
        try:
            return compiled(*args, **kwargs)
        finally:
            _running.fresh = False

    return run


def agree_on_launches(
    launches: GraphLaunches, timeout: timedelta | None = None, fresh: bool = False
) -> None:
    """Compare ``launches`` with the other ranks of their groups, once per process.

    With ``fresh`` compare again, and forget the earlier agreements.
    """
    agreed, digest = _agreed(), launches.digest()
    if digest in agreed.digests and not fresh:
        return
    exchanges = agreed.begin(launches, timeout, fresh)
    if exchanges:
        run_all(exchanges)
    with agreed.lock:
        for exchange in exchanges:
            version = exchange.version
            agreed.versions.setdefault(version.of_group.group, set()).add(version.digest)
        agreed.digests.add(digest)


def agree_once(
    digest: str, launches: Callable[[], GraphLaunches], timeout: timedelta | None
) -> None:
    """Call :func:`agree_on_launches` unless launches with this digest were agreed on."""
    if _running.fresh or digest not in _agreed().digests:
        agree_on_launches(launches(), timeout, _running.fresh)


class _Running(threading.local):
    """Whether this thread runs a frame for the first time."""

    fresh = False


_running = _Running()


@dataclass
class _Agreed:
    """The launches that this process has agreed on under one default process ``group``.

    ``digests`` are of whole graphs' launches; ``versions`` are digests per group; ``rounds`` counts
    the exchanges begun per group.
    """

    group: Callable[[], Any]
    digests: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=dict)
    rounds: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(
        self, launches: GraphLaunches, timeout: timedelta | None, fresh: bool
    ) -> list[Exchange]:
        """Create the exchanges that ``launches`` need."""
        exchanges: list[Exchange] = []
        if self.group() is None:
            return exchanges
        version_of_torch = torch.__version__.split("+")[0]
        environment = f"torch {version_of_torch}, torch_ext_bucketing {package_digest()[:12]}"
        for of_group in launches.groups:
            name, group = of_group.group, groups.group_by_name(of_group.group)
            if not groups.has_peers(group):
                continue
            version = Version(environment, launches.stage, of_group, launches.planned_with)
            with self.lock:
                agreed = self.versions.setdefault(name, set())
                if fresh:
                    # The backward graph's, too: the group's other ranks run the same frame and
                    # forget the same digests.
                    agreed.clear()
                    self.digests.clear()
                if version.digest in agreed:
                    continue
                self.rounds[name] += 1
                number = self.rounds[name]
            wait = groups.group_timeout(group) if timeout is None else timeout
            exchanges.append(Exchange(version, number, groups.ranks_of(group), wait))
        return exchanges


_no_group = _Agreed(lambda: None)
_current = _no_group


def _agreed() -> _Agreed:
    """Return the state of the present default group; a new group starts a new count."""
    global _current
    group = groups.default_group()
    if _current.group() is not group:
        _current = _no_group if group is None else _Agreed(weakref.ref(group))
    return _current


_NO_TIMEOUT = -1.0  # a group's own timeout

_library = torch.library.Library("torch_ext_bucketing", "DEF")
_library.define("agree(Tensor(a) sent, str digest, str launches, float timeout_s) -> Tensor(a)")


def _agree(sent: torch.Tensor, digest: str, launches: str, timeout_s: float) -> torch.Tensor:
    timeout = None if timeout_s == _NO_TIMEOUT else timedelta(seconds=timeout_s)
    agree_once(digest, lambda: GraphLaunches.decode(launches), timeout)
    return sent.view_as(sent)


_library.impl("agree", _agree, "CompositeExplicitAutograd")
# Compiling compares nothing.
torch.library.register_fake(
    "torch_ext_bucketing::agree", lambda sent, *rest: sent.view_as(sent), lib=_library
)
_AGREE = torch.ops.torch_ext_bucketing.agree.default


def insert(graph: fx.Graph, launches: GraphLaunches, timeout: timedelta | None) -> fx.Node | None:
    """Insert the operator before a graph's first collective; return None without one."""
    first = next((n for n in graph.nodes if collective_group(n) is not None), None)
    if first is None or not launches.groups:
        return None
    sent = first.all_input_nodes[0]
    seconds = _NO_TIMEOUT if timeout is None else timeout.total_seconds()
    with graph.inserting_before(first):
        node = graph.call_function(_AGREE, (sent, launches.digest(), launches.encode(), seconds))
    # The same fake tensor, so that passes which look at storages see the view.
    node.meta["val"] = sent.meta.get("val")
    first.replace_input_with(sent, node)
    return node
