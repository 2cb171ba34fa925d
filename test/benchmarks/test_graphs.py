"""Check graphs of real width and few layers, traced and loaded from disk."""

import itertools
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import fake_group
from generated_order import orders
from marks import at_night
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch.partitioners import default_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true
from torch_features import HAS_CUDA

from benchmarks import graphs, parallel, titan, tracing
from benchmarks.graphs import NAMES, count, load, main
from benchmarks.models import DeepSeek, DeepSeekConfig, Llama, LlamaConfig
from benchmarks.serialize import add_symbols, from_data, symbols_to_data, to_data
from torch_ext_bucketing._torch.aot import symbol_facts
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import is_assertion, kind_of, tag_of
from torch_ext_bucketing.graph.sizes import SizeHints
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.planner.schedule.policy import Overlap, PeakMemory
from torch_ext_bucketing.planner.scheduling import BucketAndSchedule

pytestmark = pytest.mark.long

C10D = torch.ops._c10d_functional
LAYERS = {
    "llama3_8b_fsdp64": 1,
    "llama3_8b_fsdp8_tp8": 1,
    "deepseek_v3_fsdp64_ep8": 2,
    "deepseek_v3_fsdp64_ep8_dropless": 2,
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    if dist.is_initialized():
        pytest.skip("torch.distributed is initialised by another test")
    yield tmp_path_factory.mktemp("graphs")
    parallel.end_world()


@pytest.fixture
def loaded(cache):
    return lambda name, device="cpu": load(
        name, LAYERS[name.partition(".")[0]], device=device, quiet=True, cache=cache
    )


def starts(graph, kind=None, role=None):
    """List the collectives of a kind on groups with a role."""
    position = {"all_gather": 2, "reduce_scatter": 3, "all_reduce": 2}
    return [
        n
        for n in graph.gm.graph.nodes
        if kind_of(n) in ((kind,) if kind else position)
        and role in (None, graph.groups[n.args[position[kind_of(n)]]].role)
    ]


def fqns(nodes):
    return [f for n in nodes for f in tag_of(n).fqns]


def llama_fqns(layers):
    block = [
        "attention_norm.weight",
        *(f"attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")),
        "ffn_norm.weight",
        *(f"feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
    ]
    inside = [f"layers.{i}.{name}" for i in range(layers) for name in block]
    return ["tok_embeddings.weight", *inside, "norm.weight", "output.weight"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama3_8b_fsdp64.forward", 1),
        at_night("deepseek_v3_fsdp64_ep8_dropless.backward.recompute", 2),
    ],
)
def test_data_keeps_names_descriptors_tags_and_sizes(cache, monkeypatch, name, layers):
    """First of all, so that the other tests find on the disk what is traced here."""
    traced = {}
    original = graphs.trace_model

    def keep(*args):
        traced.update(original(*args))
        return traced

    monkeypatch.setattr(graphs, "trace_model", keep)
    graph = graphs.trace(name, layers, device="cpu", quiet=True, cache=cache)
    original_gm = traced[graph.phase, graph.recompute]
    assert shared_storages(graph.gm) == shared_storages(original_gm)
    for before, after in zip(original_gm.graph.nodes, graph.gm.graph.nodes, strict=True):
        assert (before.name, before.op, before.target) == (after.name, after.op, after.target)
        assert str(before.args) == str(after.args)
        assert str(before.kwargs) == str(after.kwargs)
        for key in ("desc", "custom", "partitioner_tag", "unbacked_bindings"):
            assert before.meta.get(key) == after.meta.get(key)
        values = [n.meta.get("val") for n in (before, after)]
        assert type(values[0]) is type(values[1])
        if isinstance(values[0], torch.Tensor):
            for fact in (torch.Tensor.size, torch.Tensor.stride, torch.Tensor.storage_offset):
                assert str(fact(values[0])) == str(fact(values[1]))
            assert str(nbytes(values[0])) == str(nbytes(values[1]))
        elif isinstance(values[0], torch.SymInt | torch.SymBool):
            assert values[0].node.expr == values[1].node.expr
            assert facts(values[0]) == facts(values[1])


def shared_storages(gm):
    """Map each node whose value lies in an earlier node's memory to the first such node."""
    first, found = {}, {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            base = first.setdefault(value.untyped_storage()._cdata, node.name)
            if base != node.name:
                found[node.name] = base
    assert len(found) > 20
    return found


def test_llama_collectives(loaded):
    config = "llama3_8b_fsdp8_tp8"
    expected = llama_fqns(LAYERS[config])
    forward = loaded(f"{config}.forward")
    assert sorted(fqns(starts(forward, "all_gather", "fsdp"))) == sorted(expected)
    assert not starts(forward, "reduce_scatter", "fsdp")
    for suffix in ("", ".recompute"):
        backward = loaded(f"{config}.backward{suffix}")
        reductions = starts(backward, "reduce_scatter", "fsdp")
        assert sorted(fqns(reductions)) == sorted(expected)
        assert all(n.args[1] == "avg" for n in reductions)
        gathers = starts(backward, "all_gather", "fsdp")
        # The embedding's backward needs its input, not its weight.
        assert sorted(fqns(gathers)) == (sorted(expected[1:]) if suffix else [])
        assert {n.meta["val"].dtype for n in gathers} <= {torch.bfloat16}
        assert {n.meta["val"].dtype for n in reductions} == {torch.float32}


def test_experts_on_a_second_mesh_between_gathers_of_the_first(loaded):
    graph = loaded("deepseek_v3_fsdp64_ep8.forward")
    experts = starts(graph, "all_gather", "expert_fsdp")
    assert fqns(experts) == [
        "layers.1.feed_forward.experts.w1",
        "layers.1.feed_forward.experts.w3",
        "layers.1.feed_forward.experts.w2",
    ]
    order = [graph.groups[n.args[2]].role for n in starts(graph, "all_gather")]
    assert sum(a != b for a, b in itertools.pairwise(order)) == 2
    counts = count(graph).collectives
    assert counts["all_to_all", "ep"] == 3
    backward = loaded("deepseek_v3_fsdp64_ep8.backward.recompute")
    assert sorted(fqns(starts(backward, "all_gather", "expert_fsdp"))) == sorted(fqns(experts))
    assert sorted(fqns(starts(backward, "reduce_scatter", "expert_fsdp"))) == sorted(fqns(experts))
    assert count(backward).collectives["all_to_all", "ep"] == 2


@pytest.mark.slow  # test_size_hints has a small mixture of experts
def test_splits_depend_on_data(loaded):
    graph = loaded("deepseek_v3_fsdp64_ep8_dropless.backward.recompute")
    assert graph.config.size_hints == 2 * 4096 * 6 // 8  # tokens over the ranks of the experts
    (_, there), *_ = [
        (n, n.meta["val"].shape[0])
        for n in graph.gm.graph.nodes
        if n.target is C10D.all_to_all_single.default
    ]
    assert SizeHints()(there) == 8 * 8192
    assert SizeHints(graph.config.size_hints)(there) == 2 * 4096 * 6
    assert loaded("deepseek_v3_fsdp64_ep8.backward.recompute").config.size_hints is None


def small_llama(world):
    config = LlamaConfig(layers=1, dim=64, heads=4, kv_heads=2, hidden=128, vocab=96, seq=32)
    model = Llama(config)
    parallel.shard_llama(model, world)
    return model


def small_deepseek(world):
    config = DeepSeekConfig(
        layers=2, dim=64, heads=2, hidden=96, vocab=96, experts=4, experts_per_token=2,
        expert_hidden=32, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16, batch=1, seq=32,
    )  # fmt: skip
    model = DeepSeek(config, world.expert.get_group())
    parallel.shard_deepseek(model, world)
    return model


@pytest.mark.torch
@pytest.mark.parametrize(
    ("build", "layout"),
    [
        at_night(small_llama, parallel.Layout(fsdp=4, tensor=2)),
        at_night(small_deepseek, parallel.Layout(fsdp=4, expert=2)),
    ],
    ids=["llama", "deepseek"],
)
def test_the_graphs_are_those_of_torch_compile(cache, build, layout):
    class Captured(Exception):
        """Ends the compile once its graphs are there."""

    compiled = {}

    def partition(joint, inputs, **kwargs):
        compiled["forward"], compiled["backward"] = default_partition(joint, inputs, **kwargs)
        raise Captured  # the kernels named in the graphs don't run on a CPU

    backend = aot_autograd(
        fw_compiler=None,
        bw_compiler=None,
        partition_fn=partition,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,
    )
    world = parallel.start_world(layout)
    traced = tracing.trace_model(lambda: build(world), (1, 32), lambda stage: None)
    model = torch.compile(build(world), backend=backend, fullgraph=True)
    with pytest.raises(BackendCompilerFailed, match="Captured"):
        model(torch.zeros(1, 32, dtype=torch.int64))
    for phase, graph in compiled.items():
        calls = [
            [n.target for n in g.graph.nodes if n.op == "call_function"]
            for g in (graph, traced[phase, False])
        ]
        assert len(calls[0]) > 150
        assert calls[0] == calls[1]


def test_device_is_chosen_when_loading(cache):
    graph = load("llama3_8b_fsdp64.forward", 1, device="cuda", quiet=True, cache=cache)
    values = [n.meta.get("val") for n in graph.gm.graph.nodes]
    assert {v.device.type for v in values if isinstance(v, torch.Tensor)} == {"cuda"}


@pytest.mark.torch
def test_torchtitans_dropless_experts_take_the_whole_road(cache):
    if titan.problem():
        pytest.skip(f"this {titan.problem()}")
    name = "titan_deepseek_v3_fsdp64_ep8"
    graph = load(f"{name}.backward.recompute", 2, device="cpu", quiet=True, cache=cache)
    experts, others = (
        set(fqns(starts(graph, "reduce_scatter", role))) for role in ("expert_fsdp", "fsdp")
    )
    inner = "layers.1.moe.routed_experts.inner_experts"
    assert experts == {f"{inner}.{w}" for w in ("w1_EFD", "w2_EDF", "w3_EFD")}
    assert {"tok_embeddings.weight", "lm_head.weight", "layers.1.moe.router.gate.weight"} < others
    for phase, exchanges in (("forward", 3), ("backward.recompute", 2)):
        for hints in (None, graph.config.size_hints):
            graph = load(f"{name}.{phase}", 2, device="cpu", quiet=True, cache=cache)
            assert count(graph).collectives["all_to_all", "ep"] == exchanges
            assert sum("unbacked_bindings" in n.meta for n in graph.gm.graph.nodes) == 16
            if phase == "forward":
                assert sum(map(is_assertion, graph.gm.graph.nodes)) == 17
            found = GraphAnalysis(graph.gm.graph).dependencies
            # A barrier would need all before it.
            assert max(map(len, found.needs)) < len(found.nodes) / 10
            compilation = Compilation(size_hints=hints)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                BucketAndSchedule([Overlap(), PeakMemory(ratio=1.02)])(graph.gm, compilation)
            graph.gm.graph.lint()
            (report,) = compilation.report.schedules
            assert report.step_ms[1] < report.step_ms[0]
            how = "by default: 8192" if hints is None else f"as given: {hints}"
            assert f"sizes that depend on data, {how} for u0" in report.to_text()


def nbytes(value):
    return value.untyped_storage().nbytes()


def facts(number):
    """Collect the known facts and runtime assertions about the symbols of a number."""
    env = number.node.shape_env
    return {
        str(symbol): (
            symbol_facts(symbol, env),
            [(str(a.expr), a.msg) for a in env.deferred_runtime_asserts.get(symbol, ())],
        )
        for symbol in number.node.expr.free_symbols
    }


def test_what_is_known_of_sizes_is_kept():
    env = ShapeEnv()
    with env.ignore_fresh_unbacked_symbols():
        sizes = [env.create_unbacked_symint() for _ in range(4)]
    for size in sizes[:3]:
        torch._check(size >= 0)
    torch._check(sizes[0] <= 6)
    torch._check(sizes[0] + sizes[1] + sizes[2] == 8, lambda: "all tokens go somewhere")
    torch._check(sizes[3] == 4)
    env.var_to_hint_override[sizes[1].node.expr] = 5
    env.size_like.add(sizes[2].node.expr)

    def known(data):
        new = ShapeEnv()
        add_symbols(data, new)
        return [new.create_symintnode(symbol, hint=None) for symbol in data["ranges"]]

    data = pickle.loads(pickle.dumps(symbols_to_data(env)))
    again = known(data)
    new = again[0].node.shape_env
    assert symbols_to_data(new) == data
    assert [facts(s) for s in again] == [facts(s) for s in sizes]
    assert symbol_facts(again[0].node.expr, new) == (None, 0, 6)
    assert [SizeHints()(s) for s in (*again, again[1] * again[0])] == [6, 5, 8, 4, 30]
    assert again[3].node.expr == 4
    assert again[2].node.expr in new.size_like
    assert statically_known_true(again[0] + again[1] + again[2] == 8)
    assert not statically_known_true(sum(known({**data, "assertions": {}})[:3]) == 8)

    with pytest.raises(ValueError, match="new ShapeEnv"):
        add_symbols(data, env)
    with pytest.raises(ValueError, match="new ShapeEnv"):
        from_data({"symbols": data}, FakeTensorMode(), torch.device("cpu"))


def test_torchtitans_model_says_what_it_needs(cache, capsys):
    if titan.problem():
        with pytest.raises(RuntimeError, match="pip install"):
            load("titan_deepseek_v3_fsdp64_ep8.forward", 2, quiet=True, cache=cache)
        assert graphs.available(NAMES) == [n for n in NAMES if not n.startswith("titan")]
        assert "left out: titan_deepseek_v3_fsdp64_ep8.forward, " in capsys.readouterr().err
    else:
        assert graphs.available(NAMES) == list(NAMES)


def test_constants_are_kept():
    constant = torch.tensor([1.0, float("inf"), 3.0])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        gm = make_fx(lambda x: x + constant)(torch.empty(3))
    back = from_data(to_data(gm), mode, torch.device("cpu"))
    (node,) = back.graph.find_nodes(op="get_attr")
    assert torch.equal(getattr(back, node.target), constant)


def to_data_of_a_local_function():
    graph = fx.Graph()
    graph.output(graph.call_function(lambda x: x, (graph.placeholder("x"),)))
    to_data(fx.GraphModule(torch.nn.Module(), graph))


def to_data_of_sizes_of_inputs():
    to_data(make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(3, 4)))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: load("llama3_8b"), KeyError, r"llama3_8b_fsdp64\.forward"),
        (lambda: load(NAMES[0], 0), ValueError, "at least 1"),
        (lambda: parallel.Layout(fsdp=10, expert=4), ValueError, "multiple"),
        (lambda: parallel.Layout(fsdp=8, expert=2, tensor=2), ValueError, "together"),
        (to_data_of_a_local_function, TypeError, "node .*lambda"),
        (to_data_of_sizes_of_inputs, TypeError, r"node .*s\d+ does not depend on data"),
    ],
)
def test_what_is_no_graph_is_refused(cache, call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_world_of_someone_else_is_left_alone(cache):
    parallel.end_world()
    with fake_group(2):
        with pytest.raises(RuntimeError, match="initialised already"):
            parallel.start_world(parallel.Layout(fsdp=4))
        assert dist.get_world_size() == 2


def test_command_line_lists(capsys):
    assert main(["--list", "--only", "deepseek*"]) == 0
    assert capsys.readouterr().out.split() == [n for n in NAMES if n.startswith("deepseek")]
    with pytest.raises(SystemExit):
        main(["--only", "llama4"])
    assert "nothing matches llama4; there are llama3_8b_fsdp64.forward" in capsys.readouterr().err


COMPILES = {
    "cpu": ("cpu", {}),
    # A partition ends at each reduction; Inductor reorders to have fewer, beside all that it does
    # without CUDA graphs.
    "cuda graphs": (
        "cuda",
        {
            "triton.cudagraphs": True,
            "graph_partition": True,
            "custom_should_partition_ops": ["_c10d_functional::reduce_scatter_tensor"],
        },
    ),
}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        *(("llama3_8b_fsdp8_tp8.backward.recompute", compiled) for compiled in COMPILES),
        at_night("deepseek_v3_fsdp64_ep8_dropless.forward", "cpu"),
        *(at_night("deepseek_v3_fsdp64_ep8.backward.recompute", compiled) for compiled in COMPILES),
    ],
)
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.NotBucketedWarning")
def test_generated_code_has_the_planned_order(loaded, name, compiled):
    device, options = COMPILES[compiled]
    if device == "cuda" and not HAS_CUDA:
        pytest.skip("torch is built without CUDA, or triton is not installed")
    planned, generated = orders(loaded(name, device), [BucketAndSchedule(Overlap())], options)
    assert len(planned) > 10
    assert generated == planned


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.NotBucketedWarning")
def test_inductor_changes_an_order_that_is_not_pinned(loaded):
    """Otherwise the test above would show nothing."""
    graph = loaded("llama3_8b_fsdp8_tp8.backward.recompute")
    planned, generated = orders(graph, [BucketAndSchedule(Overlap())], {}, pinned=False)
    assert sorted(generated) == sorted(planned)
    assert generated != planned
