"""Define the base class of passes, the facts that lists are checked by, and the driver."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar

import torch.fx as fx

from .._source import note_sources
from .._torch.aot import stage_of
from .._torch.inductor import CustomGraphPass, readable, trace_artifact
from ..errors import NoUuidError
from ..graph.nodes import GraphLike, graph_of
from ..reports.compile import CompileReport, PassTime
from ..reports.graph import GraphReport
from .compilation import Compilation

log = logging.getLogger("torch_ext_bucketing")

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
    its cache key are made from them. A pass must leave the graph unchanged if it raises.

    ``stage`` is ``"joint"`` (forward and backward in one graph, before the partitioner) or
    ``"forward_backward"`` (each graph after the partitioner). Passes of both stages run on an
    inference graph.

    Inductor's config takes a pass, too: without a backend it is called with a graph alone.
    """

    stage: ClassVar[Stage]
    requires: ClassVar[frozenset[str]] = frozenset()
    """Facts that must hold before the pass runs."""
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
        from .._torch.inductor import is_inductor_compiling, uses_cuda_graphs

        if compilation is None:
            fuses = is_inductor_compiling()
            compilation = Compilation(fuses=fuses, captured=fuses and uses_cuda_graphs())
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
        from .cache_key import key_of

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
        from .cache_key import code_of_fields

        return code_of_fields(self)


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
    # PeakMemory(ratio=...) refers to the graph as the compiler made it, so this comes first.
    measures = next((p for p in passes if p.reads_baseline), None)
    clock = time.perf_counter()
    if measures is not None:
        compilation.measure(g)
    measured = time.perf_counter() - clock
    for p in joint:
        p.finish(g, compilation)
        compilation.changed()
    for i, p in enumerate(passes):
        _show(g, f"{name}_{i}_{p.name}_before")
        clock = time.perf_counter()
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
