"""Hooks on disk: ``patch apply | revert | status``, on a torch directory of a few lines."""

import builtins
import contextlib
import hashlib
import io
import os
import py_compile
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from patching_trees import (
    BUCKETING,
    CONFIG,
    FSDP,
    MINOR,
    ROOT,
    TINY,
    TOUCHED,
    copy_package,
    run_python,
    write_series,
    write_tiny,
)

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.errors import HooksError, PatchDoesNotApplyError
from torch_ext_bucketing.hooks import disk, series

COMMANDS = {"apply": disk.apply, "revert": disk.revert}
ORDER = [CONFIG, BUCKETING, FSDP]  # bucketing before fsdp, which imports it


class Tiny:
    """A torch directory, old enough to tell times apart, and its patched text by path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "site" / "torch"
        self.series = folder / "torch_patches"
        self.edited = write_tiny(self.series, self.folder)
        os.chmod(self.path(BUCKETING), 0o640)

    def path(self, path: str) -> Path:
        return self.folder.parent / path

    def text(self) -> dict[str, str]:
        return {path: self.path(path).read_text() for path in TOUCHED}

    def state(self) -> str:
        return disk.status(self.folder).state

    def snapshot(self) -> dict[str, tuple]:
        """Every file around: bytes, mode and modification time."""
        result = {}
        for path in sorted(self.folder.parent.rglob("*")):
            info, name = path.lstat(), str(path.relative_to(self.folder.parent))
            if path.is_symlink():
                result[name] = (os.readlink(path),)
            elif path.is_dir():
                result[name] = (info.st_mode,)
            else:
                digest = hashlib.sha256(path.read_bytes()).hexdigest()
                result[name] = (digest, info.st_mode, info.st_mtime_ns)
        return result

    def some_first_files(self) -> str:
        """The state, after checking it: some first files of the order are patched, and no other."""
        text = self.text()
        sides = [text[path] == self.edited[path] for path in ORDER]
        for side, path in zip(sides, ORDER, strict=True):
            assert side or text[path] == TINY[path]
        assert sides == sorted(sides, reverse=True)
        found = disk.status(self.folder)
        expected = "applied" if all(sides) else "interrupted" if any(sides) else "not applied"
        assert found.state == expected, found
        if expected == "interrupted":
            assert f"{sum(sides)} of 3 files" in found.message
        return expected

    def again(self) -> Iterator[int]:
        """Numbers from 1 on, each time with the directory as it was at first."""
        keep = self.folder.parent.with_name("keep")
        shutil.copytree(self.folder, keep, symlinks=True)
        for number in range(1, 1000):
            shutil.rmtree(self.folder)
            shutil.copytree(keep, self.folder, symlinks=True)
            yield number


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Its series is the one in use."""
    made = Tiny(tmp_path)
    monkeypatch.setattr(series, "find_patches_dir", lambda: made.series)
    return made


def test_apply_twice_and_revert_twice(tiny: Tiny, capsys) -> None:
    original = tiny.snapshot()
    where = ["--torch-dir", str(tiny.folder)]
    assert main(["patch", "status", *where]) == 3
    assert main(["patch", "revert", *where]) == 1
    assert "is not patched; nothing to revert" in capsys.readouterr().err
    assert tiny.snapshot() == original

    assert main(["patch", "apply", *where]) == 0
    assert "patched 3 files" in capsys.readouterr().out
    patched = tiny.snapshot()
    assert tiny.text() == tiny.edited
    assert tiny.path(BUCKETING).stat().st_mode & 0o777 == 0o640
    assert not tiny.path("test").exists()
    assert main(["patch", "status", *where]) == 0
    assert main(["patch", "apply", *where]) == 0
    assert "patched already; nothing to do" in capsys.readouterr().out
    assert tiny.snapshot() == patched

    # The parent directory names it as well.
    assert main(["patch", "revert", "--torch-dir", str(tiny.folder.parent)]) == 0
    assert tiny.snapshot() == original
    assert main(["patch", "revert", *where]) == 1


def test_a_source_checkout_and_files_that_are_links(tiny: Tiny, tmp_path: Path) -> None:
    """What a link or an inode shares with others stays as it is."""
    root = tiny.folder.parent
    (root / "version.txt").write_text(f"{MINOR}.0a0\n")
    (root / "setup.py").touch()
    (tiny.folder / "version.py").unlink()
    cache, linked = tmp_path / "cache.py", tiny.folder / "linked.py"
    os.link(root / CONFIG, cache)
    os.rename(root / FSDP, linked)
    os.symlink("../../linked.py", root / FSDP)
    contents = cache.read_bytes(), linked.read_bytes()
    original = tiny.snapshot()
    for _ in range(2):
        disk.apply(root)
        assert tiny.text() == tiny.edited
        assert (cache.read_bytes(), linked.read_bytes()) == contents
        assert disk.status(root).state == tiny.state() == "applied"
    disk.revert(root)
    assert tiny.snapshot() == original


@pytest.mark.parametrize("path", TOUCHED)
def test_edited_after_apply(tiny: Tiny, path: str) -> None:
    disk.apply(tiny.folder)
    tiny.path(path).write_text(tiny.edited[path] + "# by hand\n")
    before = tiny.snapshot()
    for command in COMMANDS.values():
        with pytest.raises(HooksError, match=rf"{path}.*Undo that edit"):
            command(tiny.folder)
    assert tiny.state() == "edited"
    assert tiny.snapshot() == before
    tiny.path(path).write_text(tiny.edited[path])
    disk.revert(tiny.folder)
    assert tiny.state() == "not applied"


def test_torches_that_it_does_not_fit(tiny: Tiny, tmp_path: Path, capsys) -> None:
    config = tiny.path(CONFIG)
    good = config.read_text()
    config.write_text(good.replace("class aten_distributed_optimizations", "class aten"))
    before = tiny.snapshot()
    with pytest.raises(
        PatchDoesNotApplyError, match=rf"{CONFIG}: @@ .*: line \d+: expected 'class"
    ):
        disk.apply(tiny.folder)
    assert main(["patch", "apply", "--torch-dir", str(tiny.folder)]) == 1
    assert "error: 1 hunk(s) of the torch patch do not fit" in capsys.readouterr().err
    assert tiny.snapshot() == before
    config.write_text(good)
    tiny.path(FSDP).unlink()
    with pytest.raises(PatchDoesNotApplyError, match=rf"{FSDP}: there is no such file"):
        disk.apply(tiny.folder)
    (tiny.folder / "version.py").write_text("__version__ = '1.13.0'\n")
    with pytest.raises(HooksError, match=r"torch 1.13.0 is too old"):
        disk.apply(tiny.folder)
    (tiny.folder / "version.py").write_text("version = 1\n")
    with pytest.raises(HooksError, match=r"does not say which version"):
        disk.status(tiny.folder)
    with pytest.raises(HooksError, match=r"is not a torch directory"):
        disk.status(tmp_path)
    assert not list(tiny.folder.glob(f"{disk.STATE_DIR}*"))


def test_a_result_that_is_no_python_is_refused(tiny: Tiny) -> None:
    before = tiny.snapshot()
    shutil.rmtree(tiny.series)
    write_series(tiny.series, MINOR, {FSDP: (TINY[FSDP], TINY[FSDP] + "def\n")})
    with pytest.raises(HooksError, match=rf"the patched {FSDP} does not compile"):
        disk.apply(tiny.folder)
    assert tiny.snapshot() == before


def test_native(tiny: Tiny) -> None:
    for path in TOUCHED:
        tiny.path(path).write_text(tiny.edited[path])
    before = tiny.snapshot()
    assert tiny.state() == "native"
    assert "natively; nothing to do" in disk.apply(tiny.folder)
    with pytest.raises(HooksError, match="natively; nothing to revert"):
        disk.revert(tiny.folder)
    assert tiny.snapshot() == before


# ---------------------------------------------------------------- refused, killed, raced


class Fault:
    """Makes one file operation of the process fail, or end it, at a chosen call.

    Counted are the calls that may change the disk, as ``disk`` and the standard library make them.
    """

    NAMES = ("open", "replace", "rename", "mkdir", "unlink", "fsync", "rmdir", "chmod", "utime")

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException | None
    ) -> None:
        self.count, self.at, self.error = 0, at, error
        wrapped = self.wrap(io.open)
        monkeypatch.setattr(io, "open", wrapped)
        monkeypatch.setattr(builtins, "open", wrapped)
        for name in self.NAMES:
            monkeypatch.setattr(os, name, self.wrap(getattr(os, name)))

    def wrap(self, real):
        def call(path, *args, **kwargs):
            self.count += 1
            if self.count == self.at:
                if self.error is None:
                    os._exit(77)
                raise self.error
            return real(path, *args, **kwargs)

        return call


def killed(command: Callable, tiny: Tiny, at: int) -> bool:
    """Run a command in a process that ends at its ``at``-th operation; whether it had so many."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), pytest.MonkeyPatch.context() as patch:
            Fault(patch, at, None)
            command(tiny.folder)
        os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert end in (0, 77)
    return end == 77


@pytest.mark.parametrize("name", ["apply", "revert"])
def test_refused_by_the_system_at_every_operation(tiny: Tiny, name: str) -> None:
    """The command can be repeated; apply leaves all files or none, revert says what is left."""
    pristine = tiny.snapshot()
    if name == "revert":
        disk.apply(tiny.folder)
    outcomes = set()
    for at in tiny.again():
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, at, OSError(28, os.strerror(28), "somewhere"))
            said = ""
            with contextlib.suppress(OSError):  # before anything was looked at
                try:
                    COMMANDS[name](tiny.folder)
                except HooksError as error:
                    said = str(error)
        if fault.count < at:
            break
        found = tiny.some_first_files()
        assert found in ("applied", "not applied") or name == "revert"
        if found == "interrupted":
            assert os.strerror(28) in said
            assert "run 'torch-ext-bucketing patch apply' or 'patch revert' to finish" in said
        outcomes.add(found)
        with contextlib.suppress(HooksError):
            COMMANDS[name](tiny.folder)
        assert tiny.state() == {"apply": "applied", "revert": "not applied"}[name]
        if name == "apply":
            assert tiny.text() == tiny.edited
            disk.revert(tiny.folder)
        assert tiny.snapshot() == pristine, at
    assert at > 20
    assert len(outcomes) > 1


@pytest.mark.parametrize("name", ["apply", "revert"])
def test_killed_at_every_operation(tiny: Tiny, name: str) -> None:
    """And every other time again in a command that finishes or undoes it, at any operation."""
    pristine = tiny.snapshot()
    if name == "revert":
        disk.apply(tiny.folder)
    seen: set[str] = set()
    rng = random.Random(name)
    for at in tiny.again():
        if not killed(COMMANDS[name], tiny, at):
            break
        seen.add(tiny.some_first_files())
        if at % 2:
            killed(rng.choice(list(COMMANDS.values())), tiny, rng.randrange(1, 60))
            tiny.some_first_files()
        if at % 3:
            disk.apply(tiny.folder)
            assert tiny.text() == tiny.edited
        with contextlib.suppress(HooksError):
            disk.revert(tiny.folder)
        assert tiny.snapshot() == pristine, at
    assert at > 20
    assert sorted(seen) == ["applied", "interrupted", "not applied"]


def test_two_at_once(tiny: Tiny) -> None:
    results: list[str] = []
    tree = series.find_torch(tiny.folder)

    def go() -> None:
        results.append(disk.apply(tiny.folder))

    threads = [threading.Thread(target=go) for _ in range(4)]
    with disk._locked(tree):
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        assert not results, "they wait"
        assert disk.look(tree).state == "not applied"
    for thread in threads:
        thread.join()
    assert sorted("already" in result for result in results) == [False, True, True, True]


@pytest.mark.parametrize("where", ["torch", "torch/_inductor", "torch/_inductor/fx_passes"])
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_directories_that_one_may_only_read(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """Known before the first file is replaced."""
    if name == "revert":
        disk.apply(tiny.folder)
    before, folder, access = tiny.snapshot(), tiny.path(where), os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != folder and access(p, mode))
    with pytest.raises(
        HooksError, match=rf"torch can't be changed .*Permission denied: '{folder}'"
    ):
        COMMANDS[name](tiny.folder)
    assert tiny.snapshot() == before


# ---------------------------------------------------------------- what may have happened since


def test_torch_installed_again(tiny: Tiny) -> None:
    disk.apply(tiny.folder)
    # The same version again, in part: the rest is finished.
    tiny.path(CONFIG).write_text(TINY[CONFIG])
    assert tiny.state() == "interrupted"
    disk.apply(tiny.folder)
    assert tiny.text() == tiny.edited
    # Another version over it: what we remember is of no use any more.
    for path in TOUCHED:
        tiny.path(path).write_text("# newer\n" + TINY[path])
    (tiny.folder / "version.py").write_text(f"__version__ = '{MINOR}.99'\n")
    assert tiny.state() == "not applied"
    disk.apply(tiny.folder)
    assert tiny.text() == {path: "# newer\n" + text for path, text in tiny.edited.items()}
    disk.revert(tiny.folder)
    assert tiny.text() == {path: "# newer\n" + text for path, text in TINY.items()}


def test_another_edition_of_the_series_replaces_the_one_that_is_there(tiny: Tiny) -> None:
    pristine = tiny.snapshot()
    disk.apply(tiny.folder)
    shutil.rmtree(tiny.series)
    newer = "# newer\n" + TINY[CONFIG]
    write_series(tiny.series, MINOR, {CONFIG: (TINY[CONFIG], newer)})
    assert "patched 1 files" in disk.apply(tiny.folder)
    assert tiny.text() == TINY | {CONFIG: newer}
    disk.revert(tiny.folder)
    assert tiny.snapshot() == pristine


@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_damaged_originals_are_not_put_back(tiny: Tiny, damage: str) -> None:
    disk.apply(tiny.folder)
    kept = disk._kept(series.find_torch(tiny.folder), "before", FSDP)
    kept.unlink() if damage == "gone" else kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(HooksError, match="is damaged; install torch again"):
        disk.revert(tiny.folder)
    assert tiny.text() == tiny.edited
    (tiny.folder / disk.STATE_DIR / "record.json").write_text("{")
    with pytest.raises(HooksError, match=r"record.json can't be read"):
        tiny.state()


def test_no_old_bytecode_survives(tiny: Tiny) -> None:
    """One that says nothing of its source, and one that Python would take for current."""
    modes = py_compile.PycInvalidationMode
    for mode in (modes.TIMESTAMP, modes.UNCHECKED_HASH):
        pyc = Path(py_compile.compile(str(tiny.path(CONFIG)), invalidation_mode=mode))
        disk.apply(tiny.folder)
        assert not pyc.exists()
        pyc.write_bytes(b"stale")
        disk.revert(tiny.folder)
        assert not pyc.exists()


# ---------------------------------------------------------------- the package that has the series


def build(folder: Path, *command: str) -> Path:
    """Run a build command in a copy of the checkout; the one file that it made."""
    source = folder / "source"
    ignored = (".git", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignored))
    out = folder / "out"
    done = subprocess.run(
        [sys.executable, *command, str(out)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.iterdir()
    return made


def shipped(names: list[str], folder: str) -> list[str]:
    return sorted(
        name.split(folder, 1)[1] for name in names if folder in name and not name.endswith("/")
    )


SERIES = ROOT / "torch_patches"
FILES = sorted(str(p.relative_to(SERIES)) for p in SERIES.rglob("*") if p.is_file())
FIND = "import os; from torch_ext_bucketing.hooks.series import *; print(find_patches_dir()); print([len(s.diffs) for s in list_series()])"


def found_in(root: Path) -> list[str]:
    return run_python(FIND, root).stdout.splitlines()


def test_patches_are_found_from_a_wheel_from_an_sdist_and_from_a_checkout(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="setuptools is needed to build")
    wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", ".", "-w")
    with zipfile.ZipFile(build(tmp_path / "wheel", *wheel)) as archive:
        assert shipped(archive.namelist(), "_torch_patches/") == FILES
        archive.extractall(tmp_path / "installed")
    sizes = str([len(s.diffs) for s in series.list_series()])
    package = tmp_path / "installed" / "torch_ext_bucketing"
    assert found_in(tmp_path / "installed") == [str(package / "_torch_patches"), sizes]
    assert found_in(ROOT) == [str(SERIES), sizes]  # as an editable install sees it
    with tarfile.open(build(tmp_path / "sdist", "setup.py", "-q", "sdist", "-d")) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
        assert shipped(files, "/torch_patches/") == FILES
        archive.extractall(tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    assert found_in(root)[0] == str(root / "torch_patches")


def test_an_installation_without_patches_is_named(tmp_path: Path) -> None:
    code = "import torch_ext_bucketing.hooks as h; h.install()"
    done = run_python(code, copy_package(tmp_path), check=False)
    assert "no torch patches found in" in done.stderr


def test_command_line_help_documents_exit_codes(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["patch", "--help"])
    assert caught.value.code == 0
    assert "3  status: torch does not have the hooks" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["patch", "undo"])
    assert caught.value.code == 2
