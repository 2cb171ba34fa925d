"""Merge plans: which collectives become one, and why the others do not.

Plans are made by :mod:`.bucketing.units` (one bucket per unit) and :mod:`.bucketing.caps` (up to a
byte cap), and carried out by :mod:`.bucketing.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from ..graph.collectives import Kind
from ..graph.records import Collective
from ..reports.base import Cause, LeftAlone
from ..reports.buckets import ClosedBy, NotMerged


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


def left_alone(c: Collective, reason: str, cause: Cause = Cause.OTHER) -> LeftAlone:
    """The record of a collective that is in no bucket."""
    return LeftAlone(c.fqns, reason, c.start.name, cause=cause)
