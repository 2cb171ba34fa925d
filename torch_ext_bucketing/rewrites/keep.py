"""Chooses what :class:`.ReshardAfterForward` keeps with ``keep="auto"``, among other passes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch.fx as fx

from .._torch import aot as _aot
from ..fsdp.tag_graph import parameter_chains
from ..fsdp.tags import tag_of
from ..fsdp.units import Units
from ..passes.base import Buckets, Choice, Compilation, Order, RankOrder, last_fact
from ..passes.cache_key import digest
from ..reports.keep import KeepReport
from ..scheduling.cost import Machine
from ..scheduling.devices import job_machine
from ..scheduling.keep import KeepPlanner, block_units
from ..scheduling.memory import PeakMemory
from ..scheduling.overlap import Overlap
from ..scheduling.partitioned import UnitOf

__all__ = ["NothingKeptWarning", "choose_for"]


class NothingKeptWarning(UserWarning):
    """No unit's gathered parameters could stay from forward to backward."""


def choose_for(
    graph: fx.Graph,
    memory: PeakMemory,
    units: Units | None,
    machine: Machine | None,
    curve: bool,
    compilation: Compilation,
) -> tuple[dict[fx.Node, None], KeepReport | None]:
    """Choose for a joint graph, with the passes that will run on its halves.

    Args:
        graph: tagged. It is only read.
        memory: the bound.
        units: what is kept or not together; None takes the units that are bucketed after the
            partitioner, and else modules.
        machine: None takes that of the order that the graphs get after the partitioner.
        curve: as of :class:`.ReshardAfterForward`.
        compilation: gets the choice.

    Returns:
        The nodes between parameters and their uses that are not to be computed again, and the
        report; None where the graph has no backward.
    """
    if _aot.stage_of(graph) == "inference":
        return {}, None
    inside = _aot.forward_nodes(graph)
    if all(n in inside or n.op == "output" for n in graph.nodes):
        return {}, None
    order = last_fact(compilation.ahead, Order) or Order((Overlap(),))
    merged = last_fact(compilation.ahead, Buckets) or Buckets()
    planner = KeepPlanner(
        graph,
        _unit_of(graph, units or merged.units),
        order.policies,
        machine or order.machine or job_machine(),
        compilation.size_hints,
        merged.kinds,
        last_fact(compilation.ahead, RankOrder) is not None,
    )
    limit = memory.limit_bytes(planner.reference_bytes)
    outcome, report = planner.report(limit, curve)
    names = digest(*report.kept)[:12] if report.kept else "nothing"
    compilation.choice = Choice(
        f"keeps {len(report.kept)} of {len(report.units)} units ({names}) under {limit} bytes",
        limit,
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
    parts = [f.split(".") for f in fqns]
    common = list(itertools.takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))
    name = ".".join(same[0] for same in common)
    if name:
        return name
    modules = list(dict.fromkeys(f.split(".")[0] for f in fqns))
    named = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
    return named or "the root"
