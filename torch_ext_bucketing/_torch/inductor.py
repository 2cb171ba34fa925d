"""Configure and call Inductor, read its estimates, and write artifacts for TORCH_TRACE."""

from __future__ import annotations

import functools
import heapq
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from . import paused_gc, private_torch, with_room_for_frames
from .aot import Partitioner, Wrap, size_with, symbol_facts
from .caches import watched_caches
from .without_device import Planned

with private_torch():
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
    from torch._logging import trace_structured
    from torch.utils._ordered_set import OrderedSet


def sort_topologically(graph: fx.Graph, soon: Collection[fx.Node] = ()) -> None:
    """Move nodes after their inputs, and keep the order where it is valid.

    Of the nodes whose inputs are placed, those of ``soon`` come first, then the first in the graph.
    """
    # So the order depends on dependencies alone, as a model has them. That of Inductor's
    # ``stable_topological_sort`` depends on the order of arguments, too.
    nodes = [node for node in graph.nodes if node.op != "output"]
    nodes = [*(n for n in nodes if n in soon), *(n for n in nodes if n not in soon)]
    rank = {node: i for i, node in enumerate(nodes)}
    missing = [len(node.all_input_nodes) for node in nodes]
    ready = [i for i, count in enumerate(missing) if not count]  # a heap, as it ascends
    placed: fx.Node | None = None
    unsorted = len(nodes)
    while ready:
        node = nodes[heapq.heappop(ready)]
        if placed is not None and placed.next is not node:
            placed.append(node)
        placed = node
        unsorted -= 1
        for user in node.users:
            if user in rank:
                missing[rank[user]] -= 1
                if not missing[rank[user]]:
                    heapq.heappush(ready, rank[user])
    if unsorted:
        raise ValueError("the graph has a cycle")


def run_after(graph: fx.Graph, before: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Make Inductor run each node after its nodes in ``before``, which precede it in the graph."""
    with private_torch():
        from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    preserve_node_ordering(graph, {node: OrderedSet(first) for node, first in before.items()})


def keep_dense(nodes: Iterable[fx.Node]) -> None:
    """Let Inductor leave no gaps between the rows of some results (``comprehensive_padding``)."""
    # Rows of a bucket that are not a multiple of 128 bytes would be padded, and the whole bucket
    # copied for the collective, which sends it as one piece. Inductor does not look into nodes that
    # run_after() wraps, but reads this there, too.
    for node in nodes:
        node.meta["dislike_padding"] = True


def write_once(nodes: Iterable[fx.Node]) -> None:
    """Let Inductor write elementwise values where they stand, for all their readers."""
    # It does so for a value with several readers if one of them needs memory. It doesn't know that
    # of nodes that run_after() wraps, and each of these would write a copy of its own.
    for node in nodes:
        node.meta["inductor_realize_to_strides"] = True


try:
    from torch._inductor.custom_graph_pass import CustomPassBase
except ImportError:  # torch 2.11: anything with a uuid() is a graph pass
    CustomPassBase = CustomGraphPass


NO_HOLDS = {"allow_buffer_reuse": False}
"""Inductor's options for code that frees each buffer at its last use.

By default it holds one until the next of equal size, while its own estimate of the peak is not
exceeded. That estimate counts a bucket and its parts, so the bucket of one layer would be held for
the next one's. The allocator reuses memory that was freed.
"""


def check_passes_run_here() -> None:
    """Raise RuntimeError if Inductor runs graph passes in another process."""
    # Our passes would silently not run there.
    compile_fx = sys.modules.get("torch._inductor.compile_fx")
    if getattr(getattr(compile_fx, "fx_compile_mode", None), "name", None) == "SUBPROCESS":
        raise RuntimeError(
            "TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS runs graph passes in a process that gets "
            "neither custom passes nor callable hooks, so collectives would not be bucketed; unset "
            "it. (torch._inductor.config.worker_start_method, of processes that compile kernels, "
            "may stay.)"
        )


def compile_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    joint: Any,
    post_grad: Any,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
    cacheable: Mapping[str, str] | None = None,
    prefetch: int | None = None,
    holds: bool = True,
    meshes: Sequence[Any] = (),
    extend: Callable[[fx.GraphModule], tuple[list[Any], Wrap]] | None = None,
    check: Wrap | None = None,
    stand_in: Callable[[fx.Graph], Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """Call Inductor, with our hooks appended to the user's.

    Args:
        joint: runs on the joint graph; ``post_grad`` on the forward and backward graphs.
        options: options of ``torch.compile``, and its ``mode``.
        cacheable: names of functions whose calls AOTAutograd may cache, with their digests.
        prefetch: depth of torch's overlap scheduling, if it is on and has no depth.
        holds: whether code may hold a buffer after its last use, for a later one of equal size.
        meshes: see :func:`.watched_caches`.
        extend: changes the forward and backward graphs; returns fake tensors for inputs that it has
            added, and a wrapper that adds their values. AOTAutograd's cache is off then, since it
            would load graphs without these changes.
        check: wraps each compiled graph, inside of ``extend``'s wrapper; the cache is off, too.
        stand_in: makes a stand-in for a compiled graph, if ``post_grad`` raises ``Planned``; the
            cache is off, too.
    """
    with private_torch():
        from torch._functorch import config as functorch_config
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    check_passes_run_here()
    options = {**mode_options(mode), **(options or {})}
    # For this compile only. compile_fx patches again around the backward graph's, which is later.
    patches = {
        **options,
        "joint_custom_post_pass": _in_turn(config.joint_custom_post_pass, joint),
        "post_grad_custom_post_pass": _in_turn(config.post_grad_custom_post_pass, post_grad),
        # torch's own bucketing would merge our buckets with each other.
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
        **({} if holds else NO_HOLDS),
        "custom_partitioner_fn": Partitioner(
            options.get("custom_partitioner_fn", config.custom_partitioner_fn)
        ),
        "unsafe_marked_cacheable_functions": {
            **config.unsafe_marked_cacheable_functions,
            **(cacheable or {}),
        },
    }
    for entry in ("collective_bucketing", "pre_bucketing_fsdp_collectives"):
        if hasattr(config.aten_distributed_optimizations, entry):
            patches[f"aten_distributed_optimizations.{entry}"] = False
    with config.patch(options):  # these may switch overlap scheduling on for this compile
        overlaps = config.aten_distributed_optimizations.enable_overlap_scheduling
        configured = config.aten_distributed_optimizations.max_compute_pre_fetch
    if prefetch is not None and overlaps and configured is None:
        patches["aten_distributed_optimizations.max_compute_pre_fetch"] = prefetch

    @functools.wraps(compile_fx_inner)
    @with_room_for_frames
    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        added, wrap = ([], lambda compiled: compiled) if extend is None else extend(graph)
        with paused_gc(), watched_caches(meshes):  # the backward graph's turn comes later
            try:
                compiled = compile_fx_inner(graph, [*inputs, *added], **kwargs)
            except Planned as planned:
                assert stand_in is not None
                compiled = stand_in(planned.graph)
            return wrap(compiled if check is None else check(compiled))

    alone = extend is None and check is None and stand_in is None
    cached = {} if alone else {"enable_autograd_cache": False}
    with watched_caches(meshes), functorch_config.patch(cached):
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)


def is_inductor_compiling() -> bool:
    """Return whether Inductor compiles a graph in this thread, from the joint graph on."""
    virtualized = sys.modules.get("torch._inductor.virtualized")
    if virtualized is None:
        return False
    with private_torch():  # compile_fx sets a fake mode; else there is a handler in its place
        return not isinstance(virtualized.V.get_fake_mode(), virtualized.NullHandler)


def uses_cuda_graphs(options: dict[str, Any] | None = None, mode: str | None = None) -> bool:
    """Return whether Inductor captures graphs, with the options and mode of a compile."""
    with private_torch():
        from torch._inductor import config

    settings = {**mode_options(mode), **(options or {})}
    return bool(settings.get("triton.cudagraphs", config.triton.cudagraphs))


def mode_options(mode: str | None) -> dict[str, Any]:
    """Return Inductor's options for a ``mode`` of ``torch.compile``."""
    with private_torch():
        from torch._inductor import list_mode_options

    return {} if mode is None else dict(list_mode_options(mode))


def _in_turn(present: Any, added: CustomGraphPass) -> Any:
    """Return a config value that runs the passes that the user has set, then ours."""
    try:
        from torch._inductor.custom_graph_pass import get_custom_graph_passes
    except ImportError:  # torch 2.11 takes one pass
        return added if present is None else _InTurn(present, added)
    return (*get_custom_graph_passes(present), added)


class _InTurn(CustomGraphPass):
    """Join two passes into one, without a uuid if one has none, which disables caching."""

    def __init__(self, first: Callable[[fx.Graph], None], second: CustomGraphPass) -> None:
        self.passes = (first, second)

    def __call__(self, graph: fx.Graph) -> None:
        for p in self.passes:
            p(graph)

    def uuid(self) -> Any:
        uuids = [p.uuid() if hasattr(p, "uuid") else None for p in self.passes]
        return None if None in uuids else repr(uuids)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Write an artifact. Without a trace, ``payload`` is not called."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def readable(graph: fx.Graph) -> str:
    """Format a graph as code with dtypes, shapes, strides and devices, as Inductor does."""
    code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    return code.src.lstrip("\n")


_MOST_RANKS = 64  # ranks' parts in one kernel: a kernel for 512 ranks took a minute to compile


def lower_sum(target: Any) -> None:
    """Lower a sum in rank order to one Inductor kernel per 64 ranks, if Inductor is in use."""
    if "torch._inductor.compile_fx" not in sys.modules:
        return
    with private_torch():
        from torch._inductor.ir import Pointwise
        from torch._inductor.lowering import lowerings, register_lowering
        from torch._inductor.virtualized import V, ops

    if target in lowerings:
        return

    @register_lowering(target, type_promotion_kind=None)  # type: ignore[untyped-decorator]
    def lower(received: Any, ranks: int, accumulate: torch.dtype, average: bool) -> Any:
        """Add the ranks' parts of the buffer ``received``, one after the other."""
        received.realize()
        load, dtype = received.make_loader(), received.get_dtype()
        wide = torch.promote_types(dtype, accumulate)
        part = received.get_numel() // ranks

        def added(load_before: Any, some: range) -> Any:
            """Make a loader of the sum of some ranks' parts and of the ranks before."""

            def inner(index: Any) -> Any:
                (i,) = index
                total = None if load_before is None else load_before(index)
                for rank in some:
                    element = load([i + rank * part])
                    if wide is not dtype:
                        element = ops.to_dtype(element, wide, src_dtype=dtype)
                    total = element if total is None else ops.add(total, element)
                if some.stop < ranks:
                    return total
                if average:
                    total = ops.mul(total, ops.constant(1 / ranks, wide))
                return total if wide is dtype else ops.to_dtype(total, dtype, src_dtype=wide)

            return inner

        # A kernel reads each rank's part once and adds in registers. Later kernels continue with
        # the sum of the ranks before.
        load_before = None
        for first in range(0, ranks, _MOST_RANKS):
            some = range(first, min(first + _MOST_RANKS, ranks))
            total = Pointwise.create(
                device=received.get_device(),
                dtype=wide if some.stop < ranks else dtype,
                inner_fn=added(load_before, some),
                ranges=[part],
            )
            if some.stop < ranks:
                total.realize()
                V.graph.no_fuse_buffer_names.add(total.get_name())
                load_before = total.make_loader()
        if dtype.itemsize > 2:
            return total
        # Inductor skips the rounding to 16 bits if the same kernel reads the value. Viewing the
        # bits as an integer forces it.
        view = lowerings[torch.ops.aten.view.dtype]
        return view(view(total, torch.int16), dtype)


def nccl_estimate_ms(start: fx.Node, nbytes: int) -> float:
    """Estimate a collective's milliseconds by torch's model of NCCL, input and output counted."""
    with private_torch():
        from torch._inductor.comm_analysis import estimate_nccl_collective_runtime_from_fx_node

    return float(
        estimate_nccl_collective_runtime_from_fx_node(start, nbytes, use_nccl_estimator=False)
    )


def default_cap_mb(size: int) -> float:
    """Return torch's byte cap in MiB for a group of ``size`` ranks.

    It saturates the network by torch's bandwidth profiles, within torch's config entries
    ``pre_bucketing_fsdp_collectives_{min,max}_bucket_cap_mb``; ``..._bucket_cap_mb`` overrides it.
    torch 2.11 has one default for all sizes.
    """
    try:
        from torch._inductor.fx_passes.fsdp import compute_pre_bucket_cap_mb
    except ImportError:
        with private_torch():
            from torch._inductor.fx_passes.bucketing import bucket_cap_mb_by_bucket_idx_default

        return float(bucket_cap_mb_by_bucket_idx_default(0))

    override = getattr(
        inductor_config.aten_distributed_optimizations,
        "pre_bucketing_fsdp_collectives_bucket_cap_mb",
        None,
    )
    return float(compute_pre_bucket_cap_mb(size, override))


def size_hint(size: Any, context: str) -> int:
    """Return a size, or the hint of a symbolic one; raise RuntimeError if it has no hint."""

    def hinted(symbol: Any, env: Any) -> int:
        hint = symbol_facts(symbol, env)[0]
        if hint is None:
            raise RuntimeError(f"Could not extract optimization hint for {size} ({context})")
        return hint

    return size_with(size, hinted)


_KIB = 1024
_HOPPER = 4096 * 8 * _KIB
_OTHERS = (4096 * 2 + 16 * 8) * _KIB


def cublas_workspace_bytes() -> int:
    """Return the bytes of one of cuBLAS's workspaces on the current device."""
    # Pairs of KiB and counts. Without them torch takes 32 MiB from compute capability 9.0 on, which
    # counts without a device, too; else 8.1 MiB (``aten/src/ATen/cuda/CublasHandlePool.cpp``).
    sizes = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if sizes:
        return sum(int(size) * int(count) for size, count in sizes) * _KIB
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
    return _OTHERS if old else _HOPPER


def bucket_fsdp(gm: fx.GraphModule) -> None:
    """Merge as Inductor does with ``bucket_all_gathers_fx`` and ``bucket_reduce_scatters_fx``."""
    with private_torch():
        from torch._inductor.fx_passes.fsdp import (
            bucket_fsdp_all_gather,
            bucket_fsdp_reduce_scatter,
        )
        from torch._inductor.pattern_matcher import stable_topological_sort

    bucket_fsdp_reduce_scatter(gm)
    bucket_fsdp_all_gather(gm)
    stable_topological_sort(gm.graph)
