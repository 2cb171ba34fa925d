"""The base class of passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch.fx as fx

from .._source import note_sources, package_digest
from .._torch.graph_pass import CustomGraphPass
from .._torch.process_groups import group_places
from ..graph.unwrap import GraphLike, graph_of
from .cache_key import NoUuidError, describe, digest, log_no_uuid, sources_of
from .code import code_of_fields
from .facts import Baseline, Fact

if TYPE_CHECKING:
    from ..reports.compile import CompileReport
    from .compilation import Compilation

Stage = Literal["joint", "forward_backward"]


@dataclass(frozen=True, eq=False, repr=False)
class GraphPass(CustomGraphPass):
    """A pass over one graph.

    ``stage`` says on which graph it runs: ``"joint"``, forward and backward in one, before the
    partitioner; or ``"forward_backward"``, each of the two after it. An inference graph gets the
    passes of both stages. A pass changes nothing before it knows that it can do all of it.

    A subclass is a frozen dataclass, whose fields are its settings: its ``repr`` is the code that
    makes it, and its part of cache keys is made of them. What is no field changes no result.

    Called with a graph alone, as Inductor calls a pass that is set in its config, it is a pipeline
    of its own: see :meth:`__call__`.
    """

    stage: ClassVar[Stage]
    requires: ClassVar[tuple[type[Fact], ...]] = ()
    """Facts that must hold before it runs."""
    conflicts_with: ClassVar[tuple[type[Fact], ...]] = ()
    """Facts that must not hold yet when it runs, as they may not hold after it any more: passes
    that provide them come later in a list."""

    @property
    def provides(self) -> tuple[Fact, ...]:
        """Facts that hold after it."""
        return ()

    @property
    def parts(self) -> tuple[GraphPass, ...]:
        """Passes that it runs itself. Where one is switched off, its facts are not provided."""
        return ()

    def _set(self, **values: Any) -> None:
        """Set fields, or what is made of them, in ``__post_init__``."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

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

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Wrap the code that a compile made, to look at its runs."""
        return compiled

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> CompileReport:
        """Run on one graph of the pass's stage without any other pass, in place; a ``GraphModule``
        is recompiled. Without a ``compilation`` to go on with it begins one, which warns where
        nothing was bucketed, as :func:`.backend` does."""
        from .compilation import Compilation
        from .diagnostics import warn_of_silence

        alone = compilation is None
        compilation = compilation or Compilation()
        if Baseline in self.requires:
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

    def settings(self) -> tuple[Any, ...]:
        """The settings that decide the pass's result: plain values, containers and dataclasses of
        them, and objects with a ``uuid()``. These are the fields; a subclass that decides by more
        adds it, and one that has an ``__init__`` of its own and is no dataclass says all of it:
        without, its graphs are not cached."""
        made_by = next(c for c in type(self).__mro__ if "__init__" in vars(c))
        if "__dataclass_fields__" not in vars(made_by):
            raise NoUuidError(
                f"{made_by.__qualname__} keeps what its __init__ is given in no field: make it a "
                "frozen dataclass, or define settings()"
            )
        return tuple(getattr(self, f.name) for f in fields(self) if f.init)

    def __repr__(self) -> str:
        """The code that makes one, with the fields that differ from their defaults."""
        return code_of_fields(self)
