"""Dataclasses as the code that makes them, for their ``repr``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch.nn as nn


def code_of_fields(value: Any, name: str = "") -> str:
    """Write a dataclass as a call of ``name``, or of its class.

    Fields without a default come by position. Others come by name if they differ from it.
    """
    parts = []
    for f in dataclasses.fields(value):
        default = f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        given = getattr(value, f.name)
        if f.init and f.repr and (default is dataclasses.MISSING or given != default):
            by_name = f.kw_only or default is not dataclasses.MISSING
            parts.append((f"{f.name}=" if by_name else "") + code_of(given))
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
