"""Shard by this package's ``fully_shard`` in torchtitan's eager trainer (0.3.0).

The trainer shards each block, compiles it alone (``config.compile.enable``), and runs the rest by
FSDP2. FSDP2's hooks run around the compiled blocks, as with torch's function.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from unittest import mock

import torch.distributed.fsdp
import torchtitan.distributed.fsdp  # noqa: F401 (shards all decoders)

from ..fsdp.shard import fully_shard


def install() -> contextlib.ExitStack:
    """Let torchtitan shard by our ``fully_shard`` from now on, or in a ``with`` block.

    Call it after the import of the model's ``config_registry`` and before the trainer is built.
    ``close()`` of the result gives torchtitan torch's function back.

    Raises:
        RuntimeError: it is installed already.
    """
    importers = list(_importers())
    if not importers:
        raise RuntimeError("install() was called before: first close() what it returned")
    stack = contextlib.ExitStack()
    for module in importers:
        stack.enter_context(mock.patch.object(module, "fully_shard", fully_shard))
    return stack


def _importers() -> Iterator[object]:
    """Yield the loaded modules of torchtitan that have imported torch's ``fully_shard``."""
    for name, module in list(sys.modules.items()):
        function = vars(module).get("fully_shard")
        if name.startswith("torchtitan.") and function is torch.distributed.fsdp.fully_shard:
            yield module
