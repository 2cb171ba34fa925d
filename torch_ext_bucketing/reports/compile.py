"""The report of all graphs of one compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from .base import Report
from .buckets import BucketReport
from .graph import GraphReport, emit
from .keep import KeepReport
from .rewrites import RewriteReport
from .schedule import ScheduleReport
from .text import aligned, change


@dataclass(frozen=True)
class PassTime:
    """The wall time that one pass took on the graph of a stage."""

    stage: str
    name: str
    seconds: float


@dataclass
class CompileReport(Report):
    """The report of one compile. The backward graph appears once it is compiled. Graphs, schedules
    and passes are in the order in which they ran.

    Args:
        warnings: texts of the warnings that were given.
        passes: the time of each pass on each graph.
        disabled: the passes that ``TORCH_EXT_BUCKETING_DISABLE`` switched off.
        rewrites: of the joint graph, in the order in which they were made.
    """

    derived = ("collectives_before", "collectives_after")
    graphs: list[GraphReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    schedules: list[ScheduleReport] = field(default_factory=list)
    passes: list[PassTime] = field(default_factory=list)
    disabled: tuple[str, ...] = ()
    rewrites: list[RewriteReport | KeepReport] = field(default_factory=list)

    @classmethod
    def joined(cls, reports: Iterable[CompileReport]) -> CompileReport:
        """One report of several compiles."""
        whole = cls()
        for report in reports:
            for f in fields(cls):
                setattr(whole, f.name, getattr(whole, f.name) + getattr(report, f.name))
        whole.disabled = tuple(dict.fromkeys(whole.disabled))
        return whole

    def since(self, graphs: int, schedules: int) -> CompileReport:
        """A copy of what a cache keeps with a graph: this report without so many first graphs and
        schedules, which are of other graphs, and without what only this compile knows."""
        return CompileReport(
            self.graphs[graphs:],
            list(self.warnings),
            self.schedules[schedules:],
            rewrites=list(self.rewrites),
        )

    def add_cached(self, kept: CompileReport) -> None:
        """Add what was reported of a graph when it was compiled, now that a cache had it."""
        for graph in kept.graphs:
            self.graphs.append(replace(graph, from_cache=True))
            emit(self.graphs[-1])
        self.schedules += kept.schedules
        # Of the joint graph, which may have been made again.
        self.rewrites = self.rewrites or list(kept.rewrites)
        self.warnings += [text for text in kept.warnings if text not in self.warnings]

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

    def to_text(self, members: bool = True) -> str:
        """Aligned tables, graph by graph, and the totals.

        Args:
            members: list each bucket's members with their byte offsets.
        """
        parts = [text for rewrite in self.rewrites if (text := rewrite.to_text())]
        parts += [graph.to_text(members) for graph in self.graphs]
        parts += [schedule.to_text() for schedule in self.schedules]
        if self.passes:
            rows = [(p.stage, p.name, f"{p.seconds:.3f}") for p in self.passes]
            parts.append("\n".join(["time per pass, s:", *aligned(rows, right=(2,))]) + "\n")
        total = f"all graphs: {change(self.collectives_before, self.collectives_after)}\n"
        total += "".join(f"warning: {text}\n" for text in self.warnings)
        if self.disabled:
            total += f"switched off by TORCH_EXT_BUCKETING_DISABLE: {', '.join(self.disabled)}\n"
        return "\n".join([*parts, total])


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for kind, number in count.items():
            total[kind] = total.get(kind, 0) + number
    return total
