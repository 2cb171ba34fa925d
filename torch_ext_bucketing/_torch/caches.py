"""Attach reports to cached graphs, and keep the keys of Inductor's caches stable."""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from . import private_torch
from .fsdp2 import mesh_of
from .process_groups import compiles_for_all_ranks

log = logging.getLogger("torch_ext_bucketing")

# Attributes of a compiled graph: the passes' reports; an object that keeps it out of all caches.
_REPORTS = "_torch_ext_bucketing"
_UNCACHED = "_torch_ext_bucketing_stays"
# Fields of a mesh that differ between ranks. torch ignores them when it compares meshes.
_RANK_FIELDS = ("_rank", "_coordinate_on_dim", "_dim_group_names")


def meshes_in(values: Iterable[Any]) -> list[DeviceMesh]:
    """Return the meshes among ``values`` and their tensors, and the meshes that these hold."""
    meshes: dict[int, DeviceMesh] = {}
    meshes_or_values = [mesh_of(value) or value for value in values]
    stack = [value for value in meshes_or_values if isinstance(value, DeviceMesh)]
    while stack:
        mesh = stack.pop()
        if id(mesh) not in meshes:
            meshes[id(mesh)] = mesh
            for held in vars(mesh).values():
                several = held.values() if isinstance(held, dict) else (held,)
                stack += [value for value in several if isinstance(value, DeviceMesh)]
    return list(meshes.values())


def forget_mesh_hashes(meshes: Iterable[DeviceMesh]) -> None:
    """Clear the cached Python hash of meshes, which they compute again when needed."""
    # torch pickles a graph's meshes with all fields into its cache key. A hash of strings differs
    # between processes (PYTHONHASHSEED), so no later process would find the entry.
    for mesh in meshes:
        if getattr(mesh, "_hash", None) is not None:
            mesh._hash = None


@contextlib.contextmanager
def watched_caches(meshes: Iterable[DeviceMesh] = ()) -> Iterator[None]:
    """Attach our reports to each ``CompiledFxGraph``, so that a cache hit restores them.

    A pass with ``graph_compiled()`` returns its report when the graph is compiled, and its
    ``graph_ready()`` receives it before the graph, compiled or loaded, is used. torch calls
    ``CompiledFxGraph.post_compile`` on every such path, also after a hit in AOTAutograd's cache.
    ``meshes`` are those of the graph's inputs; see :class:`_Meshes`.
    """
    with private_torch():
        from torch._inductor import config
        from torch._inductor.output_code import CompiledFxGraph

    if hasattr(CompiledFxGraph.post_compile, "__wrapped__"):  # one compile within another
        yield
        return

    def passes_with_reports() -> list[Any]:
        passes = _flattened(config.post_grad_custom_post_pass)
        return [p for p in passes if hasattr(p, "graph_ready")]

    def init_with_reports(init: _Function, self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        # An attribute of the graph, so that caches store and load the report with it.
        setattr(self, _REPORTS, [p.graph_compiled() for p in passes_with_reports()])
        if tracked.place_read:
            log.warning(
                "No cache keeps a graph that is compiled for all ranks: %s", tracked.place_read
            )
            setattr(self, _UNCACHED, _NotPickled(tracked.place_read))

    def deliver_reports(post_compile: _Function, self: Any, *args: Any, **kwargs: Any) -> None:
        post_compile(self, *args, **kwargs)
        for p, report in zip(passes_with_reports(), getattr(self, _REPORTS, ()), strict=False):
            p.graph_ready(report)

    tracked = _Meshes(meshes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(CompiledFxGraph, "__init__", init_with_reports))
        stack.enter_context(_wrapped(CompiledFxGraph, "post_compile", deliver_reports))
        if compiles_for_all_ranks() and hasattr(DeviceMesh, "_compute_coordinate_on_dim"):
            for name, wrapper in (
                ("__getstate__", tracked.without_rank),
                ("__setstate__", tracked.with_this_rank),
                ("get_local_rank", tracked.read_place),
                ("get_coordinate", tracked.read_coordinate),
            ):
                stack.enter_context(_wrapped(DeviceMesh, name, wrapper))
        yield


_Function = Callable[..., Any]


@contextlib.contextmanager
def _wrapped(owner: Any, name: str, wrapper: _Function) -> Iterator[None]:
    """Replace ``owner.name`` by ``wrapper``, whose first argument is the original."""
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
    """Pickle meshes without their rank's fields, if one rank compiles for all.

    Keys and entries get the fields that all ranks share; loading adds this rank's own::

        rank 0   mesh 2x2, groups 1 and 3, at (0, 0) -> mesh 2x2 -> key, entry
        rank 3   entry -> mesh 2x2 -> mesh 2x2, groups 2 and 4, at (1, 1)

    ``place_read`` is not empty if the compiler read this rank's coordinate from a mesh. The graph
    then has it as a constant, and must not be cached.
    """

    def __init__(self, meshes: Iterable[DeviceMesh]) -> None:
        self._meshes = list(meshes)
        self.place_read = ""

    def without_rank(self, getstate: _Function, mesh: DeviceMesh) -> dict[str, Any]:
        self._meshes.append(mesh)  # a key is pickled before its entry is loaded
        state: dict[str, Any] = getstate(mesh)
        return {name: value for name, value in state.items() if name not in _RANK_FIELDS}

    def with_this_rank(self, setstate: _Function, mesh: DeviceMesh, state: dict[str, Any]) -> None:
        setstate(mesh, state)
        original = next((m for m in self._meshes if m == mesh), None)
        if original is None:  # torch compiles where an entry can't be loaded
            raise RuntimeError(f"a cache entry has {mesh}, which the graph here lacks")
        own_fields = {name: vars(original)[name] for name in _RANK_FIELDS if name in vars(original)}
        setstate(mesh, state | own_fields)

    def read_place(self, get: _Function, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
        self.place_read = f"its code has the place of this rank in {mesh}"
        return get(mesh, *args, **kwargs)

    def read_coordinate(self, get: _Function, mesh: DeviceMesh) -> Any:
        # Most callers only check whether the rank is in the mesh.
        place = get(mesh)
        return None if place is None else _Coordinate(place, lambda: self.read_place(get, mesh))


class _Coordinate(tuple[int, ...]):
    """A rank's coordinate in a mesh that reports when a number is read from it."""

    _when_read: Callable[[], Any]

    def __new__(cls, place: tuple[int, ...], when_read: Callable[[], Any]) -> _Coordinate:
        coordinate = super().__new__(cls, place)
        coordinate._when_read = when_read
        return coordinate

    def __getitem__(self, key: Any) -> Any:
        self._when_read()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[int]:
        self._when_read()
        return super().__iter__()


class _NotPickled:
    """Keep a compiled graph out of all caches, with the reason."""

    def __init__(self, why: str) -> None:
        self.why = why

    def __reduce__(self) -> Any:
        raise pickle.PicklingError(self.why)


def _flattened(passes: Any) -> Iterator[Any]:
    """Yield the passes of a config entry: one, several, or several joined into one."""
    if isinstance(passes, (list, tuple)):
        for entry in passes:
            yield from _flattened(entry)
    elif isinstance(getattr(passes, "passes", None), tuple):  # as compile_inductor does on 2.11
        yield from _flattened(passes.passes)
    else:
        yield passes
