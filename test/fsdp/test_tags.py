"""Tags on real traces."""

import pickle
from contextlib import ExitStack

import pytest
import torch
import torch.nn as nn
from collective_graphs import C10D, all_gather, all_reduce, lines_run, reduce_scatter, trace
from marks import at_night
from sharded_models import (
    Capture,
    OneBlock,
    TwoBlocks,
    collectives,
    shard_by_parametrization,
    shard_by_property,
    step,
)
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.fsdp.tagging import tag_joint_graph
from torch_ext_bucketing.fsdp.units import FSDPParamOrder
from torch_ext_bucketing.graph.nodes import Tag, kind_of, member_tags, set_tag, tag_of
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.bucketing import BucketByUnit

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def world():
    return torch.distributed.group.WORLD


def mesh_1d():
    return init_device_mesh("cpu", (4,))


def compiled_tags(model, *inputs, partitioner="default", named=None):
    """Run one step of ``model``; return ``{kind: sorted tags}`` and the capture."""
    capture = Capture(partitioner, named)
    step(torch.compile(model, backend=capture, fullgraph=True), *inputs)
    found = {}
    for graph in capture.graphs:
        for node in collectives(graph):
            tag = tag_of(node)
            assert tag is not None, f"{node.name} lost its tag"
            found.setdefault(tag.kind, []).append(tag.fqns)
    return {kind: sorted(fqns) for kind, fqns in found.items()}, capture


FQNS = [name for name, _ in OneBlock().named_parameters()]
ONE_EACH = sorted((f,) for f in FQNS)
TOKENS = torch.zeros(2, 3, dtype=torch.long)


WAYS = [
    (shard_by_parametrization, torch.bfloat16, "min_cut"),
    (shard_by_property, None, "default"),
    at_night(shard_by_parametrization, None, "default"),
    at_night(shard_by_property, torch.bfloat16, "min_cut"),
]
"""By day each value once."""


@pytest.mark.parametrize(("shard", "dtype", "partitioner"), WAYS)
def test_compiled_dtensor_parameters(fake_world, shard, dtype, partitioner):
    # 12 and 10 rows over 4 ranks: one parameter is even, one is padded
    model = shard(OneBlock(), mesh_1d(), dtype)
    found, capture = compiled_tags(model, TOKENS, partitioner=partitioner)
    assert found == {"all_gather": ONE_EACH, "reduce_scatter": ONE_EACH}
    ((tags, untagged),) = capture.tags
    assert len(tags) == 2 * len(FQNS)
    assert not untagged


@pytest.mark.parametrize("named", [False, True], ids=["by source", "by identity"])
def test_the_named_module(fake_world, named):
    model = data_parallel(OneBlock(), mesh_1d())
    model.layers[0] = torch.compile(model.layers[0], backend="eager")  # a wrapper's name is dropped
    found, _ = compiled_tags(model, TOKENS, named=model if named else None)
    assert found == {"all_gather": ONE_EACH, "reduce_scatter": ONE_EACH}


def test_a_submodule_compiled_alone(fake_world):
    def names(model, **options):
        return compiled_tags(model.layers[1], torch.randn(2, 8), **options)[0]["all_gather"]

    model = data_parallel(TwoBlocks(), mesh_1d())
    assert ("layers.1.w1.bias",) in names(model, named=model)
    # FQNs are relative to the order's model, even inside another module.
    model = TwoBlocks()
    order = FSDPParamOrder.from_model(model)
    data_parallel(nn.ModuleDict({"outer": model}), mesh_1d())
    found = names(model)
    assert ("layers.1.w1.bias",) in found
    assert {fqn for (fqn,) in found} < set(order.units[0])
    # Without an order, FQNs are relative to the compiled module.
    assert ("w1.bias",) in names(data_parallel(TwoBlocks(), mesh_1d()))


def test_replicas_have_all_reduces(fake_world):
    """With reduce-scatters or alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for shard in (shard_by_property, lambda m, mesh: data_parallel(m, mesh, "hybrid_shard")):
        found, _ = compiled_tags(shard(OneBlock(), mesh), TOKENS)
        assert found == dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), ONE_EACH)
    found, _ = compiled_tags(data_parallel(OneBlock(), mesh_1d(), "replicate"), TOKENS)
    assert found == {"all_reduce": ONE_EACH}


def test_frozen_parameter_has_no_reduction(fake_world):
    model = OneBlock()
    model.layers[0].w1.requires_grad_(False)
    found, _ = compiled_tags(data_parallel(model, mesh_1d()), TOKENS)
    assert found["all_gather"] == ONE_EACH
    trained = [f for f in ONE_EACH if not f[0].startswith("layers.0.w1")]
    assert found["reduce_scatter"] == trained


def test_tied_weights_have_one_name(fake_world):
    model = OneBlock()
    model.head.weight = model.embedding.weight
    model = data_parallel(model, mesh_1d())
    found, _ = compiled_tags(model, TOKENS, named=model)
    name = ("embedding.weight",)
    # gathered twice and reduced twice: the gradient is the sum of two reductions
    assert found["all_gather"].count(name) == 2
    assert found["reduce_scatter"].count(name) == 2
    assert ("head.weight",) not in found["all_gather"]


def test_inference_graph(fake_world):
    model = data_parallel(OneBlock(), mesh_1d())
    b = backend("aot_eager", [BucketByUnit([["layers.0"], ["embedding", "head"]])])
    with torch.no_grad():
        torch.compile(model, backend=b)(TOKENS)
    (graph,) = b.last_report().graphs
    assert graph.stage == "inference"
    assert graph.collectives_before == {"all_gather": len(ONE_EACH)}
    assert graph.collectives_after == {"all_gather": 2}


class Fused(nn.Module):
    """Two parameters gathered in one collective."""

    def __init__(self):
        super().__init__()
        self.wq = nn.Parameter(torch.randn(2, 8))
        self.wk = nn.Parameter(torch.randn(3, 8))

    def forward(self, x):
        both = _GatherSum.apply(torch.cat([self.wq, self.wk, self.wk.new_zeros(1, 8)]))
        return x @ both.t()


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather(x, world())

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad, world())


def test_fused_weights_and_padding_by_zeros(fake_world):
    found, _ = compiled_tags(Fused(), torch.randn(2, 8))
    assert found == {"all_gather": [("wq", "wk")], "reduce_scatter": [("wq", "wk")]}


class Activations(nn.Module):
    """Collectives on activations beside those of parameters."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 8))
        self.pos = nn.Parameter(torch.randn(2, 8))

    def forward(self, x):
        full = _GatherSum.apply(self.w)
        # computed from parameters alone, but an activation
        table = _GatherSum.apply(torch.tanh(_GatherSum.apply(self.pos)))
        y = _GatherSum.apply(x @ full.t())
        return y.sum() + table.sum()


def test_collectives_on_activations_are_left_alone(fake_world):
    capture = Capture()
    step(torch.compile(Activations(), backend=capture, fullgraph=True), torch.randn(2, 8))
    ((tags, untagged),) = capture.tags
    assert sorted((t.kind, *t.fqns) for t in tags) == [
        ("all_gather", "pos"),
        ("all_gather", "w"),
        ("reduce_scatter", "pos"),
        ("reduce_scatter", "w"),
    ]
    assert sorted(untagged) == ["all_gather"] * 2 + ["reduce_scatter"] * 2


def test_joint_export(fake_world):
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    model = shard_by_property(OneBlock(), mesh_1d(), torch.bfloat16)
    gm = dynamo_graph_capture_for_export(model)(TOKENS)
    context = gm.meta.get("tracing_context")
    with ExitStack() as stack:
        if context is not None:
            stack.enter_context(torch._guards.tracing(context))
        mode = gm.meta.get("fake_mode") or context.fake_mode
        stack.enter_context(mode)
        joint = aot_export_joint_with_descriptors(stack, gm, (TOKENS,))
        tags = tag_joint_graph(joint.graph_module).values()
    for kind in ("all_gather", "reduce_scatter"):
        assert sorted(t.fqns for t in tags if t.kind == kind) == ONE_EACH


def training_step_trace():
    """Trace forward, backward and the list of gradients by ``make_fx``, without descriptors."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    model = nn.ModuleDict({"a": nn.Linear(8, 2), "b": nn.Linear(8, 2)})

    def part(shards, x, name):
        w = _GatherSum.apply(shards[f"{name}.weight"])
        b = _GatherSum.apply(shards[f"{name}.bias"])
        return torch.nn.functional.linear(x, w, b).sum()

    def whole_step(shards, x):
        loss = part(shards, x, "a") + part(shards, x, "b")
        grads = torch.autograd.grad(loss, list(shards.values()))
        return loss, {"grads": (list(grads), x)}

    with FakeTensorMode():
        params = model.named_parameters()
        shards = {n: torch.randn(p.shape, requires_grad=True) for n, p in params}
        gm = make_fx(whole_step)(shards, torch.randn(4, 8))
    return gm, list(shards)


def test_whole_step_trace_is_named(fake_world):
    gm, names = training_step_trace()
    fqns = dict(zip(gm.graph.find_nodes(op="placeholder"), names, strict=False))
    tags = tag_joint_graph(gm, fqns, grad_fqns=[None, *names, None]).values()
    for kind in ("all_gather", "reduce_scatter"):
        assert sorted(t.fqns[0] for t in tags if t.kind == kind) == sorted(names)


def test_number_of_output_names_is_checked(fake_world):
    gm, _ = training_step_trace()
    before = str(gm.graph)
    with pytest.raises(ValueError, match=r"grad_fqns has 1 names, but .* has 6 values"):
        tag_joint_graph(gm, grad_fqns=["a"])
    assert str(gm.graph) == before


def test_nested_outputs_with_flat_descriptors(fake_world):
    from torch._functorch._aot_autograd.descriptors import (
        GradAOTOutput,
        ParamAOTInput,
        PlainAOTOutput,
    )

    def grads(a, b):
        return [a.sum(), ((reduce_scatter(a, world()),), reduce_scatter(b, world()))]

    gm = trace(grads, torch.ones(8, 2), torch.ones(8, 3))
    output = gm.graph.output_node()
    output.meta["desc"] = [
        PlainAOTOutput(0),
        GradAOTOutput(ParamAOTInput("a")),
        GradAOTOutput(ParamAOTInput("b")),
    ]
    assert list(tag_joint_graph(gm).values()) == [
        Tag("reduce_scatter", ("a",)),
        Tag("reduce_scatter", ("b",)),
    ]
    output.meta["desc"] = output.meta["desc"][:2]
    with pytest.raises(ValueError, match=r"2 output descriptors for 3 flattened values"):
        tag_joint_graph(trace_with(gm, output.meta["desc"]))


def trace_with(gm, desc):
    for node in collectives(gm):
        node.meta.pop("custom")
    gm.graph.output_node().meta["desc"] = desc
    return gm


def test_hand_tags_are_kept_and_shared_metadata_is_not_touched(fake_world):
    gm = trace(lambda a, b: (all_gather(a, world()), all_reduce(b, world())), *torch.ones(2, 3))
    gather, reduce = collectives(gm)
    shared = {"module_fqn": "m"}
    gather.meta["custom"] = reduce.meta["custom"] = shared
    set_tag(gather, Tag("all_gather", ("mine",)))
    assert shared == {"module_fqn": "m"}
    tags = tag_joint_graph(gm, lambda node: "theirs")
    assert tag_of(gather) == Tag("all_gather", ("mine",))
    assert member_tags(gather) == (Tag("all_gather", ("mine",)),)
    assert tags == {gather: Tag("all_gather", ("mine",))}
    assert tag_of(reduce) is None
    with pytest.raises(ValueError, match=r"can't tag .* as all_gather: it is an all_reduce"):
        set_tag(reduce, Tag("all_gather", ("x",)))
    with pytest.raises(ValueError, match=r"can't tag .* as all_reduce: it is an all_gather"):
        set_tag(gather, Tag("all_reduce", ("x",)))
    with pytest.raises(ValueError, match="it is not a collective"):
        set_tag(gm.graph.output_node(), Tag("all_gather", ("x",)))


def test_only_starts_have_tags(fake_world):
    gm = trace(lambda a: all_gather(a, world()), torch.ones(3))
    (gather,) = collectives(gm)
    set_tag(gather, Tag("all_gather", ("w",)))
    (wait,) = gather.users
    assert wait.target is C10D.wait_tensor.default
    wait.meta["custom"] = gather.meta["custom"]  # as torch's bucketing does to all new nodes
    assert tag_of(wait) is None
    assert kind_of(wait) is None
    assert member_tags(wait) == ()


@pytest.mark.hooks
@pytest.mark.parametrize("payload_hook", [False, True])
def test_bucket_has_its_members_tags(fake_world, payload_hook):
    from torch._inductor import config
    from torch._inductor.fx_passes.bucketing import merge_reduce_scatter_bucket

    def three(a, b, c):
        return tuple(reduce_scatter(x, world()) for x in (a, b, c))

    gm = trace(three, *torch.ones(3, 8))
    members = collectives(gm)
    for node, name in zip(members, "abc", strict=True):
        set_tag(node, Tag("reduce_scatter", (name,)))
    key = {"a": 2, "b": 1, "c": 3}
    hook = (lambda n: key[tag_of(n).fqns[0]]) if payload_hook else None
    with config.patch({"aten_distributed_optimizations.bucket_payload_order_key": hook}):
        merge_reduce_scatter_bucket(gm.graph, members)
    (bucket,) = collectives(gm)
    assert sorted(t.fqns[0] for t in member_tags(bucket)) == ["a", "b", "c"]
    assert sorted(tag_of(bucket).fqns) == ["a", "b", "c"]


def test_tag_is_a_value():
    tag = Tag("all_gather", ("a", "b"))
    assert pickle.loads(pickle.dumps(tag)) == tag
    assert hash(tag) == hash(Tag("all_gather", ("a", "b")))
    with pytest.raises(ValueError, match="kind must be one of"):
        Tag("gather", ("a",))
    with pytest.raises(ValueError, match="non-empty tuple"):
        Tag("all_gather", "a")


def test_linear_in_the_graph(fake_world):
    """The lines run per collective do not grow with the number of collectives."""

    def lines(params: int) -> int:
        graph = torch.fx.Graph()
        x = x0 = graph.placeholder("x")
        shards = [graph.placeholder(f"w{i}") for i in range(params)]
        for w in shards:
            gathered = graph.call_function(C10D.all_gather_into_tensor.default, (w, 4, "0"))
            full = graph.call_function(C10D.wait_tensor.default, (gathered,))
            for _ in range(3):
                full = graph.call_function(torch.ops.aten.view.default, (full, [8]))
            x = graph.call_function(torch.ops.aten.mul.Tensor, (x, full))
        for w in shards:
            start = graph.call_function(C10D.reduce_scatter_tensor.default, (x, "sum", 4, "0"))
            w.meta["grad"] = graph.call_function(C10D.wait_tensor.default, (start,))
        graph.output([w.meta["grad"] for w in shards])
        names = [w.name for w in shards]
        reports = []

        def tag() -> None:
            name_of = {n: n.name for n in graph.nodes if n is not x0}.get
            reports.append(tag_joint_graph(graph, name_of, grad_fqns=names))

        count = lines_run(tag)
        assert len(reports[0]) == 2 * params
        return count

    # Ten times the collectives: 10 if linear, 100 if each walks the others.
    assert lines(1000) / lines(100) < 12
