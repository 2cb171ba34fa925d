"""What the passes of one compile share."""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.fx as fx
import torch.nn as nn

from .._torch.aot import stage_of
from ..errors import UncoveredParametersWarning
from ..fsdp.tag_graph import FqnOf
from ..graph.analysis import GraphAnalysis
from ..graph.liveness import kept_inputs
from ..graph.size_hints import GivenHints, SizeHints
from ..graph.unwrap import GraphLike, graph_of
from ..reports.compile import CompileReport
from .facts import Baseline, Fact


@dataclass(frozen=True)
class Choice:
    """A pass's choice on the joint graph for the graphs after the partitioner: in short, for ranks
    to compare, and with the bound on the peak of live bytes that it was made under, which schedules
    keep, too (None: there is none)."""

    text: str
    limit_bytes: int | None = None


@dataclass
class Compilation:
    """One compile.

    Args:
        input_fqns: FQN of each graph input that is a parameter, by position. Like the next five it
            is known before the first pass runs.
        activations: of the inputs that code before this one computed, by position: the name in the
            code that is compiled, and the tensor.
        frame: number of the code that is compiled, the same when it is compiled again.
        size_hints: as given to :func:`.backend`; ``model``, too.
        ahead: what the passes after the partitioner will give, in the order in which they run.
        tagged: number of collectives of the joint graph that carry a tag, by ``TagParameters``.
        choice: by ``ReshardAfterForward(keep="auto")``; None where nothing was chosen.
        baseline: of the graph at hand, by the pipeline.
    """

    input_fqns: FqnOf | None = None
    activations: Mapping[int, tuple[str, weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    frame: int | None = None
    size_hints: GivenHints = None
    model: nn.Module | None = None
    ahead: tuple[Fact, ...] = ()
    report: CompileReport = field(default_factory=CompileReport)
    tagged: int = 0
    choice: Choice | None = None
    baseline: Baseline = field(default_factory=Baseline)
    _forward_inputs: dict[str, int] = field(default_factory=dict)
    _warned: set[type[Warning]] = field(default_factory=set)
    _uncovered: set[str] = field(default_factory=set)
    _analysis: GraphAnalysis | None = None

    def analysis(self, graph: GraphLike) -> GraphAnalysis:
        """The analysis of the graph at hand as it is: one object for all who ask before the next
        pass has run."""
        g = graph_of(graph)
        if self._analysis is None or self._analysis.graph is not g:
            self._analysis = GraphAnalysis(
                g, self.size_hints, external_live_bytes=self.baseline.external_live_bytes
            )
        return self._analysis

    def changed(self) -> None:
        """Forget the analysis: a pass has run, and it may not hold any more."""
        self._analysis = None

    def measure(self, graph: fx.Graph) -> None:
        """Set :attr:`baseline` for a graph."""
        self.changed()
        self.baseline = Baseline(None, self._external_live_bytes(graph))
        with contextlib.suppress(Exception):  # ``schedule`` will meet the same and say so
            self.baseline = replace(self.baseline, peak_bytes=self.analysis(graph).peak_bytes)

    def _external_live_bytes(self, graph: fx.Graph) -> int:
        mine = kept_inputs(graph, SizeHints.of(self.size_hints))
        if stage_of(graph) != "backward":
            self._forward_inputs = mine
            return 0
        # Of a shard that is uneven elsewhere, backward may show the shape alone: 0 bytes.
        unseen = (n - mine.get(name, 0) for name, n in self._forward_inputs.items())
        return sum(n for n in unseen if n > 0)

    def warn(self, text: str, category: type[Warning]) -> None:
        """Warn and put it into the report, unless this compile had a warning of that class."""
        if category not in self._warned:
            self._warned.add(category)
            self.report.warnings.append(text)
            warnings.warn(text, category, stacklevel=3)

    def warn_uncovered(self, fqns: Sequence[str], units: Iterable[Sequence[str]]) -> None:
        """Warn about parameters that none of ``units`` covers, about each once per compile."""
        new = [fqn for fqn in fqns if fqn not in self._uncovered]
        self._uncovered.update(new)
        if new:
            names = itertools.islice((repr(name) for unit in units for name in unit), 3)
            text = (
                f"{len(new)} parameter(s) are in no unit; their collectives are not bucketed: "
                f"{', '.join(new)}. The units name {', '.join(names)}, ...: name these parameters' "
                "modules, too, and where the units belong to another model than the compiled "
                "module, give that to the backend: backend(..., model=model)"
            )
            self.report.warnings.append(text)
            warnings.warn(text, UncoveredParametersWarning, stacklevel=2)
