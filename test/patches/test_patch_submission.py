"""The patch series as it would be submitted: ``git am`` on a clean torch, commit by commit."""

import ast
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from examples import by_night
from patching_trees import (
    PATCHES,
    ROOT,
    SERIES,
    TORCH_DIR,
    LinkedTorch,
    git,
    make_repository,
    needs_unpatched_torch,
    patches_of,
    run_python,
    series_folder,
    touched,
)

from torch_ext_bucketing.hooks.series import list_series

pytestmark = [pytest.mark.hooks, pytest.mark.long]

TEST_FILES = ("test/distributed/test_fx_bucketing.py", "test/distributed/test_fsdp_bucketing.py")
ENTRIES = ("bucket_payload_order_key", "fsdp_group_filter", "bucket_max_collectives_between")

# The newest series goes upstream as pull requests, one folder each; the first three are of fixes,
# the others add an entry each. Named are those that a pull request needs. Older series are one
# commit, and have their tests from the newest.
PULL_REQUESTS = {"A": "", "B": "", "C": "A", "D": "AC", "E": "B", "F": "ACD"}
COMMITS = {"2.15": 9, "2.13": 1}
NEWEST = SERIES[-1]
FOLDERS = sorted(folder for folder in NEWEST.iterdir() if folder.is_dir())
on_newest = pytest.mark.skipif(series_folder() != NEWEST, reason="for the series to submit")


def test_every_series_has_its_fixes_and_its_entries():
    assert (PATCHES / "MAINTAINING.md").is_file()
    assert [f.name[:2] for f in FOLDERS] == [f"{letter}-" for letter in PULL_REQUESTS]
    assert [f.name for f in reversed(SERIES)] == list(COMMITS)
    for folder in SERIES:
        patches = patches_of(folder)
        assert len(patches) == COMMITS[folder.name], folder
        texts = [p.read_text(encoding="utf-8") for p in patches]
        added = [[e for e in ENTRIES if f"+    {e}:" in text] for text in texts]
        assert sorted(e for entries in added for e in entries) == sorted(ENTRIES), folder
        assert max(map(len, added)) == (1 if folder == NEWEST else len(ENTRIES)), folder
        for patch, text in zip(patches, texts, strict=True):
            # What `git format-patch -n --zero-commit --no-signature` writes, and `git am` reads.
            assert text.startswith(f"From {'0' * 40} "), patch
            commits = patches_of(patch.parent)
            number = f"{commits.index(patch) + 1}/{len(commits)}"
            assert f"Subject: [PATCH {number}] [inductor] " in text, patch
            assert not re.search(r"^\+.*[ \t]$", text, re.MULTILINE), patch


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_pull_request_has_a_text_of_its_own(folder: Path):
    text = (folder / "PULL_REQUEST.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40
    for heading in ("Problem", "Change", "Test plan"):
        assert f"\n## {heading}\n" in text
    needed = "".join(re.findall(r"\b([A-F])\b", text.split("\n## ")[0].partition("Needs")[2]))
    assert needed == PULL_REQUESTS[folder.name[0]]


def changed_lines(patch: Path) -> tuple[int, int]:
    """Lines that a patch adds to torch and removes from it, tests left out."""
    added = removed = 0
    for part in re.split(r"(?m)^diff --git ", patch.read_text(encoding="utf-8"))[1:]:
        if part.startswith("a/torch/"):
            hunks = part[part.index("\n@@") :]
            added += len(re.findall(r"(?m)^\+", hunks))
            removed += len(re.findall(r"(?m)^-", hunks))
    return added, removed


def test_the_readme_says_how_large_each_commit_is():
    """Compare the table with the patches, so that the series can't grow unseen."""
    text = (PATCHES / "README.md").read_text(encoding="utf-8")
    sizes = ["+{} -{}".format(*changed_lines(patch)) for patch in patches_of(NEWEST)]
    assert re.findall(r"\| (\+\d+ -\d+) \|", text) == sizes


LINES = 150


@pytest.mark.xfail(strict=True, reason="the series adds 192 lines to torch")
def test_the_newest_series_is_small():
    """Count the lines of torch that it adds, without those moved line by line."""
    newest = [patch for patch in patches_of(NEWEST) if "-Move-" not in patch.name]
    assert sum(changed_lines(patch)[0] for patch in newest) <= LINES


def number_of_tests(path: Path) -> int:
    number = len(re.findall(r"^    def test_", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert number
    return number


# -- commit by commit ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_repository(tmp_path_factory.mktemp("repository"))


@pytest.mark.torch
@on_newest
@needs_unpatched_torch
def test_git_writes_the_same_series_again(repository: Path, tmp_path: Path):
    arguments = ("--quiet", "--numbered", "--zero-commit", "--no-signature")
    first = 0
    for folder in FOLDERS:
        last = first + len(patches_of(folder))
        commits = f"{f'commit-{first}' if first else 'original'}..commit-{last}"
        # Little context lets it be applied without those that lie between.
        context = ["-U1"] if folder.name[0] == "E" else []
        out = str(tmp_path / folder.name)
        git(repository, "format-patch", *arguments, *context, "--output-directory", out, commits)
        first = last
    for ours, theirs in zip(patches_of(series_folder()), patches_of(tmp_path), strict=True):
        assert ours.name == theirs.name
        # All but the length of abbreviated hashes, which is git's to choose.
        texts = [re.sub(r"(?m)^index .*$", "", p.read_text()) for p in (ours, theirs)]
        assert texts[0] == texts[1]


@pytest.mark.torch
@on_newest
@needs_unpatched_torch
@pytest.mark.parametrize("name", PULL_REQUESTS)
def test_a_pull_request_applies_on_those_that_it_names(repository: Path, name: str):
    git(repository, "checkout", "--quiet", "--detach", "original")
    for folder in FOLDERS:
        if folder.name[0] in PULL_REQUESTS[name] + name:
            git(repository, "am", "--keep-non-patch", *map(str, patches_of(folder)))
    changed = git(repository, "diff", "--name-only", "original", "--", "torch").split()
    for path in changed:
        compile((repository / path).read_text(), path, "exec")


# Forks a child for each commit, as importing torch takes as long as what is asked here. A child's
# output goes to a file beside the commit's.
EACH_COMMIT = """
import importlib, json, os, runpy, shutil, sys, traceback
import expecttest, numpy, sympy, torch
folder, tests, names, touched, *commits = sys.argv[1:]
assert torch.__file__.startswith(folder), torch.__file__
assert not any(name.startswith("torch._inductor") for name in sys.modules)

def import_and_test():
    modules = [importlib.import_module(name) for name in json.loads(names)]
    from torch._inductor import config
    entries = config.aten_distributed_optimizations
    found = [e for e in ENTRIES if hasattr(entries, e)]
    print(json.dumps([[m.__file__ for m in modules], found]), flush=True)
    assert "torch_ext_bucketing" not in sys.modules
    from torch.testing._internal import common_utils
    cases = {}
    for test in json.loads(tests):
        if os.path.exists(test):
            found = runpy.run_path(test, run_name="tests")
            cases |= {k: v for k, v in found.items() if k.startswith("Test") and k != "TestCase"}
    vars(sys.modules["__main__"]).update(cases)
    sys.argv = ["tests", *cases]
    common_utils.run_tests()

for commit in commits:
    for path in json.loads(touched):
        if os.path.exists(f"{commit}/{path}"):
            shutil.copyfile(f"{commit}/{path}", f"{folder}/{path}")
        else:
            os.remove(f"{folder}/{path}")
    child = os.fork()
    if not child:
        out = os.open(f"{commit}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = 1
        try:
            import_and_test()
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(status))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(f"{commit}.log", "a") as log:
        log.write(f"exit status {status}")
"""


LAST = COMMITS[series_folder().name]


@pytest.fixture(scope="module")
def tested(repository: Path) -> tuple[LinkedTorch, list[str]]:
    """A torch, and what the tests of each commit print on it."""
    torch = LinkedTorch(repository.parent / "torch-of-commits", repository, f"commit-{LAST}")
    paths = [p for p in touched(series_folder()) if (torch.folder / p).is_file()]
    assert not any((torch.folder / p).is_symlink() for p in paths)  # to the installed torch
    commits = [repository.parent / f"commit-{n}" for n in range(1, LAST + 1)]
    for folder in commits:
        git(repository, "worktree", "add", "--quiet", "--detach", str(folder), folder.name)
    modules = [p.removesuffix(".py").replace("/", ".") for p in touched(series_folder())]
    modules = [m for m in modules if m.startswith("torch.")]
    code = EACH_COMMIT.replace("ENTRIES", repr(ENTRIES))
    tests = json.dumps([str(torch.folder / test) for test in TEST_FILES])
    given = (tests, json.dumps(modules), json.dumps(paths))
    torch.run("-c", code, str(torch.folder), *given, *map(str, commits))
    return torch, [Path(f"{folder}.log").read_text() for folder in commits]


@pytest.mark.torch
@pytest.mark.slow
@on_newest
@needs_unpatched_torch
@pytest.mark.parametrize("number", range(1, LAST + 1))
def test_each_commit_imports_and_passes_its_tests(
    repository: Path, tested: tuple[LinkedTorch, list[str]], number: int
):
    torch, printed = tested[0], tested[1][number - 1]
    assert printed.endswith("exit status 0"), printed
    files, entries = json.loads(next(x for x in printed.splitlines() if x.startswith("[[")))
    assert all(Path(f).is_relative_to(torch.folder) for f in files), files
    assert sorted(entries) == sorted(
        e
        for e in ENTRIES
        if any(
            f"+    {e}:" in p.read_text(encoding="utf-8")
            for p in patches_of(series_folder())[:number]
        )
    )
    tests = [repository.parent / f"commit-{number}" / test for test in TEST_FILES]
    ran = sum(number_of_tests(test) for test in tests if test.is_file())
    assert f"Ran {ran} tests" in printed, printed[-400:]
    assert "skipped" not in printed


@pytest.mark.torch
@needs_unpatched_torch
def test_a_torch_with_the_series_in_its_files_has_the_hooks(repository: Path, tmp_path: Path):
    torch = LinkedTorch(tmp_path / "torch", repository, f"commit-{LAST}")
    code = "from torch_ext_bucketing import hooks; print(hooks.install() == hooks.status(), hooks.status())"
    assert "True Status(state='native'" in torch.run("-c", code, paths=(ROOT,))


@pytest.mark.torch
@needs_unpatched_torch
def test_install_adds_the_pull_requests_that_torch_does_not_have(repository: Path):
    """Upstream may have merged the first ones, or others that need none of those left."""
    (used,) = (s for s in list_series() if s.folder == series_folder())

    def files_at(commit: str) -> dict[str, bytes]:
        git(repository, "checkout", "--quiet", commit)
        paths = [p for p in touched(series_folder()) if p.startswith("torch/")]
        return {path: (repository / path).read_bytes() for path in paths}

    whole = files_at(f"commit-{LAST}")
    assert used.apply(files_at("original").get) == whole
    sizes = [len(patches_of(folder)) for folder in FOLDERS] if LAST > 1 else [LAST]
    for number in itertools.accumulate(sizes):
        merged = files_at(f"commit-{number}")
        # Others have changed these files since.
        path = "torch/_inductor/fx_passes/bucketing.py"
        merged[path] = b"# A line that is new upstream\n" + merged[path]
        served = used.apply(merged.get)
        assert served == {**whole, path: b"# A line that is new upstream\n" + whole[path]}, number
    if LAST > 1:
        git(repository, "checkout", "--quiet", "--detach", "original")
        git(repository, "am", "--keep-non-patch", *map(str, patches_of(FOLDERS[1])))
        git(repository, "tag", "alone")
        assert used.apply(files_at("alone").get) == whole


IN_MEMORY = """
import runpy, sys, types, torch_ext_bucketing as teb
teb.hooks.install()
from torch.testing._internal import common_utils
if not hasattr(common_utils, "HardwareClassification"):  # before 2.15
    common_utils.HardwareClassification = types.SimpleNamespace(GENERIC=None)
cases = {}
left_out = sys.argv.pop(1)
for test in sys.argv.pop(1).split(":"):
    cases |= {k: v for k, v in runpy.run_path(test, run_name="tests").items() if k.startswith("Test")}
for case in cases.values():
    if hasattr(case, left_out):
        delattr(case, left_out)
vars(sys.modules["__main__"]).update(cases)
common_utils.run_tests()
"""


@needs_unpatched_torch
def test_tests_pass_with_the_hooks_in_memory(tmp_path: Path):
    """Run the newest series' tests on the modules that this package serves from memory.

    Those of cache keys, which start processes, run at night.
    """
    for patch in patches_of(NEWEST):
        git(tmp_path, "apply", "--include", "test/*", str(patch))
    tests = [tmp_path / test for test in TEST_FILES]
    text = "".join(test.read_text() for test in tests)
    classes = dict(re.findall(r"(?ms)^class (Test\w+)\((.*?)(?=^class |\Z)", text))
    if series_folder() != NEWEST:
        del classes["TestUnpacking"]  # of a fault that older versions don't have
    left_out = "none" if by_night() else "test_cache_keys"
    arguments = ("-c", IN_MEMORY, left_out, ":".join(map(str, tests)), *classes)
    said = run_python("", ROOT, args=arguments).stderr
    names = [name for text in classes.values() for name in re.findall(r"    def (test_\w+)", text)]
    number = len(names) - names.count(left_out)
    assert f"Ran {number} tests" in said, said[-400:]


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
    """Return ruff's findings in the original files, in place: ruff reads the folders around, too."""
    git(repository, "checkout", "--quiet", "original")
    return {path: findings(repository / path, rules) for path in touched(series_folder())}


@pytest.mark.torch
@needs_unpatched_torch
def test_ruff_finds_nothing_new(repository: Path):
    before = findings_before(repository, RULES)
    for number in range(1, len(patches_of(series_folder())) + 1):
        git(repository, "checkout", "--quiet", f"commit-{number}")
        for path in touched(series_folder()):
            original = TORCH_DIR.parent / path
            changed = repository / path
            if not changed.is_file():  # a later commit adds it
                continue
            new = findings(changed, RULES) - before[path]
            assert not new, (number, path, new)
            was = original.is_file() and ruff("format", "--check", *STYLE, str(original)).returncode
            assert was or not ruff("format", "--check", *STYLE, str(changed)).returncode, (
                number,
                path,
            )


@pytest.mark.torch
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
