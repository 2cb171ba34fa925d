"""Graph passes and the backends for ``torch.compile`` that run them.

    order = FSDPParamOrder.from_model(model, units=[...])
    compiled = torch.compile(
        model, backend=backend("inductor", passes=[ReshardAfterForward(), BucketUnits(order)])
    )

A pass composes with any backend: it knows nothing of what compiles the graph afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.fx as fx

from .._source import package_digest
from .._torch import aot as _aot
from .._torch import caches as _caches
from .._torch import dynamo_inputs as _dynamo_inputs
from .._torch.inductor import CustomGraphPass, compile_inductor
from .._torch.process_groups import compiles_for_all_ranks, default_group
from ..agreement import op as _agree_op
from ..agreement.before_run import as_fresh_frame, before_first_run
from ..agreement.launches import GraphLaunches, launches_of
from ..fsdp.simple_fsdp import attach
from ..graph.size_hints import GivenHints, check_size_hints
from ..graph.unwrap import GraphLike, graph_of
from ..reports.compile import CompileReport
from .base import GraphPass, Stage
from .cache_key import NoUuidError, describe, digest, log_no_uuid
from .code import code_of
from .compilation import Compilation
from .facts import Order, last_fact
from .pin_order import pin_order
from .pipeline import Pipeline

log = logging.getLogger("torch_ext_bucketing")

_PREFETCH = 50


class BucketingBackend:
    """A backend for ``torch.compile`` that runs ``passes``, in the order that :class:`.Pipeline`
    tells.

    ``"aot_eager"`` runs the graphs as they are, after the default partitioner, which respects
    activation checkpointing and recomputes nothing else. ``"inductor"`` sets what it needs in
    Inductor's config for its own compiles only. A callable gets every forward, backward and
    inference graph, after the passes, as ``compiler(gm, example_inputs)``.

    Args:
        model: the module that FQNs are relative to. None takes the one that the latest order or
            plan with the parameter was made from, whatever part of it is compiled, and without any
            the compiled one.
        prefetch: for ``"inductor"`` with torch's overlap scheduling enabled: compute nodes (matrix
            products, attention) that a gather may be launched ahead of its use,
            ``aten_distributed_optimizations.max_compute_pre_fetch``. 50 hides gathers of 5 to 7 ms
            under the products of about three transformer layers (AutoParallel PR 481: 20 ms off a
            step of 385 ms of LLaMA-3 8B on 128 H100). None leaves it to torch, whose 200 lets
            gathered parameters pile up.
        agree: before a graph's first collective runs for the first time, the ranks of each of its
            process groups compare what they launch (:mod:`.agreement.exchange`). Nothing is done
            where there is no other rank.
        agree_timeout: how long a rank waits for the others then, their compile times included; None
            takes the time limit of each process group.
        size_hints: for estimates of time and memory, what sizes that depend on data are taken as,
            such as the tokens of an expert: a number for each of their symbols, or a callable of
            the symbol (a sympy expression such as ``u0``) that returns one, the same on every rank.
            None: the hint that torch was given (``mark_unbacked``), else 8192; never more than the
            size can be. The schedule's report says what was taken. A callable without a ``uuid()``
            keeps Inductor's caches away.

    Raises:
        TypeError: something in ``passes`` is no pass; ``agree_timeout`` is no ``timedelta``;
            ``size_hints`` is no whole number and no callable.
        ValueError: an unknown ``compiler``; passes in an order in which one undoes another's work,
            or two that decide the same; ``agree_timeout`` is not positive; ``prefetch`` or
            ``size_hints`` is negative.

    What is compiled raises, on every rank, a ``PlanMismatchError`` where ranks launch different
    collectives, and a ``RankMissingError`` where one did not come to compare them in time.
    """

    def __init__(
        self,
        compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
        passes: Iterable[GraphPass] = (),
        model: torch.nn.Module | None = None,
        prefetch: int | None = _PREFETCH,
        agree: bool = True,
        agree_timeout: timedelta | None = None,
        size_hints: GivenHints = None,
    ) -> None:
        if not callable(compiler) and compiler not in ("aot_eager", "inductor"):
            raise ValueError(
                f"backend must be 'aot_eager', 'inductor' or a callable, got {compiler!r}"
            )
        self.compiler = compiler
        self.model = model
        if agree_timeout is not None and not isinstance(agree_timeout, timedelta):
            raise TypeError(f"agree_timeout must be a datetime.timedelta, got {agree_timeout!r}")
        if agree_timeout is not None and agree_timeout <= timedelta():
            raise ValueError(f"agree_timeout must be positive, got {agree_timeout}")
        if prefetch is not None and (type(prefetch) is not int or prefetch < 0):
            raise ValueError(
                f"prefetch must be a whole number of at least 0, or None, got {prefetch!r}"
            )
        check_size_hints(size_hints)
        self.size_hints = size_hints
        self.prefetch = prefetch
        self.agree = agree
        self.agree_timeout = agree_timeout
        self.passes = Pipeline(passes, model)
        self.reports: list[CompileReport] = []

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile ``gm``, as Dynamo asks for it."""
        compilation = self.passes.compilation(
            input_fqns=_dynamo_inputs.input_fqns(gm, example_inputs, self.model),
            activations=_dynamo_inputs.activation_inputs(gm),
            frame=_dynamo_inputs.frame_number(),
            size_hints=self.size_hints,
            model=self.model,
        )
        self.reports.append(compilation.report)
        group = default_group()
        agrees = self.agree and group is not None and group.size() > 1
        is_fresh = agrees and _dynamo_inputs.is_first_compile()
        if self.compiler == "inductor":
            meshes = _caches.meshes_in(example_inputs)
            compiled = compile_inductor(
                gm,
                example_inputs,
                joint=_InductorPass(self, "joint", compilation, meshes),
                post_grad=_InductorPass(self, "forward_backward", compilation, meshes, agrees),
                options=kwargs.get("options"),
                mode=kwargs.get("mode"),
                cacheable={f"{attach.__module__}.{attach.__name__}": package_digest()},
                prefetch=self.prefetch,
                meshes=meshes,
            )
        else:
            compiled = self._compile_aot(gm, example_inputs, compilation, agrees)
        if is_fresh:
            compiled = as_fresh_frame(compiled)
        for p in (*self.passes.forward_backward, *self.passes.joint):
            compiled = p.wrap(compiled, compilation)
        return compiled

    def _compile_aot(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compilation: Compilation,
        agrees: bool,
    ) -> Callable[..., Any]:
        def each(graph: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            launches_after = _run_each(self.passes, graph, compilation)
            if not agrees:
                return lambda run: run
            launches = launches_after()
            return lambda run: before_first_run(run, launches, self.agree_timeout)

        return _aot.compile_aot(
            gm,
            example_inputs,
            joint=lambda graph: self.passes.run("joint", graph, compilation),
            each=each,
            compiler=None if self.compiler == "aot_eager" else self.compiler,  # type: ignore[arg-type]
        )

    def __repr__(self) -> str:
        defaults = {"model": None, "prefetch": _PREFETCH, "agree": True}
        options = {name: getattr(self, name) for name in (*defaults, "agree_timeout", "size_hints")}
        parts = [code_of(self.compiler), code_of(self.passes.given)]
        parts += [f"{k}={code_of(v)}" for k, v in options.items() if v != defaults.get(k)]
        return f"backend({', '.join(parts)})"

    def last_report(self) -> CompileReport:
        """The report of the last compile; its backward graph is added when that is compiled. A
        graph from one of Inductor's caches, or from ``torch.compiler.load_cache_artifacts``, has
        the report of the compile that made it, marked as such. Before any it is a
        ``RuntimeError``."""
        if not self.reports:
            raise RuntimeError("nothing has been compiled with this backend yet; run the model")
        return self.reports[-1]


class _InductorPass(CustomGraphPass):
    """One stage of one compile as a config hook of Inductor; ``agrees`` says whether ranks compare
    what its graphs launch."""

    def __init__(
        self,
        backend: BucketingBackend,
        stage: Stage,
        compilation: Compilation,
        meshes: Sequence[Any],
        agrees: bool = False,
    ) -> None:
        self._passes = backend.passes
        self._timeout = backend.agree_timeout
        self._stage = stage
        self._compilation = compilation
        self._meshes = meshes
        self._agrees = agrees
        self._made: CompileReport | None = None

    def __call__(self, graph: fx.Graph) -> None:
        if self._stage == "joint":
            self._passes.run("joint", graph, self._compilation)
            return
        report = self._compilation.report
        graphs, schedules = len(report.graphs), len(report.schedules)
        launches_after = _run_each(self._passes, graph, self._compilation)
        self._made = report.since(graphs, schedules)
        launches = launches_after()
        _say_whose_groups(launches)
        if self._agrees:
            _agree_op.insert(graph, launches, self._timeout)
        if last_fact(self._passes.ahead, Order) is not None:
            pin_order(graph)

    def graph_compiled(self) -> CompileReport | None:
        """What caches keep with a graph that was compiled."""
        return self._made

    def graph_ready(self, kept: CompileReport | None) -> None:
        """Add the report of a graph that was not compiled now, but loaded."""
        made, self._made = self._made, None
        if made is None and kept is not None:
            self._compilation.report.add_cached(kept)

    def uuid(self) -> str | None:
        _caches.forget_mesh_hashes(self._meshes)  # torch asks before it makes a key
        passes = self._passes.uuid()
        fqns = repr(describe(self._compilation.input_fqns))
        agreement = repr((self._agrees, self._timeout))
        try:
            hints = repr(describe(self._compilation.size_hints))
        except NoUuidError as error:
            log_no_uuid("size_hints", error)
            return None
        return None if passes is None else digest(passes, self._stage, fqns, agreement, hints)


def _say_whose_groups(launches: GraphLaunches) -> None:
    """Say which groups a graph names although it is compiled for all ranks. Such names are in what
    keys are made of, the traced graph and the settings of passes."""
    named = [of.group for of in launches.groups if of.group != default_group().group_name]
    if named and compiles_for_all_ranks():
        log.warning(
            "the %s graph is compiled for all ranks and names process groups that only their own "
            "ranks have: %s. The others find it in no cache and compile their own. A group that "
            "comes of a DeviceMesh is asked for at run time",
            launches.stage,
            ", ".join(named),
        )


def _run_each(
    passes: Pipeline, graph: GraphLike, compilation: Compilation
) -> Callable[[], GraphLaunches]:
    """Run the forward/backward passes; returns what tells the graph's launches after them."""
    g, done = graph_of(graph), len(compilation.report.graphs)
    passes.run("forward_backward", graph, compilation)
    buckets = [b for report in compilation.report.graphs[done:] for b in report.buckets]
    planned_with = passes.planned_with(compilation)
    return lambda: launches_of(g, _aot.stage_of(g), buckets, planned_with)


backend = BucketingBackend
"""What makes a backend; the class has the name for annotations."""
