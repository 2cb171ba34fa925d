"""c10d's groups and its default store: the one place that touches what is private of them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.compiler.config
import torch.distributed as dist
import torch.distributed.config
from torch.distributed.device_mesh import DeviceMesh

from .private import private_torch


def compiles_for_all_ranks() -> bool:
    """Whether what this rank compiles is to run on others, too: torch's ``compile_on_one_rank``."""
    # Of torch.distributed alone before 2.14.
    found = getattr(torch.compiler.config, "compile_on_one_rank", None)
    return bool(torch.distributed.config.compile_on_one_rank if found is None else found)


def group_places() -> tuple[tuple[str, int, int], ...]:
    """The process groups that this rank knows, sorted: name, number of ranks, and this rank's place
    among them (-1: it has none). Where one rank compiles for all, names and places, which differ
    between ranks, are left out."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    with private_torch():
        from torch.distributed.distributed_c10d import _world

    for_all = compiles_for_all_ranks()
    return tuple(
        sorted(
            ("", group.size(), -1) if for_all else (name, group.size(), group.rank())
            for group, name in _world.pg_names.items()
        )
    )


def default_group() -> Any:
    """The default process group; None where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    with private_torch():
        return dist.distributed_c10d._get_default_group()


def default_store() -> Any:
    """The store through which the ranks of the default group found each other."""
    with private_torch():
        return dist.distributed_c10d._get_default_store()


MeshGroup: TypeAlias = str | tuple[DeviceMesh, int]
"""A process group by name; or a mesh and a dimension, for graphs that ask when they run."""


def mesh_group(mesh: DeviceMesh, dim: int) -> MeshGroup:
    """A mesh dimension's process group: not by name where others that run this have another."""
    name: str = mesh.get_group(dim).group_name
    shared = not compiles_for_all_ranks() or name == default_group().group_name
    return name if shared else (mesh, dim)


def as_argument(group: MeshGroup) -> Any:
    """What functional collectives take for a process group."""
    if isinstance(group, str):
        return group
    return torch.ops._dtensor.mesh_get_process_group(*group)


def group_by_name(name: str) -> Any:
    """The process group of that name, as collectives in a graph call it."""
    with private_torch():
        return dist.distributed_c10d._resolve_process_group(name)


def has_peers(group: Any) -> bool:
    """Whether there are other ranks in ``group``, each in a process of its own."""
    # "fake" has no other ranks, and the ranks of "threaded" are threads of this process.
    return group.size() > 1 and dist.get_backend(group) not in ("fake", "threaded")


def new_groups(rows: Sequence[Sequence[int]], backend: str) -> Any:
    """Create a group of each row of the default group's ranks; returns this rank's."""
    mine = None
    for row in rows:
        group = dist.new_group(list(row), backend=backend)
        if dist.get_rank() in row:
            mine = group
    assert mine is not None
    return mine


def ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks in a group, or in that of a name, by their default group's numbers, ascending."""
    if isinstance(group, str):
        group = group_by_name(group)
    return tuple(sorted(dist.get_process_group_ranks(group)))


def group_timeout(group: Any) -> timedelta:
    """How long a collective of ``group`` may take before it fails, as the group was made; c10d's
    default for its backend where the backend does not tell."""
    with private_torch():
        for device in group._device_types:
            options = getattr(group._get_backend(device), "options", None)
            timeout = getattr(options, "_timeout", None)
            if isinstance(timeout, timedelta):
                return timeout
        c10d = dist.distributed_c10d
        return c10d._get_default_timeout(dist.get_backend(group))  # type: ignore[no-any-return]


def is_inside(ranks: Sequence[int], shards: Sequence[int]) -> bool:
    """True for a group, ranks ascending, that is an inner dimension of the grid that the shards'
    group is a dimension of.

    Replicas are outside of the shards in a mesh, tensor parallelism is inside, and its partial
    gradients (of a norm under sequence parallelism) are added up first, in eager FSDP2 as well::

        shards {0, 2} {1, 3}    inside {0, 1} {2, 3}    all-reduce, then reduce-scatter
        shards {0, 1} {2, 3}    outside {0, 2} {1, 3}   reduce-scatter, then all-reduce
    """
    return len(ranks) > 1 and len(shards) > 1 and ranks[1] - ranks[0] < shards[1] - shards[0]
