"""Reproduce eager FSDP2: its units, the order of their parameters, sharding, and tags.

``AllToAllReduceScatter`` and ``AllToAllAllReduce`` are for eager FSDP2 itself, which then adds
gradients in the order of :class:`.FixedOrderReduce`.
"""

from __future__ import annotations

from .._exports import lazy_exports

__all__ = ["AllToAllAllReduce", "AllToAllReduceScatter"]
__getattr__ = lazy_exports(__name__, dict.fromkeys(__all__, "all_to_all"))
