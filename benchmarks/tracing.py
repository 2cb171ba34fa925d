"""Trace a sharded model to its forward and backward graphs, by AOTAutograd.

::

    model -> joint graph -> tags -> default partitioner -> forward, backward
                              `---> gathers marked for recomputation -> default partitioner -> ...

The joint graph has Inductor's decompositions and is the one that ``torch.compile`` makes, but for
the order of its inputs. Dynamo is left out: it would only inline the modules' Python code.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.fx as fx
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torch_ext_bucketing as teb
from torch_ext_bucketing.fsdp.tagging import FqnOf
from torch_ext_bucketing.passes.base import Compilation

Phase = Literal["forward", "backward"]


Say = Callable[[str], None]
"""Is told of every stage."""


def trace_model(
    build: Callable[[], nn.Module],
    shape: tuple[int, int],
    say: Say,
    ways: Mapping[Any, Sequence[teb.GraphPass]] | None = None,
) -> dict[tuple[Phase, Any], fx.GraphModule]:
    """Trace the model that ``build`` makes under the fake mode; return graphs by phase and name.

    The model has no weights and gets token ids of one shape. The tensors are fake CPU tensors: the
    autograd engine can't go backward over fake CUDA tensors on a machine without a GPU. The loader
    chooses the device that they claim. ``ways`` are passes for the tagged joint graph, by the name
    of the resulting graphs; ``None``: whether backward gathers the parameters again.
    """
    from torch._functorch.aot_autograd import (
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
    )
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[tuple[Phase, Any], fx.GraphModule] = {}
    partition = partitioner(graphs, say, lambda _: None, ways)
    say("build")
    mode = FakeTensorMode(shape_env=ShapeEnv())  # which makes symbols of sizes that depend on data
    with contextlib.ExitStack() as stack:
        with mode:
            model = build()
            tokens = torch.zeros(shape, dtype=torch.int64)
            joint = aot_export_joint_with_descriptors(
                stack,
                model,
                (tokens,),
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
        aot_compile_joint_with_descriptors(joint, partition_fn=partition)
    return graphs


def partitioner(
    graphs: dict[tuple[Phase, Any], fx.GraphModule],
    say: Say,
    fqn_of: FqnOf,
    ways: Mapping[Any, Sequence[teb.GraphPass]] | None = None,
) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """Return the default partitioner, run on the tagged joint graph once for each of ``ways``."""
    from torch._functorch.partitioners import default_partition

    wanted = ways or {True: [teb.ReshardAfterForward()], False: []}

    def partition(
        joint: fx.GraphModule, inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        say("tag")
        teb.hooks.TagParameters(fqn_of=fqn_of)(joint, Compilation())
        for way, passes in wanted.items():
            say(f"partition, {way}" if ways else "partition")
            last = way == list(wanted)[-1]
            graph = joint if last else fx.GraphModule(joint, copy_graph(joint.graph))
            for one in passes:
                one(graph)
            forward, backward = default_partition(graph, inputs, **kwargs)
            for one in passes:
                one.finish(forward.graph, Compilation())
            graphs["forward", way] = forward
            graphs["backward", way] = backward
        return forward, backward

    return partition


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copy a graph; the copy shares metadata's values."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
