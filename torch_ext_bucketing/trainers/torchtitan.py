"""torchtitan's graph trainer (0.3.0), with the passes of ``recipe(model)`` in the place of its
bucketing.

Importing this module adds ``"torch_ext_bucketing"`` to torchtitan's pass pipelines; a config
chooses it::

    import torch_ext_bucketing.trainers.torchtitan
    from torchtitan.experiments.graph_trainer.llama3 import config_registry

    def llama3_8b():
        config = config_registry.graph_trainer_llama3_8b()
        config.compile.pass_pipeline = "torch_ext_bucketing"
        return config

The rest of torchtitan's list stays, in its order; what is gathered again in backward is the choice
of its ``memory_policy``. With ``ep_overlap`` torchtitan's chunks of experts' tokens stay, too, and
our order of the step stands in the place of its fixed one.

With pipeline parallelism torchtitan runs a stage as several graphs. Those that gather the stage's
parameters and reduce its gradients run once per step each, and have eager FSDP2's buckets::

    unshard    shards -> gathers in buckets -> parameters       kept for all microbatches
    forward, backward    of each microbatch, without collectives of parameters
    reduce     sums of gradients -> reductions in buckets -> gradients of shards

torchtitan's own bucketing, on the graph that these are cut from, leaves gathers and reductions in
the graphs of each microbatch. ``trainer.pp_schedule.graph_provider.reports`` has a report of each
stage of the rank: its collectives, and what it holds at most in the course of the schedule.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch.fx as fx
import torch.nn as nn
from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
from torchtitan.experiments.graph_trainer.registry import (
    register_pass_pipeline,
    register_post_init_hook,
)

from .._torch.pipelines import actions_of
from .._torch.sharded import name_per_tensor
from ..passes.pipeline import Pipeline
from ..passes.whole_step import run_passes, whole_step_pass
from ..recipes import recipe
from ..reports.compile import CompileReport
from ..reports.stage import StageReport
from ..scheduling.stages import StageBytes, bytes_of, stage_reports

_PIPELINE = "torch_ext_bucketing"
_REPLACED = "joint_transformer_block_bucketing_reordering_pass"
_ORDERED_ALREADY = "ep_overlap_schedule_pass"
_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By the ``id`` of their configs: a pipeline gets a config, and a pass needs the model."""

log = logging.getLogger("torch_ext_bucketing")


@register_post_init_hook(_PIPELINE)
def _started(trainer: Any) -> None:
    if trainer.parallel_dims.pp_enabled:
        trainer.pp_schedule.graph_provider = _BucketedStages(trainer.pp_schedule)
    _trainers[id(trainer.config)] = trainer


@register_pass_pipeline(_PIPELINE)
def graph_passes(
    traced: Any, config: Any, *, parallel_dims: Any = None
) -> list[Callable[..., Any]]:
    """torchtitan's default list of graph passes, ours in the place of its bucketing.

    Args:
        traced: torchtitan's trace of a step.
        config: of the trainer that traced it.
        parallel_dims: torchtitan's.

    Raises:
        ValueError: no trainer has started with this config, or torchtitan's list has no bucketing.
    """
    parts: list[Any] = getattr(_trainers.get(id(config)), "model_parts", [])
    if len(parts) != 1:
        raise ValueError(
            f"{_PIPELINE!r} needs one trainer that has started with this config, of one model "
            f"part, and found {len(parts)} parts: set config.compile.pass_pipeline before the "
            "trainer is built"
        )
    listed = construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
    names = [getattr(p, "func", p).__name__ for p in listed]
    if _REPLACED not in names:
        raise ValueError(
            f"torchtitan's passes have no {_REPLACED} to replace, as where precompile_artifact_dir "
            f"names an artifact that they ran for: {', '.join(names)}"
        )
    listed[names.index(_REPLACED)] = whole_step_pass(parts[0], recipe(parts[0]))
    return [p for p, name in zip(listed, names, strict=True) if name != _ORDERED_ALREADY]


class _BucketedStages:
    """torchtitan's maker of the graphs of a pipeline's stages (``GraphPPStageGraphsProvider``),
    with our passes on those that gather and reduce.

    Raises:
        ValueError: they would be compiled by Inductor as a whole before the passes run.
    """

    def __init__(self, runtime: Any) -> None:
        self.theirs = runtime.graph_provider
        config = self.theirs.compile_config
        if config.inductor_compilation != "regional":
            raise ValueError(
                f"{_PIPELINE!r} with pipeline parallelism needs config.compile."
                f"inductor_compilation = 'regional', got {config.inductor_compilation!r}"
            )
        off = [*config.disable_passes, _REPLACED]
        self.theirs.compile_config = dataclasses.replace(config, disable_passes=off)
        self.reports: list[StageReport] = []

    def prepare_graphs(self, schedule: Any, ctx: Any, *, loss_kwargs: dict[str, Any]) -> Any:
        """As torchtitan's."""
        new = [stage for stage in schedule._stages if stage.graphs is None]
        overlapped = self.theirs.prepare_graphs(schedule, ctx, loss_kwargs=loss_kwargs)
        compiled = {stage.stage_index: _bucket(stage) for stage in new}
        if compiled:
            nbytes = {stage.stage_index: _bytes_of(stage.graphs) for stage in new}
            self.reports = stage_reports(actions_of(schedule), compiled, nbytes)
        for report in self.reports if compiled else ():
            log.info("%s", report.to_text().rstrip())
        return overlapped


def _bucket(stage: Any) -> CompileReport:
    """Run the passes on the graphs of ``stage`` that gather and reduce, in place."""
    model, modules, meta = stage.submod, stage.graphs.modules, stage.graphs.meta
    parameters = list(model.named_parameters(remove_duplicate=False))
    names = [name for each in parameters for name in name_per_tensor(*each)]
    trained = [n for each in parameters if each[1].requires_grad for n in name_per_tensor(*each)]
    pipeline = Pipeline(recipe(model, units=_units(model)), model)
    compilation = pipeline.compilation()
    if modules.unshard is not None:
        graph = modules.unshard.graph
        inputs = graph.find_nodes(op="placeholder")
        gathered = [names[i] for i in meta.unshard_flat_param_indices]
        output = _undescribed_output(graph)
        # One value per tensor that parameters are made of, as torchtitan counts them. A mesh that
        # no other tensor is made with is an input of no graph, and had none.
        values = (*output.args[0], *(None,) * (meta.num_flat_param_values - len(gathered)))
        output.args = (values,)
        fqns = {node: name for node, name in zip(inputs, gathered, strict=True) if name}
        run_passes(modules.unshard, pipeline, compilation, fqns, [None] * len(values), model)
    if modules.reduce_grad is not None:
        _undescribed_output(modules.reduce_grad.graph)
        run_passes(modules.reduce_grad, pipeline, compilation, {}, trained, model)
    return compilation.report


def _bytes_of(graphs: Any) -> StageBytes:
    """What a stage's graphs make and hold."""
    modules = graphs.modules
    gathered, unshard = bytes_of(modules.unshard.graph) if modules.unshard else (0, 0)
    saved, forward = bytes_of(modules.fw.graph, graphs.meta.num_user_outputs)
    gradients, backward = bytes_of(modules.full_bw.graph)
    running = {"UNSHARD": unshard - gathered, "F": forward - saved, "B": backward, "W": backward}
    if modules.bw_di is not None and modules.bw_dw is not None:
        running |= {"I": bytes_of(modules.bw_di.graph)[1], "W": bytes_of(modules.bw_dw.graph)[1]}
    if modules.reduce_grad is not None:
        running["REDUCE_GRAD"] = bytes_of(modules.reduce_grad.graph)[1]
    return StageBytes(gathered, saved, gradients, running)


def _undescribed_output(graph: fx.Graph) -> fx.Node:
    """The output, without the descriptors of a cut graph, which are all None."""
    (output,) = graph.find_nodes(op="output")
    output.meta.pop("desc", None)
    return output


def _units(part: nn.Module) -> list[tuple[str, ...]]:
    """The units of eager FSDP2 that a stage has, as torchtitan's decoders are wrapped."""
    has = dict(part.named_children())
    layers = [(f"layers.{name}",) for name, _ in has["layers"].named_children()]
    last = tuple(name for name in ("norm", "lm_head") if has.get(name) is not None)
    first = [("tok_embeddings",)] if has.get("tok_embeddings") is not None else []
    return [*first, *layers, *([last] if last else [])]
