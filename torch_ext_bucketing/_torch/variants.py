"""Compile one graph of Dynamo several times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from .private import private_torch

with private_torch():
    from torch._dynamo import lookup_backend
    from torch._guards import TracingContext, tracing
    from torch._inductor.runtime.cache_dir_utils import cache_dir as cache_dir

Compiler = Callable[..., Callable[..., Any]]


def compile_variant(
    compiler: str | Compiler, gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Compile a copy of ``gm`` by a backend of ``torch.compile``, given itself or by name."""
    run: Compiler = lookup_backend(compiler) if isinstance(compiler, str) else compiler
    # AOTAutograd writes what it finds out about a graph to the context, and reads it again when it
    # compiles the backward graph, which may be after other variants were compiled.
    with tracing(copy.copy(TracingContext.try_get())):
        return run(_copy_of(gm), inputs, **kwargs)


def _copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy the nodes of ``gm``, which compilers change; what they refer to is shared."""
    graph, at = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(gm.graph, at))
    for old, new in at.items():
        source = getattr(old, "_dynamo_source", None)  # of a placeholder, beside its meta
        if source is not None:
            new._dynamo_source = source  # type: ignore[attr-defined]
    found = fx.GraphModule(gm, graph)
    vars(found).update({name: v for name, v in vars(gm).items() if name not in vars(found)})
    found.meta = dict(gm.meta)
    return found
