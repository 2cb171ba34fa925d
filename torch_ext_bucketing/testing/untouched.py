"""That torch is as it was installed: nothing of it served, replaced or wrapped by this package."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

from .. import __path__ as _PACKAGE


def touched_torch() -> list[str]:
    """What of the torch that this process has loaded comes from this package, sorted.

    A finder on ``sys.meta_path``; a module that such a finder has loaded; a function in a module or
    a class of torch's, a method or a property included, whose code lies in this package's folder.
    """
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
    return module.partition(".")[0] == __package__.partition(".")[0]


def _is_ours(value: Any) -> bool:
    """Whether a function, method or property, or what it wraps, is of this package's folder."""
    kind = type(value)  # isinstance() asks some of torch's objects, which then warn
    if issubclass(kind, property):
        return any(map(_is_ours, (value.fget, value.fset, value.fdel)))
    if issubclass(kind, (staticmethod, classmethod)):
        return _is_ours(value.__func__)
    code = value.__code__.co_filename if issubclass(kind, FunctionType) else ""
    return code.startswith(tuple(_PACKAGE))
