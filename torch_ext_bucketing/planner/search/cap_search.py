"""Byte caps chosen by trying a handful of them on the cost model.

Large buckets make few collectives, which need little time on the wire; small ones start earlier,
hold less memory and leave less communication at the ends of a graph. Which is better depends on
the graph, so several caps are tried: each is planned, and the graph as it would be after merging is
scheduled on the cost model (:mod:`.merged_model`). First all process groups and kinds get the same
cap. Then the gathers and the reductions of each group in turn try the next smaller and the next
larger one, and, where the step is still far from what no order can beat, caps between these. Then,
with the best caps and the next larger ones, buckets of reductions are closed where runs of
computation between them would become long. Last, in graphs that are small enough to try many plans,
single buckets of the best one take members over from their neighbours, are joined, or cut.

Planning is cheap, scheduling is not. So caps come in the order of their plans' bounds, the least
first. A plan is not scheduled if its bound, or the time of one group's collectives alone, is longer
than the best step so far, and an order is given up where it is known to become longer. The sort of
order that was the best so far is made first. No other caps are tried once the step is close to what
no plan can be shorter than.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.fx as fx

from ..._gc import paused_gc
from ...bucketing.all_to_all import reduce_by_all_to_all
from ...bucketing.caps import ByCap, CapPlanner, check_cap
from ...bucketing.merge import merge_buckets
from ...bucketing.plan import BucketPlanner, MergePlan, planned
from ...errors import BoundNotKeptWarning
from ...graph.analysis import GraphAnalysis
from ...graph.collectives import group_name
from ...graph.snapshot import reading_only
from ...reports.caps import CapsReport, TriedCaps
from ...reports.schedule import ScheduleReport
from ..cost.cost import Costs
from ..cost.machine import H100, Machine
from ..schedule.model import Model, model_of
from ..schedule.options import Options
from ..schedule.policy import Policy, policies_of
from ..schedule.scheduler import Scheduled, rank, schedule_model
from .merged_model import merged_model

CAPS_MB = (8.0, 25.0, 80.0, 500.0)
"""MiB. 25 is DDP's default bucket, 500 the ceiling of torch's own estimate."""

_SMALLEST_MB = 0.1
_LARGEST_MB = 2000.0
"""The bound of torch's overlap-preserving bucketer."""

_SHORT_RUN = 8
"""Compute nodes that a bucket of reduce-scatters waits for after the one before: such buckets
hold fewer gradients at once. Tried where no policy bounds runs."""

_AT_FLOOR = 1.015
"""A step within so many times what no plan can be shorter than is not worth other caps."""
_NEAR_BOUND = 1.02
"""A step within so many times its own bound is not worth caps between the rungs."""

_SMALL = 2000
"""Members are moved between buckets in graphs of so many nodes at most;"""
_MOVED_NODES = 40_000
"""the plans that are made so have no more than so many nodes together."""
_WORTH = 0.998
"""A step must be shorter than so much of the best one so far,"""
_WORTH_MOVES = 0.999
"""or than so much where members are moved: most moves make one bucket more."""
_MIB = 2**20

_Cap: TypeAlias = float | tuple[float, ...]
_Name: TypeAlias = tuple[tuple[tuple[str, str], _Cap], ...] | str
"""Of a plan that is tried: its caps by process group and kind, or the planner's ``repr``."""
_Buckets: TypeAlias = tuple[tuple[fx.Node, ...], ...]


class Searched(NamedTuple):
    """What :meth:`BySearch.search` chose.

    Args:
        sort: :attr:`.Scheduled.sort` of the best order that was found for the plan.
    """

    plan: MergePlan
    report: CapsReport
    sort: Options | None


@dataclass(frozen=True)
class BySearch:
    """The plan that makes the fastest step within the policies' bounds.

    Args:
        policies: as of :func:`.schedule`.
        by_cap: what is bucketed. Its caps and its bound on runs are searched for.
        caps_mb: what to try, ascending, in MiB; None tries :data:`CAPS_MB`, larger ones where the
            largest is the best, ones between, and in small graphs buckets of other sizes. Where
            all miss a bound, smaller ones are tried. Caps that can't make a faster step than others
            are passed over.
        machine: what the cost model times nodes for.
        reference_bytes: see :func:`.schedule`; None: the peak of the graph.
        accumulate: for reductions that become all-to-alls and sums in the order of the ranks after
            merging (:mod:`.bucketing.all_to_all`), the dtype of these; None: they stay.
        planners: others whose plans are tried, too.

    Raises:
        TypeError: something in ``policies`` is no policy.
        ValueError: two policies of one class; ``caps_mb`` is empty, or holds something else than
            positive numbers.
    """

    policies: tuple[Policy, ...]
    by_cap: ByCap = ByCap()  # noqa: RUF009
    _: KW_ONLY
    caps_mb: Collection[float] | None = None
    machine: Machine = H100
    reference_bytes: int | None = None
    accumulate: torch.dtype | None = None
    planners: tuple[BucketPlanner, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "policies", policies_of(self.policies))
        if self.caps_mb is not None and not self.caps_mb:
            raise ValueError("caps_mb is empty: give at least one cap in MiB")
        for cap in self.caps_mb or ():
            check_cap(cap, "each of caps_mb")

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """See :meth:`search`."""
        return self.search(analysis).plan

    @paused_gc()
    def search(self, analysis: GraphAnalysis) -> Searched:
        """Choose a plan for a graph, which is only read. Where an estimate fails, the plan has
        torch's own caps, with a ``BoundNotKeptWarning``.

        Raises:
            RuntimeError, ValueError: ``eligible`` or one of ``planners`` failed, or its plan can't
                be carried out.
        """
        clock = time.perf_counter()
        with reading_only(analysis.graph, eligible=self.by_cap.eligible):
            planner = CapPlanner(analysis, self.by_cap)
        others = {repr(other): planned(other, analysis) for other in self.planners}
        search = _Search(self, planner)
        try:
            largest = _LARGEST_MB if self.caps_mb is None else 0.0
            search.run([float(cap) for cap in self.caps_mb or CAPS_MB], largest, others)
        except Exception as error:
            plan = search.plan(None)  # raises anew what comes of a size without a hint
            text = (
                f"byte caps are torch's own, as an estimate failed: {type(error).__name__}: {error}"
            )
            warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
            none = TriedCaps((), 0.0, 0, 0, 0.0)
            return Searched(plan, CapsReport(none, (), time.perf_counter() - clock, text), None)
        tried = {name: _to_report(name, found.report) for name, found in search.tried.items()}
        report = CapsReport(
            tried[search.best()], tuple(tried.values()), time.perf_counter() - clock
        )
        return Searched(search.chosen.plan, report, search.chosen.sort)


def _to_report(name: _Name, report: ScheduleReport) -> TriedCaps:
    caps = () if isinstance(name, str) else name
    return TriedCaps(
        tuple((f"{group} {kind}", cap) for (group, kind), cap in caps),
        report.step_ms[1],
        report.peak_bytes[1],
        report.longest_run[1],
        report.misses,
        report.chosen,
        name if isinstance(name, str) else "",
    )


class _Tried(NamedTuple):
    """A plan that was scheduled, with buckets that leave runs of at most ``max_run``."""

    plan: MergePlan
    max_run: int | None
    report: ScheduleReport
    sort: Options | None

    @property
    def rank(self) -> tuple[float, ...]:
        """Of equals the one that could be shorter by its bound, or else the first one tried."""
        return rank(self.report.misses, self.report.step_ms[1], round(self.report.bound_ms, 9))


class _Search:
    """Caps that were tried, and what came of them."""

    def __init__(self, options: BySearch, planner: CapPlanner) -> None:
        self.tried: dict[_Name, _Tried] = {}
        self._planner = planner
        self._analysis = analysis = planner.analysis
        self._policies = options.policies
        runs = (policy.max_bucket_run() for policy in options.policies)
        self._max_run = min((run for run in runs if run is not None), default=None)
        self._costs = Costs(options.machine, analysis.hints)
        self._accumulate = options.accumulate
        self._groups = analysis.groups
        self._reference_bytes = options.reference_bytes
        self._replaced = {} if options.accumulate is None else analysis.gradient_sums
        self._plans: dict[tuple[str, int | None], MergePlan] = {}
        self._worth = _WORTH
        self._models: dict[_Buckets, Model] = {}
        self._known: dict[tuple[_Buckets, Options | None], Scheduled | None] = {}

    @property
    def chosen(self) -> _Tried:
        """The best so far."""
        return self.tried[self.best()]

    def best(self) -> _Name:
        """The name of the best so far."""
        return min(self.tried, key=lambda name: self.tried[name].rank)

    def _best_caps(self) -> dict[tuple[str, str], _Cap]:
        return dict(best) if not isinstance(best := self.best(), str) else {}

    def run(self, ladder: list[float], largest: float, others: Mapping[str, MergePlan]) -> None:
        """Try caps of ``ladder``, in MiB ascending, and others near the best, up to ``largest``,
        none but those of ``ladder`` where that is 0; then other plans.
        """
        for cap in self._best_first(ladder):
            self._try(cap, self._max_run)
        for cap in ladder if self.chosen.report.misses else ():
            self.attempt(cap)
        # A small model, or a hard bound.
        while self.chosen.report.misses and ladder[0] > _SMALLEST_MB:
            ladder.insert(0, ladder[0] / 4)
            self.attempt(ladder[0])
        # A large model, whose parameters are larger than all of these.
        while _top(self._best_caps()) == ladder[-1] < largest:
            ladder.append(min(4 * ladder[-1], largest))
            self.attempt(ladder[-1])
        for key in self._best_caps():
            if self._within(_AT_FLOOR, self._floor_ms):
                break
            caps: dict[tuple[str, str], Any] = self._best_caps()
            at = ladder.index(caps[key])
            for near in (at - 1, at + 1):
                if 0 <= near < len(ladder):
                    self.attempt({**caps, key: ladder[near]})
        if largest:
            self._try_between(ladder)
        if self._max_run is None and not self._within(_AT_FLOOR, self._floor_ms):
            best = self._best_caps()
            self._try(best or ladder[0], _SHORT_RUN)
            for cap in [cap for cap in ladder if cap > _top(best)][:1]:
                self._try(cap, _SHORT_RUN)
        small = len(self._analysis.nodes) <= _SMALL
        if largest and small and not self.chosen.report.misses:
            self._move_members()
        for name, plan in others.items():
            self._try_plan(plan, None, name)

    def _best_first(self, ladder: Iterable[float]) -> Iterator[float]:
        """The caps with which a step could be the shortest first, of equals the largest. A bound is
        only found out where the time of the busiest process group does not come later already."""
        left = [(round(self.busiest_ms(cap), 9), False, -cap) for cap in ladder]
        heapq.heapify(left)
        while left:
            _, known, cap = heapq.heappop(left)
            if known:
                yield -cap
            else:
                bound_ms = self._merged(self.plan(-cap, self._max_run)).paths.bound_ms
                heapq.heappush(left, (round(bound_ms, 9), True, cap))

    def _move_members(self) -> None:
        """Move members between the buckets of the best plan as long as the step becomes shorter, in
        orders of the sort that was the best; then try all orders of what came of it."""
        like, self._worth = self.chosen.sort, _WORTH_MOVES
        left = _MOVED_NODES // len(self._analysis.nodes)
        at = fruitless = 0  # places since the last move that helped
        while left > 0:
            moves = self._planner.moves(self.chosen.plan)
            if fruitless >= len(moves):
                break
            best = self.best()
            for caps in moves[at % len(moves)]:
                left -= 1
                self._try({**self._best_caps(), **caps}, None, like)
                if self.best() != best:
                    break
            fruitless = 0 if self.best() != best else fruitless + 1
            at += fruitless > 0
        self._worth = _WORTH
        self._try(self._best_caps(), self.chosen.max_run)

    def _try_between(self, ladder: list[float]) -> None:
        """Caps between the best and the next smaller or larger ones of ``ladder``: for all groups
        and kinds, and for each in turn."""
        rungs = sorted({*ladder, *(_between(*pair) for pair in itertools.pairwise(ladder))})
        for keys in [[*self._best_caps()], *([key] for key in self._best_caps())]:
            for step in (-1, 1):
                if self._within(_NEAR_BOUND, self.chosen.report.bound_ms):
                    return
                caps: dict[tuple[str, str], Any] = self._best_caps()
                for key in keys:
                    at = rungs.index(caps[key]) + step
                    caps[key] = rungs[at] if 0 <= at < len(rungs) else caps[key]
                if caps != self._best_caps():
                    self.attempt(caps)

    def _within(self, times: float, bound_ms: float) -> bool:
        """Whether the best step is within so many times a bound."""
        best = self.chosen.report
        return not best.misses and best.step_ms[1] <= times * bound_ms

    @cached_property
    def _floor_ms(self) -> float:
        """What a step takes at least, nearly, whatever is merged: with each member of a bucket
        taking its part of the largest bucket's time."""
        ms = list(self._model.ms)
        places = {node: i for i, node in enumerate(self._model.dependencies.nodes)}
        for bucket in self.plan(_LARGEST_MB).buckets:
            for member in bucket.members:
                nbytes = self._costs.collective_bytes(member)
                largest = max(nbytes, int(_LARGEST_MB * _MIB))
                part_ms = self._costs.collective(member, largest) * nbytes / largest
                i = places[member]
                ms[i] = min(ms[i], part_ms)
        return replace(self._model, ms=ms).paths.bound_ms

    def plan(self, caps: Any, max_run: int | None = None) -> MergePlan:
        """The plan for the graph itself, with buckets that leave no longer runs."""
        name = (repr(caps), max_run)
        if name not in self._plans:
            self._plans[name] = self._planner.plan(caps, max_run)
        return self._plans[name]

    def attempt(self, caps: dict[tuple[str, str], _Cap] | float) -> None:
        """Try caps with buckets that leave runs of the length that policies bound; while nothing
        keeps the policies' bounds, of any length, or short ones where no policy bounds it."""
        self._try(caps, self._max_run)
        if self.chosen.report.misses:
            self._try(caps, None if self._max_run is not None else _SHORT_RUN)

    def _try(
        self,
        caps: dict[tuple[str, str], _Cap] | float,
        max_run: int | None,
        like: Options | None = None,
    ) -> None:
        plan = self.plan(caps, max_run)
        name = tuple((k, caps if isinstance(caps, float) else caps[k]) for k in _keys(plan))
        self._try_plan(plan, max_run, name, like)

    def _try_plan(
        self, plan: MergePlan, max_run: int | None, name: _Name, like: Options | None = None
    ) -> None:
        if self._busiest_ms(plan) >= self._best_ms():
            return
        found = self._scheduled(plan, like)
        if found is None:
            return
        tried = _Tried(plan, max_run, found.report, found.sort)
        if name not in self.tried or tried.rank < self.tried[name].rank:
            self.tried[name] = tried

    def busiest_ms(self, caps: dict[tuple[str, str], _Cap] | float) -> float:
        """The time that the collectives of the busiest process group take: no step is faster."""
        return self._busiest_ms(self.plan(caps, self._max_run))

    def _busiest_ms(self, plan: MergePlan) -> float:
        busy = dict.fromkeys(self._groups.values(), 0.0)
        merged = {m for b in plan.buckets for m in b.members}
        alone = ((start,) for start in self._groups if start not in merged)
        for members in (*alone, *(b.members for b in plan.buckets)):
            busy[self._groups[members[0]]] += self._sent_ms(members)
        return max(busy.values(), default=0.0)

    def _sent_ms(self, members: Sequence[fx.Node]) -> float:
        """The time of the collectives that members make together."""
        if all(m in self._replaced for m in members):
            return sum(ms for _, ms in self._costs.in_rank_order(members))
        return self._costs.bucket(members)

    def _best_ms(self) -> float:
        """The longest that a step may be to take the place of the best so far."""
        best = self.chosen.report if self.tried else None
        return math.inf if best is None or best.misses else self._worth * best.step_ms[1]

    def _scheduled(self, plan: MergePlan, like: Options | None) -> Scheduled | None:
        """The schedule of a plan, in orders of the sort ``like``; None if it is known to be slower
        than the best so far."""
        buckets = tuple(b.members for b in plan.buckets)
        key = buckets, like
        if key not in self._known:
            self._known[key] = None
            best_ms, model = self._best_ms(), self._merged(plan)
            del self._models[buckets]
            if model.paths.bound_ms > best_ms:
                return None
            # All orders: by few of them, plans are ranked by how these few do under the bounds.
            found = schedule_model(
                model,
                self._policies,
                self._reference,
                at_most_ms=best_ms,
                final=False,
                like=like or (self.chosen.sort if self.tried else None),
                others=like is None,
            )
            if found.report.step_ms[1] <= best_ms:
                self._known[key] = found
        return self._known[key]

    @cached_property
    def _reference(self) -> int:
        given = self._reference_bytes
        return self._analysis.peak_bytes if given is None else given

    @cached_property
    def _model(self) -> Model:
        """The model of the graph before any merging."""
        return model_of(self._analysis, self._costs)

    def _merged(self, plan: MergePlan) -> Model:
        members = tuple(b.members for b in plan.buckets)
        if members not in self._models:
            self._models[members] = self._merge(plan)
        return self._models[members]

    def _merge(self, plan: MergePlan) -> Model:
        rank_order = self._accumulate is not None
        merged = merged_model(self._model, plan.buckets, self._costs, rank_order)
        if merged is not None:
            return merged
        # Members on both sides of a side effect: merging may move them past it, scheduling may not.
        copy, copied = _copied(self._analysis.graph, plan)
        merge_buckets(copy, copied)
        if self._accumulate is not None:
            reduce_by_all_to_all(copy, self._accumulate)
        external = self._analysis.external_live_bytes
        there = GraphAnalysis(copy, self._costs.hints, external_live_bytes=external)
        return model_of(there, self._costs)


def _between(cap: float, larger: float) -> float:
    """The geometric mean, in two digits."""
    return float(f"{math.sqrt(cap * larger):.2g}")


def _top(caps: Mapping[tuple[str, str], _Cap]) -> float:
    return max((cap for cap in caps.values() if isinstance(cap, float)), default=0.0)


def _keys(plan: MergePlan) -> Iterable[tuple[str, str]]:
    """Groups and kinds of which something could be merged."""
    merged = [(group_name(b.members[0]), b.kind) for b in plan.buckets]
    return dict.fromkeys([*merged, *((u.group, u.kind) for u in plan.unmerged)])


def _copied(graph: fx.Graph, plan: MergePlan) -> tuple[fx.Graph, MergePlan]:
    """A copy of the graph that shares its fake tensors, and the plan for it."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new[node] = copy.node_copy(node, new.__getitem__)
    buckets = tuple(replace(b, members=tuple(new[m] for m in b.members)) for b in plan.buckets)
    return copy, replace(plan, buckets=buckets)
