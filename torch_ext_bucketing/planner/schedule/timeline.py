"""Timelines of an order on the host, one compute stream and one stream per process group.

The host launches one node after the other. Kernels begin when they are launched, and their stream
and their inputs are ready. A collective begins when it is launched, its group's stream is free and
the compute stream has reached it (:mod:`.streams`). A wait holds the compute stream until its
collective ends, and does not hold the host::

    host       mm cat rs mm mm wait mm
    compute       mm   cat   mm  mm  |exposed| wait  mm
    group 0                 [ reduce_scatter ]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ...fsdp.all_to_all import SUM
from ...graph.tags import is_optimizer
from ..cost.cost import Costs
from .model import Model
from .streams import Streams


@dataclass(frozen=True, eq=False)
class Timeline:
    """An order on a machine.

    Args:
        order: places of the nodes.
        begin: milliseconds at the begin of each node, by place.
        end: milliseconds at its end.
        step_ms: the end of the last stream.
        compute_ms: milliseconds that the compute stream is busy.
        exposed_ms: milliseconds that it waits for communication or the host, also after its last
            kernel.
    """

    order: Sequence[int]
    begin: Sequence[float]
    end: Sequence[float]
    step_ms: float
    compute_ms: float
    exposed_ms: float
    _model: Model = field(repr=False)

    @staticmethod
    def of(model: Model, order: Sequence[int] | None = None) -> Timeline:
        """Compute the timeline of ``order``, by default the graph's."""
        order = range(len(model)) if order is None else order
        streams, step, busy = _run(model, order)
        return Timeline(order, streams.begin, streams.end, step, busy, step - busy, model)

    # Most orders of a search are too long, and nobody reads their memory.

    @cached_property
    def launched(self) -> Sequence[float]:
        """Milliseconds at which the host has launched each node of ``order``."""
        return [*itertools.accumulate(self._model.host[i] for i in self.order)]

    @cached_property
    def live(self) -> Sequence[int]:
        """Bytes live while each node of ``order`` runs."""
        return self._model.liveness.profile(self.order)

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that are live at any time."""
        return max(self.live, default=self._model.liveness.at_start)

    @cached_property
    def longest_run(self) -> int:
        """Most compute nodes before a reduce-scatter start and after the one before it.

        0 without reduce-scatters.
        """
        return longest_compute_run(self._model, self.order)


def step_ms(model: Model, order: Sequence[int]) -> float:
    """Compute :attr:`Timeline.step_ms` alone, of all nodes or some."""
    return _run(model, order)[1]


def _run(model: Model, order: Sequence[int]) -> tuple[Streams, float, float]:
    """Run ``order``: return the streams, the end of the last one, and the compute stream's load."""
    streams = Streams(model.group, model.ms, model.shared)
    begin, end = streams.begin, streams.end
    now = busy = launched = 0.0
    host = model.host
    for i in order:
        launched += host[i]
        if launched > now:
            now = launched
        if model.group[i] is not None:
            streams.launch(i, now)
            continue
        start = model.start_of[i]
        if start >= 0 and end[start] > now:
            now = end[start]
        begin[i] = now
        now += model.ms[i]
        busy += model.ms[i]
        end[i] = now
    return streams, max(now, streams.last_end()), busy


def compute_runs(model: Model, order: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each reduce-scatter start, and the number of compute nodes since the one before it."""
    run = 0
    for i in order:
        run += model.compute[i]
        if model.reduces[i]:
            yield i, run
            run = 0


def longest_compute_run(model: Model, order: Sequence[int]) -> int:
    """Return :attr:`Timeline.longest_run`."""
    return max((run for _, run in compute_runs(model, order)), default=0)


def rank_order_ms(model: Model, order: Sequence[int], costs: Costs) -> float | None:
    """Compute :attr:`.ScheduleReport.rank_order_ms`."""
    nodes = model.dependencies.nodes
    if not any(n.target is SUM for n in nodes):
        return None
    ms, host = costs.with_rings(nodes, model.ms, model.host)
    rings = replace(model, ms=ms, host=host)
    return Timeline.of(model, order).step_ms - Timeline.of(rings, order).step_ms


def optimizer_ms(model: Model, order: Sequence[int]) -> tuple[float, float, float] | None:
    """Compute :attr:`.ScheduleReport.optimizer_ms`."""
    mine = [i for i, node in enumerate(model.dependencies.nodes) if is_optimizer(node)]
    if not mine:
        return None
    ms, host = list(model.ms), list(model.host)
    for i in mine:
        ms[i] = host[i] = 0.0
    without = Timeline.of(replace(model, ms=ms, host=host), order).step_ms
    kernels = sum(model.ms[i] for i in mine if model.group[i] is None)
    collectives = sum(model.ms[i] for i in mine if model.group[i] is not None)
    return Timeline.of(model, order).step_ms - without, kernels, collectives
