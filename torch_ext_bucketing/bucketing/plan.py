"""Merge plans, and the protocol for planners.

Planners are :class:`.ByUnit` (one bucket per unit), :class:`.ByCap` (buckets up to a byte cap),
:class:`.BySearch` (the byte caps of the fastest schedule), and users' own.
:mod:`.bucketing.merge` applies plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.fx as fx

from ..graph.analysis import GraphAnalysis
from ..graph.collectives import Kind
from ..graph.records import Collective
from ..graph.snapshot import reading_only
from ..reports.base import Cause, LeftAlone
from ..reports.buckets import ClosedBy, NotMerged
from .contraction import Contraction


@dataclass(frozen=True)
class Bucket:
    """Starts to merge into one collective.

    Args:
        unit: index of the unit; None for a bucket by size.
        members: starts in graph order.
        closed_by: what kept the next candidate out; ``"end"``: no candidate was left.
        detail: the candidate and the reason, for reports.
        wire_bytes: bytes of all members that count against ``cap_bytes``; None without a cap.
    """

    kind: Kind
    unit: int | None
    members: tuple[fx.Node, ...]
    closed_by: ClosedBy = "end"
    detail: str = ""
    wire_bytes: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True)
class MergePlan(NotMerged):
    """The buckets of one graph. :class:`.NotMerged` has the other collectives, with reasons.

    Args:
        buckets: ordered by their first members; each has at least two members.
    """

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

    A member that would close a cycle goes into a further bucket of its group.

    Args:
        groups: pairs of a unit's index, or None, and collectives of one bucket key in graph order.
    """
    contracted = Contraction(analysis)
    buckets, splits, left = list[Bucket](), list[str](), list[LeftAlone]()
    for unit, candidates in groups:
        first, rest = candidates[0], list(candidates)
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

    Raises:
        RuntimeError: the planner failed, changed the graph or communicated (the cause is chained).
        ValueError: a member can't be in its bucket; the message names it.
    """
    try:
        with reading_only(analysis.graph, planner=planner.plan):
            plan = planner.plan(analysis)
    except Exception as error:
        raise RuntimeError(f"the planner {planner!r} failed") from error
    contracted, free = Contraction(analysis), dict(analysis.collectives)
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


def left_alone(c: Collective, reason: str, cause: Cause = Cause.OTHER) -> LeftAlone:
    """Record that a collective is not in any bucket."""
    return LeftAlone(c.fqns, reason, c.start.name, cause=cause)
