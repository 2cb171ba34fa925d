"""Name the process groups of a mesh as torch's entry does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def group_descs(mesh: DeviceMesh) -> list[str]:
    """List the ``group_desc`` of the process group of each dimension, for ``fsdp_group_filter``.

    The entry compares names exactly. A dimension of all ranks has the default group, whose
    ``group_desc`` is not ``"mesh_<dim>"``; one of a single rank has no collectives and is left out.
    """
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    return list(dict.fromkeys(group.group_desc for group in groups))
