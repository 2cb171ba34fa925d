"""Scheduling as graph passes for :func:`.backend`.

With ``"aot_eager"`` a graph runs in its order, so reordering it is enough. With ``"inductor"`` the
backend pins the order afterwards (see :mod:`.passes.pin_order`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from ...bucketing.caps import ByCap, Eligible
from ...bucketing.groups import Groups, check_groups
from ...bucketing.merge import PayloadKey, check_payload_order, merge_and_report
from ...bucketing.plan import BucketPlanner
from ...graph.analysis import graph_of
from ...graph.collectives import Kind, check_kinds
from ...passes.all_to_all import ReduceByAllToAll
from ...passes.base import (
    Baseline,
    Buckets,
    Compilation,
    Fact,
    GraphLike,
    GraphPass,
    Order,
    RankOrder,
    Stage,
    Tags,
)
from ..cost.devices import job_machine
from ..cost.machine import Machine, check_machine
from ..schedule.memory import within
from ..schedule.policy import Policy, policies_of
from ..schedule.scheduler import schedule
from ..search.cap_search import BySearch, Searched


class Schedule(GraphPass):
    """Reorder each forward, backward and inference graph; see :func:`.schedule`.

    Comes after the passes that bucket. ``PeakMemory(ratio=...)`` refers to the graph as it was
    before any of them.

    Args:
        policies: what bounds and guides the order.
        machine: what the cost model times nodes for; None: :func:`.job_machine`.

    Raises:
        TypeError: something in ``policies`` is no policy, or ``machine`` is none.
        ValueError: two policies of one class.
    """

    stage: Stage = "forward_backward"
    needs: tuple[type[Fact], ...] = (Baseline,)

    def __init__(self, policies: Policy | Iterable[Policy], machine: Machine | None = None) -> None:
        self.policies = policies_of(policies)
        self.machine = job_machine() if machine is None else machine
        check_machine(self.machine)
        self.gives = (Order(self.policies, self.machine),)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        self._schedule(graph, compilation)

    def _schedule(
        self,
        graph: GraphLike,
        compilation: Compilation,
        searched: Searched | None = None,
    ) -> None:
        report = schedule(
            graph_of(graph),  # its code is made once, behind all passes
            self._bounded(compilation),
            machine=self.machine,
            reference_bytes=compilation.baseline.peak_bytes,
            size_hints=compilation.size_hints,
            external_live_bytes=compilation.baseline.external_live_bytes,
            like=searched and searched.sort,
        )
        compilation.report.schedules.append(replace(report, caps=searched and searched.report))

    def _bounded(self, compilation: Compilation) -> tuple[Policy, ...]:
        """The policies, and the bound that a pass before chose under."""
        if compilation.choice is None or compilation.choice.limit_bytes is None:
            return self.policies
        reference = compilation.baseline.peak_bytes or sys.maxsize
        return within(self.policies, compilation.choice.limit_bytes, reference)

    def arguments(self) -> dict[str, Any]:
        """Without the machine where it is that of the job."""
        found = super().arguments()
        return {**found, "machine": None} if self.machine == job_machine() else found

    def settings(self) -> tuple[Any, ...]:
        """Whatever was given, and the machine."""
        return (*super().settings(), self.machine)


class BucketAndSchedule(Schedule):
    """Bucket by size with the caps that make the fastest schedule, and schedule; see
    :class:`.BySearch`. Takes the place of ``BucketByCap`` and :class:`Schedule`.

    Args:
        policies: as of :class:`Schedule`.
        caps_mb: the caps to try, in MiB; see :class:`.BySearch`.
        kinds: what is bucketed.
        payload_order: as of ``BucketByCap``.
        machine: as of :class:`Schedule`.
        eligible: see :class:`.ByCap`.
        groups: see :class:`.ByCap`.
        planners: others whose plans are tried, too. What stays gathered
            (``ReshardAfterForward(keep="auto")``) is chosen with the buckets of the first one.
        reduce: a :class:`.ReduceByAllToAll`, which replaces the merged reductions before they are
            scheduled. The caps are chosen for what it makes of them.

    Raises:
        TypeError: as of :class:`Schedule`; ``payload_order`` is no callable; ``reduce`` is no such
            pass; ``groups`` is no list of names.
        ValueError: as of :class:`Schedule`; no cap, or one that is no positive number; or what an
            option may not be.
    """

    needs = (Tags, Baseline)
    undoes = (RankOrder, Order)

    def __init__(
        self,
        policies: Policy | Iterable[Policy],
        *,
        caps_mb: Collection[float] | None = None,
        kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
        eligible: Eligible = "tag",
        groups: Groups = None,
        planners: Iterable[BucketPlanner] = (),
        payload_order: PayloadKey | None = None,
        machine: Machine | None = None,
        reduce: ReduceByAllToAll | None = None,
    ) -> None:
        super().__init__(policies, machine)
        if reduce is not None and not isinstance(reduce, ReduceByAllToAll):
            raise TypeError(f"reduce must be a ReduceByAllToAll or None, got {reduce!r}")
        self.caps_mb = None if caps_mb is None else tuple(caps_mb)
        self.kinds = check_kinds(kinds)
        self.eligible = eligible
        self.groups = check_groups(groups)
        self.planners = tuple(planners)
        self.payload_order = check_payload_order(payload_order)
        self.reduce = reduce
        self.parts = () if reduce is None else (reduce,)
        self.gives = (
            Buckets(self.kinds, planner=next(iter(self.planners), None)),
            *(() if reduce is None else reduce.gives),
            *self.gives,
        )
        self._search = BySearch(
            self.policies,
            ByCap(kinds=kinds, eligible=eligible, groups=groups),
            caps_mb=self.caps_mb,
            machine=self.machine,
            planners=self.planners,
        )

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis, reduce = compilation.analysis(graph), self.reduce
        if reduce is not None and reduce.name in compilation.report.disabled:
            reduce = None
        found = replace(
            self._search,
            policies=self._bounded(compilation),
            reference_bytes=compilation.baseline.peak_bytes,
            accumulate=None if reduce is None else reduce.accumulate,
        ).search(analysis)
        report = merge_and_report(analysis, found.plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)
        if reduce is not None:
            reduce.run(graph, compilation)
        self._schedule(graph, compilation, found)
