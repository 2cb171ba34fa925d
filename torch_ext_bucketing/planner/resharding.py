"""Free gathered parameters after forward, as a pass that may choose among them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from .._torch import aot as _aot
from ..bucketing.plan import ByUnit
from ..errors import BoundNotKeptWarning, NothingKeptWarning, check_argument
from ..fsdp.tagging import Chains, parameter_chains, read_in_forward
from ..fsdp.units import Units
from ..graph.nodes import Tag, tag_of
from ..graph.sizes import SizeHints
from ..passes import park
from ..passes.base import PARKED, REGATHERS, Choice, Compilation, GraphPass, Stage, last_of
from ..passes.bucketing import BucketByCap, BucketByUnit, FixedOrderReduce
from ..passes.cache_key import digest
from ..passes.reshard_to import (
    SmallerGroup,
    make_smaller_group,
    read_first_gathers,
    reshard_to,
    what_fits,
)
from .cost.cost import Costs
from .cost.machine import Machine
from .keep.keep import KeepPlanner
from .keep.partitioned import PartitionedModel
from .schedule.policy import Overlap, PeakMemory, policies_of
from .scheduling import BucketAndSchedule, Schedule
from .step_memory import watch_peak


@dataclass(frozen=True, eq=False, repr=False)
class ReshardAfterForward(GraphPass):
    """Free gathered parameters after forward and gather them again for backward.

    Marks every node between a parameter and its first use in computation as ``MUST_RECOMPUTE``, so
    that the partitioner saves the shard and puts a second gather into the backward graph::

        forward   w -> all_gather -> wait -> t -> mm            saved: w
        backward  w -> all_gather -> wait -> t -> t -> mm

    Parts of a parameter that forward does not read, such as data that is scaled for products of
    backward, are gathered in backward alone in any case.

    With a number of ranks, backward gathers in a smaller group, usually a node's, from a copy that
    forward leaves sharded over it, bit for bit as eager FSDP2 does (:mod:`.passes.reshard_to`).
    Such a pass comes after :class:`.MatchFSDP2`, so that a parameter with several uses leaves one
    copy. Only :func:`.backend` removes the second gather from the forward graph again.

    With ``"auto"``, the pass chooses the units that stay gathered. The chosen step is the shortest
    on the cost model whose estimated peak is under the bound ``memory``
    (:mod:`.planner.keep.keep`)::

        [ReshardAfterForward("auto", memory=PeakMemory(gib=70)), BucketByUnit(order), ...]

    With ``to`` as well, each unit stays gathered, is gathered again over all ranks, or inside the
    node. With ``activations``, groups of activations, by unit and sort, are saved or recomputed
    (:mod:`.planner.keep.keepables`); marks of the user's own, such as by
    ``torch.utils.checkpoint``, are kept. With ``memory=PeakMemory(gib=70, host_gib=200)``, saved
    ones may wait in host memory for backward (:mod:`.passes.park`), if that makes the step shorter,
    or the peak smaller where the bound can't be kept.

    The bound covers the graphs, with parameters' shards and gradients, and ``state_bytes``; the
    schedules of the same backend keep it, too. All ranks choose alike, and compare their choice. If
    no unit fits, nothing is kept, with a ``NothingKeptWarning`` that names the missing bytes. If an
    estimate fails, nothing is kept, with a ``BoundNotKeptWarning``.

    Args:
        reshard_after_forward: as in ``fully_shard``. True frees parameters after forward, False
            keeps them gathered. A number is the size of the smaller group: a factor of the ranks
            that share a parameter, counted over neighbouring ranks of the job. It creates process
            groups: make the pass on every rank at the same point of the program. ``"auto"``
            chooses, and takes the arguments from ``memory`` on.
        keep: FQNs of parameters or modules that stay gathered in any case, as eager FSDP2 keeps its
            root's. A name that no parameter has keeps none.
        memory: the bound. A ratio refers to the peak with everything gathered again, the
            collectives of each unit merged, in the order of the graph.
        units: the parameters that are kept together, as in ``BucketByUnit``. None takes the units
            of the backend's ``BucketByUnit``, and without one modules: the part below the first
            number in a name (``layers.3``), and each other module.
        machine: the machine that the cost model times nodes for. None takes that of the scheduling
            pass of the same backend, else :func:`.job_machine`.
        activations: also choose the activations that are saved.
        state_bytes: bytes on each rank that the graphs do not contain.
        curve: also report the choices under other bounds; each takes as long again.
        to: the smaller group, with ``"auto"`` as a number; or as a mesh, whose last dimension it
            is, for shards around tensor parallelism. If a row of ``to`` has all ranks that share a
            parameter, and no others, backward gathers as without it. A group of one rank keeps
            everything, with a warning, as in eager FSDP2. Parameters of other groups, such as
            experts on a mesh of their own, are gathered over those; the report lists them. No group
            at all that ``to`` divides is a ``ValueError`` in a compile.
    """

    stage: ClassVar[Stage] = "joint"
    reshard_after_forward: bool | int | Literal["auto"] = True
    _: KW_ONLY
    keep: Iterable[str] = ()
    memory: PeakMemory | None = None
    units: Units | Iterable[Sequence[str]] | None = None
    machine: Machine | None = None
    activations: bool = False
    state_bytes: int = 0
    curve: bool = False
    to: DeviceMesh | int | None = None
    _kept: Units = field(init=False)
    _to: DeviceMesh | int | None = field(init=False)
    _smaller: SmallerGroup | None = field(init=False)

    def __post_init__(self) -> None:
        mode = self.reshard_after_forward
        if not isinstance(mode, int) and mode != "auto":
            raise TypeError(
                f"reshard_after_forward must be True, False, a number of ranks or 'auto', got "
                f"{mode!r}; names of what stays gathered are keep=[...]"
            )
        if isinstance(self.keep, str) or not isinstance(self.keep, Iterable):
            raise TypeError(f"keep must be a list of FQNs, got {self.keep!r}")
        check_argument("memory", self.memory, PeakMemory | None)
        check_argument("activations", self.activations, bool)
        check_argument("curve", self.curve, bool)
        check_argument("state_bytes", self.state_bytes, int)
        if self.auto and self.memory is None:
            raise ValueError("'auto' needs a bound: memory=PeakMemory(gib=...)")
        if self._parks:
            if not self.activations:
                raise ValueError("host_gib is for activations: give activations=True, too")
            park.import_copies()
        for name in ("memory", "units", "machine", "activations", "state_bytes", "curve"):
            if not self.auto and getattr(self, name) not in (None, 0):
                raise ValueError(f"{name}= belongs to 'auto', got {mode!r}")
        to = self.to
        if not isinstance(mode, bool | str):
            if to is not None:
                raise ValueError(f"give {mode} or to={to!r}, not both")
            to = mode
        if self.machine is not None:
            check_argument("machine", self.machine, Machine)
        keep = tuple(self.keep)
        units = None if self.units is None else Units.of(self.units)
        smaller = None if to is None else make_smaller_group(to)
        self._set(keep=keep, units=units, _kept=Units((keep,)), _to=to, _smaller=smaller)

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({REGATHERS, PARKED} if self._parks else {REGATHERS})

    @property
    def _parks(self) -> bool:
        return self.memory is not None and self.memory.host_gib is not None

    @property
    def auto(self) -> bool:
        """Whether the cost model chooses the units that stay."""
        return self.reshard_after_forward == "auto"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        def is_freed(tag: Tag) -> bool:
            stays = any(self._kept.unit_of(f) is not None for f in tag.fqns)
            return self.reshard_after_forward is not False and not stays

        if self.auto and compilation.fuses:
            _aot.merge_repeats(graph)
        chains = parameter_chains(graph)
        marks = self._choose(graph, chains, compilation) if self.auto else _Marks()
        if self.auto or self._to is None:
            _mark(chains, marks, is_freed)
        in_part = marks.is_part if self.auto else is_freed
        wanted = marks.parts if self.auto else _aot.stage_of(graph) != "inference"
        if self._smaller is not None and wanted:
            compilation.report.rewrites.append(reshard_to(graph, chains, self._smaller, in_part))

    def finish(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Remove the smaller group's gathers from the forward graph; complete host copies."""
        if self._smaller is not None:
            read_first_gathers(graph)
        if self._parks:
            park.finish(graph, compilation)

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Compare the first step's peak with the predicted one."""
        return watch_peak(compiled, compilation)

    def _choose(self, graph: fx.Graph, chains: Chains, compilation: Compilation) -> _Marks:
        """Choose the nodes that stay, with the passes that will run on forward and backward."""
        inside = _aot.Halves(graph).forward
        backward = any(n not in inside and n.op != "output" for n in graph.nodes)
        if _aot.stage_of(graph) == "inference" or not backward:
            return _Marks()
        smaller = None if self._smaller is None else what_fits(chains, self._smaller)
        merging = last_of(compilation.ahead, BucketByUnit, BucketByCap, BucketAndSchedule)
        by_rank = last_of(compilation.ahead, FixedOrderReduce) is not None
        assert self.memory is not None
        try:
            # The policies, the machine and the buckets are those of the passes that will follow.
            order = last_of(compilation.ahead, Schedule) or Schedule([Overlap()])
            machine = self.machine or order.timed_for
            machine = machine.for_backend(compilation.fuses, compilation.captured)
            tags = (tag_of(n) for n in graph.nodes)
            fqns = (f for t in tags if t is not None for f in t.fqns)
            pass_units = merging.units if isinstance(merging, BucketByUnit) else None
            units = Units.of(self.units or pass_units or Units.guessed(fqns))
            buckets = merging and merging.planner
            buckets = buckets or ByUnit(units, tuple(merging.kinds) if merging else ())
            costs = Costs(machine, SizeHints.of(compilation.size_hints))
            model = PartitionedModel(
                graph, costs, units, buckets, by_rank, self.activations, smaller
            )
            planner = KeepPlanner(model, policies_of(order.policies), self.memory.host_bytes)
            limit = self.memory.limit_bytes(planner.reference_bytes) - self.state_bytes
            outcome, report = planner.report(limit, self.curve)
        except Exception as error:
            # Keeping nothing is better than losing the compile.
            text = f"nothing is kept, as an estimate failed: {type(error).__name__}: {error}"
            warnings.warn(text, BoundNotKeptWarning, stacklevel=3)
            compilation.report.warnings.append(text)
            compilation.choice = Choice("keeps nothing, as an estimate failed")
            return _Marks()
        marks = _marks_of(planner.partitioned, outcome.kept, outcome.parked)
        names = digest(*report.kept)[:12] if report.kept else "nothing"
        parked = f", parks {digest(*(n.name for n in marks.parked))[:12]}" if marks.parked else ""
        compilation.choice = Choice(
            f"keeps {len(report.kept)} of {len(report.units)} units ({names}) under {limit} bytes"
            f"{parked}",
            limit,
        )
        if report.warning:
            compilation.warn(report.warning, NothingKeptWarning)
        activations = planner.partitioned.activations
        unknown = () if activations is None else tuple(sorted(activations.unknown.items()))
        report = replace(report, state_bytes=self.state_bytes, unknown=unknown)
        compilation.report.rewrites.append(report)
        return marks

    def settings(self) -> tuple[Any, ...]:
        """Return the fields, with this rank's place in the smaller group for ``to``."""
        named = (getattr(self, f.name) for f in fields(self) if f.init and f.name != "to")
        return (*named, self.to is None, self._smaller)


@dataclass(frozen=True)
class _Marks:
    """Nodes to mark for the partitioner.

    ``gathered`` ones stay, and backward recomputes the activations ``again``. ``parts`` has FQNs of
    parameters that the smaller group gathers again, ``parked`` the saved activations that wait in
    host memory.
    """

    gathered: Collection[fx.Node] = ()
    again: Collection[fx.Node] = ()
    saved: Collection[fx.Node] = ()
    parts: frozenset[str] = frozenset()
    parked: Collection[fx.Node] = ()

    def is_part(self, tag: Tag) -> bool:
        """Check whether the smaller group gathers the parameters of ``tag`` again."""
        return self.parts.issuperset(tag.fqns)


def _mark(chains: Chains, marks: _Marks, is_freed: Callable[[Tag], bool]) -> None:
    """Mark nodes for the partitioner."""
    read = read_in_forward(chains)
    for start, chain in chains.items():
        tag = tag_of(start)
        if tag is not None and (is_freed(tag) or start not in read):
            for node in chain:
                _aot.mark_recompute(node)
    for node in marks.gathered:
        _aot.unmark_recompute(node)
    for node in marks.again:
        _aot.mark_recompute(node)
    for node in marks.saved:
        _aot.mark_save(node)
    for node in marks.parked:
        park.mark(node)


def _marks_of(
    partitioned: PartitionedModel, kept: Collection[int], parked: Collection[int] = ()
) -> _Marks:
    """Translate a choice into marks on nodes."""
    parts = frozenset(
        f for k in kept if k in partitioned.parts for f in partitioned.keepables[k].fqns
    )
    whole = [partitioned.keepables[k] for k in kept if k not in partitioned.parts]
    gathered = dict.fromkeys(n for unit in whole if unit.starts for n in unit.chains)
    activations = partitioned.activations
    if activations is None:
        return _Marks(gathered, parts=parts)
    again, saved = dict(activations.derived), dict(activations.saved)
    for k, unit in enumerate(partitioned.keepables):
        if not unit.starts:
            (saved if k in kept else again).update(dict.fromkeys(unit.chains))
    could = partitioned.could_park(kept)
    return _Marks(gathered, again, saved, parts, [could[s] for s in sorted(parked)])
