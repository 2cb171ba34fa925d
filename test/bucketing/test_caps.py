"""Test buckets by size: properties over random graphs, torch's planner, and planning time."""

import contextlib
import graphlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import (
    C10D,
    GROUP_FILTER,
    MAX_BETWEEN,
    all_reduce,
    assert_same,
    fake_group,
    lines_run,
    reduce_scatter,
    run_all_ranks,
    starts,
    trace,
)
from collective_graphs import all_gather as gather
from examples import examples
from hypothesis import assume, given
from hypothesis import strategies as st
from random_graphs import WORLD, Builder, layered_graph, random_graph, real_inputs
from torch._inductor import config
from torch._inductor.fx_passes import bucketing, fsdp
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.experimental.proxy_tensor import make_fx
from torch_features import needs_pre_bucketing

from torch_ext_bucketing._torch.inductor import default_cap_mb
from torch_ext_bucketing.bucketing import plan as caps_module
from torch_ext_bucketing.bucketing.contraction import Contraction
from torch_ext_bucketing.bucketing.pack import apply_plan
from torch_ext_bucketing.bucketing.plan import (
    Bucket,
    ByCap,
    CapPlanner,
    MergePlan,
)
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.dependencies import Writes
from torch_ext_bucketing.graph.nodes import KINDS, bucket_key, group_name, kind_of, wire_bytes

MIB = 2**20
SEEDS = st.integers(0, 2**32 - 1)
CAPS = st.lists(st.integers(1, 600), min_size=1, max_size=3)
GROUPS = ("0", "1", "2")


def everything(start: fx.Node) -> bool:
    return True


@pytest.fixture(scope="module", autouse=True)
def three_groups():
    """Create three groups of all ranks, named 0, 1 and 2."""
    with fake_group(WORLD):
        made = [dist.group.WORLD, *(dist.new_group(list(range(WORLD))) for _ in GROUPS[1:])]
        assert tuple(g.group_name for g in made) == GROUPS
        yield


def cap_of(sizes: list[int]):
    return lambda i: sizes[min(i, len(sizes) - 1)] / MIB


def planned(gm: fx.GraphModule, cap_mb: Any = 1.0, **options: Any) -> MergePlan:
    return ByCap(cap_mb, **{"eligible": everything, **options}).plan(GraphAnalysis(gm.graph))


def is_acyclic(graph: fx.Graph, buckets: list[Bucket]) -> bool:
    """Sort the nodes, with each bucket's starts as one node, and its waits as another."""
    owner: dict[fx.Node, object] = {}
    for i, bucket in enumerate(buckets):
        for start in bucket.members:
            owner[start] = ("start", i)
            owner.update(dict.fromkeys(start.users, ("wait", i)))
    sorter = graphlib.TopologicalSorter[object]()
    for node in graph.nodes:
        to = owner.get(node, node)
        sorter.add(to, *({owner.get(arg, arg) for arg in node.all_input_nodes} - {to}))
    with contextlib.suppress(graphlib.CycleError):
        sorter.prepare()
        return True
    return False


def check_plan(gm: fx.GraphModule, plan: MergePlan, sizes: list[int]) -> None:
    position = {n: i for i, n in enumerate(gm.graph.nodes)}
    writes = [position[w] for w in Writes(gm.graph.nodes).unordered]
    seen: set[fx.Node] = set()
    for bucket in plan.buckets:
        at = [position[m] for m in bucket.members]
        assert len(at) > 1
        assert at == sorted(at)
        assert not seen & set(bucket.members), "a collective in two buckets"
        seen |= set(bucket.members)
        assert len({bucket_key(m) for m in bucket.members}) == 1
        assert bucket.wire_bytes == sum(map(wire_bytes, bucket.members))
        assert bucket.wire_bytes <= bucket.cap_bytes <= max(sizes)
        assert not any(at[0] < w < at[-1] for w in writes), "merged across a write"
        assert bool(bucket.detail) == (bucket.closed_by != "end")
    assert is_acyclic(gm.graph, list(plan.buckets)), "the buckets form a cycle"
    said = [a.node for a in plan.unmerged] + [left.node for left in plan.ineligible]
    starts = [n.name for n in gm.graph.nodes if kind_of(n) is not None]
    assert sorted(said + [m.name for m in seen]) == sorted(starts)


@given(seed=SEEDS, size=st.integers(2, 24), caps=CAPS, tagged=st.booleans())
@examples(600)
def test_plans_are_sound(seed, size, caps, tagged):
    gm = random_graph(seed, size, GROUPS)
    before = str(gm.graph)
    eligible = "tag" if tagged else everything
    plan = planned(gm, cap_of(caps), kinds=KINDS, eligible=eligible)
    assert str(gm.graph) == before
    check_plan(gm, plan, caps)


@pytest.mark.torch
@pytest.mark.hooks
@given(seed=SEEDS, size=st.integers(2, 24), caps=CAPS)
@examples(300)
def test_torch_with_the_hooks_never_merges_less_than_without(seed, size, caps):
    gm = random_graph(seed, size, GROUPS, writes=False)
    cap = cap_of(caps[:1])
    for kind in KINDS:
        merged = []
        for between in (0, 2, None):
            with config.patch({MAX_BETWEEN: between}):
                buckets = getattr(bucketing, f"bucket_{kind}_by_mb")(gm, cap)
            merged.append(sum(len(bucket) - 1 for bucket in buckets))
        assert merged[0] <= min(merged[1:])


@given(seed=SEEDS, size=st.integers(2, 24), caps=CAPS, run=st.none() | st.integers(1, 9))
@examples(200)
def test_a_planner_forgets_the_plan_before(seed, size, caps, run):
    gm = random_graph(seed, size, GROUPS)
    options = ByCap(groups=GROUPS[:2])
    planner = CapPlanner(GraphAnalysis(gm.graph), options)
    for cap in (*caps, *caps):
        assert planner.plan(cap / MIB, run) == CapPlanner(GraphAnalysis(gm.graph), options).plan(
            cap / MIB, run
        )


@given(seed=SEEDS, size=st.integers(2, 12), cap=st.integers(50, 1500), writes=st.booleans())
@examples(250)
def test_merging_computes_the_same(seed, size, cap, writes):
    gm = random_graph(seed, size, GROUPS[:2], writes, share=False)
    inputs = real_inputs(gm)
    expected = run_all_ranks(gm, inputs)
    plan = planned(gm, cap / MIB)
    count = sum(kind_of(n) is not None for n in gm.graph.nodes)
    reports = apply_plan(GraphAnalysis(gm.graph), plan)
    gm.graph.lint()
    left = [n for n in gm.graph.nodes if kind_of(n) is not None]
    assert len(left) == count - sum(len(b.members) - 1 for b in plan.buckets)
    assert_same(run_all_ranks(gm, inputs), expected)
    again = planned(gm, 1000.0)
    assert not {r.node for r in reports} & {m.name for b in again.buckets for m in b.members}


def torch_takes_for_fsdp(start: fx.Node) -> bool:
    """Return whether torch's own pass merges it, by its place in the graph."""
    if kind_of(start) == "all_gather":
        return fsdp.is_fsdp_all_gather(start)
    return all(map(fsdp.is_fsdp_reduce_scatter_wait, start.users))


@pytest.mark.torch
@pytest.mark.hooks
@needs_pre_bucketing
@pytest.mark.parametrize("cap", [300, 1000, 10**6])
def test_torchs_pass_with_the_hooks_merges_the_same(cap):
    """Compare torch's own pre-bucketing with plan and apply, all kinds, only the primary group."""
    theirs, ours = (layered_graph(500, 60, GROUPS, share=False) for _ in range(2))
    (group,), _ = fsdp.identify_fsdp_groups(ours)
    plan = ByCap(cap / MIB, eligible=torch_takes_for_fsdp, groups=[group]).plan(
        GraphAnalysis(ours.graph)
    )
    desc = _resolve_process_group(group).group_desc
    with config.patch({MAX_BETWEEN: None, GROUP_FILTER: [desc]}):
        fsdp.pre_bucket_fsdp_collectives(theirs, bucket_cap_mb=cap / MIB)
    apply_plan(GraphAnalysis(ours.graph), plan)

    def sizes(gm: fx.GraphModule) -> list[tuple[str | None, int]]:
        return sorted((str(kind_of(n)), wire_bytes(n)) for n in gm.graph.nodes if kind_of(n))

    assert sizes(theirs) == sizes(ours)
    assert plan.buckets


def test_four_collectives_of_two_kinds_that_can_only_half_merge():
    """a1 -> b1 and b2 -> a2 across kinds: gathers first, then no reduce-scatter fits."""
    builder = Builder()
    x, y = builder.leaf(4, torch.float32), builder.leaf(4, torch.float32)
    a1 = builder.collective("all_gather", x, "0")
    b2 = builder.collective("reduce_scatter", y, "1")
    b1 = builder.collective("reduce_scatter", a1, "1")
    a2 = builder.collective("all_gather", b2, "0")
    gm = builder.finish([b1, a2])
    plan = planned(gm)
    assert [b.kind for b in plan.buckets] == ["all_gather"]
    assert [a.closed_by for a in plan.unmerged] == ["dependency", "end"]
    assert "by way of other buckets" in plan.unmerged[0].reason


@given(
    rows=st.lists(st.integers(1, 60) | st.just(150), min_size=1, max_size=20),
    kind=st.sampled_from(["all_gather", "reduce_scatter"]),
)
@examples(100)
def test_of_near_members_at_most_one_bucket_is_at_most_half_full(rows, kind):
    """A member that does not fit, or exceeds the cap, leaves the bucket open for later ones."""
    assume(sum(n for n in rows if n <= 100) <= 400)
    cap, b = 100 * WORLD, Builder()
    leaves = [b.leaf(n if kind == "all_gather" else n * WORLD, torch.int8) for n in rows]
    plan = planned(b.finish([b.collective(kind, x, "0") for x in leaves]), cap / MIB)
    filled = [one.wire_bytes for one in (*plan.buckets, *plan.unmerged)]
    assert sum(filled) == WORLD * sum(rows)
    assert all(bucket.wire_bytes <= cap for bucket in plan.buckets)
    assert sum(2 * n <= cap for n in filled) <= 1


@pytest.mark.parametrize(
    ("cap", "between", "joined"),
    [
        (100 * WORLD, 6, [[0, 7], [1, 8]]),
        (100 * WORLD, 7, [[1, 8], [2, 9]]),
        (200 * MIB, 2, [[0, 3], [1, 4]]),
        (200 * MIB, 3, [[1, 4], [2, 5]]),
    ],
)
def test_a_bucket_passes_over_four_times_its_cap_or_320_mib(cap, between, joined):
    b, large, small = Builder(), cap * 60 // 100 // WORLD, cap * 40 // 100 // WORLD
    leaves = [b.leaf(n, torch.int8) for n in (large, *[large] * between, small, small)]
    plan = planned(b.finish([b.collective("all_gather", x, "0") for x in leaves]), cap / MIB)
    found = [[leaves.index(m.args[0]) for m in bucket.members] for bucket in plan.buckets]
    assert found == joined


@pytest.mark.parametrize("needs", [False, True])
def test_the_largest_members_first_fill_a_tenth_of_the_cap_more(needs):
    """Five matrices of 5, 15, 45, 50 and 55 percent; two may need the first one's result."""
    b, cap = Builder(), 100 * WORLD
    values = [b.leaf(n, torch.int8) for n in (5, 15, 45, 50, 55)]
    gathered = [b.collective("all_gather", values[0], "0")]
    for i, n in ((3, 50), (4, 55)) if needs else ():
        both = values[i], gathered[0]
        values[i] = b.call(torch.ops.aten.add.Tensor, both, n, torch.int8)
    gathered += [b.collective("all_gather", x, "0") for x in values[1:]]
    plan = planned(b.finish(gathered), cap / MIB)
    found = [[values.index(m.args[0]) for m in bucket.members] for bucket in plan.buckets]
    assert found == ([[0, 1, 2]] if needs else [[0, 1, 4], [2, 3]])


def test_norms_between_large_matrices_share_buckets():
    """Blocks are a norm, two matrices of 40 and one of 300 percent of the cap, and a norm."""
    b, cap = Builder(), 100 * WORLD
    leaves = [b.leaf(n, torch.int8) for _ in range(4) for n in (1, 39, 39, 300, 1)]
    plan = planned(b.finish([b.collective("all_gather", x, "0") for x in leaves]), cap / MIB)
    assert [[leaves.index(m.args[0]) for m in bucket.members] for bucket in plan.buckets] == [
        [0, 1, 2, 4, 5, 9, 10, 14, 15, 19],
        [6, 7],
        [11, 12],
        [16, 17],
    ]
    assert [a.wire_bytes for a in plan.unmerged] == [300 * WORLD] * 4


def test_reduce_scatters_are_closed_by_the_compute_nodes_between_them():
    """The graph is five times three products and a reduction, which no cap separates."""

    def step(*inputs: torch.Tensor) -> list[torch.Tensor]:
        x, out = inputs[0], []
        for w in inputs[1:]:
            x = x @ w @ w @ w
            out.append(reduce_scatter(x, dist.group.WORLD))
        return out

    gm = trace(step, *(torch.randn(8, 8) for _ in range(6)))

    def of(run: int | None) -> tuple[list[int], list[str]]:
        plan = planned(gm, max_compute_run=run)
        closed = [*(b.closed_by for b in plan.buckets), *(a.closed_by for a in plan.unmerged)]
        assert all("compute nodes" in b.detail for b in plan.buckets if b.closed_by == "run")
        return [len(b.members) for b in plan.buckets], closed

    assert of(None) == ([5], ["end"])
    assert of(15) == ([5], ["end"])
    assert of(8) == ([2, 2], ["run", "run", "end"])
    assert of(2) == ([], ["run"] * 4 + ["end"]), "what can't be kept is kept as well as can be"


# -- writes ---------------------------------------------------------------------------------------


def merged(gm: fx.GraphModule, inputs: list[list[torch.Tensor]], **options: Any) -> MergePlan:
    """Merge a graph, check that all ranks compute the same as before, and return the plan."""
    expected = run_all_ranks(gm, inputs)
    plan = planned(gm, **{"kinds": KINDS, **options})
    apply_plan(GraphAnalysis(gm.graph), plan)
    assert_same(run_all_ranks(gm, inputs), expected)
    return plan


def some_inputs() -> list[list[torch.Tensor]]:
    return [[torch.arange(4.0) + 10 * i + rank for i in range(3)] for rank in range(WORLD)]


def written_between(kind: str) -> fx.GraphModule:
    builder = Builder()
    p, q, new = (builder.leaf(4, torch.float32) for _ in range(3))
    outputs = [builder.collective(kind, p, "0")]
    builder.write(q, new)
    outputs.append(builder.collective(kind, q, "0"))
    outputs.append(builder.collective(kind, p, "0"))
    return builder.finish(outputs)


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_a_write_between_members_keeps_them_apart(kind):
    gm = written_between(kind)
    write = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default)
    plan = merged(gm, real_inputs(gm))
    assert [len(b.members) for b in plan.buckets] == [2]
    (alone,) = plan.unmerged
    assert alone.closed_by == "dependency"
    assert alone.reason == f"{write.name} between them writes to a tensor that others read"


def cast_before_a_write(p, q, new):
    cast = [torch.ops.prims.convert_element_type(x.view(-1), torch.bfloat16) for x in (p, q)]
    p.copy_(new)
    return [gather(x, dist.group.WORLD) for x in cast]


def cast_of_what_it_leads_to(p, q, new):
    cast = [torch.ops.prims.convert_element_type(x.view(-1), torch.bfloat16) for x in (p, q)]
    p.copy_(new + cast[0].float().sum())
    return [gather(x, dist.group.WORLD) for x in cast]


def padded_before_a_write(p, q, new):
    """Pad like DTensor pads gradients of 3 rows; torch 2.15 packs unpadded values."""
    packed = []
    for x in (p, q):
        rows = torch.ops.aten.split.Tensor(x.view(-1)[:3], 2)
        padded = [rows[0], torch.ops.aten.constant_pad_nd.default(rows[1], [0, 1])]
        if x is p:
            p.copy_(new)
        packed.append(torch.cat(padded))
    return [reduce_scatter(x, dist.group.WORLD) for x in packed]


@pytest.mark.parametrize(
    "fn", [cast_before_a_write, cast_of_what_it_leads_to, padded_before_a_write]
)
def test_a_bucket_does_not_read_what_was_written_since_its_members_did(fn):
    """Buckets cast and pad themselves, so a member with a write after its cast must stay alone."""
    gm = trace(fn, *(torch.zeros(4) for _ in range(3)))
    plan = merged(gm, some_inputs())
    if fn is not padded_before_a_write:
        assert not plan.buckets
        copy = torch.ops.aten.copy_.default
        (write,) = gm.graph.find_nodes(op="call_function", target=copy)
        assert write.name in plan.unmerged[0].reason


@pytest.mark.parametrize("read_late", [False, True])
def test_a_reduction_in_place_is_no_barrier(read_late):
    """torchtitan's ``spmd_types`` traces such reductions."""

    def step(p, q, x):
        first, y = gather(p, dist.group.WORLD), x + 1
        before = y * 3 if read_late else y
        y.copy_(all_reduce(y.view(-1), dist.group.WORLD))
        return first + 1, before * 2, y * 2, gather(q, dist.group.WORLD)

    gm = trace(step, *(torch.zeros(4) for _ in range(3)))
    plan = merged(gm, some_inputs(), kinds=("all_gather",))
    assert [len(b.members) for b in plan.buckets] == ([] if read_late else [2])


@pytest.mark.parametrize("marked", [(True, True), (True, False), (False, False)])
def test_a_bucket_of_backward_is_marked_as_its_members_were(marked):
    b = Builder()
    leaves = [b.leaf(64, torch.float32) for _ in marked]
    gm = b.finish([b.collective("all_gather", x, "0") for x in leaves])
    for node, mark in zip(starts(gm), marked, strict=True):
        if mark:
            node.meta["autograd_backward"] = True
    old = set(gm.graph.nodes)
    apply_plan(GraphAnalysis(gm.graph), planned(gm))
    new = [n for n in gm.graph.nodes if n not in old]
    assert len(starts(gm)) == 1
    assert {"autograd_backward" in n.meta for n in new} == {all(marked)}


def test_the_writes_of_a_bucket_are_no_barrier():
    """A bucketed gather writes to its own buffer, which no other node reads."""
    gm = trace(
        lambda *xs: [gather(x, dist.group.WORLD) for x in xs], *(torch.zeros(2) for _ in range(6))
    )
    plan = planned(gm)
    some = Bucket("all_gather", None, plan.buckets[0].members[2:4])
    apply_plan(GraphAnalysis(gm.graph), MergePlan((some,)))
    assert any(n.target is C10D.all_gather_into_tensor_out.default for n in gm.graph.nodes)
    assert Writes(gm.graph.nodes).unordered == []
    assert [len(b.members) for b in planned(gm).buckets] == [4]


# -- groups, caps, eligibility --------------------------------------------------------------------


def gathers_on(*groups: str) -> fx.GraphModule:
    builder = Builder()
    outputs = [builder.collective("all_gather", builder.leaf(4, torch.float32), g) for g in groups]
    return builder.finish(outputs)


def test_collectives_of_other_groups_stay_alone():
    plan = planned(gathers_on("1", "0", "0", "1", "0"), groups=["0"])
    assert [{group_name(m) for m in b.members} for b in plan.buckets] == [{"0"}]
    assert {left.reason for left in plan.ineligible} == {
        "its process group 1 is not one of groups="
    }


def test_each_group_has_its_own_cap(monkeypatch):
    gm = gathers_on(*"010101010101")
    one = 4 * 4 * WORLD
    plan = planned(gm, {"0": 2 * one / MIB, "1": lambda i: (i + 1) * one / MIB})
    members = {g: [] for g in "01"}
    for bucket in plan.buckets:
        members[group_name(bucket.members[0])].append(len(bucket.members))
    assert members == {"0": [2, 2, 2], "1": [2, 3]}
    each = tuple(n * one / MIB for n in (2, 1, 3))
    plan = ByCap(each, eligible=everything).plan(GraphAnalysis(gathers_on(*"0" * 9).graph))
    assert [len(b.members) for b in plan.buckets] == [2, 3, 3]
    asked = []
    monkeypatch.setattr(
        caps_module, "default_cap_mb", lambda size: asked.append(size) or 3 * one / MIB
    )
    plan = planned(gm, None)
    assert [len(b.members) for b in plan.buckets] == [3, 3, 3, 3]
    assert asked == [WORLD]


@pytest.mark.torch
@needs_pre_bucketing
def test_the_default_cap_is_torchs_own():
    assert default_cap_mb(128) == fsdp.compute_pre_bucket_cap_mb(128)
    name = "aten_distributed_optimizations.pre_bucketing_fsdp_collectives_bucket_cap_mb"
    with config.patch({name: 7.0}):
        assert default_cap_mb(128) == 7.0


@pytest.mark.torch
@pytest.mark.skipif(
    not hasattr(bucketing, "_resolve_group_name"),
    reason=f"torch {torch.__version__} merges by group names that are strings only",
)
def test_group_names_that_are_nodes():
    gm = gathers_on("0", "1", "0", "1")
    first = next(iter(gm.graph.nodes))
    for group in (dist.group.WORLD, dist.distributed_c10d._resolve_process_group("1")):
        with gm.graph.inserting_before(first):
            node = gm.graph.call_function(dist.distributed_c10d._get_default_group)
        node.meta["val"] = group
        for start in gm.graph.nodes:
            if kind_of(start) is not None and start.args[-1] == group.group_name:
                start.args = (*start.args[:-1], node)
    plan = planned(gm, None, groups=["0"])
    assert [len(b.members) for b in plan.buckets] == [2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cap_mb": ()}, "positive number"),
        ({"cap_mb": (1.0, 0.0)}, "positive number"),
        ({"kinds": "all_gather"}, "kinds must be some of"),
        ({"eligible": "names"}, "eligible must be"),
        ({"max_compute_run": 0}, "max_compute_run must be a whole number of at least 1"),
        ({"max_compute_run": 2.5}, "max_compute_run must be a whole number"),
    ],
)
def test_bad_arguments(options, match):
    with pytest.raises(ValueError, match=match):
        ByCap(**{"eligible": everything, **options}).plan(GraphAnalysis(gathers_on("0", "0").graph))


# -- symbolic sizes -------------------------------------------------------------------------------


def test_hinted_symbolic_sizes_are_planned_and_merged():
    def model(*rows):
        return [gather(x.clone(), dist.group.WORLD) for x in rows]

    gm = make_fx(model, tracing_mode="symbolic")(torch.zeros(6, 3), torch.zeros(6, 3))
    start = next(n for n in gm.graph.nodes if kind_of(n))
    assert isinstance(start.meta["val"].shape[0], torch.SymInt)
    plan = planned(gm)
    assert [(len(b.members), b.wire_bytes) for b in plan.buckets] == [(2, 2 * 6 * 3 * 4 * WORLD)]
    (report,) = apply_plan(GraphAnalysis(gm.graph), plan)
    assert [(m.shape, m.nbytes) for m in report.members] == [((6, 3), 72), ((6, 3), 72)]
    merged = next(n for n in gm.graph.nodes if kind_of(n))
    assert isinstance(merged.meta["val"].shape[0], torch.SymInt), "specialised"


# -- time -------------------------------------------------------------------------------------------


def planning_steps(nodes: int, collectives: int) -> float:
    """Count the lines that planning runs, per node of the graph."""
    gm = layered_graph(nodes, collectives, GROUPS)
    plans: list[MergePlan] = []

    def plan() -> None:
        plans.append(planned(gm, 512 / MIB))

    count = lines_run(plan, str(Path(caps_module.__file__).parents[1]))
    assert plans[0].buckets
    return count / len(gm.graph.nodes)


def test_planning_takes_a_number_of_steps_that_grows_with_the_graph_alone():
    """Planning a graph of ten times the size takes ten times the steps."""
    small, large = planning_steps(2_000, 80), planning_steps(20_000, 800)
    assert large < 1.1 * small


# -- the contraction itself -----------------------------------------------------------------------


@given(seed=SEEDS, size=st.integers(2, 14))
@examples(300)
def test_contraction_refuses_just_what_closes_a_cycle(seed, size):
    """Compare with a sort, with buckets of any starts and buckets that join others."""
    gm = random_graph(seed, size, GROUPS, writes=False)
    starts = [n for n in gm.graph.nodes if kind_of(n) is not None]
    contracted = Contraction(GraphAnalysis(gm.graph))
    rng = random.Random(seed)
    buckets: list[list[fx.Node]] = [[s] for s in starts]
    for _ in range(2 * len(starts)):
        mine = rng.choice(buckets)
        contracted.open(mine[0])
        for _ in range(rng.randrange(4)):
            other = rng.choice(buckets)
            if other is mine:
                continue
            both = mine + other
            merged = [b for b in buckets if b is not mine and b is not other] + [both]
            legal = is_acyclic(
                gm.graph, [Bucket("all_gather", None, tuple(b)) for b in merged if len(b) > 1]
            )
            assert contracted.try_add(other[0]) == legal
            if legal:
                mine, buckets = both, merged
        contracted.close()
