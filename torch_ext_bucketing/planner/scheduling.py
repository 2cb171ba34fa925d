"""Reorder a graph under policies: as a function, and as passes of :func:`.backend`.

    report = schedule(gm, [Overlap(), MaxComputeRun(8), PeakMemory(ratio=1.02)])

:mod:`.orders` chooses the order. A bound that is missed is a warning, too. An exception leaves the
graph unchanged, with a warning.

With ``"aot_eager"`` a graph runs in its order. With ``"inductor"`` the backend pins the order
afterwards (see :mod:`.passes.backends`).
"""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

import torch.fx as fx

from .._torch import paused_gc
from .._torch.aot import stage_of
from ..bucketing.pack import PayloadKey, merge_and_report
from ..bucketing.plan import BucketPlanner, ByCap, Eligible, Groups, check_groups
from ..errors import BoundNotKeptWarning, check_argument, check_count
from ..graph.analysis import GraphAnalysis
from ..graph.dependencies import Precedence
from ..graph.kernel_order import kernel_order
from ..graph.liveness import workspace_text
from ..graph.nodes import (
    FSDP_KINDS,
    GraphLike,
    Kind,
    check_kinds,
    collective_kind,
    graph_of,
)
from ..graph.sizes import GivenHints, SizeHints
from ..passes.base import BUCKETS, ORDER, RANK_ORDER, Compilation, GraphPass, Stage
from ..passes.bucketing import FixedOrderReduce
from ..passes.cache_key import brief
from ..passes.watch import watch_for_shards
from ..reports.planner import EstimateReport, ScheduleReport
from .cap_search import BySearch, Searched
from .cost.cost import Costs
from .cost.machine import H100, Machine, job_machine
from .schedule.model import Model, model_of
from .schedule.orders import schedule_model
from .schedule.policy import Case, Options, Policy, policies_of, within
from .schedule.timeline import Timeline, optimizer_ms, rank_order_ms

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
    """Reorder a graph's nodes, in place, and return a report. A ``GraphModule`` is recompiled.

    A bound that is missed is also a ``BoundNotKeptWarning``.

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
    """
    policies = policies_of(policy)
    check_argument("machine", machine, Machine)
    check_count("external_live_bytes", external_live_bytes)
    if reference_bytes is not None:
        check_count("reference_bytes", reference_bytes)
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

    def in_kernels() -> list[int]:
        assert model.graph.fused is not None
        return kernel_order(model.liveness, model.dependencies, model.graph.fused)

    try:
        with paused_gc():
            costs = Costs(machine, hints)
            model = modelled(costs)
            report, order, _ = schedule_model(model, policies, reference_bytes, like=like)
            reorder(model, order)
            if machine.fuses:  # which kernels there are depends on the order
                model, first = modelled(costs), report
                order = in_kernels()
                report = _in_its_order(model, order, policies, first)
                # Its kernels may miss a bound that the estimate kept: once more, from this order.
                if report.misses > first.misses:
                    again = schedule_model(model, policies, first.reference_bytes)
                    reorder(model, again.order)
                    model = modelled(costs)
                    order = in_kernels()
                    report = _in_its_order(model, order, policies, again.report, first)
                reorder(model, order)
            price = rank_order_ms(model, order, costs)
            notes = report.notes
            if price is not None and "all_to_all" in costs.by_torch:
                notes += (_UPPER_GUESS,)
            report = replace(
                report,
                machine=machine.describe(),
                rank_order_ms=price,
                optimizer_ms=optimizer_ms(model, order),
                notes=(*notes, text) if (text := workspace_text(graph)) else notes,
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
    order: Sequence[int],
    policies: Sequence[Policy],
    made: ScheduleReport,
    first: ScheduleReport | None = None,
) -> ScheduleReport:
    """Return the report of ``made`` with the times and bytes of its kernels in ``order``.

    ``first`` is the report of the graph's former order, if ``made`` is another one's.
    """
    earlier = first or made
    reached = Timeline.of(model, order)
    case = Case(model, reached, earlier.reference_bytes)
    bounds = tuple(p.report(case, reached) for p in policies)
    return replace(
        made,
        step_ms=(earlier.step_ms[0], reached.step_ms),
        exposed_ms=(earlier.exposed_ms[0], reached.exposed_ms),
        peak_bytes=(earlier.peak_bytes[0], reached.peak_bytes),
        longest_run=(earlier.longest_run[0], made.longest_run[1]),
        largest=model.largest,
        bounds=bounds,
        misses=sum(p.misses(case, reached) for p in policies),
        warnings=(*model.graph.hints.problems, *(b.warning for b in bounds if b.warning)),
    )


def _reorder(graph: fx.Graph, dependencies: Precedence, order: Sequence[int]) -> None:
    """Move the nodes to the end of the graph, one after the other, before its output."""
    for i in order:
        node = dependencies.nodes[i]
        last = next(iter(reversed(graph.nodes)))
        if last.op == "output":
            last.prepend(node)
        else:  # the graph has no output yet
            last.append(node)


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(GraphPass):
    """Add the cost model's times of each graph to the report; see :class:`Schedule`."""

    stage: ClassVar[Stage] = "forward_backward"
    reads_baseline = True
    machine: Machine | None = None

    def __post_init__(self) -> None:
        self._set(machine=self.machine or job_machine())

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        assert self.machine is not None
        machine = self.machine.for_backend(compilation.fuses, compilation.captured)
        model = model_of(compilation.analysis(graph), machine)
        compilation.report.estimates.append(_estimate(model, stage_of(graph), machine.describe()))


def _estimate(model: Model, stage: str, machine: str) -> EstimateReport:
    """Report times of a graph in its own order, by kind of collective."""
    line = Timeline.of(model)
    kinds = {i: collective_kind(n) for i, n in enumerate(model.dependencies.nodes)}
    busy, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    clock_ms, last = 0.0, ""
    for i in line.order:
        if model.group[i] is not None:
            last = kinds[i] or "other"
            busy[last] += model.ms[i]
            continue
        # The compute stream's wait counts for the kind of the collective that it waits for.
        if model.start_of[i] >= 0 and line.begin[i] > clock_ms:
            exposed[kinds[model.start_of[i]] or "other"] += line.begin[i] - clock_ms
        clock_ms = line.end[i]
    if line.step_ms > clock_ms:  # a collective that no wait of this graph ends
        exposed[last] += line.step_ms - clock_ms
    return EstimateReport(
        stage, machine, line.step_ms, line.compute_ms, dict(busy), dict(exposed), line.peak_bytes
    )


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(GraphPass):
    """Reorder each forward, backward and inference graph; see :func:`.schedule`.

    Passes that bucket come before it. ``PeakMemory(ratio=...)`` refers to the graph before these.

    Args:
        policies: one policy or several, at most one of each class.
        machine: see :func:`.schedule`; None: :func:`.job_machine`.
    """

    stage: ClassVar[Stage] = "forward_backward"
    reads_baseline = True
    policies: Policy | Iterable[Policy]
    machine: Machine | None = None
    _policies: tuple[Policy, ...] = field(init=False)
    timed_for: Machine = field(init=False)

    def __post_init__(self) -> None:
        policies = policies_of(self.policies)
        machine = job_machine() if self.machine is None else self.machine
        check_argument("machine", machine, Machine)
        self._set(policies=policies, _policies=policies, timed_for=machine)

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({ORDER})

    @property
    def planned_with(self) -> str:
        """Return the machine's name and a digest of its numbers."""
        return f"machine {self.timed_for.name} {brief(self.timed_for)}"

    @property
    def fuses_alone(self) -> bool:
        return bool(self.timed_for.for_backend(None).fuses)

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        self._schedule(graph, compilation)

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Look for shards in the first run, and warn if there are none."""
        return watch_for_shards(compiled, compilation)

    def _schedule(
        self, graph: fx.Graph, compilation: Compilation, searched: Searched | None = None
    ) -> None:
        compilation.complete(graph)
        report = schedule(
            graph,  # the module is recompiled once, after all passes
            self._bounded(compilation, graph),
            machine=self.timed_for.for_backend(compilation.fuses, compilation.captured),
            reference_bytes=compilation.baseline.peak_bytes,
            size_hints=compilation.size_hints,
            external_live_bytes=compilation.baseline.external_live_bytes,
            like=searched and searched.sort,
        )
        state = _state_bytes(graph, compilation)
        report = replace(report, caps=searched and searched.report, state_bytes=state)
        compilation.report.schedules.append(report)

    def _bounded(self, compilation: Compilation, graph: fx.Graph) -> tuple[Policy, ...]:
        """Return the policies, and the memory bound of ``ReshardAfterForward("auto")``, if any."""
        if compilation.choice is None or compilation.choice.limit_bytes is None:
            return self._policies
        reference = compilation.baseline.peak_bytes or sys.maxsize
        # Optimizer state was taken off the bound.
        limit = compilation.choice.limit_bytes + _state_bytes(graph, compilation)
        return within(self._policies, limit, reference)

    def settings(self) -> tuple[Any, ...]:
        """Return the fields, and the job's machine if none was given."""
        return (*super().settings(), self.timed_for)


def _state_bytes(graph: fx.Graph, compilation: Compilation) -> int:
    """Return the bytes of the optimizer's state among a graph's inputs."""
    if compilation.extension is None or stage_of(graph) != "backward":
        return 0
    return compilation.extension.extra_bytes


@dataclass(frozen=True, eq=False, repr=False)
class BucketAndSchedule(Schedule):
    """Bucket with the byte caps of the fastest schedule, and schedule; see :class:`.BySearch`.

    Replaces ``BucketByCap`` and :class:`Schedule`. ``kinds``, ``eligible`` and ``groups`` are those
    of :class:`.ByCap`, ``payload_order`` is that of ``BucketByCap``.

    Args:
        policies: see :class:`Schedule`; so is ``machine``.
        caps_mb: see :class:`.BySearch`.
        planners: further planners to try. ``ReshardAfterForward("auto")`` chooses with the buckets
            of the first one.
        reduce: replaces the merged reductions before they are scheduled; the search for caps takes
            that into account.
    """

    conflicts_with = frozenset({RANK_ORDER, ORDER})
    _: KW_ONLY
    caps_mb: Sequence[float] | None = None
    kinds: Collection[Kind] = FSDP_KINDS
    eligible: Eligible = "tag"
    groups: Groups = None
    planners: Sequence[BucketPlanner] = ()
    payload_order: PayloadKey | None = None
    machine: Machine | None = None
    reduce: FixedOrderReduce | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_argument("reduce", self.reduce, FixedOrderReduce | None)
        check_argument("payload_order", self.payload_order, Callable | None)
        check_argument("caps_mb", self.caps_mb, Sequence | None)
        check_argument("planners", self.planners, Sequence)
        for planner in self.planners:
            if not callable(getattr(planner, "plan", None)):
                raise TypeError(f"planners must have a method plan(analysis), got {planner!r}")
        caps_mb = None if self.caps_mb is None else tuple(self.caps_mb)
        self._set(caps_mb=caps_mb, kinds=check_kinds(self.kinds), planners=tuple(self.planners))
        self._set(groups=check_groups(self.groups))
        self._search(self._policies)  # checks the options

    def _search(
        self, policies: tuple[Policy, ...], machine: Machine = H100, **options: Any
    ) -> BySearch:
        by_cap = ByCap(kinds=self.kinds, eligible=self.eligible, groups=self.groups)
        options |= {"caps_mb": self.caps_mb, "planners": tuple(self.planners)}
        return BySearch(policies, by_cap, machine=machine, **options)

    @property
    def parts(self) -> tuple[GraphPass, ...]:
        return () if self.reduce is None else (self.reduce,)

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({BUCKETS, ORDER}.union(*(p.provides for p in self.parts)))

    @property
    def planner(self) -> BucketPlanner | None:
        """The planner that choices on the joint graph assume; None: none, as a search is slow."""
        return next(iter(self.planners), None)

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        analysis, reduce = compilation.analysis(graph), self.reduce
        if reduce is not None and reduce.name in compilation.report.disabled:
            reduce = None
        searched = self._search(
            self._bounded(compilation, graph),
            self.timed_for.for_backend(compilation.fuses, compilation.captured),
            reference_bytes=compilation.baseline.peak_bytes,
            accumulate=None if reduce is None else reduce.accumulate,
        ).search(analysis)
        report = merge_and_report(analysis, searched.plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)
        if reduce is not None:
            reduce.run(graph, compilation)
        self._schedule(graph, compilation, searched)
