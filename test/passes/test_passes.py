"""Passes and backends on real traces."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch
import torch.fx as fx
from expecttest import assert_expected_inline
from sharded_models import (
    Keep,
    TwoBlocks,
    checkpointed,
    collectives,
    mesh_for,
    step,
)
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.eager_parity.ranks import aten_kernels
from torch_ext_bucketing._torch.aot import mark_recompute, mark_save
from torch_ext_bucketing._torch.inductor import compile_inductor
from torch_ext_bucketing.errors import (
    NotBucketedWarning,
    PayloadOrderWarning,
    UncoveredParametersWarning,
)
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.fsdp.units import FSDPParamOrder, Units
from torch_ext_bucketing.graph.analysis import GraphAnalysis
from torch_ext_bucketing.graph.nodes import KINDS, member_tags, tag_of
from torch_ext_bucketing.passes import backends as backend_module
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.passes.bucketing import BucketByCap, BucketByUnit
from torch_ext_bucketing.passes.pipeline import Pipeline
from torch_ext_bucketing.passes.tagging import PAYLOAD_FIELD, TagParameters
from torch_ext_bucketing.planner.resharding import ReshardAfterForward
from torch_ext_bucketing.planner.schedule.policy import Overlap
from torch_ext_bucketing.planner.scheduling import BucketAndSchedule, Schedule
from torch_ext_bucketing.reports.base import LeftAlone
from torch_ext_bucketing.reports.compile import Unmerged

c10d = torch.ops._c10d_functional
UNITS = [["layers.0"], ["layers.1"], ["embedding", "head"]]
TOKENS = torch.zeros(2, 3, dtype=torch.long)


pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.usefixtures("fresh_dynamo")]


def order(model=None):
    return FSDPParamOrder.from_model(model or TwoBlocks(), ["layers.0", "layers.1", ""])


def sharded(mode="fully_shard", **dtypes):
    torch.manual_seed(0)
    return data_parallel(TwoBlocks(), init_device_mesh("cpu", (4,)), mode, **dtypes)


TINY = [["0"], ["1"]]
"""The units of :func:`tiny`."""


def tiny(mode="fully_shard"):
    """Shard a model of three parameters, which compiles fast."""
    model = torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 8))
    return data_parallel(model, mesh_for(mode), mode)


def fqns_of(start):
    return [fqn for tag in member_tags(start) for fqn in tag.fqns]


def bucket_fqns(bucket):
    return [fqn for member in bucket.members for fqn in member.fqns]


# -- units ----------------------------------------------------------------------------------------


def test_units_by_module_names_take_the_longest():
    units = Units([("layers.0.mlp",), ("layers.0", "norm"), ("",)], aliases=[("tied", "norm.w")])
    assert [
        units.unit_of(f) for f in ("layers.0.mlp.w", "layers.0.wq", "norm.w", "head", "tied")
    ] == [0, 1, 1, 2, 1]
    assert Units([("layers.1",)]).unit_of("layers.10.w") is None
    assert units.place_of("norm.w") == units.place_of("_orig_mod.norm.w") == (1, 1)
    assert units.place_of("tied") == (1, 1)


# -- compiled models ------------------------------------------------------------------------------


def compiled_step(passes, model=None, backend_of="aot_eager", **options):
    """Run one step of a sharded model and return the report."""
    torch._dynamo.reset()
    b = backend(backend_of, passes, **options)
    step(torch.compile(model or sharded(), backend=b), TOKENS)
    return b.last_report()


def test_bucketed_graphs(fake_world):
    keep = Keep()
    model = sharded(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    passes = [BucketByUnit(order()), ReshardAfterForward(keep=["head"])]
    report = compiled_step(passes, model, keep)
    forward, backward = keep.values()
    for graph in keep.values():
        graph.graph.lint()
    assert_expected_inline(
        summary(forward),
        """\
all_gather(embedding.weight head.weight)
    embedding.default
all_gather(layers.0.w1.weight layers.0.w1.bias layers.0.w2.weight layers.0.scale)
    addmm.default
    relu.default
    mm.default
all_gather(layers.1.w1.weight layers.1.w1.bias layers.1.w2.weight layers.1.scale)
    addmm.default
    relu.default
    mm.default
    mm.default
""",
    )
    assert_expected_inline(
        summary(backward),
        """\
    mm.default
    mm.default
all_gather(layers.1.w1.weight layers.1.w2.weight layers.1.scale)
    mm.default
    mm.default
    threshold_backward.default
    mm.default
    mm.default
reduce_scatter(layers.1.w1.weight layers.1.w1.bias layers.1.w2.weight layers.1.scale)
all_gather(layers.0.w1.weight layers.0.w2.weight layers.0.scale)
    mm.default
    mm.default
    threshold_backward.default
    mm.default
    mm.default
reduce_scatter(layers.0.w1.weight layers.0.w1.bias layers.0.w2.weight layers.0.scale)
    embedding_dense_backward.default
reduce_scatter(embedding.weight head.weight)
""",
    )
    assert report.collectives_before == {"all_gather": 10 + 6, "reduce_scatter": 10}
    assert report.collectives_after == {"all_gather": 3 + 2, "reduce_scatter": 3}


def summary(gm):
    """List starts with their members, and compute nodes, in graph order."""
    lines = []
    for node in gm.graph.nodes:
        if node in collectives(gm):
            lines.append(f"{member_tags(node)[0].kind}({' '.join(fqns_of(node))})")
        elif node.op == "call_function" and any(
            w in node.name for w in ("mm", "embedding", "relu", "threshold")
        ):
            lines.append(f"    {node.target.__name__}")
    return "\n".join(lines) + "\n"


def packed_by(passes, model=None):
    """Run a step and return what packed its buckets, and the report."""
    report = compiled_step(passes, model)
    return {bucket.packed_by for bucket in report.buckets}, report


class Shuffled:
    """A payload key that packs by name, backwards."""

    def __init__(self, uuid="shuffled"):
        self._uuid = uuid

    def __call__(self, start):
        return [-ord(c) for c in tag_of(start).fqns[0]]

    def uuid(self):
        return self._uuid


@pytest.mark.hooks
def test_an_order_packs_by_itself_unless_told_otherwise(fake_world):
    """New users expect an order to pack without another argument."""
    o = FSDPParamOrder.from_fqns([["0.weight"], ["1.bias", "1.weight"]])
    found, by_order = packed_by([BucketByUnit(o)], tiny())
    assert found == {"FSDPParamOrder"}
    assert list(map(bucket_fqns, by_order.buckets)) == [["1.bias", "1.weight"]] * 2
    assert packed_by([BucketByUnit(o, payload_order=None)], tiny())[0] == {"graph order"}
    assert packed_by([BucketByUnit(TINY)], tiny())[0] == {"graph order"}
    assert packed_by([BucketByUnit(o, payload_order=Shuffled())], tiny())[0] == {"Shuffled"}
    assert packed_by([BucketByCap(1.0, payload_order=o)], tiny())[0] == {"FSDPParamOrder"}


@pytest.mark.hooks
def test_what_has_no_key_is_said_once_per_compile(fake_world):
    """An order of another model has keys for none of the members."""
    other = FSDPParamOrder.from_fqns([["embedding.weight", "layers.0.w1.weight"]])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, report = packed_by([BucketByUnit(UNITS, payload_order=other)])
    assert found == {"graph order: a member has no key"}
    (said,) = [str(w.message) for w in caught if w.category is PayloadOrderWarning]
    assert "3 of 3 buckets of the forward graph keep graph order" in said
    assert "layers.1.w2.weight" in said
    assert "backend(..., model=model)" in said
    assert said in report.warnings
    lost = next(b for b in report.buckets if b.unit == 0)
    assert lost.no_key == ("layers.0.w1.bias", "layers.0.w2.weight", "layers.0.scale")
    assert "no key: layers.0.w1.bias; " in report.to_text()


def silence(passes, model=None):
    """Run a step and return its warnings that nothing is bucketed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = compiled_step(passes, model or tiny())
    said = [str(w.message) for w in caught if w.category is NotBucketedWarning]
    assert said == [t for t in report.warnings if t in said]
    return said


@pytest.mark.parametrize(
    ("make", "because", "way_out"),
    [
        (lambda: [BucketByCap(1e-6)], "closed by bytes (2), closed by end (1)", "raise cap_mb"),
        (lambda: [BucketByUnit(TINY, ["all_reduce"])], "no pass buckets all_gather (3)", "kinds="),
        (
            lambda: [BucketByUnit([["0"], ["1.weight"], ["1.bias"]])],
            "same kind, group and dtype",
            "larger units",
        ),
        (lambda: [TagParameters(fqn_of={}), BucketByCap()], "no known parameter", "model=model"),
    ],
)
def test_nothing_bucketed_is_said_once_per_compile(fake_world, monkeypatch, make, because, way_out):
    """No decision reads the words of a reason, which are reversed here."""
    for cls in (LeftAlone, Unmerged):
        monkeypatch.setattr(cls, "__init__", reversed_reason(cls.__init__))
    (said,) = silence(make())
    assert said.startswith("nothing is bucketed in the forward graph, which has 3 all_gather")
    assert because in said or because[::-1] in said
    assert way_out in said


def reversed_reason(init):
    def with_other_words(self, fqns, reason, *args, **kwargs):
        init(self, fqns, reason[::-1], *args, **kwargs)

    return with_other_words


def test_nothing_to_bucket_is_not_worth_a_word(fake_world):
    for passes in ([ReshardAfterForward()], [BucketByCap(kinds=())]):  # none was asked to
        alone = torch.nn.Sequential(torch.nn.Embedding(12, 8))
        assert silence(passes, data_parallel(alone, init_device_mesh("cpu", (4,)))) == []
    assert silence([BucketByUnit(TINY)]) == []
    # No collective in forward, and one for each parameter in backward.
    assert silence([BucketByUnit(TINY, ["all_reduce"])], tiny("replicate")) == []


def test_all_reduces_only_when_asked_for(fake_world):
    for kinds, left in ((("all_gather", "reduce_scatter"), 3), (("all_reduce",), 2)):
        report = compiled_step([BucketByUnit(TINY, kinds=kinds)], tiny("hybrid_shard"))
        assert report.collectives_after["all_reduce"] == left


def test_activation_checkpointing_is_respected(fake_world):
    model, keep = sharded(), Keep()
    checkpointed(model.layers[0])
    report = compiled_step([BucketByUnit(UNITS), ReshardAfterForward()], model, keep)
    relus = [sum("relu" in n.name for n in g.graph.nodes) for g in keep.values()]
    assert relus == [2, 1]  # the checkpointed block's is computed again
    assert report.graph("backward").collectives_after["all_gather"] <= 3


def test_uncovered_parameters_are_named_once(fake_world):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = compiled_step([BucketByUnit([["layers.0"], ["layers.1"]])])
    texts = [str(w.message) for w in caught if w.category is UncoveredParametersWarning]
    assert texts == [
        "2 parameter(s) are in no unit; their collectives are not bucketed: embedding.weight, "
        "head.weight. The units name 'layers.0', 'layers.1', ...: add these parameters' modules. "
        "If the units belong to another module than the compiled one, give that to the backend: "
        "backend(..., model=model)"
    ]
    assert report.warnings == texts


def by_cap(*args, mode="fully_shard", **options):
    """Bucket a step by size and return the report."""
    model = data_parallel(TwoBlocks(), mesh_for(mode), mode)
    return compiled_step([ReshardAfterForward(), BucketByCap(*args, **options)], model)


def test_caps_hold_in_both_phases_and_for_all_kinds(fake_world):
    report = by_cap(1.0, kinds=KINDS, mode="hybrid_shard", payload_order=order())
    assert report.graph("forward").collectives_after == {"all_gather": 1}
    after = report.graph("backward").collectives_after
    assert after == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    small = by_cap(1024 / 2**20).buckets
    assert small
    assert all(b.wire_bytes <= b.cap_bytes == 1024 for b in small)
    rank = {fqn: i for i, fqn in enumerate(f for unit in order().units for f in unit)}
    for bucket in report.buckets:
        packed = [rank[f] for f in bucket_fqns(bucket)]
        assert packed == sorted(packed)


# -- Inductor -------------------------------------------------------------------------------------


@contextlib.contextmanager
def lowered():
    """Compile with Inductor and return the graphs that it lowers, with ATen kernels."""
    from torch._inductor.graph import GraphLowering

    graphs, run = [], GraphLowering.run

    def spy(self, *args):
        graphs.append(fx.GraphModule(self.module, copy.deepcopy(self.graph)))
        return run(self, *args)

    with pytest.MonkeyPatch.context() as patch, aten_kernels():
        patch.setattr(GraphLowering, "run", spy)
        yield graphs


def test_inductor_config_is_left_as_it_was(fake_world):
    """torch's own bucketing must not merge our buckets, and the user's own pass must run."""
    seen = []
    set_by_the_user = {
        "post_grad_custom_post_pass": lambda g: seen.append(inductor_config.bucket_all_gathers_fx),
        **dict.fromkeys(("bucket_all_gathers_fx", "bucket_reduce_scatters_fx"), "all"),
        "bucket_all_reduces_fx": "all",
    }
    copied = getattr(inductor_config, "get_config_copy", inductor_config.shallow_copy_dict)
    before = copied()
    with inductor_config.patch(set_by_the_user), lowered() as graphs:
        report = compiled_step([BucketByUnit(order())], backend_of="inductor")
    assert copied() == before
    assert seen == ["none", "none"], "forward and backward"
    found = [GraphAnalysis(gm.graph).counts for gm in graphs]
    assert found == [{"all_gather": 3}, {"reduce_scatter": 3}]
    assert report.collectives_after == {"all_gather": 3, "reduce_scatter": 3}


@pytest.mark.parametrize(
    ("set_by_user", "prefetch", "expected"),
    [
        ({}, 50, None),  # no overlap scheduling
        ({"enable_overlap_scheduling": True}, 7, 7),
        ({"enable_overlap_scheduling": True}, None, None),
        ({"enable_overlap_scheduling": True, "max_compute_pre_fetch": 9}, 50, None),
    ],
)
@pytest.mark.parametrize("as_options", [False, True])
def test_prefetch_depth_is_set_where_the_scheduler_takes_it(
    monkeypatch, set_by_user, prefetch, expected, as_options
):
    import torch._inductor.compile_fx as inductor

    seen = {}

    def compile_fx(gm, inputs, config_patches, **_):
        seen.update(config_patches)
        with inductor_config.patch(config_patches):
            depth = inductor_config.aten_distributed_optimizations.max_compute_pre_fetch
        return lambda *args: depth

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    prefix = "aten_distributed_optimizations."
    given = {prefix + k: v for k, v in set_by_user.items()}
    before = inductor_config.aten_distributed_optimizations.max_compute_pre_fetch
    with inductor_config.patch({} if as_options else given):
        compiled = compile_inductor(
            None,
            (),
            joint=None,
            post_grad=None,
            options=given if as_options else None,
            prefetch=prefetch,
        )
    user = set_by_user.get("max_compute_pre_fetch")
    assert compiled() == (user if user is not None else expected)
    assert (prefix + "max_compute_pre_fetch" in seen) == (
        expected is not None or (as_options and user is not None)
    )
    assert inductor_config.aten_distributed_optimizations.max_compute_pre_fetch == before


def test_backend_passes_its_prefetch_depth_on(monkeypatch):
    seen = []

    def compile_inductor(gm, inputs, **kwargs):
        seen.append(kwargs["prefetch"])
        return gm.forward

    monkeypatch.setattr(backend_module, "compile_inductor", compile_inductor)
    for compiler in (backend(), backend(prefetch=3), backend(prefetch=None)):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(1))
    assert seen == [50, 3, None]
    with pytest.raises(ValueError, match="at least 0"):
        backend(prefetch=-1)


@pytest.mark.slow
def test_config_hooks_alone(fake_world):
    reports = []

    class Kept(BucketByUnit):
        def run(self, graph, compilation):
            super().run(graph, compilation)
            reports.append(compilation.report.graphs[-1])

    bucket = Kept(order())
    hooks = {"joint_custom_post_pass": TagParameters(), "post_grad_custom_post_pass": bucket}
    hooks["force_disable_caches"] = True  # a graph from a cache has no report
    model = sharded()
    slice_of_a_batch = torch.cat([TOKENS, TOKENS])[: len(TOKENS)]
    with inductor_config.patch(hooks), aten_kernels():
        step(torch.compile(model), slice_of_a_batch)
    report = reports[-1]
    assert report.stage == "backward"
    assert report.collectives_after == {"reduce_scatter": 3}
    for bucket in report.buckets:
        assert bucket_fqns(bucket) == list(order().units[bucket.unit])


@pytest.mark.hooks
def test_torchs_own_bucketing_packs_in_the_order_that_tags_hand_it(fake_world):
    """The field is set on the joint graph and survives the partitioner."""
    reverse = FSDPParamOrder.from_fqns([unit[::-1] for unit in order().units[::-1]])
    options = {
        "joint_custom_post_pass": TagParameters(order=reverse),
        "bucket_all_gathers_fx": "fsdp",
        "bucket_reduce_scatters_fx": "fsdp",
        "aten_distributed_optimizations.bucket_payload_order_key": PAYLOAD_FIELD,
        "force_disable_caches": True,
    }
    with inductor_config.patch(options), lowered() as graphs:
        step(torch.compile(sharded()), TOKENS)
    gathered, reduced = (fqns_of(n) for gm in graphs for n in collectives(gm))
    assert reduced == [fqn for unit in reverse.units for fqn in unit]
    # No bit depends on the order of gathers, which stays that of the graph.
    assert sorted(gathered) == sorted(reduced)


# -- the pipeline ---------------------------------------------------------------------------------


def test_manager_orders_the_passes():
    bucket, reshard = BucketByUnit(UNITS), ReshardAfterForward()
    manager = Pipeline([bucket, reshard])
    assert [type(p) for p in manager.joint] == [TagParameters, ReshardAfterForward]
    assert manager.forward_backward == (bucket,)
    mine = TagParameters()
    assert Pipeline([reshard, mine]).joint == (mine, reshard)


def test_passes_are_switched_off_by_name(fake_world, monkeypatch):
    passes = [ReshardAfterForward(), BucketByUnit(order()), BucketAndSchedule([Overlap()])]
    key = Pipeline(passes).uuid()
    monkeypatch.setenv("TORCH_EXT_BUCKETING_DISABLE", "")
    assert Pipeline(passes).uuid() == key
    # Schedule is not in the list; its subclass has another name.
    monkeypatch.setenv("TORCH_EXT_BUCKETING_DISABLE", "Schedule, BucketByUnit")
    without = Pipeline(passes)
    assert without.disabled == ("BucketByUnit",)
    assert without.uuid() not in (key, Pipeline([passes[0], passes[2]]).uuid(), None)
    monkeypatch.setenv("TORCH_EXT_BUCKETING_DISABLE", "BucketAndSchedule,BucketByUnit")
    report = compiled_step(passes, tiny())
    assert not report.graphs
    assert report.disabled == ("BucketByUnit", "BucketAndSchedule")
    off = "switched off by TORCH_EXT_BUCKETING_DISABLE: BucketByUnit, BucketAndSchedule\n"
    assert off in report.to_text()
    assert report.as_dict()["disabled"] == ["BucketByUnit", "BucketAndSchedule"]
    assert [p.name for p in report.passes] == ["TagParameters", "ReshardAfterForward"]


@pytest.mark.parametrize("name", ["BucketUnit", "Schedule,bucketunits", "Own"])
def test_an_unknown_name_to_switch_off_is_an_error(monkeypatch, name):
    monkeypatch.setenv("TORCH_EXT_BUCKETING_DISABLE", name)
    unknown = name.rpartition(",")[2]
    known = (
        "AddByUnit, BucketAndSchedule, BucketByCap, BucketByUnit, .*SeparateGroups, TagParameters"
    )
    with pytest.raises(ValueError, match=f"names {unknown}; the passes are {known}"):
        backend("aot_eager", [BucketByUnit(UNITS)])

    class Own(BucketByUnit):
        """A pass of a user."""

    if name == "Own":
        assert Pipeline([Own(UNITS)]).disabled == ("Own",)


def test_every_passs_time_is_in_the_report(fake_world):
    report = compiled_step([BucketByUnit(TINY), Schedule([Overlap()])], tiny())
    assert [(p.stage, p.name) for p in report.passes] == [
        ("joint", "TagParameters"),
        ("forward", "BucketByUnit"),
        ("forward", "Schedule"),
        ("backward", "BucketByUnit"),
        ("backward", "Schedule"),
    ]
    assert all(p.seconds > 0 for p in report.passes)
    # The time of measuring the baseline counts for the pass that requires it.
    assert report.passes[2].seconds > report.schedules[0].seconds
    (line,) = [x for x in report.to_text().splitlines() if x.startswith("joint")]
    assert line.split() == ["joint", "TagParameters", f"{report.passes[0].seconds:.3f}"]
    assert report.as_dict()["passes"][1]["name"] == "BucketByUnit"


def test_a_backend_reads_as_code():
    made = backend("aot_eager", [BucketByUnit(UNITS, payload_order=None), Schedule(Overlap())])
    assert repr(made) == (
        "backend(compiler='aot_eager', passes=[BucketByUnit([['layers.0'], ['layers.1'], "
        "['embedding', 'head']], payload_order=None), Schedule([Overlap()])])"
    )
    off = backend("inductor", prefetch=None, agree=False, model=TwoBlocks())
    assert repr(off) == "backend(model=TwoBlocks, prefetch=None, agree=False)"


class Fuses(GraphPass):
    """Notes whether the backend fuses kernels."""

    stage = "joint"

    def __init__(self):
        self.found = []

    def run(self, graph, compilation):
        self.found.append(compilation.fuses)


@pytest.mark.parametrize(
    ("compiler", "fuses"), [("inductor", True), ("aot_eager", False), (lambda gm, _: gm, False)]
)
def test_kernels_are_timed_fused_if_inductor_compiles(compiler, fuses):
    seen = Fuses()
    torch.compile(lambda x: (2 * x).sum(), backend=backend(compiler, [seen]))(torch.ones(4))
    assert seen.found == [fuses]


def test_pass_alone_is_timed_for_the_compiler_that_runs_it():
    seen = Fuses()
    with inductor_config.patch(post_grad_custom_post_pass=seen):
        torch.compile(lambda x: (3 * x).sum())(torch.ones(4))
    seen(fx.symbolic_trace(lambda x: 3 * x))
    assert seen.found == [True, False]


class Collects(GraphPass):
    """Notes whether Python's cycle collector is on, and fails the second time."""

    stage = "joint"

    def __init__(self):
        self.found = []

    def run(self, graph, compilation):
        self.found.append(gc.isenabled())
        if len(self.found) > 1:
            raise LookupError


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager"])
def test_no_cycles_are_collected_during_a_compile(compiler):
    seen = Collects()
    run = torch.compile(lambda x: x.exp(), backend=backend(compiler, [seen]))
    run(torch.ones(3))
    assert (seen.found, gc.isenabled()) == ([False], True)
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="LookupError"):
        run(torch.ones(3))
    assert (seen.found, gc.isenabled()) == ([False, False], True)


class SavesAroundACollective(GraphPass):
    """Saves the input of an all-reduce and what is computed from it, but not the result."""

    stage = "joint"

    def run(self, graph, compilation):
        # Backward has products and an all-reduce of its own, after forward's.
        nodes = {n.target: n for n in reversed(graph.nodes) if n.op == "call_function"}
        for target in (torch.ops.aten.mm.default, torch.ops.aten.exp.default):
            mark_save(nodes[target])
        for target in (c10d.all_reduce.default, c10d.wait_tensor.default):
            mark_recompute(nodes[target])


def test_backward_repeats_no_collective_for_nobody(fake_world):
    def forward(x, w):
        return all_reduce(x @ w, "sum", torch.distributed.group.WORLD.group_name).exp()

    graphs = Keep()
    compiled = torch.compile(forward, backend=backend(graphs, [SavesAroundACollective()]))
    x, w = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    compiled(x, w).sum().backward()
    waits = [
        len(graphs[stage].graph.find_nodes(op="call_function", target=c10d.wait_tensor.default))
        for stage in ("forward", "backward")
    ]
    assert waits == [1, 1]  # of the gradient backward has one of its own
    assert "mm" not in [n.name for n in graphs["backward"].graph.find_nodes(op="placeholder")]
