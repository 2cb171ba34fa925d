"""Define the base class of passes, the state of one compile, and the driver."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
import torch.fx as fx
import torch.nn as nn

from .._source import note_sources
from .._torch import paused_gc, with_room_for_frames
from .._torch.aot import stage_of
from .._torch.inductor import (
    CustomGraphPass,
    is_inductor_compiling,
    readable,
    trace_artifact,
    uses_cuda_graphs,
)
from ..errors import DividedUnitWarning, NoUuidError, UncoveredParametersWarning
from ..graph.analysis import GraphAnalysis
from ..graph.edits import unchanged_on_error
from ..graph.liveness import kept_inputs, workspace_bytes
from ..graph.nodes import GraphLike, graph_of
from ..graph.sizes import GivenHints, SizeHints
from ..reports.compile import CompileReport, GraphReport, PassTime, RewriteReport
from .cache_key import code_of_fields, key_of

log = logging.getLogger("torch_ext_bucketing")


@dataclass(frozen=True)
class Baseline:
    """The memory of a graph before the first pass of its stage."""

    peak_bytes: int | None = None  # estimated peak of live bytes; None if the estimate failed
    # Bytes that are live while the graph runs and are not its inputs: those that the allocator
    # holds beside it (`workspace_bytes`), and for a backward graph the forward inputs that it
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

    # FQN of each graph input that is a parameter, by position; None without Dynamo.
    input_fqns: Mapping[int, str] | None = None
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
            live_bytes = self.baseline.external_live_bytes
            self._analysis = GraphAnalysis(
                graph, self.size_hints, external_live_bytes=live_bytes, fuses=self.fuses
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
        self.baseline = Baseline(None, self._external_live_bytes(graph))
        # Scheduling meets the same error again, and reports it.
        with contextlib.suppress(Exception):
            self.baseline = replace(self.baseline, peak_bytes=self.analysis(graph).peak_bytes)

    def _external_live_bytes(self, graph: fx.Graph) -> int:
        """Return the bytes that are live while ``graph`` runs and that its values don't show.

        Call it for forward before backward, which does not read all that the caller keeps for it.
        """
        kept_bytes = kept_inputs(graph, SizeHints.of(self.size_hints))
        workspaces = workspace_bytes(graph)
        if stage_of(graph) != "backward":
            self._forward_inputs = kept_bytes
            return workspaces
        # Backward may read only the shape of a shard that is uneven on other ranks: 0 bytes.
        unseen = (n - kept_bytes.get(name, 0) for name, n in self._forward_inputs.items())
        return workspaces + sum(n for n in unseen if n > 0)

    @property
    def has_collectives(self) -> bool:
        """Whether a graph of this compile, or of a cache, has any."""
        cached = any(graph.from_cache for graph in self.report.graphs)
        return cached or bool(self.tagged or self.report.collectives_before)

    def warn(self, text: str, category: type[Warning]) -> None:
        """Warn, and add the text to the report; once per category and compile."""
        if category not in self._warned:
            self._warned.add(category)
            self.report.warnings.append(text)
            warnings.warn(text, category, stacklevel=3)

    def warn_of_bits(self, reason: str, remedy: str) -> None:
        """Warn that a unit's gradients are not reduced as eager FSDP2 reduces them."""
        text = f"{reason}, so weights do not match eager FSDP2's bit for bit. {remedy}"
        self.warn(text, DividedUnitWarning)

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


Stage = Literal["joint", "forward_backward"]

# Facts about a graph. A pass of your own may add others: any text that names a decision.
TAGS = "the tags of collectives"
REGATHERS = "which parameters backward gathers again"
PARKED = "which activations are parked in host memory"
BUCKETS = "which collectives are merged"
RANK_ORDER = "how gradients are added up"
ORDER = "the order of the nodes"

P = TypeVar("P")


@dataclass(frozen=True, eq=False, repr=False)
class GraphPass(CustomGraphPass):
    """A pass over one graph.

    Subclasses are frozen dataclasses. Their fields are the settings of the pass: its ``repr`` and
    its cache key are made from them. If a pass raises, the graph is as it was before the pass.

    ``stage`` is ``"joint"`` (forward and backward in one graph, before the partitioner) or
    ``"forward_backward"`` (each graph after the partitioner). Passes of both stages run on an
    inference graph.

    Inductor's config takes a pass, too: without a backend it is called with a graph alone.
    """

    stage: ClassVar[Stage]
    requires: ClassVar[frozenset[str]] = frozenset()
    """Facts that must hold before the pass runs. :data:`TAGS` always do."""
    conflicts_with: ClassVar[frozenset[str]] = frozenset()
    """Facts that the pass may invalidate: passes that provide them come later in a list."""
    reads_baseline: ClassVar[bool] = False
    """Whether the pass reads ``compilation.baseline``, which is measured before all passes then."""
    option: ClassVar[str] = ""
    """Field of other passes that takes this one, where the two can't be in one list."""

    @property
    def provides(self) -> frozenset[str]:
        """Facts that hold after the pass. Only one pass may provide each, but :data:`BUCKETS`."""
        return frozenset()

    @property
    def parts(self) -> tuple[GraphPass, ...]:
        """Passes that this pass runs itself; by their names, they are switched off alone."""
        return ()

    @property
    def planned_with(self) -> str:
        """A short text for the times and dtypes that the pass plans with. Ranks compare it."""
        return ""

    @property
    def name(self) -> str:
        """The name of the class, in reports and in ``TORCH_EXT_BUCKETING_DISABLE``."""
        return type(self).__name__

    def _set(self, **values: Any) -> None:
        """Set fields from ``__post_init__``."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def fuses_alone(self) -> bool:
        """Whether kernels count as fused where the pass is called outside of a compile."""
        return False

    def install(self) -> None:
        """Prepare the model before it is traced. Called when a backend is made."""

    @abstractmethod
    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Run on a graph of the pass's stage, in place."""

    def finish(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Complete a joint pass's work on each graph after the partitioner, before its passes."""

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Wrap the compiled function, to observe its calls."""
        return compiled

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> CompileReport:
        """Run this pass alone on one graph, in place, and recompile a ``GraphModule``."""
        if compilation is None:
            inside = is_inductor_compiling()
            captured = inside and uses_cuda_graphs()
            compilation = Compilation(fuses=inside or self.fuses_alone, captured=captured)
        run_passes([self], self.stage, graph, compilation)
        if isinstance(graph, fx.GraphModule):
            graph.recompile()
        return compilation.report

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_sources(cls)

    def uuid(self) -> str | None:
        """Return the pass's cache key, the same in every process for equal settings and code.

        The code is this package and the modules that define the pass's classes, without their
        imports from elsewhere. None bypasses Inductor's caches, with a warning: a setting is a
        plain function, whose name does not identify its code; give it a ``uuid()`` of its own.
        """
        return key_of(type(self), self.settings)

    def settings(self) -> tuple[Any, ...]:
        """Return the values that define the pass's result: by default its fields.

        Allowed are plain values, containers and dataclasses of them, and objects with ``uuid()``.
        """
        # A hand-written __init__ may store settings in no field. Two such passes must not share a
        # key, so none is made unless the class overrides this method.
        made_by = next(c for c in type(self).__mro__ if "__init__" in vars(c))
        if "__dataclass_fields__" not in vars(made_by):
            raise NoUuidError(
                f"{made_by.__qualname__} has an __init__ of its own: make it a frozen dataclass, "
                "or define settings()"
            )
        return tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __repr__(self) -> str:
        """Return the code that makes the pass, without fields that have their defaults."""
        return code_of_fields(self)


@with_room_for_frames
@paused_gc()
def run_passes(
    passes: Sequence[GraphPass],
    stage: Stage,
    graph: GraphLike,
    compilation: Compilation,
    joint: Sequence[GraphPass] = (),
) -> list[GraphReport]:
    """Run the passes of one stage on a graph; return the reports of passes that bucket.

    Every pass runs here: those of a backend, of a whole step, of torch's own config, and one alone.
    Passes in ``joint`` ran on the joint graph, and complete their work on this one. The graph
    before and after each pass goes to ``TORCH_TRACE``, and to the package's logger at DEBUG.
    """
    g, done = graph_of(graph), len(compilation.report.graphs)
    name = stage if stage == "joint" else stage_of(g)
    for p in joint:
        p.finish(g, compilation)
    compilation.changed()
    # PeakMemory(ratio=...) refers to the graph as the compiler made it, so this comes first. The
    # first pass shares its analysis.
    measures = next((p for p in passes if p.reads_baseline), None)
    clock = time.perf_counter()
    if measures is not None:
        compilation.measure(g)
    measured = time.perf_counter() - clock
    for i, p in enumerate(passes):
        _show(g, f"{name}_{i}_{p.name}_before")
        clock = time.perf_counter()
        with unchanged_on_error(g):
            p.run(g, compilation)
        seconds = time.perf_counter() - clock + (measured if p is measures else 0.0)
        compilation.changed()
        _show(g, f"{name}_{i}_{p.name}_after")
        compilation.report.passes.append(PassTime(name, p.name, seconds))
    if stage == "forward_backward":
        compilation.complete(g)
    return compilation.report.graphs[done:]


def _show(graph: fx.Graph, name: str) -> None:
    """Trace a graph as an artifact, and log it at DEBUG."""
    trace_artifact(f"torch_ext_bucketing_{name}", lambda: readable(graph))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", name, readable(graph))


def last_of(passes: Iterable[object], *classes: type[P]) -> P | None:
    """Return the last pass of one of the classes, or None."""
    return next((p for p in reversed(list(passes)) if isinstance(p, classes)), None)
