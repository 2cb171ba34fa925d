"""Reorder a graph under policies: overlap, bounds on memory, and what was reached.

    report = schedule(gm, [Overlap(), CapComputeRun(8), PeakMemory(ratio=1.02)])

Several orders are made, each in one pass (:mod:`.list_schedule`), and looked at on the cost model
(:mod:`.timeline`). Taken is the fastest that keeps the bounds; where none does, the one that misses
them least, with a warning. The order that the graph came with is always among them, so nothing gets
worse by the model. Whatever goes wrong inside leaves the graph as it was, with a warning.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch.fx as fx

from .._gc import paused_gc
from ..graph.collectives import kind_of
from ..graph.dependencies import Precedence
from ..reports.schedule import ScheduleReport
from ..tagging.tags import member_tags, tag_of
from .cost import H100, Machine, check_machine
from .list_schedule import Options, first_uses, list_schedule
from .memory import CapComputeRun, PeakMemory, forced_run
from .model import Model, model_of
from .overlap import Overlap
from .timeline import Timeline, lower_bound

__all__ = [
    "BoundNotKeptWarning",
    "Policy",
    "Settings",
    "schedule",
    "schedule_model",
]

Policy: TypeAlias = Overlap | CapComputeRun | PeakMemory

_WINDOWS = (0, 8, 16, 40, 100)
_QUICK_WINDOWS = (0, 16, 100)
_DEFAULT_RATIO = 1.02
"""Of the reference's peak, where no ``PeakMemory`` is given: reordering alone must not cost memory
worth speaking of. More is taken only for the collectives that ``Overlap.depth`` wants under way."""


class BoundNotKeptWarning(UserWarning):
    """A bound on memory could not be kept, or a graph could not be scheduled."""


def schedule(
    gm: fx.GraphModule | fx.Graph,
    policy: Policy | Iterable[Policy],
    *,
    machine: Machine = H100,
    reference_bytes: int | None = None,
    donated: Callable[[fx.Node], bool] | None = None,
) -> ScheduleReport:
    """Reorder a graph's nodes, in place. A ``GraphModule`` is recompiled.

    Args:
        gm: a forward, backward, joint or inference graph with fake tensors in ``meta["val"]``.
        policy: one policy or several, at most one of each class.
        machine: what the cost model times nodes for.
        reference_bytes: the peak that ``PeakMemory(ratio=...)`` refers to, such as the unbucketed
            graph's (see :func:`peak_bytes`); None: the peak of ``gm`` as it is.
        donated: see :class:`.Liveness`.

    Returns:
        What was reached. A bound that is missed is also a ``BoundNotKeptWarning``.

    Raises:
        TypeError: something in ``policy`` is no policy, or ``machine`` is none.
        ValueError: two policies of one class, or ``reference_bytes`` is no number of bytes.
    """
    settings = Settings.of(policy)
    check_machine(machine)
    number = isinstance(reference_bytes, int) and not isinstance(reference_bytes, bool)
    if reference_bytes is not None and (not number or reference_bytes < 0):
        raise ValueError(f"reference_bytes must be a number of bytes, got {reference_bytes!r}")
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    try:
        with paused_gc():
            model = model_of(graph, machine, donated)
            report, order = schedule_model(model, settings, reference_bytes)
        if not model.dependencies.is_order(order):
            raise AssertionError("the order breaks a dependency")
        _reorder(graph, model.dependencies, order)
        if isinstance(gm, fx.GraphModule):
            gm.recompile()
    except Exception as error:  # losing a compile over its order would be worse than any order
        text = f"the graph keeps its order: {type(error).__name__}: {error}"
        warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
        return ScheduleReport(policies=settings.names, warnings=(text,))
    for text in report.warnings:
        warnings.warn(text, BoundNotKeptWarning, stacklevel=2)
    return report


@dataclass(frozen=True)
class Settings:
    """The policies of one call, by their class.

    Raises:
        TypeError: something is no policy.
        ValueError: two policies of one class.
    """

    overlap: Overlap | None = None
    run: CapComputeRun | None = None
    memory: PeakMemory | None = None
    names: tuple[str, ...] = ()

    @staticmethod
    def of(policy: Policy | Iterable[Policy]) -> Settings:
        """The settings of one policy or several."""
        given = list(policy) if isinstance(policy, Iterable) else [policy]
        found: dict[str, Policy] = {}
        for p in given:
            name = {Overlap: "overlap", CapComputeRun: "run", PeakMemory: "memory"}.get(type(p))
            if name is None:
                raise TypeError(
                    f"{p!r} is no policy: give Overlap, CapComputeRun or PeakMemory objects"
                )
            if name in found:
                raise ValueError(f"two {type(p).__name__} policies: {found[name]!r} and {p!r}")
            found[name] = p
        return Settings(**found, names=tuple(repr(p) for p in given))  # type: ignore[arg-type]


@dataclass
class _Try:
    options: str
    order: Sequence[int]
    timeline: Timeline
    misses: tuple[float, ...] = field(default=())


def schedule_model(
    model: Model,
    settings: Settings | Policy | Iterable[Policy],
    reference_bytes: int | None,
    quick: bool = False,
) -> tuple[ScheduleReport, Sequence[int]]:
    """The report and the order, without touching the graph. Arguments as of :func:`schedule`;
    ``quick`` tries few orders."""
    if not isinstance(settings, Settings):
        settings = Settings.of(settings)
    clock = time.perf_counter()
    given = Timeline.of(model)
    reference = given.peak_bytes if reference_bytes is None else reference_bytes
    if settings.memory is not None:
        limit = settings.memory.limit_bytes(reference)
    else:
        ahead = 0 if settings.overlap is None else settings.overlap.depth + 1
        limit = max(int(_DEFAULT_RATIO * reference), reference + ahead * _largest_collective(model))
    most = None if settings.run is None else settings.run.max_consecutive
    forced = 0 if most is None else forced_run(model)

    def attempt(name: str, order: Sequence[int], timeline: Timeline | None = None) -> _Try:
        timeline = timeline or Timeline.of(model, order)
        long = 0 if most is None else max(0, timeline.longest_run - max(most, forced)) / most
        over = max(0, timeline.peak_bytes - limit) / max(1, limit)
        # Memory that nobody asked to bound is weighed, too, but no bound is missed by it.
        return _Try(name, order, timeline, (long + over,))

    tries = [attempt("as given", range(len(model)), given)]
    under, notes = _places_under(model, settings.overlap)
    # A run that dependencies force anyway is no reason to hold others back.
    run = None if most is None else max(most, forced)
    for name, options in _candidates(settings, limit, run, under, quick):
        tries.append(attempt(name, list_schedule(model, options)))
    if settings.overlap is None:
        # Without overlap an order is touched only where it misses a bound.
        best = min(tries, key=lambda t: t.misses)
    else:
        best = min(tries, key=lambda t: (t.misses, t.timeline.step_ms))
    reached = best.timeline
    report = ScheduleReport(
        policies=settings.names,
        step_ms=(given.step_ms, reached.step_ms),
        bound_ms=lower_bound(model),
        compute_ms=reached.compute_ms,
        exposed_ms=(given.exposed_ms, reached.exposed_ms),
        peak_bytes=(given.peak_bytes, reached.peak_bytes),
        reference_bytes=reference,
        limit_bytes=limit if settings.memory else None,
        longest_run=(given.longest_run, reached.longest_run),
        max_run=most,
        forced_run=forced,
        misses=best.misses[0] + (0 if most is None else max(0, forced - most) / most),
        chosen=best.options,
        alternatives=tuple((t.options, t.timeline.step_ms, t.timeline.peak_bytes) for t in tries),
        notes=tuple(notes),
        order=tuple(model.dependencies.nodes[i].name for i in best.order),
    )
    missed = tuple(_missed(model, report, best))
    return replace(report, warnings=missed, seconds=time.perf_counter() - clock), best.order


def _largest_collective(model: Model) -> int:
    """Bytes that a collective reads and writes."""
    liveness = model.liveness
    starts = [i for i, group in enumerate(model.group) if group is not None]
    return max((sum(liveness.size[s] for s in liveness.touches[i]) for i in starts), default=0)


def _candidates(
    settings: Settings, limit: int, most: int | None, under: dict[int, int], quick: bool
) -> Iterable[tuple[str, Options]]:
    overlap = settings.overlap
    if overlap is None:
        # Gathers at their use, reductions at once: the least memory, and the shortest runs.
        for window in (0, 8):
            yield (
                f"gathers at their use, window {window}",
                Options(limit, window, fill=window, depth=0, deadlines=False, max_run=most),
            )
        return
    given = _QUICK_WINDOWS if quick else _WINDOWS
    windows = tuple(dict.fromkeys(min(w, overlap.window) for w in given))
    ways = [(w, overlap.depth, True) for w in windows]
    if not quick:
        ways += [(w, 2 * overlap.depth, True) for w in windows if overlap.depth]
    ways += [(w, overlap.depth, False) for w in windows[:1]]
    for window, depth, deadlines in ways:
        yield (
            f"window {window}, depth {depth}{', by deadline' if deadlines else ''}",
            Options(
                limit,
                window,
                fill=overlap.window,
                depth=depth,
                max_prefetch=overlap.max_prefetch,
                deadlines=deadlines,
                max_run=most,
                under=under,
            ),
        )


def _places_under(model: Model, overlap: Overlap | None) -> tuple[dict[int, int], list[str]]:
    """For the gathers that ``prefetch_under`` names, the anchor that each is launched at."""
    if overlap is None or not overlap.prefetch_under:
        return {}, []
    uses = first_uses(model)
    nodes = model.dependencies.nodes
    gathers = {
        i: _fqns(model.members.get(i, (nodes[i],)))
        for i in uses
        if kind_of(nodes[i]) == "all_gather"
    }
    found, notes = {}, []
    for name, other in overlap.prefetch_under.items():
        mine = [i for i, fqns in gathers.items() if _covers(name, fqns)]
        theirs = [uses[i] for i, fqns in gathers.items() if _covers(other, fqns)]
        if not mine or not theirs:
            missing = name if not mine else other
            notes.append(f"prefetch_under: no gather in this graph serves {missing}")
            continue
        for i in mine:
            if min(theirs) < uses[i]:
                found[i] = min(theirs)
            else:
                notes.append(f"prefetch_under: {name} is used before {other} in this graph")
    return found, notes


def _fqns(starts: Iterable[fx.Node]) -> tuple[str, ...]:
    tags = [t for s in starts for t in (*member_tags(s), tag_of(s)) if t is not None]
    return tuple(dict.fromkeys(f for t in tags for f in t.fqns))


def _covers(name: str, fqns: Iterable[str]) -> bool:
    return any(f == name or f.startswith(f"{name}.") for f in fqns)


def _missed(model: Model, report: ScheduleReport, best: _Try) -> Iterable[str]:
    """What bounds are not kept, by how much, and what stands in the way."""
    nodes = model.dependencies.nodes
    timeline = best.timeline
    if report.max_run is not None and timeline.longest_run > report.max_run:
        why = (
            f"dependencies force a run of at least {report.forced_run}"
            if report.forced_run > report.max_run
            else "no order was found that keeps it within the memory bound"
        )
        yield (
            f"CapComputeRun({report.max_run}): {timeline.longest_run} compute nodes in a row "
            f"before {_run_end(model, timeline)}; {why}. Smaller reduce-scatter buckets make "
            "shorter runs."
        )
    if report.limit_bytes is not None and timeline.peak_bytes > report.limit_bytes:
        at = timeline.live.index(timeline.peak_bytes) if timeline.live else 0
        where = nodes[timeline.order[at]].name if timeline.live else "the inputs"
        yield (
            f"PeakMemory: {timeline.peak_bytes / 2**30:.3f} GiB live at {where}, above the bound "
            f"of {report.limit_bytes / 2**30:.3f} GiB; inputs, saved values and constants are "
            f"{model.liveness.at_start / 2**30:.3f} GiB of it, and no order tried needs less. "
            "Smaller buckets and more recomputation need less."
        )


def _run_end(model: Model, timeline: Timeline) -> str:
    run = 0
    for i in timeline.order:
        run += model.compute[i]
        if model.reduces[i]:
            if run == timeline.longest_run:
                return model.dependencies.nodes[i].name
            run = 0
    return "the end"


def _reorder(graph: fx.Graph, dependencies: Precedence, order: Sequence[int]) -> None:
    for i in order:
        node = dependencies.nodes[i]
        last = next(iter(reversed(graph.nodes)))
        if last.op == "output":
            last.prepend(node)
        else:  # a graph in the making
            last.append(node)
