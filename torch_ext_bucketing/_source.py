"""Digest source code, for cache keys.

A key made from settings alone would still hit after the code has changed. Upstream hashes the files
of a custom pass (``torch._inductor.custom_graph_pass.get_hash_for_files``). This hashes modules by
name, which works for a package in a zip file, too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import importlib.util
import sys
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path

_NO_SOURCE = (
    "the source of module {!r} can't be read, so no stable uuid can be made of it: install the "
    "package with its .py files"
)


@functools.cache
def source_digest(*module_names: str) -> str:
    """Hash the sources of the named modules with SHA-256, in hex, importing only their parents."""
    digest = hashlib.sha256()
    for name in module_names:
        source = _source_of(name)
        if source is None:
            raise RuntimeError(_NO_SOURCE.format(name))
        digest.update(f"{name}\0{len(source)}\0{source}".encode())
    return digest.hexdigest()


def package_digest() -> str:
    """Return the digest of this package, as it was when this module was imported."""
    if not _PACKAGE:
        raise RuntimeError(_NO_SOURCE.format(__package__))
    return _PACKAGE


def _sources(folder: Traversable, apart: tuple[str, ...] = (), path: str = "") -> Iterator[str]:
    """Yield paths and sources of the modules in a folder and its subfolders, without ``apart``."""
    for item in sorted(folder.iterdir(), key=lambda item: item.name):
        if item.is_dir() and item.name not in apart:
            yield from _sources(item, path=f"{path}{item.name}/")
        elif item.name.endswith(".py"):
            yield from (path + item.name, item.read_text(encoding="utf-8"))


_noted: dict[str, str] = {}


def note_sources(cls: type) -> dict[str, str]:
    """Map the modules that define a class and its bases to digests of their sources.

    The digest is empty if the source can't be read. Modules of this package and of torch are left
    out: :func:`package_digest` and Inductor's own keys cover them.
    """
    # A digest is taken once, when a class is made: later the file may not be what runs.
    modules = dict.fromkeys(c.__module__ for c in cls.__mro__)
    excluded = ("builtins", "abc", "typing", "collections", "torch", __package__)
    names = [name for name in modules if name.partition(".")[0] not in excluded]
    for name in names:
        if name not in _noted:
            try:
                _noted[name] = source_digest(name)
            except RuntimeError:
                _noted[name] = ""
    return {name: _noted[name] for name in names}


def _source_of(name: str) -> str | None:
    """Return the source of a module by name; None if it has no file."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and spec is None:  # a script: it has a file, and no spec
        try:
            return Path(module.__file__).read_text(encoding="utf-8")  # type: ignore
        except (AttributeError, OSError, TypeError, UnicodeDecodeError):
            return None
    try:
        spec = spec or importlib.util.find_spec(name)
        get_source = getattr(spec and spec.loader, "get_source", None)
        return None if spec is None or get_source is None else get_source(spec.name)
    except (ImportError, OSError, ValueError):
        return None


_package = "\0".join(_sources(importlib.resources.files(__package__), apart=("hooks", "testing")))
_PACKAGE = hashlib.sha256(_package.encode()).hexdigest() if _package else ""
