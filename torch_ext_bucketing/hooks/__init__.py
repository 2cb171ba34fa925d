"""Getting the hooks into a torch: in memory with ``install()``, or on disk with ``patch apply``.

The hooks are config entries for torch's own bucketing passes. This package's own passes need none
of them: nothing else imports this folder, and it imports nothing else.
"""

from __future__ import annotations

from .errors import (
    BusyError,
    EditedFileError,
    HooksError,
    HooksWarning,
    ImportedTooEarlyError,
    NotAppliedError,
    PatchDoesNotApplyError,
    SeriesError,
    UnsupportedTorchError,
    WriteError,
)
from .imports import HooksStatus, install, status
from .series import HOOK_ENTRIES

__all__ = [
    "HOOK_ENTRIES",
    "BusyError",
    "EditedFileError",
    "HooksError",
    "HooksStatus",
    "HooksWarning",
    "ImportedTooEarlyError",
    "NotAppliedError",
    "PatchDoesNotApplyError",
    "SeriesError",
    "UnsupportedTorchError",
    "WriteError",
    "install",
    "status",
]
