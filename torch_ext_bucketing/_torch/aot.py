"""AOTAutograd: the one place that knows how it is called, and what its partitioner leaves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from . import descriptors as _descriptors
from .private import private_torch

# The partitioner saves a node at the border of two checkpointed regions, which it tells apart by
# this number; a number above all others keeps that rule away from our nodes.
_RECOMPUTE_REGION = 100_000


def mark_recompute(node: fx.Node) -> None:
    """Make the partitioner compute ``node`` again in backward rather than save it.

    Of an operator of several results that might draw random numbers the results alone are marked,
    which has the same effect. Otherwise the partitioner would save the generator's state, too, and
    behind the meshes among the outputs, where AOTAutograd looks for tensors in vain (torch 2.13).
    """
    node.meta["ac_graph_id"] = _RECOMPUTE_REGION
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if not (random and all(u.target is operator.getitem for u in node.users)):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def mark_save(node: fx.Node) -> None:
    """Make the partitioner save ``node``, where backward reads it, rather than compute it again."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    node.meta.pop("ac_graph_id", None)


def unmark_recompute(node: fx.Node) -> None:
    """Undo what has the partitioner compute ``node`` again, be it an activation checkpoint."""
    if must_recompute(node):
        del node.meta["recompute"]


def must_recompute(node: fx.Node) -> bool:
    """Whether ``node`` is marked to be computed again in backward."""
    return node.meta.get("recompute") in (
        CheckpointPolicy.MUST_RECOMPUTE,
        CheckpointPolicy.PREFER_RECOMPUTE,
    )


def forward_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes of a joint graph that the default partitioner takes to be forward's: all up to the
    last one that tracing marked so, but for the tangents."""
    found: dict[fx.Node, None] = {}
    behind: list[fx.Node] = []
    for node in graph.nodes:
        tangent = node.op == "placeholder" and _is_tangent(node)
        if not tangent:
            behind.append(node)
        marked = node.meta.get("partitioner_tag") == "is_forward"
        if marked or (node.op == "placeholder" and not tangent):
            found.update(dict.fromkeys(behind))
            behind.clear()
    return found


def recomputed_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes of a joint graph that checkpointing has computed again in backward: those marked,
    but for what one region hands to the next (torch's ``cleanup_recompute_tags``)."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if must_recompute(node):
            region = node.meta.get("ac_graph_id")
            later = [u.meta.get("ac_graph_id") for u in node.users if must_recompute(u)]
            if region is None or not any(r is not None and region < r for r in later):
                found[node] = None
    return found


def stage_of(graph: fx.Graph) -> str:
    """``"joint"``, ``"forward"``, ``"backward"`` or ``"inference"``."""
    inputs = graph.find_nodes(op="placeholder")
    forward = any(n.meta.get("partitioner_tag") == "is_forward" for n in graph.nodes)
    if any(map(_is_tangent, inputs)):
        # In a joint graph every gradient hangs on an input; a backward graph has saved values too,
        # which are no inputs of the compiled function and carry no descriptor.
        return "joint" if forward and all("desc" in n.meta for n in inputs) else "backward"
    return "forward" if forward else "inference"


def in_backward(node: fx.Node) -> bool:
    """Whether a node of a joint graph is part of backward, by the mark of tracing."""
    return bool(node.meta.get("autograd_backward", False))


def mark_backward(nodes: Iterable[fx.Node]) -> None:
    """Leave the mark of :func:`in_backward` on nodes."""
    for node in nodes:
        node.meta["autograd_backward"] = True


def current_backward() -> int:
    """A number for the ``backward()`` that runs now, -1 outside of one."""
    with private_torch():
        return int(torch._C._current_graph_task_id())


def backward_nodes(graph: fx.Graph) -> dict[fx.Node, None]:
    """The nodes of a joint graph that run in backward for sure, by tangents and marks."""
    late: dict[fx.Node, None] = {}
    for node in graph.nodes:
        marked = node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")
        tangent = node.op == "placeholder" and _is_tangent(node)
        if marked or tangent or any(n in late for n in node.all_input_nodes):
            late[node] = None
    return late


def read_in_backward(graph: fx.Graph, repeated: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
    """The nodes of a joint graph whose results backward reads, told by the tangents, by the marks
    of tracing, and by what is marked to be computed again there, or will be, as ``repeated``."""
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
    """Whether an input of a backward graph is what forward saved for it."""
    return "desc" not in placeholder.meta and not _is_tangent(placeholder)


def _is_tangent(node: fx.Node) -> bool:
    desc = node.meta.get("desc")
    if desc is not None:
        return bool(_descriptors.is_tangent(desc))
    return "tangents" in str(node.target)


def compile_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint: Callable[[fx.GraphModule], None],
    each: Callable[[fx.GraphModule], Callable[[Callable[..., Any]], Callable[..., Any]]],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None,
) -> Callable[..., Any]:
    """AOTAutograd with the default partitioner: ``joint`` runs on the joint or the inference graph,
    and ``each`` on the forward, the backward and the inference graph, which ``compiler`` then gets
    (None runs them as they are); what ``each`` returned makes of the result what will run."""
    with private_torch():
        from torch._dynamo.backends.common import aot_autograd
        from torch._dynamo.backends.debugging import boxed_nop
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import default_partition

    def partition(joint_gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        joint(joint_gm)
        joint_gm.recompile()
        return default_partition(joint_gm, inputs, **kwargs)

    def finish(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        wrap = each(graph)
        graph.recompile()
        make: Any = boxed_nop if compiler is None else compiler
        compiled = make(graph, inputs)
        boxed = getattr(compiled, "_boxed_call", False)
        return wrap(compiled if boxed else make_boxed_func(compiled))

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
