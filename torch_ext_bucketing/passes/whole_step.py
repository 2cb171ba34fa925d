"""Run the passes on a trace of a whole step, made without Dynamo."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .._torch.fsdp2 import name_per_tensor
from ..fqns import canonical_fqn
from ..fsdp.tagging import gradients_of, tag_joint_graph
from .base import REGATHERS, GraphPass
from .compilation import Compilation, Extension
from .pipeline import Pipeline


def whole_step_pass(
    model: nn.Module,
    passes: Iterable[GraphPass],
    compilation: Compilation | None = None,
    extension: Extension | None = None,
    fuses: bool = False,
) -> Callable[..., fx.GraphModule]:
    """Combine ``passes`` into one, ``(graph_module, example_inputs) -> graph_module``.

    For the list of passes of torchtitan's graph trainer, in place of its bucketing: ``passes[i] =
    whole_step_pass(model, recipe(model, reference=eager_model))``.

    The graph's inputs are the parameters and buffers of ``model``, the traced module, one per name,
    and then the step's inputs. Its last outputs are the gradients of the trained parameters, in the
    same order. A ``DTensor`` is its plain tensors, the shard first. The trainer chooses what
    backward gathers again, so passes that choose it (``ReshardAfterForward``) are left out.

    Args:
        compilation: gets the report.
        extension: adds nodes to the graph, without ``compilation``. The pass adds values of new
            inputs to ``example_inputs``.
        fuses: whether Inductor compiles the graph afterwards, without ``compilation``.
    """
    pipeline = Pipeline((p for p in passes if REGATHERS not in p.provides), model)
    shared = compilation or pipeline.compilation(extension=extension, fuses=fuses)

    def torch_ext_bucketing_pass(gm: fx.GraphModule, example_inputs: Any = None) -> fx.GraphModule:
        names, trained = names_per_tensor(model)
        inputs = gm.graph.find_nodes(op="placeholder")
        (output,) = gm.graph.find_nodes(op="output")
        others = len(pytree.tree_leaves(output.args[0])) - len(trained)
        if others < 0 or len(inputs) < len(names):
            raise ValueError(
                f"this is not a step of {type(model).__name__}, whose parameters are {len(names)} "
                f"tensors, {len(trained)} of them trained: the graph has {len(inputs)} inputs "
                f"and {others + len(trained)} outputs. Give the model that was traced"
            )
        # Tensors inside of a parameter besides its shard, such as scales, have no name.
        fqns = {node: name for node, name in zip(inputs, names, strict=False) if name}
        added = run_pipeline(gm, pipeline, shared, fqns, [*(None,) * others, *trained])
        if added:
            example_inputs.extend(node.meta["val"] for node in added)
        return gm

    return torch_ext_bucketing_pass


def names_per_tensor(model: nn.Module) -> tuple[list[str | None], list[str | None]]:
    """List the parameter's name for each of its tensors: for all, and for trained parameters."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    names = [name_per_tensor(*each) for each in parameters]
    trained = [of for of, (_, p) in zip(names, parameters, strict=True) if p.requires_grad]
    return list(itertools.chain(*names)), list(itertools.chain(*trained))


def run_pipeline(
    gm: fx.GraphModule,
    pipeline: Pipeline,
    compilation: Compilation,
    fqns: dict[fx.Node, str],
    grad_fqns: Sequence[str | None],
) -> list[fx.Node]:
    """Run all passes on a graph of any part of a step, in place; return its new inputs.

    ``fqns`` names parameters by placeholder; ``grad_fqns`` names, for each flattened output, the
    parameter whose gradient it is.
    """
    # The graph of a whole step is joint and final at once, so passes of both stages run on it.
    tag_joint_graph(gm, fqns.get, grad_fqns=grad_fqns)
    pipeline.run("joint", gm, compilation)
    added = []
    if compilation.extension is not None:
        inputs = {canonical_fqn(fqn): node for node, fqn in fqns.items()}
        gradients = gradients_of(gm.graph, fqns.get, grad_fqns)
        added = compilation.extension.append(gm.graph, inputs, gradients, compilation.choice)
    pipeline.run("forward_backward", gm, compilation)
    gm.graph.lint()
    gm.recompile()
    return added
