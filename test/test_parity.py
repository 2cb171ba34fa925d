"""A few cells of the parity matrix, so that its machinery is known to work and to be able to fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.devices import nccl_environment
from benchmarks.parity_cells import Cell, CellReport, CellResult, RunReport, select
from torch_ext_bucketing.testing.ranks import Rank

ROOT = Path(__file__).resolve().parent.parent

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")

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
    on_gpus = select(*ALL, ("fsdp",), ("bf16",), device="cuda")
    assert {c.reference.mesh_shape for c in on_gpus} == {(4,), (8,)}
    assert all("up to the machine" in c.reference.why_no_control for c in on_gpus)
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
    "only",
    [
        pytest.param("uneven/2x2/aot_eager/fsdp/bf16", marks=pytest.mark.once),
        pytest.param("uneven/2x2/aot_eager/fsdp+*/bf16", marks=pytest.mark.slow),
        pytest.param("uneven/2x2/inductor/fsdp/bf16", marks=pytest.mark.slow),
    ],
)
def test_cells_on_real_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str):
    path = tmp_path / "cells.json"
    options = ["--only", only, "--steps", "3", "--json", str(path), "--timeout", "240"]
    status = parity.main(options)
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    (cell,) = json.loads(path.read_text())
    assert cell["torch"] == torch.__version__
    assert [name for name in FIELDS if name not in cell] == []
    assert cell["layout_equal"]
    assert cell["control_first_different_step"] == 1
    equal = cell["experiment"].get("aten_kernels_steps_equal", cell["steps_equal"])
    assert equal == 3
    assert "1 of 1 cells pass" in printed.out


@pytest.mark.slow
def test_virtual_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "virtual.json"
    status = parity.main(["--virtual-ranks", "16", "--steps", "2", "--json", str(path)])
    assert status == 0, capsys.readouterr().out
    (result,) = json.loads(path.read_text())
    assert (result["ranks"], result["nodes"], result["steps_equal"]) == (16, 2, 2)
    assert result["control_first_different_step"] == 1
    assert result["layout_equal"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--models", "gpt"], "'gpt' is none of llama"),
        (["--only", "nothing/*"], "no cell is left"),
        (["--topologies", "1x2", "--parallelism", "hsdp"], "no cell is left"),
        (["--virtual-ranks", "12"], "multiples of 8"),
        pytest.param(["--device", "cuda"], "sees no CUDA device", marks=no_gpu),
    ],
)
def test_bad_options_are_usage_errors_before_any_rank_starts(options, says, monkeypatch, capsys):
    def no_ranks(*_args, **_more):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(parity, "run_ranks", no_ranks)
    with pytest.raises(SystemExit) as caught:
        parity.main(options)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def fails_on_one(rank: Rank, cells: list[Cell], steps: int, layers: int) -> None:
    run = RunReport(["a"], [1.0])
    rank.send(("cell", CellReport(cells[0], run, {"fsdp_order": run, "control": RunReport(["x"])})))
    time.sleep(0.5)
    if rank.rank == 1:
        raise LookupError("this rank has no such weight")
    time.sleep(600)  # as in a collective that the failed rank never joins


def test_a_failing_rank_ends_all_and_loses_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(parity, "_run_cells", fails_on_one)
    path = tmp_path / "cells.json"
    options = ["--only", "uneven/2x2/aot_eager/fsdp*/bf16", "--steps", "1", "--json", str(path)]
    assert parity.main(options) == 1
    printed = capsys.readouterr()
    assert "time limit" not in printed.err  # the other ranks, which would go on, were ended before
    assert "2 nodes x 2 ranks: rank 1 failed" in printed.err
    assert 'raise LookupError("this rank has no such weight")' in printed.err
    assert "1 of 2 cells did not finish" in printed.out
    (cell,) = json.loads(path.read_text())
    assert (cell["parallelism"], cell["passed"]) == ("fsdp", True)


# --- devices -------------------------------------------------------------------------------------


def test_ranks_that_share_a_gpu_are_hosts_of_their_own():
    shared = [nccl_environment(rank, 8, 1) for rank in range(8)]
    assert len({e["NCCL_HOSTID"] for e in shared}) == 8
    for environment in shared:
        assert environment["NCCL_SOCKET_IFNAME"] == "lo"
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"):
            assert environment[name] == "1"
    for devices in (4, 8):
        alone = nccl_environment(1, 4, devices)
        assert not [name for name in alone if name.startswith("NCCL")]
    with pytest.raises(ValueError, match="8 ranks can't be spread evenly over 3 GPUs"):
        nccl_environment(0, 8, 3)


START = """
import os, types
from datetime import timedelta
import torch, torch.distributed as dist
import torch_ext_bucketing
import torch._inductor.config as inductor_config
from benchmarks import devices

calls = []
torch.cuda.set_device = lambda device: calls.append((str(device), os.environ.get("NCCL_HOSTID")))
dist.init_process_group = lambda name, **more: calls.append((name, more["rank"], more["world_size"]))
rank = types.SimpleNamespace(rank=3, world_size=4, store_path="store", timeout=timedelta(seconds=60))
for count, device, host in (
    (4, "cuda:3", None), (1, "cuda:0", "simulated-host-3"), (2, "cuda:1", "simulated-host-3")
):
    torch.cuda.device_count = lambda: count
    assert str(devices.start(rank, "nccl")) == device
    # The environment before the first CUDA call, the device before the first communicator.
    assert calls == [(device, host), ("nccl", 3, 4)], calls
    calls.clear()
assert torch.backends.cuda.math_sdp_enabled()
assert not torch.backends.cuda.flash_sdp_enabled()
assert not torch.backends.cuda.mem_efficient_sdp_enabled()
assert not torch.backends.cuda.cudnn_sdp_enabled()
assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
assert not inductor_config.fx_graph_cache and inductor_config.compile_threads >= 1
"""


@pytest.mark.once
def test_a_rank_up_to_its_first_cuda_call(tmp_path):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL", "CUBLAS"))}
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
