"""That torch is as it was installed: nothing of it served, replaced or wrapped by this package."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from .. import __path__ as _PACKAGE


def require_untouched_torch() -> None:
    """Raise unless torch is as it was installed, see :func:`touched_torch`.

    Raises:
        RuntimeError: something of torch is this package's; the message lists what.
    """
    found = touched_torch()
    if found:
        raise RuntimeError(f"this package changed torch: {', '.join(found)}")


def touched_torch() -> list[str]:
    """What of the torch that this process has loaded comes from this package, sorted.

    A finder on ``sys.meta_path``; a module that such a finder has loaded; a function in a module or
    a class of torch's, a method or a property included, whose code lies in this package's folder.
    """
    package = __package__.partition(".")[0]
    found = [
        f"the finder {finder!r}"
        for finder in sys.meta_path
        if _module_of(finder).partition(".")[0] == package
    ]
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "torch" or module is None:
            continue
        loader = getattr(getattr(module, "__spec__", None), "loader", None)
        if _module_of(loader).partition(".")[0] == package:
            found.append(f"module {name}")
        for attribute, value in list(vars(module).items()):
            if _is_ours(value):
                found.append(f"{name}.{attribute}")
            if issubclass(type(value), type) and value.__module__ == name:
                found += [
                    f"{name}.{attribute}.{member}"
                    for member, inner in list(vars(value).items())
                    if _is_ours(inner)
                ]
    return sorted(found)


def _module_of(value: Any) -> str:
    return value.__module__ if isinstance(value, type) else type(value).__module__


def _is_ours(value: Any) -> bool:
    return any(code.co_filename.startswith(tuple(_PACKAGE)) for code in _codes(value))


def _codes(value: Any) -> Iterator[CodeType]:
    """The code of a function, method or property, and of what it wraps."""
    kind = type(value)  # isinstance() asks some of torch's objects, which then warn
    if issubclass(kind, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from _codes(part)
    elif issubclass(kind, (staticmethod, classmethod)):
        yield from _codes(value.__func__)
    elif issubclass(kind, FunctionType):
        yield value.__code__
