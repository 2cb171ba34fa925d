"""The patch series as it would be submitted: ``git am`` on a clean torch, commit by commit.

Of the installed torch, the files that its series touches are put into a git repository. Every
commit runs in a torch of symbolic links that has that commit's files and nothing of this package.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from patching_trees import MINOR, ROOT, TORCH_DIR, needs_unpatched_torch

from torch_ext_bucketing import hooks
from torch_ext_bucketing.hooks import HOOK_ENTRIES
from torch_ext_bucketing.hooks.series import list_series

PATCHES = ROOT / "torch_patches"
TEST_FILE = "test/distributed/test_bucketing_hooks.py"
SERIES = sorted(PATCHES.glob("[0-9]*"), key=lambda f: tuple(map(int, f.name.split("."))))


# Two fixes of upstream's own faults come before the three hooks.
COMMITS = {"2.15": 5, "2.14": 5, "2.13": 5, "2.11": 5}


def series_folder() -> Path:
    folder = PATCHES / MINOR
    return folder if folder.is_dir() else SERIES[-1]


def patches_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.patch"))


def touched(folder: Path) -> list[str]:
    """Paths that a series changes or adds."""
    text = "".join(p.read_text(encoding="utf-8") for p in patches_of(folder))
    return sorted(set(re.findall(r"^\+\+\+ b/(.+)$", text, re.MULTILINE)))


def test_notes_beside_the_series_are_not_read():
    assert (PATCHES / "MAINTAINING.md").is_file()
    assert (SERIES[-1] / "COVER_LETTER.md").is_file()
    assert [s.name for s in reversed(list_series(PATCHES))] == [f.name for f in SERIES]
    for series in list_series(PATCHES):
        assert len(series.patches) == COMMITS[series.name]


def test_every_series_has_its_fixes_and_then_one_commit_per_hook():
    for folder in SERIES:
        patches = patches_of(folder)
        assert len(patches) == COMMITS[folder.name], folder
        texts = [p.read_text(encoding="utf-8") for p in patches]
        added = [[e for e in HOOK_ENTRIES if f"+    {e}:" in text] for text in texts]
        fixes = len(patches) - 3
        assert [len(a) for a in added] == [0] * fixes + [1, 1, 2], (folder, added)
        for number, text in enumerate(texts, 1):
            # What `git format-patch --zero-commit --no-signature` writes, and `git am` reads.
            assert text.startswith(f"From {'0' * 40} "), (folder, number)
            assert f"Subject: [PATCH {number}/{len(patches)}] [inductor] " in text, (folder, number)
            assert not re.search(r"^\+.*[ \t]$", text, re.MULTILINE), (folder, number)


def changed_lines(patch: Path) -> tuple[int, int]:
    """Lines that a patch adds to torch and removes from it, tests left out."""
    added = removed = 0
    for part in re.split(r"(?m)^diff --git ", patch.read_text(encoding="utf-8"))[1:]:
        if part.startswith("a/torch/"):
            hunks = part[part.index("\n@@") :]
            added += len(re.findall(r"(?m)^\+", hunks))
            removed += len(re.findall(r"(?m)^-", hunks))
    return added, removed


@pytest.mark.once
def test_the_readme_says_how_large_each_commit_is():
    """So that a series can't grow unseen: the newest may not add more than it does."""
    text = (PATCHES / "README.md").read_text(encoding="utf-8")
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if " | +" in line]
    folders = [f for f in reversed(SERIES) if COMMITS[f.name] == 5]
    assert f"| commit | {' | '.join(f.name for f in folders)} |" in text
    for row, *patches in zip(cells, *map(patches_of, folders), strict=True):
        sizes = ["+{} -{}".format(*changed_lines(patch)) for patch in patches]
        assert row[1:] == sizes, row[0]
    assert sum(changed_lines(patch)[0] for patch in patches_of(SERIES[-1])) <= 301


def number_of_tests(path: Path) -> int:
    number = len(re.findall(r"^    def test_", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert number > 4
    return number


# -- commit by commit ------------------------------------------------------------------------------


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


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The torch that is installed, as far as the series touches it, with the series on top."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "--quiet")
    for path in touched(series_folder()):
        installed = TORCH_DIR.parent / path
        if path.startswith("torch/"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed, folder / path)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "torch")
    git(folder, "tag", "original")
    git(folder, "am", "--keep-non-patch", *map(str, patches_of(series_folder())))
    for number, commit in enumerate(git(folder, "rev-list", "--reverse", "original..").split(), 1):
        git(folder, "tag", f"commit-{number}", commit)
    return folder


@needs_unpatched_torch
def test_git_writes_the_same_series_again(repository: Path, tmp_path: Path):
    arguments = ("--quiet", "--zero-commit", "--no-signature", "--output-directory", str(tmp_path))
    git(repository, "format-patch", *arguments, "original")
    for ours, theirs in zip(patches_of(series_folder()), patches_of(tmp_path), strict=True):
        assert ours.name == theirs.name
        # All but the length of abbreviated hashes, which is git's to choose.
        texts = [re.sub(r"(?m)^index .*$", "", p.read_text()) for p in (ours, theirs)]
        assert texts[0] == texts[1]


class LinkedTorch:
    """A torch directory of links, but for the files of one commit."""

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

    def run(self, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # With CI in the environment torch's test runner writes XML, by a package that we do not
        # need.
        env = {k: v for k, v in os.environ.items() if k != "CI"}
        env |= {"PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=900,
        )


IMPORT_AND_TEST = """
import importlib, json, runpy, sys
test, hooks, *names = sys.argv[1:]
modules = [importlib.import_module(name) for name in names]
from torch._inductor import config
part = config.aten_distributed_optimizations
found = [e for e in json.loads(hooks) if hasattr(part, e)]
print(json.dumps([[m.__file__ for m in modules], found]), flush=True)
assert "torch_ext_bucketing" not in sys.modules
sys.argv = [test]
runpy.run_path(test, run_name="__main__")
"""


LAST = COMMITS[series_folder().name]


@needs_unpatched_torch
@pytest.mark.parametrize(
    "number", [*(pytest.param(n, marks=pytest.mark.slow) for n in range(1, LAST)), LAST]
)
def test_each_commit_imports_and_passes_its_tests(repository: Path, number: int):
    torch = LinkedTorch(repository.parent / f"torch-{number}", repository, f"commit-{number}")
    modules = [p.removesuffix(".py").replace("/", ".") for p in touched(series_folder())]
    modules = [m for m in modules if m.startswith("torch.")]
    test = torch.folder / TEST_FILE
    done = torch.run(IMPORT_AND_TEST, str(test), json.dumps(HOOK_ENTRIES), *modules)
    assert done.returncode == 0, done.stderr[-4000:]
    files, entries = json.loads(done.stdout.splitlines()[0])
    assert all(Path(f).is_relative_to(torch.folder) for f in files), files
    assert sorted(entries) == sorted(
        e
        for e in HOOK_ENTRIES
        if any(
            f"+    {e}:" in p.read_text(encoding="utf-8")
            for p in patches_of(series_folder())[:number]
        )
    )
    assert f"Ran {number_of_tests(test)} tests" in done.stderr, done.stderr[-400:]
    assert "skipped" not in done.stderr


@pytest.mark.once
def test_tests_pass_with_the_hooks_in_memory(tmp_path: Path):
    """The tests of the series again, on what importing this package makes of torch."""
    assert hooks.status().state != "none"
    for patch in patches_of(series_folder()):
        git(tmp_path, "apply", "--include", TEST_FILE, str(patch))
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import runpy, sys, torch_ext_bucketing\n"
            "sys.argv = [sys.argv[1]]\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')",
            str(tmp_path / TEST_FILE),
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert f"Ran {number_of_tests(tmp_path / TEST_FILE)} tests" in run.stderr, run.stderr[-400:]


# -- style -----------------------------------------------------------------------------------------

# Families and options of upstream's pyproject.toml. What it ignores one by one is left to the
# comparison with the original file, which breaks such rules already.
RULES = "B,C4,E,EXE,F,FURB,G,LOG,NPY,PERF,PGH004,PIE,PLE,PYI,RSE,SIM,SLOT,TC,TRY203,TRY401,UP,W,YTT"
IGNORED = (
    "B007,B008,B017,B023,B028,B905,C408,E402,E501,E731,E741,EXE001,PERF203,PERF401,"
    "SIM102,SIM103,SIM105,SIM108,SIM110,SIM114,SIM117,TC006"
)
STYLE = ("--isolated", "--no-cache", "--line-length=88", "--target-version=py310")


def ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    here = Path(sys.executable).parent
    command = shutil.which("ruff", path=f"{here}{os.pathsep}{os.environ.get('PATH', '')}")
    if command is None:
        pytest.skip("ruff is not installed: pip install ruff")
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60)


def findings(path: Path, rules: str) -> Counter[tuple[str, str]]:
    """Rule and message of what ruff finds, without the place."""
    if not path.is_file():
        return Counter()
    done = ruff(
        "check",
        str(path),
        *STYLE,
        f"--select={rules}",
        f"--ignore={IGNORED}",
        "--output-format=json",
    )
    assert done.returncode in (0, 1), done.stderr
    return Counter((f["code"], f["message"]) for f in json.loads(done.stdout))


def findings_before(repository: Path, rules: str) -> dict[str, Counter[tuple[str, str]]]:
    """Of the files as they were, in the same place: ruff looks at the folders around, too."""
    git(repository, "checkout", "--quiet", "original")
    return {path: findings(repository / path, rules) for path in touched(series_folder())}


@needs_unpatched_torch
def test_ruff_finds_nothing_new(repository: Path):
    before = findings_before(repository, RULES)
    for number in range(1, len(patches_of(series_folder())) + 1):
        git(repository, "checkout", "--quiet", f"commit-{number}")
        for path in touched(series_folder()):
            original = TORCH_DIR.parent / path
            changed = repository / path
            new = findings(changed, RULES) - before[path]
            assert not new, (number, path, new)
            was = original.is_file() and ruff("format", "--check", *STYLE, str(original)).returncode
            assert was or not ruff("format", "--check", *STYLE, str(changed)).returncode, (
                number,
                path,
            )


@needs_unpatched_torch
def test_what_is_new_in_torch_is_typed(repository: Path):
    annotations = "ANN001,ANN002,ANN003,ANN2"
    before = findings_before(repository, annotations)
    git(repository, "checkout", "--quiet", f"commit-{len(patches_of(series_folder()))}")
    for path in touched(series_folder()):
        if path.startswith("torch/"):
            new = findings(repository / path, annotations) - before[path]
            assert not new, (path, new)
            asserts = [
                sum(isinstance(n, ast.Assert) for n in ast.walk(ast.parse(p.read_text())))
                for p in (repository / path, TORCH_DIR.parent / path)
            ]
            assert asserts[0] == asserts[1], f"{path}: upstream raises AssertionError instead"
