"""Compare a graph's launches with the other ranks, once, before its first collective runs."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.fx as fx

from .._torch import process_groups as groups
from .._torch.aot import stage_of
from ..graph.unwrap import graph_of
from .differences import Version
from .exchange import Exchange, run_all, this_environment
from .launches import GraphLaunches, launches_of


def agree(graph: fx.GraphModule | fx.Graph, timeout: timedelta | None = None) -> None:
    """Compare a graph's launches with the other ranks now.

    For graphs that are compiled without a backend of this package; :func:`.backend` compares by
    itself. Every rank must call it for its graphs in the same order.

    Args:
        graph: after bucketing and scheduling.
        timeout: how long to wait for other ranks; None takes each process group's own timeout.

    Raises:
        PlanMismatchError: on every rank.
        RankMissingError: a rank did not arrive in time.
        AgreementError: the store can't be reached.
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

    With ``fresh`` compare again, and forget what was agreed on before.
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
        environment = this_environment()
        for of_group in launches.groups:
            name, group = of_group.group, groups.group_by_name(of_group.group)
            if not groups.has_peers(group):
                continue
            version = Version(environment, launches.stage, of_group, launches.planned_with)
            with self.lock:
                known = self.versions.setdefault(name, set())
                if fresh:
                    # The backward graph's, too: the group's other ranks run the same frame and
                    # forget the same digests.
                    known.clear()
                    self.digests.clear()
                if version.digest in known:
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
