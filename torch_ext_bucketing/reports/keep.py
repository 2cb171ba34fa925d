"""Report the units and activations that stay from forward to backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from .base import Report, size_text, table


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
    peak. Pairs: with everything gathered again, and as chosen.
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
    unread: tuple[str, ...] = ()  # units that backward does not read, so that nothing is kept
    # Operators that are never computed again, since their tags do not show that they may run twice
    # (`is_known`), with the number of calls.
    unknown: tuple[tuple[str, int], ...] = ()
    next_ms: float = 0.0  # time that one more GiB would save, by keeping ``next_units``, too
    next_units: tuple[str, ...] = ()
    # Time that one GiB less would cost; None: no choice found keeps that bound.
    less_ms: float | None = None
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

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a few lines, and a table of the units."""
        kept = [u for u in self.units if u.kept]
        gathers = [u.kept for u in self.units if u.parameters and not u.part]
        saves = [u.kept for u in self.units if not u.parameters]
        parts = sum(u.part for u in kept)
        more = f", {parts} more in part" if parts else ""
        more += f" and {sum(saves)} of {len(saves)} groups of activations" if saves else ""
        yield (
            f"kept from forward to backward: {sum(gathers)} of {len(gathers)} units{more}, "
            f"{size_text(sum(u.nbytes for u in kept))}, under a bound of "
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
            yield from (
                f"  {line}" for line in table(_BLOCK, self.blocks, (1, 2, 3), join="activations of")
            )
        if self.measured_bytes:
            expected = self.peak_bytes[1] + self.state_bytes
            yield (
                f"  first step on the device: {size_text(self.measured_bytes)}, "
                f"{self.measured_bytes / expected:.3f} of what was expected"
            )
        if not all(u.kept or u.part for u in self.units):
            more = f", by keeping {', '.join(self.next_units)}" if self.next_units else ""
            yield f"  one GiB more would save {self.next_ms:.2f} ms{more}"
        if kept:
            less = "be too little" if self.less_ms is None else f"cost {self.less_ms:.2f} ms"
            yield f"  one GiB less would {less}"
        if self.units:
            shown = [u for u in self.units if u.kept or not u.part]
            rows = table(_UNIT, shown, right=(2, 3, 4, 5), join="unit")
            yield from (f"  {line}" for line in rows)
        if self.unread:
            yield f"  backward reads nothing of {', '.join(self.unread)}"
        if self.unknown:
            calls = ", ".join(f"{name} ({number})" for name, number in self.unknown)
            yield f"  never computed again, as no tag shows that they may be: {calls}"
        yield from (f"  {text}" for text in (self.size_hints, self.warning) if text)


_UNIT: dict[str, Callable[[KeptUnit], object]] = {
    "unit": lambda u: u.name,
    "": lambda u: "kept" if u.kept else "gathered again" if u.parameters else "computed again",
    "held": lambda u: size_text(u.nbytes),
    "again, ms": lambda u: f"{u.gather_ms:.3f}",
    "saves, ms": lambda u: f"{u.saved_ms:.3f}",
    "parameters": lambda u: u.parameters,
}
_BLOCK: dict[str, Callable[[BlockBytes], object]] = {
    "activations of": lambda b: b.name,
    "on the device": lambda b: size_text(b.on_device),
    "on the host": lambda b: size_text(b.on_host),
    "computed again": lambda b: size_text(b.again),
}
