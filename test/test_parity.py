"""A few cells of the parity matrix, so that its machinery is known to work and to be able to fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.parity_cells import Cell, CellReport, CellResult, RunReport, select

ALL = (("llama", "moe", "vit", "uneven"), ("2x2", "4x2"), ("aot_eager", "inductor"))


def _cell(**fields: object) -> Cell:
    values = {
        "model": "llama",
        "nodes": 2,
        "ranks": 4,
        "backend": "aot_eager",
        "parallelism": "fsdp",
        "reduce_dtype": "bf16",
    }
    return Cell(**{**values, **fields})  # type: ignore[arg-type]


def _run(*digests: str, layout: tuple[str, ...] = ()) -> RunReport:
    return RunReport(list(digests), [1.0] * len(digests), list(layout))


def _combine(cell: Cell, eager: RunReport, **runs: RunReport) -> CellResult:
    return parity.combine([CellReport(cell, eager, runs)] * cell.ranks, len(eager.digests))


# --- cells and verdicts --------------------------------------------------------------------------


def test_the_matrix_has_every_combination_once():
    cells = select(*ALL, ("fsdp", "hsdp", "fsdp+chunked_loss"), ("bf16", "fp32"))
    assert len(cells) == len(dict.fromkeys(cells)) == 4 * 2 * 2 * 3 * 2
    (only,) = select(*ALL, ("fsdp", "hsdp"), ("bf16",), only="moe/4x2/inductor/hsdp/*")
    assert only == _cell(model="moe", nodes=4, ranks=8, backend="inductor", parallelism="hsdp")


def test_equal_weights_and_a_control_that_differs_pass():
    result = _combine(_cell(), _run("a", "b"), fsdp_order=_run("a", "b"), control=_run("a", "x"))
    assert (result.steps_equal, result.control_first_different_step) == (2, 2)
    assert result.problems == []


def test_a_control_that_does_not_differ_fails_where_it_could():
    runs = {"fsdp_order": _run("a", "b"), "control": _run("a", "b")}
    assert _combine(_cell(), _run("a", "b"), **runs).problems == ["graph order gives the same bits"]
    two_by_two = _combine(_cell(parallelism="hsdp"), _run("a", "b"), **runs)
    assert two_by_two.problems == []
    assert "a + b is b + a" in two_by_two.cause


def test_different_weights_fail_without_proof_and_pass_with_it():
    eager, other = _run("a", "b"), _run("a", "x")
    plain = _combine(_cell(), eager, fsdp_order=other, control=_run("x"))
    assert plain.problems == ["weights equal after 1 of 2 steps only"]
    cell = _cell(backend="inductor")
    proven = _combine(cell, eager, fsdp_order=other, aten_kernels=eager, control=_run("x"))
    assert proven.problems == []
    assert proven.cause == parity.KERNELS
    unproven = _combine(cell, eager, fsdp_order=other, aten_kernels=other, control=_run("x"))
    assert unproven.problems
    assert unproven.cause == "unknown"


def test_another_layout_fails_whatever_the_weights():
    ours = _run("a", layout=("byte 0 is b",))
    result = _combine(_cell(), _run("a"), fsdp_order=ours, control=_run("x"))
    assert result.problems == ["the payload layout is not eager's"]
    header = {"date": "", "command": "", "python": "", "layers": 1, "steps": 1}
    assert "byte 0 is b" in parity.render(header, [result])


def test_results_are_read_back():
    result = _combine(_cell(), _run("a"), fsdp_order=_run("a"), control=_run("x"))
    assert CellResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result


# --- real ranks ----------------------------------------------------------------------------------

FIELDS = [
    "model",
    "nodes",
    "ranks",
    "backend",
    "parallelism",
    "reduce_dtype",
    "steps_equal",
    "control_first_different_step",
    "layout_equal",
    "cause",
    "experiment",
]


@pytest.mark.parametrize(
    ("options", "cells"),
    [
        pytest.param(["--only", "uneven/2x2/aot_eager/fsdp*/bf16"], 2, marks=pytest.mark.once),
        pytest.param(["--only", "uneven/2x2/inductor/fsdp/bf16"], 1, marks=pytest.mark.slow),
    ],
    ids=["aot_eager", "inductor"],
)
def test_cells_on_real_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], cells: int
):
    path = tmp_path / "cells.json"
    status = parity.main([*options, "--steps", "3", "--json", str(path), "--timeout", "240"])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    found = json.loads(path.read_text())
    assert len(found) == cells
    for cell in found:
        assert cell["torch"] == torch.__version__
        assert [name for name in FIELDS if name not in cell] == []
        assert cell["layout_equal"]
        assert cell["control_first_different_step"] == 1
        equal = cell["experiment"].get("aten_kernels_steps_equal", cell["steps_equal"])
        assert equal == 3
    assert f"{cells} of {cells} cells pass" in printed.out


@pytest.mark.slow
def test_virtual_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "virtual.json"
    status = parity.main(["--virtual-ranks", "16", "--steps", "2", "--json", str(path)])
    assert status == 0, capsys.readouterr().out
    (result,) = json.loads(path.read_text())
    assert (result["ranks"], result["nodes"], result["steps_equal"]) == (16, 2, 2)
    assert result["control_first_different_step"] == 1
    assert result["layout_equal"]


def test_bad_options_are_usage_errors(capsys: pytest.CaptureFixture[str]):
    for options, says in (
        (["--models", "gpt"], "'gpt' is none of llama"),
        (["--only", "nothing/*"], "no cell is left"),
        (["--virtual-ranks", "12"], "multiples of 8"),
    ):
        with pytest.raises(SystemExit) as caught:
            parity.main(options)
        assert caught.value.code == 2
        assert says in capsys.readouterr().err
