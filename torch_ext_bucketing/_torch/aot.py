"""Call AOTAutograd, and read and write the marks of its partitioner.

Make torch's partitioner copy marked activations to host memory and back.

It inserts the copies after the partition, as the operators of :mod:`.graph.host_copies`. Torch 2.13
and 2.15 have the same code for it, undocumented, for CUDA and other accelerators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from . import descriptors as _descriptors
from .draws import private_torch, without_draws

# The partitioner saves a node at the border of two checkpointed regions, which this number
# identifies. A number above all others keeps that rule away from our nodes.
_RECOMPUTE_REGION = 100_000

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def mark_recompute(node: fx.Node) -> None:
    """Make the partitioner recompute ``node`` in backward instead of saving it."""
    node.meta["ac_graph_id"] = _RECOMPUTE_REGION
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def mark_save(node: fx.Node) -> None:
    """Make the partitioner save ``node``, if backward reads it, instead of recomputing it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta.pop("ac_graph_id", None)


def unmark_recompute(node: fx.Node) -> None:
    """Remove a recompute mark, also one of activation checkpointing."""
    if must_recompute(node):
        del node.meta["recompute"]


def must_recompute(node: fx.Node) -> bool:
    """Return whether ``node`` is marked for recompute in backward."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def forward_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes that the default partitioner assigns to a joint graph's forward.

    These are all nodes up to the last one that tracing marked so, without the tangents.
    """
    found: dict[fx.Node, None] = {}
    pending: list[fx.Node] = []
    for node in graph.nodes:
        tangent = node.op == "placeholder" and is_tangent(node)
        if not tangent:
            pending.append(node)
        marked = node.meta.get("partitioner_tag") == "is_forward"
        if marked or (node.op == "placeholder" and not tangent):
            found.update(dict.fromkeys(pending))
            pending.clear()
    return found


def recomputed_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes of a joint graph that checkpointing recomputes in backward.

    Marked nodes that one region passes to the next are saved (``cleanup_recompute_tags``).
    """
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if must_recompute(node):
            region = node.meta.get("ac_graph_id")
            later = [u.meta.get("ac_graph_id") for u in node.users if must_recompute(u)]
            if region is None or not any(r is not None and region < r for r in later):
                found[node] = None
    return found


def stage_of(graph: fx.Graph) -> str:
    """Return ``"joint"``, ``"forward"``, ``"backward"`` or ``"inference"``."""
    inputs = graph.find_nodes(op="placeholder")
    forward = any(n.meta.get("partitioner_tag") == "is_forward" for n in graph.nodes)
    if any(map(is_tangent, inputs)):
        # A backward graph also has saved values as inputs, which carry no descriptor.
        return "joint" if forward and all("desc" in n.meta for n in inputs) else "backward"
    return "forward" if forward else "inference"


def in_backward(node: fx.Node) -> bool:
    """Return whether tracing marked a joint graph's node as backward."""
    return bool(node.meta.get("autograd_backward", False))


def mark_backward(nodes: Iterable[fx.Node]) -> None:
    """Set the mark that :func:`in_backward` reads."""
    for node in nodes:
        node.meta["autograd_backward"] = True


def current_backward() -> int:
    """Return the number of the ``backward()`` call that runs now; -1 outside of one."""
    with private_torch():
        return int(torch._C._current_graph_task_id())


def backward_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the nodes of a joint graph that must run in backward, by tangents and marks."""
    late: dict[fx.Node, None] = {}
    for node in graph.nodes:
        marked = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        tangent = node.op == "placeholder" and is_tangent(node)
        if marked or tangent or any(n in late for n in node.all_input_nodes):
            late[node] = None
    return late


def read_in_backward(graph: fx.Graph, repeated: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
    """Return the nodes of a joint graph whose results backward reads.

    Backward's nodes are those that depend on tangents, those that tracing marked, and recomputed
    ones: marked, or in ``repeated``.
    """
    again = dict.fromkeys(repeated)
    late = backward_nodes(graph)
    read: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        for user in node.users:
            if user.op == "output":
                continue
            if user in late or (user in read and (user in again or must_recompute(user))):
                read[node] = None
    return read


def is_saved(placeholder: fx.Node) -> bool:
    """Return whether an input of a backward graph is a value that forward saved."""
    return "desc" not in placeholder.meta and not is_tangent(placeholder)


def is_tangent(node: fx.Node) -> bool:
    """Return whether an input of a joint or backward graph is the gradient of an output."""
    desc = node.meta.get("desc")
    if desc is not None:
        return bool(_descriptors.is_tangent(desc))
    return "tangents" in str(node.target)


def compile_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint: Callable[[fx.GraphModule], None],
    each: Callable[[fx.GraphModule], Wrap],
    extend: Callable[[fx.GraphModule], tuple[list[Any], Wrap]],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None,
) -> Callable[..., Any]:
    """Run AOTAutograd with the default partitioner.

    Args:
        joint: runs on the joint or the inference graph.
        extend: changes the forward, backward and inference graphs before ``each``; returns fake
            tensors for inputs that it has added, and what gives the compiled graph their values.
        each: runs on the forward, backward and inference graphs, and returns a wrapper of the
            compiled graph.
        compiler: compiles these graphs; None runs them as they are.
    """
    with private_torch():
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import default_partition

    def partition(joint_gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joint(joint_gm)
        joint_gm.recompile()
        return without_draws(default_partition)(joint_gm, inputs, **kwargs)

    def finish(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        added, with_values = extend(graph)
        wrap = each(graph)
        graph.recompile()
        make: Any = boxed_nop if compiler is None else compiler
        compiled = make(graph, [*inputs, *added] if added else inputs)
        boxed = getattr(compiled, "_boxed_call", False)
        return with_values(wrap(compiled if boxed else make_boxed_func(compiled)))

    def finish_inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        joint(graph)
        return finish(graph, inputs)

    compile_graph = aot_autograd(
        fw_compiler=finish,
        bw_compiler=finish,
        inference_compiler=finish_inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return compile_graph(gm, example_inputs)


_MARK = "should_offload"  # what torch's partitioner reads


def import_copies() -> None:
    """Register torch's operators, and kernels of them for the CPU, which has no stream for copies.

    On the CPU a copy is complete when it is launched.
    """
    with private_torch():
        from torch._functorch import config
        from torch._functorch._activation_offloading import offload_ops

        _ = config.enable_activation_offloading, config.activation_offload_separate_stream
        ours = torch._C._dispatch_has_kernel_for_dispatch_key("ao::wait_tensor", "CPU")
    if ours:
        return

    def copy(tensor: torch.Tensor, *layout: Any, **more: Any) -> torch.Tensor:
        return tensor.clone()

    def wait(tensor: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
        return tensor

    offload_ops.offload.register_kernel("cpu", copy)
    offload_ops.reload.register_kernel("cpu", copy)
    torch.library.impl("ao::wait_tensor", "CPU", wait)


def mark_parked(node: fx.Node) -> None:
    """Make the partitioner park ``node``, if it saves it and can park it."""
    node.meta[_MARK] = True


def copies_in_partitioner(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Switch the partitioner's copies on while a graph compiles, if they are ``wanted``."""
    if not wanted:
        return contextlib.nullcontext()
    with private_torch():
        from torch._functorch import config

        patched: contextlib.AbstractContextManager[Any] = config.patch(
            enable_activation_offloading=True,
            activation_offload_separate_stream=True,
            activation_offload_sink_wait=False,  # the scheduler places waits and copies
            activation_reload_prefetch=False,
        )
    return patched
