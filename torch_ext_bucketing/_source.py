"""Digests of source code, for the ``uuid()`` of objects that Inductor keys its caches by.

A cache key made of a hook's fields alone goes on hitting after the hook's code was changed.
Upstream answers this by hashing the files of a custom pass
(``torch._inductor.custom_graph_pass.get_hash_for_files``); this does the same by module name, so
that it works for a package in a zip file, too.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import pkgutil
import sys
from pathlib import Path


@functools.cache
def source_digest(*module_names: str) -> str:
    """SHA-256 (hex) over the sources of the named modules, none of which is imported for it but its
    parents.

    Raises:
        RuntimeError: the source of a module can't be found: no uuid without it would be safe.
    """
    digest = hashlib.sha256()
    for name in module_names:
        source = _source_of(name)
        if source is None:
            raise RuntimeError(
                f"the source of module {name!r} can't be read, so no stable uuid can be made of "
                "it: "
                "install the package with its .py files"
            )
        digest.update(f"{name}\0{len(source)}\0{source}".encode())
    return digest.hexdigest()


def package_digest() -> str:
    """The digest of all modules of this package, in every folder but ``hooks`` (which no pass of
    this package needs) and ``testing``, which no graph goes through.

    It is that of the sources as they were when this module was imported: an edit while a process
    runs changes what is on disk, not what runs.

    Raises:
        RuntimeError: as of :func:`source_digest`.
    """
    if isinstance(_PACKAGE, RuntimeError):
        raise _PACKAGE
    return _PACKAGE


def package_modules() -> list[str]:
    """Names of the modules that :func:`package_digest` covers, sorted. None is imported for it."""
    root = __package__
    names, folders = [root], [(root, sys.modules[root].__path__)]
    while folders:
        folder, path = folders.pop()
        for module in pkgutil.iter_modules(path, f"{folder}."):
            if module.name in (f"{root}.hooks", f"{root}.testing"):
                continue
            names.append(module.name)
            if module.ispkg:
                inside = [str(Path(p) / module.name.rpartition(".")[2]) for p in path]
                folders.append((module.name, inside))
    return sorted(names)


_noted: dict[str, str] = {}


def note_sources(cls: type) -> None:
    """Note the sources of a class and its bases, those of this package and of torch excepted.

    To be called when a class is made: what is on disk later may not be what runs.
    """
    for name in modules_of(cls):
        if name not in _noted:
            try:
                _noted[name] = source_digest(name)
            except RuntimeError:
                _noted[name] = ""


def noted_sources(cls: type) -> dict[str, str]:
    """The modules of a class and its bases, each with the digest of its source when
    :func:`note_sources` met it first; an empty one where the source can't be read."""
    note_sources(cls)
    return {name: _noted[name] for name in modules_of(cls)}


def modules_of(cls: type) -> list[str]:
    """The modules that define a class and its bases, but for those that have a digest of their own:
    this package, and torch, which Inductor's keys name."""
    modules = dict.fromkeys(c.__module__ for c in cls.__mro__)
    known = ("builtins", "abc", "typing", "collections", "torch", __package__)
    return [name for name in modules if name.partition(".")[0] not in known]


def _source_of(name: str) -> str | None:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and spec is None:  # a script, which has a file only
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


def _package() -> str | RuntimeError:
    try:
        return source_digest(*package_modules())
    except RuntimeError as error:
        return error


_PACKAGE = _package()
