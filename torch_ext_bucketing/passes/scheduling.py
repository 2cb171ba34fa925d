"""Scheduling as graph passes for :func:`.backend`.

With ``"aot_eager"`` a graph runs in its order, so reordering it is enough. With ``"inductor"`` the
backend pins the order afterwards (see :mod:`.scheduling.pin_order`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch.fx as fx

from ..bucketing.merge import PayloadKey
from ..graph.collectives import KINDS, Kind
from ..reports.caps import CapsReport
from ..reports.graph import GraphReport
from ..reports.schedule import ScheduleReport
from ..scheduling.cap_search import choose_caps
from ..scheduling.cost import H100, Machine, check_machine
from ..scheduling.memory import within
from ..scheduling.policy import Policy, policies_of
from ..scheduling.scheduler import schedule
from .base import Compilation, GraphLike, GraphPass, Stage, graph_of
from .bucketing import apply_and_report, check_payload_order
from .cache_key import brief
from .code import call

__all__ = [
    "BucketAndSchedule",
    "Schedule",
]


class Schedule(GraphPass):
    """Reorder each forward, backward and inference graph; see :func:`.schedule`.

    Comes after the passes that bucket. ``PeakMemory(ratio=...)`` refers to the graph as it was
    before any of them.

    Args:
        policies: what bounds and guides the order.
        machine: what the cost model times nodes for.

    Raises:
        TypeError: something in ``policies`` is no policy, or ``machine`` is none.
        ValueError: two policies of one class.
    """

    stage: Stage = "forward_backward"
    orders = True

    def __init__(self, policies: Policy | Iterable[Policy], machine: Machine = H100) -> None:
        self.policies = policies_of(policies)
        self.machine = machine
        self.last_report: ScheduleReport | None = None
        check_machine(machine)

    def prepare(self, graph: GraphLike, compilation: Compilation) -> None:
        """Note the peak of the graph before it is bucketed."""
        try:
            compilation.note_inputs(graph)
            compilation.reference_bytes = compilation.analysis(graph).peak_bytes
        except Exception:  # ``schedule`` will meet the same and say so
            compilation.reference_bytes = None

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        self._schedule(graph, compilation)

    def _schedule(
        self,
        graph: GraphLike,
        compilation: Compilation | None,
        caps: CapsReport | None = None,
    ) -> None:
        reference = None if compilation is None else compilation.reference_bytes
        report = schedule(
            graph,
            self._bounded(compilation),
            machine=self.machine,
            reference_bytes=reference,
            size_hints=None if compilation is None else compilation.size_hints,
            external_live_bytes=0 if compilation is None else compilation.external_live_bytes,
        )
        self.last_report = replace(report, caps=caps)
        if compilation is not None:
            compilation.report.schedules.append(self.last_report)

    def _bounded(self, compilation: Compilation | None) -> tuple[Policy, ...]:
        """The policies, and the bound that a pass before chose under."""
        if compilation is None or compilation.memory_bytes is None:
            return self.policies
        return within(
            self.policies, compilation.memory_bytes, compilation.reference_bytes or sys.maxsize
        )

    def basis(self) -> str:
        """The machine, by name and digest."""
        return f"machine {self.machine.name} {brief(self.machine)}"

    def __repr__(self) -> str:
        return call(
            type(self).__name__,
            self.policies,
            machine=None if self.machine == H100 else self.machine,
        )

    def settings(self) -> tuple[Any, ...]:
        """Policies and machine."""
        return (self.policies, self.machine)


class BucketAndSchedule(Schedule):
    """Bucket by size with the caps that make the fastest schedule, and schedule; see
    :func:`.choose_caps`. Takes the place of ``BucketByCap`` and :class:`Schedule`.

    Args:
        policies: as of :class:`Schedule`.
        caps_mb: the caps to try, in MiB; see :func:`.choose_caps`.
        kinds: what is bucketed.
        payload_order: as of ``BucketByCap``.
        machine: as of :class:`Schedule`.
        options: ``eligible`` and ``group_filter`` of :func:`.plan_by_cap`.

    Raises:
        TypeError: as of :class:`Schedule`; ``payload_order`` is no callable; an unknown option.
        ValueError: as of :class:`Schedule`; no cap, or one that is no positive number; or what an
            option may not be.
    """

    def __init__(
        self,
        policies: Policy | Iterable[Policy],
        *,
        caps_mb: Collection[float] | None = None,
        kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
        payload_order: PayloadKey | Literal[False] | None = None,
        machine: Machine = H100,
        **options: Any,
    ) -> None:
        super().__init__(policies, machine)
        check_payload_order(payload_order)
        self.caps_mb = None if caps_mb is None else tuple(caps_mb)
        empty = fx.Graph()
        empty.output(())
        # Bad options are known before anything is compiled.
        choose_caps(
            empty, self.policies, caps_mb=self.caps_mb, machine=machine, kinds=kinds, **options
        )
        self.options = {"kinds": tuple(kinds), **options}
        self.payload_key = payload_order
        self.last_buckets: GraphReport | None = None

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        g = graph_of(graph)
        plan, found = choose_caps(
            g if compilation is None else compilation.analysis(g),
            self._bounded(compilation),
            caps_mb=self.caps_mb,
            machine=self.machine,
            reference_bytes=None if compilation is None else compilation.reference_bytes,
            **self.options,
        )
        self.last_buckets = apply_and_report(g, plan, self.payload_key, self.options["kinds"])
        if compilation is not None:
            compilation.report.graphs.append(self.last_buckets)
        self._schedule(graph, compilation, found)

    def __repr__(self) -> str:
        changed = {k: v for k, v in self.options.items() if (k, v) != ("kinds", KINDS[:2])}
        return call(
            type(self).__name__,
            self.policies,
            caps_mb=self.caps_mb,
            **changed,
            payload_order=self.payload_key,
            machine=None if self.machine == H100 else self.machine,
        )

    def settings(self) -> tuple[Any, ...]:
        """Everything that was given."""
        return (*super().settings(), self.caps_mb, self.options, self.payload_key)
