"""Know what torch's CUDA allocator holds for cuBLAS."""

from __future__ import annotations

import os
import re

import torch

_KIB = 1024
_HOPPER = 4096 * 8 * _KIB
_OTHERS = (4096 * 2 + 16 * 8) * _KIB


def cublas_workspace_bytes() -> int:
    """Return the bytes of one of cuBLAS's workspaces on the current device.

    ``CUBLAS_WORKSPACE_CONFIG`` has pairs of KiB and counts. Without it torch takes 32 MiB from
    compute capability 9.0 on, else 8.1 MiB (``aten/src/ATen/cuda/CublasHandlePool.cpp``). Without a
    device this is the size for 9.0.
    """
    given = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if given:
        return sum(int(size) * int(count) for size, count in given) * _KIB
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
    return _OTHERS if old else _HOPPER
