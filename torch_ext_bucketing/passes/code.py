"""Passes as the code that makes them, for their ``repr``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.nn as nn


def code_of_fields(value: Any) -> str:
    """A dataclass as the call that makes it: fields without a default by position, and of the
    others those that differ from it, by name."""
    parts = []
    for f in dataclasses.fields(value):
        is_set = f.default is not dataclasses.MISSING
        default = f.default if is_set else dataclasses.MISSING
        if f.default_factory is not dataclasses.MISSING:
            is_set, default = True, f.default_factory()
        given = getattr(value, f.name)
        if f.init and f.repr and not (is_set and given == default):
            name = f"{f.name}=" if is_set or f.kw_only else ""
            parts.append(name + code_of(given))
    return f"{type(value).__name__}({', '.join(parts)})"


def code_of(value: Any) -> str:
    """A value as code: sequences as lists, dataclasses with what differs from their defaults,
    modules by the names of their classes."""
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
