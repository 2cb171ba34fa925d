"""Recognize torch's copies between a device and host memory.

torch has three operators for them: ``ao.offload`` and ``ao.reload`` start a copy, and
``ao.wait_tensor`` waits for it. Their targets are compared by name, since torch registers them only
when they are used.
"""

from __future__ import annotations

import torch
import torch.fx as fx

from .collectives import started_by

TO_HOST, FROM_HOST = HOST_STREAMS = "to host", "from host"
"""The streams of the copies, in the place of a process group's name."""
_STREAMS = {"offload": TO_HOST, "reload": FROM_HOST}


def _name(node: fx.Node) -> str:
    target = node.target
    is_copy = isinstance(target, torch._ops.OpOverload) and target.namespace == "ao"
    return target._opname if is_copy else ""  # type: ignore[union-attr]


def host_stream(node: fx.Node) -> str | None:
    """Return the stream of the copy that ``node`` starts; None for other nodes."""
    return _STREAMS.get(_name(node))


def is_host_wait(node: fx.Node) -> bool:
    """Return whether ``node`` waits for a copy."""
    return _name(node) == "wait_tensor"


def launched_by(wait: fx.Node) -> fx.Node | None:
    """Return the collective or the copy that ``wait`` waits for; None for other nodes."""
    start = wait.args[0] if is_host_wait(wait) else started_by(wait)
    return start if isinstance(start, fx.Node) else None


def is_on_host(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is in host memory, because it is parked there."""
    if node.op == "placeholder":
        return any(host_stream(user) == FROM_HOST for user in node.users)
    start = node.args[0] if is_host_wait(node) else node
    return isinstance(start, fx.Node) and host_stream(start) == TO_HOST


def pinned_bytes(nbytes: int) -> int:
    """Return what torch allocates for ``nbytes`` of pinned memory: the next power of two.

    That is the default of its allocator (``ATen/core/CachingHostAllocator.h``).
    """
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
