"""Choose the units and activations that stay in memory from forward to backward under a bound.

Keeping a unit's gathered parameters saves its all-gathers in backward and holds their bytes from
the last use in forward to the first in backward. The time saved depends on the other choices: a
gather that is hidden under computation saves nothing until enough others are kept; and kept bytes
leave less room for prefetching. So choices are compared by schedules of both halves.

A choice is a number of keepables of each kind. Those of equal blocks are one kind: equal operators,
bytes and times. So the search is as long for 126 layers as for 8. It has three steps:

- Fill the bound from rankings that differ in the number of gathers before the first activation,
  and look for the best number. Gathers are ranked by time per byte and time held
  (:mod:`.planner.keep.held`), activations by the time to recompute them per byte: recomputation is
  never hidden, and at the start of backward, where the peak is, all of them are live. Parts,
  gathered again in a smaller group, come before whole units: they save most of the time for little
  memory.
- Fill a little less of the bound, and a little more, from the best of these rankings.
- Change the number of one kind, by all, half or one, and make room or fill it for that.

Backward's time in the order found for nothing kept, with forward's to write what is kept, ranks the
choices, and whole schedules confirm the first ones. A choice is given up once its step must be
longer than the best one. Ties and ranks don't depend on clocks or hash order, so all ranks choose
alike.
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from ..._torch import paused_gc
from ...graph.nodes import pinned_bytes
from ...reports.planner import KeepReport
from ..schedule.list_schedule import ROUNDING
from ..schedule.model import Model
from ..schedule.orders import rank, schedule_model, schedule_within
from ..schedule.policy import Overlap, Policy, policies_of, within
from ..schedule.timeline import step_ms
from .held import HeldUnits
from .outcome import Outcome, units_of, warning_of
from .partitioned import PartitionedModel

_Set: TypeAlias = frozenset[int]
_GIB = 2**30

# Choices scheduled for a bound: as many as have _NODES nodes together, from _FEW to _SCHEDULED. A
# large graph takes the fewest, so planning time is linear in its nodes.
_NODES = 15_000
_FEW = 12
_SCHEDULED = 120
_SHARES = 4  # of gathers, in the first rankings
_MANY = 32  # with more keepables, don't try each in the remaining room

# If an order that misses the bound is faster than the best that keeps it by this factor, orders
# under a lower bound are tried.
_FASTER = 1.1

DEFAULT_POLICIES: tuple[Policy, ...] = (Overlap(),)
CURVE = (1.0, 1.05, 1.1, 1.25, 1.5, 2.0)
"""Bounds of a curve, relative to the peak with nothing kept."""


class KeepPlanner:
    """Choose the keepables that stay in one graph, for any number of bounds.

    ``policies`` order both halves; ``host_bytes`` bounds activations in host memory.

    Attributes:
        candidates: indices of keepables that are worth keeping.
        reference_bytes: peak with nothing kept, collectives merged, in graph order.
        tried: number of choices that were scheduled.
    """

    def __init__(
        self,
        partitioned: PartitionedModel,
        policies: Policy | Iterable[Policy] = DEFAULT_POLICIES,
        host_bytes: int = 0,
    ) -> None:
        self._host_bytes = host_bytes
        clock = time.perf_counter()
        self.partitioned = partitioned
        self._keepables = keepables = partitioned.keepables
        self._policies = policies_of(policies)
        self._held = HeldUnits(partitioned)
        self.candidates = [k for k, one in enumerate(keepables) if one.held]
        gathers = [k for k in self.candidates if keepables[k].starts]
        others = [k for k in self.candidates if not keepables[k].starts]
        gathers.sort(key=self._worth, reverse=True)
        others.sort(key=self._density, reverse=True)
        parts = [k for k in gathers if k in partitioned.parts]
        whole = [k for k in gathers if k not in partitioned.parts]
        self._ranked = (*parts, *others, *whole)
        # With parts and without.
        self._others, self._gathers = others, {(*parts, *whole): None, tuple(whole): None}
        self._largest = max((keepables[k].nbytes for k in self.candidates), default=0)
        # Nodes that pad and cut shards are not counted, nor views: ranks may differ in them.
        size = sum(
            not view and node not in half.graph.shard_side.nodes
            for half in (partitioned.forward, partitioned.backward)
            for node, view in zip(half.dependencies.nodes, half.view, strict=True)
        )
        self._most = max(_FEW, min(_SCHEDULED, _NODES // max(1, size)))
        self._distinct = partitioned.distinct
        self._kinds = self._find_kinds()
        self._kind_of = {k: i for i, kind in enumerate(self._kinds) for k in kind}
        self._outcomes: dict[tuple[_Set, int, _Set], Outcome] = {}
        self._forward: tuple[Sequence[int], float, float] | None = None
        self._forward_ms = 0.0  # the shortest with nothing kept, once that is scheduled
        self._order: Sequence[int] = ()  # of backward with nothing kept
        self.reference_bytes = self._held.peak_bytes(())
        self._at_start = partitioned.backward.liveness.at_start
        self.tried = 0
        self._seconds = partitioned.seconds + time.perf_counter() - clock

    def choose(self, limit: int) -> Outcome:
        """Return the fastest choice within ``limit`` bytes, or the one with the smallest peak."""
        with paused_gc():
            return self._with_parked(self._choose(limit), limit)

    def _useful_ms(self, outcomes: Iterable[Outcome]) -> float:
        """Return the longest step of a choice that may be better than all ``outcomes``."""
        best = min(outcomes, default=None)
        return math.inf if best is None or best.above or best.misses else best.step_ms

    def scheduled(
        self,
        kept: Collection[int],
        limit: int,
        parked: Collection[int] = (),
        at_most_ms: float = math.inf,
    ) -> Outcome:
        """Schedule both halves with a choice under a bound in bytes, once; park saved storages.

        A step that is longer than ``at_most_ms`` is infinite in the outcome.
        """
        kept = self._distinct(kept)
        parkable = self.partitioned.could_park(kept) if parked else ()
        key = kept, limit, frozenset(s for s in parked if s in parkable)
        if key not in self._outcomes:
            # Most choices are given up here, before their kernels are found.
            if not parked and at_most_ms < math.inf and self._least_ms(kept) > at_most_ms:
                return Outcome(kept, math.inf, 0, 0, math.inf)
            outcome = self._scheduled(*key, at_most_ms)
            if math.isinf(outcome.step_ms):
                return outcome
            self._outcomes[key] = outcome
        return self._outcomes[key]

    def _scheduled(self, kept: _Set, limit: int, parked: _Set, at_most_ms: float) -> Outcome:
        """Schedule both halves of a choice under a bound."""
        # A choice mostly changes backward: forward's order stays while its peak is under the bound.
        self.tried += 1
        second = None
        if parked:
            forward, backward = self.partitioned.with_parked(kept, parked)
        elif at_most_ms < math.inf:
            # Many choices are given up for backward alone.
            rest_ms = (at_most_ms - self._forward_ms) * ROUNDING
            backward = self.partitioned.half(1, kept)
            second = self._schedule(1, backward, limit, rest_ms)
            if second is None:
                return Outcome(kept, math.inf, 0, 0, math.inf)
            forward = self.partitioned.half(0, kept)
        else:
            forward, backward = self.partitioned.models(kept)
        first = None if parked else self._known_forward(forward, limit)
        first = first or self._schedule(0, forward, limit, store=not parked)
        assert first is not None
        second = second or self._schedule(1, backward, limit, (at_most_ms - first[0]) * ROUNDING)
        if not kept:
            self._forward_ms = min(first[0], self._forward_ms or first[0])
        if second is None or first[0] + second[0] > at_most_ms * ROUNDING:
            return Outcome(kept, math.inf, 0, 0, math.inf, parked)
        peak = max(first[1], second[1])
        misses = first[2] + second[2]
        nbytes = sum(pinned_bytes(forward.liveness.size[s]) for s in parked)
        above = max(0, peak - limit)
        return Outcome(kept, first[0] + second[0], peak, above, misses, parked, nbytes)

    def _least_ms(self, kept: _Set) -> float:
        """Return the least milliseconds of a step with a choice, in any order."""
        # Forward has the work of nothing kept, and writes what is kept.
        forward_ms = self._forward_ms + self._write_ms(kept)
        return (forward_ms + self.partitioned.least_ms(kept)) / ROUNDING

    def _known_forward(
        self, model: Model, limit: int
    ) -> tuple[float, int, float, Sequence[int]] | None:
        """Return forward's step in ms, peak, misses and order, as found before; None: no room."""
        if self._forward is None:
            return None
        order, step, misses = self._forward
        peak = model.liveness.peak(order)
        step = step_ms(model, order) if model.ms != self.partitioned.forward.ms else step
        return (step, peak, misses, order) if peak <= limit else None

    def _schedule(
        self, half: int, model: Model, limit: int, at_most_ms: float = math.inf, store: bool = True
    ) -> tuple[float, int, float, Sequence[int]] | None:
        """Return a half's step, peak, misses and order; None: it takes more than ``at_most_ms``."""
        reference = max(model.liveness.own_profile, default=model.liveness.at_start)
        policies = within(self._policies, limit, reference)
        bound = limit
        made = schedule_within(at_most_ms, model, policies, reference, quick=True)
        if made is None:
            return None
        if made.report.misses and at_most_ms < math.inf:  # a longer order may keep the bound
            made = schedule_model(model, policies, reference, quick=True)
        report, order, _ = made
        if _FASTER * min(a[1] for a in report.alternatives) < report.step_ms[1]:
            lower = limit - 2 * self._largest
            tighter = within(policies, lower, reference)
            again = schedule_within(report.step_ms[1], model, tighter, reference, quick=True)
            if (
                again is not None
                and again.report.peak_bytes[1] <= limit
                and again.report.step_ms[1] < report.step_ms[1]
            ):
                bound, report, order = lower, again.report, again.order
        above = max(0, report.peak_bytes[1] - bound) / max(1, bound)
        misses = max(0.0, report.misses - above)
        if model is self.partitioned.backward:
            self._order = order
        if half == 0 and store and self._forward is None and report.peak_bytes[1] <= limit:
            self._forward = (order, report.step_ms[1], misses)
        return report.step_ms[1], report.peak_bytes[1], misses, order

    # --- the search ------------------------------------------------------------------------------

    def _find_kinds(self) -> list[list[int]]:
        """Group the candidates by operators, bytes and times, in graph order; names don't count."""
        costs, graph = self.partitioned.costs, self.partitioned.forward.graph
        side = graph.shard_side.nodes  # ranks may differ in these

        def kind_of(k: int) -> tuple[Any, ...]:
            one = self._keepables[k]
            chain = (n for n in one.chains or one.starts if n not in side)
            nodes = tuple((str(n.target), costs.result_bytes(n)) for n in chain)
            return (
                bool(one.starts),
                one.whole >= 0,
                one.nbytes,
                round(self._held.again_ms[k], 9),
                nodes,
            )

        kinds: dict[tuple[Any, ...], list[int]] = {}
        for k in self.candidates:
            kinds.setdefault(kind_of(k), []).append(k)
        return list(kinds.values())

    def _choose(self, limit: int) -> Outcome:
        least = frozenset[int]() if self._fits(frozenset(), limit) else self._least()
        seen = dict[_Set, Outcome]()
        most = self.tried + self._most  # those given up at once don't count

        def schedule(kept: Iterable[_Set], spared: int = 0) -> None:
            for one in kept:
                if self.tried >= most - spared:
                    break
                if one not in seen:
                    # One that exceeds the bound in the graph's order shows what other orders save.
                    fits = self._fits(one, limit)
                    useful_ms = self._useful_ms(seen.values()) if fits else math.inf
                    seen[one] = self.scheduled(one, limit, at_most_ms=useful_ms)

        schedule([frozenset(), self._distinct(least)])
        by_choice = dict[_Set, tuple[tuple[float, int], Sequence[int]]]()
        for first in self._gathers:
            for kept, estimate, ranked in self._fills(limit, first, least):
                by_choice.setdefault(kept, (estimate, ranked))
        fills = sorted(by_choice, key=lambda kept: by_choice[kept][0])
        activations = frozenset(self._others)
        # The best one without its gathers leaves the rest for prefetching.
        schedule([*fills, *(one & activations for one in fills[:1])], 4)
        # Fill less of the bound, for more gathers at a time or because the fastest order missed it;
        # and fill more, since another order may need less memory than the graph's.
        fast = min(seen.values(), key=lambda one: rank(0.0, one.step_ms, one.above))
        _, ranked = by_choice.get(fast.kept, (None, self._ranked))
        less = max(self._largest, fast.above)
        rooms = (limit - less, limit - 2 * less, *(() if fast.above else (limit + less,)))
        others = [self._fitting(limit, ranked, least, len(ranked))]
        others += [self._fitting(room, ranked, least) for room in rooms]
        schedule(map(self._distinct, others))
        missed = [one for one in seen.values() if one.kept and one.above]
        if missed:  # shrink the fastest by what it misses, in the order of the graph
            over = min(missed, key=lambda one: one.step_ms)
            room = self._held.peak_bytes(over.kept) - over.above
            schedule([self._distinct(self._fitting(room, ranked, least))])
        # An order may need less memory than the graph's. If choices missed the bound, it may need
        # as much less as those that kept the bound show.
        held = [self._held.peak_bytes(one.kept) for one in seen.values() if not one.above]
        most_bytes = max([limit, *held]) if missed else limit + self._largest
        # A ranking of whole gathers has no parts of them.
        everything = dict.fromkeys((*ranked, *self._ranked))

        def near(here: Outcome) -> Iterator[tuple[_Set, _Set]]:
            neighbours = self._near(here.kept, most_bytes, [*everything])
            return ((kept, frozenset()) for kept in neighbours)

        return self._descend(seen.values(), limit, most - self.tried, near)

    def _fills(
        self, limit: int, gathers: Sequence[int], least: _Set
    ) -> Iterator[tuple[_Set, tuple[float, int], Sequence[int]]]:
        """Yield fills with more or fewer gathers before activations, estimates and rankings."""
        # Backward is the shortest where its gathers take as long as its kernels: numbers close to
        # the best one so far are tried, at half the distance each time.
        most, estimates = len(gathers) if self._others else 0, dict[int, tuple[float, int]]()
        step = -(-most // _SHARES) or 1
        numbers: Iterable[int] = range(most, -step, -step)
        while True:
            for n in (max(n, 0) for n in numbers if n <= most):
                if n not in estimates:
                    ranked = (*gathers[:n], *self._others, *gathers[n:])
                    kept = self._distinct(self._fitting(limit, ranked, least))
                    estimates[n] = self._estimate(kept)
                    yield kept, estimates[n], ranked
            step //= 2
            if not step:
                return
            best = min(estimates, key=estimates.__getitem__)
            numbers = best + step, best - step

    def _estimate(self, kept: _Set) -> tuple[float, int]:
        """Rank a choice without a schedule: backward in the order found for nothing kept."""
        return round(self._backward_ms(kept) + self._write_ms(kept), 9), -len(kept)

    def _descend(
        self,
        firsts: Iterable[Outcome],
        limit: int,
        left: int,
        near: Callable[[Outcome], Iterable[tuple[_Set, _Set]]],
    ) -> Outcome:
        """Schedule neighbours of the best choices, ``left`` at most; return the best one."""
        seen = {(one.kept, one.parked): one for one in firsts}
        best, unexplored = min(seen.values()), dict(seen)
        while unexplored and left > 0:
            here = min(unexplored.values())
            for key in near(here):
                if key in seen:
                    continue
                if left <= 0:
                    return best
                left -= 1
                kept, parked = key
                useful_ms = self._useful_ms(seen.values())
                seen[key] = unexplored[key] = self.scheduled(kept, limit, parked, useful_ms)
                if seen[key] < best:
                    best = seen[key]
                    break
            else:
                del unexplored[here.kept, here.parked]
        return best

    def _with_parked(self, best: Outcome, limit: int) -> Outcome:
        """Return a better choice with activations in host memory, if one is found."""
        if not self._host_bytes:
            return best
        firsts = [best]
        if best.above or not best.kept.issuperset(self.candidates):
            firsts += self._first_parked(best, limit)
        if self._most < 2 * _FEW:  # neighbours gain little in a large graph
            return min(firsts)
        return self._descend(firsts, limit, self._most, self._near_parked)

    def _first_parked(self, best: Outcome, limit: int) -> Iterator[Outcome]:
        """Yield the first choices with activations in host memory."""
        # Values that were made first are away for longest. Their bytes are room for other
        # activations: as much as the link copies in forward's time, or as is missing to keep all.
        costs, forward = self.partitioned.costs, self.partitioned.forward
        size = self.partitioned.sizes
        most = sum(size[s] for s in self.partitioned.could_park(self.candidates))
        most = min(most, self._host_bytes)
        ms = sum(ms for ms, group in zip(forward.ms, forward.group, strict=True) if group is None)
        needed = max(0, self._held.peak_bytes(self.candidates) - limit)
        first = min(most, needed, int(ms / 1e3 * costs.machine.host_bandwidth))

        def parking(kept: _Set, nbytes: int) -> Outcome:
            parked, nbytes_left, pinned = list[int](), nbytes, self._host_bytes
            for s in self.partitioned.could_park(kept):
                if size[s] <= nbytes_left and pinned_bytes(size[s]) <= pinned:
                    parked.append(s)
                    nbytes_left -= size[s]
                    pinned -= pinned_bytes(size[s])
            return self.scheduled(kept, limit, parked)

        if best.above:
            yield parking(best.kept, most)
        # More tries than these found steps of the same length.
        for nbytes in (first, first // 2, first // 8) if first else ():
            yield parking(self._fitting(limit + nbytes, self._others, best.kept), nbytes)

    def _near_parked(self, here: Outcome) -> Iterator[tuple[_Set, _Set]]:
        """Yield choices that park, keep, or make again one more activation, or one less."""
        size = self.partitioned.sizes
        parkable = self.partitioned.could_park(here.kept)
        near = [(here.kept, here.parked ^ {s}) for s in parkable]
        near.append((here.kept, frozenset(parkable)))
        for k in self.candidates:
            kept = self._distinct(here.kept ^ {k})
            could = self.partitioned.could_park(kept)
            parked = here.parked.intersection(could)
            near.append((kept, parked))
            near += [(kept, parked | {s}) for s in could if s not in parkable]
        for kept, parked in near:
            if sum(pinned_bytes(size[s]) for s in parked) <= self._host_bytes:
                yield kept, parked

    def _worth(self, k: int) -> tuple[float, int]:
        """Return the time of a unit's gathers per byte and time held."""
        cost = self._keepables[k].nbytes * max(self._held.held_ms[k], 1e-6)
        return self._held.again_ms[k] / cost, -k

    def _density(self, k: int) -> tuple[float, int]:
        """Return the time to recompute activations per byte; later ones are preferred."""
        gain_ms = self._held.again_ms[k] - self._held.write_ms[k]
        return round(gain_ms / self._keepables[k].nbytes, 15), k

    def _fits(self, kept: _Set, room: int) -> bool:
        """Return whether a choice fits in graph order."""
        if not any(self._keepables[k].starts for k in kept):
            return self._held.peak_bytes(kept) <= room
        more = sum(self._keepables[k].nbytes for k in self._distinct(kept))
        if self._at_start + more > room and not self._others:
            return False  # backward begins with as much
        return self.reference_bytes + more <= room or self._held.peak_bytes(kept) <= room

    def _fitting(
        self, room: int, ranked: Sequence[int], kept: _Set = frozenset(), many: int = _MANY
    ) -> _Set:
        """Add to ``kept`` the keepables that fit beside it, in the order of ``ranked``."""
        candidates = [k for k in ranked if k not in kept]
        while candidates and not self._fits(kept.union(candidates), room):
            # Find how many of the first ones fit together. The next one does not fit, and so no
            # other one of its kind; with many keepables all that hold as much are skipped.
            most = bisect.bisect(
                range(1, len(candidates)),
                False,
                key=lambda n: not self._fits(kept.union(candidates[:n]), room),
            )
            kept, kind = kept.union(candidates[:most]), self._kind_of[candidates[most]]
            nbytes = self._keepables[candidates[most]].nbytes if len(candidates) > many else 2**62
            candidates = [k for k in candidates[most:] if self._kind_of[k] != kind]
            candidates = [k for k in candidates if self._keepables[k].nbytes < nbytes]
        return kept.union(candidates)

    def _least(self) -> _Set:
        """Return activations that must be kept for a low peak: recomputing them holds more."""
        others = self._others
        each = 1 + len(others) // _MANY
        some = [frozenset(others[begin : begin + each]) for begin in range(0, len(others), each)]
        kept, held_peak, peak = frozenset[int](), self.reference_bytes, self.reference_bytes
        for more in (*some, *some):  # one that was kept may be superfluous with later ones
            other = kept ^ more
            held = self._held.peak_bytes(other)
            if held <= held_peak:  # and its recomputed inputs are made later, or not at all
                models = self.partitioned.models(other)
                nbytes = max(m.liveness.peak(range(len(m))) for m in models)
                if nbytes < peak:
                    kept, held_peak, peak = other, held, nbytes
        return kept

    def _near(self, kept: _Set, room: int, ranked: Sequence[int]) -> Iterator[_Set]:
        """Yield the choices with another number of one kind, and then with one exchanged."""
        # For more of a kind the last ones of ``ranked`` make room, and the first ones take the
        # room of fewer.
        nbytes = [one.nbytes for one in self._keepables]
        free = max(0, room - self._held.peak_bytes(kept))
        inside = [k for k in reversed(ranked) if k in kept]
        out = [k for k in ranked if k not in kept]
        near = dict[_Set, None]()
        for i in range(len(self._kinds)):
            for some in _parts_of([k for k in out if self._kind_of[k] == i]):
                missing, gone = sum(nbytes[k] for k in some) - free, set[int]()
                for k in inside:
                    if missing > 0 and self._kind_of[k] != i:
                        gone.add(k)
                        missing -= nbytes[k]
                near[self._distinct(kept.union(some).difference(gone))] = None
            for some in _parts_of([k for k in inside if self._kind_of[k] == i]):
                room_left, more = sum(nbytes[k] for k in some) + free, set[int]()
                for k in out:
                    if nbytes[k] <= room_left and self._kind_of[k] != i:
                        more.add(k)
                        room_left -= nbytes[k]
                near[self._distinct(kept.difference(some).union(more))] = None
                near[kept.difference(some)] = None
        whole = ((self._keepables[k].whole, k) for k in out if k in self.partitioned.parts)
        # Equal things exchanged are the same choice, so two kinds have one pair.
        kinds, pairs = self._kind_of, dict[tuple[int, int], tuple[int, int]]()
        for k, instead in itertools.product(inside, out):
            if kinds[k] != kinds[instead]:
                pairs.setdefault((kinds[k], kinds[instead]), (k, instead))
        one = (kept - {k} | {new} for k, new in (*whole, *pairs.values()) if k in kept)
        for other in (*sorted(near, key=self._estimate), *map(self._distinct, one)):
            if self._fits(other, room):
                yield other

    # --- the report ------------------------------------------------------------------------------

    def report(self, limit: int, curve: bool = False) -> tuple[Outcome, KeepReport]:
        """Choose for a bound in bytes, and report the choice.

        ``curve`` adds the choices for the bounds of :data:`CURVE`. The report has the time that
        one more GiB would save.
        """
        clock = time.perf_counter()
        before = self.tried
        nothing = self.scheduled((), limit)
        chosen = self.choose(limit)
        kept = chosen.kept
        larger = limit + _GIB
        with paused_gc():
            next_kept = self._distinct(self._fitting(larger, self._ranked, kept))
            next_ms = 0.0
            if next_kept != kept:
                then = self.scheduled(next_kept, larger, chosen.parked, chosen.step_ms)
                next_ms = max(0.0, chosen.step_ms - then.step_ms)
            units = units_of(kept, self._kinds, self._held, self._backward_ms)
        more_kept = sorted(next_kept - kept) if next_ms > 0.0 else ()
        drawn = self.curve() if curve else ()
        return chosen, KeepReport(
            bound_bytes=limit,
            units=units,
            step_ms=(nothing.step_ms, chosen.step_ms),
            peak_bytes=(nothing.peak_bytes, chosen.peak_bytes),
            all_peak_bytes=self._held.peak_bytes(self.candidates),
            unread=tuple(u.name for u in self._keepables if not u.held),
            next_ms=next_ms,
            next_units=tuple(self._keepables[k].name for k in more_kept),
            curve=tuple((b, o.step_ms, o.peak_bytes, len(o.kept)) for b, o in drawn),
            tried=self.tried - before,
            host_bound_bytes=self._host_bytes,
            host_bytes=chosen.host_bytes,
            parked=len(chosen.parked),
            blocks=self.partitioned.blocks(kept, chosen.parked, self.candidates),
            warning=warning_of(chosen, limit, self._kinds, self._held, self._at_start),
            size_hints=self.partitioned.costs.hints.to_text(),
            machine=self.partitioned.costs.machine.describe(),
            seconds=self._seconds + time.perf_counter() - clock,
        )

    def curve(self, bounds: Sequence[int] | None = None) -> tuple[tuple[int, Outcome], ...]:
        """Return the choices for ``bounds`` in bytes, ascending; None: :data:`CURVE`."""
        wanted = bounds or [int(part * self.reference_bytes) for part in CURVE]
        points: list[tuple[int, Outcome]] = []
        for bound in sorted(wanted):
            outcome = self.choose(bound)
            if points:  # a choice within a smaller bound also keeps this one: more is never slower
                last = points[-1][1]
                above = max(0, last.peak_bytes - bound)
                outcome = min(outcome, replace(last, above=above))
            points.append((bound, outcome))
        return tuple(points)

    def _write_ms(self, kept: _Set) -> float:
        """Return how much longer forward's kernels write with a choice, in milliseconds."""
        return math.fsum(self._held.write_ms[k] for k in kept)

    def _backward_ms(self, kept: _Set) -> float:
        """Return backward's time with a choice, in the order found for nothing kept."""
        stay = set(self.partitioned.places_without(kept))
        return step_ms(self.partitioned.in_place(kept), [i for i in self._order if i in stay])


def _parts_of(some: Sequence[int]) -> list[Sequence[int]]:
    """Return all of a list, its first half, and its first one, without repetition."""
    sizes = dict.fromkeys((len(some), -(-len(some) // 2), 1))
    return [some[:n] for n in sizes if some]
