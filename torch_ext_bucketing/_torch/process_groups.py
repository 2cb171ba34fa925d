"""Read c10d's process groups and its default store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.compiler.config
import torch.distributed as dist
import torch.distributed.config
from torch.distributed.device_mesh import DeviceMesh

from . import private_torch


def compiles_for_all_ranks() -> bool:
    """Return torch's ``compile_on_one_rank``: whether other ranks run this rank's graphs."""
    # Only in torch.distributed before 2.14.
    on_one = getattr(torch.compiler.config, "compile_on_one_rank", None)
    return bool(torch.distributed.config.compile_on_one_rank if on_one is None else on_one)


def group_places() -> tuple[tuple[str, int, int], ...]:
    """Return name, size and this rank's place (-1 if outside) of all process groups, sorted."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    with private_torch():
        from torch.distributed.distributed_c10d import _world

    for_all = compiles_for_all_ranks()  # names and places differ between ranks
    return tuple(
        sorted(
            ("", group.size(), -1) if for_all else (name, group.size(), group.rank())
            for group, name in _world.pg_names.items()
        )
    )


def default_group() -> Any:
    """Return the default process group, or None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    with private_torch():
        return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """Return the store of the default process group."""
    with private_torch():
        return dist.distributed_c10d._get_default_store()


MeshGroup: TypeAlias = str | tuple[DeviceMesh, int]
"""A process group's name; or mesh and dimension, for graphs that look it up when they run."""


def mesh_group(mesh: DeviceMesh, dim: int) -> MeshGroup:
    """Return a mesh dimension's group, by name unless other ranks run this with another name."""
    name: str = mesh.get_group(dim).group_name
    shared = not compiles_for_all_ranks() or name == default_group().group_name
    return name if shared else (mesh, dim)


def as_argument(group: MeshGroup) -> Any:
    """Return the argument that functional collectives take for a process group."""
    if isinstance(group, str):
        return group
    return torch.ops._dtensor.mesh_get_process_group(*group)


def group_by_name(name: str) -> Any:
    """Return the process group with the name that collectives in a graph use."""
    with private_torch():
        return dist.distributed_c10d._resolve_process_group(name)


def has_peers(group: Any) -> bool:
    """Return whether ``group`` has other ranks, each in its own process."""
    # "fake" has no other ranks, and the ranks of "threaded" are threads of this process.
    return group.size() > 1 and dist.get_backend(group) not in ("fake", "threaded")


def new_groups(rows: Sequence[Sequence[int]], backend: str) -> Any:
    """Create a group of each row of the default group's ranks; return this rank's group."""
    own_group = None
    for row in rows:
        group = dist.new_group(list(row), backend=backend)
        if dist.get_rank() in row:
            own_group = group
    assert own_group is not None
    return own_group


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group or of a group's name, ascending."""
    if isinstance(group, str):
        group = group_by_name(group)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def group_timeout(group: Any) -> timedelta:
    """Return the timeout of a group's collectives; c10d's default if the backend has none."""
    with private_torch():
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            timeout = getattr(options, "_timeout", None)
            if isinstance(timeout, timedelta):
                return timeout
        c10d = dist.distributed_c10d
        return c10d._get_default_timeout(dist.get_backend(group))


def is_inside(ranks: Sequence[int], shards: Sequence[int]) -> bool:
    """Return whether a group, ranks ascending, is a mesh dimension inside the shards' dimension.

    Replicas are outside, tensor parallelism is inside::

        shards {0, 2} {1, 3}    inside {0, 1} {2, 3}    all-reduce, then reduce-scatter
        shards {0, 1} {2, 3}    outside {0, 2} {1, 3}   reduce-scatter, then all-reduce

    Eager FSDP2, too, first adds the partial gradients of tensor parallelism.
    """
    return len(ranks) > 1 and len(shards) > 1 and ranks[1] - ranks[0] < shards[1] - shards[0]
