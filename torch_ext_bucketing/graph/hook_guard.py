"""A guard around a caller's hook, which must not change the graph or communicate.

Hooks are called while a graph is planned. One that changes the graph would make the plan wrong, and
one that launches a collective would make compilation wait for the other ranks, which may be
compiling something else, or nothing at all where they hit a cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.fx as fx
from torch.utils._python_dispatch import TorchDispatchMode

from .snapshot import Snapshot

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")


class _NoCollectives(TorchDispatchMode):
    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            raise RuntimeError(
                f"{self._what} called the collective {func}, which waits for ranks that may be "
                "compiling something else or nothing at all: communicate before compiling"
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reading_only(graph: fx.Graph, **hooks: object) -> Iterator[None]:
    """Those of ``hooks`` that are callables may read ``graph`` inside, and write metadata. A
    RuntimeError where one changed the graph, which was put back, or called a collective."""
    what = " or ".join(name for name, hook in hooks.items() if callable(hook))
    if not what:
        yield
        return
    snapshot = Snapshot(graph)
    failed: Exception | None = None
    try:
        with _NoCollectives(what):
            yield
    except Exception as error:
        failed = error
    difference = snapshot.difference()
    if difference:
        snapshot.restore()
        raise RuntimeError(
            f"{what} changed the graph ({difference}); it may only read it. The graph was put back"
        ) from failed
    if failed is not None:
        raise failed
