"""Inductor's caches: what has to be so before they are asked, and what makes their keys hold.

A graph that reads a DTensor has its device mesh as an input, and torch pickles the mesh, all of
its fields, into the key of the graph. One of them is the mesh's Python hash, which is kept there
once it was asked for. It is made of strings, so each process has another one
(``PYTHONHASHSEED``), and no later start finds what an earlier one left::

    DeviceMesh._hash -> pickle -> key           5c1... in one process, 08e... in the next
"""

from __future__ import annotations

import functools
from typing import Any

from .bucketing import register_ops

__all__ = ["before_key"]


def before_key() -> None:
    """To be called by every ``uuid()``, which is what torch asks for before it makes a key."""
    register_ops()
    _keep_hashes_out()


def _keep_hashes_out() -> None:
    """Let meshes be pickled without their hash, from now on, in this process.

    What else a mesh has stays in the key: its ranks, layout, names, groups, and the rank of this
    process in it. A mesh that is unpickled makes its hash anew, as it must: the one of another
    process differs from those of equal meshes here.
    """
    from torch.distributed.device_mesh import DeviceMesh

    getstate = DeviceMesh.__dict__.get("__getstate__")
    if getstate is None or hasattr(getstate, "__wrapped__"):  # torch 2.11 pickles no mesh
        return

    @functools.wraps(getstate)
    def without_hash(self: Any) -> dict[str, Any]:
        return {**getstate(self), "_hash": None}

    DeviceMesh.__getstate__ = without_hash
