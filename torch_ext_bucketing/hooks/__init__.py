"""Give torch the config entries of ``torch_patches/`` in memory.

The entries are for torch's *own* bucketing passes; the passes of this package need none of them.
This folder imports nothing from the rest of the package, and the rest imports nothing from here.
"""

from __future__ import annotations

from .._exports import lazy_exports
from ..errors import HooksError, ImportedTooEarlyError, PatchDoesNotApplyError
from .series import HOOK_ENTRIES, Status, group_descs, install, status

__all__ = [
    "HOOK_ENTRIES",
    "HooksError",
    "ImportedTooEarlyError",
    "PatchDoesNotApplyError",
    "Status",
    "TagParameters",
    "group_descs",
    "install",
    "status",
]
# The one pass that torch's own passes need; without it this package imports nothing but errors.
__getattr__ = lazy_exports(__name__, {"TagParameters": ".passes.tagging"})
