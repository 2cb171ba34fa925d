"""Touch private torch, one module per part of torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch

from ..errors import UnknownTorchError


@contextlib.contextmanager
def private_torch() -> Iterator[None]:
    """Raise :class:`UnknownTorchError` if a private name of torch is missing in the block."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnknownTorchError(
            f"torch {torch.__version__} lacks a name that torch_ext_bucketing uses: {error}. "
            "Use a torch from 2.11 to 2.15, or a torch_ext_bucketing that supports this one"
        ) from error


@contextlib.contextmanager
def paused_gc() -> Iterator[None]:
    """Disable Python's cycle collector in the block, unless it is disabled already."""
    # Graphs, models and generated code are hundreds of thousands of objects that stay alive. The
    # collector would walk over them and all of torch, and find nothing: a tenth of a compile.
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
