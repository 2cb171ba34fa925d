"""Wrong arguments and models are refused when they are given, with what is accepted."""

import inspect

import pytest
import torch
import torch.distributed as dist
from sharded_models import TwoBlocks, eager_fsdp2, step
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing import fsdp
from torch_ext_bucketing.errors import NotBucketedWarning
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.fsdp import fully_shard

TOKENS = torch.zeros(2, 3, dtype=torch.long)


def on_meta():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = TwoBlocks()
    return fully_shard(model, mesh=mesh), TOKENS


def test_explain_plans_a_model_on_the_meta_device():
    graphs = explain(f"{__name__}:on_meta").report.graphs
    assert [len(graph.buckets) for graph in graphs] == [1, 1]


@pytest.fixture
def model(fake_world, fresh_dynamo):
    return fully_shard(TwoBlocks(), mesh=init_device_mesh("cpu", (fake_world,)))


class Odd:
    """A value that no argument accepts."""

    def __repr__(self):
        return "<odd>"


# Other arguments of a call, without which it would refuse the odd one for another reason. None
# stands for a mesh, a model and the like, which a test makes.
PUBLIC = [
    (teb.BucketAndSchedule, {"policies": teb.Overlap()}),
    (teb.BucketByCap, {}),
    (teb.BucketByUnit, {"units": [["weight"]]}),
    (teb.FSDPParamOrder, {"units": (("weight",),)}),
    (teb.FixedOrderReduce, {}),
    (teb.Machine, {}),
    (teb.MatchFSDP2, {"model": None, "units": ["layers.0"]}),
    (teb.MaxComputeRun, {}),
    (teb.Overlap, {}),
    (teb.PeakMemory, {"gib": 1}),
    (teb.ReshardAfterForward, {"reshard_after_forward": "auto", "memory": teb.PeakMemory(gib=1)}),
    (teb.Schedule, {"policies": teb.Overlap()}),
    (teb.SeparateGroups, {"mesh": None}),
    (teb.backend, {}),
    (teb.data_parallel, {"model": None, "mesh": None}),
    (teb.recipe, {"model": None}),
    (teb.train_step, {"model": None, "optimizer": None, "loss": lambda m, x: m(x).sum()}),
    (teb.transformer_block_plan, {"model": None}),
    (teb.tune, {"model": None}),
    (fsdp.AllToAllAllReduce, {"group": None}),
    (fsdp.AllToAllReduceScatter, {}),
    (fsdp.ReduceOnce, {"model": None}),
    (fsdp.fully_shard, {"module": None, "mesh": None}),
    (fsdp.manual_plan, {"modules": ["layers.0"], "model": None}),
]


def test_every_public_call_is_walked():
    public = {getattr(teb, name) for name in teb.__all__} | {getattr(fsdp, n) for n in fsdp.__all__}
    ours = {o for o in public if callable(o) and o.__module__.startswith(teb.__name__)}
    walked = {call for call, _ in PUBLIC}
    assert {o.__name__ for o in ours - walked} == {"FSDPModule", "GraphPass"}, "no arguments"


@pytest.mark.parametrize(("call", "given"), PUBLIC, ids=[call.__name__ for call, _ in PUBLIC])
def test_each_argument_of_a_public_call_is_checked(model, call, given):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fits = {"mesh": mesh, "group": mesh.get_group(), "module": TwoBlocks(), "optimizer": sgd(model)}
    fits["model"] = TwoBlocks() if call is teb.data_parallel else model
    fitting = {name: fits[name] if value is None else value for name, value in given.items()}
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        with pytest.raises((TypeError, ValueError)) as refused:
            call(**{**fitting, name: Odd()})
        assert name in str(refused.value) or "<odd>" in str(refused.value), name


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"backend": "inductor"}, TypeError, "no backend=.*compiler=.*prefetch=, agree="),
        ({"compiler": "inductr"}, ValueError, "'aot_eager', 'inductor' or a callable.*'inductr'"),
        ({"prefetch": -1}, ValueError, "prefetch must be a whole number"),
        ({"size_hints": "many"}, (TypeError, ValueError), "size_hints"),
    ],
)
def test_options_of_a_step_are_checked_at_once(model, given, error, match):
    with pytest.raises(error, match=match):
        teb.train_step(model, sgd(model), lambda m, x: m(x).sum(), **given)


def test_a_bound_refuses_an_optimizer_of_other_parameters(model):
    before = sgd(TwoBlocks())
    with pytest.raises(ValueError, match=r"10 parameter\(s\).*after sharding the model"):
        teb.recipe(model, memory=teb.PeakMemory(gib=1), optimizer=before)


@pytest.mark.parametrize("sharding", ["none", "eager"])
@pytest.mark.parametrize("bucketing", [teb.BucketByCap(8), teb.Schedule(teb.Overlap())])
def test_a_graph_without_collectives_is_a_warning(fake_world, fresh_dynamo, sharding, bucketing):
    model = TwoBlocks()
    if sharding == "eager":
        eager_fsdp2(model, ["layers.0", "layers.1", ""], init_device_mesh("cpu", (fake_world,)))
    b = teb.backend("aot_eager", [bucketing], model=model)
    with pytest.warns(NotBucketedWarning, match="torch_ext_bucketing.fsdp.fully_shard"):
        step(torch.compile(model, backend=b), TOKENS)
