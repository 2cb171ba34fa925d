"""The installed torch with a commit of its patch series: a directory of links, but for the
files of that commit. Nothing of this package is in it, and the installed torch is not written to.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from patching_trees import MINOR, ROOT, TORCH_DIR, run_python

PATCHES = ROOT / "torch_patches"
SERIES = sorted(PATCHES.glob("[0-9]*"), key=lambda f: tuple(map(int, f.name.split("."))))


def series_folder() -> Path:
    folder = PATCHES / MINOR
    return folder if folder.is_dir() else SERIES[-1]


def patches_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.patch"))


def touched(folder: Path) -> list[str]:
    """Paths that a series changes or adds."""
    text = "".join(p.read_text(encoding="utf-8") for p in patches_of(folder))
    return sorted(set(re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)))


def git(repository: Path, *arguments: str) -> str:
    """Git without anyone's configuration."""
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
    """The installed torch, as far as its series touches it (tag ``original``), with the series
    on top (tags ``commit-1``, ``commit-2``, ...)."""
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
            # The original's byte code but for the commit's files; nothing is written to it.
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

    def run(self, *arguments: str, paths: tuple[Path, ...] = ()) -> str:
        """What Python with ``arguments`` prints on this torch, and with ``paths`` to import from;
        its errors last."""
        done = run_python("", self.folder, *paths, args=arguments)
        return done.stdout + done.stderr
