"""The base class of passes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch.fx as fx

from .._source import note_sources
from .._torch.inductor import CustomGraphPass
from ..errors import NoUuidError
from ..graph.nodes import GraphLike, graph_of
from .facts import Baseline, Fact

if TYPE_CHECKING:
    from ..reports.compile import CompileReport
    from .compilation import Compilation

Stage = Literal["joint", "forward_backward"]


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
    requires: ClassVar[tuple[type[Fact], ...]] = ()
    """Facts that must hold before the pass runs."""
    conflicts_with: ClassVar[tuple[type[Fact], ...]] = ()
    """Facts that the pass may invalidate: passes that provide them come later in a list."""

    @property
    def provides(self) -> tuple[Fact, ...]:
        """Facts that hold after the pass."""
        return ()

    @property
    def parts(self) -> tuple[GraphPass, ...]:
        """Passes that this pass runs itself. A part that is switched off provides no facts."""
        return ()

    def expanded(self) -> tuple[GraphPass, ...]:
        """Return the passes that a pipeline runs in this one's place."""
        return (self,)

    def _set(self, **values: Any) -> None:
        """Set fields from ``__post_init__``."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The name of the class, in reports and in ``TORCH_EXT_BUCKETING_DISABLE``."""
        return type(self).__name__

    def with_part(self, other: GraphPass) -> GraphPass | None:
        """Return this pass with ``other`` among its :attr:`parts`; None where it can't be one.

        For two passes that conflict in either order.
        """
        return None

    def install(self) -> None:
        """Prepare the model before it is traced. Called when a backend is made."""

    @abstractmethod
    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        """Run on a graph of the pass's stage, in place."""

    def finish(self, graph: GraphLike, compilation: Compilation) -> None:
        """Complete the work of a joint pass on each graph after the partitioner.

        Called before the passes of that stage run.
        """

    def wrap(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """Wrap the compiled function, to observe its calls."""
        return compiled

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> CompileReport:
        """Run this pass alone on one graph, in place, and recompile a ``GraphModule``.

        Without ``compilation``, start one, and warn as :func:`.backend` does.
        """
        from .._torch.inductor import is_inductor_compiling, uses_cuda_graphs
        from .compilation import Compilation
        from .diagnostics import warn_of_silence

        alone = compilation is None
        if compilation is None:
            fuses = is_inductor_compiling()
            compilation = Compilation(fuses=fuses, captured=fuses and uses_cuda_graphs())
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
        """Return the pass's cache key, the same in every process for equal settings and code.

        The code is this package and the modules that define the pass's classes, without what they
        import from elsewhere. None bypasses Inductor's caches. That happens where a setting is a
        plain function, whose name does not identify its code; give it a ``uuid()`` of its own. The
        reason is logged as a warning.
        """
        from .cache_key import key_of

        return key_of(type(self), self.settings)

    def settings(self) -> tuple[Any, ...]:
        """Return what decides the pass's result: by default its fields.

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
