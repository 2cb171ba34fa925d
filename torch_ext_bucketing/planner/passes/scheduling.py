"""Scheduling as graph passes for :func:`.backend`.

With ``"aot_eager"`` a graph runs in its order, so reordering it is enough. With ``"inductor"`` the
backend pins the order afterwards (see :mod:`.passes.pin_order`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

from ...bucketing.caps import ByCap, Eligible
from ...bucketing.groups import Groups, check_groups
from ...bucketing.merge import PayloadKey, check_payload_order, merge_and_report
from ...bucketing.plan import BucketPlanner
from ...graph.collectives import FSDP_KINDS, Kind, check_kinds
from ...graph.unwrap import GraphLike, graph_of
from ...passes.all_to_all import FixedOrderReduce
from ...passes.base import GraphPass, Stage
from ...passes.compilation import Compilation
from ...passes.facts import Baseline, Buckets, Fact, Order, RankOrder, Tags
from ..cost.devices import job_machine
from ..cost.machine import Machine, check_machine
from ..schedule.memory import within
from ..schedule.policy import Policy, policies_of
from ..schedule.scheduler import schedule
from ..search.cap_search import BySearch, Searched
from .order import PlannedOrder


@dataclass(frozen=True, eq=False, repr=False)
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

    stage: ClassVar[Stage] = "forward_backward"
    requires: ClassVar[tuple[type[Fact], ...]] = (Baseline,)
    policies: Policy | Iterable[Policy]
    machine: Machine | None = None
    _policies: tuple[Policy, ...] = field(init=False)
    _machine: Machine = field(init=False)

    def __post_init__(self) -> None:
        policies = policies_of(self.policies)
        machine = job_machine() if self.machine is None else self.machine
        check_machine(machine)
        self._set(policies=policies, _policies=policies, _machine=machine)

    @property
    def provides(self) -> tuple[Fact, ...]:
        return (PlannedOrder(self._policies, self._machine),)

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
            machine=self._machine,
            reference_bytes=compilation.baseline.peak_bytes,
            size_hints=compilation.size_hints,
            external_live_bytes=compilation.baseline.external_live_bytes,
            like=searched and searched.sort,
        )
        compilation.report.schedules.append(replace(report, caps=searched and searched.report))

    def _bounded(self, compilation: Compilation) -> tuple[Policy, ...]:
        """The policies, and the bound that a pass before chose under."""
        if compilation.choice is None or compilation.choice.limit_bytes is None:
            return self._policies
        reference = compilation.baseline.peak_bytes or sys.maxsize
        return within(self._policies, compilation.choice.limit_bytes, reference)

    def settings(self) -> tuple[Any, ...]:
        """Whatever was given, and the machine."""
        return (*super().settings(), self._machine)


@dataclass(frozen=True, eq=False, repr=False)
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
        reduce: a :class:`.FixedOrderReduce`, which replaces the merged reductions before they are
            scheduled. The caps are chosen for what it makes of them.

    Raises:
        TypeError: as of :class:`Schedule`; ``payload_order`` is no callable; ``reduce`` is no such
            pass; ``groups`` is no list of names.
        ValueError: as of :class:`Schedule`; no cap, or one that is no positive number; or what an
            option may not be.
    """

    requires: ClassVar[tuple[type[Fact], ...]] = (Tags, Baseline)
    conflicts_with = (RankOrder, Order)
    _: KW_ONLY
    caps_mb: Sequence[float] | None = None
    kinds: Collection[Kind] = FSDP_KINDS
    eligible: Eligible = "tag"
    groups: Groups = None
    planners: Sequence[BucketPlanner] = ()
    payload_order: PayloadKey | None = None
    machine: Machine | None = None
    reduce: FixedOrderReduce | None = None
    _search: BySearch = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduce is not None and not isinstance(self.reduce, FixedOrderReduce):
            raise TypeError(f"reduce must be a FixedOrderReduce or None, got {self.reduce!r}")
        check_payload_order(self.payload_order)
        caps_mb = None if self.caps_mb is None else tuple(self.caps_mb)
        self._set(caps_mb=caps_mb, kinds=check_kinds(self.kinds), planners=tuple(self.planners))
        self._set(groups=check_groups(self.groups))
        self._set(
            _search=BySearch(
                self._policies,
                ByCap(kinds=self.kinds, eligible=self.eligible, groups=self.groups),
                caps_mb=caps_mb,
                machine=self._machine,
                planners=tuple(self.planners),
            )
        )

    @property
    def parts(self) -> tuple[GraphPass, ...]:
        return () if self.reduce is None else (self.reduce,)

    @property
    def provides(self) -> tuple[Fact, ...]:
        reduced = () if self.reduce is None else self.reduce.provides
        buckets = Buckets(tuple(self.kinds), planner=next(iter(self.planners), None))
        return (buckets, *reduced, *super().provides)

    def with_part(self, other: GraphPass) -> GraphPass | None:
        if self.reduce is None and isinstance(other, FixedOrderReduce):
            return replace(self, reduce=other)
        return None

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
