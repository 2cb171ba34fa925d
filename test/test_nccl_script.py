"""``benchmarks/nccl.py`` without a GPU: everything up to the first CUDA call, and gloo in NCCL's
place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nccl_rank_functions import fails_on_one, never_ends

from benchmarks import nccl
from benchmarks.nccl_cells import (
    Key,
    RunResult,
    TimedReport,
    combine,
    in_order,
    nccl_environment,
    problems,
    render,
    select,
    soft_limit,
)

ROOT = Path(__file__).resolve().parent.parent

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")


# --- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--ranks", "2,two"], "no list of numbers such as 2,4,8"),
        (["--ranks", "1"], "2 ranks or more"),
        (["--steps", "0"], "no positive number"),
        (["--dim", "100"], "a multiple of 64"),
        (["--timeout", "-3"], "no positive number of seconds"),
        (["--timeout", "nan"], "no positive number of seconds"),
        (["--backend", "mpi"], "invalid choice"),
        (["--only", "3/*"], "no run is left"),
        (["--ranks", "2", "--only", "2/hsdp/*"], "no run is left"),
        (["--json", "/no/such/folder/x.json"], "does not exist"),
        (["--json", "."], "is a folder"),
        pytest.param(["--backend", "nccl"], "sees no CUDA device", marks=no_gpu),
    ],
)
def test_bad_options_are_usage_errors_before_any_rank_starts(options, says, monkeypatch, capsys):
    def no_ranks(*_args, **_more):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(nccl, "run_ranks", no_ranks)
    with pytest.raises(SystemExit) as caught:
        nccl.main(["--backend", "gloo", *options])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


def test_what_is_run():
    names = [key.name for key in select([2, 4, 8])]
    assert len(names) == len(set(names)) == (1 + 2 + 2) * 2 * 4
    assert "8/hsdp/inductor/torch_buckets" in names
    assert not [name for name in names if name.startswith("2/hsdp")]  # two groups of one rank
    ordered = in_order(select([4]))
    assert [key.run == "ours" for key in ordered] == [True] * 4 + [False] * 12
    assert select([4], "4/hsdp/*/ours")[0].reference.mesh_shape == (2, 2)
    assert select([8], "8/hsdp/*/ours")[0].reference.mesh_shape == (4, 2)
    # The proofs of the later launches keep their time.
    limits = [soft_limit(570, 2, [4, 8]), soft_limit(450, 4, [8]), soft_limit(250, 8, [])]
    assert all(60 < limit < 250 for limit in limits)


# --- devices ---------------------------------------------------------------------------------------


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
from benchmarks import nccl_ranks

calls = []
torch.cuda.set_device = lambda device: calls.append((str(device), os.environ.get("NCCL_HOSTID")))
dist.init_process_group = lambda name, **more: calls.append((name, more["rank"], more["world_size"]))
rank = types.SimpleNamespace(rank=3, world_size=4, store_path="store", timeout=timedelta(seconds=60))
for devices, device, host in (
    (4, "cuda:3", None), (1, "cuda:0", "simulated-host-3"), (2, "cuda:1", "simulated-host-3")
):
    torch.cuda.device_count = lambda: devices
    assert str(nccl_ranks.start(rank, "nccl")) == device
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


# --- verdicts --------------------------------------------------------------------------------------

OURS = Key(2, "fsdp", "inductor", "ours")


def _results(**hashes: str) -> dict[Key, RunResult]:
    found = {}
    for run, text in hashes.items():
        key = Key(2, "fsdp", "-" if run.startswith("eager") else OURS.backend, run)
        found[key] = RunResult(key, len(text), list(text), [1.0], 2.0)
    return found


@pytest.mark.parametrize(
    ("hashes", "says"),
    [
        ({"eager": "abc", "ours": "abc"}, []),
        ({"eager": "abc", "ours": "axc"}, ["after 2 of 3 steps"]),
        ({"eager": "abc", "ours": "xyz", "aten_kernels": "abc"}, []),
        ({"eager": "abc", "ours": "xyz", "aten_kernels": "abx"}, ["on ATen's kernels after 2"]),
        (
            {"eager": "abc", "eager_again": "ayz", "ours": "axx"},
            ["eager FSDP2 itself is reproducible for 1 steps only"],
        ),
        ({"eager": "abc"}, ["2/fsdp/inductor/ours: not run"]),
    ],
)
def test_what_makes_a_run_pass(hashes, says):
    found = problems(_results(**hashes), [OURS], 3)
    assert len(found) == len(says)
    for text, wanted in zip(found, says, strict=True):
        assert wanted in text


def test_another_layout_fails_whatever_the_weights():
    results = _results(eager="abc", ours="abc")
    results[OURS].layout_differences = ["rank 0: byte 0 is b"]
    assert "byte 0 is b" in problems(results, [OURS], 3)[0]


def test_every_rank_counts():
    reports = [
        TimedReport(digests=["a", "b"], loss=[1.0, 2.0], step_ms=[90.0, 5.0], peak_bytes=size)
        for size in (10, 30)
    ]
    reports[1].step_ms = [80.0, 7.0]
    reports[1].layout_differences = ["moved"]
    result = combine(OURS, reports)
    assert (result.steps, result.step_ms, result.peak_bytes) == (2, 7.0, 30)
    assert result.layout_differences == ["rank 1: moved"]
    reports[1].digests[1] = "x"
    assert result.first_difference(combine(OURS, reports)) == 2


def test_what_was_skipped_for_time_is_said_and_no_failure():
    results = _results(eager="abc", ours="abc")
    skipped = Key(2, "fsdp", "inductor", "unbucketed")
    results[skipped] = RunResult(skipped, skipped="out of time")
    assert problems(results, [OURS, skipped], 3) == []
    header = dict.fromkeys(("date", "python", "command", "layers", "dim", "batch"), "")
    assert "out of time" in render(header, results)


# --- ranks -----------------------------------------------------------------------------------------


def test_a_failing_rank_ends_all_and_loses_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(nccl, "run_on_rank", fails_on_one)
    path = tmp_path / "nccl.json"
    only = "2/fsdp/aot_eager/unbucketed"
    status = nccl.main(["--backend", "gloo", "--ranks", "2", "--only", only, "--json", str(path)])
    assert status == 1
    printed = capsys.readouterr()
    assert "time limit" not in printed.err  # the other rank, which would go on, was ended before
    assert "2 ranks: rank 1 failed" in printed.err
    assert "LookupError: this rank has no such weight" in printed.err
    assert 'raise LookupError("this rank has no such weight")' in printed.err
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["name"], run["steps"]) == (only, 1)


@pytest.mark.once
def test_the_time_limit_ends_all(monkeypatch, capsys):
    monkeypatch.setattr(nccl, "run_on_rank", never_ends)
    # The time is that of all numbers of ranks together.
    assert nccl.main(["--backend", "gloo", "--ranks", "2,4", "--timeout", "8"]) == 1
    printed = capsys.readouterr()
    (said,) = re.findall(r"time limit of ([\d.]+) s reached", printed.err)
    assert float(said) <= 8
    assert "unfinished ranks: 0, 1" in printed.err
    assert "never_ends" in printed.err  # where they were
    assert "2/fsdp/aot_eager/ours: not run" in printed.out
    assert "4/hsdp/inductor/ours: not run" in printed.out


def _script(*options: str, seconds: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "nccl.py"), *options],
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.once
@no_gpu
def test_without_a_gpu_the_script_says_so():
    done = _script()
    assert done.returncode == 2
    assert "sees no CUDA device; --backend gloo runs the same on the CPU" in done.stderr


@pytest.mark.slow
def test_the_same_script_on_gloo(tmp_path):
    path = tmp_path / "nccl.json"
    done = _script(
        *("--backend", "gloo", "--ranks", "2", "--steps", "3", "--only", "*/aot_eager/[otu]*"),
        *("--json", str(path)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(path.read_text())
    runs = {run["name"]: run for run in document["runs"]}
    eager = runs["2/fsdp/-/eager"]
    assert document["problems"] == []
    for name, collectives in (
        ("-/eager", [3, 2]),
        ("aot_eager/ours", [3, 2]),
        ("aot_eager/unbucketed", [27, 15]),
    ):
        counts = runs[f"2/fsdp/{name}"]["collectives"]
        assert [counts["all_gather"], counts["reduce_scatter"]] == collectives, name
    assert runs["2/fsdp/aot_eager/torch_buckets"]["collectives"]["all_gather"] < 27
    for run in runs.values():
        assert run["steps"] == 3
        assert run["step_ms"] > 0
        assert run["peak_bytes"] is None
        # Of two ranks the order of addition can't matter.
        assert run["hashes"] == eager["hashes"], run["name"]
    assert "3 of 3 runs are as they must be" in done.stdout
    assert "unpatched torch's buckets" in done.stdout
