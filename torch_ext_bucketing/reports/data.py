"""What a compile did to its collectives, as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

__all__ = [
    "BucketReport",
    "ClosedBy",
    "CompileReport",
    "GraphReport",
    "PayloadMember",
    "ScheduleReport",
    "Unmerged",
]

ClosedBy = Literal["bytes", "span", "run", "dependency", "end"]


@dataclass(frozen=True)
class PayloadMember:
    """One member's place in a bucket's packed buffer.

    Args:
        fqns: the parameters that it serves; empty when it has no tag.
        offset: where it starts, in bytes, in one rank's part of the buffer: the rank's shards in
            an all-gather, the rows that the rank receives in a reduce-scatter, the whole buffer in
            an all-reduce.
        nbytes: its size there, padding included.
        shape: its shape in one rank's part.
        dtype: its dtype on the wire, such as ``"bfloat16"``.
    """

    fqns: tuple[str, ...]
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class BucketReport:
    """One bucket, its members in payload order.

    Args:
        kind: ``"all_gather"``, ``"reduce_scatter"`` or ``"all_reduce"``.
        unit: index of the unit in the order or plan; None for a bucket by size.
        group: name of the process group.
        group_size: number of ranks in it.
        reduce_op: ``"avg"``, ``"sum"``, ...; None for a gather.
        node: name of the bucket's start in the graph.
        members: in the order of their bytes.
        span: distance in graph order between the first and the last member before merging, in
            nodes.
        closed_by: what kept the next candidate out: the byte cap, the span bound, the bound on
            compute runs, a dependency (or a write to a tensor), or ``"end"``: there was none.
        detail: which candidate, and why, in words.
        wire_bytes: what the members count against the byte cap: per member the larger of its input
            and its output; None where no cap was kept.
        cap_bytes: the cap; None where no cap was kept.
    """

    kind: str
    unit: int | None
    group: str
    group_size: int
    reduce_op: str | None
    node: str
    members: tuple[PayloadMember, ...]
    span: int = 0
    closed_by: ClosedBy = "end"
    detail: str = ""
    wire_bytes: int | None = None
    cap_bytes: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of one rank's part, in bytes."""
        return sum(m.nbytes for m in self.members)


@dataclass(frozen=True)
class Unmerged:
    """A collective that could have been in a bucket and is in none.

    Args:
        node: name of its start.
        kind: as in :class:`BucketReport`.
        group: name of the process group.
        fqns: the parameters that it serves; empty when it has no tag.
        wire_bytes: as in :class:`BucketReport`.
        closed_by: what kept the next candidate of its bucket key out.
        detail: which one, and why, in words.
    """

    node: str
    kind: str
    group: str
    fqns: tuple[str, ...]
    wire_bytes: int
    closed_by: ClosedBy
    detail: str


@dataclass(frozen=True)
class GraphReport:
    """One graph.

    Args:
        stage: ``"forward"``, ``"backward"`` or ``"inference"``.
        collectives_before: number of collectives per kind.
        collectives_after: the same after bucketing.
        buckets: those that were merged, in graph order.
        uncovered: FQNs of the parameters whose collectives are in no unit.
        left_alone: ``(node, reason)`` of the collectives that can't be in a bucket.
        splits: what had to go into a bucket of its own to avoid a cycle, in words.
        alone: what was eligible and not merged, and why.
    """

    stage: str
    collectives_before: Mapping[str, int]
    collectives_after: Mapping[str, int]
    buckets: tuple[BucketReport, ...] = ()
    uncovered: tuple[str, ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()
    splits: tuple[str, ...] = ()
    alone: tuple[Unmerged, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "buckets": [_bucket_dict(b) for b in self.buckets]}

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def to_text(self, members: bool = True) -> str:
        """An aligned table of the buckets, and what is in none; see :mod:`.reports.text`.

        Args:
            members: list each bucket's members with their byte offsets.
        """
        from .text import graph_text

        return graph_text(self, members)

    def summary(self) -> str:
        """One line: collectives per kind before and after, and what closed the buckets."""
        from .text import graph_summary

        return graph_summary(self)


@dataclass(frozen=True)
class ScheduleReport:
    """What :func:`.schedule` reached. Pairs are before and after; times are the cost
    model's, in milliseconds.

    Args:
        policies: what was asked for.
        step_ms: time of the graph.
        bound_ms: what no order can beat: the largest of longest path, compute, busiest group.
        compute_ms: time that the compute stream is busy.
        exposed_ms: time that it waits for communication.
        peak_bytes: estimated peak of live bytes.
        reference_bytes: the peak that ratios refer to.
        limit_bytes: the memory bound; None where none was asked for.
        longest_run: most compute nodes between two reduce-scatters.
        max_run: its bound, or None.
        forced_run: what dependencies force some run to be at least, in any order.
        misses: by how much bounds are missed, as parts of them added up; 0: all are kept.
        chosen: which of the orders tried was taken.
        alternatives: all of them: name, step in ms, peak in bytes.
        caps_mb: byte cap in MiB per process group and kind, such as ``"0 all_gather"``, where caps
            were chosen here.
        cap_alternatives: all that were tried: the caps, step in ms, peak in bytes, misses.
        notes: what was asked for and does not apply to this graph.
        warnings: the bounds that are not kept, or why the graph kept its order.
        order: the movable nodes' names, in the new order.
        seconds: what it took.
    """

    policies: tuple[str, ...] = ()
    step_ms: tuple[float, float] = (0.0, 0.0)
    bound_ms: float = 0.0
    compute_ms: float = 0.0
    exposed_ms: tuple[float, float] = (0.0, 0.0)
    peak_bytes: tuple[int, int] = (0, 0)
    reference_bytes: int = 0
    limit_bytes: int | None = None
    longest_run: tuple[int, int] = (0, 0)
    max_run: int | None = None
    forced_run: int = 0
    misses: float = 0.0
    chosen: str = "as given"
    alternatives: tuple[tuple[str, float, int], ...] = ()
    caps_mb: tuple[tuple[str, float], ...] = ()
    cap_alternatives: tuple[tuple[tuple[tuple[str, float], ...], float, int, float], ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def with_caps(self, search: ScheduleReport) -> ScheduleReport:
        """This report, with what a search for caps found."""
        return replace(self, caps_mb=search.caps_mb, cap_alternatives=search.cap_alternatives)

    def to_text(self) -> str:
        """A few lines; see :mod:`.reports.text`."""
        from .text import schedule_text

        return schedule_text(self)


@dataclass
class CompileReport:
    """All graphs of one compile. The backward graph appears once it is compiled.

    Args:
        graphs: in the order in which they were compiled.
        unnamed: collectives on parameters whose FQN could not be found, with the reason.
        warnings: texts of the warnings that were given.
        schedules: of the graphs that were scheduled, in the order in which they were compiled.
    """

    graphs: list[GraphReport] = field(default_factory=list)
    unnamed: tuple[tuple[str, str], ...] = ()
    warnings: list[str] = field(default_factory=list)
    schedules: list[ScheduleReport] = field(default_factory=list)

    @property
    def collectives_before(self) -> dict[str, int]:
        """Collectives per kind in all graphs together, before bucketing."""
        return _total(g.collectives_before for g in self.graphs)

    @property
    def collectives_after(self) -> dict[str, int]:
        """Collectives per kind in all graphs together, after bucketing."""
        return _total(g.collectives_after for g in self.graphs)

    @property
    def buckets(self) -> tuple[BucketReport, ...]:
        """The buckets of all graphs."""
        return tuple(b for g in self.graphs for b in g.buckets)

    def graph(self, stage: str) -> GraphReport | None:
        """The last graph of a stage, or None."""
        return next((g for g in reversed(self.graphs) if g.stage == stage), None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, and the totals."""
        return {
            "collectives_before": self.collectives_before,
            "collectives_after": self.collectives_after,
            "graphs": [g.as_dict() for g in self.graphs],
            "unnamed": [list(u) for u in self.unnamed],
            "warnings": list(self.warnings),
            "schedules": [s.as_dict() for s in self.schedules],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=indent)

    def to_text(self, members: bool = True) -> str:
        """Aligned tables, graph by graph, and the totals; see :mod:`.reports.text`.

        Args:
            members: list each bucket's members with their byte offsets.
        """
        from .text import compile_text

        return compile_text(self, members)


def _bucket_dict(bucket: BucketReport) -> dict[str, Any]:
    return {**asdict(bucket), "nbytes": bucket.nbytes}


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for kind, number in count.items():
            total[kind] = total.get(kind, 0) + number
    return total
