"""Getting the hooks into a torch: in memory with ``install()``, or on disk with ``patch apply``.

The hooks are config entries for torch's *own* bucketing passes. This package's own passes need none
of them: nothing of the package imports this folder, and it imports nothing of the package.
"""

from __future__ import annotations

from ..errors import HooksError, ImportedTooEarlyError, PatchDoesNotApplyError
from .imports import Status, install, status
from .series import HOOK_ENTRIES

__all__ = [
    "HOOK_ENTRIES",
    "HooksError",
    "ImportedTooEarlyError",
    "PatchDoesNotApplyError",
    "Status",
    "install",
    "status",
]
