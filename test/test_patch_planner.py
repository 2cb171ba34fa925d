"""The greedy planner of the patched torch, with bucket_non_adjacent and bucket_max_node_span set."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import (
    MAX_SPAN,
    NON_ADJACENT,
    STARTS,
    all_gather,
    all_reduce,
    reduce_scatter,
    run_all_ranks,
    starts,
    trace,
    under_hash_seeds,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._inductor import config
from torch._inductor.fx_passes import bucketing
from torch._inductor.pattern_matcher import stable_topological_sort

WORLD = 2
KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def random_graph(seed: int, collectives: int) -> fx.GraphModule:
    """A DAG of collectives of three kinds on two groups in two dtypes, with compute between them.

    Every value is a vector of ``WORLD * n`` elements, so that any can feed any collective.
    """
    rng = random.Random(seed)
    groups = (dist.group.WORLD, GROUPS[0])

    def fn(*leaves: torch.Tensor) -> list[torch.Tensor]:
        values = list(leaves)
        for _ in range(collectives):
            # Mostly leaves, as for parameters; else something that depends on collectives.
            x = rng.choice(leaves if rng.random() < 0.6 else values)
            group = rng.choice(groups)
            kind = rng.choice(KINDS)
            if kind == "all_gather":
                values.append(all_gather(x, group)[: x.numel()])
            elif kind == "reduce_scatter":
                shard = reduce_scatter(x, group)
                values.append(torch.cat([shard, shard]))
            else:
                values.append(all_reduce(x, group))
            if rng.random() < 0.5:
                other = rng.choice([v for v in values if v.shape == values[-1].shape])
                values.append((values[-1] + other).to(x.dtype))
        return values[len(leaves) :]

    return trace(fn, *leaf_values(seed))


def leaf_values(seed: int) -> list[torch.Tensor]:
    rng = random.Random(seed)
    return [
        torch.arange(WORLD * size).to(rng.choice((torch.float32, torch.bfloat16)))
        for size in (rng.randint(1, 40) for _ in range(6))
    ]


GROUPS: list[dist.ProcessGroup] = []


@pytest.fixture(scope="module", autouse=True)
def two_groups():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    GROUPS[:] = [dist.new_group(list(range(WORLD)))]
    yield
    GROUPS.clear()
    dist.destroy_process_group()


def plan(gm: fx.GraphModule, cap_bytes: list[int], span: int | None, non_adjacent: bool = True):
    """Buckets of all kinds, planned kind by kind as the passes do, without touching the graph."""
    cap = lambda i: cap_bytes[min(i, len(cap_bytes) - 1)] / 2**20  # noqa: E731
    with config.patch({NON_ADJACENT: non_adjacent, MAX_SPAN: span}):
        return {kind: getattr(bucketing, f"bucket_{kind}_by_mb")(gm, cap) for kind in KINDS}


def size_of(start: fx.Node) -> int:
    return max(v.numel() * v.element_size() for v in (start.meta["val"], start.args[0].meta["val"]))


def key_of(start: fx.Node) -> tuple[object, ...]:
    return bucketing.get_full_bucket_key(start, None)


def contracted_is_acyclic(gm: fx.GraphModule, buckets: list[list[fx.Node]]) -> bool:
    """Kahn's algorithm on the graph whose buckets (starts with their waits) are single nodes."""
    owner: dict[fx.Node, object] = {}
    for i, bucket in enumerate(buckets):
        for start in bucket:
            owner[start] = i
            owner.update(dict.fromkeys(start.users, i))
    edges: dict[object, set[object]] = {}
    for node in gm.graph.nodes:
        to = owner.get(node, node)
        edges.setdefault(to, set())
        edges[to] |= {o for i in node.all_input_nodes if (o := owner.get(i, i)) != to}
    while edges:
        free = {n for n, needs in edges.items() if not needs}
        if not free:
            return False
        edges = {n: needs - free for n, needs in edges.items() if n not in free}
    return True


@given(
    seed=st.integers(0, 2**32 - 1),
    collectives=st.integers(2, 24),
    caps=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    span=st.none() | st.integers(0, 60),
    non_adjacent=st.booleans(),
)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_plans_are_sound(seed, collectives, caps, span, non_adjacent):
    gm = random_graph(seed, collectives)
    before = str(gm.graph)
    planned = plan(gm, caps, span, non_adjacent)
    assert str(gm.graph) == before

    # What handles a rank's own shards is not counted.
    position = bucketing._positions_on_every_rank(gm.graph)
    seen: set[fx.Node] = set()
    for kind, buckets in planned.items():
        for bucket in buckets:
            assert len(bucket) > 1
            assert not seen & set(bucket), "a collective in two buckets"
            seen |= set(bucket)
            assert {STARTS[n.target] for n in bucket} == {kind}
            assert len({key_of(n) for n in bucket}) == 1
            at = [position[n] for n in bucket]
            assert span is None or max(at) - min(at) <= span
            assert sum(map(size_of, bucket)) <= max(caps)
        assert contracted_is_acyclic(gm, buckets), f"{kind} buckets form a cycle"


@given(seed=st.integers(0, 2**32 - 1), collectives=st.integers(2, 16), cap=st.integers(50, 2000))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_merging_computes_the_same(seed, collectives, cap):
    gm = random_graph(seed, collectives)
    # Integers small enough that sums are exact in bf16: any order of addition gives the same.
    inputs = [[(x * 0 + rank + i) % 3 for i, x in enumerate(leaf_values(seed))] for rank in (0, 1)]
    expected = run_all_ranks(gm, inputs)
    n = len(starts(gm))
    with config.patch({NON_ADJACENT: True}):
        for merge in (
            bucketing.bucket_reduce_scatter,
            bucketing.bucket_all_reduce,
            bucketing.bucket_all_gather,
        ):
            merge(gm, lambda _: cap / 2**20)
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    assert len(starts(gm)) <= n
    for got, want in zip(run_all_ranks(gm, inputs), expected, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)


def test_first_fit_in_wait_order_without_dependencies():
    """Independent gathers of one key: as many buckets as filling one after the other needs."""
    sizes = [random.Random(7).randint(1, 9) for _ in range(40)]
    gm = trace(
        lambda *xs: [all_gather(x, dist.group.WORLD) for x in xs],
        *(torch.zeros(s) for s in sizes),
    )
    cap = 12 * 4 * WORLD
    buckets = plan(gm, [cap], None)["all_gather"]
    expected: list[int] = []
    room = 0
    for s in sizes:
        if s > room:
            expected.append(0)
            room = 12
        expected[-1] += 1
        room -= s
    assert [len(b) for b in buckets] == [e for e in expected if e > 1]


def test_four_collectives_that_can_only_half_merge():
    """a1 -> b1 and b2 -> a2: merging both pairs is a cycle, so two buckets, one of them merged."""

    def fn(x, y):
        a1 = all_gather(x, dist.group.WORLD)
        b2 = all_gather(y, GROUPS[0])
        b1 = all_gather(a1 + 1, GROUPS[0])
        a2 = all_gather(b2 + 1, dist.group.WORLD)
        return [a1, b1, a2, b2]

    gm = trace(fn, torch.zeros(2), torch.zeros(2))
    buckets = plan(gm, [10**6], None)["all_gather"]
    assert [[n.args[-1] for n in b] for b in buckets] == [[dist.group.WORLD.group_name] * 2]


SCRIPT = """
import json, sys
import torch_ext_bucketing
import test_patch_planner as t
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=t.WORLD)
t.GROUPS[:] = [dist.new_group(list(range(t.WORLD)))]
plans = []
for seed in range(8):
    gm = t.random_graph(seed, 20)
    plans.append({k: [[n.name for n in b] for b in v] for k, v in t.plan(gm, [300], 80).items()})
print(json.dumps(plans))
"""


def test_same_plan_under_any_hash_seed():
    outputs = under_hash_seeds(SCRIPT)
    assert outputs[0] == outputs[1]
    assert any(buckets for plan in outputs[0] for buckets in plan.values())


@pytest.mark.skipif(
    not hasattr(bucketing, "_resolve_group_name"),
    reason=f"torch {torch.__version__} names groups by strings alone",
)
def test_group_names_that_are_graph_nodes():
    """Graphs compiled on one rank name the group by a node; it is resolved where keys are made."""
    gm = trace(
        lambda *xs: [
            all_gather(x, g) for x, g in zip(xs, [dist.group.WORLD, GROUPS[0]] * 2, strict=True)
        ],
        *(torch.zeros(2) for _ in range(4)),
    )
    first = next(iter(gm.graph.nodes))
    for group in (dist.group.WORLD, GROUPS[0]):
        with gm.graph.inserting_before(first):
            node = gm.graph.call_function(dist.distributed_c10d._get_default_group)
        node.meta["val"] = group
        for start in starts(gm):
            if start.args[-1] == group.group_name:
                start.args = (*start.args[:-1], node)
    buckets = plan(gm, [10**6], None)["all_gather"]
    assert [len(b) for b in buckets] == [2, 2]
