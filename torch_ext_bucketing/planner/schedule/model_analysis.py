"""Facts that all orders of a model share; :mod:`.list_schedule` defines the sorts of nodes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from ...graph.host_copies import TO_HOST
from ...graph.liveness import LiveBytes
from .nodes import NodeTable
from .paths import Paths
from .sends import sends_of

_LARGE = 2**62  # bytes


class ModelAnalysis:
    """Facts that all orders of a model share: :attr:`.Model.analysis`.

    Nodes are known by their places. Kernels also have numbers, in the order of the graph.

    Attributes:
        lazy: by place, whether the node is a wait, a view or the like.
        source: by place, whether the node needs no kernel.
        kernels: places of the kernels, by number.
        at: number of each kernel, by place; -1 for other nodes.
        compute_before: by number, compute nodes before the kernel.
        ms_before: by number, milliseconds of the kernels before it.
        total_ms: milliseconds of all kernels.
        sends: by place, the node's next collective.
        first_use: by place, number of the first kernel that needs the node.
        free_dead_ends: places of the dead ends that need no node. A dead end is lazy, reaches no
            kernel and no collective, and leaves no more bytes live than it frees.
        run_after: by place, the nodes that run right after the node: dead ends and items.
        own_bytes: by place, the bytes that the node allocates.
        adds: the same with those of the lazy nodes right before it.
        gathers: by process group, the starts that need no kernel and reach one.
        wait_of: by place of a start, the place of its wait.
        reductions: by process group, the reduce-scatters, the last one first.
        fillers: lazy nodes that take time and need no collective, in the order of their use.
        latest: by place of a gather, when it must begin; see :func:`latest_starts`.
        live: by number, bytes live before the kernel.
        most_in: for each power of two, by number, the most bytes live from the kernel until that
            many kernels later.
    """

    def __init__(self, model: NodeTable, paths: Paths) -> None:
        needs, needed_by = model.dependencies.needs, model.dependencies.needed_by
        group, live, size = model.group, model.liveness, len(model)
        self.lazy = lazy = [False] * size
        self.source = source = [False] * size
        for i, mine in enumerate(needs):
            if model.compute[i]:
                continue
            start = group[i] is not None
            free = group[i] != TO_HOST  # such a copy follows its value at once
            for j in mine:
                if not source[j] and not (start and group[j] is not None):  # only ordered
                    free = False
                    break
            source[i] = free
            lazy[i] = not start and (free or model.start_of[i] >= 0 or model.view[i])
        self.kernels = [i for i in range(size) if not lazy[i] and group[i] is None]
        self.at = at = [-1] * size
        for number, i in enumerate(self.kernels):
            at[i] = number
        # One entry more than there are kernels: the last one is the total.
        kernels = self.kernels
        self.compute_before = [
            *itertools.accumulate((model.compute[i] for i in kernels), initial=0)
        ]
        self.ms_before = [*itertools.accumulate((model.ms[i] for i in kernels), initial=0.0)]
        self.total_ms = self.ms_before[-1]
        never = len(kernels)
        self.first_use = first_use = [never] * size
        # A part of a gathered parameter that is kept is a dead end: it frees the rest.
        dead_ends = [False] * size
        for i in reversed(range(size)):
            first, dead = never, lazy[i] and model.start_of[i] < 0
            for j in needed_by[i]:
                dead = dead and dead_ends[j]
                if group[i] is not None and group[j] is not None:  # only ordered
                    continue
                use = at[j] if at[j] >= 0 else first_use[j]
                if use < first:
                    first = use
            first_use[i] = first
            dead_ends[i] = dead and _adds_less(model, i)
        self.free_dead_ends = [i for i, dead in enumerate(dead_ends) if dead and not needs[i]]
        self.sends = sends_of(model, paths.tail)
        # Items of several results run at once, too: until then all results are live.
        at_once = [
            dead or node.target is operator.getitem
            for dead, node in zip(dead_ends, model.dependencies.nodes, strict=True)
        ]
        self.run_after = [[j for j in users if at_once[j]] for users in needed_by]
        # The most bytes that a node allocates, with the lazy nodes right before it.
        self.own_bytes = [sum(map(live.size.__getitem__, new)) for new in live.allocates]
        self.adds = adds = list(self.own_bytes)
        for i, mine in enumerate(needs):
            for j in mine:
                if at[j] < 0:
                    adds[i] += adds[j]
            adds[i] = min(adds[i], _LARGE)
        # A start that reaches no kernel is not a gather: a reduction of an input, for one.
        self.gathers: dict[str, list[int]] = {}
        self.wait_of: dict[int, int] = {}
        for i, name in enumerate(group):
            if name is not None and source[i] and first_use[i] < never:
                self.gathers.setdefault(name, []).append(i)
            if model.start_of[i] >= 0:
                self.wait_of[model.start_of[i]] = i
        self.reductions: dict[str, list[int]] = {}
        for i in reversed(range(size)):
            if model.reduces[i]:
                self.reductions.setdefault(str(group[i]), []).append(i)
        self._find_available(model)
        given = [False] * size
        fillers = []
        for i, mine in enumerate(needs):
            given[i] = source[i] and group[i] is None and all(given[j] for j in mine)
            if given[i] and lazy[i] and model.ms[i] and first_use[i] < never:
                fillers.append(i)
        self.fillers = sorted(fillers, key=first_use.__getitem__)
        self.latest = self._latest_starts(model)
        self.live, most = self._live_at_kernels(model)
        self.most_in, half = [most], 1
        while 2 * half <= len(kernels):
            most, half = list(map(max, most, most[half:])), 2 * half
            self.most_in.append(most)

    def _find_available(self, model: NodeTable) -> None:
        """Find the nodes that are ready at the start: lazy nodes, starts and kernels.

        ``missing`` has the in-degrees of the others.
        """
        self.missing = [len(n) for n in model.dependencies.needs]
        self.available = [False] * len(model)
        self.ready: list[int] = []
        self.produced: list[int] = []
        for i in range(len(model)):
            if self.missing[i]:
                continue
            if self.at[i] >= 0:
                self.ready.append(self.at[i])
                continue
            self.available[i] = True
            if model.group[i] is not None and not self.source[i]:
                self.produced.append(i)
            for j in model.dependencies.needed_by[i]:
                self.missing[j] -= 1

    def _latest_starts(self, model: NodeTable) -> dict[int, float]:
        """Compute when each gather must begin, in milliseconds of the kernels' time."""
        load: dict[str, list[tuple[float, float]]] = {}
        for i, group in enumerate(model.group):
            if group is not None and not self.source[i]:
                produced = max(
                    (self.ms_before[self.at[j]] for j in self._last_kernels(model, i)),
                    default=0.0,
                )
                level = model.shared.get(group, group)
                load.setdefault(level, []).append((produced, model.ms[i]))
        latest: dict[int, float] = {}
        for group, gathers in self.gathers.items():
            others = sorted(load.get(model.shared.get(group, group), []))
            uses = [(self.ms_before[self.first_use[i]], model.ms[i]) for i in gathers]
            latest.update(zip(gathers, latest_starts(uses, others, self.total_ms), strict=True))
        return latest

    def first_uses(self) -> dict[int, int]:
        """Map each gather to the first kernel that needs it, both by place."""
        return {i: self.kernels[self.first_use[i]] for mine in self.gathers.values() for i in mine}

    def _last_kernels(self, model: NodeTable, i: int) -> list[int]:
        """List the kernels that ``i`` needs with only lazy nodes between."""
        found, seen, stack = [], {i}, [i]
        while stack:
            node = stack.pop()
            for j in model.dependencies.needs[node]:
                if j in seen or model.only_ordered(j, node):
                    continue
                seen.add(j)
                if self.at[j] >= 0:
                    found.append(j)
                elif self.lazy[j] and not self.source[j]:
                    stack.append(j)
        return found

    def _live_at_kernels(self, model: NodeTable) -> tuple[list[int], list[int]]:
        """Compute, by number, bytes live before the kernel, and the most until the next one."""
        live, before, most = LiveBytes(model.liveness), list[int](), list[int]()
        for i, number in enumerate(self.at):
            if number >= 0:
                before.append(live.now)
                most.append(0)
            during = live.run(i)
            if most and during > most[-1]:
                most[-1] = during
        return before, most


def _adds_less(model: NodeTable, i: int) -> bool:
    """Return whether a node leaves no more bytes live than it frees."""
    live = model.liveness
    added = sum(live.size[s] for s in live.allocates[i] if s in live.kept)
    own = live.allocates[i]
    read = sum(live.size[s] for s in live.touches[i] if s not in live.kept and s not in own)
    return not added or added < read


def latest_starts(
    gathers: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], end_ms: float
) -> list[float]:
    """Compute when each gather of a stream must begin so that none delays its use.

    Times are milliseconds of the kernels' time. Other collectives of the stream move the deadline
    of the gathers before them forward.

    Args:
        gathers: use and duration of each gather, in the order of launch.
        others: earliest begin and duration of each other collective, ascending.
        end_ms: the end of the last kernel.
    """
    found, bound, left = [0.0] * len(gathers), end_ms, len(others)
    for i in reversed(range(len(gathers))):
        use_ms, ms = gathers[i]
        bound = min(bound, use_ms)
        while left and others[left - 1][0] >= bound:
            left -= 1
        bound -= ms
        while left and others[left - 1][0] >= bound:
            left -= 1
            bound -= others[left][1]
        found[i] = bound
    return found
