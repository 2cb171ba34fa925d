"""Hooks on disk: ``patch apply | revert | status``."""

from __future__ import annotations

import builtins
import contextlib
import hashlib
import io
import os
import random
import shutil
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from patching_trees import (
    BUCKETING,
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
from torch_ext_bucketing.hooks import HooksError, PatchDoesNotApplyError, disk, series
from torch_ext_bucketing.hooks.patches import apply_patches

pytestmark = needs_unpatched_torch

COMMANDS = {"apply": disk.apply, "revert": disk.revert}
ORDER = [CONFIG, BUCKETING, FSDP]  # bucketing before fsdp, which imports it


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
        info, name = path.lstat(), str(path.relative_to(folder))
        if path.is_symlink():
            result[name] = (os.readlink(path),)
        elif path.is_dir():
            result[name] = (info.st_mode,)
        else:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            result[name] = (digest, info.st_mode, info.st_mtime_ns)
    return result


def state(torch_dir: Path) -> str:
    return disk.status(torch_dir).state


def text(torch_dir: Path, path: str) -> str:
    return (torch_dir.parent / path).read_text()


def leftovers(torch_dir: Path) -> list[Path]:
    return list(torch_dir.glob(f"{disk.STATE_DIR}*"))


@pytest.mark.once
def test_apply_twice_and_revert_twice(torch_dir: Path, edited: dict[str, str], capsys) -> None:
    original = snapshot(torch_dir)
    where = ["--torch-dir", str(torch_dir)]
    assert main(["patch", "status", *where]) == 3
    assert main(["patch", "revert", *where]) == 1
    assert "is not patched; nothing to revert" in capsys.readouterr().err
    assert snapshot(torch_dir) == original

    assert main(["patch", "apply", *where]) == 0
    assert "patched 3 files" in capsys.readouterr().out
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
def test_a_source_checkout_and_files_that_are_links(
    torch_dir: Path, edited: dict[str, str], tmp_path: Path
) -> None:
    """What a link or an inode shares with others stays as it is."""
    root = torch_dir.parent
    (root / "version.txt").write_text(f"{MINOR}.0a0\n")
    (root / "setup.py").touch()
    (torch_dir / "version.py").unlink()
    cache, linked = tmp_path / "cache.py", torch_dir / "linked.py"
    os.link(root / CONFIG, cache)
    os.rename(root / FSDP, linked)
    os.symlink("../../linked.py", root / FSDP)
    contents = cache.read_bytes(), linked.read_bytes()
    original = snapshot(root)
    for _ in range(2):
        disk.apply(root)
        assert text(torch_dir, FSDP) == edited[FSDP]
        assert (cache.read_bytes(), linked.read_bytes()) == contents
        assert state(root) == state(torch_dir) == "applied"
    disk.revert(root)
    assert snapshot(root) == original


@pytest.mark.once
@pytest.mark.parametrize("path", TOUCHED)
def test_edited_after_apply(torch_dir: Path, edited: dict[str, str], path: str) -> None:
    disk.apply(torch_dir)
    target = torch_dir.parent / path
    target.write_text(edited[path] + "# by hand\n")
    before = snapshot(torch_dir)
    for command in COMMANDS.values():
        with pytest.raises(HooksError, match=rf"{path}.*Undo that edit"):
            command(torch_dir)
    assert state(torch_dir) == "edited"
    assert snapshot(torch_dir) == before
    target.write_text(edited[path])
    disk.revert(torch_dir)
    assert state(torch_dir) == "not applied"


@pytest.mark.once
def test_torches_that_it_does_not_fit(
    torch_dir: Path, edited: dict[str, str], tmp_path: Path, capsys
) -> None:
    config = torch_dir.parent / CONFIG
    good = config.read_text()
    config.write_text(good.replace("class aten_distributed_optimizations", "class aten"))
    before = snapshot(torch_dir)
    with pytest.raises(
        PatchDoesNotApplyError, match=rf"{CONFIG}: @@ .*: line \d+: expected 'class"
    ):
        disk.apply(torch_dir)
    assert snapshot(torch_dir) == before
    assert main(["patch", "apply", "--torch-dir", str(torch_dir)]) == 1
    assert "error: 1 hunk(s) of the torch patch do not fit" in capsys.readouterr().err
    config.write_text(good)
    (torch_dir.parent / FSDP).unlink()
    with pytest.raises(PatchDoesNotApplyError, match=rf"{FSDP}: there is no such file"):
        disk.apply(torch_dir)
    (torch_dir / "version.py").write_text("__version__ = '1.13.0'\n")
    with pytest.raises(HooksError, match=r"torch 1.13.0 is too old"):
        disk.apply(torch_dir)
    (torch_dir / "version.py").write_text("version = 1\n")
    with pytest.raises(HooksError, match=r"does not say which version"):
        disk.status(torch_dir)
    with pytest.raises(HooksError, match=r"is not a torch directory"):
        disk.status(tmp_path)
    assert not leftovers(torch_dir)


@pytest.mark.once
def test_a_result_that_is_no_python_is_refused(tiny, tmp_path: Path) -> None:
    torch_dir, _ = tiny
    shutil.rmtree(tmp_path / "torch_patches")
    old = text(torch_dir, FSDP)
    write_series(tmp_path / "torch_patches", MINOR, {FSDP: (old, old + "def\n")})
    with pytest.raises(HooksError, match=rf"the patched {FSDP} does not compile"):
        disk.apply(torch_dir)
    assert text(torch_dir, FSDP) == old
    assert not leftovers(torch_dir)


@pytest.mark.once
def test_native(torch_dir: Path, edited: dict[str, str]) -> None:
    for path in TOUCHED:
        (torch_dir.parent / path).write_text(edited[path])
    before = snapshot(torch_dir)
    assert state(torch_dir) == "native"
    assert "natively; nothing to do" in disk.apply(torch_dir)
    with pytest.raises(HooksError, match="natively; nothing to revert"):
        disk.revert(torch_dir)
    assert snapshot(torch_dir) == before


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


def killed(command: Callable, torch_dir: Path, at: int) -> bool:
    """Run a command in a process that ends at its ``at``-th operation; whether it had so many."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), pytest.MonkeyPatch.context() as patch:
            Fault(patch, at, None)
            command(torch_dir)
        os._exit(0)
    end = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert end in (0, 77)
    return end == 77


def some_first_files(torch_dir: Path, edited: dict[str, str], original: dict[str, str]) -> str:
    """The state, after checking it: some first files of the order are patched, and no other."""
    sides = [text(torch_dir, path) == edited[path] for path in ORDER]
    for side, path in zip(sides, ORDER, strict=True):
        assert side or text(torch_dir, path) == original[path]
    assert sides == sorted(sides, reverse=True)
    found = disk.status(torch_dir)
    expected = "applied" if all(sides) else "interrupted" if any(sides) else "not applied"
    assert found.state == expected, found
    if expected == "interrupted":
        assert f"{sum(sides)} of 3 files" in found.message
    return expected


@pytest.mark.once
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_refused_by_the_system_at_every_operation(tiny, tmp_path: Path, name: str) -> None:
    """The command can be repeated; apply leaves all files or none, revert says what is left."""
    torch_dir, edited = tiny
    original = {path: text(torch_dir, path) for path in TOUCHED}
    pristine = snapshot(torch_dir)
    if name == "revert":
        disk.apply(torch_dir)
    keep = tmp_path / "keep"
    shutil.copytree(torch_dir, keep, symlinks=True)
    outcomes = set()
    for at in range(1, 1000):
        shutil.rmtree(torch_dir)
        shutil.copytree(keep, torch_dir, symlinks=True)
        with pytest.MonkeyPatch.context() as patch:
            fault = Fault(patch, at, OSError(28, os.strerror(28), "somewhere"))
            said = ""
            with contextlib.suppress(OSError):  # before anything was looked at
                try:
                    COMMANDS[name](torch_dir)
                except HooksError as error:
                    said = str(error)
        if fault.count < at:
            break
        found = some_first_files(torch_dir, edited, original)
        assert found in ("applied", "not applied") or name == "revert"
        if found == "interrupted":
            assert os.strerror(28) in said
            assert "run 'torch-ext-bucketing patch apply' or 'patch revert' to finish" in said
        outcomes.add(found)
        with contextlib.suppress(HooksError):
            COMMANDS[name](torch_dir)
        assert state(torch_dir) == {"apply": "applied", "revert": "not applied"}[name]
        if name == "apply":
            assert {path: text(torch_dir, path) for path in TOUCHED} == edited
            disk.revert(torch_dir)
        assert snapshot(torch_dir) == pristine, at
    assert at > 20
    assert len(outcomes) > 1


@pytest.mark.once
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_killed_at_every_operation(tiny, tmp_path: Path, name: str) -> None:
    """And every other time again in a command that finishes or undoes it, at any operation."""
    torch_dir, edited = tiny
    pristine = snapshot(torch_dir)
    original = {path: text(torch_dir, path) for path in TOUCHED}
    if name == "revert":
        disk.apply(torch_dir)
    keep = tmp_path / "keep"
    shutil.copytree(torch_dir, keep, symlinks=True)
    seen: set[str] = set()
    rng = random.Random(name)
    for at in range(1, 1000):
        shutil.rmtree(torch_dir)
        shutil.copytree(keep, torch_dir, symlinks=True)
        if not killed(COMMANDS[name], torch_dir, at):
            break
        seen.add(some_first_files(torch_dir, edited, original))
        if at % 2:
            killed(rng.choice(list(COMMANDS.values())), torch_dir, rng.randrange(1, 60))
            some_first_files(torch_dir, edited, original)
        if at % 3:
            disk.apply(torch_dir)
            assert {path: text(torch_dir, path) for path in TOUCHED} == edited
        with contextlib.suppress(HooksError):
            disk.revert(torch_dir)
        assert snapshot(torch_dir) == pristine, at
    assert at > 20
    assert sorted(seen) == ["applied", "interrupted", "not applied"]


@pytest.mark.once
def test_two_at_once(torch_dir: Path, edited: dict[str, str]) -> None:
    results: list[str] = []
    tree = series.find_torch(torch_dir)

    def go() -> None:
        results.append(disk.apply(torch_dir))

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


@pytest.mark.once
@pytest.mark.parametrize("where", ["torch", "torch/_inductor", "torch/_inductor/fx_passes"])
@pytest.mark.parametrize("name", ["apply", "revert"])
def test_directories_that_one_may_only_read(
    tiny, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    """Known before the first file is replaced."""
    torch_dir, _ = tiny
    if name == "revert":
        disk.apply(torch_dir)
    before, folder, access = snapshot(torch_dir), torch_dir.parent / where, os.access
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != folder and access(p, mode))
    with pytest.raises(
        HooksError, match=rf"torch can't be changed .*Permission denied: '{folder}'"
    ):
        COMMANDS[name](torch_dir)
    assert snapshot(torch_dir) == before


# ---------------------------------------------------------------- what may have happened since


@pytest.mark.once
def test_torch_installed_again(torch_dir: Path, edited: dict[str, str], tmp_path: Path) -> None:
    original = tmp_path / "original"
    shutil.copytree(torch_dir, original)
    disk.apply(torch_dir)
    # The same version again, in part: the rest is finished.
    shutil.copyfile(original / "_inductor" / "config.py", torch_dir / "_inductor" / "config.py")
    assert state(torch_dir) == "interrupted"
    disk.apply(torch_dir)
    assert text(torch_dir, CONFIG) == edited[CONFIG]
    # Another version over it: what we remember is of no use any more.
    shutil.copytree(original, torch_dir, dirs_exist_ok=True)
    for path in TOUCHED:
        (torch_dir.parent / path).write_text("# newer\n" + text(torch_dir, path))
    (torch_dir / "version.py").write_text(f"__version__ = '{MINOR}.99'\n")
    assert state(torch_dir) == "not applied"
    disk.apply(torch_dir)
    assert text(torch_dir, CONFIG) == "# newer\n" + edited[CONFIG]
    disk.revert(torch_dir)
    assert text(torch_dir, CONFIG).startswith("# newer\n")


@pytest.mark.once
def test_another_edition_of_the_series_replaces_the_one_that_is_there(tiny, tmp_path: Path) -> None:
    torch_dir, _ = tiny
    pristine, old = snapshot(torch_dir), text(torch_dir, CONFIG)
    disk.apply(torch_dir)
    shutil.rmtree(tmp_path / "torch_patches")
    write_series(tmp_path / "torch_patches", MINOR, {CONFIG: (old, "# newer\n" + old)})
    assert "patched 1 files" in disk.apply(torch_dir)
    assert text(torch_dir, CONFIG) == "# newer\n" + old
    disk.revert(torch_dir)
    assert snapshot(torch_dir) == pristine


@pytest.mark.once
@pytest.mark.parametrize("damage", ["cut off", "gone"])
def test_damaged_originals_are_not_put_back(tiny, damage: str) -> None:
    torch_dir, edited = tiny
    disk.apply(torch_dir)
    kept = disk._kept(series.find_torch(torch_dir), "before", FSDP)
    kept.unlink() if damage == "gone" else kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(HooksError, match="is damaged; install torch again"):
        disk.revert(torch_dir)
    assert {path: text(torch_dir, path) for path in TOUCHED} == edited
    (torch_dir / disk.STATE_DIR / "record.json").write_text("{")
    with pytest.raises(HooksError, match=r"record.json can't be read"):
        disk.status(torch_dir)


@pytest.mark.once
def test_no_old_bytecode_survives(torch_dir: Path, edited: dict[str, str]) -> None:
    """One that says nothing of its source, and one that Python would take for current."""
    config = torch_dir.parent / CONFIG
    import py_compile

    for mode in (
        py_compile.PycInvalidationMode.TIMESTAMP,
        py_compile.PycInvalidationMode.UNCHECKED_HASH,
    ):
        pyc = Path(py_compile.compile(str(config), invalidation_mode=mode))
        disk.apply(torch_dir)
        assert not pyc.exists()
        pyc.write_bytes(b"stale")
        disk.revert(torch_dir)
        assert not pyc.exists()


# ---------------------------------------------------------------- the real series


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
    changes = apply_patches(series.choose_series(tree.version).diffs, tree.read)
    order = disk.in_import_order(changes)
    assert order[0] == CONFIG
    files = []
    for number, path in enumerate(order[:-1]):
        (tmp_path / str(number)).write_bytes(changes[path].after)
        files.append((str(tree.path(path)), str(tmp_path / str(number))))
    imports = IMPORTS.format(torch=str(real_torch))
    code = EACH_PREFIX.format(folder=str(real_torch.parent), files=files, imports=imports)
    assert run_python(code, real_torch.parent).stdout == "True\n" * len(files)
    for path, change in changes.items():
        tree.path(path).write_bytes(change.before)
    disk.apply(real_torch)
    assert all(tree.read(path) == change.after for path, change in changes.items())
    code = "from torch_ext_bucketing import hooks; print(hooks.install() == hooks.status(), hooks.status())"
    assert "True Status(state='on disk'" in run_python(code, real_torch.parent, ROOT).stdout
    disk.revert(real_torch)
    assert all(tree.read(path) == change.before for path, change in changes.items())


# ---------------------------------------------------------------- the package that has the series


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
FIND = "import os; from torch_ext_bucketing.hooks.series import *; print(find_patches_dir()); print([len(s.diffs) for s in list_series()])"


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
    assert out[1] == str([len(s.diffs) for s in series.list_series()])


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
    code = "import torch_ext_bucketing.hooks as h; h.install()"
    assert "no torch patches found in" in run_python(code, folder, check=False).stderr
    write_small_series(folder / "torch_patches")
    (folder / "torch_patches" / MINOR / "0001-edit.patch").unlink()
    assert (
        "is incomplete: found numbers [2], expected 1 to 2"
        in run_python(code, folder, check=False).stderr
    )


def test_command_line_help_documents_exit_codes(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["patch", "--help"])
    assert caught.value.code == 0
    assert "3  status: torch does not have the hooks" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["patch", "undo"])
    assert caught.value.code == 2
