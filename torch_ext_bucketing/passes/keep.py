"""What :class:`.ReshardAfterForward` keeps with ``keep="auto"``, in a backend with other passes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import torch.fx as fx

from .._torch import aot as _aot
from ..bucketing.units import HasUnits, UnitIndex
from ..graph.collectives import Kind
from ..reports.keep import KeepReport
from ..scheduling.cost import H100, Machine
from ..scheduling.keep import KeepPlanner, block_units
from ..scheduling.memory import PeakMemory
from ..scheduling.overlap import Overlap
from ..scheduling.partitioned import UnitOf
from ..scheduling.policy import Policy
from ..tagging.tag_graph import parameter_chains
from ..tagging.tags import tag_of
from .base import Compilation, GraphPass
from .bucketing import BucketByCap, BucketUnits
from .cache_key import digest
from .scheduling import BucketAndSchedule, Schedule

__all__ = ["NothingKeptWarning", "choose_for"]


class NothingKeptWarning(UserWarning):
    """No unit's gathered parameters could stay from forward to backward."""


def choose_for(
    graph: fx.Graph,
    memory: PeakMemory,
    units: Sequence[Sequence[str]] | None,
    machine: Machine | None,
    curve: bool,
    compilation: Compilation,
) -> tuple[dict[fx.Node, None], KeepReport | None]:
    """Choose for a joint graph, with the passes that will run on its halves.

    Args:
        graph: tagged. It is only read.
        memory: the bound.
        units: as of ``BucketUnits``; None takes those of the backend's, and else modules.
        machine: None takes that of the pass that schedules.
        curve: as of :class:`.ReshardAfterForward`.
        compilation: gets what ranks compare, and the bound that the halves are scheduled under.

    Returns:
        The nodes between parameters and their uses that are not to be computed again, and the
        report; None where the graph has no backward.
    """
    if _aot.stage_of(graph) == "inference":
        return {}, None
    inside = _aot.forward_nodes(graph)
    if all(n in inside or n.op == "output" for n in graph.nodes):
        return {}, None
    after = compilation.following
    scheduler = next((p for p in after if isinstance(p, Schedule)), None)
    policies: tuple[Policy, ...] = (Overlap(),) if scheduler is None else scheduler.policies
    if machine is None:
        machine = H100 if scheduler is None else scheduler.machine
    planner = KeepPlanner(
        graph,
        _unit_of(graph, units, after),
        policies,
        machine,
        compilation.size_hints,
        _kinds(after),
    )
    limit = memory.limit_bytes(planner.reference_bytes)
    outcome, report = planner.report(limit, curve)
    compilation.memory_bytes = limit
    names = digest(*report.kept)[:12] if report.kept else "nothing"
    compilation.decided.append(
        f"keeps {len(report.kept)} of {len(report.units)} units ({names}) under {limit} bytes"
    )
    if report.warning:
        compilation.warn(report.warning, NothingKeptWarning)
    kept = {f for k in outcome.kept for f in planner.partitioned.units[k].fqns}
    nodes: dict[fx.Node, None] = {}
    for start, chain in parameter_chains(graph).items():
        tag = tag_of(start)
        if tag is not None and kept.issuperset(tag.fqns):
            nodes.update(dict.fromkeys(chain))
    return nodes, report


def _kinds(after: Iterable[GraphPass]) -> tuple[Kind, ...]:
    """What is bucketed."""
    found: Collection[Kind] = ()
    for p in after:
        if isinstance(p, BucketUnits):
            found = p.kinds
        elif isinstance(p, BucketByCap | BucketAndSchedule):
            found = p.options["kinds"]
    return tuple(found)


def _unit_of(
    graph: fx.Graph, units: Sequence[Sequence[str]] | None, after: Iterable[GraphPass]
) -> UnitOf:
    aliases: tuple[tuple[str, str], ...] = ()
    if units is None:
        bucketing = next((p for p in after if isinstance(p, BucketUnits)), None)
        if bucketing is None:
            tags = (tag_of(n) for n in graph.nodes)
            return block_units(f for t in tags if t is not None for f in t.fqns)
        units, aliases = bucketing.units, bucketing.aliases
    index = UnitIndex(units, aliases)
    names = [unit_name(unit) for unit in units]

    def unit_of(fqn: str) -> tuple[int, str] | None:
        found = index.unit_of(fqn)
        return None if found is None else (found, names[found])

    return unit_of


def unit_name(fqns: Sequence[str]) -> str:
    """A unit in a few words: what its names have in common, else the first of them."""
    parts = [f.split(".") for f in fqns]
    common = list(itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))
    name = ".".join(same[0] for same in common)
    if name:
        return name
    modules = list(dict.fromkeys(f.split(".")[0] for f in fqns))
    named = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    return named or "the root"


def plain_units(units: HasUnits | Iterable[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Units as names, checked.

    Raises:
        TypeError: a string, or a name that is none.
        ValueError: one name in two units.
    """
    given = units.units if isinstance(units, HasUnits) else units
    if isinstance(given, str):
        raise TypeError(f"units must be a sequence of units, got the string {given!r}")
    found = tuple((u,) if isinstance(u, str) else tuple(u) for u in given)
    UnitIndex(found)
    return found
