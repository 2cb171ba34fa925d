"""Reproduce eager FSDP2: its units, the order of their parameters, sharding, and tags.

``fully_shard`` takes FSDP2's calls, so that a trainer changes one import. The policies are FSDP2's
own. ``ReduceOnce`` reduces the gradients of several microbatches once. ``AllToAllReduceScatter``
and ``AllToAllAllReduce`` are for eager FSDP2 itself, which then adds gradients in the order of
:class:`.FixedOrderReduce`. ``manual_plan`` names units by patterns.
"""

from __future__ import annotations

from .._exports import lazy_exports

_HOME = {
    "AllToAllAllReduce": "rank_order",
    "AllToAllReduceScatter": "rank_order",
    "CPUOffloadPolicy": "wrapping",
    "FSDPModule": "wrapping",
    "MixedPrecisionPolicy": "wrapping",
    "OffloadPolicy": "wrapping",
    "ReduceOnce": "accumulate",
    "fully_shard": "wrapping",
    "manual_plan": "plans",
}
__all__ = sorted(_HOME)
__getattr__ = lazy_exports(__name__, _HOME)
