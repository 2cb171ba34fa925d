"""The demo's result and its command."""

import subprocess
import sys
from pathlib import Path

import pytest

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.commands import demo as cli
from torch_ext_bucketing.commands.demo import Run, Settings, text_of

ROOT = Path(__file__).resolve().parents[2]


def _runs(steps: int, *, ours: list[str], control: list[str]) -> dict[str, Run]:
    """Combine the runs of two ranks; digests are the second one's."""
    eager = [str(step) for step in range(steps)]
    named = {"eager": eager, "fsdp_order": ours, "graph_order": control}

    other = {"loss": [1.0] * steps, "step_ms": [5.0] * steps, "before": 9, "after": 3}
    return {
        name: Run.of([{"digests": rank, **other} for rank in (eager, digests)])
        for name, digests in named.items()
    }


def test_a_run_that_differs_from_eager_fails_and_says_where():
    runs = _runs(4, ours=["0", "1", "x", "3"], control=["x"] * 4)  # rank 0 is equal
    text = text_of(Settings(steps=4), runs)
    assert "FAIL" in text
    (row,) = (line for line in text.splitlines() if line.startswith("compiled, FSDP2 order"))
    assert "3 of 4" in row
    assert "step 3" in row


def test_a_control_that_does_not_differ_is_explained():
    text = text_of(Settings(steps=2), _runs(2, ours=["0", "1"], control=["0", "1"]))
    assert "PASS" in text
    assert "a + b is b + a" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "ranks must be at least 2"),
        (["--ranks", "4", "--nodes", "3"], "nodes must divide ranks (4) evenly"),
        (["--nodes", "0"], "nodes must be positive"),
        (["--steps", "0"], "steps must be positive"),
        (["--layers", "-1"], "layers must be positive"),
        (["--layers", "few"], "invalid int value"),
    ],
)
def test_bad_options_are_usage_errors_before_any_rank_starts(options, message, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run_ranks", None)
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_option_costs_no_import_of_torch():
    command = ["-X", "importtime", "-m", "torch_ext_bucketing", "demo", "--ranks", "1"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch_ext_bucketing.commands.demo" in imported
    assert "torch" not in imported
