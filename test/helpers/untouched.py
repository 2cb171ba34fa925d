"""List what of torch this package serves, replaces or wraps in this process."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch_ext_bucketing

_PACKAGE = torch_ext_bucketing.__name__
_FOLDERS = tuple(torch_ext_bucketing.__path__)


def touched_torch() -> list[str]:
    """List what of the loaded torch comes from this package, sorted."""
    found = [f"the finder {finder!r}" for finder in sys.meta_path if _is_from_here(finder)]
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None:
            continue
        if _is_from_here(getattr(getattr(module, "__spec__", None), "loader", None)):
            found.append(f"module {name}")
        values = dict(vars(module))
        for attribute, value in vars(module).copy().items():
            if issubclass(type(value), type) and value.__module__ == name:
                values |= {f"{attribute}.{member}": v for member, v in vars(value).copy().items()}
        found += [f"{name}.{attribute}" for attribute, v in values.items() if _is_ours(v)]
    return sorted(found)


def _is_from_here(value: Any) -> bool:
    module = value.__module__ if isinstance(value, type) else type(value).__module__
    return module.partition(".")[0] == _PACKAGE


def _is_ours(value: Any) -> bool:
    """Return whether the code of a function, method or property lies in this package's folder."""
    kind = type(value)  # isinstance() makes some of torch's objects warn
    if issubclass(kind, property):
        return any(map(_is_ours, (value.fget, value.fset, value.fdel)))
    if issubclass(kind, (staticmethod, classmethod)):
        return _is_ours(value.__func__)
    code = value.__code__.co_filename if issubclass(kind, FunctionType) else ""
    return code.startswith(_FOLDERS)
