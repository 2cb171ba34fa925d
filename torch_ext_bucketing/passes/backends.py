"""Compile with graph passes: backends for ``torch.compile``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
import torch.fx as fx

from .._source import package_digest
from .._torch import caches as _caches
from .._torch import dynamo as _dynamo
from .._torch import paused_gc, with_room_for_frames
from .._torch.aot import Wrap, compile_aot, copies_in_partitioner, stage_of
from .._torch.inductor import (
    CustomGraphPass,
    compile_inductor,
    sort_topologically,
    uses_cuda_graphs,
)
from .._torch.process_groups import compiles_for_all_ranks, default_group
from .._torch.without_device import Planned, results_alone
from ..errors import GuessedNamesWarning, NoUuidError, check_argument, check_count
from ..fqns import format_names
from ..fsdp.gather import CALLS
from ..fsdp.tagging import gradients_of, named_inputs
from ..graph.sizes import GivenHints, SizeHints, check_size_hints
from ..reports.compile import CompileReport
from ..runtime import agreement
from ..runtime.agreement import as_fresh_frame, before_first_run
from ..runtime.launches import GraphLaunches, launches_of
from .base import ORDER, PARKED, Compilation, Extension, GraphPass, Stage
from .cache_key import code_of_fields, describe, digest, log_no_uuid
from .pin import pin_order
from .pipeline import Pipeline
from .recompute_check import RecomputeCheck

log = logging.getLogger("torch_ext_bucketing")

# Hides gathers of 5 to 7 ms under the products of about three transformer layers (AutoParallel PR
# 481: 20 ms off a step of 385 ms of LLaMA-3 8B on 128 H100). torch's 200 lets gathered parameters
# pile up.
_PREFETCH = 50


@dataclass(eq=False, repr=False)
class BucketingBackend:
    """A backend for ``torch.compile``; :func:`backend` makes it, and has the arguments.

    ``reports`` has one report per compile, ``pipeline`` the passes in the order they run.
    """

    only_plans: ClassVar[bool] = False
    """Whether graphs are planned and not compiled; empty tensors are their results."""
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor"
    passes: Iterable[GraphPass] = ()
    model: torch.nn.Module | None = None
    prefetch: int | None = _PREFETCH
    agree: bool = True
    agree_timeout: timedelta | None = None
    size_hints: GivenHints = None
    check_recompute: bool = False
    pipeline: Pipeline = field(init=False)
    reports: list[CompileReport] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        compiler, timeout, prefetch = self.compiler, self.agree_timeout, self.prefetch
        if not callable(compiler) and compiler not in ("aot_eager", "inductor"):
            raise ValueError(
                f"backend must be 'aot_eager', 'inductor' or a callable, got {compiler!r}"
            )
        check_argument("agree_timeout", timeout, timedelta | None)
        if timeout is not None and timeout <= timedelta():
            raise ValueError(f"agree_timeout must be positive, got {timeout}")
        if prefetch is not None:
            check_count("prefetch", prefetch)
        check_argument("check_recompute", self.check_recompute, bool)
        check_size_hints(self.size_hints)
        check_argument("model", self.model, torch.nn.Module | None)
        check_argument("agree", self.agree, bool)
        check_argument("passes", self.passes, Iterable)
        self.passes = tuple(self.passes)
        self.pipeline = Pipeline(self.passes, self.model)

    @property
    def orders(self) -> bool:
        """Whether a pass plans the order of the nodes, and so the peak of memory."""
        return any(ORDER in p.provides for p in self.pipeline.ahead)

    @with_room_for_frames
    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile the graph of a frame, for Dynamo."""
        fqns, guessed = _dynamo.input_fqns(gm, example_inputs, self.model, self.passes)
        compilation = self.pipeline.compilation(
            input_fqns=fqns,
            activations=_dynamo.activation_inputs(gm),
            frame=_dynamo.frame_number(),
            size_hints=self.size_hints,
            model=self.model,
            extension=self._extension(),
            fuses=self.compiler == "inductor",
            captured=self.compiler == "inductor"
            and uses_cuda_graphs(kwargs.get("options"), kwargs.get("mode")),
        )
        self.reports.append(compilation.report)
        if guessed:
            compilation.warn(
                f"{len(guessed)} sharded parameter(s) of the compiled code have no name, or one "
                f"that is a guess: {format_names(guessed)}. They are not in the model that the "
                "passes or the backend were made for, so units may be planned wrong. Make the "
                "recipe for the model that is compiled, or give it to the backend: "
                "backend(..., model=model)",
                GuessedNamesWarning,
            )
        _dynamo.forget_tensors_when_compiled(gm)
        group = default_group()
        agrees = self.agree and group is not None and group.size() > 1
        is_fresh = agrees and _dynamo.is_first_compile()
        work = _Compile(self, compilation, agrees, _caches.meshes_in(example_inputs))
        run = work.by_inductor if self.compiler == "inductor" else work.by_aot
        parks = any(PARKED in p.provides for p in self.pipeline.joint)
        with paused_gc(), copies_in_partitioner(parks):
            compiled = run(gm, example_inputs, **kwargs)
        if is_fresh:
            compiled = as_fresh_frame(compiled)
        # Joint passes wrap outermost: a step's peak is measured over the whole call.
        for p in (*self.pipeline.forward_backward, *self.pipeline.joint):
            compiled = p.wrap(compiled, compilation)
        return compiled

    def _extension(self) -> Extension | None:
        """Return the extension of the graphs of a new compile, if any."""
        return None

    def __repr__(self) -> str:
        """Return the code that makes the backend, without arguments that have their defaults."""
        return code_of_fields(self, "backend")

    def last_report(self) -> CompileReport:
        """Return the report of the last compile.

        The backward graph is added when it is compiled. A graph from Inductor's caches, or from
        ``torch.compiler.load_cache_artifacts``, has the report of the compile that filled them.
        Before any compile this is a ``RuntimeError``.
        """
        if not self.reports:
            raise RuntimeError("nothing has been compiled with this backend yet; run the model")
        return self.reports[-1]


@dataclass(eq=False)
class _Compile:
    """The work on the graphs of one compile, whichever compiler gets the graphs."""

    backend: BucketingBackend
    compilation: Compilation
    agrees: bool = False  # whether ranks compare their launches
    meshes: Sequence[Any] = ()  # of the inputs

    def __post_init__(self) -> None:
        self.check = RecomputeCheck() if self.backend.check_recompute else None
        numbers = SizeHints.of(self.backend.size_hints)
        only_plans = self.backend.only_plans
        self._stand_in = functools.partial(results_alone, number=numbers) if only_plans else None

    def joint(self, graph: fx.Graph) -> None:
        """Run the passes on the joint graph."""
        self.backend.pipeline.run("joint", graph, self.compilation)
        if self.check:
            self.check.name(graph)

    def after(self, graph: fx.Graph) -> GraphLaunches:
        """Run the passes on a graph after the partitioner; return its launches."""
        pipeline, compilation = self.backend.pipeline, self.compilation
        reports = pipeline.run("forward_backward", graph, compilation)
        buckets = (bucket for report in reports for bucket in report.buckets)
        return launches_of(graph, stage_of(graph), buckets, pipeline.planned_with(compilation))

    def extend(self, gm: fx.GraphModule) -> tuple[list[Any], Wrap]:
        """Extend a graph; return fake tensors for new inputs, and a wrapper that adds values."""
        extension, fqns, graph = self.compilation.extension, self.compilation.input_fqns, gm.graph
        if extension is None:
            return [], lambda compiled: compiled
        gradients = gradients_of(graph, fqns) if stage_of(graph) == "backward" else []
        choice = self.compilation.choice
        inputs = extension.append(graph, named_inputs(graph, fqns), gradients, choice)
        if not inputs:
            return [], lambda compiled: compiled

        def wrap(compiled: Callable[..., Any]) -> Callable[..., Any]:
            def run(args: list[Any]) -> Any:
                args.extend(extension.values())
                return compiled(args)

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        return [node.meta["val"] for node in inputs], wrap

    def by_inductor(self, gm: fx.GraphModule, inputs: Sequence[Any], **keywords: Any) -> Any:
        """Compile by Inductor, with the passes in its config."""
        return compile_inductor(
            gm,
            inputs,
            joint=_InductorPass(self, "joint"),
            post_grad=_InductorPass(self, "forward_backward"),
            options=keywords.get("options"),
            mode=keywords.get("mode"),
            cacheable={f"{f.__module__}.{f.__name__}": package_digest() for f in CALLS},
            prefetch=self.backend.prefetch,
            holds=not self.backend.orders,
            meshes=self.meshes,
            extend=self.extend if self.compilation.extension else None,
            check=self.check.wrap if self.check else None,
            stand_in=self._stand_in,
        )

    def by_aot(self, gm: fx.GraphModule, inputs: Sequence[Any], **_: Any) -> Any:
        """Compile by AOTAutograd, and each graph by the backend's callable, if it has one."""

        def per_graph(graph: fx.GraphModule) -> Wrap:
            launches = self.after(graph.graph)
            if self.check:
                self.check.keep(graph.graph, graph)

            def wrap(run: Callable[..., Any]) -> Callable[..., Any]:
                run = self.check.wrap(run) if self.check else run
                timeout = self.backend.agree_timeout
                return before_first_run(run, launches, timeout) if self.agrees else run

            return wrap

        compiler: Any = None if self.backend.compiler == "aot_eager" else self.backend.compiler
        if (stand_in := self._stand_in) is not None:
            compiler = lambda graph, inputs: stand_in(graph.graph)  # noqa: E731
        joint = lambda gm: self.joint(gm.graph)  # noqa: E731
        return compile_aot(
            gm, inputs, joint=joint, extend=self.extend, per_graph=per_graph, compiler=compiler
        )


class _InductorPass(CustomGraphPass):
    """One stage of one compile, as a custom pass in Inductor's config."""

    def __init__(self, work: _Compile, stage: Stage) -> None:
        self._work = work
        self._stage = stage
        self._made: CompileReport | None = None

    def __call__(self, graph: fx.Graph) -> None:
        work, backend = self._work, self._work.backend
        if self._stage == "joint":
            # Inductor's patterns leave fused attention where it stands before its inputs.
            sort_topologically(graph)
            work.joint(graph)
            return
        report = work.compilation.report
        done = len(report.graphs), len(report.schedules), len(report.estimates)
        launches = work.after(graph)
        self._made = report.since(*done)
        _warn_of_group_names(launches)
        if work.agrees:
            agreement.insert(graph, launches, backend.agree_timeout)
        if work.check:
            work.check.keep(graph, graph.owning_module)
        if backend.only_plans:
            raise Planned(graph)
        if backend.orders:
            pin_order(graph)  # last, since wrapping hides a node's operator

    def graph_compiled(self) -> CompileReport | None:
        """Return the report that caches store with the graph."""
        return self._made

    def graph_ready(self, cached: CompileReport | None) -> None:
        """Add the report of a graph that was loaded from a cache."""
        report, self._made = self._made, None
        if report is None and cached is not None:
            self._work.compilation.report.add_cached(cached)

    def uuid(self) -> str | None:
        work, backend = self._work, self._work.backend
        _caches.forget_mesh_hashes(work.meshes)  # Inductor calls this before it makes a key
        # A loaded graph has nothing to check, and no plan.
        passes = None if work.check or backend.only_plans else backend.pipeline.uuid()
        fqns = repr(describe(work.compilation.input_fqns))
        agreement = repr((work.agrees, backend.agree_timeout))
        try:
            hints = repr(describe(work.compilation.size_hints))
        except NoUuidError as error:
            log_no_uuid("size_hints", error)
            return None
        return None if passes is None else digest(passes, self._stage, fqns, agreement, hints)


def _warn_of_group_names(launches: GraphLaunches) -> None:
    """Warn if a graph that is compiled for all ranks names a process group."""
    # Group names are part of the traced graph and of the settings of passes, so of cache keys.
    named = [g.group for g in launches.groups if g.group != default_group().group_name]
    if named and compiles_for_all_ranks():
        log.warning(
            "the %s graph is compiled for all ranks, but names process groups that only their "
            "own ranks have: %s. Other ranks miss the cache and compile their own graph. A group "
            "from a DeviceMesh is looked up at run time instead",
            launches.stage,
            ", ".join(named),
        )


def backend(
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
    passes: Iterable[GraphPass] = (),
    model: torch.nn.Module | None = None,
    prefetch: int | None = _PREFETCH,
    agree: bool = True,
    agree_timeout: timedelta | None = None,
    size_hints: GivenHints = None,
    check_recompute: bool = False,
) -> BucketingBackend:
    """Return a backend for ``torch.compile`` that runs graph passes before a compiler.

    Args:
        compiler: ``"inductor"``, ``"aot_eager"``, or a callable ``compiler(gm, example_inputs)``
            that gets each forward, backward and inference graph. ``"aot_eager"`` runs graphs as
            they are, after the default partitioner: it recomputes what activation checkpointing
            marks and nothing else. ``"inductor"`` changes Inductor's config for its compiles only.
        passes: see :class:`.Pipeline` for their order.
        model: the module that FQNs are relative to. None takes the model that a recipe made the
            passes for, else the module that the latest order or plan with the parameter was made
            from, else the compiled one. A :class:`.GuessedNamesWarning` names sharded parameters
            whose FQNs are not sure.
        prefetch: with ``"inductor"`` and torch's overlap scheduling: how many compute nodes (matrix
            products, attention) ahead of its use a gather may start
            (``aten_distributed_optimizations.max_compute_pre_fetch``). None keeps torch's 200.
        agree: compare the launches of the ranks of each process group before a graph's first
            collective runs for the first time (:mod:`.runtime.agreement`).
        agree_timeout: how long a rank waits for the others in that comparison, their compile times
            included; None: the time limit of each process group.
        size_hints: numbers that estimates of time and memory take for sizes that depend on data,
            such as the tokens of an expert: one for all, or a callable of the symbol (a sympy
            expression such as ``u0``) with equal results on every rank. None: torch's hint
            (``mark_unbacked``), else 8192; at most the size's upper bound. A callable without a
            ``uuid()`` bypasses Inductor's caches.
        check_recompute: compare each value that backward recomputes with forward's in the first
            step, and raise a :class:`.RecomputeError` that names the first one with other bits.
            That step runs without the compiler's kernels, takes a few times as long as an eager
            one, and Inductor's caches are not used; later steps are as without the check.

    Raises:
        TypeError, ValueError: wrong arguments; passes that conflict (:class:`.PassOrderError`).

    A compiled function raises ``PlanMismatchError`` on every rank if ranks launch different
    collectives, and ``RankMissingError`` if a rank did not join the comparison in time.
    """
    return BucketingBackend(
        compiler, passes, model, prefetch, agree, agree_timeout, size_hints, check_recompute
    )
