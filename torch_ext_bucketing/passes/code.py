"""Passes as the code that makes them, for their ``repr``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["call", "code_of"]


def call(name: str, /, *given: Any, **options: Any) -> str:
    """``name(given, option=value)``. Options that are None are left out."""
    parts = [code_of(value) for value in given]
    parts += [f"{key}={code_of(value)}" for key, value in options.items() if value is not None]
    return f"{name}({', '.join(parts)})"


def code_of(value: Any) -> str:
    """A value as code: sequences as lists, dataclasses with what differs from their defaults."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {code_of(v)}' for k, v in value.items())}}}"
    params = getattr(value, "__dataclass_params__", None)
    if params is not None and params.repr and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.repr]
        changed = {f.name: getattr(value, f.name) for f in fields if not _is_default(value, f)}
        return call(type(value).__name__, **changed)
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(getattr(value, field.name) == default)
