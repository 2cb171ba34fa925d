"""Hold the state of one compile, which its passes share."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.fx as fx
import torch.nn as nn

from .._torch.aot import stage_of
from ..errors import UncoveredParametersWarning
from ..fsdp.tagging import FqnOf
from ..graph.analysis import GraphAnalysis
from ..graph.liveness import beside_bytes, kept_inputs
from ..graph.sizes import GivenHints, SizeHints
from ..reports.compile import CompileReport, RewriteReport
from ..runtime.watch import Watched


@dataclass(frozen=True)
class Baseline:
    """The memory of a graph before the first pass of its stage."""

    peak_bytes: int | None = None  # estimated peak of live bytes; None if the estimate failed
    # Bytes that are live while the graph runs and are not its inputs: those that the allocator
    # holds beside it (`beside_bytes`), and for a backward graph the forward inputs that it
    # does not read, such as shards of parameters that were saved gathered, unless the forward graph
    # was cached.
    external_live_bytes: int = 0


@dataclass(frozen=True)
class Choice:
    """A choice of a pass on the joint graph for the graphs after the partitioner.

    ``text`` is short, and ranks compare it. ``limit_bytes``, the bound on the peak of live bytes
    that the choice was made under, holds for schedules, too; None: no bound.
    """

    text: str
    limit_bytes: int | None = None


class Extension(Protocol):
    """Adds nodes to the graphs after the partitioner, or to the graph of a whole step."""

    def append(
        self,
        graph: fx.Graph,
        inputs: Mapping[str, fx.Node],
        gradients: Sequence[tuple[fx.Node, str]],
        choice: Choice | None = None,
    ) -> list[fx.Node]:
        """Add nodes before the passes run; return new inputs, which stand after the others.

        Args:
            inputs: by FQN, parameters' shards among the graph's inputs.
            gradients: outputs that are gradients of parameters, with the FQNs.
            choice: has the bound on memory, if any.
        """

    def merged(self, graph: fx.Graph) -> RewriteReport | None:
        """Change added nodes between merging and ordering; return a report, but only once."""

    @property
    def extra_bytes(self) -> int:
        """Bytes of new inputs that a bound on memory covers apart from the graphs."""

    def values(self) -> list[torch.Tensor]:
        """Return the values of the new inputs, before each run of the graph that has them."""


@dataclass
class Compilation:
    """One compile."""

    input_fqns: FqnOf | None = None  # FQN of each graph input that is a parameter, by position
    # Graph inputs that earlier code computed, by position: the name in the compiled code, and the
    # tensor.
    activations: Mapping[int, tuple[str, weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    frame: int | None = None  # number of the compiled code object; a recompile has the same
    size_hints: GivenHints = None  # see `backend`; so is ``model``
    model: nn.Module | None = None
    # The passes that will run after the partitioner; see `Pipeline.ahead`.
    ahead: tuple[object, ...] = ()
    report: CompileReport = field(default_factory=CompileReport)
    tagged: int = 0  # number of collectives of the joint graph with a tag
    choice: Choice | None = None  # set by ``ReshardAfterForward("auto")``
    baseline: Baseline = field(default_factory=Baseline)
    extension: Extension | None = None
    fuses: bool = False  # whether the graph will run as Inductor's kernels; estimates take that
    captured: bool = False  # whether it will run as a CUDA graph
    _forward_inputs: dict[str, int] = field(default_factory=dict)
    _warned: set[type[Warning]] = field(default_factory=set)
    _uncovered: set[str] = field(default_factory=set)
    _analysis: GraphAnalysis | None = None

    def analysis(self, graph: fx.Graph) -> GraphAnalysis:
        """Analyse ``graph``, once until the next pass has run."""
        if self._analysis is None or self._analysis.graph is not graph:
            more = self.baseline.external_live_bytes
            self._analysis = GraphAnalysis(
                graph, self.size_hints, external_live_bytes=more, fuses=self.fuses
            )
        return self._analysis

    def complete(self, graph: fx.Graph) -> None:
        """Call :meth:`Extension.merged`; calling it again changes nothing."""
        if self.extension is not None:
            report = self.extension.merged(graph)
            if report is not None:
                self.report.rewrites.append(report)
                self.changed()

    def changed(self) -> None:
        """Drop the analysis, because a pass may have changed the graph."""
        self._analysis = None

    def measure(self, graph: fx.Graph) -> None:
        """Set :attr:`baseline` for ``graph``."""
        self.changed()
        self.baseline = Baseline(None, self._external_live_bytes(graph))
        # Scheduling meets the same error again, and reports it.
        with contextlib.suppress(Exception):
            self.baseline = replace(self.baseline, peak_bytes=self.analysis(graph).peak_bytes)

    def _external_live_bytes(self, graph: fx.Graph) -> int:
        mine = kept_inputs(graph, SizeHints.of(self.size_hints))
        beside = beside_bytes(graph)
        if stage_of(graph) != "backward":
            self._forward_inputs = mine
            return beside
        # Backward may read only the shape of a shard that is uneven on other ranks: 0 bytes.
        unseen = (n - mine.get(name, 0) for name, n in self._forward_inputs.items())
        return beside + sum(n for n in unseen if n > 0)

    @property
    def watched(self) -> Watched:
        """This compile, for the functions of :mod:`.runtime.watch`."""

        def has_collectives() -> bool:
            report = self.report
            cached = any(graph.from_cache for graph in report.graphs)
            return cached or bool(self.tagged or report.collectives_before)

        fqns: Any = self.input_fqns or {}
        return Watched(fqns, self.model, has_collectives, self.warn)

    def warn(self, text: str, category: type[Warning]) -> None:
        """Warn, and add the text to the report; once per category and compile."""
        if category not in self._warned:
            self._warned.add(category)
            self.report.warnings.append(text)
            warnings.warn(text, category, stacklevel=3)

    def warn_uncovered(self, fqns: Sequence[str], units: Iterable[Sequence[str]]) -> None:
        """Warn about parameters that are in none of ``units``, once per parameter and compile."""
        new = [fqn for fqn in fqns if fqn not in self._uncovered]
        self._uncovered.update(new)
        if new:
            names = itertools.islice((repr(name) for unit in units for name in unit), 3)
            text = (
                f"{len(new)} parameter(s) are in no unit; their collectives are not bucketed: "
                f"{', '.join(new)}. The units name {', '.join(names)}, ...: add these parameters' "
                "modules. If the units belong to another module than the compiled one, give that "
                "to the backend: backend(..., model=model)"
            )
            self.report.warnings.append(text)
            warnings.warn(text, UncoveredParametersWarning, stacklevel=2)
