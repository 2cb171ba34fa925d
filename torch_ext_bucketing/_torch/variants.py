"""Compile one graph of Dynamo several times, and keep what came of it in Inductor's caches."""

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


def keep_json(name: str, data: Any, is_written: bool = False) -> None:
    """Add a file of Inductor's cache folder to its artifacts; write it, whole or not at all.

    Args:
        name: of the file, under :func:`cache_dir`.
        data: anything of JSON.
        is_written: whether the file is there already.
    """
    with private_torch():
        from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact as Artifact
        from torch.compiler._cache import CacheArtifactManager

    # Artifacts of autotuning are JSON files under a name in the folder. A type of our own would be
    # unknown to a process that loads artifacts before it imports this package, and torch then drops
    # all of them.
    if not is_written:
        Artifact(name, Artifact.encode(data)).populate_cache()
    CacheArtifactManager.record_artifact(Artifact.type(), name, data)
