"""What a pass is: an object with a ``stage``, ``__call__`` and ``uuid``.

A pass composes with any backend: it knows nothing of what compiles the graph afterwards.
"""

from __future__ import annotations

import itertools
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .._source import note_sources, package_digest
from .._torch.aot import stage_of
from .._torch.caches import before_key
from .._torch.inductor import CustomGraphPass
from .._torch.process_groups import group_places
from ..bucketing.units import UncoveredParametersWarning
from ..graph.analysis import GraphAnalysis
from ..graph.graph_of import GraphLike, graph_of
from ..graph.liveness import kept_inputs
from ..graph.size_hints import GivenHints, SizeHints
from ..reports.compile import CompileReport
from ..tagging.tag_graph import FqnOf
from .cache_key import NoUuidError, describe, digest, log_no_uuid, sources_of

__all__ = [
    "Compilation",
    "GraphLike",
    "GraphPass",
    "Stage",
    "graph_of",
]

Stage = Literal["joint", "forward_backward"]


@dataclass
class Compilation:
    """What the passes of one compile share.

    Args:
        input_fqns: FQN of each graph input that is a parameter, by position.
        report: filled by the passes.
        tagged: number of collectives of the joint graph that carry a tag.
        uncovered: FQNs that a warning has listed as being in no unit.
        frame: number of the code that is compiled, the same when it is compiled again.
        reference_bytes: the peak of live bytes of the graph at hand before any pass changed it,
            where a pass asked for it.
        size_hints: as given to :func:`.backend`.
        following: the passes that run on the graphs after the partitioner.
        memory_bytes: a bound on the peak of live bytes that a pass chose under, and that schedules
            keep, too.
        decided: what passes chose on the joint graph, in short, which ranks compare.
        external_live_bytes: what is in memory while the graph at hand runs, beside its own inputs,
            where a pass asked for it; see :meth:`note_inputs`.
    """

    input_fqns: FqnOf | None = None
    report: CompileReport = field(default_factory=CompileReport)
    tagged: int = 0
    uncovered: dict[str, None] = field(default_factory=dict)
    frame: int | None = None
    reference_bytes: int | None = None
    size_hints: GivenHints = None
    following: tuple[GraphPass, ...] = ()
    memory_bytes: int | None = None
    decided: list[str] = field(default_factory=list)
    external_live_bytes: int = 0
    _given: set[type[Warning]] = field(default_factory=set)
    _inputs: dict[str, int] = field(default_factory=dict)
    _analysis: GraphAnalysis | None = None

    def analysis(self, graph: GraphLike) -> GraphAnalysis:
        """What is known of the graph at hand as it is. One object for all who ask before the next
        pass has run."""
        g = graph_of(graph)
        if self._analysis is None or self._analysis.graph is not g:
            self._analysis = GraphAnalysis(
                g, self.size_hints, external_live_bytes=self.external_live_bytes
            )
        return self._analysis

    def changed(self) -> None:
        """A pass has run: what was known of the graph at hand may not hold any more."""
        self._analysis = None

    def note_inputs(self, graph: GraphLike) -> None:
        """Set :attr:`external_live_bytes` for the graph at hand.

        In backward these are the inputs of the forward graph that the backward graph does not read,
        such as parameters that were saved gathered: they are in memory all the same. 0 for other
        graphs, and where the forward graph came from a cache.
        """
        mine = kept_inputs(graph_of(graph), SizeHints.of(self.size_hints))
        if stage_of(graph_of(graph)) == "backward":
            # Of a shard that is uneven elsewhere, backward may show the shape alone: 0 bytes.
            unseen = (n - mine.get(name, 0) for name, n in self._inputs.items())
            self.external_live_bytes = sum(n for n in unseen if n > 0)
        else:
            self._inputs, self.external_live_bytes = mine, 0

    def warn(self, text: str, category: type[Warning]) -> None:
        """Warn and put it into the report, unless this compile had a warning of that class."""
        if category not in self._given:
            self._given.add(category)
            self.report.warnings.append(text)
            warnings.warn(text, category, stacklevel=3)

    def warn_uncovered(self, fqns: Sequence[str], units: Iterable[Sequence[str]] = ()) -> None:
        """Warn about parameters that no unit covers, about each once per compile.

        Args:
            fqns: the parameters.
            units: the units, of whose names the warning shows a few.
        """
        new = [f for f in fqns if f not in self.uncovered]
        if new:
            self.uncovered.update(dict.fromkeys(new))
            names = itertools.islice((repr(name) for unit in units for name in unit), 3)
            text = (
                f"{len(new)} parameter(s) are in no unit; their collectives are not bucketed: "
                f"{', '.join(new)}. The units name {', '.join(names)}, ...: name these parameters' "
                "modules, too, and where the units belong to another model than the compiled "
                "module, give that to the backend: backend(..., model=model)"
            )
            self.report.warnings.append(text)
            warnings.warn(text, UncoveredParametersWarning, stacklevel=2)


class GraphPass(CustomGraphPass):
    """A pass over one graph.

    ``stage`` says on which graph it runs: ``"joint"``, forward and backward in one, before the
    partitioner; or ``"forward_backward"``, each of the two after it. An inference graph gets the
    passes of both stages. A pass changes nothing before it knows that it can do all of it.
    """

    stage: Stage
    orders: bool = False
    """Whether it decides an order that the compiler has to keep."""

    def prepare(self, graph: GraphLike, compilation: Compilation) -> None:
        """Called on each graph of the pass's stage before the first pass of that stage."""

    def follow_ups(self) -> tuple[GraphPass, ...]:
        """Passes of the other stage that finish what this one has begun. A :class:`.PassManager`
        runs them before those of their stage that were given to it."""
        return ()

    @abstractmethod
    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        """Run on ``graph``. ``compilation`` is None where the pass was set as a config hook."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_sources(cls)

    def uuid(self) -> str | None:
        """Equal for equal settings and equal source code, in any process: a cache key.

        None, which keeps Inductor's caches away, where a setting is a plain function: neither its
        name nor its address says what it does. Give it a ``uuid()`` to be cached. The reason is
        logged as a warning.

        The code is this package and the modules of the pass's own classes; what those import from
        elsewhere is not looked at.
        """
        before_key()
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        try:
            settings = repr(describe(self.settings()))
            sources = sources_of(type(self))
        except NoUuidError as error:
            log_no_uuid(name, error)
            return None
        # Byte caps and costs depend on sizes of groups, and an all-reduce's is not in the graph.
        # A merged gather writes this rank's shards to its own place in the buffer, a constant.
        # A place known at run time would take as long in a step (benchmarks/README.md), but where
        # a mesh is an input torch's own keys have the rank, too, and no entry would be shared.
        groups = repr(group_places())
        return digest(name, package_digest(), *sources, settings, groups)

    def basis(self) -> str:
        """The times that it plans with, in short, which ranks compare; empty: with none."""
        return ""

    def settings(self) -> tuple[Any, ...]:
        """What decides the pass's result: plain values, containers and dataclasses of them, and
        objects with a ``uuid()``. A subclass adds what it adds."""
        return ()
