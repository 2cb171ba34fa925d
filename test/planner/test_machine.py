"""Machines with levels: whose ranks a group has decides how long its collectives take."""

import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from h100_times import SIMULATOR
from random_graphs import DIM, forward_graph
from rank_pool import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_ext_bucketing as teb
from torch_ext_bucketing.__main__ import main
from torch_ext_bucketing.graph.nodes import is_collective, is_compute
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.passes.cache_key import brief
from torch_ext_bucketing.passes.pipeline import Pipeline
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import (
    H100,
    INFINIBAND,
    Level,
    Machine,
    Protocol,
    job_machine,
    nvlink,
)
from torch_ext_bucketing.planner.cost.measure import measure
from torch_ext_bucketing.planner.scheduling import schedule

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MB = 10**6
# 100 and 10 bytes per microsecond, 1 and 20 microseconds.
TWO_LEVELS = Machine(
    ranks_per_node=8,
    intra=Level(100 * MB, latency_ms=0.001),
    inter=Level(10 * MB, latency_ms=0.02),
)

# A buffer of 8 MB: a gather of 8 ranks has 9 MB of input and output together, an all-reduce and an
# all-to-all 16 MB. Seven of eight parts pass each rank.
BY_HAND = {
    # 7 MB at 100 MB/s, 7 steps inside the node
    "gather, 8 on 1 node": ("all_gather", range(8), 9 * MB, 70 + 7 * 0.001),
    # at 10 MB/s, 7 steps between nodes
    "gather, 8 on 8 nodes": ("all_gather", range(0, 64, 8), 9 * MB, 700 + 7 * 0.02),
    # 4 ranks of each node add their 10 MB/s; 6 steps inside, 1 between
    "gather, 8 on 2 nodes": ("all_gather", [0, 1, 2, 3, 8, 9, 10, 11], 9 * MB, 175 + 0.006 + 0.02),
    # the node with one rank has 10 MB/s
    "gather, 7 and 1": ("all_gather", [0, 1, 2, 3, 4, 5, 6, 8], 9 * MB, 700 + 0.006 + 0.02),
    "scatter as gather": ("reduce_scatter", range(8), 9 * MB, 70 + 7 * 0.001),
    # twice the way of a gather
    "reduce, 8 on 1 node": ("all_reduce", range(8), 16 * MB, 140 + 14 * 0.001),
    "reduce, 8 on 8 nodes": ("all_reduce", range(0, 64, 8), 16 * MB, 1400 + 14 * 0.02),
    # 7 of 8 MB inside; 4 of 8 MB to the other node and 3 inside, at the same time
    "tokens, 8 on 1 node": ("all_to_all", range(8), 16 * MB, 70 + 0.001),
    "tokens, 8 on 2 nodes": ("all_to_all", [0, 1, 2, 3, 8, 9, 10, 11], 16 * MB, 400 + 0.02),
    "one rank": ("all_gather", [3], 9 * MB, 0.0),
    "16 on 2 nodes": ("all_gather", range(16), 17 * MB, 15 / 80 * 1e3 + 14 * 0.001 + 0.02),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_times_by_hand(case):
    kind, ranks, nbytes, ms = BY_HAND[case]
    # 16 ranks: 15 MB of 16 at 80 MB/s, what eight ranks of a node have to other nodes together
    assert TWO_LEVELS.network_ms(kind, list(ranks), nbytes) == pytest.approx(ms)


@pytest.mark.parametrize(
    ("table", "ranks", "ms"),
    [
        ({("all_gather", (4, 2)): ((1, 5.0),)}, [0, 1, 8, 9], 5.0),
        ({("all_gather", (4, 2)): ((1, 5.0),), ("all_gather", 4): ((1, 1.0),)}, [0, 1, 2, 3], 1.0),
        ({("all_gather", (4, 1)): ((1, 2.0),), ("all_gather", 4): ((1, 1.0),)}, [0, 1, 2, 3], 2.0),
        ({("all_gather", 4): ((1, 1.0),)}, [0, 1, 8, 9], None),
        ({("all_reduce", 4): ((1, 1.0),)}, [0, 1, 2, 3], None),
    ],
)
def test_measured_times_are_of_a_shape(table, ranks, ms):
    assert Machine(ranks_per_node=8, collectives=table).network_ms("all_gather", ranks, 1) == ms


def test_without_ranks_per_node_a_key_with_a_size_holds_for_every_group():
    machine = Machine(collectives={("all_gather", 4): ((1, 1.0),)})
    assert machine.network_ms("all_gather", [0, 8, 16, 24], 1) == 1.0


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"ranks_per_node": 0}, ValueError, "ranks_per_node"),
        ({"intra": Level(1e9)}, ValueError, "together"),
        ({"intra": 1e9, "inter": 1e8, "ranks_per_node": 8}, TypeError, "intra must be a Level"),
        ({"estimate": 3.0}, TypeError, "estimate must be a Callable or None"),
        ({"collectives": {("gather", 8): ((1, 1.0),)}}, ValueError, "a key is"),
        ({"collectives": {("all_gather", (8, 0)): ((1, 1.0),)}}, ValueError, "a key is"),
    ],
)
def test_what_is_no_machine(wrong, error, message):
    with pytest.raises(error, match=message):
        Machine(**wrong)
    with pytest.raises(ValueError, match="bandwidth"):
        Level(0)
    with pytest.raises(ValueError, match="latency_ms"):
        Level(1, -1)
    with pytest.raises(ValueError, match="latency_ms or protocols, not both"):
        Level(1, 0.1, INFINIBAND)
    with pytest.raises(ValueError, match="tree_ms"):
        Level(1, protocols=(Protocol(0.0, 0.0, -1.0),))
    with pytest.raises(ValueError, match="the same protocols"):
        Machine(ranks_per_node=8, intra=H100.intra, inter=Level(1e9, protocols=INFINIBAND[:2]))


@pytest.mark.parametrize("row", SIMULATOR, ids=str)
def test_h100s_collectives_take_the_times_of_a_simulator(row):
    kind, n, nodes = row
    ranks = range(0, n * 8, 8) if nodes > 1 else range(n)
    found = []
    for i, ms in enumerate(SIMULATOR[row]):
        whole = 2**20 << i
        nbytes = 2 * whole if kind == "all_reduce" else whole + whole // n
        found.append(H100.network_ms(kind, ranks, nbytes) / ms)
    assert 0.7 <= min(found) <= max(found) <= 1.4
    assert 0.85 <= sum(found) / len(found) <= 1.2


def test_protocols_by_hand():
    low, high = Protocol(1.0, 0.1, 0.2, 0.5, 1e6), Protocol(5.0, 0.4, 0.5)
    near = Level(1e7, protocols=(low, high))
    machine = Machine(ranks_per_node=2, intra=near, inter=Level(2e6, protocols=(low, high)))

    def ms(kind, ranks, nbytes):
        return machine.network_ms(kind, ranks, nbytes)

    # A gather of 2 ranks moves half of its output. The first protocol is held at 1 MB/s.
    assert ms("all_gather", [0, 1], 3_000) == pytest.approx(1.0 + 0.1 + 1.0)
    assert ms("all_gather", [0, 1], 300_000) == pytest.approx(5.0 + 0.4 + 10.0)
    # Ranks alone on their nodes wait as a tree does.
    assert ms("all_gather", [0, 2], 3_000) == pytest.approx(1.0 + 0.2 + 1.0)
    # On 8 nodes of 2 a ring takes 2 * (8 * 0.1 + 7 * 0.1) ms, a tree 2 * (0.2 + 3 * 0.2).
    assert ms("all_reduce", range(16), 2) == pytest.approx(1.0 + 1.6 + 0.002 / 0.6)
    assert ms("all_to_all", [0, 1], 4_000) == pytest.approx(1.0 + 0.1 + 1.0)


def test_a_level_without_protocols_beside_one_with_them():
    machine = Machine(ranks_per_node=8, intra=Level(1e9, protocols=nvlink(1e9)), inter=Level(1e8))
    # all 8 ranks of two nodes: 15 of 16 MB at 8e8, 14 steps of NCCL's LL128 inside them
    ms = 15e6 / 8e8 * 1e3 + 0.014 + 14 * 0.0019
    assert machine.network_ms("all_gather", range(16), 17 * MB) == pytest.approx(ms)


@pytest.mark.parametrize("fake_world", [16], indirect=True)
def test_a_graphs_collectives_are_timed_by_the_ranks_of_their_group(fake_world):
    gm = forward_graph(1)
    (start,) = filter(is_collective, gm.graph.nodes)
    near, far = (dist.new_group(ranks).group_name for ranks in ([0, 1], [0, 8]))
    found = []
    for group in (near, far):
        start.args = (*start.args[:-1], group)
        found.append(Costs(TWO_LEVELS)(start))
    nbytes = 4 * DIM * DIM  # gathered
    assert found == pytest.approx([nbytes / 2 / 1e5 + 0.001, nbytes / 2 / 1e4 + 0.02])


@pytest.mark.parametrize(
    ("a", "b"), [((6, 4), (2, 4, 8)), ((4, 6), (6, 8)), ((2, 4, 8), (8, 6)), ((2, 3, 4), (2, 4, 8))]
)
def test_products_of_experts_are_counted_group_by_group(a, b):
    """Torch 2.13 to 2.15 have no formula. Two groups, whose rows, columns or terms are 1 + 5."""
    sizes = [1, 5]
    if len(a) == 2 and len(b) == 3:
        flops = sum(2 * rows * a[1] * b[2] for rows in sizes)
    elif len(a) == len(b) == 2:
        flops = sum(2 * a[0] * terms * b[1] for terms in sizes)
    elif len(b) == 2:
        flops = sum(2 * a[1] * a[2] * columns for columns in sizes)
    else:
        flops = 2 * (2 * a[1] * a[2] * b[2])
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(name) for name in "ab")
    node = graph.call_function(torch.ops.aten._grouped_mm.default, inputs)
    with FakeTensorMode():
        for one, shape in zip((*inputs, node), (a, b, (1,)), strict=True):
            one.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
    assert is_compute(node)
    machine = Machine(flops={"bfloat16": 1.0}, bandwidth=1e18, kernel_ms=0.0)
    assert Costs(machine)(node) == pytest.approx(flops * 1e3)


def test_products_are_timed_by_the_dtype_of_what_is_multiplied():
    graph = fx.Graph()
    a, b, scale = (graph.placeholder(name) for name in ("a", "b", "scale"))
    node = graph.call_function(torch.ops.aten._scaled_mm.default, (a, b, scale, scale))
    with FakeTensorMode():
        a.meta["val"] = torch.empty(16, 32, dtype=torch.float8_e4m3fn)
        b.meta["val"] = torch.empty(32, 48, dtype=torch.float8_e4m3fn)
        scale.meta["val"] = torch.empty(())
        node.meta["val"] = torch.empty(16, 48, dtype=torch.bfloat16)
    rates = {"bfloat16": 1.0, "float8_e4m3fn": 2.0}
    assert Costs(Machine(flops=rates, bandwidth=1e18, kernel_ms=0.0))(node) == 1e3 * 16 * 32 * 48


def test_an_own_estimate_is_asked_first_and_may_leave_it_to_the_model(two_ranks):
    gm = forward_graph(1)
    (start,) = filter(is_collective, gm.graph.nodes)
    (product,) = filter(is_compute, gm.graph.nodes)
    asked = []

    def estimate(node, nbytes):
        asked.append((node, nbytes))
        return {None: 3.0, 100: 4.0}.get(nbytes) if node is start else None

    costs = Costs(Machine(estimate=estimate))
    model = Costs(Machine())
    assert [costs(start), costs.collective(start, 100)] == [3.0, 4.0]
    assert costs.collective(start, 200) == model.collective(start, 200)
    assert costs(product) == model(product)
    assert asked == [(start, None), (start, 100), (start, 200), (product, None)]

    for wrong in (-1.0, float("nan"), "3", True):
        bad = Machine(estimate=lambda node, nbytes, ms=wrong: ms)
        with pytest.raises(ValueError, match=f"estimate returned .* for {start.name}"):
            Costs(bad)(start)
        with pytest.warns(
            teb.errors.BoundNotKeptWarning, match="the graph keeps its order.*estimate"
        ):
            schedule(gm, teb.Overlap(), machine=bad)


def test_factors_correct_times_by_kind(two_ranks, tmp_path):
    nodes = list(forward_graph(1).graph.nodes)
    machine = Machine("m", factors={"kernel": 3.0, "all_gather": 5.0})
    plain, corrected = Costs(Machine()), Costs(machine)
    for node in nodes:
        factor = 5.0 if is_collective(node) else 3.0
        assert corrected(node) == pytest.approx(factor * plain(node))
    assert corrected.copy(2**30) == pytest.approx(3 * plain.copy(2**30))
    assert max(map(plain, nodes)) > 0
    path = tmp_path / "machine.json"
    machine.save(path)
    assert Machine.load(path) == machine
    for wrong in ({"gather": 1.0}, {"kernel": 0.0}):
        with pytest.raises(ValueError, match="kind of collective"):
            Machine(factors=wrong)


def test_a_file_holds_a_machine(tmp_path):
    path = tmp_path / "machine.json"
    table = {("all_gather", (8, 2)): ((1024, 0.5), (4096, 0.75)), ("all_reduce", 4): ((1, 2.0),)}
    machine = Machine(
        "cluster", {"bfloat16": 1e14}, collectives=table, **{"ranks_per_node": 4},
        intra=Level(1e11, 0.01), inter=Level(1e10, 0.02),
    )  # fmt: skip
    machine.save(path)
    assert Machine.load(path) == machine
    assert brief(Machine.load(path)) == brief(machine) != brief(Machine("cluster"))
    with pytest.raises(ValueError, match="estimate"):
        Machine(estimate=lambda node, nbytes: None).save(path)

    document = json.loads(path.read_text())
    del document["host_ms"]  # a file from before the host's time
    path.write_text(json.dumps(document))
    assert Machine.load(path) == machine
    with pytest.raises(ValueError, match="'kernel', 'generated' or a kind"):
        Machine(host_ms={"gather": 1.0})
    with pytest.raises(ValueError, match="at least 0"):
        Machine(host_ms={"kernel": -1.0})

    for known in (H100, replace(H100, inter=Level(1e9, 0.5))):
        known.save(path)
        assert Machine.load(path) == known
    # A file from before protocols has bandwidth and latency alone.
    path.write_text(json.dumps({**json.loads(path.read_text()), "intra": [1e11, 0.01]}))
    assert Machine.load(path).intra == Level(1e11, 0.01)

    for broken in ("", "[]", "{}", json.dumps({**json.loads(path.read_text()), "bandwidth": -1})):
        path.write_text(broken)
        with pytest.raises(ValueError, match=r"machine\.json holds no machine"):
            Machine.load(path)


def _measured(rank):
    machine = measure((2,), kib=[4, 64], repeats=2)
    return machine.flops, machine.collectives, machine.ranks_per_node


def test_ranks_measure_the_same_numbers():
    first, second = on_ranks(_measured)
    assert first == second
    flops, table, per_node = first
    assert set(flops) == {"float32", "bfloat16"}
    assert per_node == 2
    assert set(table) == {(k, (2, 1)) for k in KINDS}
    nbytes = {kind: [n for n, ms in series if ms > 0] for (kind, _), series in table.items()}
    # input and output: of a gather 3 parts of 2, of an all-reduce and an all-to-all twice the buffer
    assert nbytes["all_gather"] == nbytes["reduce_scatter"] == [6 * 1024, 96 * 1024]
    assert nbytes["all_reduce"] == nbytes["all_to_all"] == [8 * 1024, 128 * 1024]


def test_what_can_not_be_measured_is_said(capsys, monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    out = tmp_path / "machine.json"
    assert main(["measure", "--mesh", "two", "--out", str(out)]) == 1
    assert "--mesh must be sizes such as 8 or 2x4" in capsys.readouterr().err
    assert main(["measure", "--mesh", "2x4", "--out", str(out)]) == 1
    assert "start it under torchrun" in capsys.readouterr().err
    assert not out.exists()


def test_a_mesh_that_does_not_fit(fake_world):
    with pytest.raises(ValueError, match="2x4 ranks does not fit 4 ranks"):
        measure((2, 4))


# ---------------------------------------------------------------- the job's machine


@pytest.mark.parametrize(
    ("device", "local", "name", "ranks"),
    [
        ("NVIDIA H100 80GB HBM3", None, "H100", 8),
        ("NVIDIA H200", "4", "H200", 4),
        ("NVIDIA A100-SXM4-80GB", "8", "A100", 8),
        ("NVIDIA B200", "8", "B200", 8),
        ("NVIDIA GB200", "4", "GB200", 72),  # NVLink joins a rack's hosts
        ("NVIDIA L40S", "2", "H100, for want of the data sheet of NVIDIA L40S", 2),
        (None, "2", "H100, for want of a CUDA device", 2),
        (None, "", "H100, for want of a CUDA device", 8),
        (None, "two", "H100, for want of a CUDA device", 8),
    ],
)
def test_the_jobs_machine(device, local, name, ranks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    machine = job_machine()
    assert (machine.name, machine.ranks_per_node) == (name, ranks)
    assert machine.describe() == f"{name}, {ranks} rank(s) a node"
    for scheduled in (teb.Schedule(teb.Overlap()), teb.BucketAndSchedule(teb.Overlap())):
        assert machine in scheduled.settings()
        assert "machine" not in repr(scheduled)
    assert "machine" in repr(teb.Schedule(teb.Overlap(), Machine("mine")))


def test_ranks_compare_the_jobs_machine(monkeypatch):
    found = set()
    for local in ("4", "8"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        found.add(Pipeline([teb.Schedule(teb.Overlap())]).planned_with(Compilation()))
    assert len(found) == 2


def test_kernels_fuse_where_no_backend_is_known_unless_an_estimate_times_each_operator():
    given = Machine(estimate=lambda node, nbytes: None)
    assert [m.for_backend(None).fuses for m in (Machine(), given)] == [True, False]
    assert Machine(fuses=False).for_backend(None).fuses is False
