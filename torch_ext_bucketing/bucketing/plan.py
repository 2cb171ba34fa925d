"""Merge plans: which collectives become one, and why the others do not.

A planner is anything with ``plan(analysis) -> MergePlan``: :class:`.ByUnit` (one bucket per unit),
:class:`.ByCap` (up to a byte cap), :class:`.BySearch` (the caps of the fastest schedule), or a
user's own. :mod:`.bucketing.merge` carries plans out.
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
    """Starts that become one collective.

    Args:
        unit: its number in the order or plan; None for a bucket by size.
        members: in graph order.
        closed_by: what kept the next candidate out; ``"end"``: there was none.
        detail: which one, and why, in words.
        wire_bytes: what the members count against a byte cap, together; None where none is kept.
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
    """The buckets of one graph, and why the other collectives are in none (:class:`.NotMerged`).

    Args:
        buckets: in the graph order of their first members; each has two members or more.
    """

    buckets: tuple[Bucket, ...] = ()


class BucketPlanner(Protocol):
    """Plan the buckets of one graph; most planners group collectives and let
    :func:`merge_groups` do the rest.

    Make it a frozen dataclass: its ``repr`` is its part of cache keys and reports.
    """

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Plan a graph, which is only read. The plan must be the same on every rank: nothing may
        depend on hash order, ids, time or the rank."""


def merge_groups(
    analysis: GraphAnalysis, groups: Iterable[tuple[int | None, Sequence[Collective]]]
) -> MergePlan:
    """Merge each group into as few buckets as dependencies allow.

    Args:
        groups: collectives of one bucket key each, in graph order, with the number of their unit
            or None.
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


def planned(planner: BucketPlanner, analysis: GraphAnalysis) -> MergePlan:
    """The plan of a user's planner, which is kept from changing the graph and from communicating.

    Raises:
        RuntimeError: the planner failed (the cause is chained).
        ValueError: its plan can't be carried out; the message names the collective.
    """
    try:
        with reading_only(analysis.graph, planner=planner.plan):
            plan = planner.plan(analysis)
    except Exception as error:
        raise RuntimeError(f"the planner {planner!r} failed") from error
    contracted, collectives = Contraction(analysis), analysis.collectives
    seen: dict[fx.Node, None] = {}
    for bucket in plan.buckets:
        first = bucket.members[0]
        for member in bucket.members:
            c = collectives.get(member)
            why = "it is no collective of the graph" if c is None else c.why_not
            if c is not None and not why and (c.key != collectives[first].key):
                why = f"its bucket key is not that of {first.name}"
            if member is first:
                contracted.open(first)
            elif not why and not contracted.try_add(member):
                why = contracted.why(member)
            if why or member in seen:
                why = why or "it is in two buckets"
                raise ValueError(f"{planner!r} can't put {member.name} into a bucket: {why}")
            seen[member] = None
        contracted.close()
    return plan


def left_alone(c: Collective, reason: str, cause: Cause = Cause.OTHER) -> LeftAlone:
    """The record of a collective that is in no bucket."""
    return LeftAlone(c.fqns, reason, c.start.name, cause=cause)
