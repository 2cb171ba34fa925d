"""Hooks by import: each case in a fresh interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from patching_trees import (
    BUCKETING,
    CODECACHE,
    CONFIG,
    MINOR,
    ROOT,
    TORCH_DIR,
    copy_package,
    needs_unpatched_torch,
    run_python,
    small_edits,
    write_series,
    write_small_series,
)

pytestmark = needs_unpatched_torch

NAMES = "['bucket_payload_order_key', 'fsdp_group_filter', 'bucket_non_adjacent', 'bucket_max_node_span']"

USE = f"""
import torch._inductor.config as config
part = config.aten_distributed_optimizations
prefix = "aten_distributed_optimizations."
for name in {NAMES}:
    assert getattr(part, name) in (None, False), name
    assert prefix + name in config.get_config_copy()
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A checkout of the package with a small series of its own."""
    folder = copy_package(tmp_path_factory.mktemp("checkout"))
    write_small_series(folder / "torch_patches")
    return folder


def package_with(tmp_path: Path, minor: str = MINOR, **files: tuple[str | None, str]) -> Path:
    """A checkout with a series that makes one change to each of some files."""
    folder = copy_package(tmp_path)
    edited = small_edits()
    old = {path: (TORCH_DIR.parent / path).read_text() for path in edited}
    names = {"config": CONFIG, "codecache": CODECACHE, "bucketing": BUCKETING}
    patch = {CONFIG: (old[CONFIG], edited[CONFIG])}
    for name, (before, after) in files.items():
        path = names[name]
        text = patch.get(path, (old[path], old[path]))[1]
        assert text.count(before) == 1, before
        patch[path] = (old[path], text.replace(before, after))
    write_series(folder / "torch_patches", minor, patch)
    return folder


@pytest.mark.once
def test_nothing_of_torch_is_imported_and_it_is_cheap(small: Path) -> None:
    out = run_python(
        """
        import sys, time
        began = time.process_time()
        import torch_ext_bucketing
        print(time.process_time() - began)
        assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
        from torch_ext_bucketing.hooks import hooks_status
        status = hooks_status()
        assert (status.state, status.reason) == ("in memory", None), status
        """,
        small,
    ).stdout
    assert float(out) < 1.0  # measured: 0.1; the bound only catches what is out of proportion


def test_served_modules_look_normal(small: Path) -> None:
    before = sorted(
        path.stat().st_mtime_ns
        for path in (TORCH_DIR / "_inductor" / "fx_passes" / "__pycache__").glob("*")
    )
    run_python(
        f"""
        import torch_ext_bucketing, inspect, importlib, linecache, os, traceback
        import torch._inductor.fx_passes.fsdp as fsdp
        import torch._inductor.fx_passes.bucketing as bucketing
        import torch._inductor.codecache as codecache
        path = {str(TORCH_DIR / "_inductor" / "fx_passes" / "bucketing.py")!r}
        assert bucketing.__file__ == path == bucketing.__spec__.origin, bucketing.__file__
        assert bucketing.__name__ == bucketing.__spec__.name == "torch._inductor.fx_passes.bucketing"
        assert bucketing.__package__ == "torch._inductor.fx_passes"
        assert fsdp.boom is bucketing.boom
        assert "a patched line" in inspect.getsource(bucketing.boom)
        assert "a patched line" in inspect.getsource(bucketing)
        assert codecache._hook_note() == "new"
        assert "_hook_note" in inspect.getsource(codecache.sha256_hash)
        try:
            fsdp.boom()
        except KeyError:
            assert "raise KeyError('a patched line')" in traceback.format_exc()
        assert "a patched line" not in open(path).read()
        {USE.replace(chr(10), chr(10) + "        ")}
        importlib.reload(fsdp)
        assert fsdp.boom is bucketing.boom
        """,
        small,
    )
    after = sorted(
        path.stat().st_mtime_ns
        for path in (TORCH_DIR / "_inductor" / "fx_passes" / "__pycache__").glob("*")
    )
    assert before == after


def test_tracebacks_never_show_the_lines_of_the_file_on_disk() -> None:
    """Python up to 3.12 prints an uncaught exception without asking ``linecache``, from the file
    that the code names, where the patched line's number belongs to another line."""
    done = run_python(
        """
        import inspect, sys, traceback
        import torch_ext_bucketing
        from torch._inductor.fx_passes import bucketing
        count = bucketing._positions_on_every_rank
        assert inspect.getsource(count).startswith("def _positions_on_every_rank(")
        assert "for node in graph.nodes:" in inspect.getsource(count.__code__)
        try:
            count(None)
        except AttributeError:
            assert "    for node in graph.nodes:" in traceback.format_exc(), traceback.format_exc()
        count(None)
        """,
        ROOT,
        check=False,
    )
    lines = [line.strip() for line in done.stderr.splitlines()]
    (at,) = (i for i, line in enumerate(lines) if "in _positions_on_every_rank" in line)
    name = lines[at].split('"')[1]
    assert name.startswith(str(TORCH_DIR)), done.stderr
    assert not Path(name).exists(), done.stderr
    error = "AttributeError: 'NoneType' object has no attribute 'nodes'"
    assert lines[-1] == error, done.stderr
    assert lines[at + 1] in ("for node in graph.nodes:", error), done.stderr


FIRST = [
    "import torch._inductor.config",
    "import torch._dynamo",
    "import torch._inductor.codecache",
    "import torch.distributed.fsdp, torch._functorch.aot_autograd",
]


@pytest.mark.parametrize("first", FIRST)
def test_modules_imported_first_are_updated(small: Path, first: str) -> None:
    run_python(
        f"""
        import sys
        {first}
        import torch._inductor.config as config
        config.max_autotune = True
        config.aten_distributed_optimizations.collective_bucketing = True
        config._save_config_ignore.append("mine")
        list(config._cache_config_ignore_prefix)
        old_hash, old_save = config.get_hash(), config.save_config_portable()
        codecache = sys.modules.get("torch._inductor.codecache")
        hash_function = codecache and codecache.sha256_hash
        import torch_ext_bucketing
        {USE.replace(chr(10), chr(10) + "        ")}
        assert config.max_autotune and part.collective_bucketing
        assert "mine" in config._save_config_ignore
        assert prefix + "fsdp_group_filter" in config._save_config_ignore
        assert "trace.upload_tar" in config._save_config_ignore
        assert prefix + "fsdp_group_filter" not in config.get_serializable_config_copy()
        assert prefix + "bucket_max_node_span" in config.save_config_portable()
        assert prefix + "bucket_max_node_span" not in old_save
        # A setting counts in the hash, goes away with its context, and survives a round trip.
        plain = config.get_hash()
        assert plain != old_hash
        with config.patch({{prefix + "bucket_max_node_span": 7}}):
            assert part.bucket_max_node_span == 7
            assert config.get_hash() != plain
            saved = config.save_config()
        assert part.bucket_max_node_span is None and config.get_hash() == plain
        part.bucket_non_adjacent = True
        assert config.get_hash() != plain
        config.load_config(saved)
        assert part.bucket_max_node_span == 7 and not part.bucket_non_adjacent
        import pytest
        with pytest.raises(AttributeError):  # unknown entries are still refused
            part.no_such_entry = 1
        # Without others' additions the registry equals that of a module that was served.
        order = list(config._config)
        where = order.index(prefix + "bucket_payload_order_key")
        assert order[where + 3] == prefix + "bucket_max_node_span"
        assert order[where + 4].startswith(prefix)
        if codecache:
            assert codecache.sha256_hash is hash_function
            assert hash_function(b"patched?") == codecache._hook_note() == "new"
            assert hash_function.__code__.co_filename.startswith(codecache.__file__)
            import inspect
            assert "_hook_note" in inspect.getsource(hash_function)
        from torch._inductor.codecache import sha256_hash
        assert sha256_hash(b"patched?") == "new" and len(sha256_hash(b"x")) > 20
        import torch._inductor.compile_fx, torch._inductor.fx_passes.bucketing as bucketing
        assert bucketing.boom
        """,
        small,
    )


def test_live_and_served_registries_are_the_same(small: Path) -> None:
    code = """
    {first}
    import re, torch_ext_bucketing, torch._inductor.config as config
    for key, entry in config._config.items():
        print(key, sorted((k, re.sub("0x[0-9a-f]+", "", repr(v))) for k, v in vars(entry).items() if k != "user_override"))
    print(sorted(config._compile_ignored_keys))
    """
    live, served = (run_python(code.format(first=first), small).stdout for first in (FIRST[0], ""))
    assert live == served
    assert live.count("\n") > 500


@pytest.mark.once
def test_other_threads_and_contexts_see_the_entries(small: Path) -> None:
    run_python(
        """
        import contextvars, threading, torch._inductor.config as config
        context = contextvars.Context()
        old = context.run(config.get_hash)
        import torch_ext_bucketing
        assert context.run(config.get_hash) != old
        assert context.run(config.get_hash) == config.get_hash()
        out = []
        thread = threading.Thread(target=lambda: out.append(config.aten_distributed_optimizations.bucket_non_adjacent))
        thread.start(); thread.join()
        assert out == [False]
        """,
        small,
    )


@pytest.mark.once
def test_imports_from_several_threads(small: Path) -> None:
    run_python(
        """
        import threading
        import torch
        errors = []
        def go():
            try:
                import torch_ext_bucketing
                import torch._inductor.fx_passes.fsdp as fsdp
                fsdp.boom
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=go) for _ in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert not errors, errors
        """,
        small,
    )


def test_too_early_is_an_error_that_changes_nothing(small: Path) -> None:
    run_python(
        """
        import sys
        import torch._inductor.fx_passes.fsdp, torch._inductor.config as config
        before, finders = list(config._config), list(sys.meta_path)
        for _ in range(2):
            try:
                import torch_ext_bucketing
            except RuntimeError as error:
                assert type(error).__name__ == "ImportedTooEarlyError", error
                message = str(error)
            else:
                raise AssertionError("imported")
            assert "torch._inductor.fx_passes.bucketing (used by" in message, message
            assert "torch._inductor.fx_passes.fsdp)" in message, message
            assert "Import torch_ext_bucketing before" in message
            assert "torch-ext-bucketing patch apply" in message
            assert list(config._config) == before and sys.meta_path == finders
        """,
        small,
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"codecache": ("class CacheBase:\n", "class CacheBase(dict):\n")},
            "the head of class CacheBase changed",
        ),
        (
            {
                "codecache": (
                    "log = logging.getLogger(__name__)\n",
                    "log = logging.getLogger('x')\n",
                )
            },
            "log changed",
        ),
        (
            {"codecache": ("def sha256_hash(", "@staticmethod\ndef sha256_hash(")},
            "decorators of sha256_hash changed",
        ),
        (
            {"codecache": ("def sha256_hash(", "1 / 0\ndef sha256_hash(")},
            "statement '1 / 0' was added",
        ),
        (
            {"codecache": ("def sha256_hash(", "zero = 1 / 0\ndef sha256_hash(")},
            "new definitions failed",
        ),
        ({"codecache": ("def sha256_hash(", "def renamed(")}, "sha256_hash was removed"),
        ({"config": ("shape_padding = ", "shape_padding_renamed = ")}, "shape_padding was removed"),
    ],
    ids=["base", "assignment", "decorator", "statement", "raises", "function", "entry"],
)
def test_what_cannot_be_done_live_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    folder = package_with(tmp_path, **change)
    out = run_python(
        """
        import sys, torch._inductor.codecache as codecache, torch._inductor.config as config
        state = list(config._config), list(sys.meta_path), list(vars(codecache)), codecache.sha256_hash.__code__
        try:
            import torch_ext_bucketing
        except RuntimeError as error:
            print(error)
        assert state == (list(config._config), list(sys.meta_path), list(vars(codecache)), codecache.sha256_hash.__code__)
        """,
        folder,
    ).stdout
    assert message in out
    assert "Import torch_ext_bucketing before it" in out


@pytest.mark.once
def test_a_series_that_does_not_fit_warns_once_and_names_the_hunks(tmp_path: Path) -> None:
    folder = copy_package(tmp_path)
    old = (TORCH_DIR.parent / BUCKETING).read_text()
    head = "import torch\n"
    assert head in old
    write_series(
        folder / "torch_patches",
        MINOR,
        {BUCKETING: (old.replace(head, "import other\n"), old.replace(head, "import another\n"))},
    )
    run_python(
        """
        import warnings, sys
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import torch_ext_bucketing
            from torch_ext_bucketing.hooks import ensure_hooks, hooks_status, require_hooks
            ensure_hooks()
        (warning,) = caught
        for text in (str(warning.message), hooks_status().reason):
            assert "torch/_inductor/fx_passes/bucketing.py: @@ -" in text, text
            assert "expected 'import other', found 'import torch'" in text, text
        assert hooks_status().state == "none"
        try:
            require_hooks()
        except RuntimeError as error:
            assert "expected 'import other'" in str(error)
        else:
            raise AssertionError("require_hooks() did not raise")
        import torch._inductor.fx_passes.bucketing
        """,
        folder,
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("minor", "state", "reason"),
    [("1.99", "in memory", ""), ("9.0", "none", "too old: the patch needs torch 9.0")],
)
def test_the_newest_series_that_is_not_newer_is_tried(
    tmp_path: Path, minor: str, state: str, reason: str
) -> None:
    folder = package_with(tmp_path, minor)
    out = run_python(
        """
        import warnings
        warnings.simplefilter("ignore")
        import torch_ext_bucketing
        from torch_ext_bucketing.hooks import hooks_status
        print(hooks_status().state, hooks_status().reason)
        """,
        folder,
    ).stdout
    assert out.startswith(state)
    assert reason in out


@pytest.mark.once
def test_without_torch(small: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\nfind = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda cls, name, *a, **k: None if name == 'torch' else find(name, *a, **k))\n"
    )
    done = run_python("import torch_ext_bucketing", small, tmp_path, check=False)
    assert "ModuleNotFoundError: No module named 'torch'" in done.stderr
    done = run_python(
        "", small, tmp_path, args=("-W", "error", "-m", "torch_ext_bucketing", "patch", "--help")
    )
    assert "exit status:" in done.stdout
    done = run_python(
        "", small, tmp_path, args=("-m", "torch_ext_bucketing", "patch", "status"), check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: torch is not installed; name one with --torch-dir.\n"


def test_the_real_series_by_import_and_in_a_compile() -> None:
    """The series that matches the running torch, whatever of torch is imported first."""
    for first in ("", "import torch.distributed.fsdp, torch._dynamo, torch._inductor.compile_fx"):
        run_python(
            f"""
            {first}
            import torch
            import torch_ext_bucketing
            from torch_ext_bucketing.hooks import require_hooks
            assert require_hooks().series == {MINOR!r}
            {USE.replace(chr(10), chr(10) + "            ")}
            import torch._inductor.compile_fx
            import torch._inductor.fx_passes.overlap_scheduling, torch._inductor.fx_passes.overlap_manual_scheduling
            x = torch.randn(4)
            assert torch.compile(torch.sin, backend="aot_eager")(x).equal(torch.sin(x))
            with config.patch({{prefix + "bucket_max_node_span": 3}}):
                assert part.bucket_max_node_span == 3
            """,
            ROOT,
        )
