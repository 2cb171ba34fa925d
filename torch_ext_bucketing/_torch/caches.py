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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .private import private_torch
from .process_groups import compiles_for_all_ranks

_SAID = "_torch_ext_bucketing"  # what passes say of a compiled graph, its attribute


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
    """While this lasts, what the passes that are set say of a graph which Inductor compiles stays
    with the compiled graph, in every cache and saved artifact that it gets into: passes with
    ``graph_compiled()`` and ``graph_ready()`` are asked for it by the one when the graph is made,
    and told it by the other when the graph, compiled now or loaded, is about to be used.

    torch calls ``CompiledFxGraph.post_compile`` for all of them, under the config of their compile,
    also where AOTAutograd's cache had a whole step.

    And an error of writing into the cache folder says into which: what a write to a full file
    system raises names no file. Entries that can't be written torch logs and goes on; code, which
    it has to load, it can't.

    And where one rank compiles for all, its graphs have the keys of the others'.
    """
    with private_torch():
        from torch._inductor import codecache, config
        from torch._inductor.output_code import CompiledFxGraph

    if hasattr(CompiledFxGraph.post_compile, "__wrapped__"):  # one compile within another
        yield
        return

    def ours() -> list[Any]:
        each = _each(config.post_grad_custom_post_pass)
        return [one for one in each if hasattr(one, "graph_ready")]

    def and_ask(init: _Function, self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        setattr(self, _SAID, [one.graph_compiled() for one in ours()])

    def and_tell(post_compile: _Function, self: Any, *args: Any, **kwargs: Any) -> None:
        post_compile(self, *args, **kwargs)
        for one, said in zip(ours(), getattr(self, _SAID, ()), strict=False):
            one.graph_ready(said)

    def naming_the_file(write: _Function, path_: str, *args: Any, **kwargs: Any) -> None:
        try:
            write(path_, *args, **kwargs)
        except OSError as error:
            if error.filename is None:
                error.filename = str(path_)
            raise

    with contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(CompiledFxGraph, "__init__", and_ask))
        stack.enter_context(_wrapped(CompiledFxGraph, "post_compile", and_tell))
        stack.enter_context(_wrapped(codecache, "write_atomic", naming_the_file))
        if compiles_for_all_ranks() and hasattr(DeviceMesh, "_compute_coordinate_on_dim"):
            stack.enter_context(_wrapped(DeviceMesh, "__getstate__", _of_no_rank))
            stack.enter_context(_wrapped(DeviceMesh, "__setstate__", _of_this_rank))
        yield


_Function = Callable[..., Any]


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, wrapper: _Function) -> Iterator[None]:
    """While this lasts, ``owner.name`` is ``wrapper``, which gets what was there first."""
    was = vars(owner)[name]

    @functools.wraps(was)
    def now(*args: Any, **kwargs: Any) -> Any:
        return wrapper(was, *args, **kwargs)

    setattr(owner, name, now)
    try:
        yield
    finally:
        setattr(owner, name, was)


def _of_no_rank(getstate: _Function, mesh: DeviceMesh) -> dict[str, Any]:
    """What is pickled of a mesh into the key of a graph that one rank compiles for all. A mesh of
    several dimensions has other groups on other ranks, and keeps its place in the key."""
    state: dict[str, Any] = getstate(mesh)
    own = () if mesh.ndim > 1 else ("_rank", "_coordinate_on_dim")
    return {name: value for name, value in state.items() if name not in own}


def _of_this_rank(setstate: _Function, mesh: DeviceMesh, state: dict[str, Any]) -> None:
    """A mesh out of such a graph's entry has this rank's place, not that of who compiled it."""
    setstate(mesh, state)
    mesh._rank = torch.distributed.get_rank()
    mesh._coordinate_on_dim = mesh._compute_coordinate_on_dim()


def _each(passes: Any) -> Iterator[Any]:
    """The passes of a config entry: one, several, or some made into one."""
    if isinstance(passes, (list, tuple)):
        for one in passes:
            yield from _each(one)
    elif isinstance(getattr(passes, "passes", None), tuple):  # as compile_inductor does on 2.11
        yield from _each(passes.passes)
    else:
        yield passes
