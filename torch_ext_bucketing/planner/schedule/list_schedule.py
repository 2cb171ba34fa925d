"""List-schedule in one pass: communication early, waits late, memory within a limit.

There are three sorts of nodes:

- *Starts* of collectives. If the input is computed (a reduction, a collective of tensor or expert
  parallelism), the start launches as soon as the input is there. If it needs the result of another
  collective, kernels run first, unless the start's successors would then end after all remaining
  kernels. If it needs no computation (a parameter's gather), it is prefetched: a number of buckets
  ahead, or earlier to keep its deadline, as far as memory allows.
- *Lazy* nodes: waits, views, and nodes that need no computation, such as the unpacking of a bucket.
  They run right before their first user. With a window they also run while kernels wait for
  communication. Without a user they run as soon as their inputs are there.
- *Kernels*, all others, in the order of the graph with two exceptions. A kernel that would wait for
  communication lets others go first. Of two ready kernels within ``window`` compute nodes, the one
  whose successors finish earlier runs first: it has the longer path after its next collective, or
  keeps their common stream busy. The critical path is not delayed: only kernels that fit into its
  wait go first.

::

    in      rs(a) wait(a) mm1 gather(w) wait(w) mm2 mm3
    out     rs(a) gather(w) mm1 wait(w) mm2 wait(a) mm3

Under a limit on memory, gathers and overtaking kernels leave room for the nodes that the graph has
before them. A kernel that would exceed the limit first waits for collectives in flight. Times are
those of :mod:`.timeline`. The order is the same in every process and on every rank.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Sequence

from ...graph.liveness import LiveBytes
from .analysis import Remaining, Send, sooner_ms
from .model import Model
from .policy import Options, at_least
from .timeline import Streams

_NO_STALL_MS = 1e-3  # a wait of at most this is none
_NOTHING: Send = (0.0, None, 0.0, 0.0)
ROUNDING = 1 + 1e-9
"""The relative rounding error of sums of the same times in another order."""


def list_schedule(model: Model, options: Options) -> list[int]:
    """Return the places of all nodes in a topological order."""
    order = ListScheduler(model, options).run()
    assert order is not None
    return order


class ListScheduler:
    """Make one pass over a model; give up once the step takes longer than ``at_most_ms``."""

    def __init__(self, model: Model, options: Options, at_most_ms: float = math.inf) -> None:
        self.model, self.options, self.at_most_ms = model, options, at_most_ms * ROUNDING
        self.lost = False  # the step is known to take longer than ``at_most_ms``
        # These record which options made a difference; see as_with().
        self.farthest = 0  # the most compute nodes that a long path overtook
        self.filled = False  # a lazy node filled a wait
        self.delayed = False  # a kernel ran, or would have, before one with a longer path
        self.too_deep = False  # a gather was held back by ``depth``,
        self.hurried = False  # or went first all the same, for its deadline
        self.short = False  # memory ran out
        self.peak_bytes, self.peak_at = 0, -1  # the most live bytes so far, and the place
        self.capped = False  # a compute run reached ``max_run``
        self.analysis = analysis = model.analysis
        self.needs = model.dependencies.needs
        self.order: list[int] = []
        self.done = [False] * len(model)
        self.missing = list(analysis.missing)  # in-degrees without nodes done or available
        self.available = list(analysis.available)
        self.ready = list(analysis.ready)  # numbers of the kernels with in-degree 0
        self.pending: dict[int, list[int]] = {}  # the waits that a ready kernel needs
        self.to_launch = list(analysis.produced)
        self.held: list[int] = []  # starts whose inputs need a wait
        self.in_flight: list[int] = []  # reductions without their wait
        self.unwaited: list[int] = []  # all collectives without their wait, and some others
        self.wait_of = analysis.wait_of
        self.live = LiveBytes(model.liveness)
        # In the order of the graph: live bytes before the next kernel, and by number of a kernel
        # the most bytes until the next one; with ``follow`` those with the nodes done.
        self.graph_bytes, self.most = model.liveness.at_start, list(analysis.most)
        self.follow = options.limit_bytes is not None and options.room_for_open
        self.freed_by_waits = 0  # live bytes that only open waits keep
        self.freed: dict[int, int] = {}
        self.kernels_ms = 0.0  # of the kernels in the order
        self.streams = Streams(model)
        self.now, self.end = 0.0, self.streams.end
        self.last: dict[str | None, int] = {}  # each group's last launch
        self.tail = model.paths.tail
        self.remaining = Remaining(model, model.paths)
        self.next_gather = dict.fromkeys(self.analysis.gathers, 0)
        self.next_filler = self.head = self.run_length = 0
        self.reductions = {group: list(starts) for group, starts in analysis.reductions.items()}
        self.wanted: set[int] = set()  # compute nodes that the next reduction needs
        self.reducing = False  # whether a reduction is left
        self.under: dict[int, list[int]] = {}
        for gather, kernel in options.under.items():
            self.under.setdefault(kernel, []).append(gather)

    def run(self) -> list[int] | None:
        """Return the order; None if it was given up."""
        self._want_next_reduction()
        for i in self.analysis.free_dead_ends:
            self._emit(i)
        kernels = self.analysis.kernels
        while True:
            while self.head < len(kernels) and self.done[kernels[self.head]]:
                self.head += 1
            if not self.follow and self.head < len(kernels):
                self.graph_bytes = self.analysis.live[self.head]
            self._launch_produced()
            if self.head == len(kernels):
                break
            self._prefetch()
            self._retire()
            chosen = self._choose()
            # Both change which kernel is the best one, so it is chosen anew.
            if self._launch_held(kernels[chosen]) or self._fill(kernels[chosen]):
                continue
            for gather in self.under.pop(kernels[chosen], ()):
                if self._fits(gather):
                    self._emit(gather)
            self._make_room(kernels[chosen])
            self._emit(kernels[chosen])
            if self.lost or self.remaining.least_end(None, self.now) > self.at_most_ms:
                return None
        # No kernel is left to hide the held starts, so the first to be ready goes first.
        while self.held:
            self._emit(min(self.held, key=lambda i: (self._stall(i), i)))
            self._launch_produced()
        for i in range(len(self.done)):  # waits and views that only the output reads
            self._emit(i)
        return None if self.lost else self.order

    def as_with(self, options: Options) -> bool:
        """Return whether ``options`` give the same order, because no difference mattered."""
        own, other = self.options, options
        if own == other:
            return True
        reach = max(own.window, own.fill) == max(other.window, other.fill)
        roomier = not self.short and at_least(other.limit_bytes, own.limit_bytes)
        longer = not self.capped and at_least(other.max_run, own.max_run)
        narrower = other.window < own.window and reach and self.farthest <= other.window
        deeper = other.depth > own.depth and not self.too_deep
        return (
            (own.window == other.window or (narrower and (other.window > 0 or not self.filled)))
            and (own.depth == other.depth or deeper)
            and (own.deadlines == other.deadlines or (own.deadlines and not self.hurried))
            and (own.hold == other.hold or not self.delayed)
            and (own.limit_bytes == other.limit_bytes or roomier)
            and (own.max_run == other.max_run or longer)
            and (own.max_prefetch, own.under) == (other.max_prefetch, other.under)
            and own.room_for_open == other.room_for_open
        )

    # --- emission --------------------------------------------------------------------------------

    def _emit(self, i: int) -> None:
        """Add node ``i`` to the order, after the nodes that it needs."""
        done = self.done
        for j in self.needs[i]:
            if not done[j]:
                break
        else:  # mostly
            if not done[i]:
                self._place(i)
            return
        for node in self._open_needs(i):
            if not done[node]:  # placing another one may have placed it
                self._place(node)

    def _place(self, i: int) -> None:
        """Append node ``i``, whose needs are done, and update everything that depends on it."""
        model, analysis = self.model, self.analysis
        self.order.append(i)
        self.done[i] = True
        during = self.live.run(i)
        if during > self.peak_bytes:
            self.peak_bytes, self.peak_at = during, i
        self.now = self.streams.run(i)
        if model.group[i] is not None:
            self._note_launch(i)
        else:
            start = model.start_of[i]
            if start >= 0:
                self.freed_by_waits -= self.freed.pop(start, 0)
            if model.ms[i]:
                self.remaining.begin(i, None)
        if model.compute[i]:
            self.run_length += 1
            self.wanted.discard(i)
        number, change = analysis.number_of[i], analysis.changes[i]
        if change and self.follow:
            self.graph_bytes += change
            for earlier in range(self.head, bisect.bisect_left(analysis.kernels, i)):
                self.most[earlier] += change
        if number >= 0:
            if self.follow:
                self.most[number] = 0
            ready_place = bisect.bisect_left(self.ready, number)
            if ready_place < len(self.ready) and self.ready[ready_place] == number:
                self.ready.pop(ready_place)
            self.pending.pop(i, None)
            self.kernels_ms += model.ms[i]
        if not self.available[i]:
            self.available[i] = True
            self._satisfied(i)
        for j in analysis.run_after[i]:
            # Run here, it keeps no storage live that others have finished with.
            for k in self.needs[j]:
                if not self.done[k]:
                    break
            else:
                self._emit(j)

    def _note_launch(self, i: int) -> None:
        """Note that collective ``i`` is in flight; give the order up if it must take too long."""
        group, end_ms = str(self.model.group[i]), self.end[i]
        self.last[group] = i
        # The longest path from its end, and the work that is left for each of its streams.
        self.lost |= end_ms + self.tail[i] - self.model.ms[i] > self.at_most_ms
        for stream in self.model.streams_of(group):
            self.remaining.begin(i, stream)
            # Other collectives in flight on the level may end before ``i``.
            free_ms = end_ms if stream == group else self.now
            self.lost |= self.remaining.least_end(stream, free_ms) > self.at_most_ms
        if not self.analysis.source[i]:
            self.in_flight.append(i)
        if i in self.wait_of:
            self.unwaited.append(i)
            # Until its wait, its operands stay live.
            self.freed[i] = self.live.last_use(self.model.liveness.touches[i])
            self.freed_by_waits += self.freed[i]
        if self.model.reduces[i]:  # this ends a compute run
            self.run_length = 0
            self._want_next_reduction()

    def _satisfied(self, i: int) -> None:
        """Lower the in-degrees of the nodes that need ``i``, and collect the ready nodes."""
        missing, available, done = self.missing, self.available, self.done
        needed_by, kernel_number = self.model.dependencies.needed_by, self.analysis.number_of
        stack = [i]
        while stack:
            for j in needed_by[stack.pop()]:
                missing[j] -= 1
                if missing[j] or done[j] or available[j]:
                    continue
                number = kernel_number[j]
                if number >= 0:
                    bisect.insort(self.ready, number)
                    continue
                available[j] = True
                if self.model.group[j] is not None and not self.analysis.source[j]:
                    self.to_launch.append(j)
                stack.append(j)

    def _launch_produced(self) -> None:
        """Launch the starts whose inputs are ready, and hold back starts that need a wait."""
        # HSDP's all-reduce between nodes, for one, needs the result of a reduce-scatter.
        while self.to_launch or self.held:
            starts = sorted({*self.to_launch, *self.held})
            self.to_launch, self.held = [], []
            for i in starts:
                if self.done[i]:
                    continue
                if self._stall(i) <= _NO_STALL_MS:
                    self._emit(i)
                else:
                    self.held.append(i)
            if not self.to_launch:
                break

    def _launch_held(self, kernel: int) -> bool:
        """Launch one of the held starts, if that is better than to run ``kernel`` first."""
        # It is better where ``kernel`` waits at least as long itself, or where the start's
        # successors would end later after ``kernel`` than all kernels and the successors of
        # ``kernel`` after the wait.
        tail, ms = self.tail, self.model.ms
        for start in self.held:
            stall = self._stall(start)
            late = ms[kernel] + tail[start] > stall + max(tail[kernel], self.remaining.kernels_ms)
            if late or stall <= self._stall(kernel):
                self._emit(start)
                return True
        return False

    def _retire(self) -> None:
        """Run the waits of finished reductions, which free their operands."""
        limit = self.options.limit_bytes
        while self.in_flight:
            start = self.in_flight[0]
            over = limit is not None and self.live.now > limit
            self.short |= over
            if self.end[start] > self.now and not over:
                break
            self.in_flight.pop(0)
            wait = self.wait_of.get(start)
            # The result of a reduction reaches no kernel, so its wait only frees memory.
            reduction = self.analysis.first_use[start] == len(self.analysis.kernels)
            if wait is not None and not self.done[wait] and reduction:
                self._emit(wait)

    def _make_room(self, kernel: int) -> None:
        """Wait for collectives in flight, the first to end first, until ``kernel`` fits."""
        if self._has_room(kernel):
            return
        self.unwaited = [s for s in self.unwaited if not self.done[self.wait_of[s]]]
        for start in sorted(self.unwaited, key=self.end.__getitem__):
            self._emit(self.wait_of[start])
            if self._has_room(kernel):
                break

    # --- prefetching -----------------------------------------------------------------------------

    def _prefetch(self) -> None:
        """Launch the next gathers of each group as far as depth, deadlines and memory allow."""
        analysis, options = self.analysis, self.options
        for group, gathers in analysis.gathers.items():
            next_place = self.next_gather[group]
            while next_place < len(gathers):
                gather = gathers[next_place]
                if self.done[gather]:
                    next_place += 1
                    continue
                if gather in options.under or not self._may_launch(gather, gathers, next_place):
                    break
                self._emit(gather)
                next_place += 1
            self.next_gather[group] = next_place

    def _may_launch(self, gather: int, gathers: Sequence[int], number: int) -> bool:
        """Return whether ``gathers[number]`` may launch before the next kernel."""
        analysis, options = self.analysis, self.options
        use = analysis.first_use[gather]
        if self.missing[gather]:
            return False
        head = self.head
        distance = analysis.compute_before[use] - analysis.compute_before[head]
        if distance > options.max_prefetch:
            return False
        ahead = 0
        for other in reversed(gathers[max(0, number - options.depth) : number]):
            by = analysis.first_use[other]  # past the last kernel for a result of the graph
            unused = by < len(analysis.kernels) and not self.done[analysis.kernels[by]]
            ahead += self.done[other] and unused
        # Kernels in the order count wherever the graph has them. After the next one it is too late.
        reached = self.kernels_ms + self.model.ms[analysis.kernels[head]]
        late = options.deadlines and analysis.latest[gather] < reached
        if ahead >= options.depth:
            self.hurried |= late
            if not late:
                self.too_deep = True
                return False
        return use <= head or self._fits(gather)

    def _fits(self, node: int) -> bool:
        """Return whether an early node's results fit until the graph has the node, too."""
        limit = self.options.limit_bytes
        if limit is None:
            return True
        analysis, done = self.analysis, self.done
        open_nodes = (node, *(need for need in self.needs[node] if not done[need]))
        most = self.live.now + sum(analysis.own_bytes[i] for i in open_nodes)
        if most <= limit:
            # The graph has these kernels before it.
            kernels_before = bisect.bisect_left(analysis.kernels, node)
            most += self._growth(kernels_before)
        self.short |= most > limit
        return most <= limit

    def _growth(self, number: int) -> int:
        """Return how much live bytes grow until kernel ``number``, in the order of the graph."""
        return max([self.graph_bytes, *self.most[self.head : number]]) - self.graph_bytes

    # --- the next kernel -------------------------------------------------------------------------

    def _choose(self) -> int:
        """Return the number of the kernel to run next."""
        analysis, options, model = self.analysis, self.options, self.model
        before, kernels = analysis.compute_before, analysis.kernels
        # Kernels beyond the window, up to ``fill``, run only if no nearer one can begin.
        reach = before[self.head] + max(options.window, options.fill)
        near = before[self.head] + options.window
        # Only nodes that the next reduce-scatter needs may run before it.
        most = options.max_run if self.reducing else None
        capped = most is not None and self.run_length + len(self.wanted) >= most
        self.capped |= capped
        best = fallback = -1
        best_tail, by_tail, best_send, best_busy = -1.0, False, _NOTHING, 0.0
        soonest = (float("inf"), 0.0)
        waiting, waits_ms, waiting_tail = -1, 0.0, 0.0
        compute, tails, pending, clock_ms = model.compute, self.tail, self.pending, self.now
        sends, end = analysis.sends, self.end
        # The most live bytes of the kernels from the next one of the graph's order up to another.
        limited, reached = options.limit_bytes is not None, self.head
        grown = self.graph_bytes
        busy_ms = {group: end[i] - clock_ms for group, i in self.last.items()}
        for number in self.ready:
            if before[number] > (reach if best < 0 else near):
                break
            kernel = kernels[number]
            tail = tails[kernel]
            if clock_ms + tail > self.at_most_ms:  # no order ends before this path does
                self.lost = True
            send = sends[kernel]
            busy = busy_ms.get(send[1], 0.0)
            if best >= 0:  # without a window the first kernel that needs no wait runs
                sooner = sooner_ms(send, best_send, busy, best_busy)
                if sooner < -_NO_STALL_MS or (sooner <= _NO_STALL_MS and tail <= best_tail):
                    continue
            if capped and compute[kernel] and kernel not in self.wanted:
                continue
            stall = self._stall(kernel) if pending.get(kernel, True) else 0.0
            if stall > _NO_STALL_MS:
                if best < 0 and (stall, -tail) < soonest:
                    soonest, fallback = (stall, -tail), number
                if tail > waiting_tail:
                    waiting, waits_ms, waiting_tail = number, stall, tail
                continue
            if limited and number != self.head:
                grown = max(grown, *self.most[reached:number])
                reached = number
                if not self._has_room(kernel, grown - self.graph_bytes):
                    continue
            by_tail = best >= 0
            best, best_tail, best_send, best_busy = number, tail, send, busy
        if best >= 0:
            # The step ends later with the best kernel first than with a wait for the longest path.
            held_ms = waits_ms + max(waiting_tail, best_tail, self.remaining.kernels_ms)
            if waiting >= 0 and model.ms[kernels[best]] + waiting_tail > held_ms:
                self.delayed = True
                if options.hold:
                    return self._fitting(waiting, waits_ms, near, capped)
            if by_tail:
                self.farthest = max(self.farthest, before[best] - before[self.head])
            return best
        if fallback >= 0:
            return fallback
        # The bound on runs holds back all near kernels: take one that the reduction needs.
        for number in self.ready:
            if not compute[kernels[number]] or kernels[number] in self.wanted:
                return number
        return self.ready[0]

    def _fitting(self, waiting: int, stall: float, near: int, capped: bool) -> int:
        """Return the kernel of the longest path that fits into ``stall``, else ``waiting``."""
        analysis, model = self.analysis, self.model
        best, best_tail = waiting, -1.0
        for number in self.ready:
            if analysis.compute_before[number] > near:
                break
            kernel = analysis.kernels[number]
            if model.ms[kernel] > stall or self.tail[kernel] <= best_tail:
                continue
            if capped and model.compute[kernel] and kernel not in self.wanted:
                continue
            if self._stall(kernel) <= _NO_STALL_MS and self._may_overtake(number):
                best, best_tail = number, self.tail[kernel]
        before = analysis.compute_before
        self.farthest = max(self.farthest, before[max(best, waiting)] - before[self.head])
        return best

    def _fill(self, kernel: int) -> bool:
        """Run one lazy node that fits into the wait of ``kernel``, if there is one."""
        if not self.options.window:  # the graph's order holds the least memory
            return False
        stall, analysis, ms = self._stall(kernel), self.analysis, self.model.ms
        if stall <= _NO_STALL_MS:
            return False
        fillers, before = analysis.fillers, analysis.compute_before
        while self.next_filler < len(fillers) and self.done[fillers[self.next_filler]]:
            self.next_filler += 1
        reach = before[self.head] + max(self.options.window, self.options.fill)
        for place in range(self.next_filler, len(fillers)):
            i = fillers[place]
            if before[analysis.first_use[i]] > reach:
                break
            # One at a time: the wait is shorter afterwards, and a start may be ready.
            if not self.done[i] and ms[i] <= stall and self._fits(i):
                self.filled = True
                self._emit(i)
                return True
        return False

    def _stall(self, kernel: int) -> float:
        """Return the milliseconds that the compute stream would wait before ``kernel``."""
        waits = self.pending.get(kernel)
        if waits is None:
            start_of = self.model.start_of
            waits = self.pending[kernel] = [i for i in self._open(kernel) if start_of[i] >= 0]
        latest, over = 0.0, False
        for wait in waits:
            if self.done[wait]:  # since the list was made
                over = True
                continue
            start = self.model.start_of[wait]
            end = self.end[start] if self.done[start] else self.streams.would_end(start)
            if end > latest:
                latest = end
        if over:
            self.pending[kernel] = [wait for wait in waits if not self.done[wait]]
        return latest - self.now

    def _may_overtake(self, number: int) -> bool:
        """Return whether a kernel has room now, and the kernels before it have room afterwards."""
        if self.options.limit_bytes is None:
            return True
        return self._has_room(self.analysis.kernels[number], self._growth(number))

    def _has_room(self, kernel: int, growth: int | None = None) -> bool:
        """Return whether live bytes stay under the limit while ``kernel`` runs next."""
        limit = self.options.limit_bytes
        if limit is None or self.live.now + self.analysis.adds[kernel] + (growth or 0) <= limit:
            return True
        # ``growth`` bytes are added afterwards and must have room, too.
        most, live_after = self.live.after(self._open_needs(kernel))
        if growth is not None:
            most = max(most, live_after - self.freed_by_waits + growth)
        self.short |= most > limit
        return most <= limit

    def _open_needs(self, i: int) -> list[int]:
        """List the open nodes that ``i`` needs, then ``i``, in the order of their places."""
        return [] if self.done[i] else sorted(self._open(i))

    def _open(self, i: int) -> set[int]:
        """Collect ``i`` and the open nodes that it needs."""
        done, needs = self.done, self.needs
        open_nodes, stack = {i}, [i]
        while stack:
            for j in needs[stack.pop()]:
                if not done[j] and j not in open_nodes:
                    open_nodes.add(j)
                    stack.append(j)
        return open_nodes

    # --- runs between reduce-scatters ------------------------------------------------------------

    def _want_next_reduction(self) -> None:
        """Find the reduce-scatter that needs the fewest compute nodes, among each group's next."""
        if self.options.max_run is None:
            return
        wanted = list[set[int]]()
        for starts in self.reductions.values():
            while starts and self.done[starts[-1]]:
                starts.pop()
            if starts:
                wanted.append({j for j in self._open(starts[-1]) if self.model.compute[j]})
        self.wanted, self.reducing = min(wanted, key=len, default=set()), bool(wanted)


def plain_schedule(model: Model) -> list[int]:
    """Return the order of the plain list schedule: of ready nodes, the longest path goes first.

    It knows no limit on memory, no window and no depth of prefetching, so no order of
    :class:`ListScheduler` that is chosen may be longer, where the bounds allow this one.
    """
    tail, group, start_of = model.paths.tail, model.group, model.start_of
    missing = [len(needs) for needs in model.dependencies.needs]
    streams = Streams(model)
    starts: list[tuple[float, int]] = []
    ready: list[tuple[float, int]] = []
    waiting: list[tuple[float, float, int]] = []  # by the end of their collectives
    order: list[int] = []

    def add(i: int) -> None:
        if group[i] is not None:
            heapq.heappush(starts, (-tail[i], i))
        elif start_of[i] >= 0:
            heapq.heappush(waiting, (streams.end[start_of[i]], -tail[i], i))
        else:
            heapq.heappush(ready, (-tail[i], i))

    for i, needs in enumerate(missing):
        if not needs:
            add(i)
    while starts or ready or waiting:
        while waiting and waiting[0][0] <= streams.now:
            heapq.heappush(ready, heapq.heappop(waiting)[1:])
        # Starts keep no stream of kernels busy, so they launch as soon as their inputs are there.
        i = heapq.heappop(starts or ready)[1] if starts or ready else heapq.heappop(waiting)[2]
        streams.run(i)
        order.append(i)
        for j in model.dependencies.needed_by[i]:
            missing[j] -= 1
            if not missing[j]:
                add(j)
    return order
