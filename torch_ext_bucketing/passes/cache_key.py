"""The part of a pass in the keys of Inductor's caches: its code, its settings, its process.

Two passes with one key must do the same to a graph, in any process. Where that can't be promised
there is no key, and the caches are bypassed: a plain function's name says nothing of what it does,
nor does the ``repr`` of an object of unknown make.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from .._source import note_sources, package_digest
from .._torch.process_groups import group_places
from ..errors import NoUuidError

log = logging.getLogger(__name__)

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def digest(*parts: str) -> str:
    """SHA-256 (hex) of some strings."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def describe(value: Any) -> Any:
    """Something with a ``repr`` that is equal in every process for equal behaviour. Takes plain
    values, containers and dataclasses of them, and objects with a ``uuid()``, and raises for
    anything else."""
    if isinstance(value, type):
        raise NoUuidError(f"{value!r} is a class, whose name says nothing of what it does")
    if callable(getattr(value, "uuid", None)):
        uuid = value.uuid()
        if not uuid:
            raise NoUuidError(f"{_name(value)}.uuid() returned {uuid!r}")
        return ("uuid", repr(uuid))
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(describe, value))
    if isinstance(value, AbstractSet):
        return ("set", *sorted(repr(describe(v)) for v in value))
    if isinstance(value, Mapping):
        return ("mapping", *sorted(repr((describe(k), describe(v))) for k, v in value.items()))
    if callable(value):
        raise NoUuidError(
            f"{_name(value)} is a plain callable, whose name says nothing of what it does; "
            "give it a uuid() to be cached"
        )
    if dataclasses.is_dataclass(value):
        fields = ((f.name, describe(getattr(value, f.name))) for f in dataclasses.fields(value))
        return (_name(value), *sources_of(type(value)), *fields)
    raise NoUuidError(
        f"the {_name(value)} {value!r} is no plain value; give it a uuid() to be cached"
    )


def brief(value: Any) -> str:
    """A few letters that differ between values, in any process; of a plain callable its name."""
    try:
        return digest(repr(describe(value)))[:12]
    except NoUuidError:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = (f"{f.name}={brief(getattr(value, f.name))}" for f in dataclasses.fields(value))
            return digest(*parts)[:12]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"


def sources_of(cls: type) -> tuple[str, ...]:
    """Names and digests of the modules of a class and its bases, as :func:`.note_sources` found
    them; raises where the source of one can't be read, as of a notebook's."""
    sources = note_sources(cls)
    unknown = [name for name, digest in sources.items() if not digest]
    if unknown:
        raise NoUuidError(f"the source of {', '.join(unknown)}, which defines it, can't be read")
    return tuple(f"{name} {digest}" for name, digest in sources.items())


def _name(value: Any) -> str:
    code = getattr(value, "__code__", None)
    if code is not None:
        return f"{value.__qualname__} ({code.co_filename}:{code.co_firstlineno})"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def key_of(cls: type, settings: Callable[[], tuple[Any, ...]]) -> str | None:
    """The key of a pass of a class with these settings; None, which is logged, where there is
    none."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        described = repr(describe(settings()))
        sources = sources_of(cls)
    except NoUuidError as error:
        log_no_uuid(name, error)
        return None
    # Byte caps and costs depend on sizes of groups, and an all-reduce's is not in the graph.
    # A merged gather writes this rank's shards to its own place in the buffer, a constant.
    # A place known at run time would take as long in a step (benchmarks/README.md), but where
    # a mesh is an input torch's own keys have the rank, too, and no entry would be shared.
    # What one rank compiles for all has none.
    return digest(name, package_digest(), *sources, described, repr(group_places()))


_said: dict[str, None] = {}


def log_no_uuid(what: str, error: NoUuidError) -> None:
    """Say, once for each reason, why graphs are not cached. Inductor's own log says only that a
    pass is unsupported."""
    text = f"Inductor's graph caches are bypassed for {what}: {error}"
    if text not in _said:
        _said[text] = None
        log.warning(text)
