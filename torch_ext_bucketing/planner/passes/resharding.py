"""The pass that decides which gathered parameters are freed between forward and backward."""

from __future__ import annotations

import posixpath
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal

import torch.fx as fx
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import aot as _aot
from ...errors import BoundNotKeptWarning, NothingKeptWarning
from ...fsdp.chains import Chains, parameter_chains, read_in_forward
from ...fsdp.units import Units
from ...graph.tags import Tag, tag_of
from ...graph.unwrap import GraphLike, graph_of
from ...passes.base import GraphPass, Stage
from ...passes.cache_key import digest
from ...passes.compilation import Choice, Compilation
from ...passes.facts import Buckets, RankOrder, Regathers, Tags, last_fact
from ...rewrites.reshard_to import (
    SmallerGroup,
    make_smaller_group,
    read_first_gathers,
    reshard_to,
    what_fits,
)
from ..cost.devices import job_machine
from ..cost.machine import Machine, check_machine
from ..keep.keep import KeepPlanner, block_units
from ..keep.partitioned import PartitionedModel, UnitOf
from ..schedule.memory import PeakMemory
from ..schedule.overlap import Overlap
from .order import PlannedOrder
from .step_memory import watch_peak


@dataclass(frozen=True, eq=False, repr=False)
class ReshardAfterForward(GraphPass):
    """Free gathered parameters after forward and gather them again for backward.

    Marks every node between a parameter and its first use in computation as ``MUST_RECOMPUTE``, so
    that the partitioner saves the shard and puts a second gather into the backward graph::

        forward   w -> all_gather -> wait -> t -> mm            saved: w
        backward  w -> all_gather -> wait -> t -> t -> mm

    What forward does not read of a parameter, such as data that is scaled for products of backward,
    is gathered in backward alone, whatever is kept.

    With ``to``, that gather is in a smaller group, usually a node's, of a copy that forward leaves
    sharded over it, as with a number as ``reshard_after_forward`` of eager FSDP2, bit for bit (see
    :mod:`.rewrites.reshard_to`). Put it behind :class:`.CombineUses`, so that a parameter with
    several uses leaves one copy; and into :func:`.backend`, which takes the second gather out of
    the forward graph again.

    With ``keep="auto"`` the units whose gathered parameters stay are chosen so that the step,
    scheduled, is the shortest on the cost model among those with an estimated peak of forward and
    backward under the bound ``memory`` (:mod:`.planner.keep.keep`)::

        [ReshardAfterForward(keep="auto", memory=PeakMemory(gib=70)), BucketByUnit(order), ...]

    With ``to`` as well, each unit is gathered again over all ranks, or inside the node, or kept
    whole. With ``activations``, groups of these, by unit and sort, are saved or computed again
    (:mod:`.activations`); what the user marked, by ``torch.utils.checkpoint`` say, stays
    as it is. The bound holds for what the graphs hold, parameters' shards and gradients among it,
    and ``state_bytes`` beside it; schedules of the same backend keep it, too. All ranks choose
    alike, which is part of what they compare. With too little room for any unit nothing is kept,
    and a ``NothingKeptWarning`` says by how much the cheapest unit misses; a choice that fails
    keeps nothing, with a warning.

    Args:
        keep: FQNs of parameters or modules that stay gathered until backward, as eager FSDP2 keeps
            its root's. A name that no parameter has keeps none. Or ``"auto"``, to which the other
            arguments but ``to`` belong.
        memory: the bound. A ratio refers to the peak with everything gathered again, the
            collectives of each unit merged, in the order of the graph.
        units: what is kept or not together, as of ``BucketByUnit``. None takes the units of the
            backend's ``BucketByUnit``, and without one modules: what is below the first number in a
            name (``layers.3``), and each other module.
        machine: what the cost model times nodes for. None takes that of the pass that schedules in
            the same backend, and without one :func:`.job_machine`.
        activations: whether to choose which activations are saved, too.
        state_bytes: bytes on each rank that the graphs do not see.
        curve: whether to report what other bounds would come to, too; each takes as long again.
        to: the smaller group; None: none, backward gathers over all ranks that share a parameter.
            A number of ranks, for sharding over neighbouring ranks of the job: ranks 0 to
            ``to - 1``, the next ``to``, and so on. It creates process groups: make the pass on
            every rank at the same point of the program. Or a mesh, whose last dimension is meant,
            for shards that lie otherwise, such as around tensor parallelism. All ranks of the
            group that shares a parameter, and no others, are in a row of ``to``: then backward
            gathers as without it. One rank keeps everything, with a warning, as in eager FSDP2.
            Parameters of other groups, such as experts on a mesh of their own, are gathered over
            those; the report lists them.

    Raises:
        TypeError: ``keep`` is another string, or holds something else than strings; ``memory``,
            ``units`` or ``machine`` is none; ``to`` is no number and no mesh.
        ValueError: ``"auto"`` without ``memory``, or one of the others without ``"auto"``; one name
            in two units; ``to`` does not divide the ranks of the job, or there is no process group
            yet. In a compile: ``to`` divides no group that parameters are sharded over.
    """

    stage: ClassVar[Stage] = "joint"
    requires = (Tags,)
    provides = (Regathers(),)
    keep: Iterable[str] | Literal["auto"] = ()
    _: KW_ONLY
    memory: PeakMemory | None = None
    units: Units | Iterable[Sequence[str]] | None = None
    machine: Machine | None = None
    activations: bool = False
    state_bytes: int = 0
    curve: bool = False
    to: DeviceMesh | int | None = None
    _kept: Units = field(init=False)
    _smaller: SmallerGroup | None = field(init=False)

    def __post_init__(self) -> None:
        keep = self.keep if isinstance(self.keep, str) else tuple(self.keep)
        if isinstance(keep, str) and keep != "auto":
            raise TypeError(f"keep must be a list of FQNs or 'auto', got the string {keep!r}")
        self._set(keep=keep, _kept=Units(() if self.auto else (keep,)))  # type: ignore[arg-type]
        if self.memory is not None and not isinstance(self.memory, PeakMemory):
            raise TypeError(f"memory must be a PeakMemory or None, got {self.memory!r}")
        if self.auto and self.memory is None:
            raise ValueError("keep='auto' needs a bound: memory=PeakMemory(gib=...)")
        for name in ("memory", "units", "machine", "activations", "state_bytes", "curve"):
            if not self.auto and getattr(self, name) not in (None, 0):
                raise ValueError(f"{name}= belongs to keep='auto', got keep={self.keep!r}")
        if self.machine is not None:
            check_machine(self.machine)
        self._set(units=None if self.units is None else Units.of(self.units))
        self._set(_smaller=None if self.to is None else make_smaller_group(self.to))

    @property
    def auto(self) -> bool:
        """Whether what stays is chosen by the cost model."""
        return self.keep == "auto"

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        def is_freed(tag: Tag) -> bool:
            return all(self._kept.unit_of(f) is None for f in tag.fqns)

        g = graph_of(graph)
        chains = parameter_chains(g)
        choice = self._choose(g, chains, compilation) if self.auto else _Choice()
        if self.auto or self.to is None:
            _mark(chains, choice, is_freed)
        in_part = choice.is_part if self.auto else is_freed
        wanted = choice.parts if self.auto else _aot.stage_of(g) != "inference"
        if self._smaller is not None and wanted:
            compilation.report.rewrites.append(reshard_to(g, chains, self._smaller, in_part))

    def finish(self, graph: GraphLike, compilation: Compilation) -> None:
        """With ``to``, take the second gathers out of the forward graph."""
        if self._smaller is not None:
            read_first_gathers(graph_of(graph))

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Compare the first step's peak with the one that was chosen by."""
        return watch_peak(compiled, compilation)

    def _choose(self, graph: fx.Graph, chains: Chains, compilation: Compilation) -> _Choice:
        """Choose with the passes that will run on the halves of a joint graph."""
        inside = _aot.forward_nodes(graph)
        backward = any(n not in inside and n.op != "output" for n in graph.nodes)
        if _aot.stage_of(graph) == "inference" or not backward:
            return _Choice()
        smaller = None if self._smaller is None else what_fits(chains, self._smaller)
        order = last_fact(compilation.ahead, PlannedOrder) or PlannedOrder((Overlap(),))
        merged = last_fact(compilation.ahead, Buckets) or Buckets()
        by_rank = last_fact(compilation.ahead, RankOrder) is not None
        assert self.memory is not None
        try:
            machine = self.machine or order.machine or job_machine()
            unit_of = _unit_of(graph, Units.of(self.units) if self.units else merged.units)
            given = (order.policies, machine, compilation.size_hints, merged.kinds, by_rank)
            planner = KeepPlanner(graph, unit_of, *given, self.activations, smaller)
            limit = self.memory.limit_bytes(planner.reference_bytes) - self.state_bytes
            outcome, report = planner.report(limit, self.curve)
        except Exception as error:  # losing a compile over it would be worse than keeping nothing
            text = f"nothing is kept, as an estimate failed: {type(error).__name__}: {error}"
            warnings.warn(text, BoundNotKeptWarning, stacklevel=3)
            compilation.report.warnings.append(text)
            compilation.choice = Choice("keeps nothing, as an estimate failed")
            return _Choice()
        names = digest(*report.kept)[:12] if report.kept else "nothing"
        compilation.choice = Choice(
            f"keeps {len(report.kept)} of {len(report.units)} units ({names}) under {limit} bytes",
            limit,
        )
        if report.warning:
            compilation.warn(report.warning, NothingKeptWarning)
        compilation.report.rewrites.append(replace(report, state_bytes=self.state_bytes))
        return _choice(planner.partitioned, outcome.kept)

    def settings(self) -> tuple[Any, ...]:
        """The arguments, with this rank's place in the smaller group."""
        named = (getattr(self, f.name) for f in fields(self) if f.init and f.name != "to")
        return (*named, self.to is None, self._smaller)


@dataclass(frozen=True)
class _Choice:
    """Nodes ``gathered`` between parameters and their uses that stay, activations that backward
    computes ``again``, those that are ``saved``, and FQNs that are gathered again in ``parts``."""

    gathered: Collection[fx.Node] = ()
    again: Collection[fx.Node] = ()
    saved: Collection[fx.Node] = ()
    parts: frozenset[str] = frozenset()

    def is_part(self, tag: Tag) -> bool:
        """Whether a gather's parameters are gathered again in the smaller group."""
        return self.parts.issuperset(tag.fqns)


def _mark(chains: Chains, choice: _Choice, is_freed: Callable[[Tag], bool]) -> None:
    """Have the partitioner carry a choice out."""
    read = read_in_forward(chains)
    for start, chain in chains.items():
        tag = tag_of(start)
        if tag is not None and (is_freed(tag) or start not in read):
            for node in chain:
                if node not in choice.gathered:
                    _aot.mark_recompute(node)
    for node in choice.gathered:
        _aot.unmark_recompute(node)
    for node in choice.again:
        _aot.mark_recompute(node)
    for node in choice.saved:
        _aot.mark_save(node)


def _choice(partitioned: PartitionedModel, kept: Collection[int]) -> _Choice:
    parts = frozenset(f for k in kept if k in partitioned.parts for f in partitioned.units[k].fqns)
    whole = [partitioned.units[k] for k in kept if k not in partitioned.parts]
    gathered = dict.fromkeys(n for unit in whole if unit.starts for n in unit.chains)
    found = partitioned.activations
    if found is None:
        return _Choice(gathered, parts=parts)
    again, saved = dict(found.views), dict(found.saved)
    for k, unit in enumerate(partitioned.units):
        if not unit.starts:
            (saved if k in kept else again).update(dict.fromkeys(unit.chains))
    return _Choice(gathered, again, saved, parts)


def _unit_of(graph: fx.Graph, units: Units | None) -> UnitOf:
    if units is None:
        tags = (tag_of(n) for n in graph.nodes)
        return block_units(f for t in tags if t is not None for f in t.fqns)
    names = [unit_name(unit) for unit in units.units]

    def unit_of(fqn: str) -> tuple[int, str] | None:
        found = units.unit_of(fqn)
        return None if found is None else (found, names[found])

    return unit_of


def unit_name(fqns: Sequence[str]) -> str:
    """A unit in a few words: what its names have in common, else the first of them."""
    name = posixpath.commonpath([f.replace(".", "/") for f in fqns] or [""]).replace("/", ".")
    if name:
        return name
    modules = list(dict.fromkeys(f.split(".")[0] for f in fqns))
    named = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    return named or "the root"
