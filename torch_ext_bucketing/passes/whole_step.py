"""The passes on a trace of a whole step, for trainers that trace without Dynamo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .._torch.sharded import name_per_tensor
from ..fsdp.tag_graph import tag_joint_graph
from .base import GraphPass
from .compilation import Compilation
from .facts import Regathers, last_fact
from .pipeline import Pipeline


def whole_step_pass(
    model: nn.Module, passes: Iterable[GraphPass], compilation: Compilation | None = None
) -> Callable[..., fx.GraphModule]:
    """One pass, ``(graph_module, example_inputs) -> graph_module``, that runs ``passes``;
    ``compilation`` gets its report.

    For torchtitan's graph trainer, in the place of its bucketing pass, whose pipeline is a list:
    ``passes[i] = whole_step_pass(model, recipe(model, reference=eager_model))``.

    The graph is a function of the parameters and then the buffers of ``model``, the one that was
    traced, by name and shared ones once per name, and of the step's inputs; it returns the
    gradients of the parameters that require one, in the same order, behind other values. A
    ``DTensor`` stands for the plain tensors that it is made of, its shard first. What is gathered
    again in backward stays so: that is decided by the trainer, and passes that decide it
    (``ReshardAfterForward``) are left out.

    The pass raises a ``ValueError``, and leaves the graph as it was, where that has fewer inputs
    than the model has parameters, or fewer results than it has parameters to train.
    """
    pipeline = Pipeline((p for p in passes if last_fact(p.provides, Regathers) is None), model)
    shared = compilation or pipeline.compilation()

    def torch_ext_bucketing_pass(gm: fx.GraphModule, example_inputs: Any = None) -> fx.GraphModule:
        names, trained = names_per_tensor(model)
        inputs = gm.graph.find_nodes(op="placeholder")
        (output,) = gm.graph.find_nodes(op="output")
        others = len(pytree.tree_leaves(output.args[0])) - len(trained)
        if others < 0 or len(inputs) < len(names):
            raise ValueError(
                f"this is no step of {type(model).__name__}, whose parameters are {len(names)} "
                f"tensors, {len(trained)} of them to train: the graph has {len(inputs)} inputs "
                f"and {others + len(trained)} results. Give the model that was traced"
            )
        fqns = {node: name for node, name in zip(inputs, names, strict=False) if name}
        run_passes(gm, pipeline, shared, fqns, [*(None,) * others, *trained])
        return gm

    return torch_ext_bucketing_pass


def names_per_tensor(model: nn.Module) -> tuple[list[str | None], list[str | None]]:
    """The parameter's name for each tensor that one is made of; of all, and of those to train."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    names = [name_per_tensor(*each) for each in parameters]
    trained = [of for of, (_, p) in zip(names, parameters, strict=True) if p.requires_grad]
    return list(itertools.chain(*names)), list(itertools.chain(*trained))


def run_passes(
    gm: fx.GraphModule,
    pipeline: Pipeline,
    compilation: Compilation,
    fqns: dict[fx.Node, str],
    grad_fqns: Sequence[str | None],
) -> None:
    """Run all passes on one graph of any part of a step, in place. ``fqns`` names the placeholders
    that are parameters, ``grad_fqns`` whose gradient each flattened output is."""
    tag_joint_graph(gm, fqns.get, grad_fqns=grad_fqns)
    for stage in ("joint", "forward_backward"):
        pipeline.run(stage, gm, compilation)  # type: ignore[arg-type]
    gm.graph.lint()
    gm.recompile()
