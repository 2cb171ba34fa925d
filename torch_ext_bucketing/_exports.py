"""Export names lazily, so that importing a package imports only the names in use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_exports(
    package: str, home: Mapping[str, str], modules: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``; ``home`` has each name's relative module."""

    def get(name: str) -> Any:
        if name in modules:
            return importlib.import_module(f".{name}", package)
        module = home.get(name)
        if module is not None:
            return getattr(importlib.import_module(f".{module}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get
