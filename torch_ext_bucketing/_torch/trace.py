"""Write artifacts for TORCH_TRACE, which tlparse shows with those of torch."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from .private import private_torch

with private_torch():
    from torch._logging import trace_structured


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Write an artifact. Without a trace, ``payload`` is not called."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def readable(graph: fx.Graph) -> str:
    """Format a graph as code with dtypes, shapes, strides and devices, as Inductor does."""
    code = graph.python_code("self", verbose=True, include_stride=True, include_device=True)
    return code.src.lstrip("\n")
