"""Report bucketing on one graph, and all of one compile."""

from __future__ import annotations

import itertools
import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, get_args

from .._torch.inductor import trace_artifact
from ..graph.nodes import COLLECTIVES, KINDS
from .base import LeftAlone, Record, Report, aligned, change, size_text, sizes_text, table
from .planner import EstimateReport, KeepReport, ScheduleReport

# Values of BucketReport.packed_by.
GRAPH_ORDER = "graph order"
NO_KEY = f"{GRAPH_ORDER}: a member has no key"

ClosedBy = Literal["bytes", "run", "dependency", "search", "end"]


@dataclass(frozen=True)
class PayloadMember:
    """A member's place in the packed buffer, in bytes of one rank's part.

    One rank's part is its shards in an all-gather, the rows that it receives in a reduce-scatter,
    and the whole buffer in an all-reduce. ``nbytes`` and ``shape`` include padding; ``rows`` are
    those of the parameter without it, None if there is none.
    """

    fqns: tuple[str, ...]
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    rows: int | None = None

    def padding(self, ranks: int) -> float:
        """Return the bytes of padding in one rank's part, a mean over the ranks."""
        return 0 if self.rows is None else self.nbytes * (1 - self.rows / (self.shape[0] * ranks))


@dataclass(frozen=True)
class BucketReport(Record):
    """Collectives that were merged into one."""

    derived = ("nbytes",)
    kind: str
    unit: int | None  # index of the unit in the order or plan; None for a bucket by size
    group: str
    group_size: int
    reduce_op: str | None  # ``"avg"``, ``"sum"``, ...; None for a gather
    node: str  # name of the bucket's start
    members: tuple[PayloadMember, ...]  # in payload order
    # The reason that kept the next candidate out: the byte cap, the bound on compute runs, a
    # dependency or write, or ``"end"``: no candidate was left.
    closed_by: ClosedBy = "end"
    detail: str = ""  # the candidate and the reason, in words
    # Bytes that count against ``cap_bytes``: per member the larger of its input and its output;
    # None without a cap.
    wire_bytes: int | None = None
    cap_bytes: int | None = None
    # Name of the payload order, such as ``"FSDPParamOrder"``, or ``"graph order"``, or ``"graph
    # order: a member has no key"``.
    packed_by: str = GRAPH_ORDER
    # Members without a key: their parameters, or the node's name if it has no tag.
    no_key: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Size of one rank's part, in bytes."""
        return sum(m.nbytes for m in self.members)

    @property
    def padding(self) -> float:
        """Share of padding in the buffer, and of the largest rank's shards above the mean."""
        return sum(m.padding(self.group_size) for m in self.members) / self.nbytes


UNEVEN = 0.1
"""A larger share of padding in a bucket is reported."""


@dataclass(frozen=True)
class Unmerged(LeftAlone):
    """An eligible collective that is in no bucket.

    ``reason`` names the next candidate of its bucket key, and why that stayed out (``closed_by``):
    ``"search"`` is a byte cap below others that were tried.
    """

    kind: str = ""
    group: str = ""
    wire_bytes: int = 0
    closed_by: ClosedBy = "end"


@dataclass(frozen=True, kw_only=True)
class NotMerged:
    """The collectives of one graph that are in no bucket, each in graph order.

    ``uncovered`` are parameters in no unit, ``ineligible`` collectives that can't be in a bucket,
    ``splits`` those that got a further bucket to avoid a cycle, in words.
    """

    uncovered: tuple[str, ...] = ()
    ineligible: tuple[LeftAlone, ...] = ()
    splits: tuple[str, ...] = ()
    unmerged: tuple[Unmerged, ...] = ()

    def not_merged(self) -> dict[str, Any]:
        """Return the fields of this class, for another record."""
        return {f.name: getattr(self, f.name) for f in fields(NotMerged)}


ARTIFACT = "torch_ext_bucketing_report"
"""Name of the artifact in ``TORCH_TRACE`` logs: JSON, one per graph."""

_log = logging.getLogger("torch_ext_bucketing")


@dataclass(frozen=True)
class GraphReport(NotMerged, Report):
    """The buckets of one graph, and the collectives in none; the pass buckets ``kinds``."""

    stage: str
    collectives_before: Mapping[str, int]
    collectives_after: Mapping[str, int]
    buckets: tuple[BucketReport, ...] = ()
    kinds: tuple[str, ...] = KINDS
    from_cache: bool = False

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a table of the buckets, and the collectives in none."""
        yield self.summary()
        columns = {**BUCKET, **(_PADDING if any(b.padding > UNEVEN for b in self.buckets) else {})}
        if self.buckets and not members and not any(b.no_key for b in self.buckets):
            yield from ("", *table(columns, self.buckets, join="node"))
        elif self.buckets:
            head, *rows = table(columns, self.buckets)
            yield from ("", head)
            for bucket, line in zip(self.buckets, rows, strict=True):
                yield line
                if bucket.detail:
                    yield f"    {bucket.detail}"
                if bucket.no_key:
                    yield f"    no key: {'; '.join(bucket.no_key)}"
                if members:
                    yield from (f"    {m}" for m in table(_MEMBER, bucket.members))
        if self.unmerged:
            yield from ("", f"eligible and not merged: {len(self.unmerged)}")
            yield from (f"  {line}" for line in table(_UNMERGED, self.unmerged))
        if self.ineligible:
            yield from ("", f"not eligible: {len(self.ineligible)}")
            by_reason: dict[str, list[str]] = {}
            for collective in self.ineligible:
                by_reason.setdefault(collective.reason, []).append(collective.node)
            yield from (f"  {reason}: {', '.join(nodes)}" for reason, nodes in by_reason.items())
        if self.uncovered:
            yield from ("", f"in no unit: {', '.join(self.uncovered)}")
        if self.splits:
            yield from ("", *self.splits)

    def summary(self) -> str:
        """Format one line: collectives per kind before and after, and why buckets closed."""
        closed: Counter[str] = Counter(b.closed_by for b in self.buckets)
        stage = f"{self.stage}, from cache" if self.from_cache else self.stage
        parts = [f"{stage}: {change(self.collectives_before, self.collectives_after)}"]
        if closed:
            reasons = ", ".join(f"{closed[r]} by {r}" for r in get_args(ClosedBy) if closed[r])
            number = len(self.buckets)
            parts.append(f"{number} bucket{'s' if number > 1 else ''}, closed {reasons}")
        if self.unmerged:
            parts.append(f"{len(self.unmerged)} eligible not merged")
        if self.ineligible:
            parts.append(f"{len(self.ineligible)} not eligible")
        parts += [f"{k} not asked for" for k in self.collectives_before if k not in self.kinds]
        return "; ".join(parts)


def emit(report: GraphReport) -> None:
    """Log a graph's report, by logger ``torch_ext_bucketing``, and trace it for tlparse."""
    _log.info("%s", report.summary())
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("%s", report.to_text())
    trace_artifact(ARTIFACT, report.to_json, "json")


BUCKET: dict[str, Callable[[BucketReport], object]] = {
    "kind": lambda b: COLLECTIVES[b.kind].short + (f" {b.reduce_op}" if b.reduce_op else ""),
    "group": lambda b: b.group,
    "ranks:n": lambda b: b.group_size,
    "members:n": lambda b: len(b.members),
    "bytes:b": lambda b: b.nbytes if b.wire_bytes is None else b.wire_bytes,
    "of cap:n": lambda b: f"{(b.wire_bytes or 0) / b.cap_bytes:.0%}" if b.cap_bytes else "-",
    "closed by": lambda b: b.closed_by,
    "packed by": lambda b: b.packed_by,
    "node": lambda b: b.node,
}
"""The columns of a table of buckets."""
_PADDING: dict[str, Callable[[BucketReport], object]] = {"padding": lambda b: f"{b.padding:.0%}"}
_MEMBER: dict[str, Callable[[PayloadMember], object]] = {
    "offset:n": lambda m: m.offset,
    "bytes:n": lambda m: m.nbytes,
    "dtype": lambda m: m.dtype,
    "shape": lambda m: "x".join(map(str, m.shape)) or "scalar",
    "parameters": lambda m: ", ".join(m.fqns) or "-",
}
_UNMERGED: dict[str, Callable[[Unmerged], object]] = {
    "kind": lambda x: COLLECTIVES[x.kind].short,
    "group": lambda x: x.group,
    "bytes:b": lambda x: x.wire_bytes,
    "closed by": lambda x: x.closed_by,
    "node": lambda x: x.node,
    "parameters": lambda x: ", ".join(x.fqns) or "-",
    "why": lambda x: x.reason,
}


@dataclass(frozen=True, kw_only=True)
class RewriteReport(Report):
    """The report of one rewrite of the joint graph; ``left`` are collectives it did not touch."""

    derived: ClassVar[tuple[str, ...]] = ("rewrite",)
    rewrite: ClassVar[str]
    heading: ClassVar[str]
    left: tuple[LeftAlone, ...] = ()

    def lines(self, members: bool = True) -> list[str]:
        """List changes, and collectives left alone; an empty list without either."""
        lines = self._lines()
        lines += [f"left alone: {', '.join(x.fqns) or '-'}: {x.reason}" for x in self.left]
        return [f"{self.heading}:", *(f"  {line}" for line in lines)] if lines else []

    @abstractmethod
    def _lines(self) -> list[str]:
        """Describe the changes, a line each."""


@dataclass(frozen=True)
class Owners:
    """Numbers of matrices, of the mesh's ranks, of ranks that own none, and of buckets.

    ``balance`` is the work of the busiest rank over the mean.
    """

    matrices: int
    ranks: int
    idle: int
    balance: float
    exchanges: int


@dataclass(frozen=True)
class StepReport(RewriteReport):
    """Report of the updates in a backward graph."""

    rewrite = "optimizer"
    heading = "updates in the backward graph"
    gradients: int  # number of parameters with a gradient; as many gradients were outputs before
    # Per call that updates parameters, their FQNs, in the order of the graph.
    updates: tuple[tuple[str, ...], ...]
    eager_updates: int  # number of such calls of the optimizers' ``step()``, one per group
    norm_kernels: int  # number of calls that compute norms of gradients
    eager_norms: int  # number of such calls of ``clip_grad_norm_``, one per device and dtype
    # Number of all-reduces of the norm, as many as eagerly, one per mesh dimension that shards;
    # None: no clipping.
    norm_reductions: int | None
    state_bytes: int  # bytes of optimizer state that the graph reads on the rank with most
    buffer_bytes: int  # bytes that the largest update allocates while it runs
    owners: tuple[Owners, ...] = ()  # per mesh; empty without Muon

    def _lines(self) -> list[str]:
        number = sum(map(len, self.updates))
        state, buffers = sizes_text(self.state_bytes, self.buffer_bytes)
        lines = [
            f"{self.gradients} gradients, {number} updated here in {len(self.updates)} calls "
            f"({self.eager_updates} eagerly, after all reductions)",
            f"optimizer state {state}, buffers of an update at most {buffers}",
        ]
        for o in self.owners:
            idle = f", {o.idle} without one" if o.idle else ""
            lines.append(
                f"{o.matrices} matrices on {o.ranks} ranks{idle}, exchanged {o.exchanges} "
                f"times; the busiest rank has {o.balance:.3f} of the mean work"
            )
        if self.norm_reductions is None:
            return [*lines, "each update follows its gradients' reduction, which frees them"]
        return [
            *lines,
            f"{self.norm_kernels} calls for norms, which follow each reduction ({self.eager_norms} "
            f"eagerly, after all); {self.norm_reductions} all-reduces of the norm, as eagerly",
            f"waits for the norm: {len(self.updates)} updates, whose state reads scaled gradients; "
            "scaling, and all gradients' memory",
        ]


@dataclass(frozen=True)
class StageReport(Report):
    """The actions of a pipeline stage in one step on one rank, and its memory."""

    stage: int
    compiled: CompileReport
    gathers: int  # number of times that it gathers its parameters; so is ``reductions``
    reductions: int
    under_way: int  # most microbatches between forward and backward, of ``saved_bytes`` each
    gathered_bytes: int  # its unsharded parameters; so is ``gradient_bytes``, over microbatches
    gradient_bytes: int
    saved_bytes: int
    # The peak of all these and of the running graph, without shards and optimizer state;
    # ``rank_peak_bytes`` for all stages of the rank.
    peak_bytes: int
    rank_peak_bytes: int

    def lines(self, members: bool = True) -> list[str]:
        """List one line."""
        counts = change(self.compiled.collectives_before, self.compiled.collectives_after)
        return [
            f"pipeline stage {self.stage}: {counts}; gathered {self.gathers} and reduced "
            f"{self.reductions} times a step; {size_text(self.gathered_bytes)} gathered, "
            f"{size_text(self.gradient_bytes)} of gradients, {self.under_way} microbatches under "
            f"way of {size_text(self.saved_bytes)} each; at most {size_text(self.peak_bytes)}, the "
            f"rank's stages together {size_text(self.rank_peak_bytes)}"
        ]


@dataclass(frozen=True)
class PassTime:
    """Wall time of one pass on one graph."""

    stage: str
    name: str
    seconds: float


@dataclass
class CompileReport(Report):
    """The report of one compile, each list in the order of the passes.

    The backward graph is added once it is compiled. ``disabled`` are the passes that
    ``TORCH_EXT_BUCKETING_DISABLE`` switched off, ``rewrites`` changes of the joint graph, and
    ``estimates`` times of the compiled graphs, if a pass added them.
    """

    derived = ("collectives_before", "collectives_after")
    graphs: list[GraphReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    schedules: list[ScheduleReport] = field(default_factory=list)
    passes: list[PassTime] = field(default_factory=list)
    disabled: tuple[str, ...] = ()
    rewrites: list[RewriteReport | KeepReport] = field(default_factory=list)
    estimates: list[EstimateReport] = field(default_factory=list)

    @classmethod
    def joined(cls, reports: Iterable[CompileReport]) -> CompileReport:
        """Join the reports of several compiles."""
        whole = cls()
        for report in reports:
            for f in fields(cls):
                setattr(whole, f.name, getattr(whole, f.name) + getattr(report, f.name))
        whole.disabled = tuple(dict.fromkeys(whole.disabled))
        return whole

    def since(self, graphs: int, schedules: int, estimates: int = 0) -> CompileReport:
        """Copy the part that a cache stores with a graph, without numbers of earlier records."""
        return CompileReport(
            self.graphs[graphs:],
            list(self.warnings),
            self.schedules[schedules:],
            rewrites=list(self.rewrites),
            estimates=self.estimates[estimates:],
        )

    def add_cached(self, cached: CompileReport) -> None:
        """Add the report of a graph that was loaded from a cache."""
        for graph in cached.graphs:
            self.graphs.append(replace(graph, from_cache=True))
            emit(self.graphs[-1])
        self.schedules += cached.schedules
        self.estimates += cached.estimates
        # If the joint graph was traced again, this compile has reported its rewrites.
        self.rewrites = self.rewrites or list(cached.rewrites)
        self.warnings += [text for text in cached.warnings if text not in self.warnings]

    @property
    def peak_bytes(self) -> int:
        """The largest peak of the schedules, without optimizer state; 0: there are none."""
        return max((s.peak_bytes[1] - s.state_bytes for s in self.schedules), default=0)

    @property
    def collectives_before(self) -> dict[str, int]:
        """Number of collectives per kind in all graphs, before bucketing."""
        return _total(g.collectives_before for g in self.graphs)

    @property
    def collectives_after(self) -> dict[str, int]:
        """Number of collectives per kind in all graphs, after bucketing."""
        return _total(g.collectives_after for g in self.graphs)

    @property
    def buckets(self) -> tuple[BucketReport, ...]:
        """The buckets of all graphs."""
        return tuple(b for g in self.graphs for b in g.buckets)

    def graph(self, stage: str) -> GraphReport | None:
        """Return the last graph of a stage, or None."""
        return next((g for g in reversed(self.graphs) if g.stage == stage), None)

    def lines(self, members: bool = True) -> list[str]:
        """List tables graph by graph, and totals, with an empty line between parts."""
        parts = [r.lines(members) for r in (*self.rewrites, *self.graphs, *self.schedules)]
        if self.passes:
            rows = [(p.stage, p.name, f"{p.seconds:.3f}") for p in self.passes]
            parts.append(["time per pass, s:", *aligned(rows, right=(2,))])
        total = [f"all graphs: {change(self.collectives_before, self.collectives_after)}"]
        total += [f"warning: {text}" for text in self.warnings]
        if self.disabled:
            total.append(f"switched off by TORCH_EXT_BUCKETING_DISABLE: {', '.join(self.disabled)}")
        separated = ([*part, ""] for part in map(list, parts) if part)
        return [*itertools.chain.from_iterable(separated), *total]


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)
