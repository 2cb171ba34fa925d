"""The passes that merge collectives: one bucket per unit, or up to a byte cap."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

from ..bucketing.caps import ByCap, CapMb, Eligible
from ..bucketing.groups import Groups, check_groups
from ..bucketing.merge import PayloadKey, check_payload_order, merge_and_report
from ..bucketing.units import ByUnit
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
        self._planner = ByUnit(self.units, self.kinds)
        self.gives = (Buckets(self.kinds, self.units, self._planner),)
        self._divided = DividedUnits(self.units)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = self._planner.plan(analysis)
        report = merge_and_report(analysis, plan, self._payload_key, self.kinds)
        compilation.report.graphs.append(report)
        if plan.uncovered:
            compilation.warn_uncovered(plan.uncovered, self.units)
        self._divided.look(analysis.graph, compilation)


class BucketByCap(GraphPass):
    """Merge into as few collectives as a byte cap allows; see :class:`.ByCap` for the rules, the
    arguments and what they may not be.

    Args:
        cap_mb: in MiB; None takes torch's estimate for each group.
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
        groups: Groups = None,
        non_adjacent: bool = True,
        payload_order: PayloadKey | None = None,
    ) -> None:
        self.cap_mb = dict(cap_mb) if isinstance(cap_mb, Mapping) else cap_mb
        self.kinds = check_kinds(kinds)
        self.eligible = eligible
        self.groups = check_groups(groups)
        self.non_adjacent = non_adjacent
        self.payload_order = check_payload_order(payload_order)
        self._planner = ByCap(
            self.cap_mb,
            kinds=kinds,
            eligible=eligible,
            groups=groups,
            non_adjacent=non_adjacent,
        )
        self.gives = (Buckets(self.kinds, planner=self._planner),)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = self._planner.plan(analysis)
        report = merge_and_report(analysis, plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)
