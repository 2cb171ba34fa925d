"""Getting the hooks into a torch: in memory on import, or on disk with ``patch apply``.

``ensure_hooks`` runs when ``torch_ext_bucketing`` is imported. ``require_hooks`` is for code that
sets a hook; ``hooks_status`` tells where the hooks come from.
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
from .imports import HooksStatus, ensure_hooks, hooks_status, require_hooks
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
    "ensure_hooks",
    "hooks_status",
    "require_hooks",
]
