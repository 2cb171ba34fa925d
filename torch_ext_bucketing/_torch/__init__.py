"""Touch private torch, one module per part of torch."""

from __future__ import annotations

import contextlib
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
