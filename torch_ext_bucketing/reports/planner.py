"""Report estimates: the schedule, the search for byte caps, and the kept values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from .base import Record, Report, aligned, size_text, sizes_text, table


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


NamedCaps: TypeAlias = tuple[tuple[str, float], ...]


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
        caps = self.chosen.planner or ", ".join(f"{c:g} for {n}" for n, c in self.caps_mb)
        return f"{caps}, of {len(self.tried)} tried"


@dataclass(frozen=True)
class PolicyReport:
    """How the chosen order meets one policy, given by its ``repr``.

    Subclasses have the bound and the value reached, and ``text`` these in a few words; empty: no
    line in the report. ``warning`` gives the miss and its reason; empty: the bound is kept.
    """

    policy: str
    text: str = ""
    warning: str = ""


@dataclass(frozen=True, kw_only=True)
class PeakReport(PolicyReport):
    """How the order meets ``PeakMemory``."""

    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunReport(PolicyReport):
    """How the order meets ``MaxComputeRun``; dependencies force a run of ``forced_run`` nodes."""

    max_run: int
    forced_run: int


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
    state_bytes: int = 0  # of the peaks, optimizer state among the graph's inputs
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
    # Time that sums in rank order add over rings; None: there are none.
    rank_order_ms: float | None = None
    # The time that norm, clipping and updates add to the step, with their launches by the host;
    # their kernels; and their collectives. None: the graph has none.
    optimizer_ms: tuple[float, float, float] | None = None
    size_hints: str = ""  # values taken for sizes that depend on data
    seconds: float = 0.0  # time of the search

    @property
    def limit_bytes(self) -> int | None:
        """The bound of ``PeakMemory``, or None."""
        return next((b.limit_bytes for b in self.bounds if isinstance(b, PeakReport)), None)

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
        runs = (b for b in self.bounds if isinstance(b, RunReport))
        run = next((f"bound {b.max_run}, dependencies force {b.forced_run}" for b in runs), "")
        rows: list[tuple[str, ...]] = [
            ("", "before", "after", ""),
            ("step, ms", *step, f"lower bound {self.bound_ms:.2f}, {self.chosen}"),
            ("exposed, ms", *exposed, ""),
            ("busy, ms", "", f"{self.compute_ms:.2f}", self._others()),
            ("peak", before, after, ", bound ".join([f"unreordered {peak}", *limit])),
            ("largest block", "", size_text(self.largest[1]), f"of {self.largest[0]}"),
            ("longest compute run", *map(str, self.longest_run), run),
        ]
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


@dataclass(frozen=True)
class KeptUnit:
    """A unit that is kept or gathered again, or a group of activations, saved or recomputed."""

    name: str
    kept: bool
    nbytes: int  # bytes from forward to backward if it is kept
    gather_ms: float  # time of its gathers in backward, or of its recomputation
    # By how much keeping it shortens the step, with all other units as chosen, in the backward
    # order with everything gathered again.
    saved_ms: float
    parameters: int  # number of its parameters that backward reads; 0 for activations
    # Whether a part of each parameter is kept, and a smaller group gathers from it.
    part: bool = False


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of a block's activations that backward reads: saved, parked, or computed again.

    The block has the name of the unit whose parameters it reads.
    """

    name: str
    on_device: int
    on_host: int
    again: int


@dataclass(frozen=True)
class KeepReport(Report):
    """The choice of ``ReshardAfterForward("auto")`` for one graph.

    Times are estimates for forward and backward together, scheduled; bytes are estimates of their
    peak. Pairs: with everything gathered again, and as chosen. Choices are compared by few orders,
    which use all memory under the bound; the schedules that follow may need less.
    """

    derived = ("rewrite",)
    rewrite: ClassVar[str] = "keep gathered"
    bound_bytes: int
    units: tuple[KeptUnit, ...] = ()  # all candidates, in the order of the plan
    step_ms: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    all_peak_bytes: int = 0  # peak with everything kept, in graph order
    # Bytes on each rank outside of the graphs, such as optimizer state; not in ``bound_bytes``.
    state_bytes: int = 0
    measured_bytes: int = 0  # peak of the device in the first step; 0: not measured
    expected_bytes: int = 0  # the peak that was expected of it, once it is measured
    unread: tuple[str, ...] = ()  # units that backward does not read, so that nothing is kept
    # Operators that are never computed again, since their tags do not show that they may run twice
    # (`is_known`), with the number of calls.
    unknown: tuple[tuple[str, int], ...] = ()
    next_ms: float = 0.0  # time that one more GiB would save, by keeping ``next_units``, too
    next_units: tuple[str, ...] = ()
    # Bound in bytes, step in ms, peak in bytes and number of units kept; on request.
    curve: tuple[tuple[int, float, int, int], ...] = ()
    tried: int = 0  # number of choices that were scheduled
    host_bound_bytes: int = 0  # bound on activations in host memory; 0: none may be there
    host_bytes: int = 0  # pinned memory that the ``parked`` ones take
    parked: int = 0
    blocks: tuple[BlockBytes, ...] = ()  # activations by block, in forward's order
    warning: str = ""  # why nothing is kept, or why the bound is missed
    size_hints: str = ""  # values taken for sizes that depend on data
    machine: str = ""  # the machine of the cost model, and its ranks per node
    seconds: float = 0.0  # time of the search, the model of the graph included

    @property
    def kept(self) -> tuple[str, ...]:
        """Names of the kept units."""
        return tuple(u.name for u in self.units if u.kept)

    @property
    def shown(self) -> list[KeptUnit]:
        """The units of a table: parts that are not kept are left out."""
        return [u for u in self.units if u.kept or not u.part]

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a few lines, and a table of the units."""
        kept_units = [u for u in self.units if u.kept]
        gathers = [u.kept for u in self.units if u.parameters and not u.part]
        saves = [u.kept for u in self.units if not u.parameters]
        parts = sum(u.part for u in kept_units)
        further = f", {parts} more in part" if parts else ""
        further += f" and {sum(saves)} of {len(saves)} groups of activations" if saves else ""
        yield (
            f"kept from forward to backward: {sum(gathers)} of {len(gathers)} units{further}, "
            f"{size_text(sum(u.nbytes for u in kept_units))}, under a bound of "
            f"{size_text(self.bound_bytes)}"
        )
        yield (
            f"  step {self.step_ms[0]:.2f} ms -> {self.step_ms[1]:.2f} ms, "
            f"peak {size_text(self.peak_bytes[0])} -> {size_text(self.peak_bytes[1])} "
            f"({size_text(self.all_peak_bytes)} with all kept)"
        )
        if self.host_bound_bytes:
            held, bound = size_text(self.host_bytes), size_text(self.host_bound_bytes)
            yield f"  in host memory: {self.parked} activations, {held}, of {bound} allowed"
            yield from (f"  {line}" for line in table(BLOCK, self.blocks, join="activations of"))
        if self.measured_bytes:
            yield (
                f"  first step on the device: {size_text(self.measured_bytes)}, "
                f"{self.measured_bytes / self.expected_bytes:.3f} of what was expected"
            )
        if not all(u.kept or u.part for u in self.units):
            by_keeping = f", by keeping {', '.join(self.next_units)}" if self.next_units else ""
            yield f"  one GiB more would save {self.next_ms:.2f} ms{by_keeping}"
        if self.units:
            rows = table(UNIT, self.shown, join="unit")
            yield from (f"  {line}" for line in rows)
        if self.unread:
            yield f"  backward reads nothing of {', '.join(self.unread)}"
        if self.unknown:
            calls = ", ".join(f"{name} ({number})" for name, number in self.unknown)
            yield f"  never computed again, as no tag shows that they may be: {calls}"
        yield from (f"  {text}" for text in (self.size_hints, self.warning) if text)


UNIT: dict[str, Callable[[KeptUnit], object]] = {
    "unit": lambda u: u.name,
    "": lambda u: "kept" if u.kept else "gathered again" if u.parameters else "computed again",
    "held:b": lambda u: u.nbytes,
    "again:ms": lambda u: u.gather_ms,
    "saves:ms": lambda u: u.saved_ms,
    "parameters:n": lambda u: u.parameters,
}
"""The columns of a table of units."""
BLOCK: dict[str, Callable[[BlockBytes], object]] = {
    "activations of": lambda b: b.name,
    "on the device:b": lambda b: b.on_device,
    "on the host:b": lambda b: b.on_host,
    "computed again:b": lambda b: b.again,
}
"""The columns of a table of blocks."""
