"""Read torch's estimates of time and bytes, and run its own bucketing of FSDP's collectives."""

from __future__ import annotations

import os
import re
from typing import Any

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

from . import private_torch
from .symbols import size_with, symbol_facts


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
    given = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return sum(int(size) * int(count) for size, count in given) * _KIB
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
