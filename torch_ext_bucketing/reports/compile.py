"""The report of one compile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace

from .base import Report
from .buckets import BucketReport
from .estimate import EstimateReport
from .graph import GraphReport, emit
from .keep import KeepReport
from .rewrites import RewriteReport
from .schedule import ScheduleReport
from .text import aligned, change


@dataclass(frozen=True)
class PassTime:
    """Wall time of one pass on one graph."""

    stage: str
    name: str
    seconds: float


@dataclass
class CompileReport(Report):
    """The report of one compile, each list in the order of the passes.

    The backward graph is added once it is compiled.

    Args:
        warnings: texts of the warnings.
        disabled: passes that ``TORCH_EXT_BUCKETING_DISABLE`` switched off.
        rewrites: changes of the joint graph.
        estimates: times of the graphs as they were compiled, if a pass added them.
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
        """Copy what a cache stores with a graph.

        Args:
            graphs: number of earlier graphs, which are left out; ``schedules`` and ``estimates``
                likewise.
        """
        return CompileReport(
            self.graphs[graphs:],
            list(self.warnings),
            self.schedules[schedules:],
            rewrites=list(self.rewrites),
            estimates=self.estimates[estimates:],
        )

    def add_cached(self, kept: CompileReport) -> None:
        """Add the report of a graph that was loaded from a cache."""
        for graph in kept.graphs:
            self.graphs.append(replace(graph, from_cache=True))
            emit(self.graphs[-1])
        self.schedules += kept.schedules
        self.estimates += kept.estimates
        # If the joint graph was traced again, this compile has reported its rewrites.
        self.rewrites = self.rewrites or list(kept.rewrites)
        self.warnings += [text for text in kept.warnings if text not in self.warnings]

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

    def to_text(self, members: bool = True) -> str:
        """Format tables graph by graph, and totals; ``members`` lists those of each bucket."""
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
