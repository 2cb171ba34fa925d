"""Cache folders that are damaged, full or no folders, and processes killed while they write."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import random
import signal
import time
from pathlib import Path

import pytest
import torch
from test_warm import CHILD, HIT, MISS, assert_state, run

from torch_ext_bucketing._torch import caches
from torch_ext_bucketing.testing.untouched import require_untouched_torch, touched_torch

KEY = "fkey"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    caches._log_once.cache_clear()
    return tmp_path / "cache" / "torch_ext_bucketing"


def test_what_is_kept_is_read(folder):
    assert caches.read_beside(KEY) is None
    caches.keep_beside(KEY, [1])
    caches.keep_beside("other", [2])
    assert (caches.read_beside(KEY), caches.read_beside("other")) == ([1], [2])
    assert sorted(p.name for p in folder.iterdir()) == [KEY, "other"]


@pytest.mark.parametrize("damage", [b"", b"\x80\x05]", b"cno_such_module\nValue\n.", b"text"])
def test_half_written_and_foreign_reports_are_not_there(folder, damage):
    caches.keep_beside(KEY, list(range(100)))
    path = folder / KEY
    path.write_bytes(damage or path.read_bytes()[:-1])
    assert caches.read_beside(KEY) is None
    caches.keep_beside(KEY, [1])
    assert caches.read_beside(KEY) == [1]


def test_no_folder_to_write_to(folder, caplog):
    folder.parent.write_text("a file")
    with caplog.at_level(logging.WARNING, "torch_ext_bucketing"):
        caches.keep_beside(KEY, [1])
        caches.keep_beside(KEY, [2])
    assert caches.read_beside(KEY) is None
    (text,) = caplog.messages
    assert text.startswith("no report is kept for later starts: ")
    assert str(folder.parent) in text


def test_a_full_folder_keeps_what_was_there(folder, caplog, monkeypatch):
    caches.keep_beside(KEY, [1])

    def full(value, file):
        file.write(pickle.dumps(value)[:3])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(caches.pickle, "dump", full)
    with caplog.at_level(logging.WARNING, "torch_ext_bucketing"):
        caches.keep_beside(KEY, [2])
    assert str(folder) in caplog.text
    assert "No space left" in caplog.text
    assert caches.read_beside(KEY) == [1]
    assert [p.name for p in folder.iterdir()] == [KEY], "no part of it is left"


def test_a_full_folder_is_named_where_torch_must_write(folder, monkeypatch):
    from torch._inductor import codecache

    class Full:
        def __enter__(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __exit__(self, *error):
            return None

    code = str(folder / "code.py")
    with caches.watched_caches():
        codecache.write_atomic(code, "1", make_dirs=True)
        monkeypatch.setattr(Path, "open", lambda *args, **kwargs: Full())
        with pytest.raises(OSError, match=f"No space left on device: '{code}'"):
            codecache.write_atomic(code, "2")
    monkeypatch.undo()
    assert Path(code).read_text() == "1"


def test_what_a_compile_wraps_in_torch_is_found_and_is_gone_afterwards():
    assert touched_torch() == []
    with caches.watched_caches():
        assert touched_torch() == [
            "torch._inductor.codecache.write_atomic",
            "torch._inductor.output_code.CompiledFxGraph.post_compile",
        ]
        with pytest.raises(RuntimeError, match=r"this package changed torch: .*write_atomic"):
            require_untouched_torch()
    require_untouched_torch()


def test_killed_while_writing(folder):
    """A report, and a file as torch writes its entries, are whole or not there, whenever the
    process that writes them dies."""
    from torch._inductor.codecache import write_atomic

    caches.keep_beside(KEY, (-1, b""))
    entry = folder.parent / "entry"
    rng = random.Random(0)
    seen = set()
    for i in range(50):
        began, begins = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                value = (i, bytes([i]) * 2_000_000)
                while True:
                    os.write(begins, b".")
                    caches.keep_beside(KEY, value)
                    write_atomic(str(entry), pickle.dumps(value), make_dirs=True)
            finally:
                os._exit(1)
        os.read(began, 1)
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        os.close(began)
        os.close(begins)
        number, content = caches.read_beside(KEY)
        seen.add(number)
        assert content == bytes([max(number, 0)]) * (2_000_000 if number >= 0 else 0)
        if entry.exists():
            number, content = pickle.loads(entry.read_bytes())
            assert content == bytes([number]) * 2_000_000
    assert len(seen) > 5, "too few of them came to write"


@pytest.mark.slow
def test_damaged_entries_are_compiled_anew():
    """Every entry of every cache cut in half."""
    cold, damaged, warm = run(str(CHILD), "damaged", "data_parallel")
    for result, state in ((cold, MISS), (damaged, MISS), (warm, HIT)):
        assert_state(result, state)
        assert result["places"] == cold["places"]
        assert [g["from_cache"] for g in result["report"]["graphs"]] == [state == HIT] * 2
    assert len(cold["places"]) == 2
    assert torch.tensor(cold["places"]).sum() > 0
