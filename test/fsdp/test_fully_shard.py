"""``fully_shard``: FSDP2's calls, compiled."""

import re

import pytest
import torch
import torch.nn as nn
from fully_shard_programs import run_drawn
from marks import at_night
from rank_pool import on_ranks
from sharded_models import TwoBlocks, step
from torch.distributed import fsdp as eager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.fsdp2 import FSDPParamGroup
from torch_ext_bucketing.errors import NotBucketedWarning
from torch_ext_bucketing.fsdp import FSDPModule, fully_shard
from torch_ext_bucketing.fsdp.gather import Reduction
from torch_ext_bucketing.fsdp.modules import param_groups

pytestmark = pytest.mark.torch

BF16, FP32 = torch.bfloat16, torch.float32
HALF = MixedPrecisionPolicy(BF16, FP32)
TOKENS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "programs", "tensor"),
    [
        (4, 2, 1),
        (4, 4, 2),
        at_night(2, 100, 1),
        at_night(4, 60, 1),
        at_night(4, 40, 2),
    ],
)
def test_bits_of_any_program_are_those_of_eager_fsdp2(ranks, programs, tensor):
    given = (programs, programs, tensor)
    outcomes = on_ranks(run_drawn, *given, world=ranks, timeout_s=60 * programs)[0]
    assert outcomes["equal"] > programs / 3, outcomes
    # What eager FSDP2 can and we can't is refused with its reason. Before 2.12, eager FSDP2 shards
    # what units share twice.
    reasons = ("one step reshards to groups of one size", "is shared with another unit")
    refused = [what for what in outcomes if what.startswith("ours")]
    assert all(any(why in what for why in reasons) for what in refused), outcomes


def shard(fully_shard, mesh, model=None):
    """Shard a model as trainers do, in units of different settings."""
    model = model or TwoBlocks()
    first, second = model.layers
    fully_shard(first, mesh=mesh, mp_policy=HALF, ignored_params={first.scale})
    fully_shard(second, mesh=mesh, mp_policy=HALF, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=HALF)
    return model


@pytest.fixture
def mesh(fake_world, fresh_dynamo):
    return init_device_mesh("cpu", (fake_world,))


def test_a_recipe_reads_everything_from_the_model(mesh):
    ours = shard(fully_shard, mesh)
    passes = teb.recipe(ours)  # no warning for what the calls were to ignore
    assert passes[0].units.units == (("layers.0",), ("layers.1",), ("",))
    assert passes[1].keep == (*(f"layers.1.{n}" for n in NAMES), "embedding.weight", "head.weight")
    assert passes[2].units == teb.FSDPParamOrder.from_fsdp(shard(eager.fully_shard, mesh))
    b = teb.backend("aot_eager", passes, model=ours)
    step(torch.compile(ours, backend=b, fullgraph=True), TOKENS)
    report = b.last_report()
    assert report.collectives_before["all_gather"] == 9 + 2  # backward reads weights of layers.0
    assert report.collectives_after == {"all_gather": 4, "reduce_scatter": 3}


NAMES = ("w1.weight", "w1.bias", "w2.weight", "scale")


def test_what_nobody_ignored_and_nothing_sharded_is_a_warning(mesh):
    model = TwoBlocks()
    fully_shard(model.layers[0], mesh=mesh)
    with pytest.warns(NotBucketedWarning, match=r"6 parameter\(s\).*embedding.weight"):
        teb.recipe(model)


@pytest.mark.parametrize("reshard", [True, False])
def test_blocks_compiled_alone_are_gathered_when_eager_fsdp2_does(mesh, monkeypatch, reshard):
    calls = []

    def note(name):
        run = getattr(FSDPParamGroup, name)

        def noted(group, *args, **kwargs):
            calls.append((name, group._module_fqn))
            return run(group, *args, **kwargs)

        monkeypatch.setattr(FSDPParamGroup, name, noted)

    for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
        note(name)

    def calls_of(fully_shard):
        model = TwoBlocks()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        for layer in model.layers if fully_shard is not eager.fully_shard else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        for _ in range(2):
            step(model, TOKENS)
        made = list(calls)
        calls.clear()
        return made

    theirs, ours = calls_of(eager.fully_shard), calls_of(fully_shard)
    assert ours == theirs
    # Backward gathers a block while the one after it computes.
    in_backward = theirs[: theirs.index(("post_backward", "layers.1"))]
    assert in_backward.count(("unshard", "layers.0")) == 2


@pytest.mark.parametrize("mode", [None, True, False, 2])
def test_a_root_keeps_its_parameters_unless_told_otherwise(mesh, mode):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=mesh, reshard_after_forward=mode)
    fully_shard(model, mesh=mesh, reshard_after_forward=mode)
    kept = {None: ["1.weight", "1.bias"], False: ["0.weight", "0.bias", "1.weight", "1.bias"]}
    found = teb.recipe(model)[1]
    assert list(found.keep) == kept.get(mode, [])
    assert found.reshard_after_forward == (mode or True)


def test_initialization_in_place_stays(mesh):
    with torch.device("meta"):
        model = TwoBlocks()
    shard(fully_shard, mesh, model)
    teb.recipe(model)
    model.to_empty(device="cpu")
    linear = model.layers[0].w1
    nn.init.constant_(linear.weight, 3.0)
    nn.init.constant_(linear.bias, 2.0)
    for _ in range(2):  # and after it
        assert isinstance(linear.weight, DTensor)
        assert linear.weight is dict(model.named_parameters())["layers.0.w1.weight"]
        assert linear.weight.to_local().eq(3).all()
        with torch.no_grad():
            torch.compile(model, backend="eager", fullgraph=True)(TOKENS)


def test_every_method_of_fsdp2_has_an_answer(mesh):
    model = shard(fully_shard, mesh)
    assert isinstance(model, FSDPModule)
    theirs = {n for n in vars(eager.FSDPModule) if not n.startswith("_")}
    assert not {n for n in theirs if not hasattr(FSDPModule, n)}
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(False)
    model.set_modules_to_forward_prefetch([model.layers[0]])
    model.unshard(async_op=True).wait()
    model.reshard()
    model.set_reshard_after_forward(True)
    assert teb.recipe(model)[1].keep == ()


@pytest.mark.parametrize(
    ("call", "way"),
    [
        (lambda m: m.set_requires_gradient_sync(False), "ReduceOnce"),
        (lambda m: m.set_requires_all_reduce(False), "scatter_each=True"),
        (lambda m: m.set_reshard_after_backward(False), "gather_once=True"),
        (lambda m: m.set_reduce_scatter_unused_params(True), r"0 \* parameter.sum"),
        (lambda m: m.set_custom_all_gather(lambda *_: None), "GraphPass"),
        (lambda m: m.set_custom_reduce_scatter(lambda *_: None), "all_to_all"),
        (lambda m: m.set_all_reduce_hook(lambda _: None), "2-D mesh"),
        (lambda m: m.set_gradient_divide_factor(3), "set_force_sum_reduction_for_comms"),
        (lambda m: (teb.recipe(m), m.set_reshard_after_forward(True)), "before recipe"),
    ],
)
def test_what_a_compiled_step_cannot_do_names_the_way(mesh, call, way):
    errors = (NotImplementedError, RuntimeError)
    model = fully_shard(linear(), mesh=mesh)
    with pytest.raises(errors, match=way):  # FSDP2 can, and the recipe refuses
        teb.recipe(call(model) or model)
    model = fully_shard(linear(), mesh=mesh)
    run = torch.compile(model, backend="eager", fullgraph=True)
    run(torch.zeros(2, 8)).sum().backward()
    with pytest.raises(errors, match=way):  # a traced step refuses the call
        call(model)
    run(torch.zeros(2, 8)).sum().backward()


def test_a_step_that_is_traced_refuses_what_fsdp2_offloads(mesh):
    model = fully_shard(linear(), mesh=mesh, offload_policy=CPUOffloadPolicy(False))
    with pytest.raises(NotImplementedError, match="host_gib"):
        teb.recipe(model)
    with pytest.raises(RuntimeError, match="host_gib"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("factor", [None, 1.0, 4.0, 6.0])
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_gradients_are_divided_as_by_eager_fsdp2(mesh, dtype, factor, sums, replicas):
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    class Group:
        def __init__(self, ranks):
            self.size = lambda: ranks

    if factor == 6.0 and dtype in (FP32, BF16) and not sums:
        return  # refused, see above
    groups = Group(4), None if replicas == 1 else Group(replicas)
    theirs = _get_gradient_divide_factors(groups[0], groups[1], dtype, "cpu", factor, sums)
    reduction = Reduction(None, None, 4, None, 4 * replicas, 0, 4, factor, sums)
    before, op, replica_op, after = reduction._division(dtype)
    assert (before, after) == (theirs[0] or 1, theirs[1] or 1)
    names = [str(found).lower().rpartition(".")[2] for found in theirs[2:]]
    # Multiplying by 1 before the sum changes nothing.
    ops = [name if name in ("avg", "sum") else "sum" for name in names]
    assert [op, replica_op][: 1 + (replicas > 1)] == ops[: 1 + (replicas > 1)]


def linear(*shape):
    return nn.Linear(*(shape or (8, 8)))


def _inside(mesh):
    model = nn.Sequential(linear())
    fully_shard(model, mesh=mesh)
    fully_shard(model[0], mesh=mesh)


# ``fsdp2_suite`` has calls that eager FSDP2 refuses, too, ``test_arguments`` what is of another type.
BAD = [
    (lambda m: fully_shard([], mesh=m), ValueError, "list of modules is empty"),
    (
        lambda m: fully_shard(linear(), mesh=m, shard_placement_fn=lambda p: Shard(2)),
        AssertionError,
        r"Shard dim 2 is invalid",
    ),
    (
        lambda m: fully_shard(linear(), mesh=m, mp_policy=MixedPrecisionPolicy("bf16")),
        TypeError,
        "mp_policy.param_dtype must be a dtype or None, got 'bf16'",
    ),
    (_inside, ValueError, "weight of a Linear has a unit already.*inner modules first"),
    (
        lambda m: fully_shard(eager.fully_shard(linear(), mesh=m), mesh=m),
        AssertionError,
        "was given to fully_shard.. before",
    ),
    (
        lambda m: teb.recipe(shard(fully_shard, m), units=[""]),
        ValueError,
        r"fully_shard\(\) gave this one its",
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), BAD)
def test_wrong_calls_are_refused_by_name(mesh, call, error, match):
    with pytest.raises(error, match=match):
        call(mesh)


def test_different_sizes_of_smaller_groups_are_refused(mesh):
    model = nn.Sequential(linear(), linear())
    fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    with pytest.raises(ValueError, match=r"reshards to groups of one size.*2 for 0.weight"):
        teb.recipe(model)


def test_a_copy_follows_the_reference(mesh):
    reference = shard(eager.fully_shard, mesh)
    copy = shard(fully_shard, mesh)
    passes = teb.recipe(copy, reference=reference)
    assert repr(passes) == repr(teb.recipe(copy))


def _whole(mesh, **policy):
    reference = nn.Sequential(linear(), linear())
    inner = MixedPrecisionPolicy(**{**policy, "output_dtype": None})
    eager.fully_shard(reference[0], mesh=mesh, mp_policy=inner)
    return eager.fully_shard(reference, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def test_a_copy_casts_as_the_reference_does(mesh):
    reference = _whole(mesh, param_dtype=BF16, reduce_dtype=BF16, output_dtype=FP32)
    copy = nn.Sequential(linear(), linear())
    teb.data_parallel(copy, mesh, param_dtype=BF16, reduce_dtype=BF16)
    hooks = len(copy._forward_hooks)
    for _ in range(2):  # a second recipe adds no hooks
        passes = teb.recipe(copy, reference=reference)
    assert passes[1].keep == ("1.weight", "1.bias")
    assert copy(torch.zeros(2, 8)).dtype is FP32
    assert len(copy._forward_hooks) == hooks + 1


def _custom(mesh):
    reference = _whole(mesh)
    reference.set_all_reduce_hook(lambda grad: grad)
    return reference


def _ignoring(mesh):
    reference = nn.Sequential(linear(), linear())
    return eager.fully_shard(reference, mesh=mesh, ignored_params={reference[1].weight})


def _on_columns(mesh):
    place = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    return eager.fully_shard(nn.Sequential(linear(), linear()), mesh=mesh, **place)


def _offloaded(mesh):
    reference = nn.Sequential(linear(), linear())
    return eager.fully_shard(reference, mesh=mesh, offload_policy=CPUOffloadPolicy(False))


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (_on_columns, "0.weight: dim is 0, in the reference 1"),
        (_ignoring, "1.weight is sharded, and the reference leaves it alone"),
        (_custom, r"set_all_reduce_hook\(<lambda>\) on unit ''"),
        (_offloaded, "CPUOffloadPolicy"),
        (lambda m: _whole(m, param_dtype=BF16), "gathered is torch.float32, in the reference"),
        (
            lambda m: _whole(m, reduce_dtype=BF16),
            r"0.weight: reduced is .*in the reference torch.bfloat16",
        ),
    ],
)
def test_a_copy_that_differs_from_the_reference_is_refused(mesh, made, match):
    copy = teb.data_parallel(nn.Sequential(linear(), linear()), mesh)
    with pytest.raises(ValueError, match=match):
        teb.recipe(copy, reference=made(mesh))


def test_units_of_the_copy_are_compared_with_those_of_the_reference(mesh):
    copy = fully_shard(nn.Sequential(linear(), linear()), mesh=mesh)
    with pytest.raises(ValueError, match=re.escape("no unit like the reference's unit '0'")):
        teb.recipe(copy, reference=_whole(mesh))


@pytest.mark.skipif(not hasattr(HALF, "param_dtype_override_fn"), reason="since torch 2.15")
def test_a_policy_may_keep_the_dtype_of_single_parameters(mesh):
    keep = MixedPrecisionPolicy(
        BF16, param_dtype_override_fn=lambda p: FP32 if p.ndim == 1 else None
    )
    groups = []
    for each in (fully_shard, eager.fully_shard):
        model = each(linear(), mesh=mesh, mp_policy=keep)
        groups.append([sent.gathered for g in param_groups(model) for sent in g.sent])
    assert groups == [[BF16, FP32]] * 2
