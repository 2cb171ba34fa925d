"""Passes, the facts that they give, and what the passes of one compile share.

A pass says which facts about a graph it needs, gives and undoes; :class:`.Pipeline` checks a list
of passes by these before anything is compiled.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch
import torch.fx as fx

from .._source import note_sources, package_digest
from .._torch.aot import stage_of
from .._torch.inductor import CustomGraphPass
from .._torch.process_groups import group_places
from ..bucketing.plan import BucketPlanner
from ..bucketing.units import UncoveredParametersWarning
from ..fsdp.tag_graph import FqnOf
from ..fsdp.units import Units
from ..graph.analysis import GraphAnalysis, GraphLike, graph_of
from ..graph.collectives import Kind
from ..graph.liveness import kept_inputs
from ..graph.size_hints import GivenHints, SizeHints
from ..planner.cost.machine import Machine
from ..planner.schedule.policy import Policy
from ..reports.compile import CompileReport
from .cache_key import NoUuidError, describe, digest, log_no_uuid, sources_of
from .code import code_of_call
from .diagnostics import warn_of_silence

Stage = Literal["joint", "forward_backward"]


# ---------------------------------------------------------------- facts


@dataclass(frozen=True)
class Fact:
    """Something that holds of a graph once a pass has run."""

    text: ClassVar[str] = ""
    """The fact in messages, such as "the order of the nodes"."""
    once: ClassVar[bool] = True
    """Whether one pass alone may give it."""


@dataclass(frozen=True)
class Tags(Fact):
    """Collectives carry a tag: the parameters that they serve."""

    text = "the tags of collectives"


@dataclass(frozen=True)
class Regathers(Fact):
    """It is decided which parameters backward gathers again."""

    text = "which parameters backward gathers again"


@dataclass(frozen=True)
class Buckets(Fact):
    """Collectives of ``kinds`` are merged: one bucket per unit; or, where ``units`` is None, by
    size. ``planner`` is what plans them; None: a search, which is no part of other searches."""

    text = "which collectives are merged"
    once = False
    kinds: tuple[Kind, ...] = ()
    units: Units | None = None
    planner: BucketPlanner | None = None


@dataclass(frozen=True)
class RankOrder(Fact):
    """Gradients are added in the order of the ranks, in the dtype ``accumulate``; no reduction is
    left to be merged."""

    text = "how gradients are added up"
    accumulate: torch.dtype = torch.float32


@dataclass(frozen=True)
class Order(Fact):
    """The nodes stand in the order in which they are to run, judged by ``policies`` and timed for
    ``machine``, and the compiler has to keep it."""

    text = "the order of the nodes"
    policies: tuple[Policy, ...] = ()
    machine: Machine | None = None


@dataclass(frozen=True)
class Baseline(Fact):
    """The memory of a graph before the first pass of its stage changed it. No pass gives it: the
    pipeline measures it where a pass needs it.

    Args:
        peak_bytes: estimated peak of live bytes; None where no estimate can be made.
        external_live_bytes: bytes in memory while the graph runs that are none of its inputs: the
            forward graph's inputs that its backward graph does not read, such as the shards of
            parameters that were saved gathered. 0 for other graphs than backward ones, and where
            the forward graph came from a cache.
    """

    text = "what the graph took as it was"
    peak_bytes: int | None = None
    external_live_bytes: int = 0


F = TypeVar("F", bound=Fact)


def last_fact(facts: Iterable[Fact], kind: type[F]) -> F | None:
    """The last fact of a class; None where there is none."""
    return next((fact for fact in reversed(list(facts)) if isinstance(fact, kind)), None)


# ---------------------------------------------------------------- one compile


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
        input_fqns: FQN of each graph input that is a parameter, by position. Like the next four it
            is known before the first pass runs.
        activations: of the inputs that code before this one computed, by position: the name in the
            code that is compiled, and the tensor.
        frame: number of the code that is compiled, the same when it is compiled again.
        size_hints: as given to :func:`.backend`.
        ahead: what the passes after the partitioner will give, in the order in which they run.
        tagged: number of collectives of the joint graph that carry a tag, by ``TagParameters``.
        choice: by ``ReshardAfterForward(keep="auto")``; None where nothing was chosen.
        baseline: of the graph at hand, by the pipeline.
    """

    input_fqns: FqnOf | None = None
    activations: Mapping[int, tuple[str, weakref.ref[torch.Tensor]]] = field(default_factory=dict)
    frame: int | None = None
    size_hints: GivenHints = None
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


# ---------------------------------------------------------------- a pass


class GraphPass(CustomGraphPass):
    """A pass over one graph.

    ``stage`` says on which graph it runs: ``"joint"``, forward and backward in one, before the
    partitioner; or ``"forward_backward"``, each of the two after it. An inference graph gets the
    passes of both stages. A pass changes nothing before it knows that it can do all of it.

    Called with a graph alone, as Inductor calls a pass that is set in its config, it is a pipeline
    of its own: see :meth:`__call__`.
    """

    stage: Stage
    needs: tuple[type[Fact], ...] = ()
    """Facts that must hold before it runs."""
    gives: tuple[Fact, ...] = ()
    """Facts that hold after it."""
    undoes: tuple[type[Fact], ...] = ()
    """Facts that may not hold after it any more: passes that give them come later in a list."""

    parts: tuple[GraphPass, ...] = ()
    """Passes that it runs itself. Where one is switched off, its facts are not given."""

    @property
    def name(self) -> str:
        """The name of the class, in reports and in ``TORCH_EXT_BUCKETING_DISABLE``."""
        return type(self).__name__

    def install(self) -> None:
        """Prepare what is to be traced. A backend does so as it is made."""

    @abstractmethod
    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        """Run on a graph of the pass's stage."""

    def finish(self, graph: GraphLike, compilation: Compilation) -> None:
        """Finish on each graph after the partitioner what the pass began on the joint graph, before
        the passes of that stage run."""

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> CompileReport:
        """Run on one graph of the pass's stage without any other pass, in place; a ``GraphModule``
        is recompiled. Without a ``compilation`` to go on with it begins one, which warns where
        nothing was bucketed, as :func:`.backend` does."""
        alone = compilation is None
        compilation = compilation or Compilation()
        if Baseline in self.needs:
            compilation.measure(graph_of(graph))
        self.run(graph, compilation)
        compilation.changed()
        if alone:
            warn_of_silence(graph_of(graph), compilation.report.graphs, compilation)
        if isinstance(graph, fx.GraphModule):
            graph.recompile()
        return compilation.report

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        note_sources(cls)

    def uuid(self) -> str | None:
        """Equal for equal settings and equal source code, in any process: a cache key.

        None, which keeps Inductor's caches away, where a setting is a plain function: neither its
        name nor its address says what it does. Give it a ``uuid()`` to be cached. The reason is
        logged as a warning. The code is this package and the modules of the pass's own classes;
        what those import from elsewhere is not looked at.
        """
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
        # What one rank compiles for all has none.
        groups = repr(group_places())
        return digest(name, package_digest(), *sources, settings, groups)

    def arguments(self) -> dict[str, Any]:
        """The arguments of the constructor that the pass keeps as attributes of the same names."""
        names = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def settings(self) -> tuple[Any, ...]:
        """The settings that decide the pass's result: plain values, containers and dataclasses of
        them, and objects with a ``uuid()``. A subclass that decides by more than its
        :meth:`arguments` adds it."""
        return tuple(self.arguments().values())

    def __repr__(self) -> str:
        """The code that makes one: :meth:`arguments` that are no defaults."""
        return code_of_call(self.name, type(self), self.arguments())
