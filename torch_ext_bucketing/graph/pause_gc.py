"""Pause Python's cycle collector while a graph is rewritten or modeled.

Both create hundreds of thousands of objects that stay alive. The collector would walk over them and
over all of torch again and again, and find nothing. That takes a fifth of a pass's time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Disable the cycle collector in the block, unless it is disabled already."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
