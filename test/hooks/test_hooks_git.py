"""The documented commands write a series into torch's files as ``install`` serves it."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from patching_trees import (
    PATCHES,
    TORCH_DIR,
    needs_unpatched_torch,
    series_folder,
    touched,
)

from torch_ext_bucketing.hooks import series
from torch_ext_bucketing.hooks.patches import apply_patches

pytestmark = [pytest.mark.torch, pytest.mark.hooks, needs_unpatched_torch]

PATHS = [path for path in touched(series_folder()) if path.startswith("torch/")]
(BLOCK,) = re.findall(r"```bash\n(site=.*?)```", (PATCHES / "README.md").read_text(), re.DOTALL)
COMMANDS = BLOCK.splitlines()[2:]  # after those that set "site" and "series"


def files_of(site: Path) -> dict[str, bytes]:
    return {path: (site / path).read_bytes() for path in PATHS}


@pytest.mark.parametrize(("apply", "undo"), [COMMANDS[:2], COMMANDS[2:]], ids=["patch", "git"])
@pytest.mark.parametrize("in_a_repository", [False, True])
def test_the_files_are_those_that_install_serves(
    tmp_path: Path, apply: str, undo: str, in_a_repository: bool
) -> None:
    """Also in an environment that lies in a git work tree, where git resolves paths otherwise."""
    if not all(map(shutil.which, ("git", "patch"))):
        pytest.skip("git or patch is not installed")
    site = tmp_path / "lib" / "site-packages"
    for path in PATHS:
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TORCH_DIR.parent / path, site / path)
    if in_a_repository:
        subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    original = files_of(site)

    def run(command: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        env |= {"site": str(site), "series": str(series_folder())}
        subprocess.run(["bash", "-euo", "pipefail", "-c", command], env=env, check=True)

    run(apply)
    (used,) = (s for s in series.list_series() if s.folder == series_folder())
    assert files_of(site) == apply_patches(used.diffs, original.get)
    run(undo)
    assert files_of(site) == original
