"""Search the orders of a model under policies (:mod:`.policy`).

Each order is made in one pass (:mod:`.list_schedule`) and timed on the cost model
(:mod:`.timeline`). The fastest order that keeps the bounds is chosen, else the one that misses them
least. A faster order that exceeds the bound on memory is made again under lower limits.
Where the bound on memory is out of reach, the least peak takes its place (:class:`_LeastPeak`). The
model's own order is always a candidate, so the estimate never gets worse. Of orders whose steps are
nearly equal, one made for slower communication is taken if it gains more there than it loses here,
unless it needs more memory: it loses less where times are wrong. Orders are made of the nodes that
run a kernel or hold bytes (:attr:`.Model.compact`), a third of them where kernels are fused; the
others follow their readers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ...reports.planner import ScheduleReport
from .list_schedule import ROUNDING, ListScheduler, list_schedule, plain_schedule
from .model import Model
from .policy import Bounds, Options, Policy
from .timeline import Timeline, step_ms

_FOR_MEMORY = tuple(
    (
        f"gathers at their use, window {window}",
        Options(window=window, fill=window, depth=0, deadlines=False),
    )
    for window in (0, 8)
)
"""Orders with the least memory and the shortest runs: gathers at their use, reductions at once."""
_GIVEN = "as given"
"""The name of the graph's own order."""
_ALONE = "without the host"
_PLAIN = "longest path first"
"""The name of the order that :func:`.plain_schedule` makes."""
_LIMITS = 3
_QUICK_LIMITS = 1
"""The number of lower limits on memory for an order that misses its bound."""
FAR_ABOVE = 0.25
"""An order that misses a bound by more than that of gathers at their use is rare. Where that misses
it by this much more than allowed, no others are tried."""
WORTH = 0.998
"""A step is worth another attempt if it is shorter than this part of the best one."""
_FOR_SLACK = 1.005
"""The most that an order with slack takes, in steps of the shortest one. benchmarks/README.md has a
table with the steps that slack costs and saves."""
FASTER, SLOWER = 0.8, 1.7
"""Factors of collectives' times on machines that are as plausible as the given one.

Estimates count eight tenths of a data sheet's rates, which a network may reach in full. All-gathers
on 32 nodes of H100s reached 200 GB/s (NVIDIA/nccl issue 1218), where estimates have 8 times 42, and
those of 1 KiB on two nodes take 1.6 to 3.2 times as long as by NCCL's model (benchmarks/README.md).
Kernels that are a tenth faster or slower lie between. On the held-out models an order with slack
for 1.3, beside the one for 1.7, gains nothing.
"""


@dataclass(frozen=True, eq=False)
class _Try:
    """An order, and how far it misses the bounds of all policies."""

    name: str
    timeline: Timeline
    _misses: Callable[[Timeline], float]
    options: Options | None = None
    free: Options | None = None  # without the bounds

    @cached_property
    def misses(self) -> float:
        return self._misses(self.timeline)


class Scheduled(NamedTuple):
    """The order that was chosen for a model.

    ``sort`` is :attr:`.Options.sort` of the best order of a candidate; None: there is none.
    """

    report: ScheduleReport
    order: Sequence[int]
    sort: Options | None


def rank(misses: float, step_ms: float, *then: float) -> tuple[float, ...]:
    """Rank a schedule, the best one lowest, by the only rule for ties."""
    # Misses and times are sums, and their last digits depend on the order of the terms.
    return round(misses, 9), round(step_ms, 9), *then


def _rank(tried: _Try) -> tuple[float, ...]:
    return rank(tried.misses, tried.timeline.step_ms, tried.timeline.peak_bytes)


def schedule_model(
    model: Model, policy: Policy | Iterable[Policy], reference_bytes: int | None, **options: Any
) -> Scheduled:
    """Find an order of a model, without any change to a graph; see :func:`schedule_within`."""
    scheduled = schedule_within(math.inf, model, policy, reference_bytes, **options)
    assert scheduled is not None
    return scheduled


def schedule_within(
    at_most_ms: float,
    model: Model,
    policy: Policy | Iterable[Policy],
    reference_bytes: int | None,
    quick: bool = False,
    final: bool = True,
    like: Options | None = None,
    near: bool = True,
    at_most_misses: float = math.inf,
    least_bytes: int = 0,
) -> Scheduled | None:
    """Find an order of a model that takes at most ``at_most_ms`` milliseconds.

    None: the order that would be chosen takes longer. Such orders are given up early.

    Args:
        policy: see :func:`schedule`; so is ``reference_bytes``.
        quick: try few orders, none with slack.
        final: prefer the lowest peak of equal steps, and try more where a bound is missed.
        like: try orders of this sort first, then those that differ from the best one so far in one
            option, and all others if that misses a bound. None: try all.
        near: whether to try others than ``like``, too.
        at_most_misses: give up if ``like`` and orders next to it miss the bounds by more.
        least_bytes: a peak above the bound that no order is taken to go below, unless the model's
            own does; 0: none is known.
    """
    clock = time.perf_counter()
    compact = model.compact
    bounds = Bounds(compact, policy, reference_bytes)
    orders = _Orders(at_most_ms, compact, bounds, quick, final, least_bytes)
    best = orders.best_of(like, near, at_most_misses)
    if best is not None and not quick:
        best = orders.improved(best, like)
    if best is None or best.timeline.step_ms > at_most_ms:
        return None
    order = model.expanded(best.timeline.order)
    names = tuple(model.dependencies.nodes[i].name for i in order)
    report = orders.report(best)
    fastest = min((t for t in orders.tries if t.free is not None), key=_rank, default=None)
    sort = None if fastest is None or fastest.free is None else fastest.free.sort
    report = replace(report, order=names, seconds=time.perf_counter() - clock)
    return Scheduled(report, order, sort)


class _Orders:
    """The orders of one model that were tried, the graph's own first (``tries``)."""

    def __init__(
        self,
        at_most_ms: float,
        model: Model,
        bounds: Bounds,
        quick: bool,
        final: bool,
        least_bytes: int = 0,
    ) -> None:
        self._model, self._bounds, self._at_most_ms = model, bounds, at_most_ms
        self._quick, self._final, self._bound_ms = quick, final, model.paths.bound_ms
        graph_order = bounds.case.given
        self._least = _LeastPeak(model, graph_order, bounds.limit_bytes, least_bytes)
        if not quick:  # the few orders of a quick search are worth making, and show it then
            self._least.prove()
        self._wanted = [c for p in bounds.policies for c in p.candidates(bounds.case, quick)]
        self._passes = list[tuple[ListScheduler, Timeline | None]]()
        self.tries = [_Try(_GIVEN, graph_order, bounds.misses)]
        # The widest window first: narrower ones that give the same order need no pass.
        sorts = sorted(self._wanted or _FOR_MEMORY, key=lambda c: -c[1].window)
        self._untried = {free.sort: (name, free) for name, free in sorts}
        self._places = {sort: place for place, sort in enumerate(self._untried)}

    @property
    def _best(self) -> _Try:
        return min(self.tries, key=_rank)

    def best_of(self, like: Options | None, near: bool, at_most_misses: float) -> _Try | None:
        """Make orders and return the best one; None if all take or miss too much."""
        if not self._make_sorts(like, near, at_most_misses):
            return None
        # Of equal orders the first one counts, whatever was made early.
        self.tries.sort(
            key=lambda t: -1 if t.free is None or t.free.sort == like else self._places[t.free.sort]
        )
        if not self._wanted:  # no policy is for speed: the order changes only if it misses a bound
            return min(self.tries, key=lambda t: t.misses)
        useful_ms = self._useful_ms() * ROUNDING
        if useful_ms >= self._bound_ms:
            plain = Timeline.of(self._model, plain_schedule(self._model))
            if plain.step_ms <= useful_ms:
                self.tries.append(_Try(_PLAIN, plain, self._bounds.misses))
        if min(t.timeline.step_ms for t in self.tries) > self._at_most_ms:
            return None
        self.tries += self._with_less_memory()
        best = self._best
        if best.free is not None and not self._least.beats(best):
            # Without bounds an order may keep them, too.
            free = self._make(f"{best.name}, no bounds", best.free, best.free)
            best = best if free is None else min(best, free, key=_rank)
        return best

    def _make_sorts(self, like: Options | None, near: bool, at_most_misses: float) -> bool:
        """Make orders of the sorts that may be the best; return False to give up."""
        untried, least = self._untried, self._least
        first = like if like in untried else None
        if self._wanted and untried and self.tries[0].misses and not least.nbytes:
            # Two orders may show that the bound is out of reach. Others then ignore it.
            probed = first or next(iter(untried))
            name_and_options = untried[probed]
            lean = min(untried, key=lambda sort: (sort.window, sort.depth, sort.deadlines))
            if at_most_misses < math.inf:
                self._make_each([lean])
                if min(t.misses for t in self.tries) > at_most_misses + FAR_ABOVE:
                    return False
            self._make_each([probed])
            if least.beats(self._best):
                self._make_each([lean])
            if least.nbytes:
                untried[probed] = name_and_options
        if first is not None:
            # Climb: each round makes the orders next to the best one so far.
            self._make_each([first])
            windows = sorted({sort.window for sort in untried} | {first.window})
            while near and (close := [s for s in untried if s.next_to(first, windows)]):
                self._make_each(close)
                first = self._best.free.sort if self._best.free is not None else first
        if near or first is None:
            best = self._best
            if first is not None and round(best.misses - at_most_misses, 9) > 0:
                return False
            unchanged = best.free is None and best.timeline.step_ms <= self._at_most_ms
            if first is None or least.beats(best) or unchanged:
                self._make_each([*untried])
        return True

    def _make_each(self, sorts: Iterable[Options]) -> None:
        """Make an order of each sort that was not tried, under the bounds."""
        for name, free in [self._untried.pop(sort) for sort in sorts if sort in self._untried]:
            options = self._bounds.ask(free)
            if self._bounds.unbounded:
                options = replace(options, limit_bytes=self._bounds.limit_bytes)
            allowed = self._least.allowed(options)
            tries = [self._make(name, allowed, free)]
            if not allowed.window and any(made.short for made, _ in self._passes):
                # In the graph's order of kernels either rule of room may have the shorter step.
                allowed = replace(allowed, room_for_open=False)
                tries.append(self._make(f"{name}, room for all", allowed, free))
            self.tries += filter(None, tries)

    def _make(self, name: str, options: Options, free: Options) -> _Try | None:
        """Make an order, unless it can't be better than the best one so far."""
        useful_ms = self._useful_ms()
        if useful_ms * ROUNDING < self._bound_ms:
            return None
        if any(p.as_with(options) for p, _ in self._passes):
            return None
        scheduler = ListScheduler(self._model, options, useful_ms)
        order = scheduler.run()
        timeline = None
        if order is not None:
            made = scheduler.streams, scheduler.peak_bytes or None
            timeline = Timeline.of(self._model, order, *made)
        self._passes.append((scheduler, timeline))
        self._least.learn(scheduler)
        if timeline is None:
            return None
        return _Try(name, timeline, self._bounds.misses, options, free)

    def _useful_ms(self) -> float:
        """Return the longest step of an order that may be better than the best one so far."""
        short = (t for t in self.tries if t.timeline.step_ms <= self._at_most_ms)
        best = min(short, key=_rank, default=None)
        if not self._wanted or best is None or self._least.beats(best):
            return self._at_most_ms
        if best.timeline.step_ms <= self._bound_ms * ROUNDING:
            return -1.0
        # The final choice prefers the lower peak of equal steps, so these are made, too.
        return min(self._at_most_ms, (1.0 if self._final else WORTH) * best.timeline.step_ms)

    def _with_less_memory(self) -> list[_Try]:
        """Make the fastest orders that exceed the bound on memory again, under lower limits."""
        # A limit bounds prefetching and overtaking, but later nodes may exceed it. So it is lowered
        # by the peak's excess, by twice as much, and so on, until the bound holds.
        exceeds, attempts = self._least.beats, list[_Try]()
        kept = min((t.timeline.step_ms for t in self.tries if not exceeds(t)), default=math.inf)
        missing = [t for t in self.tries if t.options is not None and exceeds(t)]
        # To hold kernels back matters more under a lower limit. Either rule of room may keep it.
        for rules in itertools.product((True, False), repeat=2):
            alike = (t for t in missing if (o := t.options) and (o.hold, o.room_for_open) == rules)
            fast = min(alike, key=lambda t: t.timeline.step_ms, default=None)
            if fast is None or fast.options is None or fast.free is None:
                continue
            bound = fast.options.limit_bytes
            if bound is None or fast.timeline.step_ms >= WORTH * kept:
                continue
            excess = fast.timeline.peak_bytes - bound
            for lower in (excess * 2**i for i in range(_QUICK_LIMITS if self._quick else _LIMITS)):
                if not 0 < lower < bound:
                    break
                options = replace(fast.options, limit_bytes=bound - lower)
                name = f"{fast.name}, limit {lower / 2**20:.4g} MiB lower"
                attempt = self._make(name, options, fast.free)
                if attempt is not None:
                    attempts.append(attempt)
                    if not exceeds(attempt):
                        break
        return attempts

    def improved(self, best: _Try, like: Options | None) -> _Try:
        """Return an order made without the host's time or with slack, if that is better."""
        model, reference = self._model, self._bounds.case.reference_bytes
        if self._final and self._least.beats(best) and any(model.host):
            # Where the host is slow nothing waits, and updates are not placed to fill a wait.
            alone = replace(model, host=[0.0] * len(model))
            arguments = self._bounds.policies, reference
            order = schedule_model(alone, *arguments, like=like, final=False).order
            timeline = Timeline.of(model, order)
            best = min(best, _Try(_ALONE, timeline, self._bounds.misses), key=_rank)
            self.tries.append(best)
        if best.free is not None and self._wanted:
            best = _with_slack(model, best, self._bounds.misses, reference)
            self.tries.append(best)
        return best

    def report(self, best: _Try) -> ScheduleReport:
        """Report the order that was chosen."""
        model, case, reached = self._model, self._bounds.case, best.timeline
        graph_order, policies, hints = case.given, self._bounds.policies, model.graph.hints
        reports = tuple(p.report(case, reached) for p in policies)
        groups: dict[str, float] = {}
        for group, ms in zip(model.group, model.ms, strict=True):
            if group is not None:
                groups[group] = groups.get(group, 0.0) + ms
        return ScheduleReport(
            policies=tuple(map(repr, policies)),
            step_ms=(graph_order.step_ms, reached.step_ms),
            # Sums of the host's launches in another order may differ in the last bit.
            bound_ms=min(self._bound_ms, reached.step_ms),
            compute_ms=reached.compute_ms,
            host_ms=sum(model.host),
            group_ms=tuple(sorted(groups.items())),
            exposed_ms=(graph_order.exposed_ms, reached.exposed_ms),
            peak_bytes=(graph_order.peak_bytes, reached.peak_bytes),
            reference_bytes=case.reference_bytes,
            longest_run=(graph_order.longest_run, reached.longest_run),
            bounds=reports,
            misses=best.misses,
            least_misses=self._least.misses,
            chosen=best.name,
            alternatives=tuple(
                (t.name, t.timeline.step_ms, t.timeline.peak_bytes) for t in self.tries
            ),
            notes=tuple(note for p in policies for note in p.notes(case)),
            largest=model.largest,
            warnings=(*hints.problems, *(b.warning for b in reports if b.warning)),
            size_hints=hints.to_text(),
        )


class _LeastPeak:
    """The least peak of a model's orders, as far as some of them show it.

    The bound is out of reach where any order has the peak of the graph's at the same node
    (:meth:`.Model.least_bytes_at`), or where the peak of three orders is of one size and at one
    node: in the graph's order, in one with overtaking, and in one without, whose gathers are at
    their use.

    ``nbytes`` is the peak, 0 while lower ones may be found; ``misses``: see :class:`Bounds`.
    """

    def __init__(self, model: Model, graph_order: Timeline, bound: int, known: int = 0) -> None:
        self._model, self._bound, self._graph_order = model, bound, graph_order
        self._shown = set[bool]()
        self.nbytes, self.misses = 0, 0.0
        if bound < known <= graph_order.peak_bytes:
            self._set(known)

    def prove(self) -> None:
        """Check whether any order has the peak of the graph's."""
        model, missed = self._model, self._bound < self._graph_order.peak_bytes
        if missed and len(model) and self._graph_order.peak_bytes == model.least_bytes_at(self._at):
            self._set(self._graph_order.peak_bytes)

    def learn(self, made: ListScheduler) -> None:
        """Take note of the peak of an order, or of the part that was made."""
        graph_order, options = self._graph_order, made.options
        if self._bound < made.peak_bytes == graph_order.peak_bytes and made.peak_at == self._at:
            lean = not (options.window or options.depth)
            self._shown.update({lean} if lean or options.window else ())
        # All three take kernels in the order of the graph where memory is short, so the order by
        # longest paths may not have a lower peak either.
        if (
            len(self._shown) == 2
            and not self.nbytes
            and self._plain_bytes >= graph_order.peak_bytes
        ):
            self._set(graph_order.peak_bytes)

    def _set(self, nbytes: int) -> None:
        self.nbytes, self.misses = nbytes, (nbytes - self._bound) / max(1, self._bound)

    @cached_property
    def _plain_bytes(self) -> int:
        """The peak of the order by longest paths."""
        return self._model.liveness.peak(plain_schedule(self._model))

    @cached_property
    def _at(self) -> int:
        return self._graph_order.order[self._graph_order.live.index(self._graph_order.peak_bytes)]

    def beats(self, tried: _Try) -> bool:
        """Return whether an order may miss the bounds less than ``tried``."""
        return round(tried.misses - self.misses, 9) > 0

    def allowed(self, options: Options) -> Options:
        """Return ``options`` without a limit that is out of reach."""
        # Under it no gather and no kernel would go ahead of the graph's order, for no lower peak.
        limit = options.limit_bytes
        return options if limit is None else replace(options, limit_bytes=max(limit, self.nbytes))


def _with_slack(
    model: Model, best: _Try, misses: Callable[[Timeline], float], reference: int
) -> _Try:
    """Return an order made for slower communication, if it is nearly as good by the given times."""
    # Many orders take nearly the same time. Where times are wrong, the one loses least whose
    # collectives have room to take longer. That is not worth memory.
    assert best.options is not None
    most = max(best.timeline.peak_bytes, reference)
    slower = model.with_collectives(SLOWER)
    slow_ms = step_ms(slower, best.timeline.order)
    for options in (best.options, best.options.tightened(limit_bytes=most)):
        line = Timeline.of(model, list_schedule(slower, options))
        with_slack = _Try(f"{best.name}, with slack", line, misses, options, best.free)
        gained_ms = slow_ms - step_ms(slower, line.order)
        lost_ms = line.step_ms - best.timeline.step_ms
        as_good = line.peak_bytes <= most and with_slack.misses <= best.misses
        as_short = lost_ms < gained_ms and line.step_ms <= _FOR_SLACK * best.timeline.step_ms
        if _rank(with_slack) < _rank(best) or (as_good and as_short):
            return with_slack
    return best
