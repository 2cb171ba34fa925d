"""Reorder a graph under policies (:mod:`.policy`), and report the result.

    report = schedule(gm, [Overlap(), MaxComputeRun(8), PeakMemory(ratio=1.02)])

Each candidate order is made in one pass (:mod:`.list_schedule`) and timed on the cost model
(:mod:`.timeline`). The fastest order that keeps the bounds is chosen, else the one that misses them
least, with a warning. An order that is faster, but misses the bounds, is made again with a tighter
limit on memory. Where the bound on memory is out of reach, the least peak takes its place
(:class:`_LeastPeak`). The graph's own order is always a candidate, so the estimate never gets
worse. Of orders with equal steps, one made for slower communication is taken, unless it needs more
memory: it loses less where times are wrong. An exception leaves the graph unchanged, with a
warning.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch.fx as fx

from ...errors import BoundNotKeptWarning
from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.liveness import beside_text
from ...graph.nodes import GraphLike, graph_of, paused_gc
from ...graph.sizes import GivenHints, SizeHints
from ...reports.base import sizes_text
from ...reports.schedule import ScheduleReport
from ..cost.cost import Costs
from ..cost.machine import H100, Machine, check_machine
from .list_schedule import ROUNDING, ListScheduler, list_schedule, plain_schedule
from .model import Model, model_of
from .policy import Bounds, Case, Options, Policy, policies_of
from .timeline import Timeline, optimizer_ms, rank_order_ms, step_ms

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
_TIGHTER = 3
_QUICK_TIGHTER = 1
"""The number of attempts to tighten an order that misses its bound."""
FAR = 0.25
"""An order that misses a bound by more than that of gathers at their use is rare. Where that misses
it by this much more than allowed, no others are tried."""
_DEAR = 0.05
"""The least cost of a bound, relative to the step, that is worth a note."""
_WORTH = 0.998
"""A step is worth another attempt if it is shorter than this part of the best one."""
_SLOWER = 1.7
"""The factor of collectives' times that an order with slack is made for. On the held-out models
another order, made for 1.3, gains nothing more."""
_UPPER_GUESS = (
    "the time of sums in rank order is an upper guess: the machine has neither levels nor a table "
    "of all-to-alls, and torch counts one as about 4 reduce-scatters (measure gives a table)"
)


def schedule(
    gm: GraphLike,
    policy: Policy | Iterable[Policy],
    *,
    machine: Machine = H100,
    reference_bytes: int | None = None,
    donated: Callable[[fx.Node], bool] | None = None,
    size_hints: SizeHints | GivenHints = None,
    external_live_bytes: int = 0,
    like: Options | None = None,
) -> ScheduleReport:
    """Reorder a graph's nodes, in place. A ``GraphModule`` is recompiled.

    Args:
        gm: a forward, backward, joint or inference graph with fake tensors in ``meta["val"]``.
        policy: one policy or several, at most one of each class.
        machine: the machine to time nodes for.
        reference_bytes: the peak that ``PeakMemory(ratio=...)`` refers to, such as the unbucketed
            graph's (see :func:`peak_bytes`); None: the peak of ``gm`` as it is.
        donated: see :class:`.GraphAnalysis`.
        size_hints: see :func:`.backend`.
        external_live_bytes: bytes that are live all the time besides the graph's own inputs, such
            as parameters that a backward graph does not read. They count in every peak.
        like: :attr:`.Scheduled.sort` of a model of the same graph, found by :class:`.BySearch`. If
            an order of this sort keeps the bounds, no others are tried.

    Returns:
        The report. A bound that is missed is also a ``BoundNotKeptWarning``.

    Raises:
        TypeError: an object in ``policy`` is not a policy, ``machine`` is not a machine, or
            ``size_hints`` is neither a whole number nor a callable.
        ValueError: two policies are of one class, or ``reference_bytes``, ``external_live_bytes``
            or ``size_hints`` is not a number of at least 0.
    """
    policies = policies_of(policy)
    check_machine(machine)
    given = {"external_live_bytes": external_live_bytes}
    if reference_bytes is not None:
        given["reference_bytes"] = reference_bytes
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} must be a number of bytes, got {value!r}")
    graph = graph_of(gm)
    hints = SizeHints.of(size_hints)

    def modelled(costs: Costs) -> Model:
        analysis = GraphAnalysis(
            graph,
            hints,
            donated=donated,
            external_live_bytes=external_live_bytes,
            fuses=bool(machine.fuses),
        )
        return model_of(analysis, costs)

    def reorder(model: Model, order: Sequence[int]) -> None:
        if not model.dependencies.is_order(order):
            raise AssertionError("the order breaks a dependency")
        _reorder(graph, model.dependencies, order)

    try:
        with paused_gc():
            costs = Costs(machine, hints)
            model = modelled(costs)
            report, order, _ = schedule_model(model, policies, reference_bytes, like=like)
            reorder(model, order)
            if machine.fuses:  # which kernels there are depends on the order
                model, first = modelled(costs), report
                report, order = _in_its_order(model, policies, first), range(len(model))
                if report.misses > first.misses:
                    again = schedule_model(model, policies, first.reference_bytes)
                    reorder(model, again.order)
                    model = modelled(costs)
                    report = _in_its_order(model, policies, again.report, first)
            price = rank_order_ms(model, order, costs)
            notes = report.notes
            if price is not None and "all_to_all" in costs.by_torch:
                notes += (_UPPER_GUESS,)
            report = replace(
                report,
                machine=machine.describe(),
                rank_order_ms=price,
                optimizer_ms=optimizer_ms(model, order),
                notes=(*notes, beside) if (beside := beside_text(graph)) else notes,
            )
        if isinstance(gm, fx.GraphModule):
            gm.recompile()
    except Exception as error:  # losing a compile over its order would be worse than any order
        text = f"the graph keeps its order: {type(error).__name__}: {error}"
        warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
        return ScheduleReport(policies=tuple(map(repr, policies)), warnings=(text,))
    for text in report.warnings:
        warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
    return report


def _in_its_order(
    model: Model,
    policies: Sequence[Policy],
    made: ScheduleReport,
    first: ScheduleReport | None = None,
) -> ScheduleReport:
    """Return the report of a graph that has the order ``made``, with the bytes that it has there.

    ``first`` is the report of the graph's former order, if ``made`` is another one's.
    """
    given = first or made
    reached = Timeline.of(model)
    case = Case(model, reached, given.reference_bytes)
    bounds = tuple(p.report(case, reached) for p in policies)
    return replace(
        made,
        step_ms=(given.step_ms[0], made.step_ms[1]),
        exposed_ms=(given.exposed_ms[0], made.exposed_ms[1]),
        peak_bytes=(given.peak_bytes[0], reached.peak_bytes),
        longest_run=(given.longest_run[0], made.longest_run[1]),
        largest=model.largest,
        bounds=bounds,
        misses=sum(p.misses(case, reached) for p in policies),
        warnings=(*model.graph.hints.problems, *(b.warning for b in bounds if b.warning)),
    )


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

    Args:
        order: the places of its nodes.
        sort: :attr:`.Options.sort` of the best order of a candidate; None: there is none.
    """

    report: ScheduleReport
    order: Sequence[int]
    sort: Options | None


def rank(misses: float, step_ms: float, *then: float) -> tuple[float, ...]:
    """Rank a schedule, the best one lowest. This is the only rule for ties."""
    # Misses and times are sums, and their last digits depend on the order of the terms.
    return round(misses, 9), round(step_ms, 9), *then


def _rank(tried: _Try) -> tuple[float, ...]:
    return rank(tried.misses, tried.timeline.step_ms, tried.timeline.peak_bytes)


def schedule_model(
    model: Model,
    policy: Policy | Iterable[Policy],
    reference_bytes: int | None,
    **options: Any,
) -> Scheduled:
    """Find an order of a model, without any change to a graph; see :func:`schedule_within`."""
    found = schedule_within(math.inf, model, policy, reference_bytes, **options)
    assert found is not None
    return found


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
) -> Scheduled | None:
    """Find an order of a model that takes at most ``at_most_ms`` milliseconds.

    Args:
        model: the nodes to order.
        policy: see :func:`schedule`.
        reference_bytes: see :func:`schedule`.
        quick: try few orders.
        final: prefer the lowest peak of equal steps, and unless ``quick`` an order with slack; also
            compute the bounds' cost.
        like: try orders of this sort first, then those that differ from the best one so far in one
            option, and all others if that misses a bound. None: try all.
        near: whether to try others than ``like``, too.
        at_most_misses: give up if ``like`` and orders next to it miss the bounds by more.

    Returns:
        None if the best order takes longer. Such orders are given up early.
    """
    clock = time.perf_counter()
    bounds = Bounds(model, policy, reference_bytes)
    policies, case, ask, misses = bounds.policies, bounds.case, bounds.ask, bounds.misses
    given, reference = case.given, case.reference_bytes
    least = _LeastPeak(given, bounds.limit_bytes)
    if not quick:  # the few orders of a quick search are worth making, and show it then
        least.prove(model)
    wanted = [c for p in policies for c in p.candidates(case, quick)]
    passes = list[tuple[ListScheduler, Timeline | None]]()
    bound = model.paths.bound_ms

    def useful_ms() -> float:
        """Return the longest step of an order that may be better than the best one so far."""
        short = (t for t in tries if t.timeline.step_ms <= at_most_ms)
        best = min(short, key=_rank, default=None)
        if not wanted or best is None or least.beats(best):
            return at_most_ms
        if best.timeline.step_ms <= bound * ROUNDING:
            return -1.0
        # The final choice prefers the lower peak of equal steps, so these are made, too.
        return min(at_most_ms, (1.0 if final else _WORTH) * best.timeline.step_ms)

    def tried(name: str, options: Options, free: Options) -> _Try | None:
        """Make an order, unless it can't be better than the best one so far."""
        at_most = useful_ms()
        if at_most * ROUNDING < bound:
            return None
        if any(p.as_with(options) for p, _ in passes):
            return None
        made = ListScheduler(model, options, at_most)
        order = made.run()
        timeline = None if order is None else Timeline.of(model, order)
        passes.append((made, timeline))
        least.learn(made)
        if timeline is None:
            return None
        return _Try(name, timeline, misses, options, free)

    tries = [_Try(_GIVEN, given, misses)]
    # The widest window first: narrower ones that give the same order need no pass.
    sorts = sorted(wanted or _FOR_MEMORY, key=lambda c: -c[1].window)
    left = {free.sort: (name, free) for name, free in sorts}
    places = {sort: place for place, sort in enumerate(left)}

    def make(chosen: Iterable[Options]) -> None:
        for name, free in [left.pop(sort) for sort in chosen if sort in left]:
            options = ask(free)
            if bounds.unbounded:
                options = replace(options, limit_bytes=bounds.limit_bytes)
            found = tried(name, least.allowed(options), free)
            if found is not None:
                tries.append(found)

    first = like if like in left else None
    if wanted and left and tries[0].misses and not least.nbytes:
        probed = first or next(iter(left))
        name_and_options = left[probed]
        lean = min(left, key=lambda sort: (sort.window, sort.depth, sort.deadlines))
        if at_most_misses < math.inf:
            make([lean])
            if min(t.misses for t in tries) > at_most_misses + FAR:
                return None
        make([probed])
        if least.beats(min(tries, key=_rank)):
            make([lean])
        if least.nbytes:
            left[probed] = name_and_options
    if first is not None:
        make([first])
        windows = sorted({sort.window for sort in left} | {first.window})
        while near and (close := [s for s in left if s.next_to(first, windows)]):
            make(close)
            best = min(tries, key=_rank)
            first = best.free.sort if best.free is not None else first
    if near or first is None:
        best = min(tries, key=_rank)
        if first is not None and round(best.misses - at_most_misses, 9) > 0:
            return None
        unchanged = best.free is None and best.timeline.step_ms <= at_most_ms
        if first is None or least.beats(best) or unchanged:
            make([*left])
    # Of equal orders the first one counts, whatever was made early.
    tries.sort(key=lambda t: -1 if t.free is None or t.free.sort == like else places[t.free.sort])
    if wanted:
        plain = plain_schedule(model, useful_ms())
        if plain is not None:
            tries.append(_Try(_PLAIN, Timeline.of(model, plain), misses))
        if min(t.timeline.step_ms for t in tries) > at_most_ms:
            return None
        tries += _tightened(tries, tried, _QUICK_TIGHTER if quick else _TIGHTER, least.beats)
        best = min(tries, key=_rank)
        if best.free is not None and not least.beats(best):  # it may do so without bounds, too
            found = tried(f"{best.name}, no bounds", best.free, best.free)
            best = best if found is None else min(best, found, key=_rank)
    else:  # no policy is for speed: the order changes only if it misses a bound
        best = min(tries, key=lambda t: t.misses)
    if least.beats(best) and any(model.host) and final and not quick:
        # Where the host is slow nothing waits, and updates are not placed to fill a wait.
        alone = replace(model, host=[0.0] * len(model))
        order = schedule_model(alone, policies, reference, like=like, final=False).order
        best = min(best, _Try(_ALONE, Timeline.of(model, order), misses), key=_rank)
        tries.append(best)
    if best.free is not None and wanted and final and not quick:
        best = _with_slack(model, best, misses, reference)
        tries.append(best)
    reached = best.timeline
    if reached.step_ms > at_most_ms:
        return None
    cost, dear = 0.0, list[str]()
    if best.free is not None and wanted and final and not quick:
        cost = max(0.0, reached.step_ms - _made_with(model, best.free, passes).step_ms)
        for p in policies if cost > _DEAR * reached.step_ms else ():
            without = ask(best.free, but=p)
            if without != ask(best.free):
                shorter = _made_with(model, without, passes)
                if reached.step_ms - shorter.step_ms > _DEAR * reached.step_ms:
                    dear.append(_price(p, reached, shorter))
    reports = tuple(p.report(case, reached) for p in policies)
    groups: dict[str, float] = {}
    for group, ms in zip(model.group, model.ms, strict=True):
        if group is not None:
            groups[group] = groups.get(group, 0.0) + ms
    report = ScheduleReport(
        policies=tuple(map(repr, policies)),
        step_ms=(given.step_ms, reached.step_ms),
        # Sums of the host's launches in another order may differ in the last bit.
        bound_ms=min(bound, reached.step_ms),
        compute_ms=reached.compute_ms,
        host_ms=sum(model.host),
        group_ms=tuple(sorted(groups.items())),
        exposed_ms=(given.exposed_ms, reached.exposed_ms),
        peak_bytes=(given.peak_bytes, reached.peak_bytes),
        reference_bytes=reference,
        longest_run=(given.longest_run, reached.longest_run),
        bounds=reports,
        misses=best.misses,
        least_misses=least.misses,
        chosen=best.name,
        alternatives=tuple((t.name, t.timeline.step_ms, t.timeline.peak_bytes) for t in tries),
        bounds_cost_ms=cost,
        notes=(*(note for p in policies for note in p.notes(case)), *dear),
        largest=model.largest,
        warnings=(*model.graph.hints.problems, *(b.warning for b in reports if b.warning)),
        order=tuple(model.dependencies.nodes[i].name for i in reached.order),
        size_hints=model.graph.hints.to_text(),
        seconds=time.perf_counter() - clock,
    )
    made = min((t for t in tries if t.free is not None), key=_rank, default=None)
    sort = None if made is None or made.free is None else made.free.sort
    return Scheduled(report, reached.order, sort)


class _LeastPeak:
    """The least peak of a model's orders, as far as some of them show it.

    The bound is out of reach where any order has the peak of the graph's at the same node
    (:meth:`.Model.least_bytes_at`), or where the peak of three orders is of one size and at one
    node: in the graph's order, in one with overtaking, and in one without, whose gathers are at
    their use.

    Attributes:
        nbytes: the peak; 0 while orders with lower ones may be found.
        misses: its excess over the bound, relative to the bound.
    """

    def __init__(self, given: Timeline, bound: int) -> None:
        self._bound, self._given = bound, given
        self._shown = set[bool]()
        self.nbytes, self.misses = 0, 0.0

    def prove(self, model: Model) -> None:
        """Check whether any order has the peak of the graph's."""
        if self._bound < self._given.peak_bytes == model.least_bytes_at(self._at):
            self._learn_all()

    def learn(self, made: ListScheduler) -> None:
        """Take note of the peak of an order, or of the part that was made."""
        given, options = self._given, made.options
        if self._bound < made.peak_bytes == given.peak_bytes and made.peak_at == self._at:
            lean = not (options.window or options.depth)
            self._shown.update({lean} if lean or options.window else ())
        if len(self._shown) == 2 and not self.nbytes:
            self._learn_all()

    def _learn_all(self) -> None:
        self.nbytes = self._given.peak_bytes
        self.misses = (self.nbytes - self._bound) / max(1, self._bound)

    @cached_property
    def _at(self) -> int:
        return self._given.order[self._given.live.index(self._given.peak_bytes)]

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
    """Return an order made for slower communication, if it is as good by the given times."""
    # Many orders take the same time. Where times are wrong, the one loses least whose collectives
    # have room to take longer. That is not worth memory.
    assert best.options is not None
    most = max(best.timeline.peak_bytes, reference)
    slower = replace(
        model,
        ms=[ms if g is None else _SLOWER * ms for g, ms in zip(model.group, model.ms, strict=True)],
    )
    for options in (best.options, best.options.tightened(limit_bytes=most)):
        line = Timeline.of(model, list_schedule(slower, options))
        made = _Try(f"{best.name}, with slack", line, misses, options, best.free)
        gains = step_ms(slower, line.order) < step_ms(slower, best.timeline.order)
        as_short = line.step_ms <= ROUNDING * best.timeline.step_ms and line.peak_bytes <= most
        if _rank(made) < _rank(best) or (gains and as_short and made.misses <= best.misses):
            return made
    return best


def _tightened(
    tries: Sequence[_Try],
    tried: Callable[[str, Options, Options], _Try | None],
    times: int,
    misses: Callable[[_Try], bool],
) -> list[_Try]:
    """Make the fastest orders that miss a bound again, with tighter limits on memory."""
    # Holding kernels back matters more under a limit, so the fastest order of either sort may win.
    kept = min((t.timeline.step_ms for t in tries if not misses(t)), default=float("inf"))
    found = list[_Try]()
    for hold in (True, False):
        missing = [t for t in tries if t.options and t.options.hold is hold and misses(t)]
        fast = min(missing, key=lambda t: t.timeline.step_ms, default=None)
        if fast is not None and fast.timeline.step_ms < _WORTH * kept:
            found += _with_less_memory(fast, kept, tried, times, misses)
    return found


def _with_less_memory(
    fast: _Try,
    kept: float,
    tried: Callable[[str, Options, Options], _Try | None],
    times: int,
    misses: Callable[[_Try], bool],
) -> list[_Try]:
    """Lower the limit of an order until it keeps the bound, or takes ``kept`` milliseconds."""
    # A limit bounds prefetching and overtaking, but later nodes may exceed it. So it is lowered by
    # the peak's excess, by twice as much, and so on, until the bound holds. An attempt without
    # effect doubles the next one once more.
    assert fast.options is not None
    assert fast.free is not None
    bound, found = fast.options.limit_bytes, list[_Try]()
    if bound is None or fast.timeline.peak_bytes <= bound:
        return []  # the order misses another bound
    peak = fast.timeline.peak_bytes
    lower = peak - bound
    for _ in range(times):
        options = replace(fast.options, limit_bytes=bound - lower)
        name = f"{fast.name}, limit {lower / 2**20:.4g} MiB lower"
        made = tried(name, options, fast.free)
        lower *= 2
        if made is None:
            continue
        found.append(made)
        if made.timeline.peak_bytes == peak:
            lower *= 2
        peak = made.timeline.peak_bytes
        if not misses(made) or made.timeline.step_ms >= _WORTH * kept or lower >= bound:
            break
    return found


def _made_with(
    model: Model, options: Options, passes: Sequence[tuple[ListScheduler, Timeline | None]]
) -> Timeline:
    """Return the timeline of the order that ``options`` give, from ``passes`` if it is there."""
    found = next((timeline for made, timeline in passes if made.as_with(options)), None)
    return found or Timeline.of(model, list_schedule(model, options))


def _price(policy: Policy, reached: Timeline, free: Timeline) -> str:
    """Describe the cost of a bound."""
    peaks = sizes_text(reached.peak_bytes, free.peak_bytes)
    return (
        f"{policy!r} costs {reached.step_ms - free.step_ms:.1f} of {reached.step_ms:.1f} ms: in an "
        f"order without it these buckets take {free.step_ms:.1f} ms, with a peak of {peaks[1]} "
        f"instead of {peaks[0]}"
    )


def _reorder(graph: fx.Graph, dependencies: Precedence, order: Sequence[int]) -> None:
    for i in order:
        node = dependencies.nodes[i]
        last = next(iter(reversed(graph.nodes)))
        if last.op == "output":
            last.prepend(node)
        else:  # the graph has no output yet
            last.append(node)
