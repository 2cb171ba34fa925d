"""``ReshardAfterForward(2)``: backward gathers in a smaller group, like eager FSDP2."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from expecttest import assert_expected_inline
from joint_graphs import Joint
from marks import at_night
from rank_pool import on_ranks
from sharded_models import Capture, Keep, TwoBlocks, eager_fsdp2, step, tokens_of, trained
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torch_ext_bucketing as teb
from benchmarks.eager_parity.devices import nodes
from torch_ext_bucketing.bucketing.plan import ByCap
from torch_ext_bucketing.fsdp.tagging import parameter_chains
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import group_name, group_size, kind_of
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.passes.reshard_to import SmallerGroup, read_first_gathers, reshard_to
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.schedule import model as schedule_model
from torch_ext_bucketing.planner.schedule.list_schedule import list_schedule
from torch_ext_bucketing.planner.schedule.policy import Options

SLICE = torch.ops.aten.slice_copy.Tensor
UNITS = ["layers.0", ""]
TOKENS = torch.arange(8).view(2, 4)
ALL = 6
READ = 4
"""Parameters that backward reads: two weights and the scale of the block, and the head."""


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("fresh_dynamo")]


class OneBlock(TwoBlocks):
    def __init__(self) -> None:
        super().__init__(dim=9, vocabulary=13)  # uneven over four ranks
        del self.layers[1]


class Checkpointed(TwoBlocks):
    """Backward recomputes the first block."""

    def __init__(self, dim: int = 9) -> None:
        super().__init__(dim=dim, vocabulary=13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.layers[0], self.embedding(tokens), use_reentrant=False)
        return self.head(self.layers[1](x))


def model_of(cls=OneBlock):
    torch.manual_seed(0)
    return cls()


def listing(gm: fx.GraphModule) -> str:
    gm.recompile()
    lines = [line.partition(";")[0].replace("torch.ops.", "") for line in gm.code.splitlines()]
    return "".join(f"{line.strip()}\n" for line in lines if " = " in line or "return" in line)


@pytest.mark.torch
def test_the_graph_before_and_after(fake_world):
    def forward_and_backward(w, bias, x, tangents):
        whole = joint.gather("w", w)
        out = x @ whole.t() + joint.gather("bias", bias)
        return out, joint.scatter("w", tangents.t() @ x), tangents @ whole

    joint = Joint(shards=4)
    node = dist.new_group([0, 1]).group_name
    joint.groups["node"] = node
    inputs = [torch.ones(2, 5), torch.ones(2), torch.ones(3, 5), torch.ones(3, 8)]
    gm = joint.trace(forward_and_backward, *inputs)
    before = listing(joint.named(gm))
    assert before.count("all_gather_into_tensor.default") == 2
    report = reshard_to(
        gm.graph, parameter_chains(gm.graph), SmallerGroup(node, (0, 1), 1), lambda tag: True
    )
    assert_expected_inline(
        listing(joint.named(gm)),
        """\
all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(w_1, 4, 'shards')
wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
slice_copy_tensor = aten.slice_copy.Tensor(wait_tensor, 0, 4, 8)
all_gather_into_tensor_default = _c10d_functional.all_gather_into_tensor.default(slice_copy_tensor, 2, 'node')
wait_tensor_default = _c10d_functional.wait_tensor.default(all_gather_into_tensor_default)
t = aten.t.default(wait_tensor_default)
mm = aten.mm.default(x_1, t)
all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(bias_1, 4, 'shards')
wait_tensor_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
add = aten.add.Tensor(mm, wait_tensor_1)
t_1 = aten.t.default(tangents_1)
mm_1 = aten.mm.default(t_1, x_1)
reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor.default(mm_1, 'avg', 4, 'shards')
wait_tensor_2 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
mm_2 = aten.mm.default(tangents_1, wait_tensor_default)
return (add, wait_tensor_2, mm_2)
""",
    )
    assert read_first_gathers(gm.graph) == 1
    assert listing(joint.named(gm)) == before
    # Only forward reads the bias.
    assert [(r.fqns, r.ranks, r.saved_bytes) for r in report.resharded] == [(("w",), 4, 4 * 5 * 4)]
    assert_expected_inline(
        report.to_text(),
        """\
reshard after forward:
  1 gathers of backward among 2 ranks; kept for them: 80 B
""",
    )


def test_a_graph_that_it_can_do_nothing_for_stays(fake_world):
    joint = Joint(shards=4)
    gm = joint.trace(lambda w, tangents: tangents @ joint.gather("w", w), *[torch.ones(2, 8)] * 2)
    before = listing(gm)
    other = dist.new_group([0, 1, 2]).group_name
    with pytest.raises(ValueError, match=r"ranks 0-2 do not divide the group of ranks 0-3"):
        reshard_to(
            gm.graph,
            parameter_chains(gm.graph),
            SmallerGroup(other, (0, 1, 2), 0),
            lambda tag: True,
        )
    assert listing(gm) == before


def sharded(mesh, mode="fully_shard", cls=OneBlock):
    return teb.data_parallel(model_of(cls), mesh, mode, param_dtype=torch.bfloat16)


def compiled(passes, model):
    """Compile; return the forward graph, the backward graph and the report."""
    kept = Keep()
    compiler = teb.backend(kept, passes, model)
    step(torch.compile(model, backend=compiler, fullgraph=True), TOKENS)
    return *kept.values(), compiler.last_report()


def gathers(gm):
    """Count all-gathers by the size of their group."""
    return Counter(group_size(n) for n in gm.graph.nodes if kind_of(n) == "all_gather")


def saved_copies(gm):
    (output,) = gm.graph.find_nodes(op="output")
    return [n for n in output.all_input_nodes if n.target is SLICE]


def nbytes(nodes):
    return sum(n.meta["val"].numel() * n.meta["val"].element_size() for n in nodes)


@pytest.mark.torch
def test_backward_gathers_in_the_smaller_group(fake_world):
    model = sharded(init_device_mesh("cpu", (4,)))
    reshard = teb.ReshardAfterForward(2)
    forward, backward, report = compiled([reshard], model)
    assert (gathers(forward), gathers(backward)) == (Counter({4: ALL}), Counter({2: READ}))
    (made,) = report.rewrites
    kept = saved_copies(forward)
    assert nbytes(kept) == sum(r.saved_bytes for r in made.resharded)
    assert len(kept) == READ
    assert not [n for n in backward.graph.find_nodes(op="placeholder") if "wait" in n.name]

    check_a_group(backward)
    order = teb.FSDPParamOrder.from_model(model_of(), UNITS)
    buckets = teb.BucketByUnit(order)
    bucketed = [buckets(gm).graphs[0] for gm in (forward, backward)]
    assert (gathers(forward), gathers(backward)) == (Counter({4: 2}), Counter({2: 2}))
    # In eager FSDP2's order, with the rows of one rank of the smaller group.
    (block,) = (b for b in bucketed[1].buckets if b.group_size == 2)
    names = [f"layers.0.{n}" for n in ("w1.weight", "w2.weight", "scale")]
    assert [(m.fqns, m.shape) for m in block.members] == [
        ((name,), shape) for name, shape in zip(names, [(6, 9), (6, 10), (6,)], strict=True)
    ]

    # The list schedule makes the copy first: no kernel waits for it, but its source stays alive
    # until then.
    nodes_of = schedule_model.model_of(GraphAnalysis(forward.graph), Costs())
    order = list_schedule(nodes_of, Options(window=100))
    place = {nodes_of.dependencies.nodes[i]: at for at, i in enumerate(order)}
    for copy in saved_copies(forward):
        (whole,) = copy.all_input_nodes
        assert place[copy] <= min(place[user] for user in whole.users)


def check_a_group(backward):
    """Check that a group includes gathers in its smaller group."""
    scatter = next(n for n in backward.graph.nodes if kind_of(n) == "reduce_scatter")
    for groups in (None, [group_name(scatter)]):
        plan = ByCap(2.0**20, groups=groups).plan(GraphAnalysis(backward.graph))
        members = Counter((b.kind, group_size(b.members[0]), len(b.members)) for b in plan.buckets)
        assert members == {("all_gather", 2, READ): 1, ("reduce_scatter", 4, ALL): 1}
        assert not plan.ineligible


@pytest.mark.torch
@pytest.mark.parametrize("partitioner", [at_night("default"), "min_cut"])
def test_what_is_computed_again_reads_it_too(fake_world, partitioner):
    model = sharded(init_device_mesh("cpu", (4,)), cls=Checkpointed)
    reshard = teb.ReshardAfterForward(keep=["layers.1"], to=2)
    capture = Capture(partitioner, model, joint=reshard)
    step(torch.compile(model, backend=capture, fullgraph=True), TOKENS)
    forward, backward = capture.graphs
    assert gathers(forward)[4] == 10
    reshard.finish(forward.graph, Compilation())
    assert gathers(forward) == Counter({4: 10})
    backward.graph.eliminate_dead_code(lambda n: n.op in ("placeholder", "output"))
    # The first block's and the head's are gathered again; the second block's are kept.
    assert gathers(backward) == Counter({2: 5})
    assert len(saved_copies(forward)) == 5


def test_inference_is_left_alone(fake_world):
    model = sharded(init_device_mesh("cpu", (4,)))
    kept = Keep()
    compiler = teb.backend(kept, [teb.ReshardAfterForward(2)])
    with torch.no_grad():
        torch.compile(model, backend=compiler, fullgraph=True)(TOKENS)
    (graph,) = kept.values()
    assert gathers(graph) == Counter({4: ALL})
    assert not graph.graph.find_nodes(op="call_function", target=SLICE)


@pytest.mark.parametrize("fake_world", [8], indirect=True)
def test_shards_of_other_groups(fake_world):
    names = ("replicas", "shards")
    hybrid = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    forward, backward, _ = compiled([teb.ReshardAfterForward(2)], sharded(hybrid, "hybrid_shard"))
    assert (gathers(forward), gathers(backward)) == (Counter({4: ALL}), Counter({2: READ}))

    # to= is the parameters' own group, which has no effect.
    torch._dynamo.reset()
    forward, backward, _ = compiled([teb.ReshardAfterForward(4)], sharded(hybrid, "hybrid_shard"))
    assert gathers(backward) == Counter({4: READ})
    assert not saved_copies(forward)

    # With tensor parallelism, shards are not on neighboring ranks.
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("nodes", "inside", "tp"))
    data = mesh["nodes", "inside"]._flatten("data")
    with pytest.raises(
        Exception, match=r"to= does not fit the groups .*ranks 0-1 .* of ranks 0, 2, 4, 6"
    ):
        compiled([teb.ReshardAfterForward(2)], sharded(data))
    torch._dynamo.reset()
    smaller = teb.ReshardAfterForward(to=mesh["inside"])
    forward, backward, _ = compiled([smaller], sharded(data))
    assert (gathers(forward), gathers(backward)) == (Counter({4: ALL}), Counter({2: READ}))


def test_what_can_not_be_is_said(fake_world):
    for to, kind, match in (
        (3, ValueError, "a factor of the 4 ranks of the job, got 3"),
        (0, ValueError, "a factor of the 4 ranks of the job, got 0"),
        (8, ValueError, "a factor of the 4 ranks of the job, got 8"),
        (True, TypeError, "a number of ranks or a DeviceMesh, got True"),
        ("node", TypeError, "a number of ranks or a DeviceMesh, got 'node'"),
    ):
        with pytest.raises(kind, match=match):
            teb.ReshardAfterForward(to=to)
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        kept = teb.ReshardAfterForward(to=1)
    forward, backward, _ = compiled([kept], sharded(init_device_mesh("cpu", (4,))))
    assert (gathers(forward), gathers(backward)) == (Counter({4: ALL}), Counter())
    for code in (
        "ReshardAfterForward(keep=['a'], to=2)",
        "ReshardAfterForward(reshard_after_forward=2, keep=['a'])",
    ):
        assert repr(eval(f"teb.{code}")) == code
    with pytest.raises(ValueError, match="give 2 or to=2, not both"):
        teb.ReshardAfterForward(2, to=2)


def test_a_number_needs_a_process_group():
    with pytest.raises(ValueError, match=r"to=2 .* after init_process_group\(\)"):
        teb.ReshardAfterForward(to=2)


@pytest.mark.torch
def test_the_place_in_the_group_is_part_of_the_key(fake_world):
    passes = [teb.ReshardAfterForward(to=to) for to in (None, 2, 4)]
    passes.append(teb.ReshardAfterForward(to=2))  # in a group of its own
    uuids = [p.uuid() for p in passes]
    assert len(set(uuids)) == len(uuids)
    other = teb.ReshardAfterForward(to=4)
    other._set(_smaller=SmallerGroup(other._smaller.name, other._smaller.ranks, 1))
    assert None not in (*uuids, other.uuid())
    assert other.uuid() not in uuids


# -- real ranks -----------------------------------------------------------------------------------


def _beside_eager(rank, memory):
    mesh = init_device_mesh("cpu", (4,))
    cls = Checkpointed if memory is None else functools.partial(Checkpointed, 63)
    tokens, dtypes = tokens_of(rank, 13, 2, 4), (torch.bfloat16, torch.float32)
    eager = eager_fsdp2(
        model_of(cls), ["layers.0", "layers.1"], mesh, *dtypes, reshard_after_forward=2
    )
    eager_fsdp2(eager, [""], mesh, *dtypes, reshard_after_forward=False)
    expected = trained(eager, eager, tokens)

    model = model_of(cls)
    order = teb.FSDPParamOrder.from_model(model, ["layers.0", "layers.1", ""])
    teb.data_parallel(model, mesh, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    reshard = teb.ReshardAfterForward(keep=order.units[-1], to=2)
    if memory is not None:
        machine = replace(nodes(0.1), ranks_per_node=2)
        reshard = teb.ReshardAfterForward("auto", memory=memory, machine=machine, to=2)
    passes = [CombineUses(), reshard, teb.BucketByUnit(order)]
    compiler = teb.backend("aot_eager", passes, model)
    found = trained(model, torch.compile(model, backend=compiler, fullgraph=True), tokens)
    launched = Counter(
        (graph.stage, bucket.kind, bucket.group_size)
        for graph in compiler.last_report().graphs
        for bucket in graph.buckets
    )
    return expected, found, launched


@pytest.mark.parametrize(
    ("memory", "again"),
    [
        (None, {2: 2}),
        at_night(teb.PeakMemory(ratio=0.9), {2: 1}),
        at_night(teb.PeakMemory(ratio=9.0), {}),
    ],
    ids=["given", "0.9", "9.0"],
)
def test_bits_of_eager(memory, again):
    """Units are given, or chosen under a bound on memory."""
    for expected, found, launched in on_ranks(_beside_eager, memory, world=4):
        assert found == expected
        assert launched == {
            ("forward", "all_gather", 4): 3,
            **{("backward", "all_gather", ranks): n for ranks, n in again.items()},
            ("backward", "reduce_scatter", 4): 3,
        }
