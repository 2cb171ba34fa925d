"""Byte code of patched sources, kept between processes."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path

import pytest

from torch_ext_bucketing.hooks import code_cache

pytestmark = pytest.mark.once


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path / "new" / "folder"))
    return tmp_path


@pytest.fixture
def compiled(monkeypatch) -> list[object]:
    """The sources that ``compile`` was called with."""
    calls: list[object] = []
    compile_ = builtins.compile

    def counting(source, *args, **kwargs):
        calls.append(source)
        return compile_(source, *args, **kwargs)

    monkeypatch.setattr(builtins, "compile", counting)
    return calls


def value(source: bytes) -> object:
    namespace: dict[str, object] = {}
    code = code_cache.compile_cached(source, "/torch/a.py<patched>")
    assert code.co_filename == "/torch/a.py<patched>"
    exec(code, namespace)
    return namespace["x"]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_source_is_compiled_once_and_a_changed_one_again(folder, compiled):
    assert [value(b"x = 1"), value(b"x = 1"), value(b"x = 2"), value(b"x = 2")] == [1, 1, 2, 2]
    assert compiled == [b"x = 1", b"x = 2"]
    assert len(files(folder)) == 1  # of one module, of whatever source


@pytest.mark.parametrize("damage", ["cut off", "changed", "emptied", "code of another source"])
def test_what_is_not_whole_is_compiled_again(folder, compiled, damage):
    value(b"x = 1")
    (path,) = files(folder)
    data = path.read_bytes()
    value(b"x = 2")
    other = data[:32] + path.read_bytes()[32:]
    cases = {"cut off": data[:-1], "changed": data[:-1] + bytes([data[-1] ^ 1]), "emptied": b""}
    path.write_bytes(cases.get(damage, other))
    del compiled[:]
    assert value(b"x = 1") == 1
    assert compiled == [b"x = 1"]
    assert path.read_bytes() == data


def test_a_folder_that_is_none_and_python_without_byte_code(folder, compiled, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    value(b"x = 1")
    assert files(folder) == []
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (folder / "new").write_text("no folder")
    assert [value(b"x = 1"), value(b"x = 1")] == [1, 1]
    assert len(compiled) == 3


def test_an_error_is_that_of_compile(folder):
    with pytest.raises(SyntaxError, match="was never closed"):
        code_cache.compile_cached(b"x = (", "a.py")
    assert files(folder) == []
