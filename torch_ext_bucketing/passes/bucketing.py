"""The passes that merge collectives: one bucket per unit, or up to a byte cap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, Literal

from ..bucketing.caps import ByCap, CapMb, Eligible
from ..bucketing.groups import Groups, check_groups
from ..bucketing.merge import PayloadKey, check_payload_order, merge_and_report
from ..bucketing.units import ByUnit
from ..fsdp.units import Units
from ..graph.collectives import FSDP_KINDS, Kind, check_kinds
from ..graph.unwrap import GraphLike
from .base import GraphPass, Stage
from .compilation import Compilation
from .diagnostics import DividedUnits, RunWatch, watch_for_shards
from .facts import Buckets, Fact, Order, RankOrder, Tags


@dataclass(frozen=True, eq=False, repr=False)
class BucketByUnit(GraphPass):
    """Merge collectives by unit, kind, process group and dtype.

    Args:
        units: an ``FSDPParamOrder``, a ``UnitSpec``, or a sequence of units, each a sequence of
            FQNs of parameters or modules.
        kinds: the kinds to bucket; all-reduces (HSDP, DDP) only if named.
        payload_order: a key of start nodes, ascending in the payload; None: graph order.
            ``"units"``: the order given as ``units``, else graph order.

    Raises:
        TypeError: ``payload_order`` is something else, or the name of a unit is not a string.
        ValueError: an unknown kind, or one name in two units.
    """

    stage: ClassVar[Stage] = "forward_backward"
    requires = (Tags,)
    conflicts_with = (RankOrder, Order)
    units: Units | Iterable[Sequence[str]]
    kinds: Collection[Kind] = FSDP_KINDS
    payload_order: PayloadKey | Literal["units"] | None = "units"
    _units: Units = field(init=False)
    _divided: DividedUnits = field(init=False)

    def __post_init__(self) -> None:
        units = Units.of(self.units)
        self._set(units=units, _units=units, kinds=check_kinds(self.kinds))
        self._set(_divided=DividedUnits(units))
        check_payload_order(self._payload_key)

    @property
    def _payload_key(self) -> PayloadKey | None:
        if self.payload_order == "units":
            return self._units if callable(self._units) else None
        return self.payload_order

    @property
    def provides(self) -> tuple[Fact, ...]:
        return (Buckets(tuple(self.kinds), self._units, self._planner),)

    @property
    def _planner(self) -> ByUnit:
        return ByUnit(self._units, self.kinds)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = self._planner.plan(analysis)
        report = merge_and_report(analysis, plan, self._payload_key, self.kinds)
        compilation.report.graphs.append(report)
        if plan.uncovered:
            compilation.warn_uncovered(plan.uncovered, self._units)
        self._divided.look(analysis.graph, compilation)

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Watch the first runs for gradients that are not reduced as planned."""
        return RunWatch(self._units, compilation).watch(compiled)


@dataclass(frozen=True, eq=False, repr=False)
class BucketByCap(GraphPass):
    """Merge into as few collectives as a byte cap allows.

    :class:`.ByCap` has the rules, the arguments and their errors.

    Args:
        cap_mb: in MiB; None takes torch's estimate for each group.
        payload_order: a key of start nodes, such as an ``FSDPParamOrder``, ascending in the
            payload; None: graph order.
    """

    stage: ClassVar[Stage] = "forward_backward"
    requires = (Tags,)
    conflicts_with = (RankOrder, Order)
    cap_mb: CapMb = None
    _: KW_ONLY
    kinds: Collection[Kind] = FSDP_KINDS
    eligible: Eligible = "tag"
    groups: Groups = None
    non_adjacent: bool = True
    payload_order: PayloadKey | None = None
    _planner: ByCap = field(init=False)

    def __post_init__(self) -> None:
        check_payload_order(self.payload_order)
        cap_mb = dict(self.cap_mb) if isinstance(self.cap_mb, Mapping) else self.cap_mb
        self._set(cap_mb=cap_mb, kinds=check_kinds(self.kinds), groups=check_groups(self.groups))
        self._set(
            _planner=ByCap(
                cap_mb,
                kinds=self.kinds,
                eligible=self.eligible,
                groups=self.groups,
                non_adjacent=self.non_adjacent,
            )
        )

    @property
    def provides(self) -> tuple[Fact, ...]:
        return (Buckets(tuple(self.kinds), planner=self._planner),)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        analysis = compilation.analysis(graph)
        plan = self._planner.plan(analysis)
        report = merge_and_report(analysis, plan, self.payload_order, self.kinds)
        compilation.report.graphs.append(report)

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Look for shards in the first run, and warn if there are none."""
        return watch_for_shards(compiled, compilation)
