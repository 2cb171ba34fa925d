"""What makes Inductor round as eager does: the one place that touches its decompositions.

Measured on torch 2.13 (CPU, the demo's model, gradients of one step without sharding). Inductor's
fused kernels keep intermediate values in float32; with ``emulate_precision_casts`` they round each
to bfloat16 as eager's separate kernels do. Then the logits and every gradient but one equal
eager's, bit for bit. The one left is the embedding's: Inductor's decomposition adds it up in
float32 and rounds once, eager's kernel adds in bfloat16. Without that decomposition Inductor calls
eager's kernel, and all gradients are equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._inductor import config, decomposition, lowering

_OPS = (torch.ops.aten.embedding_dense_backward.default,)


@contextlib.contextmanager
def eager_rounding() -> Iterator[None]:
    """While this lasts, Inductor compiles kernels that round where eager rounds."""
    table = decomposition.decompositions
    removed = {op: table.pop(op) for op in _OPS if op in table}
    decomposition.fast_random_decomps.cache_clear()  # it keeps a copy of the table
    lowered = {op: lowering.lowerings.get(op) for op in removed}
    for op in removed:
        # Inductor would do so by itself, but with CI in the environment it first insists on the
        # decomposition.
        lowering.make_fallback(op, override_decomp=True)
    try:
        with config.patch(emulate_precision_casts=True):
            yield
    finally:
        for op, before in lowered.items():
            del lowering.lowerings[op]
            if before is not None:
                lowering.lowerings[op] = before
        table.update(removed)
        decomposition.fast_random_decomps.cache_clear()
