"""Touch private torch, one module per part of torch, and CPython where compiles need it."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from ..errors import UnknownTorchError

P = ParamSpec("P")
R = TypeVar("R")

# Values of half a MiB: more than the frames of a compile take, and no page of it is touched.
_SLOTS = 2**16


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


def with_room_for_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Call ``function`` where the frames of all functions that it calls have room."""

    # CPython maps memory for frames in chunks of 16 KiB, and unmaps a chunk with its first frame.
    # So where a compile fills a chunk, each call below maps one anew: up to a third of the
    # time of a choice. A frame that is too large for a chunk gets a larger one, with room after it.
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(call)
