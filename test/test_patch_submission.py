"""The patch series' own tests, as upstream would run them, on the torch that is installed here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from torch_ext_bucketing.patching import HOOK_ENTRIES, hooks_status

ROOT = Path(__file__).parent.parent
TEST_FILE = "test/distributed/test_bucketing_hooks.py"


def series_folder() -> Path:
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    folder = ROOT / "torch_patches" / minor
    return folder if folder.is_dir() else max((ROOT / "torch_patches").glob("[0-9]*"))


def test_every_series_has_one_commit_per_hook():
    for folder in sorted((ROOT / "torch_patches").glob("[0-9]*")):
        patches = sorted(folder.glob("*.patch"))
        assert len(patches) == 3, folder
        added = [
            [e for e in HOOK_ENTRIES if f"+    {e}:" in p.read_text(encoding="utf-8")]
            for p in patches
        ]
        assert [len(a) for a in added] == [1, 1, 2], (folder, added)


def test_upstream_tests_pass(tmp_path: Path):
    assert str(hooks_status()) != "none"
    for patch in sorted(series_folder().glob("*.patch")):
        subprocess.run(
            ["git", "apply", "--include", TEST_FILE, str(patch)], cwd=tmp_path, check=True
        )
    # With CI in the environment torch's test runner writes XML, by a package that we do not need.
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
        timeout=600,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert "Ran 20 tests" in run.stderr, run.stderr[-400:]
