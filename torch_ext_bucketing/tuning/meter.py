"""Measure one step on this rank: milliseconds, and the peak of its memory."""

from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass
class Meter:
    """A clock that waits for the device, and its peak of allocated bytes.

    On CPU the peak is that of the process's resident memory, on Linux; elsewhere it is 0.
    """

    device: torch.device

    def now_ms(self) -> float:
        """Return the time once the device has done all work."""
        if self._has_allocator:
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() * 1e3

    def restart_peak(self) -> None:
        """Begin a new peak at what is held now."""
        if self._has_allocator:
            torch.accelerator.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # or a step would run in memory that others have left
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the largest number of bytes held since :meth:`restart_peak`."""
        if self._has_allocator:
            return torch.accelerator.max_memory_allocated(self.device)
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    @property
    def _has_allocator(self) -> bool:
        return self.device.type not in ("cpu", "meta")
