"""AOTAutograd and Inductor: the one place that knows how they are called and configured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

from . import _descriptors

__all__ = [
    "check_passes_run_here",
    "compile_aot",
    "compile_inductor",
    "mark_recompute",
    "stage_of",
]

# The partitioner saves a node at the border of two checkpointed regions, which it tells apart by
# this number; a number above all others keeps that rule away from our nodes.
_RECOMPUTE_REGION = 100_000


def mark_recompute(node: fx.Node) -> None:
    """Make the partitioner compute ``node`` again in backward rather than save it."""
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    node.meta["ac_graph_id"] = _RECOMPUTE_REGION


def stage_of(graph: fx.Graph) -> str:
    """``"joint"``, ``"forward"``, ``"backward"`` or ``"inference"``, told by the inputs and what
    the partitioner left on the nodes."""
    tangents = any(_is_tangent(n) for n in graph.find_nodes(op="placeholder"))
    tags = dict.fromkeys(n.meta.get("partitioner_tag") for n in graph.nodes)
    if tangents:
        return "joint" if "is_forward" in tags and not _is_partitioned(graph) else "backward"
    return "forward" if "is_forward" in tags else "inference"


def is_primal(placeholder: fx.Node) -> bool:
    """Whether an input of a forward or backward graph is an input of the compiled function (a
    parameter, say), and neither a saved value nor a tangent."""
    return "desc" in placeholder.meta and not _is_tangent(placeholder)


def _is_partitioned(graph: fx.Graph) -> bool:
    # In a joint graph every gradient hangs on an input; a backward graph has saved values too,
    # which are no inputs of the compiled function and carry no descriptor.
    return any("desc" not in n.meta for n in graph.find_nodes(op="placeholder"))


def _is_tangent(node: fx.Node) -> bool:
    desc = node.meta.get("desc")
    if desc is not None:
        return bool(_descriptors.is_tangent(desc))
    return "tangents" in str(node.target)


def check_passes_run_here() -> None:
    """To be called where Inductor compiles.

    Raises:
        RuntimeError: Inductor is set to run graph passes in another process. Torch sends it the
            config without custom passes and without hooks that are callables, so that nothing, or
            something else than was asked for, would be bucketed there, and nobody told.
    """
    compile_fx = sys.modules.get("torch._inductor.compile_fx")
    if getattr(getattr(compile_fx, "fx_compile_mode", None), "name", None) == "SUBPROCESS":
        raise RuntimeError(
            "TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS runs graph passes in a process to which "
            "torch sends neither custom passes nor hooks that are callables, so collectives would "
            "not be bucketed as set; unset it. (Processes that compile kernels are another matter: "
            "torch._inductor.config.worker_start_method.)"
        )


def compile_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint: Callable[[fx.GraphModule], None],
    each: Callable[[fx.GraphModule], Callable[[Callable[..., Any]], Callable[..., Any]]],
    compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None,
) -> Callable[..., Any]:
    """AOTAutograd with the default partitioner.

    Args:
        joint: run on the joint graph, and on an inference graph.
        each: run on the forward, the backward and the inference graph; what it returns gets what
            was compiled of it, and returns what will run in its place.
        compiler: gets each of them afterwards; None runs them as they are.
    """
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
        if compiler is None:
            return wrap(boxed_nop(graph, inputs))  # type: ignore[arg-type]
        compiled = compiler(graph, inputs)
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


def compile_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint: Any,
    post_grad: Any,
    options: dict[str, Any] | None = None,
    prefetch: int | None = None,
) -> Callable[..., Any]:
    """Inductor, with the two hooks appended to those that the user has set.

    The config is patched for this compile only; ``compile_fx`` patches it again around the
    backward graph, which is compiled when the first backward runs.

    - ``allow_buffer_reuse=False``, as a precaution: ``_WaitKernel.get_volatile_reads`` keeps the
      input of an out-of-place collective alive until its wait, and no reuse before a wait was seen
      on CPU where start and wait are adjacent. Starts far from their waits were not examined.
    - torch's own bucketing is off: it would merge our buckets with each other.
    - ``max_compute_pre_fetch=prefetch`` where torch's overlap scheduling is enabled and the user
      has set no depth.

    Raises:
        RuntimeError: see :func:`check_passes_run_here`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    check_passes_run_here()
    patches = {
        **(options or {}),
        "joint_custom_post_pass": _in_turn(config.joint_custom_post_pass, joint),
        "post_grad_custom_post_pass": _in_turn(config.post_grad_custom_post_pass, post_grad),
        "allow_buffer_reuse": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
    }
    for entry in ("collective_bucketing", "pre_bucketing_fsdp_collectives"):
        if hasattr(config.aten_distributed_optimizations, entry):
            patches[f"aten_distributed_optimizations.{entry}"] = False
    with config.patch(options or {}):
        overlaps = config.aten_distributed_optimizations.enable_overlap_scheduling
        given = config.aten_distributed_optimizations.max_compute_pre_fetch
    if prefetch is not None and overlaps and given is None:
        patches["aten_distributed_optimizations.max_compute_pre_fetch"] = prefetch
    return compile_fx(gm, example_inputs, config_patches=patches)


def _in_turn(given: Any, ours: CustomGraphPass) -> Any:
    """A config value that runs the passes that the user has set, then ours."""
    try:
        from torch._inductor.custom_graph_pass import get_custom_graph_passes
    except ImportError:  # torch 2.11 takes one pass
        return ours if given is None else _InTurn(given, ours)
    return (*get_custom_graph_passes(given), ours)


class _InTurn(CustomGraphPass):
    """Two passes as one. Without a uuid where one has none, so that nothing is cached then."""

    def __init__(self, first: Callable[[fx.Graph], None], second: CustomGraphPass) -> None:
        self.passes = (first, second)

    def __call__(self, graph: fx.Graph) -> None:
        for one in self.passes:
            one(graph)

    def uuid(self) -> Any:
        uuids = [p.uuid() if hasattr(p, "uuid") else None for p in self.passes]
        return None if None in uuids else repr(uuids)
