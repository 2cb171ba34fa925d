"""Compiled code of patched sources, kept for later processes as Python keeps that of files.

A module's ``.pyc`` belongs to the file on disk, which is the original. So this keeps the code among
this package's own byte code: in its ``__pycache__``, or where ``PYTHONPYCACHEPREFIX`` says, and
nowhere under ``PYTHONDONTWRITEBYTECODE``. For each module there is one file, whose name is made of
the file name of the code and of what the code depends on in Python::

    SHA-256 of the source | SHA-256 of that and of the rest | marshalled code

It is written whole or not at all, and what can't be written, read or is not of the source at hand
is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import marshal
import os
import sys
from pathlib import Path
from types import CodeType

_SIZE = hashlib.sha256().digest_size


def compile_cached(source: bytes, filename: str) -> CodeType:
    """``compile(source, filename, "exec")``, or its result from an earlier process.

    Raises:
        SyntaxError, ValueError: as of ``compile``.
    """
    path = _path_of(filename)
    code = None if path is None else _read(path, source)
    if code is None:
        code = compile(source, filename, "exec", dont_inherit=True)
        if path is not None and not sys.dont_write_bytecode:
            _write(path, source, code)
    return code


def _path_of(filename: str) -> Path | None:
    try:
        own = Path(importlib.util.cache_from_source(__file__))
    except NotImplementedError:  # a Python that keeps no byte code
        return None
    python = f"{importlib.util.MAGIC_NUMBER!r} {sys.flags.optimize}"
    digest = hashlib.sha256(f"{python}\0{filename}".encode()).hexdigest()
    return own.with_name(f"patched-{digest[:16]}.pyc")


def _read(path: Path, source: bytes) -> CodeType | None:
    try:
        data = path.read_bytes()
        if data[: 2 * _SIZE] != _head(source, data[2 * _SIZE :]):
            return None
        code = marshal.loads(data[2 * _SIZE :])
    except (OSError, ValueError, EOFError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


def _head(source: bytes, data: bytes) -> bytes:
    digest = hashlib.sha256(source).digest()
    return digest + hashlib.sha256(digest + data).digest()


def _write(path: Path, source: bytes, code: CodeType) -> None:
    data = marshal.dumps(code)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(_head(source, data) + data)
        os.replace(partial, path)
    except OSError:  # read-only, full: nothing here is worth an import
        with contextlib.suppress(OSError):
            partial.unlink()
