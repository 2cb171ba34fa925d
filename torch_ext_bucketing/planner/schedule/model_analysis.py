"""Facts that all orders of a model share; :mod:`.list_schedule` defines the sorts of nodes."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

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
        at: number of each kernel, by place.
        compute_before: by number, compute nodes before the kernel.
        ms_before: by number, milliseconds of the kernels before it.
        total_ms: milliseconds of all kernels.
        sends: by place, the node's next collective.
        first_use: by place, number of the first kernel that needs the node.
        dead_ends: by place, whether the node is lazy, reaches no kernel and no collective, and
            leaves no more bytes live than it frees.
        gathers: by process group, the starts that need no kernel and reach one.
        wait_of: by place of a start, the place of its wait.
        reductions: by process group, the reduce-scatters, the last one first.
        fillers: lazy nodes that take time and need no collective, in the order of their use.
        latest: by place of a gather, when it must begin; see :func:`latest_starts`.
        live: by number, bytes live before the kernel.
        most: by number, the most bytes live from then until the next kernel.
    """

    def __init__(self, model: NodeTable, paths: Paths) -> None:
        needs = model.dependencies.needs
        size = len(model)
        self.lazy = [False] * size
        self.source = [False] * size
        for i, mine in enumerate(needs):
            group, wait = model.group[i], model.start_of[i] >= 0
            free = all(self.source[j] for j in mine if not model.only_ordered(j, i))
            plain = group is None and not model.compute[i]
            self.source[i] = free and not model.compute[i]
            self.lazy[i] = plain and (wait or model.view[i] or free)
            if plain and not self.lazy[i]:
                self.source[i] = False
        self.kernels = [i for i in range(size) if not self.lazy[i] and model.group[i] is None]
        self.at = {i: k for k, i in enumerate(self.kernels)}
        # One entry more than there are kernels: the last one is the total.
        kernels = self.kernels
        self.compute_before = [
            *itertools.accumulate((model.compute[i] for i in kernels), initial=0)
        ]
        self.ms_before = [*itertools.accumulate((model.ms[i] for i in kernels), initial=0.0)]
        self.total_ms = self.ms_before[-1]
        self.first_use = [len(self.kernels)] * size
        for i in reversed(range(size)):
            for j in model.dependencies.needed_by[i]:
                if not model.only_ordered(i, j):
                    self.first_use[i] = min(self.first_use[i], self.at.get(j, self.first_use[j]))
        self.sends = sends_of(model, paths.tail)
        # A part of a gathered parameter that is kept is one: it frees the rest.
        self.dead_ends = [False] * size
        for i in reversed(range(size)):
            self.dead_ends[i] = (
                self.lazy[i]
                and model.start_of[i] < 0
                and all(self.dead_ends[j] for j in model.dependencies.needed_by[i])
                and _adds_less(model, i)
            )
        # Items of several results run at once, too: until then all results are live.
        nodes = model.dependencies.nodes
        self.run_after = [
            [j for j in users if self.dead_ends[j] or nodes[j].target is operator.getitem]
            for users in model.dependencies.needed_by
        ]
        # The most bytes that a node allocates, with the lazy nodes right before it.
        self.adds = [0] * size
        for i, mine in enumerate(needs):
            self.adds[i] = sum(model.liveness.size[s] for s in model.liveness.allocates[i])
            self.adds[i] += sum(self.adds[j] for j in mine if j not in self.at)
            self.adds[i] = min(self.adds[i], _LARGE)
        # A start that reaches no kernel is not a gather: a reduction of an input, for one.
        self.gathers: dict[str, list[int]] = {}
        for i in range(size):
            group = model.group[i]
            if group is not None and self.source[i] and self.first_use[i] < len(self.kernels):
                self.gathers.setdefault(group, []).append(i)
        self.wait_of = {s: i for i, s in enumerate(model.start_of) if s >= 0}
        self.reductions: dict[str, list[int]] = {}
        for i in reversed(range(size)):
            if model.reduces[i]:
                self.reductions.setdefault(str(model.group[i]), []).append(i)
        self._find_available(model)
        given = [False] * size
        for i, mine in enumerate(needs):
            given[i] = self.source[i] and model.group[i] is None and all(given[j] for j in mine)
        used = [self.first_use[i] < len(kernels) for i in range(size)]
        self.fillers = [i for i in range(size) if given[i] and self.lazy[i] and model.ms[i]]
        self.fillers = sorted((i for i in self.fillers if used[i]), key=self.first_use.__getitem__)
        self.latest = self._latest_starts(model)
        self.live, self.most = self._live_at_kernels(model)

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
            if i in self.at:
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
                if j in self.at:
                    found.append(j)
                elif self.lazy[j] and not self.source[j]:
                    stack.append(j)
        return found

    def _live_at_kernels(self, model: NodeTable) -> tuple[list[int], list[int]]:
        """Compute ``live`` and ``most``, in the order of the graph."""
        live, before, most = LiveBytes(model.liveness), list[int](), list[int]()
        for i in range(len(model)):
            if i in self.at:
                before.append(live.now)
                most.append(0)
            during = live.run(i)
            if most:
                most[-1] = max(most[-1], during)
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
