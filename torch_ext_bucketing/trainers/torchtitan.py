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
of its ``memory_policy``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes
from torchtitan.experiments.graph_trainer.registry import (
    register_pass_pipeline,
    register_post_init_hook,
)

from ..passes.whole_step import whole_step_pass
from ..recipes import recipe

_PIPELINE = "torch_ext_bucketing"
_REPLACED = "joint_transformer_block_bucketing_reordering_pass"
_trainers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""By the ``id`` of their configs: a pipeline gets a config, and a pass needs the model."""


@register_post_init_hook(_PIPELINE)
def _started(trainer: Any) -> None:
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
        ValueError: no trainer has started with this config, it has several model parts, or
            torchtitan's list has no bucketing.
    """
    parts: list[Any] = getattr(_trainers.get(id(config)), "model_parts", [])
    if len(parts) != 1:
        raise ValueError(
            f"{_PIPELINE!r} needs one trainer that has started with this config, of one model "
            f"part, and found {len(parts)} parts: set config.compile.pass_pipeline before the "
            "trainer is built, and no pipeline parallelism"
        )
    listed = construct_default_graph_passes(traced, config, parallel_dims=parallel_dims)
    names = [getattr(p, "func", p).__name__ for p in listed]
    if _REPLACED not in names:
        raise ValueError(
            f"torchtitan's passes have no {_REPLACED} to replace, as where precompile_artifact_dir "
            f"names an artifact that they ran for: {', '.join(names)}"
        )
    listed[names.index(_REPLACED)] = whole_step_pass(parts[0], recipe(parts[0]))
    return listed
