"""The smaller group of ``ReshardAfterForward(to=...)``."""

from __future__ import annotations

import warnings

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.process_groups import default_group, new_groups, ranks_of
from ..rewrites.reshard_to import SmallerGroup

__all__ = ["make_smaller_group"]


def make_smaller_group(to: DeviceMesh | int) -> SmallerGroup | None:
    """The group in which backward gathers; None for one rank, which keeps parameters gathered.

    A number means the ranks of the job in runs of so many: groups are created, by all ranks
    together. A mesh has them.

    Raises:
        TypeError: ``to`` is no mesh and no number.
        ValueError: a number that does not divide the ranks of the job, or without a process group.
    """
    if isinstance(to, DeviceMesh):
        size = to.size(to.ndim - 1)
    elif isinstance(to, int) and not isinstance(to, bool):
        size = to
    else:
        raise TypeError(f"to must be a number of ranks or a DeviceMesh, got {to!r}")
    if size == 1:
        warnings.warn(
            "to has a single rank: every rank keeps all parameters gathered until backward, as in "
            "eager FSDP2 with reshard_after_forward=1. Where that is wanted, leave this pass out; "
            "where they are to be freed, leave out to=",
            UserWarning,
            stacklevel=3,
        )
        return None
    group = to.get_group(to.ndim - 1) if isinstance(to, DeviceMesh) else _run_of_neighbours(size)
    return SmallerGroup(group.group_name, ranks_of(group), group.rank())


def _run_of_neighbours(size: int) -> dist.ProcessGroup:
    """This rank's group of those that divide the job; see :func:`make_smaller_group`."""
    if not dist.is_available() or not dist.is_initialized():
        raise ValueError(
            f"to={size} creates process groups: make this pass after init_process_group(), on "
            "every rank at the same point of the program"
        )
    world = dist.get_world_size()
    if size < 1 or world % size:
        raise ValueError(f"to must be a factor of the {world} ranks of the job, got {size}")
    if size == world:
        return default_group()  # type: ignore[no-any-return]
    rows = [range(first, first + size) for first in range(0, world, size)]
    return new_groups(rows, dist.get_backend())  # type: ignore[no-any-return]
