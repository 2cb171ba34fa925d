"""Describe dataclasses: as the code that makes them, and as keys of Inductor's caches.

Two passes with equal keys must do the same to a graph, in any process. Without that guarantee there
is not a key, and the caches are bypassed.
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
import torch.nn as nn

from .._source import note_sources, package_digest
from .._torch.process_groups import group_places
from ..errors import NoUuidError


def code_of_fields(value: Any, name: str = "") -> str:
    """Write a dataclass as a call of ``name``, or of its class, without defaults."""
    parts = []
    for f in dataclasses.fields(value):
        default = f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        field_value = getattr(value, f.name)
        if f.init and f.repr and (default is dataclasses.MISSING or field_value != default):
            by_name = f.kw_only or default is not dataclasses.MISSING
            parts.append((f"{f.name}=" if by_name else "") + code_of(field_value))
    return f"{name or type(value).__name__}({', '.join(parts)})"


def code_of(value: Any) -> str:
    """Write a value as code: sequences as lists, modules by the names of their classes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {code_of(v)}' for k, v in value.items())}}}"
    params = getattr(value, "__dataclass_params__", None)
    if params is not None and params.repr and not isinstance(value, type):
        return code_of_fields(value)
    if isinstance(value, nn.Module):
        value = type(value)
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)


log = logging.getLogger(__name__)

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def digest(*parts: str) -> str:
    """Hash some strings with SHA-256, in hex."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def describe(value: Any) -> Any:
    """Describe ``value`` by an object whose ``repr`` is equal in every process.

    A ``NoUuidError`` names a part that is neither a plain value, a container or dataclass of them,
    nor an object with a ``uuid()``.
    """
    if isinstance(value, type):
        raise NoUuidError(f"{value!r} is a class, whose name does not identify its code")
    if callable(getattr(value, "uuid", None)):
        uuid = value.uuid()
        if not uuid:
            raise NoUuidError(f"{_name(value)}.uuid() returned {uuid!r}")
        return ("uuid", repr(uuid))
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(describe, value))
    if isinstance(value, AbstractSet):  # its order differs between processes
        return ("set", *sorted(repr(describe(v)) for v in value))
    if isinstance(value, Mapping):
        return ("mapping", *sorted(repr((describe(k), describe(v))) for k, v in value.items()))
    if callable(value):
        raise NoUuidError(
            f"{_name(value)} is a plain callable, whose name does not identify its code; "
            "give it a uuid() to be cached"
        )
    if dataclasses.is_dataclass(value):
        fields = ((f.name, describe(getattr(value, f.name))) for f in dataclasses.fields(value))
        return (_name(value), *sources_of(type(value)), *fields)
    raise NoUuidError(
        f"the {_name(value)} {value!r} is not a plain value; give it a uuid() to be cached"
    )


def brief(value: Any) -> str:
    """Hash ``value`` to 12 letters; name a plain callable."""
    try:
        return digest(repr(describe(value)))[:12]
    except NoUuidError:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = (f"{f.name}={brief(getattr(value, f.name))}" for f in dataclasses.fields(value))
            return digest(*parts)[:12]
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"


def sources_of(cls: type) -> tuple[str, ...]:
    """List the modules of a class and its bases with their digests, see :func:`.note_sources`.

    A source that can't be read, as in a notebook, is a ``NoUuidError``.
    """
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
    """Make the key of a pass; log why if there is none, and return None."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    try:
        described = repr(describe(settings()))
        sources = sources_of(cls)
    except NoUuidError as error:
        log_no_uuid(name, error)
        return None
    # Byte caps and costs depend on the sizes of groups, and the graph lacks that of an all-reduce.
    # A merged gather copies this rank's shards to an offset that is a constant of the graph. An
    # offset from run time would cost nothing (benchmarks/README.md), but if a mesh is an input,
    # torch's own keys have the rank, so no entry would be shared. Graphs that one rank compiles for
    # all have no such constant.
    return digest(name, package_digest(), *sources, described, repr(group_places()))


_logged: dict[str, None] = {}


def log_no_uuid(uncached: str, error: NoUuidError) -> None:
    """Log once per reason why graphs are not cached."""
    # Inductor's own log has only that a pass is unsupported.
    text = f"Inductor's graph caches are bypassed for {uncached}: {error}"
    if text not in _logged:
        _logged[text] = None
        log.warning(text)
