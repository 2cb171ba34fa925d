"""The series are found in a wheel, in an sdist and in a checkout."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from patching_trees import PATCHES, ROOT, copy_package, run_python

from torch_ext_bucketing.hooks import series

pytestmark = pytest.mark.hooks

FILES = sorted(str(p.relative_to(PATCHES)) for p in PATCHES.rglob("*") if p.is_file())
FIND = "import os; from torch_ext_bucketing.hooks.series import *; print(find_patches_dir()); print([len(s.diffs) for s in list_series()])"


def build(folder: Path, *command: str) -> Path:
    """Run a build command in a copy of the checkout; return the one file that it made."""
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
    assert found_in(ROOT) == [str(PATCHES), sizes]  # as an editable install finds it
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
