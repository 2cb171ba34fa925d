"""Fake tensors of a known layout, made without running an operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .private import private_torch

with private_torch():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import _disable_current_modes

fake_mode = FakeTensorMode


def fake_mode_of(value: torch.Tensor) -> Any:
    """The mode of a fake tensor; None for any other tensor."""
    return value.fake_mode if isinstance(value, FakeTensor) else None


def fake_tensor(
    mode: Any,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    base: torch.Tensor | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """A fake tensor, a tenth as dear as an operator that would give it.

    Args:
        mode: the ``FakeTensorMode`` that it belongs to.
        shape: all numbers, as is ``stride``.
        stride: in elements.
        dtype: its dtype.
        device: its device.
        base: the fake tensor in whose storage it lies; None gives it a storage of its own.
        offset: of its first element in the storage, in elements.
    """
    with torch.no_grad(), _disable_current_modes():
        if base is None:
            elements = 1
            for size in shape:
                elements *= size
            storage = torch.UntypedStorage(elements * dtype.itemsize, device="meta")
        else:
            storage = base.untyped_storage()
        meta = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(storage, offset, tuple(shape), tuple(stride))
        return FakeTensor(mode, meta, device)
