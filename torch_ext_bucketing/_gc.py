"""Python's cycle collector, kept out while a graph is rewritten or modelled.

Both make hundreds of thousands of objects that stay, and each so many new ones let the collector
walk over them, and over all of torch, to find nothing: a fifth of the time of a pass.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """No cycles are collected inside. Does nothing where the collector is off already."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
