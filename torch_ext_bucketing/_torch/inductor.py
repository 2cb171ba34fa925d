"""Inductor: the one place that knows how it is called and configured."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from .caches import watched_caches
from .graph_pass import CustomGraphPass
from .private import private_torch

try:
    from torch._inductor.custom_graph_pass import CustomPassBase
except ImportError:  # torch 2.11: anything with a uuid() is a graph pass
    CustomPassBase = CustomGraphPass


def check_passes_run_here() -> None:
    """Raise a RuntimeError where Inductor is set to run graph passes in another process: nothing,
    or something else than was asked for, would be bucketed there, and nobody told."""
    compile_fx = sys.modules.get("torch._inductor.compile_fx")
    if getattr(getattr(compile_fx, "fx_compile_mode", None), "name", None) == "SUBPROCESS":
        raise RuntimeError(
            "TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS runs graph passes in a process to which "
            "torch sends neither custom passes nor hooks that are callables, so collectives would "
            "not be bucketed as set; unset it. (Processes that compile kernels are another matter: "
            "torch._inductor.config.worker_start_method.)"
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
    meshes: Sequence[Any] = (),
) -> Callable[..., Any]:
    """Inductor, with the two hooks appended to those that the user has set.

    ``options`` and ``mode`` are those of ``torch.compile``. The config is patched for this compile
    only; ``compile_fx`` patches it again around the backward graph, which is compiled later.

    - ``allow_buffer_reuse=False``, as a precaution: ``_WaitKernel.get_volatile_reads`` keeps the
      input of an out-of-place collective alive until its wait, and no reuse before a wait was seen
      on CPU where start and wait are adjacent. Starts far from their waits were not examined.
    - ``cacheable``: functions by name that AOTAutograd caches calls of, and their digests.
    - torch's own bucketing is off: it would merge our buckets with each other.
    - ``meshes``: see :func:`.watched_caches`.
    - ``max_compute_pre_fetch=prefetch`` under torch's overlap scheduling without a depth given.
    """
    with private_torch():
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    check_passes_run_here()
    options = {**mode_options(mode), **(options or {})}
    patches = {
        **options,
        "joint_custom_post_pass": _in_turn(config.joint_custom_post_pass, joint),
        "post_grad_custom_post_pass": _in_turn(config.post_grad_custom_post_pass, post_grad),
        "allow_buffer_reuse": False,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        "bucket_all_reduces_fx": "none",
        "unsafe_marked_cacheable_functions": {
            **config.unsafe_marked_cacheable_functions,
            **(cacheable or {}),
        },
    }
    for entry in ("collective_bucketing", "pre_bucketing_fsdp_collectives"):
        if hasattr(config.aten_distributed_optimizations, entry):
            patches[f"aten_distributed_optimizations.{entry}"] = False
    with config.patch(options):
        overlaps = config.aten_distributed_optimizations.enable_overlap_scheduling
        given = config.aten_distributed_optimizations.max_compute_pre_fetch
    if prefetch is not None and overlaps and given is None:
        patches["aten_distributed_optimizations.max_compute_pre_fetch"] = prefetch

    @functools.wraps(compile_fx_inner)
    def inner(*args: Any, **kwargs: Any) -> Any:  # the backward graph's turn comes later
        with watched_caches(meshes):
            return compile_fx_inner(*args, **kwargs)

    with watched_caches(meshes):
        return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=patches)


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor's options for a ``mode`` of ``torch.compile``, or torch's RuntimeError."""
    with private_torch():
        from torch._inductor import list_mode_options

    return {} if mode is None else dict(list_mode_options(mode))


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
