"""Buckets by unit: one per unit and bucket key, as far as dependencies allow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch.fx as fx

from ..fsdp.units import Units
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import FSDP_KINDS, Kind
from ..graph.records import UNTAGGED, Collective
from ..reports.base import Cause, LeftAlone
from ..reports.buckets import ClosedBy
from .contraction import Contraction
from .plan import Bucket, MergePlan, left_alone


def plan_units(
    graph: fx.Graph | GraphAnalysis,
    units: Units,
    kinds: Collection[Kind] = FSDP_KINDS,
) -> MergePlan:
    """One bucket per unit and bucket key of these kinds, in a graph in topological order."""
    uncovered: dict[str, None] = {}
    left: list[LeftAlone] = []
    groups: dict[tuple[int, Any, bool], list[Collective]] = {}
    analysis = GraphAnalysis.of(graph)
    contracted = Contraction(analysis)
    for c in analysis.collectives.values():
        if c.kind not in kinds:
            continue
        unit, why, cause = _unit_of(c.fqns, units)
        if unit is None or c.why_not:
            left.append(left_alone(c, why or c.why_not, cause))
            uncovered.update(dict.fromkeys(f for f in c.fqns if units.unit_of(f) is None))
            continue
        # In a trace of a whole step, a gather in backward is there to free memory in between.
        again = c.kind == "all_gather" and c.in_backward
        groups.setdefault((unit, c.key, again), []).append(c)

    buckets: list[Bucket] = []
    splits: list[str] = []
    for (unit, _, _), rest in groups.items():
        if len(rest) < 2:
            continue
        first = rest[0]
        while rest:
            members, rest, detail = _fill(contracted, rest)
            if members[0] is not first:
                splits += [
                    f"{c.start.name} depends on the bucket of {first.start.name} or is needed by "
                    "it, and goes into a further bucket"
                    for c in members
                ]
            if len(members) > 1:
                closed_by: ClosedBy = "dependency" if rest else "end"
                starts = tuple(c.start for c in members)
                buckets.append(Bucket(first.kind, unit, starts, closed_by, detail))
            else:
                why = "nothing can be merged with it without a cycle"
                left.append(left_alone(members[0], why))
    buckets.sort(key=lambda b: contracted.position(b.members[0]))
    return MergePlan(
        tuple(buckets),
        uncovered=tuple(uncovered),
        ineligible=tuple(left),
        splits=tuple(splits),
    )


def _fill(
    contracted: Contraction, candidates: list[Collective]
) -> tuple[list[Collective], list[Collective], str]:
    """The bucket of the first candidate, those that can't be in it, and why so."""
    contracted.open(candidates[0].start)
    members, rest, detail = [candidates[0]], [], ""
    for c in candidates[1:]:
        if contracted.try_add(c.start):
            members.append(c)
        else:
            rest.append(c)
            detail = detail or contracted.why(c.start)
    contracted.close()
    return members, rest, detail


def _unit_of(fqns: Sequence[str], units: Units) -> tuple[int | None, str, Cause]:
    """The unit of a collective that serves these parameters, or else why it is in none."""
    if not fqns:
        return None, UNTAGGED, Cause.UNTAGGED
    found = {fqn: units.unit_of(fqn) for fqn in fqns}
    missing = [fqn for fqn, unit in found.items() if unit is None]
    if missing:
        return None, f"no unit has {', '.join(missing)}", Cause.OTHER
    if len(set(found.values())) > 1:
        return None, f"its parameters {', '.join(fqns)} are in several units", Cause.OTHER
    return found[fqns[0]], "", Cause.OTHER
