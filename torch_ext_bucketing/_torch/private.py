"""What of torch is private may be gone in the next one: say so where it is used."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..errors import UnknownTorchError


@contextlib.contextmanager
def private_torch() -> Iterator[None]:
    """Around every import and use of what torch does not promise to keep: an
    :class:`UnknownTorchError` where it is not there."""
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise UnknownTorchError(
            f"torch {torch.__version__} has not all that torch_ext_bucketing calls: {error}. "
            "Take a torch from 2.11 to 2.15, or a torch_ext_bucketing that knows this one"
        ) from error
