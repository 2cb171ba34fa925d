"""With the entries unset, the patched torch makes the graphs of the unpatched one, node for node and
on every rank, but for what the fixes at the front of the series mend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from linked_torch import LinkedTorch, make_repository
from patching_trees import needs_unpatched_torch

HERE = Path(__file__).parent
SCRIPT = str(HERE / "neutrality_graphs.py")
# What the unpatched torch can't do with these graphs, and so the patched one can't either.
_TIMES = "No module named 'triton'|active drivers|Roofline estimation needs"
FAILS = {
    # Products are timed by Triton before 2.15, and by a roofline model that asks CUDA on 2.11.
    "interleaved/overlap": _TIMES,
    "interleaved/manual": _TIMES,
    # Before 2.15 manual scopes merge collectives that need each other (2.11 gives no message).
    "dependent/manual": r"used before it has been defined|^AssertionError: \[\]$",
}


def graphs(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


@needs_unpatched_torch
def test_unset_entries_change_nothing(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(HERE), "PYTHONHASHSEED": "0"}
    before = graphs(
        subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True)
    )
    assert not before["set"]
    (tmp_path / "repository").mkdir()
    repository = make_repository(tmp_path / "repository")
    torch = LinkedTorch(tmp_path / "torch", repository, "HEAD")
    # Sets are in another order than for ``before``.
    after, again = (
        graphs(torch.run(SCRIPT, paths=(HERE,), PYTHONHASHSEED=seed)) for seed in ("1", "4711")
    )
    assert after == again
    plain, patched = before["unset"], after["unset"]
    assert plain.keys() == patched.keys()
    assert len(plain) >= 2 * 11 * 9
    differ = {name.split()[0] for name in plain if plain[name] != patched[name]}
    mended = {name for name in differ if is_mended(plain, patched, name)}
    assert differ == mended
    # The fixes are at work, and where nothing is to be mended nothing is changed.
    assert len(differ) < len(plain) / 6, differ
    bucketed = sum("bucket" in json.dumps(nodes) for nodes in plain.values())
    assert bucketed > len(plain) / 2
    assert after["set"] != {k[:-2]: v for k, v in patched.items() if k.endswith(" 0")}
