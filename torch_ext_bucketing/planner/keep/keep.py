"""What stays from forward to backward within a bound on memory: gathered parameters of units, and
activations, which are computed again otherwise.

Keeping a unit saves its gathers in backward and holds their bytes from its last use in forward to
its first in backward. What it saves depends on all others: a gather that runs under computation
saves nothing, until so many of the others are kept that the stream is free anyway; and what is kept
takes the room in which other gathers are prefetched. So choices are compared by schedules of both
halves. The first ones take units by the time of their gathers for the bytes and the time that they
are held (:mod:`.planner.keep.held`), once as many as fit, once a little less and more. Activations
are taken by the time that computing them again takes for their bytes: it is never hidden, and at
the start of backward, where most is live, all of them are there. Either they come first or the
parameters do. Parameters that are kept in part, to be gathered in a smaller group, come before
those that are kept whole: they save most of the time for little memory. Then, as far as the size of
the graph allows, the neighbours of the best ones are looked at; and the fastest that keeps the
bound is taken.

Nothing depends on clocks or hash order: the same graph gives the same choice on every rank.
"""

from __future__ import annotations

import bisect
import operator
import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch.fx as fx

from ..._gc import paused_gc
from ...bucketing.plan import BucketPlanner
from ...fsdp.units import Units
from ...graph.size_hints import GivenHints, SizeHints
from ...reports.keep import KeepReport, KeptUnit
from ...reports.text import size_text
from ...rewrites.reshard_to import Smaller
from ..cost.cost import Costs
from ..cost.machine import H100, Machine
from ..schedule.memory import within
from ..schedule.model import Model
from ..schedule.overlap import Overlap
from ..schedule.policy import Policy, policies_of
from ..schedule.scheduler import rank, schedule_model
from ..schedule.timeline import step_ms
from .held import HeldUnits
from .partitioned import PartitionedModel

_Set: TypeAlias = frozenset[int]
_GIB = 2**30

_NODES = 12_000
_SMALL_NODES = 30_000
"""How many nodes may be scheduled, over all choices looked at, and how many of small graphs."""
_FEW = 2
"""At least so many choices are scheduled, and no more of a large graph."""
_FAR = 1.1
"""Where an order that misses the bound is so many times as fast as the best that keeps it, orders
are made under a lower one."""
_SCHEDULED = 120
"""At most so many choices are scheduled."""
_MANY = 32
"""Of more units not each is tried in what room is left, and no two are exchanged."""
_SMALL = 500
"""Up to so many nodes a graph is a small one."""
DEFAULT_POLICIES: tuple[Policy, ...] = (Overlap(),)
CURVE = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0)
"""The bounds of a curve, in parts of the peak with everything gathered again."""


@dataclass(frozen=True)
class Outcome:
    """The schedules of forward and backward that a choice leads to.

    Args:
        kept: places of the units.
        step_ms: of both halves together.
        peak_bytes: the larger of both.
        above: bytes of the peak above the bound.
        misses: by how much other bounds are missed, as parts of them.
    """

    kept: frozenset[int]
    step_ms: float
    peak_bytes: int
    above: int
    misses: float

    @property
    def rank(self) -> tuple[float, ...]:
        """The least is the best; of equals the one that gathers less."""
        return self.above, *rank(self.misses, self.step_ms, -len(self.kept))


_rank = operator.attrgetter("rank")


class KeepPlanner:
    """Chooses what stays gathered in one graph, for any number of bounds.

    Args:
        graph: a tagged joint graph. It is only read.
        units: which parameters are kept or not together.
        policies: what bounds and guides the orders of both halves.
        machine: what the cost model times nodes for.
        size_hints: as of :func:`.backend`.
        planner: see :class:`.PartitionedModel`.
        rank_order: see :func:`.merged_model`.
        activations: whether to choose which activations are kept, too.
        smaller: a group in which backward may gather what is kept in part.

    Raises:
        TypeError: as of :func:`.schedule`.
        ValueError: the graph is not in topological order; else as of :func:`.schedule`.
    """

    def __init__(
        self,
        graph: fx.Graph,
        units: Units,
        policies: Policy | Iterable[Policy] = DEFAULT_POLICIES,
        machine: Machine = H100,
        size_hints: SizeHints | GivenHints = None,
        planner: BucketPlanner | None = None,
        rank_order: bool = False,
        activations: bool = False,
        smaller: Smaller | None = None,
    ) -> None:
        clock = time.perf_counter()
        self.hints = SizeHints.of(size_hints)
        self.machine = machine
        self._policies = policies_of(policies)
        with paused_gc():
            costs = Costs(machine, self.hints)
            self.partitioned = PartitionedModel(
                graph, costs, units, planner, rank_order, activations, smaller
            )
            self._held = HeldUnits(self.partitioned)
        self.candidates = [k for k, unit in enumerate(self.partitioned.units) if unit.held]
        gathers = [k for k in self.candidates if self.partitioned.units[k].starts]
        others = [k for k in self.candidates if not self.partitioned.units[k].starts]
        gathers.sort(key=self._worth, reverse=True)
        others.sort(key=self._density, reverse=True)
        parts = [k for k in gathers if k in self.partitioned.parts]
        whole = [k for k in gathers if k not in self.partitioned.parts]
        self._rankings = [*dict.fromkeys([(*others, *whole), (*whole, *others)])]
        self._with_parts = [*dict.fromkeys([(*parts, *others, *whole), (*others, *parts, *whole)])]
        self._largest = max((self.partitioned.units[k].nbytes for k in self.candidates), default=0)
        # Ranks may differ in what pads and cuts their shards.
        halves = (self.partitioned.forward, self.partitioned.backward)
        self._size = sum(
            len(h) - sum(n in h.graph.shard_side.nodes for n in h.dependencies.nodes)
            for h in halves
        )
        self._distinct = self.partitioned.distinct
        self._outcomes: dict[tuple[_Set, int], Outcome] = {}
        self._forward: tuple[Sequence[int], float, float] | None = None
        self._order: Sequence[int] = ()  # of backward with everything gathered again
        self._nothing_bytes = self._held.peak_bytes(())
        self._at_start = self.partitioned.backward.liveness.at_start
        self.tried = 0
        self.seconds = time.perf_counter() - clock

    @property
    def reference_bytes(self) -> int:
        """The peak with everything gathered again, merged and in the order of the graph."""
        return self._nothing_bytes

    def choose(self, limit: int) -> Outcome:
        """The fastest choice that keeps the bound, in bytes; where none does, that of the smallest
        peak."""
        with paused_gc():
            best = self._choose(limit, self._rankings)
            if self.partitioned.parts:  # a choice more never makes a step longer
                best = min(best, self._choose(limit, self._with_parts), key=_rank)
            return best

    def scheduled(self, kept: Collection[int], limit: int) -> Outcome:
        """The schedules of a choice under a bound in bytes."""
        key = (self._distinct(kept), limit)
        if key not in self._outcomes:
            self._outcomes[key] = self._scheduled(*key)
        return self._outcomes[key]

    def _scheduled(self, kept: _Set, limit: int) -> Outcome:
        self.tried += 1
        forward, backward = self.partitioned.models(kept)
        first = self._known_forward(forward, limit) or self._schedule(0, forward, limit)
        second = self._schedule(1, backward, limit)
        peak = max(first[1], second[1])
        misses = first[2] + second[2]
        return Outcome(kept, first[0] + second[0], peak, max(0, peak - limit), misses)

    def _known_forward(self, model: Model, limit: int) -> tuple[float, int, float] | None:
        """Forward in the order that was found for it before, where what is kept leaves room."""
        if self._forward is None:
            return None
        order, step, misses = self._forward
        peak = model.liveness.peak(order)
        step = step_ms(model, order) if model.ms != self.partitioned.forward.ms else step
        return (step, peak, misses) if peak <= limit else None

    def _schedule(self, half: int, model: Model, limit: int) -> tuple[float, int, float]:
        reference = model.liveness.peak(range(len(model)))
        policies = within(self._policies, limit, reference)
        bound = limit
        report, order, _ = schedule_model(model, policies, reference, quick=True)
        if _FAR * min(a[1] for a in report.alternatives) < report.step_ms[1]:
            lower = limit - 2 * self._largest
            tighter = within(policies, lower, reference)
            again, other, _ = schedule_model(model, tighter, reference, quick=True)
            if again.peak_bytes[1] <= limit and again.step_ms[1] < report.step_ms[1]:
                bound, report, order = lower, again, other
        above = max(0, report.peak_bytes[1] - bound) / max(1, bound)
        misses = max(0.0, report.misses - above)
        if model is self.partitioned.backward:
            self._order = order
        if half == 0 and self._forward is None and report.peak_bytes[1] <= limit:
            self._forward = (order, report.step_ms[1], misses)
        return report.step_ms[1], report.peak_bytes[1], misses

    # --- the search ------------------------------------------------------------------------------

    def _choose(self, limit: int, rankings: Sequence[Sequence[int]]) -> Outcome:
        nodes = _SMALL_NODES if self._size <= _SMALL else _NODES
        left = most = max(_FEW, min(_SCHEDULED, nodes // max(1, self._size)))
        # What fits, what leaves room for one more gather, and what fits only if an order needs less
        # than that of the graph, which is known afterwards.
        rooms = [limit, limit - self._largest, limit + self._largest][:most]
        rooms = rooms[:1] if most == _FEW and len(rankings) > 1 else rooms
        least = frozenset[int]() if self._fits(frozenset(), limit) else self._least()
        found = [self._fitting(room, ranked, least) for room in rooms for ranked in rankings]
        if len(rankings) > 1:  # with all the rest of the room for prefetching
            found.insert(1, frozenset(k for k in found[0] if not self.partitioned.units[k].starts))
        firsts = dict.fromkeys(map(self._distinct, [(), *found]))
        seen = {kept: self.scheduled(kept, limit) for kept in firsts}
        left -= len(seen) - 1
        best = min(seen.values(), key=_rank)
        unexplored = dict(seen) if most > _FEW else {}
        while unexplored:
            here = min(unexplored.values(), key=_rank)
            for kept in self._near(here.kept, limit + self._largest, rankings[0]):
                if kept in seen:
                    continue
                if left <= 0:
                    return best
                left -= 1
                seen[kept] = unexplored[kept] = self.scheduled(kept, limit)
                if seen[kept].rank < best.rank:
                    best = seen[kept]
                    break
            else:
                del unexplored[here.kept]
        return best

    def _worth(self, k: int) -> tuple[float, int]:
        """Time of a unit's gathers for the bytes and the time that it holds them."""
        cost = self.partitioned.units[k].nbytes * max(self._held.held_ms[k], 1e-6)
        return self._held.again_ms[k] / cost, -k

    def _density(self, k: int) -> tuple[float, int]:
        """Time that activations take to be computed again for their bytes; the last ones first."""
        return round(self._held.again_ms[k] / self.partitioned.units[k].nbytes, 15), k

    def _fits(self, kept: _Set, room: int) -> bool:
        """Whether a choice fits in the order of the graph."""
        if not any(self.partitioned.units[k].starts for k in kept):
            return self._held.peak_bytes(kept) <= room
        more = sum(self.partitioned.units[k].nbytes for k in self._distinct(kept))
        if self._at_start + more > room and len(self._rankings) == 1:
            return False  # backward begins with as much
        return self._nothing_bytes + more <= room or self._held.peak_bytes(kept) <= room

    def _fitting(self, room: int, ranked: Sequence[int], kept: _Set = frozenset()) -> _Set:
        """``kept`` and what fits beside it, the first of ``ranked`` first."""
        left = [k for k in ranked if k not in kept]
        while left and not self._fits(kept.union(left), room):
            # How many of the first fit together; the next one does not, and of many units no other
            # is looked at that holds as much.
            most = bisect.bisect(
                range(1, len(left)), False, key=lambda n: not self._fits(kept.union(left[:n]), room)
            )
            kept = kept.union(left[:most])
            nbytes = self.partitioned.units[left[most]].nbytes
            many = len(left) > _MANY
            left = left[most + 1 :]
            if many:
                left = [k for k in left if self.partitioned.units[k].nbytes < nbytes]
        return kept.union(left)

    def _least(self) -> _Set:
        """Activations whose making again takes more than they hold, in the order of the graph."""
        others = [k for k in self._rankings[0] if not self.partitioned.units[k].starts]
        kept, peak = frozenset[int](), self._nothing_bytes
        each = 1 + len(others) // _MANY
        for first in range(0, len(others), each):
            more = kept.union(others[first : first + each])
            nbytes = self._held.peak_bytes(more)
            if nbytes < peak:
                kept, peak = more, nbytes
        return kept

    def _near(self, kept: _Set, room: int, ranked: Sequence[int]) -> Iterator[_Set]:
        """Choices that fit with one unit more, another, or less."""
        out = [k for k in ranked if k not in kept]
        inside = [k for k in reversed(ranked) if k in kept]
        near = [kept | {k} for k in out]
        if len(ranked) <= _MANY:
            near += [kept - {k} | {other} for k in inside for other in out]
        near += [kept - {k} for k in inside]
        whole = (
            (k, self.partitioned.units[k].whole) for k in ranked if k in self.partitioned.parts
        )
        near += [kept - {k} | {part} for part, k in whole if k in kept]
        return (self._distinct(other) for other in near if self._fits(other, room))

    # --- what is told ----------------------------------------------------------------------------

    def report(
        self, limit: int, curve: bool = False, more: int = _GIB
    ) -> tuple[Outcome, KeepReport]:
        """The choice for a bound in bytes, and what to tell of it.

        Args:
            limit: the bound.
            curve: whether to choose for the bounds of :data:`CURVE`, too.
            more: bytes of which is said what they would buy.
        """
        clock = time.perf_counter()
        before = self.tried
        nothing = self.scheduled((), limit)
        chosen = self.choose(limit)
        kept = chosen.kept
        larger = limit + more
        with paused_gc():
            next_kept = self._distinct(self._fitting(larger, self._with_parts[0], kept))
            next_ms = 0.0
            if next_kept != kept:
                next_ms = max(0.0, chosen.step_ms - self.scheduled(next_kept, larger).step_ms)
            less_ms = None
            if kept and limit > more:
                room = limit - more
                tried = (self._fitting(room, self._with_parts[0]), frozenset[int]())
                fit = [o for less in tried if not (o := self.scheduled(less, room)).above]
                less_ms = max(0.0, fit[0].step_ms - chosen.step_ms) if fit else None
            units = self._units(kept)
        named = self.partitioned.units
        if next_ms <= 0.0:
            next_kept = kept
        drawn = self.curve() if curve else ()
        return chosen, KeepReport(
            bound_bytes=limit,
            units=units,
            step_ms=(nothing.step_ms, chosen.step_ms),
            peak_bytes=(nothing.peak_bytes, chosen.peak_bytes),
            all_peak_bytes=self._held.peak_bytes(self.candidates),
            unread=tuple(u.name for u in named if not u.held),
            next_ms=next_ms,
            next_units=tuple(named[k].name for k in sorted(next_kept - kept)),
            less_ms=less_ms,
            curve=tuple((b, o.step_ms, o.peak_bytes, len(o.kept)) for b, o in drawn),
            tried=self.tried - before,
            warning=self._warning(chosen, limit),
            size_hints=self.hints.to_text(),
            machine=self.machine.describe(),
            seconds=self.seconds + time.perf_counter() - clock,
            model_seconds=self.seconds,
        )

    def curve(self, bounds: Sequence[int] | None = None) -> tuple[tuple[int, Outcome], ...]:
        """The choices for several bounds in bytes, ascending; None: those of :data:`CURVE`. What
        was found for a smaller bound is good for a larger one, too, so more memory is never
        slower."""
        given = bounds or [int(part * self.reference_bytes) for part in CURVE]
        found: list[tuple[int, Outcome]] = []
        for bound in sorted(given):
            outcome = self.choose(bound)
            if found:
                last = found[-1][1]
                above = max(0, last.peak_bytes - bound)
                outcome = min(outcome, replace(last, above=above), key=lambda o: o.rank)
            found.append((bound, outcome))
        return tuple(found)

    def _units(self, kept: _Set) -> tuple[KeptUnit, ...]:
        now, again_ms = self._backward_ms(kept), self._held.again_ms
        return tuple(
            KeptUnit(
                unit.name,
                k in kept,
                unit.nbytes,
                again_ms[k],
                abs(self._backward_ms(kept ^ {k}) - now) if unit.starts else again_ms[k],
                len(unit.fqns),
                unit.whole >= 0,
            )
            for k in self.candidates
            for unit in [self.partitioned.units[k]]
        )

    def _backward_ms(self, kept: _Set) -> float:
        """Time of backward in the order with everything gathered again, without some gathers."""
        stay = set(self.partitioned.places_without(kept))
        return step_ms(self.partitioned.in_place(kept), [i for i in self._order if i in stay])

    def _warning(self, chosen: Outcome, limit: int) -> str:
        bound = f"the bound of {size_text(limit)}"
        if chosen.above:
            return (
                f"{len(chosen.kept) or 'nothing'} is kept: the smallest peak found is "
                f"{size_text(chosen.peak_bytes)}, {size_text(chosen.above)} above {bound}; before "
                f"backward begins {size_text(self._at_start)} are there with nothing kept"
            )
        if chosen.kept or not self.candidates:
            return ""
        peaks = {k: self._held.peak_bytes((k,)) for k in self.candidates}
        k = min(peaks, key=lambda k: (peaks[k], k))
        unit = self.partitioned.units[k]
        if peaks[k] > limit:
            return (
                f"nothing is kept: the cheapest unit, {unit.name}, needs a peak of "
                f"{size_text(peaks[k])}, {size_text(peaks[k] - limit)} above {bound}"
            )
        return f"nothing is kept: no unit makes the step shorter under {bound}"


_BLOCK = re.compile(r"(.*?\.?\d+)\.")


def block_units(fqns: Iterable[str]) -> Units:
    """Units by names alone: what is below the first number in a name is one unit (``layers.3``),
    and each other module (``tok_embeddings``, ``norm``).

    Args:
        fqns: all parameters, in the order of use.
    """

    def name_of(fqn: str) -> str:
        found = _BLOCK.match(fqn)
        return found.group(1) if found else fqn.rpartition(".")[0] or fqn

    return Units.of([(name,) for name in dict.fromkeys(map(name_of, fqns))])
