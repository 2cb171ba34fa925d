"""``hooks.install()``, and what importing the package does: each case in a fresh interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
from patching_trees import (
    BUCKETING,
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
    write_tiny,
)

from torch_ext_bucketing.hooks import HOOK_ENTRIES

pytestmark = needs_unpatched_torch

USE = f"""
import torch._inductor.config as config
part = config.aten_distributed_optimizations
prefix = "aten_distributed_optimizations."
for name in {HOOK_ENTRIES}:
    assert getattr(part, name) in (None, False), name
    assert prefix + name in config.get_config_copy()
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A checkout of the package with a small series of its own."""
    folder = copy_package(tmp_path_factory.mktemp("checkout"))
    write_small_series(folder / "torch_patches")
    return folder


def with_series(folder: Path, files: dict[str, tuple[str, str]], minor: str = MINOR) -> Path:
    """A checkout whose series has one patch, with old and new text by path."""
    copy_package(folder)
    write_series(folder / "torch_patches", minor, files)
    return folder


def of_torch(path: str) -> str:
    return (TORCH_DIR.parent / path).read_text()


# ---------------------------------------------------------------- the package without the hooks


def test_the_package_changes_nothing_in_torch() -> None:
    """Neither being imported nor compiling: finders, torch's modules and config entries."""
    run_python(
        """
        import sys
        finders = list(sys.meta_path)
        import torch_ext_bucketing as teb
        assert sys.meta_path == finders
        assert not [n for n in sys.modules if n.split(".")[0] == "torch"]

        import torch, torch._inductor.config as config, torch.distributed as dist
        from torch._inductor import codecache, compile_fx
        from torch._inductor.fx_passes import bucketing, fsdp, overlap_scheduling, post_grad
        from torch.distributed.device_mesh import init_device_mesh
        from torch.testing._internal.distributed.fake_pg import FakeStore
        finders = list(sys.meta_path)  # some that torch adds
        modules = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "torch"}
        entries, values = list(config._config), config.get_config_copy()
        parts = [
            (function, function.__code__, function.__defaults__)
            for module in (bucketing, codecache, compile_fx, fsdp, overlap_scheduling, post_grad)
            for function in vars(module).values()
            if hasattr(function, "__code__") and function.__module__ == module.__name__
        ]
        names = {m.__name__: dict(vars(m)) for m in (bucketing, fsdp, post_grad)}
        assert len(parts) > 150, len(parts)

        [getattr(teb, name) for name in teb.__all__]
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        teb.data_parallel(model, init_device_mesh("cpu", (2,)), mode="fully_shard")
        order = teb.FSDPParamOrder.from_model(model, units=[["0", "1"]])
        backend = teb.backend("aot_eager", [teb.BucketUnits(order)])
        torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
        assert sum(len(g.buckets) for g in backend.last_report().graphs) >= 2

        assert sys.meta_path == finders
        assert list(config._config) == entries and config.get_config_copy() == values
        assert all(sys.modules[name] is module for name, module in modules.items())
        assert all((f.__code__, f.__defaults__) == (code, given) for f, code, given in parts)
        assert all(vars(sys.modules[name]) == held for name, held in names.items())
        for name, module in sys.modules.items():
            if name.split(".")[0] == "torch":
                loader = type(getattr(module, "__loader__", None)).__module__
                assert not loader.startswith("torch_ext_bucketing"), name
        assert teb.hooks.status().state == "none"
        """,
        ROOT,
    )


@pytest.mark.once
def test_an_entry_set_without_the_hooks_is_torchs_own_error() -> None:
    run_python(
        """
        import torch_ext_bucketing, torch._inductor.config as config
        try:
            config.aten_distributed_optimizations.bucket_non_adjacent = True
        except AttributeError as error:
            assert "bucket_non_adjacent does not exist" in str(error), error
        else:
            raise AssertionError("taken")
        """,
        ROOT,
    )


# ---------------------------------------------------------------- served modules


@pytest.mark.once
def test_install_imports_nothing_of_torch_and_is_cheap(small: Path) -> None:
    out = run_python(
        """
        import sys, time
        began = time.process_time()
        import torch_ext_bucketing as teb
        first = teb.hooks.install()
        print(time.process_time() - began)
        assert not [name for name in sys.modules if name.split(".")[0] == "torch"]
        finders = list(sys.meta_path)
        assert teb.hooks.install() is first is teb.hooks.status()
        assert sys.meta_path == finders
        assert first.state == "in memory"
        """,
        small,
    ).stdout
    assert float(out) < 1.0  # measured: 0.1; the bound only catches what is out of proportion


def test_served_modules_look_normal(small: Path) -> None:
    def byte_code() -> list[int]:
        folder = TORCH_DIR / "_inductor" / "fx_passes" / "__pycache__"
        return sorted(path.stat().st_mtime_ns for path in folder.glob("*"))

    before = byte_code()
    path = str(TORCH_DIR.parent / BUCKETING)
    done = run_python(
        f"""
        from torch_ext_bucketing import hooks
        hooks.install()
        import inspect, importlib, traceback
        import torch._inductor.fx_passes.fsdp as fsdp
        import torch._inductor.fx_passes.bucketing as bucketing
        assert bucketing.__file__ == {path!r} == bucketing.__spec__.origin, bucketing.__file__
        assert bucketing.__name__ == bucketing.__spec__.name == "torch._inductor.fx_passes.bucketing"
        assert bucketing.__package__ == "torch._inductor.fx_passes"
        assert fsdp.boom is bucketing.boom
        assert "a patched line" in inspect.getsource(bucketing.boom)
        assert "a patched line" in inspect.getsource(bucketing)
        try:
            fsdp.boom()
        except KeyError:
            assert "raise KeyError('a patched line')" in traceback.format_exc()
        assert "a patched line" not in open({path!r}).read()
        {USE.replace(chr(10), chr(10) + "        ")}
        importlib.reload(fsdp)
        assert fsdp.boom is bucketing.boom
        fsdp.boom()
        """,
        small,
        check=False,
    )
    assert before == byte_code()
    # Python up to 3.12 prints an uncaught exception without asking linecache, from the file that
    # the code names, where the patched line's number belongs to another line.
    lines = [line.strip() for line in done.stderr.splitlines()]
    assert lines[-1] == "KeyError: 'a patched line'", done.stderr
    (at,) = (i for i, line in enumerate(lines) if "in boom" in line)
    assert not Path(lines[at].split('"')[1]).exists()
    assert lines[at + 1] in ("raise KeyError('a patched line')", lines[-1]), done.stderr


@pytest.mark.once
def test_installed_from_several_threads(small: Path) -> None:
    run_python(
        """
        import threading, torch
        errors = []
        def go():
            try:
                import torch_ext_bucketing
                torch_ext_bucketing.hooks.install()
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


# ---------------------------------------------------------------- imported first

FIRST = [
    "import torch._inductor.config",
    "import torch._dynamo",
    "import torch.distributed.fsdp, torch._functorch.aot_autograd",
]


@pytest.mark.parametrize("first", FIRST)
def test_config_imported_first_gets_the_entries(small: Path, first: str) -> None:
    run_python(
        f"""
        {first}
        import contextvars, threading
        import torch._inductor.config as config
        config.max_autotune = True
        config.aten_distributed_optimizations.collective_bucketing = True
        config._save_config_ignore.append("mine")
        context = contextvars.Context()
        old_hash, old_save = config.get_hash(), config.save_config_portable()
        old_there = context.run(config.get_hash)
        from torch_ext_bucketing import hooks
        hooks.install()
        {USE.replace(chr(10), chr(10) + "        ")}
        assert config.max_autotune and part.collective_bucketing
        assert "mine" in config._save_config_ignore
        name = prefix + "fsdp_group_filter"
        assert name in config.save_config_portable() and name not in old_save
        # A setting counts in the hash, goes away with its context, and survives a round trip.
        plain = config.get_hash()
        assert plain != old_hash and context.run(config.get_hash) != old_there
        with config.patch({{name: ["0"]}}):
            assert part.fsdp_group_filter == ["0"]
            assert config.get_hash() != plain
            saved = config.save_config()
        assert part.fsdp_group_filter is None and config.get_hash() == plain
        part.bucket_non_adjacent = True
        assert config.get_hash() != plain
        config.load_config(saved)
        assert part.fsdp_group_filter == ["0"] and not part.bucket_non_adjacent
        out = []
        thread = threading.Thread(target=lambda: out.append(part.bucket_non_adjacent))
        thread.start(); thread.join()
        assert out == [False]
        try:
            part.no_such_entry = 1
        except AttributeError:
            pass
        else:
            raise AssertionError("unknown entries are still refused")
        import torch._inductor.compile_fx, torch._inductor.fx_passes.bucketing as bucketing
        assert bucketing.boom
        """,
        small,
    )


def test_live_and_served_registries_are_the_same(small: Path) -> None:
    code = """
    {first}
    import re
    from torch_ext_bucketing import hooks
    hooks.install()
    import torch._inductor.config as config
    for key, entry in config._config.items():
        print(key, sorted((k, re.sub("0x[0-9a-f]+", "", repr(v))) for k, v in vars(entry).items() if k != "user_override"))
    print(sorted(config._compile_ignored_keys))
    """
    live, served = (run_python(code.format(first=first), small).stdout for first in (FIRST[0], ""))
    assert live == served
    assert live.count("\n") > 500


def test_too_early_is_an_error_that_changes_nothing(small: Path) -> None:
    run_python(
        """
        import sys
        import torch._inductor.fx_passes.fsdp, torch._inductor.config as config
        from torch_ext_bucketing import hooks
        before, finders = list(config._config), list(sys.meta_path)
        for _ in range(2):
            try:
                hooks.install()
            except hooks.ImportedTooEarlyError as error:
                message = str(error)
            else:
                raise AssertionError("installed")
            assert "torch._inductor.fx_passes.bucketing (used by" in message, message
            assert "torch._inductor.fx_passes.fsdp)" in message, message
            assert "imported before torch_ext_bucketing.hooks.install()" in message
            assert "torch-ext-bucketing patch apply" in message
            assert list(config._config) == before and sys.meta_path == finders
            assert hooks.status().state == "none"
        """,
        small,
    )


@pytest.mark.once
def test_config_lines_that_change_need_config_not_to_be_imported(tmp_path: Path) -> None:
    old, new = of_torch(CONFIG), small_edits()[CONFIG]
    assert new.count("shape_padding = ") == 1
    changed = new.replace("shape_padding = ", "shape_padding_renamed = ")
    folder = with_series(tmp_path, {CONFIG: (old, changed)})
    code = """
    import sys
    {first}
    from torch_ext_bucketing import hooks
    config = sys.modules.get("torch._inductor.config")
    state = list(sys.meta_path), config and list(config._config)
    try:
        hooks.install()
    except hooks.ImportedTooEarlyError as error:
        assert "the patch changes lines of it" in str(error), error
        assert state == (list(sys.meta_path), list(config._config))
        print("refused")
    """
    assert run_python(code.format(first=FIRST[0]), folder).stdout == "refused\n"
    assert run_python(code.format(first=""), folder).stdout == ""


# ---------------------------------------------------------------- other torches


@pytest.mark.once
def test_a_series_that_does_not_fit_names_the_hunks(tmp_path: Path) -> None:
    old = of_torch(BUCKETING)
    head = "import torch\n"
    assert head in old
    new = old.replace(head, "import other\n"), old.replace(head, "import another\n")
    folder = with_series(tmp_path, {BUCKETING: new})
    run_python(
        """
        import sys
        from torch_ext_bucketing import hooks
        finders = list(sys.meta_path)
        for _ in range(2):
            try:
                hooks.install()
            except hooks.PatchDoesNotApplyError as error:
                (failure,) = error.failures
                assert failure.startswith("torch/_inductor/fx_passes/bucketing.py: @@ -"), failure
                assert "expected 'import other', found 'import torch'" in failure, failure
                assert failure in str(error)
            else:
                raise AssertionError("install() did not raise")
        assert hooks.status().state == "none" and sys.meta_path == finders
        import torch._inductor.fx_passes.bucketing
        """,
        folder,
    )


@pytest.mark.once
@pytest.mark.parametrize(
    ("minor", "expected"),
    [("1.99", "in memory 1.99"), ("9.0", "is too old: the patch needs torch 9.0 or newer")],
)
def test_the_newest_series_that_is_not_newer_is_tried(
    tmp_path: Path, minor: str, expected: str
) -> None:
    folder = with_series(tmp_path, {CONFIG: (of_torch(CONFIG), small_edits()[CONFIG])}, minor)
    out = run_python(
        """
        from torch_ext_bucketing import hooks
        try:
            status = hooks.install()
            print(status.state, status.series)
        except hooks.HooksError as error:
            print(error)
        """,
        folder,
    ).stdout
    assert expected in out


@pytest.mark.once
def test_hooks_that_are_there_already(tmp_path: Path) -> None:
    """On disk, natively, or half written: nothing is served then."""
    folder = copy_package(tmp_path / "checkout")
    torch_dir = tmp_path / "site" / "torch"
    edited = write_tiny(folder / "torch_patches", torch_dir)
    (torch_dir / "__init__.py").touch()
    code = """
    import sys
    from torch_ext_bucketing import hooks
    finders = list(sys.meta_path)
    try:
        status = hooks.install()
        assert status == hooks.status()
        print(status.state, status.series)
    except hooks.HooksError as error:
        print(error)
    assert sys.meta_path == finders
    """

    def patch(*arguments: str) -> None:
        run_python("", folder, torch_dir.parent, args=("-m", "torch_ext_bucketing", *arguments))

    def found() -> str:
        return run_python(code, folder, torch_dir.parent).stdout

    original = (torch_dir.parent / BUCKETING).read_text()
    patch("patch", "apply")
    assert found() == f"on disk {MINOR}\n"
    (torch_dir.parent / BUCKETING).write_text(original)
    assert "2 of 3 files are patched; a patch command was interrupted" in found()
    patch("patch", "revert")
    for path, text in edited.items():
        (torch_dir.parent / path).write_text(text)
    assert found() == "native None\n"


@pytest.mark.once
def test_compiling_in_a_subprocess_is_refused(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FX_COMPILE_MODE", "subprocess")
    done = run_python("import torch_ext_bucketing.hooks as h; h.install()", small, check=False)
    assert "HooksError: TORCHINDUCTOR_FX_COMPILE_MODE=SUBPROCESS compiles graphs" in done.stderr


@pytest.mark.once
def test_without_torch(small: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.machinery as m\nfind = m.PathFinder.find_spec\n"
        "m.PathFinder.find_spec = classmethod(lambda cls, name, *a, **k: None if name == 'torch' else find(name, *a, **k))\n"
    )
    install = "import torch_ext_bucketing.hooks as h; h.install()"
    done = run_python(install, small, tmp_path, check=False)
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


# ---------------------------------------------------------------- the real series


@pytest.mark.parametrize("first", ["", FIRST[1]], ids=["first", "after config"])
def test_the_real_series_by_import_and_in_a_compile(first: str) -> None:
    run_python(
        f"""
        {first}
        from torch_ext_bucketing import hooks
        assert hooks.install().series == {MINOR!r}
        {USE.replace(chr(10), chr(10) + "        ")}
        import torch
        import torch._inductor.compile_fx
        import torch._inductor.fx_passes.overlap_scheduling, torch._inductor.fx_passes.overlap_manual_scheduling
        x = torch.randn(4)
        assert torch.compile(torch.sin, backend="aot_eager")(x).equal(torch.sin(x))
        with config.patch({{prefix + "bucket_non_adjacent": True}}):
            assert part.bucket_non_adjacent
        """,
        ROOT,
    )
