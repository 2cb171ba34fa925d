"""Read torch's estimates: milliseconds of a collective, byte caps, hints of symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch.fx as fx
from torch._inductor import config as inductor_config

from .private import private_torch
from .symbols import size_with, symbol_facts


def nccl_estimate_ms(start: fx.Node, nbytes: int) -> float:
    """Estimate a collective's milliseconds by torch's model of NCCL.

    ``nbytes`` counts input and output.
    """
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
