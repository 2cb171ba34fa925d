"""Count what the allocator holds beside the values of a graph.

torch's CUDA allocator keeps a workspace of cuBLAS for each handle and stream. Each thread has a
handle of its own, and autograd runs backward in another thread than forward, so a training step
holds two from its first backward on. NCCL allocates its buffers itself, with ``cudaMalloc``.
"""

from __future__ import annotations

import torch.fx as fx

from .._torch.aot import stage_of
from .._torch.workspaces import cublas_workspace_bytes
from .collectives import is_compute, tensors_in

BLOCK_BYTES = 512
"""Bytes; the allocator rounds each block up to a multiple of them."""


def beside_bytes(graph: fx.Graph) -> int:
    """Return the bytes of cuBLAS's workspaces; 0 without products on CUDA."""
    return _workspaces(graph) * cublas_workspace_bytes()


def beside_text(graph: fx.Graph) -> str:
    """Say what is assumed to be in memory beside the graph; empty where nothing is on CUDA."""
    number = _workspaces(graph)
    if not number:
        return ""
    size = cublas_workspace_bytes() / 2**20
    return (
        f"bytes have {number} workspaces of cuBLAS of {size:.4g} MiB; they have neither NCCL's own "
        f"buffers nor what is lost to blocks' rounding to {BLOCK_BYTES} bytes and between blocks"
    )


def _workspaces(graph: fx.Graph) -> int:
    on_cuda = any(
        is_compute(node) and any(t.is_cuda for t in tensors_in(node.meta.get("val")))
        for node in graph.nodes
    )
    return 0 if not on_cuda else 1 if stage_of(graph) == "inference" else 2
