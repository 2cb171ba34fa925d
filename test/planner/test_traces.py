"""Machines from traces: a collective's time begins when its last rank arrives."""

import gzip
import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.planner.cost.machine import Machine
from torch_ext_bucketing.testing.ring import on_ranks

pytestmark = pytest.mark.once

C10D = torch.ops._c10d_functional
WAIT_S = 0.2


def _profiled(rank, folder):
    group = dist.group.WORLD.group_name
    x, square = torch.ones(1000, dtype=torch.bfloat16), torch.ones(512, 512)

    def step():
        C10D.wait_tensor(C10D.all_gather_into_tensor(x, 2, group))
        torch.mm(square, square)
        torch.empty(2**20).copy_(torch.ones(2**20))

    step()
    with torch.profiler.profile(record_shapes=True) as profile:
        for _ in range(3):
            dist.barrier()
            time.sleep(WAIT_S * rank)
            step()
    path = Path(folder) / f"rank{rank}.json"
    profile.export_chrome_trace(str(path))
    return str(path)


def test_traces_of_ranks_that_came_late(tmp_path):
    paths = on_ranks(_profiled, str(tmp_path))
    machine = Machine.from_traces(paths)
    assert machine.ranks_per_node == 2
    waited = [
        e["dur"] / 1e6
        for e in json.loads(Path(paths[0]).read_text())["traceEvents"]
        if e["name"] == "gloo:all_gather" and e.get("ph") == "X"
    ]
    assert max(waited) > WAIT_S / 2  # the rank that came first waited
    ((key, ((nbytes, ms),)),) = machine.collectives.items()
    assert (key, nbytes) == (("all_gather", (2, 1)), 2 * (1000 + 2000))
    assert 0 < ms < 1e3 * WAIT_S / 2
    assert 1e8 < machine.flops["float32"] < 1e13
    assert 1e8 < machine.bandwidth < 1e12
    assert machine.flops["bfloat16"] > 1e14  # not in the traces

    out = tmp_path / "machine.json"
    assert main(["measure", "--traces", *paths, "--out", str(out)]) == 0
    assert Machine.load(out) == machine


RANKS = {"pg_name": "7", "ranks": [0, 1]}
PAIR = {"pg_name": "9", "ranks": [0, 2]}


def _kernel(name, begin, end, nelems, group="7", **more):
    """Make a kernel of NCCL as traces have it."""
    args = {
        "Collective name": name,
        "In msg nelems": nelems[0],
        "Out msg nelems": nelems[1],
        "dtype": "BFloat16",
        "Process Group Name": group,
        "Process Group Ranks": "[0, 1]",
    }
    args.update(more)
    event = {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": begin, "dur": end - begin}
    return {**event, "args": args}


def _trace(folder, rank, events, *, groups=(RANKS,), world=2, host="a", told=True):
    document = {"traceEvents": events, "baseTimeNanoseconds": 10**9, "host_name": host}
    if told:
        document["distributedInfo"] = {
            "rank": rank,
            "world_size": world,
            "pg_config": list(groups),
        }
    path = folder / f"rank{rank}.json.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump(document, file)
    return path


def _two_ranks(folder, second=None, **more):
    """Write two traces: rank 1 is 1000 and 400 us late, rank 0 once 250 us."""
    zero = [
        _kernel("_allgather_base", 0, 1500, (100, 200)),
        _kernel("_reduce_scatter_base", 2000, 2300, (200, 100)),
        _kernel("allgather_into_tensor_coalesced", 3000, 3700, (100, 200)),
        _kernel("broadcast", 4000, 4100, (5, 5)),
        # two kernels of one launch
        _kernel("all_to_allv", 5000, 5100, (40, 60), **{"External id": 3}),
        _kernel("all_to_allv", 5100, 5400, (40, 60), **{"External id": 3}),
    ]
    one = [
        _kernel("_allgather_base", 1000, 1500, (100, 200)),
        _kernel("_reduce_scatter_base", 1750, 2300, (200, 100)),
        _kernel("allgather_into_tensor_coalesced", 3400, 3700, (100, 200)),
        _kernel("broadcast", 4000, 4100, (5, 5)),
        _kernel("all_to_allv", 5000, 5400, (60, 20)),
    ]
    return [_trace(folder, 0, zero), _trace(folder, 1, second or one, **more)]


BY_HAND = {
    # 500 and 300 us without the wait, median 400; 300 elements of 2 bytes
    ("all_gather", (2, 1)): ((600, 0.4),),
    ("reduce_scatter", (2, 1)): ((600, 0.3),),
    # rank 0 sends and receives the most
    ("all_to_all", (2, 1)): ((200, 0.4),),
}


def test_nccl_kernels_by_hand(tmp_path):
    machine = Machine.from_traces(_two_ranks(tmp_path))
    assert machine.collectives == {
        k: ((n, pytest.approx(ms)),) for k, ((n, ms),) in BY_HAND.items()
    }


def test_nccl_traces_of_a_mesh():
    """NCCL 2.28 and torch 2.11 wrote them on four ranks, a 2x2 mesh, that share one H100.

    Each has two steps of each kind on two groups, and a gather of all ranks. The milliseconds were
    read off by hand.
    """
    traces = [Path(__file__).parents[1] / "nccl" / f"rank{rank}.json.gz" for rank in range(4)]
    machine = Machine.from_traces(traces, ranks_per_node=2)
    halves = 2 * (2**20 + 2**21)  # bytes of a gather and of a reduce-scatter in bf16
    assert {key: size for key, ((size, _),) in machine.collectives.items()} == {
        **{("all_gather", (2, nodes)): halves for nodes in (1, 2)},
        **{("reduce_scatter", (2, nodes)): halves for nodes in (1, 2)},
        **{("all_reduce", (2, nodes)): 2 * 2**22 for nodes in (1, 2)},
        **{("all_to_all", (2, nodes)): 2 * 2**22 for nodes in (1, 2)},
        ("all_gather", (4, 2)): 2 * 5 * (2**20 + 1000),  # two tensors as one collective
    }
    # Ranks [0, 1]: the smaller of 0.170 and 3.053, and of 0.155 and 1.041; [2, 3]: of 2.160 and
    # 5.831, and of 0.923 and 1.313. The slower group counts.
    ((_, inside),) = machine.collectives["all_gather", (2, 1)]
    assert inside == pytest.approx((2.159923 + 0.923287) / 2)
    ((_, whole),) = machine.collectives["all_gather", (4, 2)]
    assert whole == pytest.approx((4.502283 + 2.047441) / 2)
    with pytest.raises(
        ValueError, match=r"rank0.json.gz does not name its host, .* ranks_per_node"
    ):
        Machine.from_traces(traces)


def _gloo(name, launched, begin, end, arguments, given, dtype="float"):
    """Make an operator and the event of gloo's thread that it launched."""
    launch = {"name": f"c10d::{name[0]}", "ts": launched, "dur": 1, "cat": "cpu_op"}
    event = {"name": f"gloo:{name[1]}", "ts": begin, "dur": end - begin, "cat": "user_annotation"}
    args = {"Input Dims": [[given]], "Input type": [dtype]}
    return [
        {"ph": "X", **launch, "args": {"Input Dims": arguments}},
        {"ph": "X", **event, "args": args},
    ]


def test_gloo_events_by_hand(tmp_path):
    """gloo scatters by an all-reduce, and two of its threads may begin in any order."""
    paths = []
    for rank, late in ((0, 0), (1, 50)):
        events = [
            *_gloo(("_allgather_base_", "all_gather"), 0, 9 + late, 159, [[80], [40], []], 40),
            *_gloo(
                ("reduce_scatter_tensor_coalesced_", "all_reduce"),
                2,
                8 + late,
                208,
                [[[30]], [[60]]],
                60,
            ),
            *_gloo(
                ("allreduce_", "all_reduce"), 300, 310 + late, 400, [[[7]], [], []], 7, "c10::Half"
            ),
            *_gloo(("alltoall_base_", "all_to_all"), 500, 510 + late, 600, [[6], [4], []], 4),
            # its launch is not a collective of a compiled graph
            *_gloo(("allgather_", "all_gather"), 700, 710 + late, 800, [[], []], 5),
        ]
        paths.append(_trace(tmp_path, rank, events))
    machine = Machine.from_traces(paths)
    assert {kind: points for (kind, _), points in machine.collectives.items()} == {
        "all_gather": ((4 * 120, pytest.approx(0.1)),),
        "reduce_scatter": ((4 * 90, pytest.approx(0.15)),),
        "all_reduce": ((2 * 14, pytest.approx(0.04)),),
        "all_to_all": ((4 * 10, pytest.approx(0.04)),),
    }


def test_clocks_of_two_hosts_are_not_compared(tmp_path):
    late = [
        {**e, "ts": e["ts"] + 10**7}
        for e in json.loads(gzip.decompress(_two_ranks(tmp_path)[1].read_bytes()))["traceEvents"]
    ]
    with pytest.raises(ValueError, match=r"collective 0 of group .*profile the same steps"):
        Machine.from_traces(_two_ranks(tmp_path, late))
    machine = Machine.from_traces(_two_ranks(tmp_path, late, host="b"))
    assert machine.ranks_per_node == 1
    assert machine.collectives["all_gather", (2, 2)] == ((600, pytest.approx(0.4)),)


def test_groups_with_ranks_that_no_trace_is_of_are_left_out(tmp_path):
    far = _kernel("allreduce", 8000, 9000, (10, 10), "9")
    zero, one = _two_ranks(tmp_path)
    events = json.loads(gzip.decompress(zero.read_bytes()))["traceEvents"]
    paths = [
        _trace(tmp_path, 0, [*events, far], groups=(RANKS, PAIR), world=4),
        _trace(tmp_path, 1, json.loads(gzip.decompress(one.read_bytes()))["traceEvents"], world=4),
    ]
    with pytest.warns(UserWarning, match=r"left out: no trace of ranks \[2\] of group \[0, 2\]"):
        machine = Machine.from_traces(paths, ranks_per_node=2)
    assert set(machine.collectives) == set(BY_HAND)
    with (
        pytest.warns(UserWarning, match="left out"),
        pytest.raises(ValueError, match="give ranks_per_node"),
    ):
        Machine.from_traces(paths)
    only = _trace(tmp_path, 0, [far], groups=(RANKS, PAIR), world=4)
    with pytest.raises(ValueError, match=r"time no collective: no trace of ranks \[2\]"):
        Machine.from_traces([only], ranks_per_node=2)


def test_what_is_no_set_of_traces_is_said(tmp_path, capsys):
    def alone(*events, **more):
        return _trace(tmp_path, 0, events, **more)

    def of_rank_1(**more):
        return [_two_ranks(tmp_path)[0], _trace(tmp_path, 1, [], **more)]

    fewer = [_kernel("_allgather_base", 1000, 1500, (100, 200))]
    other = [_kernel("allreduce", e * 1000, e * 1000 + 900, (100, 200)) for e in range(4)]
    cut = _kernel("allreduce", 0, 1, (1, 1), "8", **{"Process Group Ranks": "[0, 1, ...]"})
    odd = _kernel("allreduce", 0, 1, (1, 1), dtype="Float3")
    gloo = {"ph": "X", "name": "gloo:all_reduce", "ts": 1, "dur": 1, "args": {}}
    text = tmp_path / "text.json"
    text.write_text("[]")
    for match, traces in {
        r"rank1.json.gz has 1, .*rank0.json.gz 4; profile the": lambda: _two_ranks(tmp_path, fewer),
        r"all_gather of 600 bytes .* and all_reduce of 600 bytes": (
            lambda: _two_ranks(tmp_path, other)
        ),
        "are both of rank 0": lambda: _two_ranks(tmp_path)[:1] * 2,
        "no traces": list,
        "not of a distributed run": lambda: of_rank_1(told=False),
        r"of 2 ranks, .* of 4": lambda: of_rank_1(world=4),
        "does not list the ranks of process group '8'": lambda: [alone(cut)],
        "unknown dtype, 'Float3'": lambda: [alone(odd)],
        "there are 2 process groups": lambda: [alone(gloo, groups=(RANKS, PAIR))],
        "record_shapes=True": lambda: [alone(gloo)],
        "is not a trace": lambda: [text],
    }.items():
        with pytest.raises(ValueError, match=match):
            Machine.from_traces(traces())

    out = tmp_path / "machine.json"
    assert main(["measure", "--traces", str(text), "--out", str(out)]) == 1
    assert "text.json is not a trace" in capsys.readouterr().err
    assert not out.exists()
