"""The demo's parts and its command."""

import subprocess
import sys
from pathlib import Path

import pytest

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.commands import demo as cli
from torch_ext_bucketing.commands.demo_results import (
    RankReport,
    RunRecord,
    Settings,
    demo_result,
    render,
)
from torch_ext_bucketing.testing.differences import Payload, Span, layout_differences

ROOT = Path(__file__).resolve().parents[2]


# --- results -------------------------------------------------------------------------


def _payload(*members: tuple[str, int, int]) -> Payload:
    return Payload("reduce_scatter", tuple(Span(*member) for member in members))


def test_layout_differences_name_what_lies_elsewhere():
    rest = _payload(("c", 0, 4), ("d", 4, 4))
    eager = [_payload(("a", 0, 8), ("b", 8, 4)), rest]
    same = list(reversed(eager))
    assert layout_differences(eager, same) == []
    assert (
        layout_differences([*eager, _payload(("e", 0, 4))], same) == []
    )  # one member is not a bucket
    swapped = [_payload(("b", 0, 4), ("a", 4, 8)), rest]
    (text_,) = layout_differences(eager, swapped)
    assert "byte 0 is b (4 bytes), eager has a at byte 0 (8 bytes)" in text_
    other = [_payload(("a", 0, 8), ("b", 8, 4), ("c", 12, 4))]
    texts = layout_differences(eager, other)
    assert any("no unit of eager FSDP2 has these members" in t for t in texts)
    assert sum("the compiled graphs do not" in t for t in texts) == 2


MODEL = {"parameters": 10, "tensors": 3, "units": 2}


def _reports(settings: Settings, *, ours: list[str], control: list[str]) -> list[RankReport]:
    def record(digests: list[str]) -> RunRecord:
        steps = settings.steps
        return RunRecord(list(digests), [1.0] * steps, [5.0] * steps, before=9, after=3)

    eager = [str(step) for step in range(settings.steps)]
    runs = {"eager": eager, "fsdp_order": ours, "graph_order": control}
    return [
        RankReport({name: record(d) for name, d in runs.items()}, MODEL, "2")
        for _ in range(settings.ranks)
    ]


def test_a_run_that_differs_from_eager_fails_and_says_where():
    settings = Settings(steps=4)
    ranks = _reports(settings, ours=["0", "1", "x", "3"], control=["x"] * 4)
    ranks[0].runs["fsdp_order"].digests[2] = "2"  # equal on rank 0; another rank differs
    result = demo_result(settings, ranks)
    assert not result["passed"]
    assert result["runs"]["fsdp_order"]["steps_equal_to_eager"] == 3
    assert result["runs"]["fsdp_order"]["first_different_step"] == 3
    assert "FAIL" in render(result)
    assert "first differ at step 3" in render(result)


@pytest.mark.parametrize(
    ("ranks", "nodes", "message"), [(4, 1, "one node"), (2, 2, "a + b is b + a")]
)
def test_a_control_that_can_not_differ_is_explained(ranks, nodes, message):
    settings = Settings(steps=2, ranks=ranks, nodes=nodes)
    result = demo_result(settings, _reports(settings, ours=["0", "1"], control=["0", "1"]))
    assert result["passed"]
    assert message in render(result)


# --- the command ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "ranks must be at least 2"),
        (["--ranks", "4", "--nodes", "3"], "nodes must divide ranks (4) evenly"),
        (["--nodes", "0"], "nodes must be positive"),
        (["--steps", "0"], "steps must be positive"),
        (["--layers", "-1"], "layers must be positive"),
        (["--dim", "100"], "dim must be a multiple of 64"),
        (["--dim", "wide"], "invalid int value"),
        (["--reduce-dtype", "int8"], "invalid choice"),
        (["--timeout", "0"], "timeout_s must be positive"),
        (["--json", "/no/such/folder/x.json"], "does not exist"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bad_options_are_usage_errors_before_any_rank_starts(options, message, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run_ranks", None)
    with pytest.raises(SystemExit) as caught:
        main(["demo", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_bad_option_costs_no_import_of_torch():
    command = ["-X", "importtime", "-m", "torch_ext_bucketing", "demo", "--dim", "100"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch_ext_bucketing.commands.demo" in imported
    assert "torch" not in imported
