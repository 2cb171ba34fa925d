"""The passes that merge collectives: one bucket per unit, or up to a byte cap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch.fx as fx

from .._torch import aot as _aot
from ..bucketing.caps import CapMb, Eligible, plan_by_cap
from ..bucketing.groups import GroupFilter
from ..bucketing.merge import PayloadKey, apply_plan
from ..bucketing.plan import BucketingPlan
from ..bucketing.units import HasUnits, UnitIndex, plan_units
from ..graph.collectives import KINDS, Kind, check_kinds, count_collectives
from ..reports.graph import GraphReport, emit
from .base import Compilation, GraphLike, GraphPass, Stage, graph_of
from .code import call
from .divided import DividedUnits
from .silence import warn_of_silence

__all__ = [
    "BucketByCap",
    "BucketUnits",
    "bucket_graph",
]


class BucketUnits(GraphPass):
    """One collective per unit, kind, group and dtype.

    Args:
        order_or_plan: an object with ``units`` (an ``FSDPParamOrder``, a ``BucketPlan``), or a
            sequence of units, each a sequence of parameter or module FQNs.
        kinds: the kinds to bucket. All-reduces (HSDP, DDP) only when asked for.
        payload_order: None, the default, packs a bucket's members in ``order_or_plan``'s order
            where that can be called (an ``FSDPParamOrder``), and else in that of
            ``bucket_payload_order_key``, or in graph order where that entry is unset. True insists
            on ``order_or_plan``'s, False on graph order, and another callable ``start -> key`` on
            its own.

    Raises:
        TypeError: ``payload_order`` is True, but ``order_or_plan`` can't be called; or it is
            neither a bool, None nor a callable; or a unit's name is no string.
        ValueError: an unknown kind, or one name in two units. In a compile: the config entry
            ``bucket_payload_order_key`` is set to another order than the one asked for.
    """

    stage: Stage = "forward_backward"

    def __init__(
        self,
        order_or_plan: HasUnits | Iterable[Sequence[str]],
        kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
        payload_order: bool | PayloadKey | None = None,
    ) -> None:
        self.kinds = check_kinds(kinds)
        if not isinstance(payload_order, bool | None) and not callable(payload_order):
            raise TypeError(
                "payload_order must be True, False or a callable of a node, or None for the "
                f"order's own, got {payload_order!r}"
            )
        if payload_order is True and not callable(order_or_plan):
            raise TypeError(
                f"payload_order=True needs an order that can be called with a node, got "
                f"{type(order_or_plan).__name__}; pass the order as payload_order="
            )
        units = order_or_plan.units if isinstance(order_or_plan, HasUnits) else order_or_plan
        if isinstance(units, str):
            raise TypeError(f"units must be a sequence of units, got the string {units!r}")
        self.units = tuple((u,) if isinstance(u, str) else tuple(u) for u in units)
        self.aliases = tuple(getattr(order_or_plan, "aliases", ()))
        self.index = UnitIndex(self.units, self.aliases)  # bad names are known before a compile
        self._divided = DividedUnits(self.index)
        self._given = order_or_plan if isinstance(order_or_plan, HasUnits) else self.units
        self._payload_order = payload_order
        self.last_report: GraphReport | None = None
        self.payload_key: PayloadKey | Literal[False] | None
        if payload_order is True or (payload_order is None and callable(order_or_plan)):
            self.payload_key = order_or_plan  # type: ignore[assignment]
        else:
            self.payload_key = payload_order

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        alone, compilation = compilation is None, compilation or Compilation()
        g = graph_of(graph)
        plan = plan_units(compilation.analysis(g), self.index, self.kinds)
        self.last_report = apply_and_report(g, plan, self.payload_key, self.kinds)
        compilation.report.graphs.append(self.last_report)
        if plan.uncovered:
            compilation.warn_uncovered(plan.uncovered, self.units)
        self._divided.look(g, compilation)
        if alone:  # a backend looks at what all its passes did
            warn_of_silence(g, [self.last_report], compilation)

    def __repr__(self) -> str:
        asked = self._payload_order  # what is packed by without a word needs none
        kinds = None if self.kinds == KINDS[:2] else self.kinds
        return call("BucketUnits", self._given, kinds=kinds, payload_order=asked)

    def settings(self) -> tuple[Any, ...]:
        """Units, kinds and the payload order's own identity."""
        return (self.units, self.aliases, self.kinds, self.payload_key)


class BucketByCap(GraphPass):
    """As few collectives as a byte cap allows; see :func:`.plan_by_cap` for the rules.

    Args:
        cap_mb: in MiB, see :func:`.plan_by_cap`; None takes torch's estimate for each group.
        kinds: the kinds to bucket.
        eligible: see :func:`.plan_by_cap`.
        group_filter: see :func:`.plan_by_cap`; :data:`.primary_group` is one.
        non_adjacent: see :func:`.plan_by_cap`.
        payload_order: ``start -> key`` by which a bucket's members are packed, ascending, such as
            an ``FSDPParamOrder``; False packs in graph order; None leaves it to
            ``bucket_payload_order_key``, graph order where that entry is unset.

    Raises:
        TypeError: ``payload_order`` is no callable.
        ValueError: an argument that :func:`.plan_by_cap` does not take. In a compile: the config
            entry ``bucket_payload_order_key`` is set to another order than ``payload_order``.
    """

    stage: Stage = "forward_backward"

    def __init__(
        self,
        cap_mb: CapMb = None,
        *,
        kinds: Collection[Kind] = KINDS,
        eligible: Eligible = "tag",
        group_filter: GroupFilter | None = None,
        non_adjacent: bool = True,
        payload_order: PayloadKey | Literal[False] | None = None,
    ) -> None:
        check_payload_order(payload_order)
        self.options: dict[str, Any] = {
            "cap_mb": dict(cap_mb) if isinstance(cap_mb, Mapping) else cap_mb,
            "kinds": check_kinds(kinds),
            "eligible": eligible,
            "group_filter": group_filter,
            "non_adjacent": non_adjacent,
        }
        self.payload_key = payload_order
        self.last_report: GraphReport | None = None
        empty = fx.Graph()
        empty.output(())
        plan_by_cap(empty, **self.options)  # bad options are known before anything is compiled

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        g = graph_of(graph)
        plan = plan_by_cap(g if compilation is None else compilation.analysis(g), **self.options)
        self.last_report = apply_and_report(g, plan, self.payload_key, self.options["kinds"])
        if compilation is None:
            warn_of_silence(g, [self.last_report], Compilation())
        else:
            compilation.report.graphs.append(self.last_report)

    def __repr__(self) -> str:
        defaults = {"kinds": KINDS, "eligible": "tag", "non_adjacent": True}
        changed = {k: v for k, v in self.options.items() if v != defaults.get(k)}
        return call("BucketByCap", **changed, payload_order=self.payload_key)

    def settings(self) -> tuple[Any, ...]:
        """The options, and the payload order's own identity."""
        caps = self.options["cap_mb"]
        if isinstance(caps, Mapping):
            caps = sorted(caps.items(), key=repr)
        return ({**self.options, "cap_mb": caps}, self.payload_key)


def bucket_graph(
    gm: GraphLike,
    cap_mb: CapMb = None,
    *,
    payload_order: PayloadKey | Literal[False] | None = None,
    **options: Any,
) -> GraphReport:
    """Bucket one graph by size, in place: :class:`BucketByCap` as a function.

    Args:
        gm: a forward, backward or inference graph, or a trace of a whole step. A ``GraphModule`` is
            recompiled.
        cap_mb: as in :class:`BucketByCap`.
        payload_order: as in :class:`BucketByCap`.
        options: its other arguments. Untagged graphs want ``eligible="structure"``.

    Raises:
        TypeError: an unknown option.
        ValueError: a bad option.
        Exception: what :func:`.plan_by_cap` and :func:`.apply_plan` raise; then the
            graph is as it was.
    """
    by_cap = BucketByCap(cap_mb, payload_order=payload_order, **options)
    by_cap(gm)
    if isinstance(gm, fx.GraphModule):
        gm.recompile()
    assert by_cap.last_report is not None
    return by_cap.last_report


def check_payload_order(order: object) -> None:
    """What a pass by size takes as ``payload_order``.

    Raises:
        TypeError: something else than a callable, False and None.
    """
    if order is not None and order is not False and not callable(order):
        raise TypeError(f"payload_order must be a callable of a node, False or None, got {order!r}")


def apply_and_report(
    graph: fx.Graph,
    plan: BucketingPlan,
    payload_key: PayloadKey | Literal[False] | None,
    kinds: Collection[Kind] = KINDS,
) -> GraphReport:
    """Merge what is planned; returns the report, which is also logged.

    Args:
        graph: as of :func:`.apply_plan`.
        plan: as of :func:`.apply_plan`.
        payload_key: as of :func:`.apply_plan`.
        kinds: what the plan was asked to bucket.
    """
    stage, before = _aot.stage_of(graph), count_collectives(graph)
    buckets = apply_plan(graph, plan, payload_key)
    report = GraphReport(
        stage,
        before,
        count_collectives(graph),
        tuple(buckets),
        plan.uncovered,
        plan.left_alone,
        plan.splits,
        plan.alone,
        tuple(kinds),
    )
    emit(report)
    return report
