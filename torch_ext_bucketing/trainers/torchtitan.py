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
replaces its fixed one. :mod:`.torchtitan_pipeline` has the stages of a pipeline.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

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

from ..errors import EagerOptimizerWarning
from ..passes.base import GraphPass
from ..passes.pipeline import whole_step_pass
from ..planner.schedule.policy import PeakMemory
from ..planner.step_memory import check_bound, state_bytes
from ..recipes import recipe
from ..step.norm import Norm
from ..step.rules import no_rule, rule_of
from ..step.update import Epilogue
from .torchtitan_pipeline import PIPELINE, REPLACED, BucketedStages

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


pass_pipeline()
