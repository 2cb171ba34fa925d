"""Graph passes and the backends for ``torch.compile`` that run them.

    order = FSDPParamOrder.from_model(model, units=[...])
    compiled = torch.compile(
        model, backend=backend("inductor", passes=[ReshardAfterForward(), BucketUnits(order)])
    )

A pass is an object with a ``stage``, ``__call__`` and ``uuid``. It composes with any backend: the
passes know nothing of what compiles the graph afterwards.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch
import torch.fx as fx
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass

from . import _agree_op, _aot, _dynamo_inputs
from . import _torch_bucketing as tb
from ._cache_key import NoUuidError, describe, digest, hash_sources, log_no_uuid, sources_of
from ._inductor_order import pin_order
from ._process_groups import default_group
from ._source import package_digest
from .agreement import as_fresh_frame, before_first_run
from .buckets import (
    BucketingPlan,
    HasUnits,
    UncoveredParametersWarning,
    UnitIndex,
    apply_plan,
    count_collectives,
    plan_units,
)
from .caps import CapMb, Eligible, plan_by_cap
from .groups import GroupFilter
from .launches import GraphPlan, plan_of
from .overlap import DEFAULT_PREFETCH, PrefetchDepth
from .report import CompileReport, GraphReport
from .report_text import emit
from .tags import KINDS, FqnOf, Kind, TagReport, parameter_chains, tag_joint_graph, tag_of

__all__ = [
    "BucketByCap",
    "BucketUnits",
    "BucketingBackend",
    "Compilation",
    "GraphPass",
    "PassManager",
    "ReshardAfterForward",
    "Stage",
    "TagParameters",
    "backend",
    "bucket_graph",
]

Stage = Literal["joint", "forward_backward"]
GraphLike: TypeAlias = fx.GraphModule | fx.Graph


@dataclass
class Compilation:
    """What the passes of one compile share.

    Args:
        input_fqns: FQN of each graph input that is a parameter, by position.
        report: filled by the passes.
        warned: FQNs that a warning has listed already.
        reference_bytes: the peak of live bytes of the graph at hand before any pass changed it,
            where a pass asked for it.
    """

    input_fqns: FqnOf | None = None
    report: CompileReport = field(default_factory=CompileReport)
    warned: dict[str, None] = field(default_factory=dict)
    reference_bytes: int | None = None

    def warn_uncovered(self, fqns: Sequence[str]) -> None:
        """Warn about parameters that no bucket covers, about each once per compile."""
        new = [f for f in fqns if f not in self.warned]
        if new:
            self.warned.update(dict.fromkeys(new))
            text = (
                f"{len(new)} parameter(s) are in no unit; their collectives are not bucketed: "
                f"{', '.join(new)}"
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

    @abstractmethod
    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        """Run on ``graph``. ``compilation`` is None where the pass was set as a config hook."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hash_sources(cls)

    def uuid(self) -> str | None:
        """Equal for equal settings and equal source code, in any process: a cache key.

        None, which keeps Inductor's caches away, where a setting is a plain function: neither its
        name nor its address says what it does. Give it a ``uuid()`` to be cached. The reason is
        logged as a warning.

        The code is this package and the modules of the pass's own classes; what those import from
        elsewhere is not looked at.
        """
        tb.register_ops()
        name = f"{type(self).__module__}.{type(self).__qualname__}"
        try:
            settings = repr(describe(self.settings()))
            sources = sources_of(type(self))
        except NoUuidError as error:
            log_no_uuid(name, error)
            return None
        # Byte caps and costs depend on sizes of groups, and an all-reduce's is not in the graph.
        groups = repr(tb.group_sizes())
        return digest(name, package_digest(), *sources, settings, groups)

    def settings(self) -> tuple[Any, ...]:
        """What decides the pass's result: plain values, containers and dataclasses of them, and
        objects with a ``uuid()``. A subclass adds what it adds."""
        return ()


class TagParameters(GraphPass):
    """Tag every collective with the parameters that it serves (see :mod:`.tags`).

    A backend made by :func:`backend` runs it by itself. On its own it is a value for
    ``torch._inductor.config.joint_custom_post_pass``.

    Args:
        model: for graphs without descriptors, see :func:`.tags.tag_joint_graph`.
        fqn_of: see :func:`.tags.tag_joint_graph`.
    """

    stage: Stage = "joint"

    def __init__(
        self, model: torch.nn.Module | None = None, *, fqn_of: FqnOf | None = None
    ) -> None:
        self.model = model
        self.fqn_of = fqn_of
        self.last_report = TagReport()

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        fqn_of = self.fqn_of
        if fqn_of is None and compilation is not None:
            fqn_of = compilation.input_fqns
        if compilation is None and TracingContext.try_get() is not None:
            _aot.check_passes_run_here()
        if fqn_of is None:
            fqn_of = _dynamo_inputs.traced_input_fqns(_graph_of(graph))
        self.last_report = tag_joint_graph(graph, fqn_of, model=self.model)
        if compilation is not None:
            compilation.report.unnamed = tuple((u.node, u.reason) for u in self.last_report.unnamed)

    def settings(self) -> tuple[Any, ...]:
        """The names of the model's parameters, and of the inputs of the graph that is being
        compiled, which are what a tag can say. Cache keys hold no names themselves: two graphs
        that differ in nothing else would have one."""
        names = [] if self.model is None else [n for n, _ in self.model.named_parameters()]
        return (names, self.fqn_of, _dynamo_inputs.traced_fqns())


class ReshardAfterForward(GraphPass):
    """Free gathered parameters after forward and gather them again for backward.

    Marks every node between a parameter and its first use in computation as ``MUST_RECOMPUTE``, so
    that the partitioner saves the shard and puts a second gather into the backward graph::

        forward   w -> all_gather -> wait -> t -> mm            saved: w
        backward  w -> all_gather -> wait -> t -> t -> mm

    Args:
        keep: FQNs of parameters or modules that stay gathered until backward, as eager FSDP2 keeps
            its root's. A name that no parameter has keeps none.

    Raises:
        TypeError: ``keep`` is a string, or holds something else than strings.
    """

    stage: Stage = "joint"

    def __init__(self, keep: Iterable[str] = ()) -> None:
        if isinstance(keep, str):
            raise TypeError(f"keep must be a list of FQNs, got the string {keep!r}")
        self.keep = tuple(keep)
        UnitIndex([self.keep])

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        kept = UnitIndex([self.keep])
        for start, chain in parameter_chains(_graph_of(graph)).items():
            tag = tag_of(start)
            if tag is None or any(kept.unit_of(f) is not None for f in tag.fqns):
                continue
            for node in chain:
                _aot.mark_recompute(node)

    def settings(self) -> tuple[Any, ...]:
        """What is kept."""
        return (self.keep,)


class BucketUnits(GraphPass):
    """One collective per unit, kind, group and dtype.

    Args:
        order_or_plan: an object with ``units`` (an ``FSDPParamOrder``, a ``BucketPlan``), or a
            sequence of units, each a sequence of parameter or module FQNs.
        kinds: the kinds to bucket. All-reduces (HSDP, DDP) only when asked for.
        payload_order: True packs a bucket's members in ``order_or_plan``'s order; another callable
            ``start -> key`` in that one's; False leaves it to torch, graph order unless
            ``bucket_payload_order_key`` is set.

    Raises:
        TypeError: ``payload_order`` is True, but ``order_or_plan`` can't be called; or it is
            neither True, False nor a callable; or a unit's name is no string.
        ValueError: an unknown kind, or one name in two units.
    """

    stage: Stage = "forward_backward"

    def __init__(
        self,
        order_or_plan: HasUnits | Iterable[Sequence[str]],
        kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
        payload_order: bool | Callable[[fx.Node], Any] = False,
    ) -> None:
        unknown = [k for k in kinds if k not in KINDS]
        if isinstance(kinds, str) or unknown:
            raise ValueError(f"kinds must be some of {', '.join(KINDS)}, got {kinds!r}")
        if not isinstance(payload_order, bool) and not callable(payload_order):
            raise TypeError(
                f"payload_order must be True, False or a callable of a node, got {payload_order!r}"
            )
        if payload_order is True and not callable(order_or_plan):
            raise TypeError(
                f"payload_order=True needs an order that can be called with a node, got "
                f"{type(order_or_plan).__name__}; pass the order as payload_order="
            )
        units = order_or_plan.units if isinstance(order_or_plan, HasUnits) else order_or_plan
        if isinstance(units, str):
            raise TypeError(f"units must be a sequence of units, got the string {units!r}")
        self.units = tuple((u,) if isinstance(u, str) else tuple(u) for u in units)
        self.aliases = tuple(getattr(order_or_plan, "aliases", ()))
        UnitIndex(self.units, self.aliases)  # bad names are known before anything is compiled
        self.kinds = tuple(k for k in KINDS if k in kinds)
        self.last_report: GraphReport | None = None
        self.payload_key: Callable[[fx.Node], Any] | None = None
        if payload_order is True:
            self.payload_key = order_or_plan  # type: ignore[assignment]
        elif callable(payload_order):
            self.payload_key = payload_order

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        compilation = compilation or Compilation()
        g = _graph_of(graph)
        plan = plan_units(g, UnitIndex(self.units, self.aliases), self.kinds)
        self.last_report = apply_and_report(g, plan, self.payload_key)
        compilation.report.graphs.append(self.last_report)
        compilation.warn_uncovered(plan.uncovered)

    def settings(self) -> tuple[Any, ...]:
        """Units, kinds and the payload order's own identity."""
        return (self.units, self.aliases, self.kinds, self.payload_key)


class BucketByCap(GraphPass):
    """As few collectives as a byte cap allows; see :func:`.caps.plan_by_cap` for the rules.

    Args:
        cap_mb: in MiB, see :func:`.caps.plan_by_cap`; None takes torch's estimate for each group.
        kinds: the kinds to bucket.
        eligible: see :func:`.caps.plan_by_cap`.
        group_filter: see :func:`.caps.plan_by_cap`; :data:`.groups.primary_group` is one.
        max_node_span: see :func:`.caps.plan_by_cap`.
        non_adjacent: see :func:`.caps.plan_by_cap`.
        payload_order: ``start -> key`` by which a bucket's members are packed, ascending, such as
            an ``FSDPParamOrder``; None leaves it to torch, graph order unless
            ``bucket_payload_order_key`` is set.

    Raises:
        TypeError: ``payload_order`` is no callable.
        ValueError: an argument that :func:`.caps.plan_by_cap` does not take.
    """

    stage: Stage = "forward_backward"

    def __init__(
        self,
        cap_mb: CapMb = None,
        *,
        kinds: Collection[Kind] = KINDS,
        eligible: Eligible = "tag",
        group_filter: GroupFilter | None = None,
        max_node_span: int | None = None,
        non_adjacent: bool = True,
        payload_order: Callable[[fx.Node], Any] | None = None,
    ) -> None:
        if payload_order is not None and not callable(payload_order):
            raise TypeError(
                f"payload_order must be a callable of a node or None, got {payload_order!r}"
            )
        self.options: dict[str, Any] = {
            "cap_mb": dict(cap_mb) if isinstance(cap_mb, Mapping) else cap_mb,
            "kinds": kinds,
            "eligible": eligible,
            "group_filter": group_filter,
            "max_node_span": max_node_span,
            "non_adjacent": non_adjacent,
        }
        self.payload_key = payload_order
        self.last_report: GraphReport | None = None
        empty = fx.Graph()
        empty.output(())
        plan_by_cap(empty, **self.options)  # bad options are known before anything is compiled
        self.options["kinds"] = tuple(k for k in KINDS if k in kinds)

    def __call__(self, graph: GraphLike, compilation: Compilation | None = None) -> None:
        g = _graph_of(graph)
        self.last_report = apply_and_report(g, plan_by_cap(g, **self.options), self.payload_key)
        if compilation is not None:
            compilation.report.graphs.append(self.last_report)

    def settings(self) -> tuple[Any, ...]:
        """The options, and the payload order's own identity."""
        caps = self.options["cap_mb"]
        if isinstance(caps, Mapping):
            caps = sorted(caps.items(), key=repr)
        return ({**self.options, "cap_mb": caps}, self.payload_key)


def bucket_graph(
    gm: GraphLike,
    cap_mb: CapMb = None,
    *,
    payload_order: Callable[[fx.Node], Any] | None = None,
    **options: Any,
) -> GraphReport:
    """Bucket one graph by size, in place: :class:`BucketByCap` as a function.

    Args:
        gm: a forward, backward or inference graph, or a trace of a whole step. A ``GraphModule`` is
            recompiled.
        cap_mb: as in :class:`BucketByCap`.
        payload_order: as in :class:`BucketByCap`.
        options: its other arguments. Untagged graphs want ``eligible="structure"``.

    Raises:
        TypeError: an unknown option.
        ValueError: a bad option.
        Exception: what :func:`.caps.plan_by_cap` and :func:`.buckets.apply_plan` raise; then the
            graph is as it was.
    """
    by_cap = BucketByCap(cap_mb, payload_order=payload_order, **options)
    by_cap(gm)
    if isinstance(gm, fx.GraphModule):
        gm.recompile()
    assert by_cap.last_report is not None
    return by_cap.last_report


def apply_and_report(
    graph: fx.Graph, plan: BucketingPlan, payload_key: Callable[[fx.Node], Any] | None
) -> GraphReport:
    """Merge what is planned; returns the report, which is also logged."""
    stage, before = _aot.stage_of(graph), count_collectives(graph)
    buckets = apply_plan(graph, plan, payload_key)
    report = GraphReport(
        stage,
        before,
        count_collectives(graph),
        tuple(buckets),
        plan.uncovered,
        plan.left_alone,
        plan.splits,
        plan.alone,
    )
    emit(report)
    return report


class PassManager:
    """Owns the passes of a backend and their order:

    1. ``TagParameters``, first: everything else reads tags, and only the joint graph has the
       descriptors that they are made from. Added when missing.
    2. the other joint passes, in the order given: what they decide (recomputation) is carried out
       by the partitioner that follows.
    3. the forward/backward passes, in the order given, on each graph after the partitioner: what a
       bucket may hold is known only once it is known which graph a collective is in, and a bucket
       made earlier could not be split between forward and backward again.

    Raises:
        TypeError: something is no pass.
        ValueError: a pass with an unknown stage.
    """

    def __init__(
        self, passes: Iterable[GraphPass] = (), model: torch.nn.Module | None = None
    ) -> None:
        given = list(passes)
        for p in given:
            if not callable(p) or not callable(getattr(p, "uuid", None)):
                raise TypeError(f"{p!r} is no pass: it needs __call__(graph) and uuid()")
            if getattr(p, "stage", None) not in ("joint", "forward_backward"):
                raise ValueError(
                    f"{type(p).__name__}.stage must be 'joint' or 'forward_backward', "
                    f"got {getattr(p, 'stage', None)!r}"
                )
        tagging = [p for p in given if isinstance(p, TagParameters)] or [TagParameters(model)]
        rest = [p for p in given if not isinstance(p, TagParameters)]
        self.joint = (*tagging, *(p for p in rest if p.stage == "joint"))
        self.forward_backward = tuple(p for p in rest if p.stage == "forward_backward")

    def run(self, stage: Stage, graph: GraphLike, compilation: Compilation) -> None:
        """Run the passes of one stage. Those of other authors get the graph alone."""
        passes = self.joint if stage == "joint" else self.forward_backward
        for p in passes:
            if isinstance(p, GraphPass):
                p.prepare(graph, compilation)
        for p in passes:
            if isinstance(p, GraphPass):
                p(graph, compilation)
            else:
                p(graph)

    @property
    def orders(self) -> bool:
        """Whether a pass decides an order that the compiler has to keep."""
        return any(isinstance(p, GraphPass) and p.orders for p in self.forward_backward)

    def uuid(self) -> str | None:
        """Of all passes in order; None where one has none."""
        passes = (*self.joint, *self.forward_backward)
        uuids = [p.uuid() for p in passes]
        for p, uuid in zip(passes, uuids, strict=True):
            if not uuid and not isinstance(p, GraphPass):  # ours have said why themselves
                reason = NoUuidError(f"its uuid() returned {uuid!r}")
                log_no_uuid(f"{type(p).__module__}.{type(p).__qualname__}", reason)
        return digest(*map(str, uuids)) if all(uuids) else None


class BucketingBackend:
    """A backend for ``torch.compile``. Made by :func:`backend`."""

    def __init__(
        self,
        compiler: Literal["aot_eager", "inductor"] | Callable[..., Any],
        passes: Iterable[GraphPass],
        model: torch.nn.Module | None,
        prefetch: PrefetchDepth | None = None,
        agree: bool = True,
        agree_timeout: timedelta | None = None,
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
        self.prefetch = prefetch
        self.agree = agree
        self.agree_timeout = agree_timeout
        self.passes = PassManager(passes, model)
        self.reports: list[CompileReport] = []

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile ``gm``, as Dynamo asks for it."""
        compilation = Compilation(_dynamo_inputs.input_fqns(gm, example_inputs, self.model))
        self.reports.append(compilation.report)
        group = default_group()
        agrees = self.agree and group is not None and group.size() > 1
        fresh = _dynamo_inputs.is_first_compile()
        if self.compiler == "inductor":
            agreement = _Agreement(self.agree_timeout) if agrees else None
            compiled = _aot.compile_inductor(
                gm,
                example_inputs,
                joint=_InductorPass(self.passes, "joint", compilation),
                post_grad=_InductorPass(self.passes, "forward_backward", compilation, agreement),
                options=kwargs.get("options"),
                prefetch=None if self.prefetch is None else self.prefetch.compute_nodes,
            )
            return as_fresh_frame(compiled) if agrees and fresh else compiled

        def each(graph: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
            plan_after = _run_each(self.passes, graph, compilation)
            if not agrees:
                return lambda run: run
            plan = plan_after()
            return lambda run: before_first_run(run, plan, self.agree_timeout, fresh)

        return _aot.compile_aot(
            gm,
            example_inputs,
            joint=lambda graph: self.passes.run("joint", graph, compilation),
            each=each,
            compiler=None if self.compiler == "aot_eager" else self.compiler,  # type: ignore[arg-type]
        )

    def last_report(self) -> CompileReport:
        """The report of the last compile; its backward graph is added when that is compiled.

        Raises:
            RuntimeError: nothing has been compiled yet.
        """
        if not self.reports:
            raise RuntimeError("nothing has been compiled with this backend yet; run the model")
        return self.reports[-1]


@dataclass(frozen=True)
class _Agreement:
    """That ranks compare their plans, and how long they wait for each other."""

    timeout: timedelta | None


class _InductorPass(CustomGraphPass):
    """One stage of one compile as a config hook of Inductor."""

    def __init__(
        self,
        passes: PassManager,
        stage: Stage,
        compilation: Compilation,
        agreement: _Agreement | None = None,
    ) -> None:
        self._passes = passes
        self._stage = stage
        self._compilation = compilation
        self._agreement = agreement

    def __call__(self, graph: fx.Graph) -> None:
        if self._stage == "joint":
            self._passes.run("joint", graph, self._compilation)
            return
        plan_after = _run_each(self._passes, graph, self._compilation)
        if self._agreement is not None:
            _agree_op.insert(graph, plan_after(), self._agreement.timeout)
        if self._passes.orders:
            pin_order(graph)

    def uuid(self) -> str | None:
        passes = self._passes.uuid()
        fqns = repr(describe(self._compilation.input_fqns))
        agreement = repr(self._agreement)
        return None if passes is None else digest(passes, self._stage, fqns, agreement)


def _run_each(
    passes: PassManager, graph: GraphLike, compilation: Compilation
) -> Callable[[], GraphPlan]:
    """Run the forward/backward passes; returns what tells the plan of the graph after them."""
    g, done = _graph_of(graph), len(compilation.report.graphs)
    passes.run("forward_backward", graph, compilation)
    buckets = [b for report in compilation.report.graphs[done:] for b in report.buckets]
    return lambda: plan_of(g, _aot.stage_of(g), buckets)


def backend(
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
    passes: Iterable[GraphPass] = (),
    model: torch.nn.Module | None = None,
    prefetch: PrefetchDepth | None = DEFAULT_PREFETCH,
    agree: bool = True,
    agree_timeout: timedelta | None = None,
) -> BucketingBackend:
    """A backend for ``torch.compile`` that runs ``passes``.

    ``"aot_eager"`` runs the graphs as they are, after the default partitioner, which respects
    activation checkpointing and recomputes nothing else. ``"inductor"`` sets what it needs in
    Inductor's config for its own compiles only. A callable gets every forward, backward and
    inference graph, after the passes, as ``compiler(gm, example_inputs)``.

    Args:
        compiler: what compiles the graphs.
        passes: see :class:`PassManager` for the order in which they run.
        model: the module that FQNs are relative to; None takes the compiled one. Name it where
            submodules are compiled one by one.
        prefetch: for ``"inductor"`` with torch's overlap scheduling enabled; None leaves the depth
            to torch.
        agree: before a graph's first collective runs for the first time, the ranks of each of its
            process groups compare their plans (:mod:`.agreement`). Nothing is done where there is
            no process group, or one with a single rank.
        agree_timeout: how long a rank waits for the others then, their compile times included;
            None takes the time limit of each process group.

    Raises:
        TypeError: something in ``passes`` is no pass; ``agree_timeout`` is no ``timedelta``.
        ValueError: an unknown ``compiler``; ``agree_timeout`` is not positive.

    What is compiled raises, on every rank:
        PlanMismatchError: the ranks have different plans.
        RankMissingError: a rank did not come to compare them in time.
    """
    return BucketingBackend(compiler, passes, model, prefetch, agree, agree_timeout)


def _graph_of(graph: GraphLike) -> fx.Graph:
    return graph.graph if isinstance(graph, fx.GraphModule) else graph
