"""Plan buckets by unit."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from ..fsdp.units import Units
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import FSDP_KINDS, Kind
from ..graph.records import UNTAGGED, Collective
from ..reports.base import Cause, LeftAlone
from .plan import MergePlan, left_alone, merge_groups


@dataclass(frozen=True)
class ByUnit:
    """Plan one bucket per unit and bucket key, or more where dependencies require it.

    Args:
        kinds: kinds of collectives to bucket.
    """

    units: Units
    kinds: Collection[Kind] = FSDP_KINDS

    def plan(self, graph: fx.Graph | GraphAnalysis) -> MergePlan:
        """Plan a graph.

        Raises:
            ValueError: the graph is not in topological order.
        """
        analysis = GraphAnalysis.of(graph)
        uncovered: dict[str, None] = {}
        left: list[LeftAlone] = []
        groups: dict[tuple[int, Any, bool], list[Collective]] = {}
        for c in analysis.collectives.values():
            if c.kind not in self.kinds:
                continue
            unit, why, cause = unit_of(c.fqns, self.units)
            if unit is None or c.why_not:
                left.append(left_alone(c, why or c.why_not, cause))
                uncovered.update(dict.fromkeys(f for f in c.fqns if self.units.unit_of(f) is None))
                continue
            # In a trace of a whole step, backward gathers a parameter again so that its memory is
            # free in between: don't merge that gather with forward's.
            again = c.kind == "all_gather" and c.in_backward
            groups.setdefault((unit, c.key, again), []).append(c)
        plan = merge_groups(analysis, ((unit, found) for (unit, *_), found in groups.items()))
        left += plan.ineligible
        return replace(plan, uncovered=tuple(uncovered), ineligible=tuple(left))


def unit_of(fqns: Sequence[str], units: Units) -> tuple[int | None, str, Cause]:
    """Return the unit that has all of these parameters, or None with the reason and its cause."""
    if not fqns:
        return None, UNTAGGED, Cause.UNTAGGED
    found = {fqn: units.unit_of(fqn) for fqn in fqns}
    missing = [fqn for fqn, unit in found.items() if unit is None]
    if missing:
        return None, f"no unit has {', '.join(missing)}", Cause.OTHER
    if len(set(found.values())) > 1:
        return None, f"its parameters {', '.join(fqns)} are in several units", Cause.OTHER
    return found[fqns[0]], "", Cause.OTHER
