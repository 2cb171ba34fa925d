"""Run torch's own bucketing of FSDP's collectives."""

from __future__ import annotations

import torch.fx as fx

from .private import private_torch


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
