"""Run processes that fill and read the compile caches, and check their reports."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from patching_trees import ROOT, copy_package

CHILD = Path(__file__).parent / "cache_child.py"
LIMIT_S = 400

HIT, MISS, BYPASS = [1, 0, 0], [0, 1, 0], [0, 0, 1]


def run(
    *arguments: str, paths: Sequence[Path] = (ROOT, CHILD.parent), **environment: str
) -> list[dict[str, Any]]:
    """Run Python with ``paths`` to import from, and parse the lines of JSON that it prints."""
    ours = ("TORCH_", "TORCHINDUCTOR")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours) or "VEC_ISA" in k}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    done = subprocess.run(
        command, env=env, cwd=paths[0], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_state(result: dict[str, Any], state: list[int]) -> None:
    """Check hits, misses and bypasses: two FX graphs, and one entry in AOTAutograd's cache."""
    assert (result["graphs"], result["aot"]) == ([2 * n for n in state], state), result


HOOKS = """
from torch_ext_bucketing import BucketByUnit

class OwnPass(BucketByUnit):
    def run(self, graph, compilation):
        if 1 > 0:
            super().run(graph, compilation)
"""


class Checkout:
    """A copy of the package, a user's module and a cache directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = copy_package(folder / "checkout")
        self.cache = folder / "cache"
        self.hooks = self.folder / "hooks.py"
        self.hooks.write_text(HOOKS)

    def run(self, *names: str, seed: int = 0) -> dict[str, dict[str, Any]]:
        """Run setups of ``cache_child`` in a new process with this hash seed; return results by name."""
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(self.cache), "PYTHONHASHSEED": str(seed)}
        results = run(
            str(CHILD), "setups", *names, paths=(self.folder, CHILD.parent), **environment
        )
        assert [r["name"] for r in results] == list(names)
        assert all(Path(r.get("file", self.folder)).is_relative_to(self.folder) for r in results)
        return {r["name"]: r for r in results}
