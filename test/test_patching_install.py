"""Hooks on disk: ``patch apply | revert | status``."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from pathlib import Path

import pytest
from patching_trees import (
    BUCKETING,
    CODECACHE,
    CONFIG,
    FSDP,
    MINOR,
    ROOT,
    TORCH_DIR,
    TOUCHED,
    copy_package,
    needs_unpatched_torch,
    run_python,
    write_series,
    write_small_series,
    write_tiny,
)

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.hooks import (
    BusyError,
    EditedFileError,
    NotAppliedError,
    PatchDoesNotApplyError,
    UnsupportedTorchError,
    WriteError,
    hooks_status,
    install,
    series,
)
from torch_ext_bucketing.hooks.file_order import in_import_order
from torch_ext_bucketing.hooks.journal import STATE_DIR

pytestmark = needs_unpatched_torch


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Make a small series the one in use; the patched text by path."""
    text = write_small_series(tmp_path / "torch_patches")
    monkeypatch.setattr(series, "find_patches_dir", lambda: tmp_path / "torch_patches")
    return text


@pytest.fixture
def torch_dir(tmp_path: Path) -> Path:
    """The touched files of the installed torch and its version, old enough to tell times apart."""
    folder = tmp_path / "site" / "torch"
    for path in (*TOUCHED, "torch/version.py"):
        target = folder.parent / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TORCH_DIR.parent / path, target)
        os.utime(target, ns=(10**18, 10**18))
    os.chmod(folder.parent / BUCKETING, 0o640)
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, dict[str, str]]:
    """A tiny torch directory and its patched text by path."""
    torch_dir = tmp_path / "site" / "torch"
    edited = write_tiny(tmp_path / "torch_patches", torch_dir)
    monkeypatch.setattr(series, "find_patches_dir", lambda: tmp_path / "torch_patches")
    return torch_dir, edited


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file: bytes, mode and modification time."""
    result = {}
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else None
            if path.is_dir()
            else hashlib.sha256(path.read_bytes()).hexdigest()
        )
        result[str(path.relative_to(folder))] = (
            content,
            info.st_mode,
            None if path.is_dir() or path.is_symlink() else info.st_mtime_ns,
        )
    return result


def state(torch_dir: Path) -> str:
    return install.status(torch_dir).state


def text(torch_dir: Path, path: str) -> str:
    return (torch_dir.parent / path).read_text()


@pytest.mark.once
def test_apply_twice_and_revert_twice(torch_dir: Path, edited: dict[str, str], capsys) -> None:
    original = snapshot(torch_dir)
    where = ["--torch-dir", str(torch_dir)]
    assert main(["patch", "status", *where]) == 3
    assert main(["patch", "revert", *where]) == 1
    assert "is not patched; nothing to revert" in capsys.readouterr().err
    assert snapshot(torch_dir) == original

    assert main(["patch", "apply", *where]) == 0
    assert "patched 4 files" in capsys.readouterr().out
    patched = snapshot(torch_dir)
    assert {path: text(torch_dir, path) for path in TOUCHED} == edited
    assert (torch_dir.parent / BUCKETING).stat().st_mode & 0o777 == 0o640
    assert not (torch_dir.parent / "test").exists()
    assert main(["patch", "status", *where]) == 0
    assert main(["patch", "apply", *where]) == 0
    assert "patched already; nothing to do" in capsys.readouterr().out
    assert snapshot(torch_dir) == patched

    # The parent directory names it as well.
    assert main(["patch", "revert", "--torch-dir", str(torch_dir.parent)]) == 0
    assert snapshot(torch_dir) == original
    assert main(["patch", "revert", *where]) == 1


@pytest.mark.once
def test_checkout_gets_the_test_files_too(torch_dir: Path, edited: dict[str, str]) -> None:
    root = torch_dir.parent
    (root / "version.txt").write_text(f"{MINOR}.0a0\n")
    (root / "setup.py").touch()
    (torch_dir / "version.py").unlink()
    original = snapshot(root)
    install.apply(root)
    assert (root / "test/inductor/test_small.py").read_text() == "import torch\n"
    assert state(root) == state(torch_dir) == "applied"
    install.revert(root)
    assert snapshot(root) == original


@pytest.mark.once
def test_links_keep_what_they_share(
    torch_dir: Path, edited: dict[str, str], tmp_path: Path
) -> None:
    cache, linked = tmp_path / "cache.py", tmp_path / "linked.py"
    os.link(torch_dir.parent / CONFIG, cache)
    os.rename(torch_dir.parent / FSDP, linked)
    os.symlink(linked, torch_dir.parent / FSDP)
    contents = cache.read_bytes(), linked.read_bytes()
    original = snapshot(torch_dir)
    install.apply(torch_dir)
    assert text(torch_dir, FSDP) == edited[FSDP]
    assert (cache.read_bytes(), linked.read_bytes()) == contents
    install.revert(torch_dir)
    assert snapshot(torch_dir) == original
    assert (torch_dir.parent / FSDP).is_symlink()


@pytest.mark.once
@pytest.mark.parametrize("path", TOUCHED)
def test_edited_after_apply(torch_dir: Path, edited: dict[str, str], path: str) -> None:
    install.apply(torch_dir)
    target = torch_dir.parent / path
    target.write_text(edited[path] + "# by hand\n")
    before = snapshot(torch_dir)
    for command in (install.apply, install.revert):
        with pytest.raises(EditedFileError, match=rf"{path}.*Undo that edit"):
            command(torch_dir)
    assert state(torch_dir) == "edited"
    assert snapshot(torch_dir) == before
    target.write_text(edited[path])
    install.revert(torch_dir)
    assert state(torch_dir) == "not applied"


@pytest.mark.once
def test_edited_before_apply(torch_dir: Path, edited: dict[str, str], capsys) -> None:
    target = torch_dir.parent / CONFIG
    target.write_text(
        target.read_text().replace("_save_config_ignore: list[str] = [", "_save_config_ignore = [")
    )
    before = snapshot(torch_dir)
    with pytest.raises(
        PatchDoesNotApplyError, match=rf"{CONFIG}: @@ .*: line \d+: expected '_save"
    ):
        install.apply(torch_dir)
    assert snapshot(torch_dir) == before
    assert main(["patch", "apply", "--torch-dir", str(torch_dir)]) == 1
    assert "error: 1 hunk(s) of the torch patch do not fit" in capsys.readouterr().err


@pytest.mark.once
def test_missing_file_unknown_torch_and_no_torch(
    torch_dir: Path, edited: dict[str, str], tmp_path: Path
) -> None:
    (torch_dir.parent / FSDP).unlink()
    with pytest.raises(PatchDoesNotApplyError, match=rf"{FSDP}: .* there is none"):
        install.apply(torch_dir)
    (torch_dir / "version.py").write_text("__version__ = '1.13.0'\n")
    with pytest.raises(UnsupportedTorchError, match=r"torch 1.13.0 is too old"):
        install.apply(torch_dir)
    (torch_dir / "version.py").write_text("version = 1\n")
    with pytest.raises(UnsupportedTorchError, match=r"does not say which version"):
        install.status(torch_dir)
    with pytest.raises(UnsupportedTorchError, match=r"is not a torch directory"):
        install.status(tmp_path)
    assert not (torch_dir / STATE_DIR).exists()


@pytest.mark.once
def test_native(torch_dir: Path, edited: dict[str, str]) -> None:
    for path in TOUCHED:
        (torch_dir.parent / path).write_text(edited[path])
    before = snapshot(torch_dir)
    assert state(torch_dir) == "native"
    assert "natively; nothing to do" in install.apply(torch_dir)
    with pytest.raises(NotAppliedError, match="natively; nothing to revert"):
        install.revert(torch_dir)
    assert snapshot(torch_dir) == before


class Fault:
    """Makes one file operation of the process fail, or end it, at a chosen call.

    Counted are the calls that change the disk, as the install code makes them.
    """

    NAMES = ("open", "replace", "mkdir", "unlink", "fsync", "symlink", "chmod", "utime", "rmdir")

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException | None
    ) -> None:
        self.count, self.at, self.error = 0, at, error
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real):
        def call(path, *args, **kwargs):
            if threading.current_thread() is threading.main_thread():
                self.count += 1
                if self.count == self.at:
                    if self.error is None:
                        os._exit(77)
                    raise self.error
            return real(path, *args, **kwargs)

        return call


@pytest.mark.once
@pytest.mark.parametrize("name", ["apply", "revert"])
@pytest.mark.parametrize("code", [28, 13], ids=["disk-full", "permission"])
def test_refused_by_the_system_at_every_operation(
    tiny, tmp_path: Path, name: str, code: int
) -> None:
    """All files or none, status tells which, and the command can be repeated."""
    torch_dir, edited = tiny
    pristine = snapshot(torch_dir)
    command = getattr(install, name)
    if name == "revert":
        install.apply(torch_dir)
    goal = {"apply": "applied", "revert": "not applied"}[name]
    keep = tmp_path / "keep"
    shutil.copytree(torch_dir, keep, symlinks=True)
    at = outcomes = 0
    while True:
        at += 1
        shutil.rmtree(torch_dir)
        shutil.copytree(keep, torch_dir, symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, at, OSError(code, os.strerror(code), "somewhere"))
            try:
                command(torch_dir)
            except WriteError as error:
                assert os.strerror(code) in str(error)  # noqa: PT017
        if fault.count < at:
            break
        outcomes += 1
        current = {path: text(torch_dir, path) for path in TOUCHED}
        found = state(torch_dir)
        assert found in ("applied", "not applied")
        assert (current == edited) == (found == "applied"), at
        assert not list((torch_dir / "_inductor").rglob("*-new")), at
        if found != goal:
            command(torch_dir)
        elif name == "revert" and (torch_dir / STATE_DIR).exists():
            with contextlib.suppress(NotAppliedError):
                install.revert(torch_dir)  # its notes could not be removed
        assert state(torch_dir) == goal
        if name == "revert":
            assert snapshot(torch_dir) == pristine, at
    assert outcomes > 10


@pytest.mark.once
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_killed_at_every_operation(tiny, tmp_path: Path, name: str) -> None:
    """Each prefix of the order is what is found, and both commands can finish it."""
    torch_dir, edited = tiny
    pristine = snapshot(torch_dir)
    original = {path: text(torch_dir, path) for path in TOUCHED}
    command = getattr(install, name)
    if name == "revert":
        install.apply(torch_dir)
    order = [CONFIG, BUCKETING, FSDP, CODECACHE]  # bucketing before fsdp, which imports it
    keep = tmp_path / "keep"
    shutil.copytree(torch_dir, keep, symlinks=True)
    seen: dict[str, int] = {}
    for at in range(1, 1000):
        shutil.rmtree(torch_dir)
        shutil.copytree(keep, torch_dir, symlinks=True)
        child = os.fork()
        if child == 0:
            try:
                with pytest.MonkeyPatch.context() as patch:
                    Fault(patch, at, None)
                    command(torch_dir)
            finally:
                os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            break
        sides = [text(torch_dir, path) == edited[path] for path in order]
        assert all(
            s or text(torch_dir, p) == original[p] for s, p in zip(sides, order, strict=True)
        )
        assert sides == sorted(sides, reverse=True), at
        found = install.status(torch_dir)
        expected = "applied" if all(sides) else "interrupted" if any(sides) else "not applied"
        assert found.state == expected, (at, found)
        if expected == "interrupted":
            assert f"{sum(sides)} of 4 files" in found.message
        seen[expected] = seen.get(expected, 0) + 1
        if at % 2:
            install.apply(torch_dir)
            assert {path: text(torch_dir, path) for path in TOUCHED} == edited
        if state(torch_dir) == "applied":
            install.revert(torch_dir)
        else:
            try:
                install.revert(torch_dir)
            except NotAppliedError:
                assert expected == "not applied"
        assert snapshot(torch_dir) == pristine, at
    assert at > 20
    assert sorted(seen) == ["applied", "interrupted", "not applied"]


@pytest.mark.once
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_killed_again_while_finishing(tiny, tmp_path: Path, name: str) -> None:
    """A kill, and another one in the command that finishes or undoes it, each at any operation."""
    torch_dir, edited = tiny
    pristine = snapshot(torch_dir)
    original = {path: text(torch_dir, path) for path in TOUCHED}
    if name == "revert":
        install.apply(torch_dir)
    keep = tmp_path / "keep"
    shutil.copytree(torch_dir, keep, symlinks=True)
    order = [CONFIG, BUCKETING, FSDP, CODECACHE]
    rng = random.Random(name)
    seen: set[str] = set()
    for _ in range(25):
        shutil.rmtree(torch_dir)
        shutil.copytree(keep, torch_dir, symlinks=True)
        killed(getattr(install, name), torch_dir, rng.randrange(1, 160 if name == "apply" else 80))
        killed(rng.choice((install.apply, install.revert)), torch_dir, rng.randrange(1, 80))
        sides = [text(torch_dir, path) == edited[path] for path in order]
        assert all(
            s or text(torch_dir, p) == original[p] for s, p in zip(sides, order, strict=True)
        )
        assert sides == sorted(sides, reverse=True)
        expected = "applied" if all(sides) else "interrupted" if any(sides) else "not applied"
        assert state(torch_dir) == expected
        seen.add(expected)
        install.apply(torch_dir)
        assert {path: text(torch_dir, path) for path in TOUCHED} == edited
        assert state(torch_dir) == "applied"
        install.revert(torch_dir)
        assert snapshot(torch_dir) == pristine
    assert sorted(seen) == ["applied", "interrupted", "not applied"]


def killed(command, torch_dir: Path, at: int) -> None:
    """Run a command in a process that ends at its ``at``-th operation, if it has so many."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), pytest.MonkeyPatch.context() as patch:
            Fault(patch, at, None)
            command(torch_dir)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (0, 77)


def in_child(function) -> str:
    """Call ``function`` in a forked process; what it returned or raised, as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(function())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writer, said.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.once
def test_the_disk_is_full_in_the_middle_of_a_file(torch_dir: Path, edited: dict[str, str]) -> None:
    """A real write of a part of the bytes: no file may grow beyond a limit, as on a full disk."""
    original = snapshot(torch_dir)
    largest = max(len(text.encode()) for text in edited.values())

    def limited(limit: int, command=install.apply):
        def run() -> str:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            return command(torch_dir)

        return run

    for limit in (0, 100, 5000, largest // 2, largest - 1):
        said = in_child(limited(limit))
        assert said.startswith("WriteError: torch can't be changed (File too large"), said
        assert state(torch_dir) == "not applied"
        assert snapshot(torch_dir) == original
    install.apply(torch_dir)
    patched = snapshot(torch_dir)
    for limit in (0, 100, largest // 2):
        said = in_child(limited(limit, install.revert))
        assert said.startswith("WriteError: torch can't be changed (File too large"), said
        assert state(torch_dir) == "applied"
        assert snapshot(torch_dir) == patched
    assert "patched already" in in_child(limited(largest + 1))
    install.revert(torch_dir)
    assert snapshot(torch_dir) == original


@pytest.mark.once
@pytest.mark.parametrize("where", ["torch", "torch/_inductor", "torch/_inductor/fx_passes"])
def test_directories_that_one_may_only_read(
    torch_dir: Path, edited: dict[str, str], where: str
) -> None:
    """As somebody who owns nothing here: a torch that the administrator installed."""
    if os.geteuid():
        pytest.skip("only root can become somebody else; test_read_only_directory is run instead")
    os.chmod(torch_dir.parent / BUCKETING, 0o644)
    original = snapshot(torch_dir)
    folders = [torch_dir, *(p for p in torch_dir.rglob("*") if p.is_dir())]
    above = [p for p in torch_dir.parents if p.owner() == torch_dir.owner()]

    def as_nobody(command):
        def run() -> str:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            return command(torch_dir)

        return run

    modes = {p: p.stat().st_mode for p in (*folders, *above)}
    # Everything can be written but one directory; what leads here can be passed.
    for folder in folders:
        os.chmod(folder, 0o777)
    for folder in above:
        os.chmod(folder, modes[folder] | 0o555)
    os.chmod(torch_dir.parent / where, 0o555)
    try:
        said = in_child(as_nobody(install.apply))
        assert said.startswith("WriteError: torch can't be changed (Permission denied"), said
        assert "is not patched" in in_child(as_nobody(lambda d: install.status(d).message))
        assert not (torch_dir / STATE_DIR).exists()
        os.chmod(torch_dir.parent / where, 0o777)
        install.apply(torch_dir)
        patched = {path: text(torch_dir, path) for path in TOUCHED}
        os.chmod(torch_dir.parent / where, 0o555)
        said = in_child(as_nobody(install.revert))
        assert said.startswith("WriteError: torch can't be changed (Permission denied"), said
        assert {path: text(torch_dir, path) for path in TOUCHED} == patched == edited
        # It tells the truth to those, too, who may not change anything.
        assert "is patched with series" in in_child(as_nobody(lambda d: install.status(d).message))
        install.revert(torch_dir)
    finally:
        for folder, mode in modes.items():
            os.chmod(folder, mode)
    assert snapshot(torch_dir) == original


@pytest.mark.once
def test_processes_that_race_and_are_killed(tiny) -> None:
    """Four processes apply, revert and look, over and over; some are killed at a random moment."""
    torch_dir, edited = tiny
    pristine = snapshot(torch_dir)
    original = {path: text(torch_dir, path) for path in TOUCHED}
    rng = random.Random(0)
    order = [CONFIG, BUCKETING, FSDP, CODECACHE]

    def works(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(1000):
            command = choose.choice((install.apply, install.revert, install.status))
            with contextlib.suppress(NotAppliedError):
                command(torch_dir)

    for number in range(12):
        children = []
        for i in range(4):
            child = os.fork()
            if child == 0:
                try:
                    works(10 * number + i)
                except BaseException as error:
                    os.write(2, f"{type(error).__name__}: {error}\n".encode())
                    os._exit(1)
                os._exit(0)
            children.append(child)
        time.sleep(rng.uniform(0.05, 0.3))
        for child in children:
            os.kill(child, signal.SIGKILL)
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert set(ends) <= {0, -signal.SIGKILL}, ends
        sides = [text(torch_dir, path) == edited[path] for path in order]
        assert all(
            s or text(torch_dir, p) == original[p] for s, p in zip(sides, order, strict=True)
        )
        assert sides == sorted(sides, reverse=True)
        expected = "applied" if all(sides) else "interrupted" if any(sides) else "not applied"
        assert state(torch_dir) == expected
        if number % 2:
            install.apply(torch_dir)
            assert state(torch_dir) == "applied"
    install.apply(torch_dir)
    install.revert(torch_dir)
    assert snapshot(torch_dir) == pristine


@pytest.mark.once
def test_read_only_directory(torch_dir: Path, edited: dict[str, str]) -> None:
    folder = torch_dir / "_inductor" / "fx_passes"
    if (
        os.geteuid() == 0
        and subprocess.run(
            ["chattr", "+i", str(folder)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("root, and the file system has no immutable flag: nothing is read-only here")
    if os.geteuid():
        os.chmod(folder, 0o555)
    try:
        with pytest.raises(
            WriteError, match=r"torch can't be changed .* no file of torch was changed"
        ):
            install.apply(torch_dir)
        assert state(torch_dir) == "not applied"
        assert not (torch_dir / STATE_DIR).exists()
    finally:
        subprocess.run(["chattr", "-i", str(folder)], capture_output=True, check=False)
        os.chmod(folder, 0o755)


@pytest.mark.once
def test_two_at_once(
    torch_dir: Path, edited: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = series.find_torch(torch_dir)
    monkeypatch.setattr(install, "LOCK_TIMEOUT_S", 0.2)
    with install._locked(tree, create=True):
        for command in (install.apply, install.revert, install.status):
            with pytest.raises(BusyError, match="another patch command is at work"):
                command(torch_dir)
    monkeypatch.setattr(install, "LOCK_TIMEOUT_S", 30.0)
    for _ in range(5):
        results: list[str] = []
        threads = [
            threading.Thread(target=lambda out=results: out.append(install.apply(torch_dir)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted("already" in result for result in results) == [False, True, True, True]
        install.revert(torch_dir)
        assert not (torch_dir / STATE_DIR).exists()


@pytest.mark.once
def test_torch_installed_again(torch_dir: Path, edited: dict[str, str], tmp_path: Path) -> None:
    original = tmp_path / "original"
    shutil.copytree(torch_dir, original)
    install.apply(torch_dir)
    # The same version again, in part: the rest is finished.
    shutil.copyfile(original / "_inductor" / "config.py", torch_dir / "_inductor" / "config.py")
    assert state(torch_dir) == "interrupted"
    install.apply(torch_dir)
    assert text(torch_dir, CONFIG) == edited[CONFIG]
    # Another version over it: what we remember is of no use any more.
    shutil.copytree(original, torch_dir, dirs_exist_ok=True)
    for path in TOUCHED:
        (torch_dir.parent / path).write_text("# newer\n" + text(torch_dir, path))
    (torch_dir / "version.py").write_text(f"__version__ = '{MINOR}.99'\n")
    assert state(torch_dir) == "not applied"
    install.apply(torch_dir)
    assert text(torch_dir, CONFIG) == "# newer\n" + edited[CONFIG]
    install.revert(torch_dir)
    assert text(torch_dir, CONFIG).startswith("# newer\n")


@pytest.mark.once
def test_another_edition_of_the_series(
    torch_dir: Path, edited: dict[str, str], tmp_path: Path
) -> None:
    install.apply(torch_dir)
    shutil.rmtree(tmp_path / "torch_patches")
    old = text(torch_dir, CONFIG)
    write_series(tmp_path / "torch_patches", MINOR, {CONFIG: (old, "# newer\n" + old)})
    with pytest.raises(
        RuntimeError, match=r"another edition .* run 'patch revert', then 'patch apply'"
    ):
        install.apply(torch_dir)
    install.revert(torch_dir)


@pytest.mark.once
def test_no_old_bytecode_survives(tmp_path: Path, edited: dict[str, str], torch_dir: Path) -> None:
    """Same size and same second, which is all that Python looks at; and an unchecked .pyc."""
    config = torch_dir.parent / CONFIG
    import py_compile

    for mode in (
        py_compile.PycInvalidationMode.TIMESTAMP,
        py_compile.PycInvalidationMode.UNCHECKED_HASH,
    ):
        pyc = Path(py_compile.compile(str(config), invalidation_mode=mode))
        install.apply(torch_dir)
        assert not pyc.exists()
        assert int(config.stat().st_mtime) != 10**9
        pyc.write_bytes(b"stale")
        install.revert(torch_dir)
        assert not pyc.exists()


@pytest.fixture(scope="module")
def real_torch(tmp_path_factory) -> Path:
    """An importable torch of which only ``_inductor`` can be changed; the rest are symlinks."""
    folder = tmp_path_factory.mktemp("real") / "torch"
    folder.mkdir()
    for entry in TORCH_DIR.iterdir():
        if entry.name == "_inductor":
            shutil.copytree(
                entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        elif entry.name in ("__init__.py", "version.py"):
            shutil.copyfile(entry, folder / entry.name)
        elif entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)
    return folder


IMPORTS = """
import sys, torch, torch._inductor.config as config
assert torch.__file__.startswith({torch!r}), torch.__file__
import torch._inductor.compile_fx, torch._inductor.fx_passes.fsdp
import torch._inductor.fx_passes.overlap_scheduling, torch._inductor.fx_passes.overlap_manual_scheduling
x = torch.randn(4)
assert torch.compile(torch.sin, backend="aot_eager")(x).equal(torch.sin(x))
print(hasattr(config.aten_distributed_optimizations, "bucket_payload_order_key"))
"""

KILL = """
import os, sys
sys.orig_argv = ["python", "torch-ext-bucketing"]  # as the command line, whose import touches nothing
from torch_ext_bucketing.__main__ import main
real, count = os.replace, 0
def replace(source, target):
    global count
    if str(target).endswith(".py"):
        count += 1
        if count == {at}:
            os._exit(9)
    real(source, target)
os.replace = replace
main(["patch", "{action}"])
"""


def test_a_real_torch_imports_at_every_stage(real_torch: Path) -> None:
    """The real series: applied, killed between two files, finished, reverted."""
    where = (real_torch.parent, ROOT)
    imports = IMPORTS.format(torch=str(real_torch))
    original = {p: p.read_bytes() for p in sorted(real_torch.glob("_inductor/**/*.py"))}

    def command(action: str, check: bool = True) -> str:
        done = run_python(
            "", *where, args=("-m", "torch_ext_bucketing", "patch", action), check=check
        )
        return done.stdout + done.stderr

    assert "is not patched" in command("status", check=False)
    assert run_python(imports, *where).stdout == "False\n"
    done = run_python(KILL.format(at=3, action="apply"), *where, check=False)
    assert done.returncode == 9, done.stderr
    assert "interrupted; 2 of" in command("status", check=False)
    assert run_python(imports, *where).stdout == "True\n"
    done = run_python("import torch_ext_bucketing", *where)
    assert "a patch command was interrupted" in done.stderr
    assert "finished an interrupted patch" in command("apply")
    assert run_python(imports, *where).stdout == "True\n"
    done = run_python(
        "import torch_ext_bucketing; print(torch_ext_bucketing.hooks.hooks_status())", *where
    )
    assert "state='on disk'" in done.stdout
    assert repr(hooks_status().digest) in done.stdout  # the same bytes as in memory
    assert done.stderr == ""
    assert run_python(KILL.format(at=2, action="revert"), *where, check=False).returncode == 9
    assert "'patch revert' was interrupted" in command("status", check=False)
    assert run_python(imports, *where).stdout == "True\n"
    assert "put the original" in command("revert")
    assert {p: p.read_bytes() for p in sorted(real_torch.glob("_inductor/**/*.py"))} == original


# Forks a child for each file to come, as importing torch takes longer than what is asked here.
EACH_PREFIX = """
import os, sys
sys.path.insert(0, {folder!r})
import sympy, torch
from pathlib import Path
assert not any(name.startswith("torch._inductor") for name in sys.modules)
for path, after in {files!r}:
    Path(path).write_bytes(Path(after).read_bytes())
    sys.stdout.flush()
    child = os.fork()
    if not child:
        exec({imports!r})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, path
"""


def test_every_prefix_of_the_real_series_imports(real_torch: Path, tmp_path: Path) -> None:
    """A kill leaves some first files of the order patched; all such torches import, in one process."""
    tree = series.find_torch(real_torch)
    changes = in_import_order(tree.apply(series.choose_series(tree.version)))
    assert changes[0].path == CONFIG
    files = []
    for number, change in enumerate(changes[:-1]):
        (tmp_path / str(number)).write_bytes(change.after)
        files.append((str(tree.path(change.path)), str(tmp_path / str(number))))
    imports = IMPORTS.format(torch=str(real_torch))
    code = EACH_PREFIX.format(folder=str(real_torch.parent), files=files, imports=imports)
    try:
        assert run_python(code, real_torch.parent).stdout == "True\n" * len(files)
    finally:
        for change in changes:
            tree.path(change.path).write_bytes(change.before)


@pytest.mark.parametrize("found", series.list_series(), ids=lambda found: found.name)
def test_the_real_series_applies_to_its_torch(found: series.Series, torch_dir: Path) -> None:
    if found.name != MINOR:
        pytest.skip(f"series {found.name} is for another torch than {MINOR}")
    tree = series.find_torch(TORCH_DIR)
    for path in tree.apply(found):
        target = torch_dir.parent / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree.path(path), target)
    original = snapshot(torch_dir)
    install.apply(torch_dir)
    for path, change in tree.apply(found).items():
        assert (torch_dir.parent / path).read_bytes() == change.after, path
    install.revert(torch_dir)
    assert snapshot(torch_dir) == original


def build(folder: Path, *command: str) -> Path:
    """Run a build command in a copy of the checkout; the one file that it made."""
    source = folder / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(
            ".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
        ),
    )
    out = folder / "out"
    done = subprocess.run(
        [sys.executable, *command, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


def shipped(names: list[str], folder: str) -> list[str]:
    return sorted(
        name.split(folder, 1)[1] for name in names if folder in name and not name.endswith("/")
    )


FILES = sorted(
    str(p.relative_to(ROOT / "torch_patches"))
    for p in (ROOT / "torch_patches").rglob("*")
    if p.is_file()
)
FIND = "import os; from torch_ext_bucketing.hooks.series import *; print(find_patches_dir()); print([len(s.patches) for s in list_series()])"


@pytest.mark.once
def test_patches_are_found_from_a_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is needed to build")
    wheel = build(
        tmp_path, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", ".", "-w"
    )
    with zipfile.ZipFile(wheel) as archive:
        assert shipped(archive.namelist(), "_torch_patches/") == FILES
        archive.extractall(tmp_path / "installed")
    out = run_python(FIND, tmp_path / "installed").stdout.splitlines()
    assert out[0] == str(tmp_path / "installed" / "torch_ext_bucketing" / "_torch_patches")
    assert out[1] == str([len(s.patches) for s in series.list_series()])


@pytest.mark.once
def test_patches_are_found_from_an_sdist(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is needed to build")
    sdist = build(tmp_path, "setup.py", "-q", "sdist", "-d")
    with tarfile.open(sdist) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
        assert shipped(files, "/torch_patches/") == FILES
        archive.extractall(tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    out = run_python(FIND, root).stdout.splitlines()
    assert out[0] == str(root / "torch_patches")


def test_patches_are_found_from_a_checkout_as_an_editable_install_sees_it() -> None:
    out = run_python(FIND, ROOT).stdout.splitlines()
    assert out[0] == str(ROOT / "torch_patches")


@pytest.mark.once
def test_damaged_installations_are_named(tmp_path: Path) -> None:
    folder = copy_package(tmp_path)
    code = "import torch_ext_bucketing"
    assert "no torch patches found in" in run_python(code, folder).stderr
    write_small_series(folder / "torch_patches")
    (folder / "torch_patches" / MINOR / "0001-edit.patch").unlink()
    assert "is incomplete: found numbers [2], expected 1 to 2" in run_python(code, folder).stderr


def test_command_line_help_documents_exit_codes(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["patch", "--help"])
    assert caught.value.code == 0
    assert "3  status: torch does not have the hooks" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["patch", "undo"])
    assert caught.value.code == 2
