"""Make torch trees and patch series for the tests of the hooks."""

import difflib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from torch_ext_bucketing import hooks

needs_unpatched_torch = pytest.mark.skipif(
    hooks.status().state == "native", reason="the installed torch's own files have the hooks"
)

TORCH_DIR = Path(torch.__file__).resolve().parent
ROOT = Path(__file__).resolve().parents[2]
CONFIG = "torch/_inductor/config.py"
BUCKETING = "torch/_inductor/fx_passes/bucketing.py"
FSDP = "torch/_inductor/fx_passes/fsdp.py"
TOUCHED = (CONFIG, BUCKETING, FSDP)
MINOR = ".".join(torch.__version__.split(".")[:2])

ENTRIES = """\
class aten_distributed_optimizations:
    bucket_payload_order_key: str | None = None
    fsdp_group_filter: list[str] | None = None
    bucket_max_collectives_between: int | None = 0
"""


def edit(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, (old, text.count(old))
    return text.replace(old, new)


def small_edits() -> dict[str, str]:
    """Edit each touched file so little that the edits fit every supported torch."""
    text = {path: (TORCH_DIR.parent / path).read_text() for path in TOUCHED}
    config = edit(text[CONFIG], "class aten_distributed_optimizations:\n", ENTRIES)
    # In the middle of the file, so that line numbers differ from the file on disk.
    boom = "\n\n\ndef boom() -> None:\n    raise KeyError('a patched line')\n\n\ndef "
    bucketing = text[BUCKETING].replace("\n\n\ndef ", boom, 1)
    fsdp = text[FSDP] + "\n\nfrom torch._inductor.fx_passes.bucketing import boom  # noqa\n"
    return {CONFIG: config, BUCKETING: bucketing, FSDP: fsdp}


def git_diff(path: str, old: str | None, new: str) -> str:
    """Format the change of one file like ``git diff``."""
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        new.splitlines(keepends=True),
        "/dev/null" if old is None else f"a/{path}",
        f"b/{path}",
    )
    head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if old is None else "")
    return head + "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def write_series(folder: Path, minor: str, *patches: dict[str, tuple[str | None, str]]) -> None:
    """Write a series of patches, each given as old and new text by path."""
    (folder / minor).mkdir(parents=True)
    for number, files in enumerate(patches, 1):
        diffs = "".join(git_diff(path, old, new) for path, (old, new) in files.items())
        text = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\nSubject: [PATCH {number}/{len(patches)}] Edit\n\nWhy.\n---\n\n{diffs}-- \n2.39.5\n\n"
        (folder / minor / f"{number:04}-edit.patch").write_text(text)
    (folder / minor / "0000-cover-letter.patch").write_text(
        "Subject: [PATCH 0/1] Cover\n\nNothing.\n"
    )


def write_small_series(folder: Path, minor: str = MINOR) -> dict[str, str]:
    """Write ``small_edits`` as two patches, with a test file that only checkouts of torch have."""
    edited = small_edits()
    old = {path: (TORCH_DIR.parent / path).read_text() for path in TOUCHED}
    first = {CONFIG: (old[CONFIG], edited[CONFIG])}
    second = {path: (old[path], edited[path]) for path in TOUCHED[1:]}
    second["test/inductor/test_small.py"] = (None, "import torch\n")
    write_series(folder, minor, first, second)
    return edited


def copy_package(folder: Path) -> Path:
    """Copy the package to a checkout whose ``torch_patches`` a test can fill."""
    shutil.copytree(
        ROOT / "torch_ext_bucketing",
        folder / "torch_ext_bucketing",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return folder


def run_python(
    code: str, *paths: Path, args: tuple[str, ...] = (), check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run code, or Python with ``args``, in a new process that imports from ``paths`` first."""
    # With CI set, torch's test runner writes XML with a package that is not installed.
    env = {k: v for k, v in os.environ.items() if k != "CI"}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, *(args or ("-c", textwrap.dedent(code)))],
        env=env,
        cwd=paths[0],
        capture_output=True,
        text=True,
        timeout=900,
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


PATCHES = ROOT / "torch_patches"
SERIES = sorted(PATCHES.glob("[0-9]*"), key=lambda f: tuple(map(int, f.name.split("."))))


def series_folder() -> Path:
    folder = PATCHES / MINOR
    return folder if folder.is_dir() else SERIES[-1]


def patches_of(folder: Path) -> list[Path]:
    """List the patches of a series, or of one pull request, in order."""
    return sorted(folder.rglob("*.patch"))


def touched(folder: Path) -> list[str]:
    """List the paths that a series changes or adds."""
    text = "".join(p.read_text(encoding="utf-8") for p in patches_of(folder))
    return sorted(set(re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)))


def git(repository: Path, *arguments: str) -> str:
    """Run git without any user's configuration."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "tester", f"GIT_{who}_EMAIL": "tester@example.invalid"}
    done = subprocess.run(
        ["git", *arguments], cwd=repository, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"git {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def make_repository(folder: Path) -> Path:
    """Commit the files of the installed torch that its series touches, and apply the series."""
    git(folder, "init", "--quiet")
    for path in touched(series_folder()):
        if path.startswith("torch/"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(TORCH_DIR.parent / path, folder / path)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "torch")
    git(folder, "tag", "original")
    git(folder, "am", "--keep-non-patch", *map(str, patches_of(series_folder())))
    for number, commit in enumerate(git(folder, "rev-list", "--reverse", "original..").split(), 1):
        git(folder, "tag", f"commit-{number}", commit)
    return folder


class LinkedTorch:
    def __init__(self, folder: Path, repository: Path, commit: str) -> None:
        self.folder = folder
        folder.mkdir()
        git(repository, "checkout", "--quiet", commit)
        paths = [p for p in touched(series_folder()) if (repository / p).is_file()]
        own = {str(parent) for p in paths for parent in Path(p).parents}
        for path in paths:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / path, folder / path)
        for directory in sorted(d for d in own if d.startswith("torch")):
            # Link the original's byte code, except for the commit's files; nothing writes to it.
            for entry in [
                *(TORCH_DIR.parent / directory).iterdir(),
                *(TORCH_DIR.parent / directory / "__pycache__").glob("*"),
            ]:
                link = folder / entry.relative_to(TORCH_DIR.parent)
                source = f"{directory}/{entry.name.partition('.')[0]}.py"
                if entry.name == "__pycache__":
                    link.mkdir()
                elif not link.exists() and not (entry.suffix == ".pyc" and source in paths):
                    link.symlink_to(entry)

    def run(self, *arguments: str, paths: tuple[Path, ...] = (), check: bool = True) -> str:
        """Run Python with ``arguments`` on this torch; return its output, then its errors."""
        done = run_python("", self.folder, *paths, args=arguments, check=check)
        return done.stdout + done.stderr
