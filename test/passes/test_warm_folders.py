"""Cache folders that are full, and entries that are damaged."""

import errno
import os
from pathlib import Path

import pytest
from cache_runs import CHILD, HIT, MISS, assert_state, run
from untouched import touched_torch

from torch_ext_bucketing._torch import caches

pytestmark = pytest.mark.torch


def test_a_full_folder_is_named_where_torch_must_write(tmp_path, monkeypatch):
    from torch._inductor import codecache

    class Full:
        def __enter__(self):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def __exit__(self, *error):
            return None

    code = str(tmp_path / "code.py")
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
            "torch._inductor.output_code.CompiledFxGraph.__init__",
            "torch._inductor.output_code.CompiledFxGraph.post_compile",
        ]
    assert touched_torch() == []


@pytest.mark.slow
def test_damaged_entries_are_compiled_anew():
    """Each entry of each cache is cut in half."""
    cold, damaged, warm = run(str(CHILD), "damaged", "data_parallel")
    for result, state in ((cold, MISS), (damaged, MISS), (warm, HIT)):
        assert_state(result, state)
        assert result["places"] == cold["places"]
        assert [g["from_cache"] for g in result["report"]["graphs"]] == [state == HIT] * 2
    assert cold["places"] == [4 * 8 + 4 * 7]
