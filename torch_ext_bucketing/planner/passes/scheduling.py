"""Scheduling as graph passes for :func:`.backend`.

With ``"aot_eager"`` a graph runs in its order, so reordering it is enough. With ``"inductor"`` the
backend pins the order afterwards (see :mod:`.passes.pin_order`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from ...bucketing.caps import CapPlanner, Eligible, check_options
from ...bucketing.groups import GroupFilter
from ...bucketing.merge import PayloadKey, check_payload_order, merge_and_report
from ...graph.analysis import graph_of
from ...graph.collectives import Kind, check_kinds
from ...graph.snapshot import reading_only
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
from ...reports.caps import CapsReport
from ..cost.devices import job_machine
from ..cost.machine import Machine, check_machine
from ..schedule.memory import within
from ..schedule.policy import Policy, policies_of
from ..schedule.scheduler import schedule
from ..search.cap_search import check_caps, choose_caps


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
        caps: CapsReport | None = None,
    ) -> None:
        report = schedule(
            graph_of(graph),  # its code is made once, behind all passes
            self._bounded(compilation),
            machine=self.machine,
            reference_bytes=compilation.baseline.peak_bytes,
            size_hints=compilation.size_hints,
            external_live_bytes=compilation.baseline.external_live_bytes,
            like="" if caps is None else caps.chosen.order,
        )
        compilation.report.schedules.append(replace(report, caps=caps))

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
    :func:`.choose_caps`. Takes the place of ``BucketByCap`` and :class:`Schedule`.

    Args:
        policies: as of :class:`Schedule`.
        caps_mb: the caps to try, in MiB; see :func:`.choose_caps`.
        kinds: what is bucketed.
        payload_order: as of ``BucketByCap``.
        machine: as of :class:`Schedule`.
        eligible: see :func:`.plan_by_cap`.
        group_filter: see :func:`.plan_by_cap`.
        reduce: a :class:`.ReduceByAllToAll`, which replaces the merged reductions before they are
            scheduled. The caps are chosen for what it makes of them.

    Raises:
        TypeError: as of :class:`Schedule`; ``payload_order`` is no callable; ``reduce`` is no such
            pass.
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
        group_filter: GroupFilter | None = None,
        payload_order: PayloadKey | None = None,
        machine: Machine | None = None,
        reduce: ReduceByAllToAll | None = None,
    ) -> None:
        super().__init__(policies, machine)
        if reduce is not None and not isinstance(reduce, ReduceByAllToAll):
            raise TypeError(f"reduce must be a ReduceByAllToAll or None, got {reduce!r}")
        check_options(kinds=kinds, eligible=eligible, group_filter=group_filter)
        self.caps_mb = None if caps_mb is None else tuple(caps_mb)
        if self.caps_mb is not None:
            check_caps(self.caps_mb)
        self.kinds = check_kinds(kinds)
        self.eligible = eligible
        self.group_filter = group_filter
        self.payload_order = check_payload_order(payload_order)
        self.reduce = reduce
        self.parts = () if reduce is None else (reduce,)
        self.gives = (
            Buckets(self.kinds),
            *(() if reduce is None else reduce.gives),
            *self.gives,
        )

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis, reduce = compilation.analysis(graph), self.reduce
        if reduce is not None and reduce.name in compilation.report.disabled:
            reduce = None
        hooks: dict[str, Any] = {"eligible": self.eligible, "group_filter": self.group_filter}
        with reading_only(analysis.graph, **hooks):
            planner = CapPlanner(analysis, kinds=self.kinds, **hooks)
        plan, found = choose_caps(
            planner,
            self._bounded(compilation),
            caps_mb=self.caps_mb,
            machine=self.machine,
            reference_bytes=compilation.baseline.peak_bytes,
            accumulate=None if reduce is None else reduce.accumulate,
        )
        report = merge_and_report(analysis, plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)
        if reduce is not None:
            reduce.run(graph, compilation)
        self._schedule(graph, compilation, found)
