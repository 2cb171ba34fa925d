"""Export names lazily, so that importing a package imports only what is used."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_exports(
    package: str,
    home: Mapping[str, str],
    modules: Collection[str] = (),
    renamed: Mapping[str, str] | None = None,
    stacklevel: int = 2,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    Args:
        package: name of the package.
        home: by exported name, the module that defines it, relative to ``package``.
        modules: exported modules of the package.
        renamed: by former name, the present one, relative to ``package``: ``"errors.SomeError"``.
            A former name still works, with a ``DeprecationWarning``.
        stacklevel: of that warning; 3 if the package's ``__getattr__`` calls the result.
    """
    renamed = renamed or {}

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f".{name}", package)
        module = home.get(name)
        if module is not None:
            return getattr(importlib.import_module(f".{module}", package), name)
        if name in renamed:
            new = renamed[name]
            text = f"{package}.{name} is {package}.{new} now; the former name goes in version 0.4"
            warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
            if new in home:
                return get(new)
            module, _, attribute = new.rpartition(".")
            return getattr(importlib.import_module(f".{module}", package), attribute)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
