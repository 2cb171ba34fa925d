"""Scheduling policies, and the options of orders. A new policy is one class, here or in your code.

The scheduler (:mod:`.orders`) calls the methods of each policy in this order:

- :meth:`.Policy.candidates`: orders to try, as :class:`.Options` of the list scheduler;
- :meth:`.Policy.ask`: the bound to keep while an order is made;
- :meth:`.Policy.misses`: how far an order misses the bound;
- :meth:`.Policy.report` and :meth:`.Policy.notes`: texts about the order that was chosen.

It chooses the order that misses all bounds together least, and the fastest of equals. This policy,
for example, bounds the number of collectives in flight::

    @dataclass(frozen=True)
    class InFlight(Policy):
        most: int = 4

        def candidates(self, case, quick):
            yield "one gather ahead", Options(depth=1)
            yield "gathers at their use", Options(depth=0, deadlines=False)

        def misses(self, case, timeline):
            return max(0, in_flight(case.model, timeline.order) - self.most) / self.most

        def report(self, case, timeline):  # a subclass of PolicyReport has fields for figures
            reached = in_flight(case.model, timeline.order)
            return PolicyReport(repr(self), f"{reached} in flight")
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..._source import note_sources
from ...errors import check_count, check_positive
from ...graph.nodes import kind_of, member_tags
from ...reports.base import sizes_text
from ...reports.planner import PeakReport, PolicyReport, RunReport
from .model import Model
from .timeline import Timeline, compute_runs


@dataclass(frozen=True)
class Options:
    """Bounds and preferences for one order."""

    # Live bytes that prefetching and overtaking stay under. A kernel that would exceed them first
    # waits for collectives in flight, which frees their buffers. None: no limit.
    limit_bytes: int | None = None
    # Compute nodes among which the longest remaining path runs first; 0: the graph's order.
    window: int = 0
    fill: int = 100  # compute nodes after the oldest open one that may run while it waits
    # Gathers of one group that may be in flight or unused when the next one launches.
    depth: int = 1
    max_prefetch: int = 100  # compute nodes that a gather may be ahead of its use
    deadlines: bool = True  # whether gathers may launch earlier for their stream to end in time
    # Whether a kernel is held back while one with a longer path waits, if the path would be
    # delayed.
    hold: bool = True
    # Whether nodes that go ahead leave room for the open ones of those that the graph has before
    # them, or for all of these, as if none had gone ahead.
    room_for_open: bool = True
    max_run: int | None = None  # most compute nodes between two reduce-scatters; None: no bound
    # The place of the kernel to launch a gather right before, by the gather's place.
    under: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def sort(self) -> Options:
        """The options without ``under``, whose places belong to one model."""
        return replace(self, under={})

    def next_to(self, other: Options, windows: Sequence[int]) -> bool:
        """Return whether one preference differs, a window by one step of ``windows``."""
        # Orders without a window, those of the graph, are like no others, so they are next to all.
        if not self.window:
            return True
        differ = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        step = abs(windows.index(self.window) - windows.index(other.window))
        return len(differ) <= 1 and step <= 1

    def tightened(self, *, limit_bytes: int | None = None, max_run: int | None = None) -> Options:
        """Return the options with further bounds. The tighter one of two bounds counts."""
        return replace(
            self,
            limit_bytes=_tighter(self.limit_bytes, limit_bytes),
            max_run=_tighter(self.max_run, max_run),
        )


def _tighter(one: int | None, other: int | None) -> int | None:
    bounds = [bound for bound in (one, other) if bound is not None]
    return min(bounds, default=None)


def at_least(bound: int | None, other: int | None) -> bool:
    """Return whether a bound allows all that another one allows. None allows all."""
    return bound is None or (other is not None and bound >= other)


@dataclass(frozen=True, eq=False)
class Case:
    """One graph to order, with the timeline of its own order.

    ``reference_bytes`` is the peak that ratios refer to; see :func:`.schedule`.
    """

    model: Model
    given: Timeline
    reference_bytes: int


class Policy:
    """A bound or a preference for orders: the base class of policies for :func:`.schedule`.

    Subclasses are frozen dataclasses whose fields are plain values. Cache keys contain the fields
    and the source of the modules that define the class. A policy with other fields has a method
    ``uuid() -> str`` instead. Methods must not change their arguments, and must return the same in
    every process and on every rank.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_sources(cls)

    def candidates(self, case: Case, quick: bool) -> Iterable[tuple[str, Options]]:
        """Yield orders to try for speed, each as a name for the report and its options.

        Without any, the graph's order changes only if it misses a bound. ``quick`` is for searches
        that schedule many graphs: yield few.
        """
        return ()

    def ask(self, case: Case, options: Options) -> Options:
        """Return ``options`` with this policy's bound added, and no other bound loosened."""
        return options

    def misses(self, case: Case, timeline: Timeline) -> float:
        """Return how far an order misses the bound, relative to the bound; 0 if it is kept."""
        return 0.0

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        """Report figures of the order that was chosen, and a warning if it misses the bound."""
        return PolicyReport(repr(self))

    def notes(self, case: Case) -> Iterable[str]:
        """Yield a text for each option that does not apply to this graph."""
        return ()

    def spare_bytes(self, case: Case) -> int:
        """Return the bytes above the reference to allow where no policy bounds memory."""
        return 0

    def max_bucket_run(self) -> int | None:
        """Return the ``max_compute_run`` of :class:`.ByCap` that helps to keep this bound.

        :class:`.BySearch` takes the smallest of all policies. None: buckets don't matter.
        """
        return None


def policies_of(policy: Policy | Iterable[Policy]) -> tuple[Policy, ...]:
    """Return one policy or several as a tuple, of different classes."""
    policies = tuple(policy) if isinstance(policy, Iterable) else (policy,)
    by_class: dict[type, Policy] = {}
    for p in policies:
        if not isinstance(p, Policy):
            raise TypeError(
                f"{p!r} is not a policy: give Overlap, MaxComputeRun, PeakMemory or other Policy "
                "objects"
            )
        if type(p) in by_class:
            raise ValueError(f"two {type(p).__name__} policies: {by_class[type(p)]!r} and {p!r}")
        by_class[type(p)] = p
    return policies


_DEFAULT_RATIO = 1.02
"""The bound where no policy bounds memory, relative to the reference's peak. Gathers in flight by
``Overlap.depth`` may take more."""


class Bounds:
    """The bounds of policies on the orders of one model; arguments: see :func:`.schedule`.

    If no policy bounds memory (``unbounded``), ``limit_bytes`` follows from the model's own order.
    """

    def __init__(
        self, model: Model, policy: Policy | Iterable[Policy], reference_bytes: int | None
    ) -> None:
        self.policies = policies = policies_of(policy)
        graph_order = Timeline.of(model)
        reference = graph_order.peak_bytes if reference_bytes is None else reference_bytes
        self.case = case = Case(model, graph_order, reference)
        limit = self.ask(Options()).limit_bytes
        self.unbounded = limit is None
        if limit is None:
            # Without a policy for memory an order must not take much more than the graph's.
            spare = max((p.spare_bytes(case) for p in policies), default=0)
            limit = max(int(_DEFAULT_RATIO * reference), reference + spare)
        self.limit_bytes = limit

    def ask(self, options: Options) -> Options:
        """Add the bounds to ``options``."""
        for p in self.policies:
            options = p.ask(self.case, options)
        return options

    def misses(self, timeline: Timeline) -> float:
        """Return how far an order misses the bounds of all policies."""
        missed = sum(p.misses(self.case, timeline) for p in self.policies)
        return missed + self.above(timeline.peak_bytes) if self.unbounded else missed

    def above(self, nbytes: int) -> float:
        """Return how far a peak is above the bound on memory, relative to the bound."""
        return max(0, nbytes - self.limit_bytes) / max(1, self.limit_bytes)

    @property
    def least_above(self) -> float:
        """A lower bound of :meth:`above` of any order's peak."""
        graph_order = self.case.given
        if graph_order.peak_bytes <= self.limit_bytes:
            return 0.0
        if not graph_order.order:
            return self.above(graph_order.peak_bytes)
        peak_place = graph_order.order[graph_order.live.index(graph_order.peak_bytes)]
        return self.above(self.case.model.least_bytes_at(peak_place))


_WINDOWS = (0, 8, 16, 40, 100)
_QUICK_WINDOWS = (0, 16, 100)


@dataclass(frozen=True)
class Overlap(Policy):
    """Launch gathers before their use and wait late for reductions, for :func:`.schedule`.

    Several orders are tried on the cost model, from the graph's own order of kernels to one that
    runs the critical path first. The fastest within the bounds is chosen.

    Args:
        depth: gathers of one process group that may be in flight or unused when the next launches.
        window: compute nodes that a kernel may overtake to fill a wait or to launch communication
            earlier. 0 keeps the order of kernels. Without a bound, memory may grow several times.
        max_prefetch: compute nodes that a gather may be ahead of its use.
        prefetch_under: modules or parameters to gather while others compute, as in ``{"layers.4":
            "layers.3"}``: ``layers.4`` is gathered while ``layers.3`` computes.
    """

    depth: int = 1
    window: int = 100
    max_prefetch: int = 100
    prefetch_under: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("depth", "window", "max_prefetch"):
            check_count(name, getattr(self, name))
        under = self.prefetch_under
        if not isinstance(under, Mapping) or not all(
            isinstance(name, str) for name in (*under, *under.values())
        ):
            raise TypeError(f"prefetch_under must map names to names, got {under!r}")

    def candidates(self, case: Case, quick: bool) -> Iterable[tuple[str, Options]]:
        """Yield windows up to :attr:`window`, depths up to twice :attr:`depth`, and deadlines."""
        under, _ = self._launch_places(case.model)
        sizes = _QUICK_WINDOWS if quick else _WINDOWS
        windows = tuple(dict.fromkeys(min(w, self.window) for w in sizes))
        choices = [(w, self.depth, True) for w in windows]
        if not quick:  # twice the depth, and gathers by their deadline alone
            choices += [(w, 2 * self.depth, True) for w in windows if self.depth]
            choices += [(w, 0, True) for w in windows[:1] if self.depth]
        choices += [(w, self.depth, False) for w in windows[:1]]
        for (window, depth, deadlines), hold in itertools.product(choices, (True, False)):
            yield (
                f"window {window}, depth {depth}{', by deadline' if deadlines else ''}"
                f"{'' if hold else ', no kernel held back'}",
                Options(
                    window=window,
                    fill=self.window,
                    depth=depth,
                    max_prefetch=self.max_prefetch,
                    deadlines=deadlines,
                    hold=hold,
                    under=under,
                ),
            )

    def notes(self, case: Case) -> Iterable[str]:
        """Yield a text for each name in :attr:`prefetch_under` without effect in this graph."""
        return self._launch_places(case.model)[1]

    def spare_bytes(self, case: Case) -> int:
        """Return the bytes of the collectives in flight, each as large as the largest."""
        return (self.depth + 1) * case.model.largest_collective

    def _launch_places(self, model: Model) -> tuple[dict[int, int], list[str]]:
        """Map each gather of :attr:`prefetch_under` to the kernel to launch it before."""
        if not self.prefetch_under:
            return {}, []
        uses = model.analysis.first_uses()
        nodes = model.dependencies.nodes
        gathers = {
            i: [
                f
                for start in model.members.get(i, (nodes[i],))
                for tag in member_tags(start)
                for f in tag.fqns
            ]
            for i in uses
            if kind_of(nodes[i]) == "all_gather"
        }
        places, notes = {}, []
        for name, other in self.prefetch_under.items():
            covered = [i for i, fqns in gathers.items() if _covers(name, fqns)]
            other_uses = [uses[i] for i, fqns in gathers.items() if _covers(other, fqns)]
            if not covered or not other_uses:
                missing = name if not covered else other
                notes.append(f"prefetch_under: no gather in this graph serves {missing}")
                continue
            for i in covered:
                if min(other_uses) < uses[i]:
                    places[i] = min(other_uses)
                else:
                    notes.append(f"prefetch_under: {name} is used before {other} in this graph")
        return places, notes


def _covers(name: str, fqns: Iterable[str]) -> bool:
    return any(f == name or f.startswith(f"{name}.") for f in fqns)


@dataclass(frozen=True)
class MaxComputeRun(Policy):
    """Bound the number of compute nodes between two reduce-scatters.

    After merging, a topological sort may run the recomputation of many layers before the first
    reduce-scatter, with all their gradients live. This pulls reduce-scatters forward. Compute nodes
    after the last one are not bounded.

    Args:
        max_consecutive: compute nodes (matrix products, attention, convolutions), at least 1.
    """

    # AutoParallel (PR 481) saw runs of 40. At most 8 saved 4.3 GB and cost 5.9 ms in a step of
    # LLaMA-3 8B on 128 GPUs.
    max_consecutive: int = 8

    def __post_init__(self) -> None:
        check_count("max_consecutive", self.max_consecutive, least=1)

    def ask(self, case: Case, options: Options) -> Options:
        """Bound runs, at no less than dependencies force anyway."""
        return options.tightened(max_run=max(self.max_consecutive, case.model.forced_run))

    def misses(self, case: Case, timeline: Timeline) -> float:
        """Return the longest run's excess over the bound, relative to the bound."""
        return max(0, timeline.longest_run - self.max_consecutive) / self.max_consecutive

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        """Report the bound, the run that dependencies force, and the end of the longest run."""
        most, forced = self.max_consecutive, case.model.forced_run
        kept = RunReport(repr(self), max_run=most, forced_run=forced)
        if timeline.longest_run <= most:
            return kept
        why = (
            f"dependencies force a run of at least {forced}"
            if forced > most
            else "no order was found that keeps it within the memory bound"
        )
        runs = compute_runs(case.model, timeline.order)
        end = next(i for i, run in runs if run == timeline.longest_run)
        warning = (
            f"MaxComputeRun({most}): {timeline.longest_run} compute nodes in a row before "
            f"{case.model.dependencies.nodes[end].name}; {why}. Smaller reduce-scatter buckets "
            "make shorter runs."
        )
        return replace(kept, warning=warning)

    def max_bucket_run(self) -> int:
        """Return the bound, so that reduce-scatter buckets force no longer run."""
        return self.max_consecutive


_GIB = 2**30
_ALL = 2**63  # bytes: more than any graph needs
_OWN_SEGMENT = 10 * 2**20
"""torch's CUDA allocator has a segment of its own for each block that is at least as large."""


@dataclass(frozen=True)
class PeakMemory(Policy):
    """Bound the estimated peak of live bytes.

    Args:
        gib: the bound in GiB; give it or ``ratio``. It includes inputs, saved values and constants
            of the graph, in backward the parameters that only forward reads, and cuBLAS's
            workspaces on CUDA.
        ratio: the bound relative to the graph's peak before bucketing and reordering.
        host_gib: pinned host memory of each rank in GiB that may hold activations from forward to
            backward; None: none. For ``recipe()`` and ``ReshardAfterForward("auto")``, which choose
            them; the order of a graph does not depend on it.
    """

    gib: float | None = None
    ratio: float | None = None
    host_gib: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        sizes = [v for v in (self.gib, self.ratio) if v is not None]
        if len(sizes) != 1:
            raise ValueError(
                f"give either gib or ratio, got gib={self.gib!r} and ratio={self.ratio!r}"
            )
        for bound in (*sizes, *([] if self.host_gib is None else [self.host_gib])):
            check_positive("the bound", bound)

    @property
    def host_bytes(self) -> int:
        """The bound on pinned host memory in bytes; 0 without one."""
        return int(min((self.host_gib or 0) * _GIB, _ALL))

    def limit_bytes(self, reference: int) -> int:
        """Return the bound in bytes, for a graph whose peak was ``reference`` bytes."""
        if self.gib is not None:
            return int(min(self.gib * _GIB, _ALL))
        assert self.ratio is not None
        return int(min(self.ratio * reference, _ALL))

    def ask(self, case: Case, options: Options) -> Options:
        """Keep prefetching and overtaking under the bound."""
        return options.tightened(limit_bytes=self.limit_bytes(case.reference_bytes))

    def misses(self, case: Case, timeline: Timeline) -> float:
        """Return the peak's excess over the bound, relative to the bound."""
        limit = self.limit_bytes(case.reference_bytes)
        return max(0, timeline.peak_bytes - limit) / max(1, limit)

    def report(self, case: Case, timeline: Timeline) -> PolicyReport:
        """Report the bound in bytes, and the place of a peak above it."""
        limit = self.limit_bytes(case.reference_bytes)
        if timeline.peak_bytes <= limit:
            # A ratio names no card's memory.
            large = "" if self.gib is None else _large(*case.model.largest, limit)
            return PeakReport(repr(self), warning=large, limit_bytes=limit)
        nodes = case.model.dependencies.nodes
        peak_place = timeline.live.index(timeline.peak_bytes) if timeline.live else 0
        where = nodes[timeline.order[peak_place]].name if timeline.live else "the inputs"
        reached, bound, inputs = sizes_text(
            timeline.peak_bytes, limit, case.model.liveness.at_start
        )
        warning = (
            f"PeakMemory: {reached} live at {where}, above the bound of {bound}; inputs, saved "
            f"values and constants are {inputs} of it, and no order tried needs less. Smaller "
            "buckets and more recomputation need less."
        )
        return PeakReport(repr(self), warning=warning, limit_bytes=limit)


def _large(name: str, nbytes: int, limit: int) -> str:
    """Return a warning if one block is a large part of the bound."""
    if nbytes <= max(_OWN_SEGMENT, limit / 4):
        return ""
    block, bound = sizes_text(nbytes, limit)
    return (
        f"PeakMemory: one block of {block}, of {name}, is over a quarter of the bound of {bound}; "
        "the allocator needs as much in one piece, and may hold more than live bytes for that "
        "(PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True avoids it)"
    )


def within(policies: Sequence[Policy], limit_bytes: int, reference: int) -> tuple[Policy, ...]:
    """Return ``policies`` with a bound on memory, or their own one if that is tighter."""
    limits = [p.limit_bytes(reference) for p in policies if isinstance(p, PeakMemory)]
    bound = PeakMemory(gib=max(1, min([limit_bytes, *limits])) / _GIB)
    return (*(p for p in policies if not isinstance(p, PeakMemory)), bound)
