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
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .private import private_torch
from .process_groups import compiles_for_all_ranks
from .sharded import mesh_of

log = logging.getLogger("torch_ext_bucketing")

_SAID = "_torch_ext_bucketing"  # what passes say of a compiled graph, its attribute
_STAYS = "_torch_ext_bucketing_stays"
_OF_A_RANK = ("_rank", "_coordinate_on_dim", "_dim_group_names")
"""What a mesh has on one rank and not on the others; torch compares no meshes by it."""


def meshes_in(values: Iterable[Any]) -> list[DeviceMesh]:
    """The device meshes among ``values``, of the tensors among them, and those that they hold."""
    found: dict[int, DeviceMesh] = {}
    given = [mesh_of(value) or value for value in values]
    stack = [value for value in given if isinstance(value, DeviceMesh)]
    while stack:
        mesh = stack.pop()
        if id(mesh) not in found:
            found[id(mesh)] = mesh
            for held in vars(mesh).values():
                several = held.values() if isinstance(held, dict) else (held,)
                stack += [one for one in several if isinstance(one, DeviceMesh)]
    return list(found.values())


def forget_mesh_hashes(meshes: Iterable[DeviceMesh]) -> None:
    """Let meshes make their Python hash anew when they are asked for it: a pickle, and so a key,
    leaves it out, and nothing else."""
    for mesh in meshes:
        if getattr(mesh, "_hash", None) is not None:
            mesh._hash = None


@contextlib.contextmanager
def watched_caches(meshes: Iterable[DeviceMesh] = ()) -> Iterator[None]:
    """While this lasts, what the passes that are set say of a graph which Inductor compiles stays
    with the compiled graph, in every cache and saved artifact that it gets into: passes with
    ``graph_compiled()`` and ``graph_ready()`` are asked for it by the one when the graph is made,
    and told it by the other when the graph, compiled now or loaded, is about to be used. torch
    calls ``CompiledFxGraph.post_compile`` for all of them, under the config of their compile, also
    where AOTAutograd's cache had a whole step.

    An error of writing into the cache folder says into which: a full file system's names no file.
    And where one rank compiles for all, its graphs, whose inputs have ``meshes``, have the keys of
    the others'; see :class:`_Meshes`.
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
        if known.place_read:
            log.warning(
                "No cache keeps a graph that is compiled for all ranks: %s", known.place_read
            )
            setattr(self, _STAYS, _NotPickled(known.place_read))

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

    known = _Meshes(meshes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(CompiledFxGraph, "__init__", and_ask))
        stack.enter_context(_wrapped(CompiledFxGraph, "post_compile", and_tell))
        stack.enter_context(_wrapped(codecache, "write_atomic", naming_the_file))
        if compiles_for_all_ranks() and hasattr(DeviceMesh, "_compute_coordinate_on_dim"):
            for name, wrapper in (
                ("__getstate__", known.of_no_rank),
                ("__setstate__", known.of_this_rank),
                ("get_local_rank", known.read_place),
                ("get_coordinate", known.read_coordinate),
            ):
                stack.enter_context(_wrapped(DeviceMesh, name, wrapper))
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


class _Meshes:
    """How meshes are pickled where one rank compiles for all: into keys and entries goes what they
    have on every rank, and what comes out of an entry has what its equal has on this rank, its
    place and the names of its process groups::

        rank 0   mesh 2x2, groups 1 and 3, at (0, 0) -> mesh 2x2 -> key, entry
        rank 3   entry -> mesh 2x2 -> mesh 2x2, groups 2 and 4, at (1, 1)

    Such a graph asks for places and groups when it runs. Whatever asks a mesh for this rank's place
    while the graph is made, which ``place_read`` then says, has it as a constant in there: no cache
    may keep that. A mesh that is pickled is known, too: a key is made before its entry is read.
    """

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        self._known = list(meshes)
        self.place_read = ""

    def of_no_rank(self, getstate: _Function, mesh: DeviceMesh) -> dict[str, Any]:
        self._known.append(mesh)
        state: dict[str, Any] = getstate(mesh)
        return {name: value for name, value in state.items() if name not in _OF_A_RANK}

    def of_this_rank(self, setstate: _Function, mesh: DeviceMesh, state: dict[str, Any]) -> None:
        setstate(mesh, state)
        own = next((known for known in self._known if known == mesh), None)
        if own is None:  # torch compiles where an entry can't be loaded
            raise RuntimeError(f"an entry of a cache has {mesh}, and its graph here has none such")
        of_rank = {name: vars(own)[name] for name in _OF_A_RANK if name in vars(own)}
        setstate(mesh, state | of_rank)

    def read_place(self, get: _Function, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        self.place_read = f"its code has the place of this rank in {mesh}"
        return get(mesh, *args, **kwargs)

    def read_coordinate(self, get: _Function, mesh: DeviceMesh) -> Any:
        """Most look only whether the rank is in the mesh."""
        place = get(mesh)
        return None if place is None else _Coordinate(place, lambda: self.read_place(get, mesh))


class _Coordinate(tuple[int, ...]):
    """The place of a rank in a mesh, which says when a number is taken out of it."""

    _taken: Callable[[], Any]

    def __new__(cls, place: tuple[int, ...], taken: Callable[[], Any]) -> _Coordinate:
        found = super().__new__(cls, place)
        found._taken = taken
        return found

    def __getitem__(self, at: Any) -> Any:
        self._taken()
        return super().__getitem__(at)

    def __iter__(self) -> Iterator[int]:
        self._taken()
        return super().__iter__()


class _NotPickled:
    """What keeps a compiled graph out of all caches, and says why."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(self.why)


def _each(passes: Any) -> Iterator[Any]:
    """The passes of a config entry: one, several, or some made into one."""
    if isinstance(passes, (list, tuple)):
        for one in passes:
            yield from _each(one)
    elif isinstance(getattr(passes, "passes", None), tuple):  # as compile_inductor does on 2.11
        yield from _each(passes.passes)
    else:
        yield passes
