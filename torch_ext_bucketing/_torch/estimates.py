"""torch's estimates and hints: milliseconds of a collective, byte caps, symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch._inductor import config as inductor_config

from .private import private_torch
from .symbols import size_with, symbol_facts


def nccl_estimate_ms(start: fx.Node, nbytes: int) -> float:
    """A collective's milliseconds by torch's model of NCCL, for bytes in and out together."""
    with private_torch():
        from torch._inductor.comm_analysis import estimate_nccl_collective_runtime_from_fx_node

    return float(
        estimate_nccl_collective_runtime_from_fx_node(start, nbytes, use_nccl_estimator=False)
    )


def default_cap_mb(size: int) -> float:
    """Byte cap in MiB that saturates the network of a group of ``size`` ranks by torch's bandwidth
    profiles, within ``pre_bucketing_fsdp_collectives_{min,max}_bucket_cap_mb`` of its config;
    ``..._bucket_cap_mb`` overrides all that. In torch 2.11, its passes' default, whatever the size.
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
    """A size as an integer: itself, or the hint of a symbolic one; a RuntimeError without one."""

    def hinted(symbol: Any, env: Any) -> int:
        hint = symbol_facts(symbol, env)[0]
        if hint is None:
            raise RuntimeError(f"Could not extract optimization hint for {size} ({context})")
        return hint

    return size_with(size, hinted)
