"""Passes as the code that makes them, for their ``repr``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn as nn


def code_of_call(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """A call of ``function`` under that name with some of its arguments: those without a default
    by position, and of the others what differs from its default."""
    parts = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key not in arguments:
            continue
        if parameter.default is parameter.empty:
            parts.append(code_of(arguments[key]))
        elif arguments[key] != parameter.default:
            parts.append(f"{key}={code_of(arguments[key])}")
    return f"{name}({', '.join(parts)})"


def code_of(value: Any) -> str:
    """A value as code: sequences as lists, dataclasses with what differs from their defaults,
    modules by the names of their classes."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(code_of, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k!r}: {code_of(v)}' for k, v in value.items())}}}"
    params = getattr(value, "__dataclass_params__", None)
    if params is not None and params.repr and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.repr]
        changed = [f.name for f in fields if not _is_default(value, f)]
        parts = (f"{name}={code_of(getattr(value, name))}" for name in changed)
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, nn.Module):
        value = type(value)
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return str(value.__qualname__)
    return repr(value)


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return bool(getattr(value, field.name) == default)
