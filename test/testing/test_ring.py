"""Compare ring arithmetic with element-by-element references, and ranks with the arithmetic."""

import subprocess
import sys
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import at_night
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.testing.ranks import run_ranks
from torch_ext_bucketing.testing.ring import (
    RingProcessGroup,
    RingTopology,
    ring_rank,
)
from torch_ext_bucketing.testing.sums import (
    ring_order,
    simulate_all_reduce,
    simulate_reduce_scatter,
)

pytestmark = pytest.mark.long

SUM, AVG, MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
MIN, PRODUCT = dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def inputs_of(n, shape, dtype, seed=0):
    """Make the inputs of ``n`` ranks; every rank computes the same list."""
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return [torch.randn(shape, generator=g).to(dtype) for _ in range(n)]
    return [torch.randint(-100, 100, shape, generator=g).to(dtype) for _ in range(n)]


# ---- ring orders and topology ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks_per_node", "group", "rings"),
    [
        # one node: all channels alike, in the group's own order
        (4, [0, 1, 2, 3], [(0, 1, 2, 3)] * 4),
        (4, [2, 1, 3], [(2, 1, 3)] * 4),
        # two nodes of four, entered at each GPU in turn
        (
            4,
            range(8),
            [
                (0, 1, 2, 3, 4, 5, 6, 7),
                (0, 5, 6, 7, 4, 1, 2, 3),
                (0, 1, 6, 7, 4, 5, 2, 3),
                (0, 1, 2, 7, 4, 5, 6, 3),
            ],
        ),
        # one rank per node, as the replicas of HSDP: the second round goes the other way
        (2, [1, 3, 5, 7], [(1, 3, 5, 7), (1, 7, 5, 3)] * 2),
        # a second node that holds fewer ranks of the group
        (2, [0, 1, 2], [(0, 1, 2), (0, 2, 1), (0, 1, 2), (0, 2, 1)]),
    ],
)
def test_ring_order(ranks_per_node, group, rings):
    topology = RingTopology(ranks_per_node, channels=4)
    assert [ring_order(topology, c, list(group)) for c in range(4)] == rings


@given(st.integers(1, 4), st.integers(1, 8), st.sets(st.integers(0, 31), min_size=1, max_size=12))
def test_a_ring_visits_every_rank_once_and_stays_on_a_node(ranks_per_node, channels, group):
    topology = RingTopology(ranks_per_node, channels=channels)
    group = sorted(group)
    nodes = {r // ranks_per_node for r in group}
    for channel in range(channels):
        ring = ring_order(topology, channel, group)
        assert sorted(ring) == group
        assert ring[0] == group[0]
        crossings = sum(
            a // ranks_per_node != b // ranks_per_node
            for a, b in zip(ring, ring[1:] + ring[:1], strict=True)
        )
        assert crossings == (len(nodes) if len(nodes) > 1 else 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RingTopology(0), "ranks_per_node must be a whole number of at least 1, got 0"),
        (lambda: RingTopology(2, channels=2.0), "channels must be a whole number"),
        (lambda: RingTopology(2, chunk_bytes=100), "not a multiple of 16"),
        (lambda: RingTopology(3).nodes_of(4), "start a multiple of 3"),
    ],
)
def test_bad_input_is_refused_with_advice(make, message):
    with pytest.raises(ValueError) as error:
        make()
    assert message in str(error.value)


def test_nodes_follow_from_the_world_size():
    assert RingTopology(2).nodes_of(8) == 4


# ---- arithmetic -----------------------------------------------------------------------------------


def element_by_element(inputs, topology, ranks, op, dtype, pick):
    """Apply the documented rule, one element and one addition at a time."""
    n = len(inputs)
    out = []
    for e in range(inputs[0].numel()):
        channel, end, is_position = pick(e)
        ring = [list(ranks).index(r) for r in ring_order(topology, channel, ranks)]
        at = end if is_position else ring.index(end)
        acc = None
        for step in range(1, n + 1):
            x = inputs[ring[(at + step) % n]].view(-1)[e]
            if op == AVG:
                x = x * torch.tensor(1 / n, dtype=dtype)
            if acc is None:
                acc = x.clone()
            else:
                acc = torch.maximum(acc, x) if op == MAX else (acc + x)
        out.append(acc)
    return torch.stack(out) if out else inputs[0].new_empty(0)


topologies = st.builds(
    RingTopology,
    ranks_per_node=st.integers(1, 3),
    channels=st.integers(1, 4),
    chunk_bytes=st.sampled_from([16, 32, 48]),
)
groups = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.int32])


@settings(max_examples=60)
@given(topologies, groups, dtypes, st.integers(0, 40), st.sampled_from([SUM, AVG, MAX]))
def test_every_element_is_by_the_rule(topology, group, dtype, count, op):
    if op == AVG and not dtype.is_floating_point:
        op = SUM
    n, item = len(group), dtype.itemsize
    inputs = inputs_of(n, (n * count,), dtype, seed=count)

    def of_slice(rank):
        def pick(e):
            return e * item // topology.chunk_bytes % topology.channels, rank, False

        slices = [x[rank * count : (rank + 1) * count] for x in inputs]
        return element_by_element(slices, topology, group, op, dtype, pick)

    def pick(e):
        piece = e * item // topology.chunk_bytes
        return piece // n % topology.channels, piece % n, True

    for rank, got in enumerate(simulate_reduce_scatter(inputs, topology, group, op)):
        assert same_bits(got, of_slice(rank))
    want = element_by_element(inputs, topology, group, op, dtype, pick)
    for got in simulate_all_reduce(inputs, topology, group, op):
        assert same_bits(got, want)


def test_avg_multiplies_first_and_divides_integers_last():
    topology = RingTopology(3)
    x = [torch.tensor([v]).bfloat16() for v in (7.0, 7.0, 7.0)]
    third = torch.tensor(1 / 3).bfloat16()
    want = (x[1] * third + x[2] * third) + x[0] * third
    assert same_bits(simulate_all_reduce(x, topology, op=AVG)[0], want)
    assert want.item() == 7.03125  # not the 7 of a division at the end: bf16 has no exact third
    ints = [torch.tensor([v, -v]) for v in (4, 3)]
    assert simulate_all_reduce(ints, RingTopology(2), op=AVG)[0].tolist() == [3, -3]


@pytest.mark.torch
def test_other_ops_and_shapes():
    topology = RingTopology(2, channels=2, chunk_bytes=16)
    inputs = inputs_of(4, (12, 5), torch.float32)
    stack = torch.stack(inputs)
    for op, want in ((MAX, stack.amax(0)), (MIN, stack.amin(0))):
        assert same_bits(torch.cat(simulate_reduce_scatter(inputs, topology, op=op)), want)
        assert same_bits(simulate_all_reduce(inputs, topology, op=op)[3], want)
    product = simulate_all_reduce(inputs, topology, op=PRODUCT)[0]
    torch.testing.assert_close(product, stack.prod(0))
    half = dist._make_nccl_premul_sum(0.5)
    want = simulate_all_reduce([x * 0.5 for x in inputs], topology)[0]
    assert same_bits(simulate_all_reduce(inputs, topology, op=half)[0], want)
    # memory layout is not content
    strided = [x.t().contiguous().t() for x in inputs]
    assert not strided[0].is_contiguous()
    assert same_bits(
        torch.cat(simulate_reduce_scatter(strided, topology)),
        torch.cat(simulate_reduce_scatter(inputs, topology)),
    )
    assert [x.shape for x in simulate_reduce_scatter([torch.ones(0, 3)] * 2, topology)] == [
        torch.Size([0, 3])
    ] * 2


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        (dist.ReduceOp.BAND, torch.int64, "ReduceOp.BAND on torch.int64"),
        (dist.ReduceOp.BXOR, torch.int64, "ReduceOp.BXOR on torch.int64"),
        (SUM, torch.float8_e4m3fn, "ReduceOp.SUM on torch.float8_e4m3fn"),
        (MAX, torch.complex64, "ReduceOp.MAX on torch.complex64"),
        (dist._make_nccl_premul_sum(0.5), torch.int64, "ReduceOp.PREMUL_SUM on torch.int64"),
    ],
)
def test_unsupported_ops_are_named(op, dtype, message):
    inputs = [torch.zeros(2).to(dtype)] * 2
    for simulate in (simulate_reduce_scatter, simulate_all_reduce):
        with pytest.raises(NotImplementedError) as error:
            simulate(inputs, RingTopology(2), op=op)
        assert message in str(error.value)
        assert simulate.__name__ in str(error.value)


# ---- real ranks -----------------------------------------------------------------------------------
# Ranks are started once per topology and run every check below in the same order.


class Ranks:
    """The rank, the world and expected results, for checks."""

    def __init__(self, rank, world, topology):
        self.rank, self.world, self.topology = rank, world, topology

    def rs(self, inputs, op=SUM, group=None):
        ranks = group or range(self.world)
        me = list(ranks).index(self.rank)
        return simulate_reduce_scatter(inputs, self.topology, list(ranks), op)[me]

    def ar(self, inputs, op=SUM, group=None):
        return simulate_all_reduce(inputs, self.topology, group, op)[0]


def check_identity(t):
    group = dist.group.WORLD
    assert isinstance(group, RingProcessGroup)
    assert (group.rank(), group.size()) == (t.rank, t.world)
    assert dist.get_backend() == group.name() == "ring"
    assert group.group_desc == "default_pg"
    assert group.group_name == dist.distributed_c10d._world.pg_names[group]
    assert group.bound_device_id is None
    assert group._device_types == [torch.device("cpu")]
    assert dist.get_process_group_ranks(group) == list(range(t.world))
    assert f"ranks_per_node={t.topology.ranks_per_node}" in repr(group)


def check_reductions_equal_the_simulation(t):
    n = t.world
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int64):
        for op in (SUM, AVG, MAX, MIN, PRODUCT):
            for count in (0, 1, 100):
                x = inputs_of(n, (n * count, 3), dtype, count)
                out = torch.empty(count, 3, dtype=dtype)
                dist.reduce_scatter_tensor(out, x[t.rank], op)
                assert same_bits(out, t.rs(x, op)), (dtype, op, count)
                y = x[t.rank].clone()
                dist.all_reduce(y, op)
                assert same_bits(y, t.ar(x, op)), (dtype, op, count)
    x = inputs_of(n, (n * 5,), torch.float32)
    out = torch.empty(5)
    dist.reduce_scatter_tensor(out, x[t.rank], dist._make_nccl_premul_sum(0.25))
    assert same_bits(out, t.rs([v * 0.25 for v in x]))
    flags = torch.tensor([t.rank == 0, False])
    dist.all_reduce(flags, MAX)
    assert flags.tolist() == [True, False]
    z = torch.complex(*inputs_of(2, (6,), torch.float32))
    dist.all_reduce(z)
    torch.testing.assert_close(z, n * torch.complex(*inputs_of(2, (6,), torch.float32)))


def check_other_forms(t):
    n, me = t.world, t.rank
    # a list of uneven inputs: rank r gets r elements (rank 0 none)
    x = [inputs_of(n, (r,), torch.bfloat16, seed=r) for r in range(n)]
    out = torch.empty(me, dtype=torch.bfloat16)
    dist.reduce_scatter(out, [x[r][me] for r in range(n)])
    pad = [torch.zeros(n, me, dtype=torch.bfloat16) for _ in range(n)]
    for r in range(n):
        pad[r][me] = x[me][r]
    assert same_bits(out, t.rs([p.view(-1) for p in pad]))
    # transposed input and output
    x = inputs_of(n, (6, 4 * n), torch.bfloat16)
    out = torch.empty(6, 4, dtype=torch.bfloat16).t()
    dist.reduce_scatter_tensor(out, x[me].t())
    assert same_bits(out, t.rs([v.t().contiguous() for v in x]))
    y = x[me].clone().t()
    dist.all_reduce(y)
    assert same_bits(y, t.ar([v.t().contiguous() for v in x]))
    # coalesced
    a, b = x[me].clone(), x[me].float()
    dist.group.WORLD.allreduce_coalesced([a, b]).wait()
    assert same_bits(a, t.ar(x))
    assert same_bits(b, t.ar([v.float() for v in x]))
    # written under inference mode
    with torch.inference_mode():
        y = x[me].clone()
        dist.all_reduce(y)
    assert same_bits(y, t.ar(x))
    # a gradient that still requires grad
    y = nn.Parameter(x[me].clone())
    version = y._version
    dist.all_reduce(y)
    assert same_bits(y.detach(), t.ar(x))
    assert y._version > version


def check_async_works(t):
    n, works = t.world, []
    for i in range(20):
        x = inputs_of(n, (n * 7,), torch.bfloat16, i)
        out, y = torch.empty(7, dtype=torch.bfloat16), x[t.rank].clone()
        works.append((dist.reduce_scatter_tensor(out, x[t.rank], async_op=True), out, t.rs(x)))
        works.append((dist.all_reduce(y, async_op=True), y, t.ar(x)))
    for work, out, want in reversed(works):
        assert work.wait(timedelta(seconds=30))
        assert work.is_completed()
        assert work.get_future().value()[0] is out
        assert same_bits(out, want)


def check_all_ranks_agree(t):
    x = inputs_of(t.world, (t.world * 1000,), torch.bfloat16)[t.rank]
    dist.all_reduce(x)
    everyone = [torch.empty_like(x) for _ in range(t.world)]
    dist.all_gather(everyone, x)
    assert all(torch.equal(v, x) for v in everyone)


def check_one_thread_per_group(t):
    for group in (dist.group.WORLD, dist.new_group()):
        assert group._gloo.options._threads == 1
        x = torch.ones(1000)
        dist.all_reduce(x, group=group)
        assert group._in_flight._tensors  # the process waits for these at its end


def check_everything_else_is_gloo(t):
    n, me = t.world, t.rank
    dist.barrier()
    y = torch.full((3,), me)
    dist.broadcast(y, src=1)
    assert y.tolist() == [1] * 3
    objects = [None] * n
    dist.all_gather_object(objects, {"rank": me})
    assert objects == [{"rank": r} for r in range(n)]
    out = torch.empty(n * 2)
    dist.all_gather_into_tensor(out, torch.full((2,), float(me)))
    assert out.view(n, 2)[:, 0].tolist() == list(range(n))
    out = torch.empty(n)
    dist.all_to_all_single(out, torch.full((n,), float(me)))
    assert out.tolist() == list(range(n))
    got = torch.empty(1)
    dist.scatter(got, [torch.tensor([r * 10.0]) for r in range(n)] if me == 0 else None, src=0)
    assert got.item() == me * 10
    rows = [torch.empty(1) for _ in range(n)] if me == 0 else None
    dist.gather(got, rows, dst=0)
    assert me or torch.cat(rows).tolist() == [r * 10.0 for r in range(n)]
    received = torch.empty(1)
    peers = [
        dist.P2POp(dist.isend, got, (me + 1) % n),
        dist.P2POp(dist.irecv, received, (me - 1) % n),
    ]
    for work in dist.batch_isend_irecv(peers):
        work.wait()
    assert received.item() == (me - 1) % n * 10
    dist.group.WORLD.monitored_barrier(timedelta(seconds=30))


def check_errors_name_op_and_group(t):
    group, name = dist.group.WORLD, dist.group.WORLD.group_name
    ones, ints = torch.ones(t.world), torch.ones(t.world, dtype=torch.int64)
    one, ops = ints[:1].clone(), torch.ops._c10d_functional
    not_implemented = {
        rf"all_reduce.*group '{name}'.*ReduceOp\.BAND|ReduceOp\.BAND.*all_reduce.*'{name}'": (
            lambda: dist.all_reduce(ints, dist.ReduceOp.BAND)
        ),
        r"reduce_scatter.*ReduceOp\.BOR|ReduceOp\.BOR.*reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(one, ints, dist.ReduceOp.BOR)
        ),
        r"ReduceOp\.BAND": lambda: ops.all_reduce(ints, "band", name),
        r"dist\.new_group": lambda: group.split_group([0, 1]),
        "use all_reduce": lambda: dist.reduce(ones, dst=1),
        "must be dense": lambda: dist.all_reduce(ones.to_sparse()),
    }
    wrong = {
        f"needs an input of {2 * t.world}, got {t.world}": (
            lambda: group._reduce_scatter_base(torch.ones(2), ones, None)
        ),
        r"the output is torch\.int64": lambda: group._reduce_scatter_base(one, ones, None),
    }
    for error, calls in ((NotImplementedError, not_implemented), (ValueError, wrong)):
        for words, call in calls.items():
            with pytest.raises(error, match=f"(?s){words}"):
                call()
    dist.all_reduce(ones)  # refused operations left no rank waiting
    assert ones.tolist() == [t.world] * t.world


def functional(x, n, group):
    ops = torch.ops._c10d_functional
    wait = ops.wait_tensor
    rs = wait(ops.reduce_scatter_tensor(x * 1, "sum", n, group))
    ar = wait(ops.all_reduce(x * 1, "sum", group))
    rss = [wait(v) for v in ops.reduce_scatter_tensor_coalesced([x * 1, x * 1], "sum", n, group)]
    ars = [wait(v) for v in ops.all_reduce_coalesced([x * 1, x * 1], "sum", group)]
    ag = wait(ops.all_gather_into_tensor(rs, n, group))
    return [rs, *rss], [ar, *ars], ag


def run_functional(t, wrap=lambda f: f):
    x = inputs_of(t.world, (t.world * 200,), torch.bfloat16)
    step = wrap(functional)
    scattered, reduced, gathered = step(x[t.rank], t.world, dist.group.WORLD.group_name)
    assert all(same_bits(v, t.rs(x)) for v in scattered)
    assert all(same_bits(v, t.ar(x)) for v in reduced)
    assert same_bits(gathered, torch.cat(simulate_reduce_scatter(x, t.topology)))


def check_functional_collectives(t):
    run_functional(t)
    x = inputs_of(t.world, (t.world * 200,), torch.bfloat16)
    out = torch.empty(200, dtype=torch.bfloat16)
    work = torch.ops._c10d_functional.reduce_scatter_tensor_out(
        x[t.rank], "sum", t.world, dist.group.WORLD.group_name, out=out
    )
    torch.ops._c10d_functional.wait_tensor(work)
    assert same_bits(out, t.rs(x))


def check_compiled(t):
    # Compiling C++ in four processes shows no more than in two.
    for backend in ("aot_eager", "inductor")[: 2 if t.world == 2 else 1]:
        run_functional(t, partial(torch.compile, backend=backend, fullgraph=True))


def mesh_2d(t):
    per_node = t.topology.ranks_per_node
    return init_device_mesh(
        "cpu", (t.world // per_node, per_node), mesh_dim_names=("replicate", "shard")
    )


def check_sub_groups_of_a_mesh(t):
    mesh = mesh_2d(t)
    x = inputs_of(t.world, (120,), torch.bfloat16)
    for dim in ("replicate", "shard"):
        group = mesh.get_group(dim)
        ranks = dist.get_process_group_ranks(group)
        assert isinstance(group, RingProcessGroup)
        assert group.group_ranks == tuple(ranks)
        assert group.topology == t.topology
        y = x[t.rank].clone()
        dist.all_reduce(y, group=group)
        assert same_bits(y, t.ar([x[r] for r in ranks], group=ranks))
    backwards = list(range(t.world))[::-1]
    group = dist.new_group(backwards, use_local_synchronization=False)
    y = x[t.rank].clone()
    dist.all_reduce(y, group=group)
    # c10d sorts the ranks of a new group
    ranks = dist.get_process_group_ranks(group)
    assert same_bits(y, t.ar([x[r] for r in ranks], group=ranks))
    dist.destroy_process_group(group)


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


def _all_checks(rank, topology):
    t = Ranks(rank.rank, rank.world_size, topology)
    with ring_rank(rank, topology):
        for check in CHECKS:
            check(t)
    assert not dist.is_initialized()
    # by name alone, as a launcher would
    dist.init_process_group(
        "ring", rank=t.rank, world_size=t.world, init_method=f"file://{rank.store_path}-again"
    )
    assert dist.group.WORLD.topology == t.topology
    check_all_ranks_agree(t)
    dist.destroy_process_group()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("world", "per_node"),
    [at_night(2, 1), (4, 2)],
    ids=["2x1", "2x2"],
)
def test_real_ranks(world, per_node):
    topology = RingTopology(per_node, channels=4, chunk_bytes=32)
    run_ranks(_all_checks, world, topology, timeout_s=400)


LEFT_OPEN = """
import sys, torch, torch.distributed as dist
from torch_ext_bucketing.testing.ring import init_ring_process_group
init_ring_process_group(0, 1, init_method=f"file://{sys.argv[1]}")
dist.all_reduce(torch.ones(100_000))
"""


def test_a_process_ends_quietly_with_its_group_left_open(tmp_path):
    command = [sys.executable, "-W", "error", "-c", LEFT_OPEN, str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
