"""The passes that merge collectives: one bucket per unit, or up to a byte cap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from ..bucketing.caps import CapMb, Eligible, check_options, plan_by_cap
from ..bucketing.groups import GroupFilter
from ..bucketing.merge import PayloadKey, check_payload_order, merge_and_report
from ..bucketing.units import plan_units
from ..fsdp.units import Units
from ..graph.collectives import KINDS, Kind, check_kinds
from .base import Buckets, Compilation, GraphLike, GraphPass, Order, RankOrder, Stage, Tags
from .diagnostics import DividedUnits


class BucketUnits(GraphPass):
    """Merge into one collective per unit, kind, group and dtype.

    Args:
        units: an ``FSDPParamOrder``, a ``UnitSpec``, or a sequence of units, each a sequence of
            FQNs of parameters or modules.
        kinds: the kinds to bucket. All-reduces (HSDP, DDP) only when asked for.
        payload_order: the order of a bucket's members in its payload: ascending by the key that
            this gives for a start node; None: graph order. ``"units"``: the order that was given as
            ``units``, and graph order for units that are no order.

    Raises:
        TypeError: ``payload_order`` is something else; or a unit's name is no string.
        ValueError: an unknown kind, or one name in two units.
    """

    stage: Stage = "forward_backward"
    needs = (Tags,)
    undoes = (RankOrder, Order)

    def __init__(
        self,
        units: Units | Iterable[Sequence[str]],
        kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
        payload_order: PayloadKey | Literal["units"] | None = "units",
    ) -> None:
        self.units = Units.of(units)
        self.kinds = check_kinds(kinds)
        self.payload_order = payload_order
        if payload_order == "units":
            payload_order = self.units if callable(self.units) else None
        self._payload_key = check_payload_order(payload_order)
        self.gives = (Buckets(self.kinds, self.units),)
        self._divided = DividedUnits(self.units)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = plan_units(analysis, self.units, self.kinds)
        report = merge_and_report(analysis, plan, self._payload_key, self.kinds)
        compilation.report.graphs.append(report)
        if plan.uncovered:
            compilation.warn_uncovered(plan.uncovered, self.units)
        self._divided.look(analysis.graph, compilation)


class BucketByCap(GraphPass):
    """Merge into as few collectives as a byte cap allows; see :func:`.plan_by_cap` for the rules,
    the arguments and what they may not be.

    Args:
        cap_mb: in MiB; None takes torch's estimate for each group.
        group_filter: :data:`.primary_group` is one.
        payload_order: the order of a bucket's members in its payload: ascending by the key that
            this gives for a start node, such as an ``FSDPParamOrder``; None: graph order.
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
        check_options(cap_mb, kinds=kinds, eligible=eligible, group_filter=group_filter)
        self.cap_mb = dict(cap_mb) if isinstance(cap_mb, Mapping) else cap_mb
        self.kinds = check_kinds(kinds)
        self.eligible = eligible
        self.group_filter = group_filter
        self.non_adjacent = non_adjacent
        self.payload_order = check_payload_order(payload_order)
        self.gives = (Buckets(self.kinds),)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        options = self.arguments()
        del options["payload_order"]
        plan = plan_by_cap(analysis, **options)
        report = merge_and_report(analysis, plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)
