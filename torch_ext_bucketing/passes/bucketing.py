"""The passes that merge collectives: one bucket per unit, or up to a byte cap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.fx as fx

from .._torch import aot as _aot
from ..bucketing.caps import CapMb, Eligible, check_options, plan_by_cap
from ..bucketing.groups import GroupFilter
from ..bucketing.merge import PayloadKey, apply_plan
from ..bucketing.plan import MergePlan
from ..bucketing.units import plan_units
from ..fsdp.units import HasUnits, Units
from ..graph.collectives import KINDS, Kind, check_kinds, count_collectives
from ..reports.graph import GraphReport, emit
from .base import (
    Buckets,
    Compilation,
    GraphLike,
    GraphPass,
    Order,
    RankOrder,
    Stage,
    Tags,
    graph_of,
)
from .code import call, code_of
from .diagnostics import DividedUnits

__all__ = [
    "BucketByCap",
    "BucketUnits",
]


class BucketUnits(GraphPass):
    """Merge into one collective per unit, kind, group and dtype.

    Args:
        units: an ``FSDPParamOrder``, a ``UnitSpec``, or a sequence of units, each a sequence of
            FQNs of parameters or modules.
        kinds: the kinds to bucket. All-reduces (HSDP, DDP) only when asked for.
        payload_order: the order of a bucket's members in its payload: ascending by the key that
            this gives for a start node; None: graph order. ``"units"``, the default: the order that
            was given as ``units``, and graph order for units that are no order.

    Raises:
        TypeError: ``payload_order`` is something else; or a unit's name is no string.
        ValueError: an unknown kind, or one name in two units.
    """

    stage: Stage = "forward_backward"
    needs = (Tags,)
    undoes = (RankOrder, Order)

    def __init__(
        self,
        units: HasUnits | Iterable[Sequence[str]],
        kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
        payload_order: PayloadKey | Literal["units"] | None = "units",
    ) -> None:
        self.kinds = check_kinds(kinds)
        self.payload_order: PayloadKey | None
        self._packed_by_units = payload_order == "units"
        if payload_order == "units":
            self.payload_order = units if callable(units) else None
        else:
            self.payload_order = check_payload_order(payload_order)
        self._units = Units.of(units)
        self.units = self._units.units
        self.gives = (Buckets(self.kinds, self._units),)
        self._divided = DividedUnits(self._units)
        self._given = units if isinstance(units, HasUnits) else self.units
        self.last_report: GraphReport | None = None

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        plan = plan_units(compilation.analysis(g), self._units, self.kinds)
        self.last_report = apply_and_report(g, plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(self.last_report)
        if plan.uncovered:
            compilation.warn_uncovered(plan.uncovered, self.units)
        self._divided.look(g, compilation)

    def __repr__(self) -> str:
        kinds = None if self.kinds == KINDS[:2] else self.kinds
        text = call("BucketUnits", self._given, kinds=kinds)
        if self._packed_by_units:
            return text
        return f"{text[:-1]}, payload_order={code_of(self.payload_order)})"

    def settings(self) -> tuple[Any, ...]:
        """Units, kinds and the payload order's own identity."""
        return (self.units, self._units.aliases, self.kinds, self.payload_order)


class BucketByCap(GraphPass):
    """Merge into as few collectives as a byte cap allows; see :func:`.plan_by_cap` for the rules.

    Args:
        cap_mb: in MiB, see :func:`.plan_by_cap`; None takes torch's estimate for each group.
        kinds: the kinds to bucket.
        eligible: see :func:`.plan_by_cap`.
        group_filter: see :func:`.plan_by_cap`; :data:`.primary_group` is one.
        non_adjacent: see :func:`.plan_by_cap`.
        payload_order: the order of a bucket's members in its payload: ascending by the key that
            this gives for a start node, such as an ``FSDPParamOrder``; None: graph order.

    Raises:
        TypeError: ``payload_order`` is no callable.
        ValueError: an argument that :func:`.plan_by_cap` does not take.
    """

    stage: Stage = "forward_backward"
    needs = (Tags,)
    undoes = (RankOrder, Order)

    def __init__(
        self,
        cap_mb: CapMb = None,
        *,
        kinds: Collection[Kind] = KINDS,
        eligible: Eligible = "tag",
        group_filter: GroupFilter | None = None,
        non_adjacent: bool = True,
        payload_order: PayloadKey | None = None,
    ) -> None:
        self.payload_order = check_payload_order(payload_order)
        self.options: dict[str, Any] = {
            "cap_mb": dict(cap_mb) if isinstance(cap_mb, Mapping) else cap_mb,
            "kinds": check_kinds(kinds),
            "eligible": eligible,
            "group_filter": group_filter,
            "non_adjacent": non_adjacent,
        }
        check_options(**self.options)
        self.gives = (Buckets(self.options["kinds"]),)
        self.last_report: GraphReport | None = None

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        plan = plan_by_cap(compilation.analysis(g), **self.options)
        self.last_report = apply_and_report(g, plan, self.payload_order, self.options["kinds"])
        compilation.report.graphs.append(self.last_report)

    def __repr__(self) -> str:
        defaults = {"kinds": KINDS, "eligible": "tag", "non_adjacent": True}
        changed = {k: v for k, v in self.options.items() if v != defaults.get(k)}
        return call("BucketByCap", **changed, payload_order=self.payload_order)

    def settings(self) -> tuple[Any, ...]:
        """The options, and the payload order's own identity."""
        caps = self.options["cap_mb"]
        if isinstance(caps, Mapping):
            caps = sorted(caps.items(), key=repr)
        return ({**self.options, "cap_mb": caps}, self.payload_order)


def check_payload_order(order: PayloadKey | None) -> PayloadKey | None:
    """``order``, if that is what a pass takes as ``payload_order``.

    Raises:
        TypeError: something else than a callable and None.
    """
    if order is not None and not callable(order):
        raise TypeError(
            "payload_order must be a callable that gives a start node's key, or None for graph "
            f"order, got {order!r}"
        )
    return order


def apply_and_report(
    graph: fx.Graph,
    plan: MergePlan,
    payload_order: PayloadKey | None,
    kinds: Collection[Kind],
) -> GraphReport:
    """Merge what is planned; returns the report, which is also logged.

    Args:
        graph: as of :func:`.apply_plan`.
        plan: as of :func:`.apply_plan`.
        payload_order: as of :func:`.apply_plan`.
        kinds: what the plan was asked to bucket.
    """
    stage, before = _aot.stage_of(graph), count_collectives(graph)
    buckets = apply_plan(graph, plan, payload_order)
    report = GraphReport(
        stage,
        before,
        count_collectives(graph),
        tuple(buckets),
        tuple(kinds),
        **plan.not_merged(),
    )
    emit(report)
    return report
