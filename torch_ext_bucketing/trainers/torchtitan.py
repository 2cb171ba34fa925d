"""Run the passes of ``recipe(model)`` in torchtitan's graph trainer (0.3.0).

Importing this module adds ``"torch_ext_bucketing"`` to torchtitan's pass pipelines; a config
selects it by ``config.compile.pass_pipeline``. Our passes replace torchtitan's bucketing pass; the
rest of its list stays, in its order. Its ``memory_policy`` chooses what backward gathers again.
With ``ep_overlap``, torchtitan still cuts experts' tokens in chunks, and our order of the step
replaces its fixed one. :mod:`.torchtitan_pipeline` has the stages of a pipeline.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
from torchtitan.experiments.graph_trainer.registry import (
    register_pass_pipeline,
    register_post_init_hook,
)

from ..passes.whole_step import whole_step_pass
from ..planner.schedule.memory import PeakMemory
from ..planner.step_memory import check_bound, state_bytes
from ..recipes import recipe
from .torchtitan_pipeline import PIPELINE, REPLACED, BucketedStages
from .torchtitan_step import StepInGraph, check_trainer

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
            configured (:mod:`.torchtitan_step`). If no graph can update with one of the optimizers,
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
    at = names.index(REPLACED)
    after = [p for p in listed[at + 1 :] if getattr(p, "func", p).__name__ != _ORDERED_ALREADY]
    passes, fuses = recipe(parts[0]), config.compile.inductor_compilation == "full"
    if trainer in _with_step:
        return [*listed[:at], *StepInGraph(trainer, traced).passes(passes, after, fuses)]
    return [*listed[:at], whole_step_pass(parts[0], passes, fuses=fuses), *after]


pass_pipeline()
