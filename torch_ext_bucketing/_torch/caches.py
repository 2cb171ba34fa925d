"""Inductor's caches: what has to be so before they are asked, and what makes their keys hold.

A graph that reads a DTensor has its device mesh as an input, and torch pickles the mesh, all of
its fields, into the key of the graph. One of them is the mesh's Python hash, which is kept there
once it was asked for. It is made of strings, so each process has another one
(``PYTHONHASHSEED``), and no later start finds what an earlier one left::

    DeviceMesh._hash -> pickle -> key           5c1... in one process, 08e... in the next
"""

from __future__ import annotations

import functools
import logging
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = [
    "before_key",
    "keep_beside",
    "name_file_in_errors",
    "read_beside",
    "tell_ready_graphs",
]

_log = logging.getLogger(__name__)


def before_key() -> None:
    """To be called by every ``uuid()``, which is what torch asks for before it makes a key."""
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

    DeviceMesh.__getstate__ = without_hash  # type: ignore[method-assign]


def tell_ready_graphs() -> None:
    """Let every graph that Inductor has compiled, or loaded from a cache, be told to the passes
    which are set for it: ``graph_ready(key)``, where they have that method.

    From now on, in this process. The key is that of the graph's entry in the FX graph cache; None
    where the caches are bypassed. torch calls ``CompiledFxGraph.post_compile`` for all of them,
    under the config of their compile, also where AOTAutograd's cache had a whole step.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    post_compile = CompiledFxGraph.post_compile
    if hasattr(post_compile, "__wrapped__"):
        return

    @functools.wraps(post_compile)
    def and_tell(self: CompiledFxGraph, *args: Any, **kwargs: Any) -> None:
        post_compile(self, *args, **kwargs)
        for one in _each(config.post_grad_custom_post_pass):
            if hasattr(one, "graph_ready"):
                one.graph_ready(self._fx_graph_cache_key)

    CompiledFxGraph.post_compile = and_tell  # type: ignore[method-assign]


def name_file_in_errors() -> None:
    """Let an error of writing into the cache folder say into which: what a write to a full file
    system raises names no file. From now on, in this process.

    Entries that can't be written torch logs and goes on; code, which it has to load, it can't.
    """
    from torch._inductor import codecache

    write = codecache.write_atomic
    if hasattr(write, "__wrapped__"):
        return

    @functools.wraps(write)
    def naming_the_file(path_: str, *args: Any, **kwargs: Any) -> None:
        try:
            write(path_, *args, **kwargs)
        except OSError as error:
            if error.filename is None:
                error.filename = str(path_)
            raise

    codecache.write_atomic = naming_the_file


def _each(passes: Any) -> Iterator[Any]:
    """The passes of a config entry: one, several, or some made into one."""
    if isinstance(passes, (list, tuple)):
        for one in passes:
            yield from _each(one)
    elif isinstance(getattr(passes, "passes", None), tuple):  # as compile_inductor does on 2.11
        yield from _each(passes.passes)
    else:
        yield passes


def keep_beside(key: str, value: object) -> None:
    """Keep a pickle of ``value`` in Inductor's cache folder, for the graph with this key. Where
    that fails (the folder is full, say, or read-only) it is logged, once, and no more is lost."""
    where = ""
    try:
        path = _path_of(key)
        where = f" in {path.parent}"
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process may be killed while it writes, and others write the same.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with os.fdopen(handle, "wb") as file:
                pickle.dump(value, file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except Exception as error:  # nothing here is worth a compile
        _log_once(f"no report is kept for later starts{where}: {error}")


def read_beside(key: str) -> Any:
    """What :func:`keep_beside` kept for this key; None where there is nothing, or nothing whole."""
    try:
        return pickle.loads(_path_of(key).read_bytes())
    except Exception:  # as of Inductor's own entries: what can't be read is not there
        return None


def _path_of(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "torch_ext_bucketing" / key


@functools.cache
def _log_once(text: str) -> None:
    _log.warning(text)
