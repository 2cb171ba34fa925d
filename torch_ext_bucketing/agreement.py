"""Ranks compare their plans before they follow them.

A rank with another plan than its peers (another model, hook or torch) makes them hang, or mixes the
bytes of one parameter with those of another. So when a compiled graph runs for the first time, and
before its first collective, the ranks of each process group in it compare digests of their plans
(:mod:`.launches`) and of the torch and the patch series in use. Where they differ, every rank
raises :class:`PlanMismatchError`; where a rank does not come, those that wait raise
:class:`RankMissingError`, which names it.

A plan travels with its graph and is compared when that runs, not when it is compiled: a graph from
one of Inductor's caches is compared like any other, with ranks that compiled theirs.

What is compared with what: ranks run their collectives on a group in the same order, so they meet
new plans in the same order, and the n-th comparison of one rank belongs to the n-th of the others.
Two things call for a comparison: a frame that Dynamo compiles for the first time, as it does on
every rank of one program; and a plan that was not agreed on before. So a rank may compile a frame
*again* (for another batch size, say) while the others don't, as long as the plan stays the same.
Where the ranks' programs break into different frames, the comparison can't tell that from different
plans; switch it off there.

The exchange goes through the store of the default process group, not through collectives: there is
nothing that could mix with those of the training, and a rank that waits can say for whom. Each rank
writes its digest; the first one is what all compare theirs with; counters tell when all have
come. That is a handful of small messages per rank, group and plan, whatever the number of ranks. A
second count makes sure that no rank goes on while another one has found a mismatch in one of its
other groups, as a mesh of several dimensions has.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.fx as fx

from . import _process_groups as groups
from ._aot import stage_of
from .launches import GraphPlan, GroupPlan, Launch, Member, first_difference, plan_of
from .patching import hooks_status
from .report import GraphReport

__all__ = [
    "AgreementError",
    "PlanMismatchError",
    "RankMissingError",
    "agree",
    "agree_on_encoded",
    "agree_on_plan",
    "as_fresh_frame",
    "before_first_run",
]

_PREFIX = "torch_ext_bucketing/agreement"
_GATHER_S = 30.0
"""After a mismatch was found, how long to wait for the rest, to say which plan each rank has."""
_LINGER_S = 5.0
"""After a failure, how long to wait for the others to have read it: the process that ends first may
be the one that hosts the store."""
_MAX_SLEEP_S = 0.25


class AgreementError(RuntimeError):
    """The ranks could not make sure that they have the same plan."""


class PlanMismatchError(AgreementError):
    """Ranks have different plans; the message shows the first bucket that differs, in each version,
    and which ranks have which."""


class RankMissingError(AgreementError):
    """Ranks did not come to compare their plans in time; the message names them."""


def agree(
    graph: fx.GraphModule | fx.Graph,
    report: GraphReport | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Compare a graph's plan with those of the other ranks, now.

    For graphs that are compiled without a backend of this package; :func:`.passes.backend` does it
    by itself. Every rank has to call it, for its graphs in the same order.

    Args:
        graph: after bucketing and scheduling.
        report: what bucketing it returned, for byte offsets in the comparison.
        timeout: how long to wait for other ranks; None takes that of each process group.

    Raises:
        PlanMismatchError: on every rank.
        RankMissingError: a rank did not come in time.
        AgreementError: the store can't be reached.
    """
    g = graph.graph if isinstance(graph, fx.GraphModule) else graph
    buckets = () if report is None else report.buckets
    agree_on_plan(plan_of(g, stage_of(g), buckets), timeout, fresh=True)


def before_first_run(
    compiled: Callable[..., Any], plan: GraphPlan, timeout: timedelta | None, fresh: bool
) -> Callable[..., Any]:
    """``compiled``, with the plan agreed on before it runs; a plan without collectives, or one for
    which there is no other rank, costs nothing but a call.

    Args:
        fresh: see :func:`agree_on_plan`; for its first run alone.
    """
    if not plan.groups:
        return compiled
    digest = plan.digest()

    def run(*args: Any) -> Any:
        nonlocal fresh
        if fresh or digest not in _agreed().plans:
            agree_on_plan(plan, timeout, fresh)
            fresh = False
        return compiled(*args)

    run._boxed_call = getattr(compiled, "_boxed_call", False)  # type: ignore[attr-defined]
    return run


def as_fresh_frame(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """``compiled``, with the comparisons in its first run made as for a fresh frame.

    For graphs whose plan is an operator in them, which can't know who runs them.
    """
    first = True

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal first
        if not first:
            return compiled(*args, **kwargs)
        first = False
        _running.fresh = True
        try:
            return compiled(*args, **kwargs)
        finally:
            _running.fresh = False

    return run


def agree_on_plan(plan: GraphPlan, timeout: timedelta | None = None, fresh: bool = False) -> None:
    """Compare ``plan`` with the other ranks of its groups; see :func:`agree`.

    Args:
        fresh: compare it even if it was agreed on before in this process, and after a forward graph
            also its backward graph. Otherwise such a plan returns at once.
    """
    agreed = _agreed()
    digest = plan.digest()
    if digest in agreed.plans and not fresh:
        return
    exchanges = agreed.begin(plan, timeout, fresh)
    if exchanges:
        _run(exchanges)
    agreed.keep(digest, exchanges)


def agree_on_encoded(digest: str, text: str, timeout: timedelta | None) -> None:
    """:func:`agree_on_plan` for ``GraphPlan.digest()`` and ``GraphPlan.encode()`` of a plan."""
    if _running.fresh or digest not in _agreed().plans:
        agree_on_plan(GraphPlan.decode(text), timeout, _running.fresh)


class _Running(threading.local):
    """Whether this thread runs a frame for the first time."""

    fresh = False


_running = _Running()


# ---------------------------------------------------------------- what was agreed on


@dataclass
class _Agreed:
    """What this process has agreed on, under one default process group.

    Attributes:
        group: the default process group.
        plans: digests of graph plans.
        versions: per group, digests of its plans.
        rounds: per group, how many exchanges it has begun.
    """

    group: Callable[[], Any]
    plans: set[str] = field(default_factory=set)
    versions: dict[str, set[str]] = field(default_factory=dict)
    rounds: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, plan: GraphPlan, timeout: timedelta | None, fresh: bool) -> list[_Exchange]:
        """The comparisons that ``plan`` calls for."""
        exchanges = []
        environment = _environment()
        for group_plan in plan.groups:
            if self.group() is None:
                continue
            group = groups.group_by_name(group_plan.group)
            if not groups.has_peers(group):
                continue
            version = _Version(environment, plan.stage, group_plan)
            with self.lock:
                known = self.versions.setdefault(group_plan.group, set())
                if fresh and plan.stage == "backward":
                    known.discard(version.digest)
                elif fresh:
                    # All of them, and so the backward graph's, too: this group's other ranks run
                    # the same frame, and forget the same.
                    known.clear()
                    self.plans.clear()
                if version.digest in known:
                    continue
                number = self.rounds.get(group_plan.group, 0) + 1
                self.rounds[group_plan.group] = number
            wait = groups.group_timeout(group) if timeout is None else timeout
            exchanges.append(_Exchange(version, number, groups.ranks_of(group), wait))
        return exchanges

    def keep(self, digest: str, exchanges: Sequence[_Exchange]) -> None:
        with self.lock:
            for exchange in exchanges:
                version = exchange.version
                self.versions.setdefault(version.plan.group, set()).add(version.digest)
            self.plans.add(digest)


_no_group = _Agreed(lambda: None)
_current = _no_group


def _agreed() -> _Agreed:
    """The state under the present default group: a new group, a new count."""
    global _current
    group = groups.default_group()
    if _current.group() is not group:
        _current = _no_group if group is None else _Agreed(weakref.ref(group))
    return _current


def _environment() -> str:
    status = hooks_status()
    series = f"patch series {status.series} {status.digest[:12]}" if status.digest else status.state
    return f"torch {torch.__version__.split('+')[0]}, hooks {series}"


# ---------------------------------------------------------------- the exchange


@dataclass(frozen=True)
class _Version:
    """One rank's side: its environment and its plan for one group.

    The stage is not part of the digest: what is sent does not depend on it.
    """

    environment: str
    stage: str
    plan: GroupPlan

    @property
    def digest(self) -> str:
        text = f"{self.environment}\0{self.plan.to_json()}"
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps([self.environment, self.stage, self.plan.to_json()])

    @classmethod
    def from_json(cls, group: str, text: str) -> _Version:
        environment, stage, plan = json.loads(text)
        return cls(environment, stage, GroupPlan.from_json(group, plan))


class _FailedError(Exception):
    """An exchange failed; ``why`` and ``text`` are what was left under its ``bad`` key."""

    def __init__(self, exchange: _Exchange, why: str, text: str) -> None:
        super().__init__(why)
        self.exchange = exchange
        self.why = why
        self.text = text


class _Exchange:
    """One group's comparison of one plan, as this rank takes part in it.

    Keys, below a prefix of the group's name, its ranks and the number of the exchange::

        rank<r>      the digest of rank r, written when it arrives
        plan         the digest of the first to arrive
        text/<d>     the version with digest d, in full
        bad          why it failed; the first reason stays
        arrived, confirmed, left, seen      counters
        same, done                          set by the last one to arrive, and to confirm
    """

    def __init__(
        self, version: _Version, number: int, ranks: tuple[int, ...], timeout: timedelta
    ) -> None:
        self.version = version
        self.number = number
        self.ranks = ranks
        self.timeout = timeout
        self.store = groups.default_store()
        self.rank = torch.distributed.get_rank()
        self.started = time.monotonic()
        members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:8]
        self.prefix = f"{_PREFIX}/{version.plan.group}/{members}/{number}"

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def has(self, name: str) -> bool:
        return bool(self.store.check([self.key(name)]))

    def get(self, name: str) -> str:
        return _text(self.store.get(self.key(name)))

    def put_first(self, name: str, value: str) -> str:
        """Set a key that is not there yet; returns what it has then."""
        return _text(self.store.compare_set(self.key(name), "", value))

    def count(self, name: str) -> int:
        return int(self.store.add(self.key(name), 1))

    def seen(self) -> int:
        """How many ranks know that it failed."""
        return int(self.store.add(self.key("seen"), 0))

    def arrive(self) -> None:
        digest = self.version.digest
        if not self.has(f"text/{digest}"):
            self.store.set(self.key(f"text/{digest}"), self.version.to_json())
        self.store.set(self.key(f"rank{self.rank}"), digest)
        if self.put_first("plan", digest) != digest:
            self.fail("plan", "")
        # Whoever differs has said so before it counts itself.
        if self.count("arrived") == len(self.ranks) and not self.has("bad"):
            self.store.set(self.key("same"), "1")

    def confirm(self) -> None:
        if self.count("confirmed") == len(self.ranks):
            self.store.set(self.key("done"), "1")

    def leave(self) -> None:
        """Leave nothing behind: a later default group may use the same store and names."""
        if self.count("left") < len(self.ranks):
            return
        digest = self.version.digest
        names = ["plan", "same", "done", "arrived", "confirmed", "left", f"text/{digest}"]
        for name in (*names, *(f"rank{r}" for r in self.ranks)):
            self.store.delete_key(self.key(name))

    def fail(self, why: str, text: str) -> None:
        self.put_first("bad", json.dumps([why, text]))

    def reached(self, name: str) -> bool:
        """Whether ``name`` is set.

        Raises:
            _FailedError: the exchange failed, or its time is over.
        """
        if self.has("bad"):
            raise _FailedError(self, *json.loads(self.get("bad")))
        if self.has(name):
            return True
        if time.monotonic() - self.started > self.timeout.total_seconds():
            self.fail("missing", self.missing_text())
            raise _FailedError(self, *json.loads(self.get("bad")))
        return False

    def missing(self) -> list[int]:
        return [r for r in self.ranks if not self.has(f"rank{r}")]

    def missing_text(self) -> str:
        missing, plan = self.missing(), self.version.plan
        what = f"the {self.version.stage} graph's bucket plan on process group {plan.group!r}"
        waited = f"rank {self.rank} waited {self.timeout.total_seconds():g} s"
        if not missing:
            return (
                f"{waited} to compare {what}: every rank of the group came, but one of them still "
                "waits for others in another process group"
            )
        names = _ranks_text(missing)
        return (
            f"{waited} to compare {what} (plan {self.number} there), and {names} did not come. "
            "The graph was stopped. A rank that does not come has failed or was killed "
            "(look at its own output), is still compiling (raise agree_timeout), or goes on "
            "with a graph that it compiled before, because only some ranks compiled anew"
        )

    def mismatch_text(self) -> str:
        """What every rank says; waits a little for ranks that have not come yet."""
        deadline = time.monotonic() + min(_GATHER_S, self.timeout.total_seconds())
        _poll(lambda: not self.missing(), deadline)
        by_digest: dict[str, list[int]] = {}
        absent = self.missing()
        for rank in self.ranks:
            if rank not in absent:
                by_digest.setdefault(self.get(f"rank{rank}"), []).append(rank)
        group = self.version.plan.group
        versions = [
            (ranks, _Version.from_json(group, self.get(f"text/{digest}")))
            for digest, ranks in by_digest.items()
        ]
        return _mismatch_text(versions, absent, len(self.ranks))


def _run(exchanges: Sequence[_Exchange]) -> None:
    try:
        error = _meet(exchanges)
    except RuntimeError as problem:  # c10d's own errors are RuntimeErrors
        raise AgreementError(
            "the ranks' bucket plans can't be compared, because the store of the default process "
            f"group can't be reached: {problem}. Usually the process that hosts it, rank 0 or the "
            "launcher, has ended: look at its output first"
        ) from problem
    if error is not None:
        raise error


def _meet(exchanges: Sequence[_Exchange]) -> AgreementError | None:
    """Returns what to raise on this rank, once the others know."""
    try:
        # All arrive everywhere before anyone waits, so that no two ranks wait for each other.
        for exchange in exchanges:
            exchange.arrive()
        _all(exchanges, "same")
        for exchange in exchanges:
            exchange.confirm()
        _all(exchanges, "done")
        # Whoever hosts the store may have gone on and ended.
        with contextlib.suppress(RuntimeError):
            for exchange in exchanges:
                exchange.leave()
    except _FailedError as failed:
        return _error(failed, exchanges)
    return None


def _all(exchanges: Sequence[_Exchange], name: str) -> None:
    waiting = list(exchanges)

    def done() -> bool:
        waiting[:] = [e for e in waiting if not e.reached(name)]
        return not waiting

    _poll(done, None)


def _error(failed: _FailedError, exchanges: Sequence[_Exchange]) -> AgreementError:
    text = failed.text or failed.exchange.mismatch_text()
    # The store may go away from here on: with this rank's reason to fail, nothing is lost by that.
    with contextlib.suppress(RuntimeError):
        for other in exchanges:
            other.fail(failed.why, text)
        deadline = time.monotonic() + _LINGER_S
        expected = {id(e): len(e.ranks) - len(e.missing()) for e in exchanges}
        for each in exchanges:
            each.count("seen")
        _poll(lambda: all(e.seen() >= expected[id(e)] for e in exchanges), deadline)
    return PlanMismatchError(text) if failed.why == "plan" else RankMissingError(text)


def _poll(done: Callable[[], bool], deadline: float | None) -> bool:
    """Ask until it is so or the time is over; at intervals of a tenth of what was waited.

    Not a blocking wait in the store: that would hold the store's one connection against other
    threads, and Ctrl-C would not end it.
    """
    started = time.monotonic()
    while not done():
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return False
        time.sleep(min(_MAX_SLEEP_S, max(0.0005, (now - started) / 10)))
    return True


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# ---------------------------------------------------------------- what is said


def _mismatch_text(
    versions: Sequence[tuple[list[int], _Version]], absent: Sequence[int], size: int
) -> str:
    plan = versions[0][1].plan
    stages = dict.fromkeys(v.stage for _, v in versions)
    lines = [
        f"the ranks of process group {plan.group!r} ({size} ranks) have {len(versions)} different "
        f"bucket plans for their {' / '.join(stages)} graph. It was stopped."
    ]
    environments = dict.fromkeys(v.environment for _, v in versions)
    if len(environments) > 1:
        lines.append("They run different versions:")
        lines += [f"  {_ranks_text(ranks)}: {v.environment}" for ranks, v in versions]
    at = first_difference([v.plan for _, v in versions])
    if at is None:
        lines.append("Their buckets are the same, but not the code that packs them.")
    else:
        total = " or ".join(map(str, dict.fromkeys(len(v.plan.launches) for _, v in versions)))
        lines.append(f"The first to differ is collective {at + 1} of {total} on this group:")
        lines += _launches_text(versions, at)
    if absent:
        lines.append(f"Not heard of yet: {_ranks_text(absent)}.")
    lines.append(
        "Check that all ranks build the same model, give the backend the same passes, plan and "
        "hooks, and run the same torch, torch_ext_bucketing and patch series "
        "('torch-ext-bucketing patch status')."
    )
    return "\n".join(lines)


def _launches_text(versions: Sequence[tuple[list[int], _Version]], at: int) -> list[str]:
    ranks_of: dict[Launch | None, list[int]] = {}
    for ranks, version in versions:
        launches = version.plan.launches
        ranks_of.setdefault(launches[at] if at < len(launches) else None, []).extend(ranks)
    place = _first_member([() if launch is None else launch.members for launch in ranks_of])
    lines = []
    for launch, ranks in ranks_of.items():
        text = "no such collective" if launch is None else launch.to_text(place or 0)
        lines.append(f"  {_ranks_text(sorted(ranks))}: {text}")
    if place is not None and len({launch.kind for launch in ranks_of if launch}) == 1:
        lines.append(f"  (their members differ from number {place + 1} on)")
    return lines


def _first_member(members: Sequence[tuple[Member, ...]]) -> int | None:
    """Where lists of members differ first, from 0; None where one is empty."""
    if not all(members):
        return None
    for place in range(max(map(len, members))):
        if len({m[place] if place < len(m) else None for m in members}) > 1:
            return place
    return None


def _ranks_text(ranks: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"ranks 0-2, 5"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}"
