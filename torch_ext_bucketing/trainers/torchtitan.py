"""Run the passes of ``recipe(model)`` in torchtitan's graph trainer (0.3.0).

Without us the trainer calls one graph for each microbatch, clips, and takes the optimizers' steps::

    graph of a microbatch -> p.grad         clip_grad_norm_         optimizers.step()

Here the last microbatch has a graph of its own. What comes after it finds no gradients::

    microbatches but the last: graph -> p.grad
    the last one:              graph -> gradients (+ p.grad) -> norm -> updates

Importing this module adds ``"torch_ext_bucketing"`` to torchtitan's pass pipelines; a config
selects it by ``config.compile.pass_pipeline``. Our passes replace torchtitan's bucketing pass; the
rest of its list stays, in its order. Its ``memory_policy`` chooses what backward gathers again.
With ``ep_overlap``, torchtitan still cuts experts' tokens in chunks, and our order of the step
replaces its fixed one.

torchtitan runs a pipeline's stage as several graphs. Those that gather the stage's parameters and
reduce its gradients get eager FSDP2's buckets::

    unshard    shards -> gathers in buckets -> parameters       once per step, if they fit
    forward, backward    of each microbatch, without collectives of parameters
    reduce     sums of gradients -> reductions in buckets -> gradients of shards, once per step

torchtitan's schedules free a stage's parameters when other stages come next. But forward saves
views of them for backward, which keep the storage alive. Here they are really freed. Under a memory
bound (``pass_pipeline(memory=PeakMemory(gib=70))``) they are freed, and gathered again, if the
bytes of all stages of the rank require it. ``trainer.pp_schedule.graph_provider.reports`` has one
report per stage of the rank: its collectives, and its peak over the schedule.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.experiments.graph_trainer.passes import (
    apply_graph_passes,
    construct_default_graph_passes,
)
from torchtitan.experiments.graph_trainer.registry import (
    register_pass_pipeline,
    register_post_init_hook,
)

from .._torch.optimizers import actions_of, replace_actions
from ..errors import BoundNotKeptWarning, EagerOptimizerWarning
from ..passes.base import GraphPass
from ..passes.pipeline import Pipeline, names_per_tensor, run_pipeline, whole_step_pass
from ..planner.keep.stages import StageBytes, bytes_of, stage_reports, views_of, with_residency
from ..planner.schedule.policy import PeakMemory
from ..planner.step_memory import check_bound, state_bytes
from ..recipes import recipe
from ..reports.base import sizes_text
from ..reports.compile import CompileReport, StageReport
from ..runtime.agreement import agree_on_launches
from ..runtime.launches import launches_of
from ..step.norm import Norm
from ..step.rules import no_rule, rule_of
from ..step.update import Epilogue

PIPELINE = "torch_ext_bucketing"
"""Name of the pass pipeline without options."""
REPLACED = "joint_transformer_block_bucketing_reordering_pass"
"""torchtitan's pass in whose place ours run."""

_log = logging.getLogger("torch_ext_bucketing")

GraphFunction = Callable[..., fx.GraphModule]


def check_trainer(trainer: Any) -> bool:
    """Return whether a trainer's optimizers can be in the graph; warn if not."""
    if trainer.parallel_dims.pp_enabled:
        raise ValueError(
            "pass_pipeline(optimizer=True) needs the whole step in one graph, and pipeline "
            "parallelism has several: leave optimizer=True out"
        )
    if "cudagraph_pass" not in trainer.config.compile.disable_passes:
        raise ValueError(
            "pass_pipeline(optimizer=True) reads learning rates on the host before every step, "
            "which a CUDA graph would not: add 'cudagraph_pass' to config.compile.disable_passes"
        )
    steps = trainer.optimizers
    unknown = [type(o).__name__ for o in steps if rule_of(o) is None]
    if type(steps).step is not OptimizersContainer.step:
        unknown.append(type(steps).__name__)
    if unknown:
        after = "torchtitan clips and updates after the graph"
        warnings.warn(no_rule(", ".join(unknown), after), EagerOptimizerWarning, stacklevel=2)
    return not unknown


class StepInGraph:
    """The graphs of a trainer's step, in the place of its graph of a microbatch."""

    def __init__(self, trainer: Any, traced: Any) -> None:
        self.trainer, self.traced = trainer, traced
        self.model = trainer.model_parts[0]
        self.microbatches = trainer.gradient_accumulation_steps
        trained = [p for _, p in self.model.named_parameters(remove_duplicate=False)]
        gradients = sum(p.requires_grad for p in trained)
        self.layouts = traced.output_subclass_layouts
        other_outputs = traced.num_flat_outputs - gradients
        self.other_layouts = {i: layout for i, layout in self.layouts.items() if i < other_outputs}
        # A tensor subclass among the other outputs is several plain tensors in the graph.
        tensors = sum(layout.num_tensors - 1 for layout in self.other_layouts.values())
        self.others, self.gradients = other_outputs + tensors, gradients
        norm = Norm(float(trainer.config.training.max_norm))
        self.epilogue = Epilogue(self.model, list(trainer.optimizers), norm)
        if self.microbatches > 1:
            updated = (fqn for fqn, p in self.epilogue.trained.items() if p.parameter.requires_grad)
            self.epilogue.accumulated = frozenset(updated)
        self._taken = 0
        self._copy: tuple[fx.GraphModule, list[Any]] | None = None
        self._log_norm()

    def passes(
        self, passes: Sequence[GraphPass], after: Sequence[GraphFunction], fuses: bool
    ) -> list[Any]:
        """Return graph passes in the place of ours and of the passes ``after`` it."""

        def copy_for_microbatches_pass(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
            if self.microbatches > 1:
                self._copy = copy.deepcopy(gm), list(inputs)
            return gm

        def step_pass(gm: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
            if self._copy is not None:
                config = self.trainer.config.compile
                listed = [whole_step_pass(self.model, passes, fuses=fuses), *after]
                self._accumulate = apply_graph_passes(*self._copy, listed, compile_config=config)
                self._copy = None
            self._update = gm.forward
            gm.forward = self._run
            return gm

        with_updates = whole_step_pass(self.model, passes, extension=self.epilogue, fuses=fuses)
        return [copy_for_microbatches_pass, with_updates, *after, step_pass]

    def _run(self, *inputs: Any) -> Any:
        self._taken += 1
        if self._taken < self.microbatches:
            self.traced.output_subclass_layouts = self.layouts
            return self._accumulate(*inputs)
        self._taken = 0
        # The trainer waits before its step, which comes too late.
        self.trainer.checkpointer.maybe_wait_for_staging()
        outputs = self._update(*inputs, *self.epilogue.values())
        self.epilogue.finish()
        self.traced.output_subclass_layouts = self.other_layouts
        return *outputs[: self.others], *(None,) * self.gradients

    def _log_norm(self) -> None:
        """Log the graph's norm: the trainer finds no gradients, and logs 0."""
        metrics = self.trainer.metrics_processor
        log = metrics.log

        def log_metrics(step: int, mean: float, most: float, norm: float, **extra: Any) -> None:
            total = self.epilogue.total_norm
            log(step, mean, most, norm if total is None else total.item(), **extra)

        metrics.log = log_metrics


_ORDERED_ALREADY = "ep_overlap_schedule_pass"
_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Trainers by the ``id`` of their configs: a pipeline gets a config, a pass needs the model."""
_with_step: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers whose graphs clip and update."""


def pass_pipeline(memory: PeakMemory | None = None, *, optimizer: bool = False) -> str:
    """Register a pass pipeline in torchtitan; return its name for ``compile.pass_pipeline``.

    Args:
        memory: with pipeline parallelism, a bound in GiB on a rank's memory in a step; see
            :func:`.recipe`. None: every stage's parameters are gathered once per step.
        optimizer: clip and update in the graph, with torchtitan's optimizers and ``max_norm`` as
            configured. If no graph can update with one of the optimizers,
            a warning names it, and torchtitan clips and updates. Not with ``memory``, pipeline
            stages or CUDA graphs.
    """
    if memory is not None and memory.gib is None:
        raise ValueError(f"the bound of a pipeline's stages is in GiB, got {memory!r}")
    options = [repr(memory)] if memory is not None else []
    name = ", ".join([PIPELINE, *options, *(["optimizer"] if optimizer else [])])

    def started(trainer: Any) -> None:
        if optimizer and check_trainer(trainer):
            _with_step.add(trainer)
        if trainer.parallel_dims.pp_enabled:
            room = None
            if memory is not None:
                # The rest of the bound, after shards, gradients and optimizer state.
                parts = nn.ModuleList(trainer.model_parts)
                state = sum(state_bytes(parts, optimizer) for optimizer in trainer.optimizers)
                room = check_bound(parts, memory, state)
            trainer.pp_schedule.graph_provider = BucketedStages(trainer.pp_schedule, room)
        elif memory is not None:
            raise ValueError(
                f"{memory!r} bounds the stages of a pipeline; without pipeline parallelism use "
                "config.compile.memory_policy"
            )
        _trainers[id(trainer.config)] = trainer

    register_post_init_hook(name)(started)
    register_pass_pipeline(name)(graph_passes)
    return name


def graph_passes(
    traced: Any, config: Any, *, parallel_dims: Any = None
) -> list[Callable[..., Any]]:
    """Return torchtitan's default graph passes for a traced step, with ours for its bucketing."""
    trainer = _trainers.get(id(config))
    parts: list[Any] = getattr(trainer, "model_parts", [])
    if len(parts) != 1:
        raise ValueError(
            f"{PIPELINE!r} needs one started trainer with this config and one model part, found "
            f"{len(parts)} parts: set config.compile.pass_pipeline before the trainer is built"
        )
    listed = construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
    names = [getattr(p, "func", p).__name__ for p in listed]
    if REPLACED not in names:
        raise ValueError(
            f"torchtitan's passes have no {REPLACED} to replace, because precompile_artifact_dir "
            f"names an artifact or for another reason: {', '.join(names)}"
        )
    place = names.index(REPLACED)
    after = [p for p in listed[place + 1 :] if getattr(p, "func", p).__name__ != _ORDERED_ALREADY]
    passes, fuses = recipe(parts[0]), config.compile.inductor_compilation == "full"
    if trainer in _with_step:
        return [*listed[:place], *StepInGraph(trainer, traced).passes(passes, after, fuses)]
    return [*listed[:place], whole_step_pass(parts[0], passes, fuses=fuses), *after]


class BucketedStages:
    """Makes stage graphs in the place of torchtitan's ``GraphPPStageGraphsProvider``.

    ``room`` bounds the bytes of the rank's stages beside shards, gradients and optimizer state.
    """

    def __init__(self, runtime: Any, room: int | None) -> None:
        self.room = room
        self.inner = runtime.graph_provider
        config = self.inner.compile_config
        if config.inductor_compilation != "regional":
            raise ValueError(
                f"{PIPELINE!r} with pipeline parallelism needs config.compile."
                f"inductor_compilation = 'regional', got {config.inductor_compilation!r}"
            )
        off = [*config.disable_passes, REPLACED]
        self.inner.compile_config = dataclasses.replace(config, disable_passes=off)
        self.reports: list[StageReport] = []

    def prepare_graphs(self, schedule: Any, ctx: Any, *, loss_kwargs: dict[str, Any]) -> Any:
        """Make the stages' graphs, as torchtitan's method does."""
        new = {s.stage_index: s for s in schedule._stages if s.graphs is None}
        overlapped = self.inner.prepare_graphs(schedule, ctx, loss_kwargs=loss_kwargs)
        if new:
            self._bucket(schedule, new)
        stages = {stage.stage_index: stage for stage in schedule._stages}
        return {
            (f, b): _ReleasedPair(pair, stages[f].graphs, stages[b].graphs)
            for (f, b), pair in overlapped.items()
        }

    def _bucket(self, schedule: Any, stages: dict[int, Any]) -> None:
        """Merge the collectives of each stage, and place gathers and releases under the bound."""
        compiled = {i: _bucket(stage) for i, stage in stages.items()}
        nbytes = {i: _bytes_of(stage.graphs) for i, stage in stages.items()}
        actions = actions_of(schedule)
        planned = with_residency(actions, nbytes, self.room)
        replace_actions(schedule, planned)
        for i, stage in stages.items():
            if stage.graphs.modules.unshard is not None:
                # All ranks of a stage place its gathers alike, so they compare the plan, too.
                graph, buckets = stage.graphs.modules.unshard.graph, compiled[i].buckets
                agree_on_launches(launches_of(graph, f"stage {i}", buckets, repr(planned)))
                stage.graphs = _Released(stage.graphs, stage.state)
        self.reports = stage_reports(actions_of(schedule), compiled, nbytes)
        for report in self.reports:
            _log.info("%s", report.to_text().rstrip())
        peak = self.reports[0].rank_peak_bytes
        if self.room is not None and peak > self.room:
            reached, bound = sizes_text(peak, self.room)
            warnings.warn(
                f"the stages of this rank peak at {reached}, and the bound leaves {bound} beside "
                "shards, gradients and optimizer state, although every action gathers parameters "
                "anew: use more stages or ranks, smaller microbatches or a schedule with fewer of "
                "them in flight",
                BoundNotKeptWarning,
                stacklevel=2,
            )


@dataclass(frozen=True)
class _View:
    """The layout of a view of a gathered parameter; ``offset`` is in bytes."""

    parameter: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, values: list[Any]) -> torch.Tensor:
        parameter = values[self.parameter]
        first = parameter.storage_offset() * parameter.itemsize + self.offset
        return torch.empty(0, dtype=self.dtype, device=parameter.device).set_(
            parameter.untyped_storage(), first // self.dtype.itemsize, self.size, self.stride
        )


class _Released:
    """A stage's graphs (``GraphPPStageGraphs``) that keep no gathered parameter alive between them.

    ::

        forward -> saved values, views of parameters         torchtitan's
        forward -> saved values, layouts of the views        here: backward makes views again, of
                                                             the parameters gathered then
    """

    def __init__(self, inner: Any, state: Any) -> None:
        self.inner, self.state = inner, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def _gathered(self) -> list[Any]:
        if not self.state.unsharded_param_values:
            values = self.inner.unshard_params(self.state.flat_param_values)
            self.state.unsharded_param_values = values
        return self.state.unsharded_param_values

    def let_go(self, saved: Sequence[Any]) -> tuple[Any, ...]:
        """Replace views of gathered parameters in ``saved`` by their layouts."""
        tensors = {i: v for i, v in enumerate(self._gathered()) if isinstance(v, torch.Tensor)}
        by_storage = {v.untyped_storage().data_ptr(): i for i, v in tensors.items() if v.numel()}

        def place(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.numel():
                return value
            i = by_storage.get(value.untyped_storage().data_ptr())
            if i is None:
                return value
            base = tensors[i]
            offset = value.storage_offset() * value.itemsize - base.storage_offset() * base.itemsize
            return _View(i, offset, value.dtype, tuple(value.shape), value.stride())

        return tuple(map(place, saved))

    def again(self, saved: Sequence[Any]) -> tuple[Any, ...]:
        """Reverse :meth:`let_go` for the parameters gathered now."""
        return tuple(v.of(self._gathered()) if isinstance(v, _View) else v for v in saved)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, saved = self.inner.forward(*args, **kwargs)
        return output, self.let_go(saved)

    def full_backward(self, output: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
        return self.inner.full_backward(output, self.again(saved), *args, **kwargs)

    def backward_input(self, output: Any, saved: Any, *args: Any, **kwargs: Any) -> Any:
        grads, released = self.inner.backward_input(output, self.again(saved), *args, **kwargs)
        return grads, self.let_go(released)

    def backward_weight(self, saved: Any) -> Any:
        return self.inner.backward_weight(self.again(saved))


@dataclass(frozen=True)
class _ReleasedPair:
    """The graph of a forward and a backward that overlap (``GraphPPOverlapGraphs``)."""

    inner: Any
    forward: Any
    backward: Any

    def forward_backward(self, **kwargs: Any) -> Any:
        if isinstance(self.backward, _Released):
            name = "backward_saved_values_for_backward"
            kwargs[name] = self.backward.again(kwargs[name])
        *gradients, output, saved = self.inner.forward_backward(**kwargs)
        if isinstance(self.forward, _Released):
            saved = self.forward.let_go(saved)
        return *gradients, output, saved


def _bucket(stage: Any) -> CompileReport:
    """Run the passes on the graphs of ``stage`` that gather and reduce, in place."""
    model, modules, meta = stage.submod, stage.graphs.modules, stage.graphs.meta
    names, trained = names_per_tensor(model)
    pipeline = Pipeline(recipe(model, units=_units(model)), model)
    compilation = pipeline.compilation()
    if modules.unshard is not None:
        graph = modules.unshard.graph
        inputs = graph.find_nodes(op="placeholder")
        gathered = [names[i] for i in meta.unshard_flat_param_indices]
        output = _undescribed_output(graph)
        # torchtitan counts one value per tensor that parameters are made of. A mesh that no other
        # tensor is made with is not an input of any graph, and has no value.
        values = (*output.args[0], *(None,) * (meta.num_flat_param_values - len(gathered)))
        output.args = (values,)
        fqns = {node: name for node, name in zip(inputs, gathered, strict=True) if name}
        run_pipeline(modules.unshard, pipeline, compilation, fqns, [None] * len(values))
    if modules.reduce_grad is not None:
        _undescribed_output(modules.reduce_grad.graph)
        run_pipeline(modules.reduce_grad, pipeline, compilation, {}, trained)
    return compilation.report


def _bytes_of(graphs: Any) -> StageBytes:
    """Return the bytes that a stage's graphs allocate and hold."""
    modules, meta = graphs.modules, graphs.meta
    gathered, unshard = bytes_of(modules.unshard.graph) if modules.unshard else (0, 0)
    saved, forward = bytes_of(modules.fw.graph, meta.num_user_outputs)
    gradients, backward = bytes_of(modules.full_bw.graph)
    running = {"UNSHARD": unshard - gathered, "F": forward - saved, "B": backward, "W": backward}
    parameters = modules.fw.graph.find_nodes(op="placeholder")[: meta.num_fw_unsharded_param_inputs]
    views = views_of(modules.fw.graph, parameters)[meta.num_user_outputs :]
    saved_names = meta.partition.saved_for_backward_names
    names = {n for n, is_view in zip(saved_names, views, strict=False) if is_view}
    reads = set("FBIW" if names else "F")
    if modules.bw_di is not None and modules.bw_dw is not None:
        running |= {"I": bytes_of(modules.bw_di.graph)[1], "W": bytes_of(modules.bw_dw.graph)[1]}
        inputs = modules.bw_di.graph.find_nodes(op="placeholder")
        named = zip(inputs, meta.partition.bwd_input_names, strict=True)
        read = [n for n, name in named if name in names]
        if not any(views_of(modules.bw_di.graph, read)[meta.num_input_grad_values :]):
            reads.discard("W")
    if modules.reduce_grad is not None:
        running["REDUCE_GRAD"] = bytes_of(modules.reduce_grad.graph)[1]
    return StageBytes(gathered, saved, gradients, running, frozenset(reads))


def _undescribed_output(graph: fx.Graph) -> fx.Node:
    """Return the output node, without the descriptors of a cut graph, which are all None."""
    (output,) = graph.find_nodes(op="output")
    output.meta.pop("desc", None)
    return output


def _units(part: nn.Module) -> list[tuple[str, ...]]:
    """Return a stage's units of eager FSDP2, as torchtitan wraps its decoders."""
    has = dict(part.named_children())
    layers = [(f"layers.{name}",) for name, _ in has["layers"].named_children()]
    last = tuple(name for name in ("norm", "lm_head") if has.get(name) is not None)
    first = [("tok_embeddings",)] if has.get("tok_embeddings") is not None else []
    return [*first, *layers, *([last] if last else [])]


pass_pipeline()
