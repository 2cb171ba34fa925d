"""Reproduce eager FSDP2: its units, the order of their parameters, sharding, and tags.

``fully_shard`` takes FSDP2's calls, so that a trainer changes one import. All other names of FSDP2
are here, too, and are torch's own. ``ReduceOnce`` reduces the gradients of several microbatches
once. ``AllToAllReduceScatter`` and ``AllToAllAllReduce`` are for eager FSDP2 itself, which then
adds gradients in the order of :class:`.FixedOrderReduce`. ``manual_plan`` names units by patterns.
"""

from __future__ import annotations

from .._exports import lazy_exports

_HOME = {
    "AllToAllAllReduce": "rank_order",
    "AllToAllReduceScatter": "rank_order",
    "CPUOffloadPolicy": "shard",
    "DataParallelMeshDims": "shard",  # since torch 2.12
    "FSDPModule": "modules",
    "MixedPrecisionPolicy": "shard",
    "OffloadPolicy": "shard",
    "ReduceOnce": "accumulate",
    "UnshardHandle": "shard",
    "fully_shard": "shard",
    "manual_plan": "plans",
    "register_fsdp_forward_method": "shard",
    "share_comm_ctx": "shard",
}
__all__ = sorted(_HOME)
# Torch 2.15 has one name more.
__getattr__ = lazy_exports(__name__, {**_HOME, "GradientReductionHandle": "shard"})
