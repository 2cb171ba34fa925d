"""Make torch's partitioner copy marked activations to host memory and back.

It inserts the copies after the partition, as the operators of :mod:`.graph.host_copies`. Torch 2.13
and 2.15 have the same code for it, undocumented, for CUDA and other accelerators.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.fx as fx

from .private import private_torch

_MARK = "should_offload"  # what torch's partitioner reads


def import_copies() -> None:
    """Register torch's operators, and kernels of them for the CPU, which has no stream for copies.

    On the CPU a copy is complete when it is launched.
    """
    with private_torch():
        from torch._functorch import config
        from torch._functorch._activation_offloading import offload_ops

        _ = config.enable_activation_offloading, config.activation_offload_separate_stream
        ours = torch._C._dispatch_has_kernel_for_dispatch_key("ao::wait_tensor", "CPU")
    if ours:
        return

    def copy(tensor: torch.Tensor, *layout: Any, **more: Any) -> torch.Tensor:
        return tensor.clone()

    def wait(tensor: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
        return tensor

    offload_ops.offload.register_kernel("cpu", copy)
    offload_ops.reload.register_kernel("cpu", copy)
    torch.library.impl("ao::wait_tensor", "CPU", wait)


def mark_parked(node: fx.Node) -> None:
    """Make the partitioner park ``node``, if it saves it and can park it."""
    node.meta[_MARK] = True


def copies_in_partitioner(wanted: bool) -> contextlib.AbstractContextManager[Any]:
    """Switch the partitioner's copies on while a graph compiles, if they are ``wanted``."""
    if not wanted:
        return contextlib.nullcontext()
    with private_torch():
        from torch._functorch import config

        patched: contextlib.AbstractContextManager[Any] = config.patch(
            enable_activation_offloading=True,
            activation_offload_separate_stream=True,
            activation_offload_sink_wait=False,  # the scheduler places waits and copies
            activation_reload_prefetch=False,
        )
    return patched
