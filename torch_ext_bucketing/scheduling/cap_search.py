"""Byte caps chosen by trying a handful of them on the cost model.

Large buckets make few collectives, which need little time on the wire; small ones start earlier,
hold less memory and leave less communication at the ends of a graph. Which is better depends on
the graph, so several caps are tried: each is planned, and the graph as it would be after merging is
scheduled on the cost model (:mod:`.merged_model`). First all process groups and kinds get the same
cap. Then the gathers and the reductions of each group in turn try the next smaller and the next
larger one.

Planning is cheap, scheduling is not. So the caps whose collectives need the least time come first,
and a plan is not scheduled if its collectives alone keep a process group busy for longer than the
best step so far, and its scheduling ends where the step is known to become longer.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch.fx as fx

from .._gc import paused_gc
from ..bucketing.caps import CapPlanner, check_cap
from ..bucketing.merge import merge_buckets
from ..bucketing.plan import BucketingPlan
from ..graph.collectives import Kind, group_name, is_collective
from ..graph.size_hints import GivenHints, SizeHints
from ..reports.caps import CapsReport, TriedCaps
from ..reports.schedule import ScheduleReport
from .cost import H100, Costs, Machine
from .merged_model import merged_model
from .model import Model, model_of, peak_bytes
from .policy import Policy, policies_of
from .scheduler import BoundNotKeptWarning, schedule_model

__all__ = [
    "CAPS_MB",
    "check_caps",
    "choose_caps",
]

CAPS_MB = (8.0, 25.0, 80.0, 500.0)
"""MiB. 25 is DDP's default bucket, 500 the ceiling of torch's own estimate."""

_SMALLEST_MB = 0.1
_LARGEST_MB = 2000.0
"""The bound of torch's overlap-preserving bucketer."""

_Caps: TypeAlias = tuple[tuple[tuple[str, str], float], ...]


def choose_caps(
    graph: fx.Graph,
    policies: Policy | Iterable[Policy],
    *,
    caps_mb: Sequence[float] | None = None,
    kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
    machine: Machine = H100,
    reference_bytes: int | None = None,
    size_hints: SizeHints | GivenHints = None,
    beside_bytes: int = 0,
    **options: Any,
) -> tuple[BucketingPlan, CapsReport]:
    """The plan with the caps that give the fastest step within the policies' bounds. The graph is
    only read.

    Args:
        graph: as of :func:`.plan_by_cap`.
        policies: as of :func:`.schedule`.
        caps_mb: what to try, ascending, in MiB; None tries :data:`CAPS_MB`, and larger ones where
            the largest is the best. Where all miss a bound, smaller ones are tried. Caps that can't
            make a faster step than others are passed over.
        kinds: what is bucketed.
        machine: what the cost model times nodes for.
        reference_bytes: see :func:`.schedule`; None: the peak of ``graph``.
        size_hints: as of :func:`.backend`.
        beside_bytes: see :func:`.schedule`.
        options: of :func:`.plan_by_cap`: ``eligible``, ``group_filter``, ``max_node_span``.

    Returns:
        The plan for ``graph``, and what was tried. Where an estimate fails, the plan has torch's
        own caps, with a ``BoundNotKeptWarning``.

    Raises:
        ValueError: ``caps_mb`` is empty, or holds something else than positive numbers.
        Exception: what :func:`.plan_by_cap` raises.
    """
    clock = time.perf_counter()
    largest = _LARGEST_MB if caps_mb is None else 0.0
    caps_mb = CAPS_MB if caps_mb is None else caps_mb
    check_caps(caps_mb)
    policies = policies_of(policies)
    hints = SizeHints.of(size_hints)
    costs = Costs(machine, hints)
    search = _Search(graph, policies, costs, reference_bytes or 0, kinds, options, beside_bytes)
    try:
        if reference_bytes is None:
            search.reference_bytes = peak_bytes(graph, size_hints=hints, beside_bytes=beside_bytes)
        plan = search.run([float(c) for c in caps_mb], largest)
    except Exception as error:
        plan = search.plan(None)  # raises anew what comes of the caller's options
        text = f"byte caps are torch's own, as an estimate failed: {type(error).__name__}: {error}"
        warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
        none = TriedCaps((), 0.0, 0, 0, 0.0)
        return plan, CapsReport(none, (), time.perf_counter() - clock, text)
    tried = {caps: _tried(caps, report) for caps, report in search.tried.items()}
    chosen = search.best()
    report = CapsReport(tried[chosen], tuple(tried.values()), time.perf_counter() - clock)
    return plan, report


def check_caps(caps_mb: Collection[float]) -> None:
    """Raise a ValueError unless there are caps, all positive numbers."""
    if not caps_mb:
        raise ValueError("caps_mb is empty: give at least one cap in MiB")
    for cap in caps_mb:
        check_cap(cap, "each of caps_mb")


def _tried(caps: _Caps, report: ScheduleReport) -> TriedCaps:
    named = tuple((f"{group} {kind}", cap) for (group, kind), cap in caps)
    return TriedCaps(
        named, report.step_ms[1], report.peak_bytes[1], report.longest_run[1], report.misses
    )


class _Search:
    """Caps that were tried, and what came of them."""

    def __init__(
        self,
        graph: fx.Graph,
        policies: tuple[Policy, ...],
        costs: Costs,
        reference_bytes: int,
        kinds: Collection[Kind],
        options: dict[str, Any],
        beside_bytes: int = 0,
    ) -> None:
        self.tried: dict[_Caps, ScheduleReport] = {}
        self.bounds: dict[_Caps, Mapping[str, int]] = {}  # that their buckets keep
        self._graph = graph
        self._policies = policies
        self._max_node_span = options.pop("max_node_span", None)
        self._bounds: dict[str, int] = {}
        for policy in policies:
            for name, bound in policy.bucket_bounds().items():
                self._bounds[name] = min(bound, self._bounds.get(name, bound))
        if self._max_node_span is not None and "max_node_span" in self._bounds:
            self._bounds["max_node_span"] = min(self._max_node_span, self._bounds["max_node_span"])
        self._costs = costs
        self._model: Model | None = None
        self._groups = {n: group_name(n) for n in graph.nodes if is_collective(n)}
        self.reference_bytes = reference_bytes
        self._beside_bytes = beside_bytes
        self._planner = CapPlanner(graph, kinds=kinds, **options)
        self._plans: dict[str, BucketingPlan] = {}
        self._known: dict[tuple[Any, ...], ScheduleReport | None] = {}

    def run(self, ladder: list[float], largest: float) -> BucketingPlan:
        """Try caps of ``ladder``, in MiB ascending, and others near the best, up to ``largest``.

        Returns:
            The plan with the best.
        """
        for cap in sorted(ladder, key=self.busiest_ms):
            self.attempt(cap)
        # A small model, or a hard bound.
        while self.tried[self.best()].misses and ladder[0] > _SMALLEST_MB:
            ladder.insert(0, ladder[0] / 4)
            self.attempt(ladder[0])
        # A large model, whose parameters are larger than all of these.
        while _top(self.best()) == ladder[-1] < largest:
            ladder.append(min(4 * ladder[-1], largest))
            self.attempt(ladder[-1])
        for key, _ in self.best():
            caps = dict(self.best())
            at = ladder.index(caps[key])
            for near in (at - 1, at + 1):
                if 0 <= near < len(ladder):
                    self.attempt({**caps, key: ladder[near]})
        chosen = self.best()
        return self.plan(dict(chosen) or ladder[0], self.bounds[chosen])

    def plan(self, caps: Any, bounds: Mapping[str, int] | None = None) -> BucketingPlan:
        """The plan for the graph itself, with buckets that keep ``bounds``."""
        options: dict[str, Any] = {"max_node_span": self._max_node_span, **(bounds or {})}
        name = repr((caps, options))
        if name not in self._plans:
            self._plans[name] = self._planner.plan(caps, **options)
        return self._plans[name]

    def attempt(self, caps: dict[tuple[str, str], float] | float) -> None:
        """Try caps: where a policy has bounds for buckets, with buckets that keep them, and
        without only while nothing keeps the policies' bounds."""
        plan = self.plan(caps, self._bounds)
        name = tuple((k, caps if isinstance(caps, float) else caps[k]) for k in _keys(plan))
        if name in self.tried or self._too_slow(plan):
            return
        outcome = self._outcome(plan)
        if outcome is None:
            return
        self.tried[name], self.bounds[name] = outcome, self._bounds
        if self.tried[self.best()].misses and self._bounds:
            free = self._outcome(self.plan(caps))
            if free is not None and _rank(free) < _rank(self.tried[name]):
                self.tried[name], self.bounds[name] = free, {}

    def busiest_ms(self, caps: dict[tuple[str, str], float] | float) -> float:
        """The time that the collectives of the busiest process group take: no step is faster."""
        return self._busiest_ms(self.plan(caps, self._bounds))

    def _busiest_ms(self, plan: BucketingPlan) -> float:
        busy = dict.fromkeys(self._groups.values(), 0.0)
        merged = {m for b in plan.buckets for m in b.members}
        for start, group in self._groups.items():
            if start not in merged:
                busy[group] += self._costs(start)
        for bucket in plan.buckets:
            first = bucket.members[0]
            nbytes = sum(map(self._costs.collective_bytes, bucket.members))
            busy[self._groups[first]] += self._costs.collective(first, nbytes)
        return max(busy.values(), default=0.0)

    def _too_slow(self, plan: BucketingPlan) -> bool:
        return self._busiest_ms(plan) >= self._best_ms()

    def _best_ms(self) -> float:
        """The shortest step so far that keeps all bounds."""
        best = self.tried[self.best()] if self.tried else None
        return math.inf if best is None or best.misses else best.step_ms[1]

    def _outcome(self, plan: BucketingPlan) -> ScheduleReport | None:
        """What comes of a plan; None if that is known to be slower than the best so far."""
        members = tuple(b.members for b in plan.buckets)
        if members not in self._known:
            best_ms = self._best_ms()
            with paused_gc():  # for one model at a time: a copy of the graph holds cycles
                model = self._merged(plan)
                found: ScheduleReport | None
                found, _ = schedule_model(
                    model, self._policies, self.reference_bytes, quick=True, at_most_ms=best_ms
                )
            slower = found.step_ms[1] > best_ms
            self._known[members] = None if slower else found
        return self._known[members]

    def _merged(self, plan: BucketingPlan) -> Model:
        if self._model is None:
            self._model = model_of(self._graph, self._costs, beside_bytes=self._beside_bytes)
        merged = merged_model(self._model, plan.buckets, self._costs)
        if merged is not None:
            return merged
        # Members on both sides of a side effect: merging may move them past it, scheduling may not.
        copy, copied = _copied(self._graph, plan)
        merge_buckets(copy, copied)
        return model_of(copy, self._costs, beside_bytes=self._beside_bytes)

    def best(self) -> _Caps:
        return min(self.tried, key=lambda k: _rank(self.tried[k]))


def _top(caps: _Caps) -> float:
    return max((cap for _, cap in caps), default=0.0)


def _rank(report: ScheduleReport) -> tuple[float, float]:
    return report.misses, report.step_ms[1]


def _keys(plan: BucketingPlan) -> Iterable[tuple[str, str]]:
    """Groups and kinds of which something could be merged."""
    merged = [(group_name(b.members[0]), b.kind) for b in plan.buckets]
    return dict.fromkeys([*merged, *((u.group, u.kind) for u in plan.unmerged)])


def _copied(graph: fx.Graph, plan: BucketingPlan) -> tuple[fx.Graph, BucketingPlan]:
    """A copy of the graph that shares its fake tensors, and the plan for it."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new[node] = copy.node_copy(node, new.__getitem__)
    buckets = tuple(replace(b, members=tuple(new[m] for m in b.members)) for b in plan.buckets)
    return copy, replace(plan, buckets=buckets)
