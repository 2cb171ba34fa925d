"""Search for the byte caps of the fastest schedule.

Large buckets make fewer collectives, which take less time on the wire. Small buckets start earlier,
hold less memory and expose less communication at the ends of a graph. The better size depends on
the graph, so the search plans several caps, and schedules the model of each merged graph
(:mod:`.merged_model`). It tries

1. the same cap for all process groups and kinds;
2. for each group and kind in turn, the next smaller and the next larger cap, and caps between these
   if the step is far from its lower bound;
3. with the best caps and the next larger ones, buckets of reduce-scatters that are closed where
   compute runs would become long;
4. the plans of users' planners.

An estimate may be wrong, so the best plan by one machine is not always the one to choose. Plans
within 2.5% of the best are timed, in the orders that they got, with collectives that are faster and
slower than the machine's. Each loses something to the best of them. The choice has the smallest of
the largest losses; of those within 1%, the fewest collectives.

Scheduling takes most of the time, so bounds prune the search: plans come in the order of their
lower bounds; a plan is skipped if its bound exceeds the best step; an order is abandoned once it
must exceed it. The sort of order that was the best so far comes first. A plan with fewer
collectives may be longer, within the 2.5%.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.fx as fx

from .._torch import paused_gc
from ..bucketing.contraction import BucketPlanner, MergePlan, checked_plan, reading_only
from ..bucketing.pack import merge_buckets
from ..bucketing.plan import ByCap, CapPlanner
from ..errors import BoundNotKeptWarning, check_positive
from ..graph.analysis import GraphAnalysis
from ..graph.nodes import group_name
from ..passes.bucketing import reduce_by_all_to_all
from ..reports.planner import CapsReport, ScheduleReport, TriedCaps
from .cost.cost import Costs
from .cost.machine import H100, Machine
from .schedule.merged_model import merged_model
from .schedule.model import Model, model_of
from .schedule.orders import FAR_ABOVE, FASTER, SLOWER, WORTH, rank, schedule_within
from .schedule.policy import Bounds, Options, Policy, policies_of
from .schedule.timeline import Timeline, step_ms

CAPS_MB = (8.0, 25.0, 80.0, 500.0)
"""Caps to try, in MiB. 25 is DDP's default bucket, 500 the ceiling of torch's own estimate."""

_SMALLEST_MB = 0.1
_LARGEST_MB = 2000.0  # the limit of torch's overlap-preserving bucketer

# Compute nodes that a bucket of reduce-scatters may wait for after the previous one, if no policy
# bounds runs: such buckets hold fewer gradients at once.
_SHORT_RUN = 8

_AT_FLOOR = 1.015  # no other caps once step / bound of any plan is at most this
_NEAR_BOUND = 1.02  # no caps between the rungs once step / the plan's own bound is at most this
_NEAR = 1.025  # a plan that takes at most this times the best step may be chosen
_EQUAL = 0.01  # largest losses are equal within this part of a step

_SMALL_GRAPH = 2000  # nodes; larger graphs try one sort for caps between rungs
_MIB = 2**20

_Name: TypeAlias = tuple[tuple[tuple[str, str], float], ...] | str
"""Name of a plan: its caps by process group and kind, or the planner's ``repr``."""
_Buckets: TypeAlias = tuple[tuple[fx.Node, ...], ...]


class Searched(NamedTuple):
    """The choice of :meth:`BySearch.search`, with :attr:`.Scheduled.sort` of its best order."""

    plan: MergePlan
    report: CapsReport
    sort: Options | None


@dataclass(frozen=True)
class BySearch:
    """Plan the buckets whose schedule is the fastest within the policies' bounds.

    Args:
        policies: see :func:`.schedule`; so is ``machine``.
        by_cap: options of the plans; its caps and ``max_compute_run`` are searched for.
        caps_mb: caps to try in MiB, ascending, and smaller ones if all miss a bound. None tries
            :data:`CAPS_MB`, larger caps if the largest is the best, and caps between.
        reference_bytes: see :func:`.schedule`; None: the peak of the graph.
        accumulate: dtype of the sums if reductions become all-to-alls after merging
            (:mod:`.passes.bucketing`); None: they do not.
        planners: further planners to try.
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
            check_positive("each of caps_mb", cap, "number of MiB")

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Return the plan of :meth:`search`."""
        return self.search(analysis).plan

    @paused_gc()
    def search(self, analysis: GraphAnalysis) -> Searched:
        """Choose a plan. If an estimate fails, warn (``BoundNotKeptWarning``) and use torch's caps.

        Errors of ``eligible`` and of planners are raised; see :func:`.checked_plan`.
        """
        clock = time.perf_counter()
        with reading_only(analysis.graph, eligible=self.by_cap.eligible):
            planner = CapPlanner(analysis, self.by_cap)
        others = {repr(other): checked_plan(other, analysis) for other in self.planners}
        search = _Search(self, planner)
        try:
            largest = _LARGEST_MB if self.caps_mb is None else 0.0
            search.run([float(cap) for cap in self.caps_mb or CAPS_MB], largest, others)
        except Exception as error:
            plan = search.plan(None)  # raises again if a size has no hint
            text = (
                f"byte caps are torch's own, as an estimate failed: {type(error).__name__}: {error}"
            )
            warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
            none = TriedCaps((), 0.0, 0, 0, 0.0)
            return Searched(plan, CapsReport(none, (), time.perf_counter() - clock, text), None)
        tried = {name: _to_report(name, plan_of.report) for name, plan_of in search.tried.items()}
        name = search.choice()
        report = CapsReport(tried[name], tuple(tried.values()), time.perf_counter() - clock)
        chosen = search.tried[name]
        return Searched(search.explained(chosen.plan), report, chosen.sort)


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


class _Above(NamedTuple):
    """The distance of a plan's peaks above the bound on memory, relative to the bound.

    ``far`` is that of the merged graph's order, if more than :data:`.FAR_ABOVE` and than in the
    unmerged graph's, else 0; ``least`` is a lower bound for any order.
    """

    far: float
    least: float


class _Tried(NamedTuple):
    """A scheduled plan.

    ``steps_ms`` are those of its order with the machine's collectives, faster and slower ones.
    """

    plan: MergePlan
    report: ScheduleReport
    sort: Options | None
    steps_ms: tuple[float, ...]

    @property
    def rank(self) -> tuple[float, ...]:
        """Prefer, of equals, the plan with the smaller lower bound, then the first one tried."""
        return rank(self.report.misses, self.report.step_ms[1], round(self.report.bound_ms, 9))

    @property
    def merged(self) -> int:
        """The number of collectives that merging saves."""
        return _merged_by(self.plan)


class _Search:
    """One search: the plans tried so far, and the next ones to try."""

    def __init__(self, options: BySearch, planner: CapPlanner) -> None:
        self.tried: dict[_Name, _Tried] = {}
        self._planner = planner
        self._analysis = analysis = planner.analysis
        self._options = options
        runs = (policy.max_bucket_run() for policy in options.policies)
        self._max_run = min((run for run in runs if run is not None), default=None)
        self._other_run = _SHORT_RUN if self._max_run is None else None
        self._costs = Costs(options.machine, analysis.hints)
        self._plans: dict[tuple[str, int | None], MergePlan] = {}
        self._large = len(analysis.nodes) > _SMALL_GRAPH
        self._models: dict[_Buckets, Model] = {}
        self._peaks: dict[_Buckets, _Above] = {}
        self._known: dict[tuple[_Buckets, Options | None], _Tried | None] = {}

    @property
    def chosen(self) -> _Tried:
        """The best plan so far."""
        return self.tried[self.best()]

    def best(self) -> _Name:
        """Return the name of the best plan so far."""
        return min(self.tried, key=lambda name: self.tried[name].rank)

    def choice(self) -> _Name:
        """Return the name of the plan to choose: near the best one on all plausible machines."""
        best = self.chosen
        near = {
            name: each
            for name, each in self.tried.items()
            if each is best
            or (
                round(each.report.misses - best.report.misses, 9) <= 0
                and each.report.step_ms[1] <= _NEAR * best.report.step_ms[1]
            )
        }
        machines = zip(*(each.steps_ms for each in near.values()), strict=True)
        lost = [[ms / min(steps) if ms else 1.0 for ms in steps] for steps in machines]
        losses = dict(zip(near, map(max, zip(*lost, strict=True)), strict=True))
        equal = min(losses.values()) + _EQUAL
        return min(
            (name for name in near if losses[name] <= equal),
            key=lambda name: (-near[name].merged, near[name].rank),
        )

    def _best_caps(self) -> dict[tuple[str, str], float]:
        return dict(best) if not isinstance(best := self.best(), str) else {}

    def run(self, ladder: list[float], largest: float, others: Mapping[str, MergePlan]) -> None:
        """Try caps in MiB, ascending, larger ones up to ``largest``, then the plans ``others``."""
        # The model is small, or the bound is tight: peaks are far above it whatever the runs.
        runs = (self._max_run, self._other_run)
        while ladder[0] > _SMALLEST_MB and all(
            self._above(self.plan(ladder[0], run)).far for run in runs
        ):
            ladder.insert(0, ladder[0] / 4)
        for cap in sorted(ladder, key=self._promise):
            self._try(cap, self._max_run)
        for cap in ladder if self._may_miss_less() else ():
            self.attempt(cap)
        while self._may_miss_less() and ladder[0] > _SMALLEST_MB:
            ladder.insert(0, ladder[0] / 4)
            self.attempt(ladder[0])
        # The model is large: its parameters may exceed all caps so far.
        while _top(self._best_caps()) == ladder[-1] < largest:
            ladder.append(min(4 * ladder[-1], largest))
            self.attempt(ladder[-1])
        for key in self._best_caps():
            if self._within(_AT_FLOOR, self._floor_ms):
                break
            caps = self._best_caps()
            rung = ladder.index(caps[key])
            for near in (rung - 1, rung + 1):
                if 0 <= near < len(ladder):
                    self.attempt({**caps, key: ladder[near]})
        if largest:
            self._try_between(ladder)
        if self._max_run is None and not self._within(_AT_FLOOR, self._floor_ms):
            best = self._best_caps()
            self._try(best or ladder[0], _SHORT_RUN)
            for cap in [cap for cap in ladder if cap > _top(best)][:1]:
                self._try(cap, _SHORT_RUN)
        for name, plan in others.items():
            self._try_plan(plan, name)

    def _promise(self, cap: float) -> tuple[float, ...]:
        """Rank caps by the lower bound of their steps, of equals the largest first.

        Caps whose orders are far above a bound come last, the nearest one first.
        """
        plan = self.plan(cap, self._max_run)
        return self._above(plan).far, round(self._merged(plan).paths.bound_ms, 9), -cap

    def _try_between(self, ladder: list[float]) -> None:
        """Try caps between the best ones and their neighbours in ``ladder``."""
        # First for all groups and kinds together, then for each in turn.
        between = (math.sqrt(low * high) for low, high in itertools.pairwise(ladder))
        rungs = sorted({*ladder, *(float(f"{cap:.2g}") for cap in between)})
        for keys in [[*self._best_caps()], *([key] for key in self._best_caps())]:
            for step in (-1, 1):
                if self._within(_NEAR_BOUND, self.chosen.report.bound_ms):
                    return
                caps = self._best_caps()
                for key in keys:
                    rung = rungs.index(caps[key]) + step
                    caps[key] = rungs[rung] if 0 <= rung < len(rungs) else caps[key]
                if caps != self._best_caps():
                    # The best sort changes between two rungs, but little depends on it there.
                    sort_is_known = self._large and not self._may_miss_less()
                    self.attempt(caps, self.chosen.sort if sort_is_known else None)

    def _within(self, times: float, bound_ms: float) -> bool:
        """Return whether the best step keeps the bounds and takes at most ``times * bound_ms``."""
        return not self._may_miss_less() and self.chosen.report.step_ms[1] <= times * bound_ms

    @cached_property
    def _floor_ms(self) -> float:
        """Approximate lower bound of a step with any buckets."""
        # Each member takes its share of the time of the largest bucket.
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
        """Plan with these caps and ``max_compute_run``, once."""
        name = (repr(caps), max_run)
        if name not in self._plans:
            self._plans[name] = self._planner.plan(caps, max_run)
        return self._plans[name]

    def explained(self, plan: MergePlan) -> MergePlan:
        """Return ``plan``, where the cap of a collective is one that this search chose."""
        if all(_merged_by(other) <= _merged_by(plan) for other in self._plans.values()):
            return plan
        unmerged = tuple(
            replace(u, closed_by="search") if u.closed_by == "bytes" else u for u in plan.unmerged
        )
        return replace(plan, unmerged=unmerged)

    def attempt(
        self, caps: dict[tuple[str, str], float] | float, like: Options | None = None
    ) -> None:
        """Try caps with the policies' bound on compute runs, and another one if that helps."""
        # The other bound is none, or a short run if no policy bounds runs.
        self._try(caps, self._max_run, like)
        if self._may_miss_less():
            self._try(caps, self._other_run)

    def _try(
        self,
        caps: dict[tuple[str, str], float] | float,
        max_run: int | None,
        like: Options | None = None,
    ) -> None:
        """Plan with these caps and keep the schedule, if that is the best one of its name."""
        plan = self.plan(caps, max_run)
        merged = [(group_name(b.members[0]), b.kind) for b in plan.buckets]
        keys = dict.fromkeys([*merged, *((u.group, u.kind) for u in plan.unmerged)])
        name = tuple((k, caps if isinstance(caps, float) else caps[k]) for k in keys)
        self._try_plan(plan, name, like)

    def _try_plan(self, plan: MergePlan, name: _Name, like: Options | None = None) -> None:
        """Schedule a plan and keep it, if it is the best one of its name."""
        tried = self._scheduled(plan, like)
        if tried is None:
            return
        if name not in self.tried or tried.rank < self.tried[name].rank:
            self.tried[name] = tried

    def _may_miss_less(self) -> bool:
        """Return whether the best step misses a bound that another plan may keep or miss less."""
        report = self.chosen.report
        if round(report.misses - report.least_misses, 9) > 0:
            return True
        return report.misses > 0 and report.peak_bytes[1] > self._unmerged_bytes

    @cached_property
    def _unmerged_bytes(self) -> int:
        return Timeline.of(self._model).peak_bytes

    def _useful_ms(self, plan: MergePlan) -> float:
        """Return the longest step of a plan that may be chosen."""
        if not self.tried or self._may_miss_less():
            return math.inf
        fewer = _merged_by(plan) > self.tried[self.choice()].merged
        return (_NEAR if fewer else WORTH) * self.chosen.report.step_ms[1]

    def _scheduled(self, plan: MergePlan, like: Options | None) -> _Tried | None:
        """Schedule a plan in orders of the sort ``like``; None if the best step is shorter."""
        buckets = tuple(b.members for b in plan.buckets)
        key = buckets, like
        if key not in self._known:
            self._known[key] = None
            useful_ms, model = self._useful_ms(plan), self._merged(plan)
            most = self.chosen.report.misses if self.tried else math.inf
            if round(self._above(plan).least - most, 9) > 0 or model.paths.bound_ms > useful_ms:
                return None
            del self._models[buckets]
            # The best plan misses a bound, and none is known to miss it less.
            least = self.tried and self.chosen.report.misses and not self._may_miss_less()
            # Try all orders: a few would rank plans by how well these few keep the bounds.
            scheduled = schedule_within(
                useful_ms,
                model,
                self._options.policies,
                self._reference,
                final=False,
                like=like or (self.chosen.sort if self.tried else None),
                near=like is None,
                at_most_misses=most,
                least_bytes=self.chosen.report.peak_bytes[1] if least else 0,
            )
            if scheduled is not None:
                report, order, sort = scheduled
                others = (
                    step_ms(model.with_collectives(times), order) for times in (FASTER, SLOWER)
                )
                self._known[key] = _Tried(plan, report, sort, (report.step_ms[1], *others))
        known = self._known[key]
        return known and known._replace(plan=plan)

    def _above(self, plan: MergePlan) -> _Above:
        """Compare a plan's peaks with the bound, before it is scheduled."""
        buckets = tuple(b.members for b in plan.buckets)
        if buckets not in self._peaks:
            bounds = Bounds(self._merged(plan), self._options.policies, self._reference)
            nbytes = bounds.case.given.peak_bytes
            above = bounds.above(nbytes)
            far = above > FAR_ABOVE and nbytes > self._unmerged_bytes
            self._peaks[buckets] = _Above(round(above, 9) if far else 0.0, bounds.least_above)
        return self._peaks[buckets]

    @cached_property
    def _reference(self) -> int:
        nbytes = self._options.reference_bytes
        return self._analysis.peak_bytes if nbytes is None else nbytes

    @cached_property
    def _model(self) -> Model:
        """Model of the graph before merging, without nodes that run nothing, which are most."""
        return model_of(self._analysis, self._costs).compact

    def _merged(self, plan: MergePlan) -> Model:
        members = tuple(b.members for b in plan.buckets)
        if members not in self._models:
            self._models[members] = self._merge(plan)
        return self._models[members]

    def _merge(self, plan: MergePlan) -> Model:
        """Return the model of the graph with a plan merged."""
        accumulate = self._options.accumulate
        merged = merged_model(self._model, plan.buckets, self._costs, accumulate is not None)
        if merged is not None:
            return merged
        # Members stand on both sides of a side effect. Merging may move them past it, which a model
        # does not allow: merge a copy of the graph.
        copy, copied = _copied(self._analysis.graph, plan)
        merge_buckets(GraphAnalysis(copy), copied)
        if accumulate is not None:
            reduce_by_all_to_all(copy, accumulate)
        external, fuses = self._analysis.external_live_bytes, self._analysis.fuses
        merged_graph = GraphAnalysis(
            copy, self._costs.hints, external_live_bytes=external, fuses=fuses
        )
        return model_of(merged_graph, self._costs)


def _merged_by(plan: MergePlan) -> int:
    """Count the collectives that a plan saves."""
    return sum(len(bucket.members) - 1 for bucket in plan.buckets)


def _top(caps: Mapping[tuple[str, str], float]) -> float:
    return max(caps.values(), default=0.0)


def _copied(graph: fx.Graph, plan: MergePlan) -> tuple[fx.Graph, MergePlan]:
    """Copy a graph, sharing fake tensors, and translate the plan to the copy."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new[node] = copy.node_copy(node, new.__getitem__)
    buckets = tuple(replace(b, members=tuple(new[m] for m in b.members)) for b in plan.buckets)
    return copy, replace(plan, buckets=buckets)
