"""Plan one bucket per unit and bucket key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch.fx as fx

from .._torch.aot import in_backward
from ..fsdp.tags import Tag, tag_of
from ..fsdp.units import Units
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import Kind, bucket_key, group_name, kind_of
from ..graph.regions import Structures, cuts_behind, positions
from ..reports.base import LeftAlone
from ..reports.buckets import ClosedBy
from .contraction import Contraction
from .members import UNTAGGED, left_alone, unmergeable
from .plan import Bucket, MergePlan


class UncoveredParametersWarning(UserWarning):
    """Some parameters' collectives are in no unit and stay one collective each."""


def plan_units(
    graph: fx.Graph | GraphAnalysis,
    units: Units,
    kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
) -> MergePlan:
    """One bucket per unit and bucket key. Reads the graph only.

    Args:
        graph: a graph whose collectives carry tags, or what is known of it.
        units: which parameter is in which unit.
        kinds: what is bucketed; others are left alone and not reported one by one.

    Raises:
        ValueError: the graph is not in topological order.
    """
    uncovered: dict[str, None] = {}
    left: list[LeftAlone] = []
    groups: dict[tuple[int, Any, bool], list[fx.Node]] = {}
    duplicates: list[tuple[fx.Node, fx.Node]] = []
    first_gather: dict[tuple[Any, ...], fx.Node] = {}
    analysis = GraphAnalysis.of(graph)
    contracted = Contraction(analysis.nodes, analysis.unordered_writes)
    position = positions(analysis.graph)
    structures = Structures(position)
    for start in analysis.nodes:
        kind = kind_of(start)
        if kind is None or kind not in kinds:
            continue
        tag = tag_of(start)
        if tag is None:
            left.append(left_alone(start, UNTAGGED))
            continue
        unit, why = _unit_of(tag, units)
        if unit is None:
            uncovered.update(dict.fromkeys(f for f in tag.fqns if units.unit_of(f) is None))
            left.append(left_alone(start, why))
            continue
        why = unmergeable(start)
        if why:
            left.append(left_alone(start, why))
            continue
        # In a trace of a whole step, a gather in backward is there to free memory in between.
        again = kind == "all_gather" and in_backward(start)
        if kind == "all_gather" and start not in analysis.written_roots:
            same = (start.target, again, *_gathered(start, position, structures))
            earlier = first_gather.setdefault(same, start)
            if earlier is not start:
                contracted.open(earlier)
                joined = contracted.try_add(start)
                contracted.close()
                if joined:
                    duplicates.append((start, earlier))
                    continue
        groups.setdefault((unit, bucket_key(start), again), []).append(start)

    buckets: list[Bucket] = []
    splits: list[str] = []
    for (unit, _, _), starts in groups.items():
        if len(starts) < 2:
            continue
        kind = kind_of(starts[0])
        assert kind is not None
        first = starts[0]
        while starts:
            members, starts, detail = _fill(contracted, starts)
            if members[0] is not first:
                splits += [
                    f"{start.name} depends on the bucket of {first.name} or is needed by it, "
                    "and goes into a further bucket"
                    for start in members
                ]
            if len(members) > 1:
                closed_by: ClosedBy = "dependency" if starts else "end"
                buckets.append(Bucket(kind, unit, tuple(members), closed_by, detail))
            else:
                why = "nothing can be merged with it without a cycle"
                left.append(left_alone(members[0], why))
    buckets.sort(key=lambda b: position[b.members[0]])
    return MergePlan(
        tuple(buckets),
        tuple(duplicates),
        uncovered=tuple(uncovered),
        ineligible=tuple(left),
        splits=tuple(splits),
    )


def _fill(
    contracted: Contraction, starts: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], str]:
    """The bucket of the first start, the starts that can't be in it, and why so."""
    contracted.open(starts[0])
    members, rest, detail = [starts[0]], [], ""
    for start in starts[1:]:
        if contracted.try_add(start):
            members.append(start)
        else:
            rest.append(start)
            detail = detail or contracted.why(start)
    contracted.close()
    return members, rest, detail


def _unit_of(tag: Tag, units: Units) -> tuple[int | None, str]:
    found = {fqn: units.unit_of(fqn) for fqn in tag.fqns}
    missing = [fqn for fqn, unit in found.items() if unit is None]
    if missing:
        return None, f"no unit has {', '.join(missing)}"
    if len(set(found.values())) > 1:
        return None, f"its parameters {', '.join(tag.fqns)} are in several units"
    return found[tag.fqns[0]], ""


def _gathered(
    start: fx.Node, position: Mapping[fx.Node, int], structures: Structures
) -> tuple[Any, ...]:
    """A key that equal gathers share: the value, the casts and pads between, dtype, group.

    Pads, too: ranks whose shard of an uneven parameter is short have them, and must find the same
    gathers equal as the others.
    """
    value = start.all_input_nodes[0]
    cut = list(cuts_behind(value, position))[-1]
    number = structures.of(cut, value, name=cut.node)
    return (number, start.meta["val"].dtype, start.args[1], group_name(start))
