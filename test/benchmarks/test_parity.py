"""Run a few rows of the parity harness, and check that it finds differences."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

from benchmarks import parity
from benchmarks.eager_parity.devices import nccl_environment
from benchmarks.eager_parity.models import MODELS
from benchmarks.eager_parity.ranks import RowReport
from benchmarks.eager_parity.rows import ROWS, Row, matrix
from benchmarks.parity_results import KERNELS, RowResult, combine, render
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

pytestmark = pytest.mark.long

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


def _row(**fields: object) -> Row:
    return Row(**{"name": "row", "model": "llama", **fields})  # type: ignore[arg-type]


def _combine(row: Row, layout: tuple[str, ...] = (), warned: int = 0, **runs: str) -> RowResult:
    """Combine equal reports of all ranks; a letter stands for the weights after a step."""
    loss = {name: [1.0] * len(digests) for name, digests in runs.items()}
    given = {name: list(digests) for name, digests in runs.items()}
    report = RowReport(row, given, loss, list(layout), merged=1, warned=warned)
    return combine([report] * row.ranks, len(runs["eager"]))


# --- rows and verdicts ---------------------------------------------------------------------------

FOUR = ("llama", "moe", "vit", "uneven")


def test_the_matrix_has_every_combination_once():
    rows = list(matrix({name: MODELS[name] for name in FOUR}))
    assert len(rows) == len({row.name for row in rows}) == len(dict.fromkeys(rows)) == 104
    reuse = {name: model for name, model in MODELS.items() if model.group == "reuse"}
    assert len(list(matrix(reuse))) == 7 * 2 * 2 * 2
    on_gpus = [row for row in matrix(MODELS, device="cuda") if row.name.endswith("/fsdp/bf16")]
    assert {row.mesh for row in on_gpus} == {(4,), (8,)}
    assert all("up to the machine" in row.why_no_control for row in on_gpus)
    (only,) = [row for row in rows if row.name == "moe/4x2/inductor/hsdp/bf16"]
    hsdp = {"nodes": 4, "mesh": (4, 2), "backend": "inductor", "mode": "hybrid_shard"}
    assert only == _row(name=only.name, model="moe", layers=1, **hsdp)


def test_every_row_has_a_name_of_its_own_and_a_model():
    rows = ROWS
    assert len({row.name for row in rows}) == len(rows)
    of_torchtitan = [row for row in rows if row.client.startswith("torchtitan's")]
    assert {row.model for row in rows if row not in of_torchtitan} <= set(MODELS)


UNLIKE = {"case": "plain", "unlike": "a reason"}
SAME = {"eager": "ab", "fsdp_order": "ab", "control": "ab"}
OTHER = {"eager": "ab", "fsdp_order": "ax", "control": "x"}
UNKNOWN = ["weights equal after 1 of 2 steps only"]


@pytest.mark.parametrize(
    ("row", "report", "problems", "cause"),
    [
        ({}, SAME | {"control": "ax"}, [], ""),
        ({}, SAME, ["graph order gives the same bits"], ""),
        ({"mesh": (2, 2), "mode": "hybrid_shard"}, SAME, [], "a + b is b + a"),
        ({}, OTHER, UNKNOWN, ""),
        ({"backend": "inductor"}, OTHER | {"aten_kernels": "ab"}, [], KERNELS),
        ({"backend": "inductor"}, OTHER | {"aten_kernels": "ax"}, UNKNOWN, "unknown"),
        (
            {},
            SAME | {"control": "x", "layout": ("byte 0 is b",)},
            ["the payload layout is not"],
            "",
        ),
        (UNLIKE, {"eager": "ab", "fsdp_order": "xy", "warned": 1}, [], "a reason"),
        (UNLIKE, {"eager": "ab", "fsdp_order": "xy"}, ["nothing warned that bits are not"], ""),
        (
            UNLIKE,
            SAME | {"warned": 1},
            ["weights equal after 2 of 2 steps, where they can't be"],
            "",
        ),
        ({"case": "plain"}, SAME | {"warned": 1}, ["warned that bits are not eager's, which"], ""),
    ],
)
def test_verdicts(row, report, problems, cause):
    result = _combine(_row(**row), **report)
    assert len(result.problems) == len(problems)
    assert all(map(str.startswith, result.problems, problems))
    assert cause in result.cause
    assert all(text in render([result]) for text in report.get("layout", ()))
    if not problems and "mesh" not in row and "control" in report:
        assert result.control_first_different_step == (2 if report["control"] == "ax" else 1)


def test_a_row_without_its_packages_is_left_out_and_says_so(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert parity.main(["--rows", "graph_trainer/llama3"]) == 1  # nothing was run
    printed = capsys.readouterr().out
    assert "left out: graph_trainer/llama3: needs torchtitan, which is not installed" in printed


# --- real ranks ----------------------------------------------------------------------------------

REUSED = ("uneven", "twice", "tied_chunked", "block_twice", "checkpointed")
"""Models that use parameters more than once, one of them where its loss is computed in chunks;
``test_compare`` has their bits without the rewrites."""
EVERYDAY = ("regional", "graph_break_in_a_unit", "resume_on_fewer_ranks", "two_models")
"""Cases that are fast enough for tests. In the second bits differ, for its reason."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "number"),
    [
        (["--only", "uneven/2x2/inductor/fsdp/bf16"], 1),
        (["--models", ",".join(REUSED), "--only", "*/2x2/aot_eager/fsdp*/bf16"], 6),
        (["--rows", ",".join(f"everyday/{case}" for case in EVERYDAY)], 4),
    ],
    ids=["inductor", "reused", "everyday"],
)
def test_rows_on_real_ranks(tmp_path: Path, capsys, options: list[str], number: int):
    path = tmp_path / "rows.json"
    status = parity.main([*options, "--steps", "3", "--json", str(path), "--timeout", "400"])
    printed = capsys.readouterr()
    assert status == 0, printed.out + printed.err
    rows = json.loads(path.read_text())
    assert len(rows) == number
    assert f"{number} of {number} rows pass" in printed.out
    for row in rows:
        assert row["torch"] == torch.__version__
        assert row["layout_differences"] == []
        if row["case"]:
            assert (row["steps_equal"] == 3) == (row["case"] != "graph_break_in_a_unit")
        else:
            assert row["experiment"].get("aten_kernels_steps_equal", row["steps_equal"]) == 3
            assert row["control_first_different_step"] == 1


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
    ("options", "message"),
    [
        (["--models", "gpt"], "'gpt' is none of llama"),
        (["--only", "nothing/*"], "no row is left"),
        (["--rows", "nothing"], "no row is left"),
        (["--rows", "blocks", "--steps", "0"], "--steps must be at least 1"),
        (
            ["--rows", "everyday/*", "--steps", "2"],
            "--steps must be at least 3 for everyday/resume",
        ),
        (["--topologies", "1x2", "--parallelism", "hsdp"], "no row is left"),
        (["--virtual-ranks", "12"], "multiples of 8"),
        pytest.param(["--device", "cuda"], "sees no CUDA device", marks=no_gpu),
    ],
)
def test_bad_options_are_usage_errors_before_any_rank_starts(options, message, monkeypatch, capsys):
    def no_ranks(*_args, **_more):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(parity, "run_ranks", no_ranks)
    with pytest.raises(SystemExit) as caught:
        parity.main(options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def fails_on_one(rank: Rank, rows: list[Row], steps: int) -> None:
    runs = {"eager": ["a"], "fsdp_order": ["a"], "control": ["x"]}
    rank.send(RowReport(rows[0], runs, merged=1))
    time.sleep(0.5)
    if rank.rank == 1:
        raise LookupError("this rank has no such weight")
    time.sleep(600)  # like a collective that the failed rank never joins


def test_a_failing_rank_ends_all_and_loses_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(parity, "run_rows", fails_on_one)
    path = tmp_path / "rows.json"
    options = ["--only", "uneven/2x2/aot_eager/fsdp*/bf16", "--steps", "1", "--json", str(path)]
    assert parity.main(options) == 1
    printed = capsys.readouterr()
    assert "time limit" not in printed.err  # the other ranks were ended before
    assert "uneven/2x2/aot_eager/fsdp+chunked_loss/bf16: rank 1 failed" in printed.err
    assert 'raise LookupError("this rank has no such weight")' in printed.err
    assert "1 of 2 rows did not finish" in printed.out
    (row,) = json.loads(path.read_text())
    assert (row["chunks"], row["passed"]) == (1, True)


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


def up_to_the_first_cuda_call(rank: Rank) -> None:
    import torch._inductor.config as inductor_config
    import torch.distributed as dist

    from benchmarks.eager_parity import devices

    for name in [n for n in os.environ if n.startswith(("NCCL", "CUBLAS"))]:
        del os.environ[name]
    calls = []

    def set_device(device: object) -> None:
        calls.append((str(device), os.environ.get("NCCL_HOSTID")))

    def init(name: str, **more: object) -> None:
        calls.append((name, more["rank"], more["world_size"]))

    torch.cuda.set_device, dist.init_process_group = set_device, init
    rank.rank, rank.world_size = 3, 4
    host = "simulated-host-3"
    for count, device, host_id in ((4, "cuda:3", None), (1, "cuda:0", host), (2, "cuda:1", host)):
        torch.cuda.device_count = lambda count=count: count
        assert str(devices.start(rank, "nccl")) == device
        # The environment before the first CUDA call, the device before the first communicator.
        assert calls == [(device, host_id), ("nccl", 3, 4)], calls
        calls.clear()
    assert torch.backends.cuda.math_sdp_enabled()
    assert not torch.backends.cuda.flash_sdp_enabled()
    assert not torch.backends.cuda.mem_efficient_sdp_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not inductor_config.fx_graph_cache
    assert inductor_config.compile_threads >= 1


@pytest.mark.torch
def test_a_rank_up_to_its_first_cuda_call():
    run_ranks(up_to_the_first_cuda_call, 1, timeout_s=120)
