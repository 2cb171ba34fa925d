"""From a sharded model to its forward and backward graphs, by AOTAutograd.

::

    model -> joint graph -> tags -> default partitioner -> forward, backward
                              `---> gathers marked for recomputation -> default partitioner -> ...

The joint graph has Inductor's decompositions and is the one that ``torch.compile`` makes, but for
the order of its inputs. Dynamo is left out: it would only inline the modules' Python code.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TextIO

import torch
import torch.fx as fx
import torch.nn as nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_ext_bucketing.fsdp.tag_graph import FqnOf
from torch_ext_bucketing.passes.base import Compilation, GraphPass
from torch_ext_bucketing.passes.tagging import TagParameters
from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward

__all__ = ["Phase", "Progress", "partitioner", "trace_model"]

Phase = Literal["forward", "backward"]


class Progress:
    """What is being traced, on standard error: one line that is rewritten on a terminal, a plain
    line per quarter of a stage elsewhere.

    Args:
        title: of the line.
        layers: number of steps of a stage.
        stream: where to write; standard error by default. ``quiet`` writes nothing.
    """

    _WIDTH = 24

    def __init__(
        self, title: str, layers: int, *, stream: TextIO | None = None, quiet: bool = False
    ) -> None:
        self._title = title
        self._layers = layers
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._start = time.monotonic()
        self._stage = ""
        self._done = 0

    def stage(self, name: str) -> None:
        """Begin a stage, at no layer."""
        self._stage, self._done = name, 0
        self._say()

    def layer(self) -> None:
        """One more layer of this stage is done."""
        self._done += 1
        quarter = max(1, self._layers // 4)
        if self._terminal or self._done % quarter == 0 or self._done == self._layers:
            self._say()

    def end(self) -> None:
        """Leave an empty line to whoever prints next."""
        if self._terminal and not self._quiet:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _say(self) -> None:
        if self._quiet:
            return
        text = f"{self._title}  {self._stage:<20}"
        if self._done:
            filled = self._WIDTH * min(self._done, self._layers) // self._layers
            bar = "#" * filled + "." * (self._WIDTH - filled)
            text += f"  [{bar}] {self._done}/{self._layers} layers"
        text += f"  {time.monotonic() - self._start:.0f} s"
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._stream.flush()


def trace_model(
    build: Callable[[], nn.Module],
    shape: tuple[int, int],
    progress: Progress,
    ways: Mapping[Any, Sequence[GraphPass]] | None = None,
) -> dict[tuple[Phase, Any], fx.GraphModule]:
    """Trace a model without weights.

    The tensors are fake CPU tensors: the autograd engine can't go backward over fake CUDA tensors
    on a machine without a GPU. Which device they are said to be on is up to whoever loads them.

    Args:
        build: makes the sharded model, whose blocks are in ``model.layers``. Called under the fake
            mode.
        shape: of the token ids, the model's only input.
        progress: told of every stage and layer.
        ways: passes for the tagged joint graph, by the name of the graphs that come of it. None:
            whether the backward graph gathers the parameters again.

    Returns:
        The graphs by phase and name.
    """
    from torch._functorch.aot_autograd import (
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
    )
    from torch._inductor.decomposition import select_decomp_table

    graphs: dict[tuple[Phase, Any], fx.GraphModule] = {}
    partition = partitioner(graphs, progress, lambda _: None, ways)
    progress.stage("build")
    mode = FakeTensorMode(shape_env=ShapeEnv())  # which makes symbols of sizes that depend on data
    with contextlib.ExitStack() as stack:
        with mode:
            model = build()
            tokens = torch.zeros(shape, dtype=torch.int64)
            _report_layers(model, progress)
            joint = aot_export_joint_with_descriptors(
                stack,
                model,
                (tokens,),
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
        aot_compile_joint_with_descriptors(joint, partition_fn=partition)
    progress.end()
    return graphs


def partitioner(
    graphs: dict[tuple[Phase, Any], fx.GraphModule],
    progress: Progress,
    fqn_of: FqnOf,
    ways: Mapping[Any, Sequence[GraphPass]] | None = None,
) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
    """The default partitioner, on the tagged joint graph, once for each of ``ways``.

    Args:
        graphs: gets the graphs by phase and name.
        progress: told of every stage.
        fqn_of: as of :func:`.tag_joint_graph`.
        ways: as of :func:`trace_model`.
    """
    from torch._functorch.partitioners import default_partition

    wanted = ways or {True: [ReshardAfterForward()], False: []}

    def partition(
        joint: fx.GraphModule, inputs: Any, **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        progress.stage("tag")
        TagParameters(fqn_of=fqn_of)(joint, Compilation())
        for way, passes in wanted.items():
            progress.stage(f"partition, {way}" if ways else "partition")
            last = way == list(wanted)[-1]
            graph = joint if last else fx.GraphModule(joint, _copy(joint.graph))
            for one in passes:
                one(graph)
            forward, backward = default_partition(graph, inputs, **kwargs)
            for one in passes:
                one.finish(forward, Compilation())
            graphs["forward", way] = forward
            graphs["backward", way] = backward
        return forward, backward

    return partition


def _copy(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        nodes[node] = copy.node_copy(node, lambda n: nodes[n])
    return copy


def _report_layers(model: nn.Module, progress: Progress) -> None:
    """AOTAutograd runs the model to learn of its outputs, more than once where there are tensor
    subclasses, and at last to trace forward and backward."""
    forwards = 0
    layers: Sequence[nn.Module] = list(model.layers)  # type: ignore[arg-type]

    def before_model(*_: Any) -> None:
        nonlocal forwards
        forwards += 1
        progress.stage(f"forward, run {forwards}")

    def after_layer(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        progress.layer()
        if output.requires_grad:
            output.register_hook(lambda _grad: progress.layer())

    def after_model(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _grad: progress.stage("backward"))

    model.register_forward_pre_hook(before_model)
    model.register_forward_hook(after_model)
    for layer in layers:
        layer.register_forward_hook(after_layer)
