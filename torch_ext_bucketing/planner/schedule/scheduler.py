"""Reorder a graph under policies (:mod:`.policy`), and report the result.

    report = schedule(gm, [Overlap(), MaxComputeRun(8), PeakMemory(ratio=1.02)])

:mod:`.orders` chooses the order. A bound that is missed is a warning, too. An exception leaves the
graph unchanged, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch.fx as fx

from ...errors import BoundNotKeptWarning
from ...graph.analysis import GraphAnalysis
from ...graph.dependencies import Precedence
from ...graph.liveness import beside_text
from ...graph.nodes import GraphLike, graph_of, paused_gc
from ...graph.sizes import GivenHints, SizeHints
from ...reports.schedule import ScheduleReport
from ..cost.cost import Costs
from ..cost.machine import H100, Machine, check_machine
from .model import Model, model_of
from .orders import schedule_model
from .policy import Case, Options, Policy, policies_of
from .timeline import Timeline, optimizer_ms, rank_order_ms

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
                # Its kernels may miss a bound that the estimate kept: once more, from this order.
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


def _reorder(graph: fx.Graph, dependencies: Precedence, order: Sequence[int]) -> None:
    for i in order:
        node = dependencies.nodes[i]
        last = next(iter(reversed(graph.nodes)))
        if last.op == "output":
            last.prepend(node)
        else:  # the graph has no output yet
            last.append(node)
