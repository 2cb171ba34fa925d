"""Report the cost model's view of a compiled graph, the search for byte caps, and scheduling."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from .base import Record, Report, aligned, size_text, sizes_text


@dataclass(frozen=True)
class EstimateReport(Record):
    """A graph as it was compiled, on the machine of the cost model; times in milliseconds."""

    stage: str
    machine: str
    step_ms: float  # the end of the last stream
    kernels_ms: float  # time that kernels keep the compute stream busy
    busy_ms: Mapping[str, float]  # sum over the collectives of each kind
    exposed_ms: Mapping[str, float]  # the part of it that the compute stream waits for
    peak_bytes: int  # most live bytes


NamedCaps: TypeAlias = tuple[tuple[str, float | tuple[float, ...]], ...]


@dataclass(frozen=True)
class TriedCaps:
    """Caps that were tried on the cost model, and the best order found with them."""

    # Byte cap in MiB per process group and kind, such as ``"0 all_gather"``; if members were moved
    # between buckets, the MiB of each bucket.
    caps_mb: NamedCaps
    step_ms: float
    peak_bytes: int
    longest_run: int  # most compute nodes between two reduce-scatters
    misses: float  # sum over the bounds of (value - bound) / bound; 0: all are kept
    order: str = ""  # name of that order, see `ScheduleReport.chosen`
    planner: str = ""  # ``repr`` of the planner, where the plan is not by caps


@dataclass(frozen=True)
class CapsReport(Record):
    """The caps that :class:`.BySearch` tried and chose."""

    chosen: TriedCaps  # the caps that miss the bounds least, and of these the fastest
    # In the order they were tried, without caps that can't be faster than others.
    tried: tuple[TriedCaps, ...]
    seconds: float = 0.0
    warning: str = ""  # why nothing was tried, and the caps are torch's own

    @property
    def caps_mb(self) -> NamedCaps:
        """See :class:`TriedCaps`."""
        return self.chosen.caps_mb

    def summary(self) -> str:
        """Format the chosen caps or planner."""

        def cap_text(cap: float | tuple[float, ...]) -> str:
            if not isinstance(cap, tuple):
                return f"{cap:g}"
            return f"{len(cap)} bucket(s) of {min(cap):.3g} to {max(cap):.3g}"

        caps = self.chosen.planner or ", ".join(f"{cap_text(c)} for {n}" for n, c in self.caps_mb)
        return f"{caps}, of {len(self.tried)} tried"


@dataclass(frozen=True)
class PolicyReport:
    """How the chosen order meets one policy, given by its ``repr``.

    ``figures`` has the bound and the value reached, by name, and ``text`` these in a few words;
    empty: no line in the report. ``warning`` gives the miss and its reason; empty: the bound is
    kept.
    """

    policy: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    warning: str = ""


@dataclass(frozen=True)
class ScheduleReport(Report):
    """The result of :func:`.schedule` on one graph.

    Pairs are before and after. Times are estimates in milliseconds, bytes estimates of live bytes.
    """

    derived = ("limit_bytes",)
    policies: tuple[str, ...] = ()
    machine: str = ""  # the machine of the cost model, and its ranks per node
    step_ms: tuple[float, float] = (0.0, 0.0)
    # Lower bound of all orders: the largest of the critical path, the compute stream, the host and
    # the busiest process group.
    bound_ms: float = 0.0
    compute_ms: float = 0.0
    host_ms: float = 0.0  # time that the host launches
    group_ms: tuple[tuple[str, float], ...] = ()  # time of each process group's collectives
    # Time that the compute stream waits for communication or the host.
    exposed_ms: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    reference_bytes: int = 0  # the peak that ratios refer to
    # The node that allocates the largest single block, and its bytes.
    largest: tuple[str, int] = ("", 0)
    longest_run: tuple[int, int] = (0, 0)  # most compute nodes between two reduce-scatters
    bounds: tuple[PolicyReport, ...] = ()
    misses: float = 0.0  # sum over the bounds of (value - bound) / bound; 0: all are kept
    least_misses: float = 0.0  # the same for the least peak of any order, as far as orders show it
    chosen: str = "as given"  # name of the chosen order, one of ``alternatives`` (name, ms, bytes)
    alternatives: tuple[tuple[str, float, int], ...] = ()
    caps: CapsReport | None = None  # how the byte caps were chosen, if they were
    # Policies that do not apply to this graph, and values that are guesses.
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # bounds that are missed, or why the graph kept its order
    order: tuple[str, ...] = ()  # names of the movable nodes, in the new order
    bounds_cost_ms: float = 0.0  # time that an order without any bound would save
    # Time that sums in rank order add over rings; None: there are none.
    rank_order_ms: float | None = None
    # The time that norm, clipping and updates add to the step, with their launches by the host;
    # their kernels; and their collectives. None: the graph has none.
    optimizer_ms: tuple[float, float, float] | None = None
    size_hints: str = ""  # values taken for sizes that depend on data
    seconds: float = 0.0  # time of the search

    def figure(self, name: str) -> int | None:
        """Look up a policy's figure by name."""
        return next((b.figures[name] for b in self.bounds if name in b.figures), None)

    @property
    def limit_bytes(self) -> int | None:
        """The bound of ``PeakMemory``, or None."""
        return self.figure("limit_bytes")

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a table, and lines of notes and warnings."""
        yield from aligned(self._rows(), right=(1, 2))
        if self.machine:
            yield f"times are for: {self.machine}"
        if self.size_hints:
            yield self.size_hints
        yield from (*self.notes, *self.warnings)

    def _rows(self) -> list[tuple[str, ...]]:
        step, exposed = ([f"{ms:.2f}" for ms in pair] for pair in (self.step_ms, self.exposed_ms))
        bounds = [] if self.limit_bytes is None else [self.limit_bytes]
        before, after, peak, *limit = sizes_text(*self.peak_bytes, self.reference_bytes, *bounds)
        most, forced = self.figure("max_run"), self.figure("forced_run")
        run = "" if most is None else f"bound {most}, dependencies force {forced}"
        rows: list[tuple[str, ...]] = [
            ("", "before", "after", ""),
            ("step, ms", *step, f"lower bound {self.bound_ms:.2f}, {self.chosen}"),
            ("exposed, ms", *exposed, ""),
            ("busy, ms", "", f"{self.compute_ms:.2f}", self._others()),
            ("peak", before, after, ", bound ".join([f"unreordered {peak}", *limit])),
            ("largest block", "", size_text(self.largest[1]), f"of {self.largest[0]}"),
            ("longest compute run", *map(str, self.longest_run), run),
        ]
        if self.bounds_cost_ms:
            rows.append(("bounds cost, ms", "", f"{self.bounds_cost_ms:.2f}", ""))
        if self.rank_order_ms is not None:
            text = "what all-to-alls and their sums take longer than rings"
            rows.append(("sums in rank order, ms", "", f"{self.rank_order_ms:.2f}", text))
        if self.optimizer_ms is not None:
            adds, kernels, collectives = self.optimizer_ms
            text = f"of {kernels:.2f} of kernels and {collectives:.2f} of collectives"
            rows.append(("optimizer adds, ms", "", f"{adds:.2f}", text))
        if self.caps is not None and (self.caps.caps_mb or self.caps.chosen.planner):
            rows.append(("byte cap, MiB", "", "", self.caps.summary()))
        return [*rows, *((bound.policy, "", "", bound.text) for bound in self.bounds if bound.text)]

    def _others(self) -> str:
        """Format the time of the streams beside the compute stream."""
        texts = [f"host {self.host_ms:.2f}"] if self.host_ms else []
        texts += [f"group {name} {ms:.2f}" for name, ms in self.group_ms]
        most = max([self.compute_ms, *(ms for _, ms in self.group_ms)])
        bound = "; the host bounds the step" if self.host_ms > most else ""
        return ", ".join(["compute", *texts]) + bound
