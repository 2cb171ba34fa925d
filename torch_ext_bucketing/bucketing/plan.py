"""Define merge plans, their check, the protocol for planners, and the plan by unit.

Planners are :class:`.ByUnit` (one bucket per unit), :class:`.ByCap` (buckets up to a byte cap),
:class:`.BySearch` (the byte caps of the fastest schedule), and users' own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch.fx as fx

from ..fsdp.units import Units
from ..graph.analysis import UNTAGGED, Collective, GraphAnalysis
from ..graph.edits import reading_only
from ..graph.nodes import FSDP_KINDS, KINDS, Kind
from ..reports.base import LeftAlone, LeftCause
from ..reports.graph import ClosedBy, NotMerged
from .contraction import Contraction

Groups: TypeAlias = Collection[str] | Literal["primary"] | None
"""Names of process groups, planned one after the other; ``"primary"``: the group with the most
all-gathers, see :func:`chosen_groups`; None: all groups, planned together."""


def check_groups(groups: Groups) -> tuple[str, ...] | Literal["primary"] | None:
    """Return ``groups`` with names as a tuple; raise a TypeError for other values."""
    if groups is None or groups == "primary":
        return groups  # type: ignore[return-value]
    if isinstance(groups, str) or not isinstance(groups, Collection):
        raise TypeError(f"groups must be a list of names, 'primary' or None, got {groups!r}")
    if not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups must be names of process groups, got {groups!r}")
    return tuple(dict.fromkeys(groups))


def chosen_groups(groups: Groups, counts: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """Return the chosen groups in the order of ``counts``, FSDP collectives by group and kind.

    The primary group has the most FSDP all-gathers; in a graph without gathers the most
    reduce-scatters, and without these the most all-reduces. Of equals it is the first one.
    """
    if groups == "primary":
        return (max(counts, key=lambda g: [counts[g][k] for k in KINDS]),) if counts else ()
    return tuple(g for g in counts if groups is None or g in groups)


@dataclass(frozen=True)
class Bucket:
    """Starts, in graph order, to merge into one collective."""

    kind: Kind
    unit: int | None  # index of the unit; None for a bucket by size
    members: tuple[fx.Node, ...]
    # The reason that kept the next candidate out; ``"end"``: no candidate was left.
    closed_by: ClosedBy = "end"
    detail: str = ""  # the candidate and the reason, for reports
    # Bytes of all members that count against ``cap_bytes``; None without a cap.
    wire_bytes: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True)
class MergePlan(NotMerged):
    """The buckets of one graph, by their first members; each has at least two members."""

    buckets: tuple[Bucket, ...] = ()


class BucketPlanner(Protocol):
    """Plan the buckets of a graph.

    Most planners group collectives and call :func:`merge_groups`. A planner is a frozen dataclass:
    cache keys are made of its fields, and reports show its ``repr``.
    """

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Plan a graph without changing it.

        All ranks must get the same plan: it must not depend on hash order, ids, time or the rank.
        """


def merge_groups(
    analysis: GraphAnalysis, groups: Iterable[tuple[int | None, Sequence[Collective]]]
) -> MergePlan:
    """Merge each group into as few buckets as dependencies allow.

    A group is a unit's index, or None, and collectives of one bucket key in graph order. A member
    that would close a cycle goes into a further bucket of its group.
    """
    contracted = Contraction(analysis)
    buckets, splits, left = list[Bucket](), list[str](), list[LeftAlone]()
    # One contraction for all groups: several buckets may form a cycle that no single one shows.
    for unit, candidates in groups:
        first, rest = candidates[0], list(candidates)
        # A group of one has nothing to merge, and is not reported.
        while rest and len(candidates) > 1:
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
    return MergePlan(tuple(buckets), ineligible=tuple(left), splits=tuple(splits))


def _fill(
    contracted: Contraction, candidates: list[Collective]
) -> tuple[list[Collective], list[Collective], str]:
    """Fill the first candidate's bucket; return its members, the rest, and the first reason."""
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


def checked_plan(planner: BucketPlanner, analysis: GraphAnalysis) -> MergePlan:
    """Plan a graph with a user's planner, and check that the plan can be applied.

    A ``RuntimeError`` chains the planner's failure, change of the graph or communication. A
    ``ValueError`` names a member that can't be in its bucket.
    """
    try:
        with reading_only(analysis.graph, planner=planner.plan):
            plan = planner.plan(analysis)
    except Exception as error:
        raise RuntimeError(f"the planner {planner!r} failed") from error
    contracted, free = Contraction(analysis), dict(analysis.collectives)  # not in a bucket yet
    # The buckets are built again one member after the other, so that the error names a member.
    for bucket in plan.buckets:
        first = free.get(bucket.members[0])
        for member in bucket.members:
            c = free.pop(member, None)
            if c is None or first is None:
                why = "it is not a collective of the graph, or is in another bucket"
            elif c.why_not or c.key != first.key:
                why = c.why_not or f"its bucket key is not that of {first.start.name}"
            elif c is first:
                contracted.open(member)
                continue
            elif contracted.try_add(member):
                continue
            else:
                why = contracted.why(member)
            raise ValueError(f"{planner!r} can't put {member.name} into a bucket: {why}")
        contracted.close()
    return plan


def left_alone(c: Collective, reason: str, cause: LeftCause = LeftCause.OTHER) -> LeftAlone:
    """Record that a collective is not in any bucket."""
    return LeftAlone(c.fqns, reason, c.start.name, cause=cause)


@dataclass(frozen=True)
class ByUnit:
    """Plan one bucket per unit and bucket key, or more where dependencies require it."""

    units: Units
    kinds: Collection[Kind] = FSDP_KINDS

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Plan a graph in topological order."""
        uncovered: dict[str, None] = {}
        left: list[LeftAlone] = []
        groups: dict[tuple[int, Any, bool], list[Collective]] = {}
        for c in analysis.collectives.values():
            if c.kind not in self.kinds:
                continue
            unit, unknown = self.units.unit_of(*c.fqns), self.units.unknown(c.fqns)
            uncovered.update(dict.fromkeys(unknown))
            if unit is None:
                left.append(_without_unit(c, unknown))
                continue
            if c.why_not:
                left.append(left_alone(c, c.why_not))
                continue
            # In a trace of a whole step, backward gathers a parameter again so that its memory is
            # free in between: don't merge that gather with forward's.
            again = c.kind == "all_gather" and c.in_backward
            groups.setdefault((unit, c.key, again), []).append(c)
        plan = merge_groups(analysis, ((unit, mine) for (unit, *_), mine in groups.items()))
        left += plan.ineligible
        return replace(plan, uncovered=tuple(uncovered), ineligible=tuple(left))


def _without_unit(c: Collective, unknown: Sequence[str]) -> LeftAlone:
    """Record why no unit has all parameters of a collective."""
    if not c.fqns:
        return left_alone(c, UNTAGGED, LeftCause.UNTAGGED)
    if unknown:
        return left_alone(c, f"no unit has {', '.join(unknown)}")
    return left_alone(c, f"its parameters {', '.join(c.fqns)} are in several units")
