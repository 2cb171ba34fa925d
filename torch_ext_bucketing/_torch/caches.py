"""Inductor's caches: what has to be so before they are asked, and what makes their keys hold.

A graph that reads a DTensor has its device mesh as an input, and torch pickles the mesh, all of
its fields, into the key of the graph. One of them is the mesh's Python hash, which is kept there
once it was asked for. It is made of strings, so each process has another one
(``PYTHONHASHSEED``), and no later start finds what an earlier one left::

    DeviceMesh._hash -> pickle -> key           5c1... in one process, 08e... in the next
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .private import private_torch

_log = logging.getLogger(__name__)


def meshes_in(values: Iterable[Any]) -> list[DeviceMesh]:
    """The device meshes among ``values``, and those that they hold."""
    found: dict[int, DeviceMesh] = {}
    stack = [value for value in values if isinstance(value, DeviceMesh)]
    while stack:
        mesh = stack.pop()
        if id(mesh) not in found:
            found[id(mesh)] = mesh
            for held in vars(mesh).values():
                several = held.values() if isinstance(held, dict) else (held,)
                stack += [one for one in several if isinstance(one, DeviceMesh)]
    return list(found.values())


def forget_mesh_hashes(meshes: Iterable[DeviceMesh]) -> None:
    """Let meshes make their Python hash anew when they are asked for it: what pickles them into a
    key then leaves it out. What else a mesh has stays in the key: its ranks, layout, names, groups,
    and the rank of this process in it."""
    for mesh in meshes:
        if getattr(mesh, "_hash", None) is not None:
            mesh._hash = None


@contextlib.contextmanager
def watched_caches() -> Iterator[None]:
    """While this lasts, every graph that Inductor has compiled, or loaded from a cache, is told to
    the passes which are set for it: ``graph_ready(key)``, where they have that method.

    The key is that of the graph's entry in the FX graph cache; None where the caches are bypassed.
    torch calls ``CompiledFxGraph.post_compile`` for all of them, under the config of their compile,
    also where AOTAutograd's cache had a whole step.

    And an error of writing into the cache folder says into which: what a write to a full file
    system raises names no file. Entries that can't be written torch logs and goes on; code, which
    it has to load, it can't.
    """
    with private_torch():
        from torch._inductor import codecache, config
        from torch._inductor.output_code import CompiledFxGraph

        post_compile, write = CompiledFxGraph.post_compile, codecache.write_atomic
    if hasattr(post_compile, "__wrapped__"):  # one compile within another
        yield
        return

    @functools.wraps(post_compile)
    def and_tell(self: CompiledFxGraph, *args: Any, **kwargs: Any) -> None:
        post_compile(self, *args, **kwargs)
        for one in _each(config.post_grad_custom_post_pass):
            if hasattr(one, "graph_ready"):
                one.graph_ready(self._fx_graph_cache_key)

    @functools.wraps(write)
    def naming_the_file(path_: str, *args: Any, **kwargs: Any) -> None:
        try:
            write(path_, *args, **kwargs)
        except OSError as error:
            if error.filename is None:
                error.filename = str(path_)
            raise

    CompiledFxGraph.post_compile = and_tell  # type: ignore[method-assign]
    codecache.write_atomic = naming_the_file
    try:
        yield
    finally:
        CompiledFxGraph.post_compile = post_compile  # type: ignore[method-assign]
        codecache.write_atomic = write


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
    with private_torch():
        from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "torch_ext_bucketing" / key


@functools.cache
def _log_once(text: str) -> None:
    _log.warning(text)
