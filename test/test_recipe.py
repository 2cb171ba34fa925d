"""``recipe``: lists of passes to start from. ``test_parity`` trains with them on ranks."""

import pytest
import torch
from collective_graphs import fake_group
from marks import at_night
from sharded_models import (
    Lean,
    TwoBlocks,
    eager_fsdp2,
    mesh_for,
    small_transformer,
    step,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_ext_bucketing as teb
from torch_ext_bucketing.errors import GuessedNamesWarning
from torch_ext_bucketing.fsdp.plans import manual_plan
from torch_ext_bucketing.fsdp.units import abbreviated
from torch_ext_bucketing.planner.step_memory import check_bound

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]


def wrapped(mesh):
    """Shard with eager FSDP2 as trainers do: embedding, each block, norm with head, then the root."""
    model = small_transformer()
    return eager_fsdp2(model, [*teb.transformer_block_plan(model), ""], mesh)


def sharded(mode="fully_shard", model=None):
    return teb.data_parallel(model or small_transformer(), mesh_for(mode), mode)


UNITS = "fsdp.manual_plan(['embed', 'blocks.[0-1]', 'norm+output'], model)"
ORDER = f"FSDPParamOrder.from_model(model, units={UNITS})"
MATCH = f"MatchFSDP2(model, {UNITS})"
KEEP = "ReshardAfterForward(keep=['norm', 'output'])"
BOUNDS = "[Overlap(), PeakMemory(ratio=1.02)]"
ALL, ONE = "kinds=['all_gather', 'reduce_scatter', 'all_reduce']", "kinds=['all_reduce']"
RESHARD = "ReshardAfterForward()"


@pytest.mark.parametrize(
    ("mode", "goal", "code"),
    [
        (
            "fully_shard",
            "parity",
            f"{MATCH}, {KEEP}, BucketByUnit({ORDER}), Schedule([Overlap()])",
        ),
        (
            "hybrid_shard",
            "parity",
            f"{MATCH}, {KEEP}, BucketByUnit({ORDER}, {ALL}), Schedule([Overlap()])",
        ),
        (
            "replicate",
            "parity",
            f"{MATCH}, BucketByUnit({ORDER}, {ONE}), Schedule([Overlap()])",
        ),
        ("fully_shard", "speed", f"MatchFSDP2(), {RESHARD}, BucketAndSchedule({BOUNDS})"),
        ("hybrid_shard", "speed", f"MatchFSDP2(), {RESHARD}, BucketAndSchedule({BOUNDS}, {ALL})"),
        ("replicate", "speed", f"MatchFSDP2(), BucketAndSchedule({BOUNDS}, {ONE})"),
    ],
)
def test_a_recipe_reads_as_the_code_that_makes_it(fake_world, mode, goal, code):
    model = sharded(mode)
    passes = teb.recipe(model, goal)
    assert type(passes) is list
    assert repr(passes) == f"[{code}]"
    again = eval(
        f"[{code}]",
        {**{name: getattr(teb, name) for name in teb.__all__}, "model": model, "fsdp": teb.fsdp},
    )
    assert [p.uuid() for p in again] == [p.uuid() for p in passes]


def test_without_a_goal_it_is_parity(fake_world):
    model = sharded()
    assert repr(teb.recipe(model)) == repr(teb.recipe(model, "parity"))


@pytest.mark.parametrize(
    ("mode", "goal"),
    [
        ("hybrid_shard", "speed"),
        ("replicate", "parity"),
        at_night("fully_shard", "parity"),
        at_night("fully_shard", "speed"),
        at_night("hybrid_shard", "parity"),
        at_night("replicate", "speed"),
    ],
)
@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.BoundNotKeptWarning")
def test_every_kind_of_a_mode_is_bucketed(fake_world, mode, goal):
    model = sharded(mode, TwoBlocks())
    b = teb.backend("aot_eager", passes=teb.recipe(model, goal))
    step(torch.compile(model, backend=b), torch.zeros(2, 3, dtype=torch.long))
    report = b.last_report()
    assert (
        set(report.collectives_before)
        == {
            "fully_shard": {"all_gather", "reduce_scatter"},
            "hybrid_shard": {"all_gather", "reduce_scatter", "all_reduce"},
            "replicate": {"all_reduce"},
        }[mode]
    )
    for kind, before in report.collectives_before.items():
        assert report.collectives_after[kind] < before / 2
    assert len(report.schedules) == len(report.graphs) == 2


def test_what_tensor_parallelism_replicates_is_no_replica(fake_world):
    """Under FSDP and TP, a norm's all-reduce adds partial gradients before the reduce-scatter."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.LayerNorm(4))
    placed = {"0.weight": Shard(1), "1.weight": Replicate(), "1.bias": Replicate()}
    for name, inner in placed.items():
        module, leaf = name.split(".")
        whole = getattr(model[int(module)], leaf)
        distributed = distribute_tensor(whole.detach(), mesh, [Shard(0), inner])
        model[int(module)].register_parameter(leaf, torch.nn.Parameter(distributed))
    for p in teb.recipe(model, units=["0", "1"]):
        assert "all_reduce" not in getattr(p, "kinds", ())


def test_the_units_may_be_given(fake_world):
    model = sharded()
    passes = teb.recipe(model, units=["blocks.0", "blocks.1", ""])
    assert passes[2].units.units[-1] == ("embed.weight", "norm.weight", "output.weight")
    # Not "", which names every parameter of the model.
    assert passes[1].keep == ("blocks.1", *passes[2].units.units[-1])
    assert "units=fsdp.manual_plan(['blocks.[0-1]', ''], model)" in repr(passes)


def test_a_reference_gives_units_and_order(fake_world):
    reference = wrapped(mesh_for("fully_shard"))
    passes = teb.recipe(sharded(), reference=reference)
    assert passes[2].units == teb.FSDPParamOrder.from_fsdp(reference)
    assert "BucketByUnit(FSDPParamOrder.from_fsdp(model))" in repr(passes)


def flat(mesh, rows=4):
    return teb.data_parallel(torch.nn.Sequential(torch.nn.Linear(rows, rows)), mesh)


BAD = {
    TypeError: {"give a torch.nn.Module or a list of them, got 3": lambda mesh: teb.recipe(3)},
    ValueError: {
        r"not sharded.*data_parallel\(model": lambda mesh: teb.recipe(small_transformer()),
        r"no repeated blocks.*units=\[\.\.\.\]": lambda mesh: teb.recipe(flat(mesh)),
        r"fully_shard\(\).*reference=model": lambda mesh: teb.recipe(wrapped(mesh)),
        "'parity' or 'speed', got 'fast'": lambda mesh: teb.recipe(flat(mesh), "fast"),
        'belong to goal "p': lambda mesh: teb.recipe(flat(mesh), "speed", units=[""]),
        "not both": lambda mesh: teb.recipe(flat(mesh), units=[""], reference=wrapped(mesh)),
        "parameters that the model has not: embed.weight": (
            lambda mesh: teb.recipe(flat(mesh), reference=wrapped(mesh))
        ),
        r"before any activation, .* of parameters, .* of gradients, .* of optimizer state": (
            lambda mesh: teb.recipe(sharded(), memory=teb.PeakMemory(gib=1e-6))
        ),
        "belong to memory=": lambda mesh: teb.recipe(sharded(), state_bytes_per_parameter=4),
    },
}


@pytest.mark.parametrize(
    ("error", "match"), [(error, match) for error, calls in BAD.items() for match in calls]
)
def test_bad_arguments(fake_world, error, match):
    with pytest.raises(error, match=match):
        BAD[error][match](init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize("goal", ["parity", "speed"])
def test_one_bound_for_the_memory_of_a_step(fake_world, goal):
    """The bound includes the optimizer's state, given by size, optimizer or default."""
    model, memory = sharded(), teb.PeakMemory(gib=40)
    elements = sum(p.to_local().numel() for p in model.parameters())
    adam = torch.optim.AdamW(model.parameters())
    momentum = torch.optim.SGD(model.parameters(), momentum=0.9)
    for given, each in (
        ({}, 8),
        ({"state_bytes_per_parameter": 6}, 6),
        ({"optimizer": adam}, 8),
        ({"optimizer": momentum}, 4),
        ({"optimizer": torch.optim.SGD(model.parameters())}, 0),
    ):
        passes = teb.recipe(model, goal, memory=memory, **given)
        (reshard,) = (p for p in passes if isinstance(p, teb.ReshardAfterForward))
        assert (reshard.auto, reshard.memory, reshard.activations) == (True, memory, True)
        assert reshard.state_bytes == each * elements
        assert "PeakMemory(ratio=1.02)" not in repr(passes)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    adam.step()  # which creates its state
    assert teb.recipe(model, memory=memory, optimizer=adam)[1].state_bytes == 8 * elements


@pytest.mark.parametrize("stepped", [False, True])
def test_the_bound_leaves_ranks_with_uneven_shards_the_same(stepped):
    """Ranks compare what they chose, and under how many bytes."""
    found = []
    for rank in (0, 3):
        with fake_group(4, rank):
            model = flat(init_device_mesh("cpu", (4,)), 6)
            adam = torch.optim.AdamW(model.parameters())
            if stepped:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
                adam.step()  # which creates its state
            memory = teb.PeakMemory(gib=1)
            numel = sum(p.to_local().numel() for p in model.parameters())
            given = ({}, {"optimizer": adam}, {"state_bytes_per_parameter": 2})
            lists = [teb.recipe(model, "speed", memory=memory, **options) for options in given]
            found.append(([p[1].state_bytes for p in lists], check_bound(model, memory, 0)))
            assert numel == (14 if rank == 0 else 0)
    assert found == [([8 * 14, 8 * 14, 2 * 14], 2**30 - 2 * 4 * 14)] * 2


def test_speed_needs_no_blocks(fake_world):
    assert len(teb.recipe(flat(init_device_mesh("cpu", (4,))), "speed")) == 3


@pytest.mark.parametrize(
    ("units", "short"),
    [
        ([["a"], ["l.0"], ["l.1"], ["l.2"], ["n", "h"]], ["a", "l.[0-2]", "n+h"]),
        ([["l.0.x"], ["l.0"], ["l.1.x"], ["l.1"]], ["l.0.x", "l.0", "l.1.x", "l.1"]),
        ([["l.0.x"], ["l.1.x"], ["l.3.x"]], ["l.[0-1].x", "l.3.x"]),
        ([["l.1"], ["l.0"], ["m.1"]], ["l.1", "l.0", "m.1"]),
        ([["0"], ["1"], [""]], ["[0-1]", ""]),
        ([["l.00"], ["l.01"]], ["l.00", "l.01"]),
        ([["x2.9"], ["x2.10"]], ["x2.[9-10]"]),
    ],
)
def test_units_are_abbreviated_as_manual_plan_reads_them(units, short):
    assert abbreviated(units) == short

    model = torch.nn.Module()
    for name in (n for unit in units for n in unit if n):
        at = model
        for part in name.split("."):
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.weight = torch.nn.Parameter(torch.zeros(1))
    model.weight = torch.nn.Parameter(torch.zeros(1))
    assert [list(unit) for unit in manual_plan(short, model)] == units


def _decorated(model):
    """Give a model a decorated ``forward``, as transformers do."""
    inner = type(model).forward

    def forward(*args, **kwargs):
        return inner(*args, **kwargs)

    model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
    return model


class _Around(torch.nn.Module):
    """A module with a model and a parameter of its own, compiled by its method."""

    def __init__(self, net):
        super().__init__()
        self.head, self.net = torch.nn.Linear(12, 12, bias=False), net

    def training_step(self, x):
        return self.head(self.net(x))


def _frames():
    """Name the ways to compile a model or code around it: ``way(model, backend)`` runs a step."""

    def model(model, b):
        return torch.compile(model, backend=b)(TOKENS)

    def by_keyword(model, b):
        return torch.compile(model, backend=b)(tokens=TOKENS)

    def in_place(model, b):
        model.compile(backend=b)
        return model(TOKENS)

    def decorated(model, b):
        return torch.compile(_decorated(model), backend=b)(TOKENS)

    def decorated_in_place(model, b):
        _decorated(model).compile(backend=b)
        return model(TOKENS)

    def closure(model, b):
        return torch.compile(lambda x: model(x), backend=b)(TOKENS)

    def argument(model, b):
        return torch.compile(lambda models, x: models[0](x), backend=b)([model], TOKENS)

    def sequential(model, b):
        return torch.compile(torch.nn.Sequential(model), backend=b)(TOKENS)

    def method(model, b):
        class Trainer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.net = model

            def training_step(self, x):
                return self.net(x)

        return torch.compile(Trainer().training_step, backend=b)(TOKENS)

    def each_block(model, b):
        for layer in model.layers:
            layer.compile(backend=b)
        return model(TOKENS)

    by_day = (decorated, method, each_block)
    ways = [v for k, v in locals().items() if k != "by_day"]
    return [w if w in by_day else at_night(w) for w in ways]


TOKENS = torch.zeros(2, 4, dtype=torch.int64)
NAMES = [name for name, _ in Lean().named_parameters()]


@pytest.mark.parametrize("way", _frames(), ids=lambda way: way.__name__)
def test_names_are_the_model_s_whatever_frame_is_compiled(fake_world, way):
    model = sharded(model=Lean())
    backend = teb.backend("aot_eager", teb.recipe(model, "speed"))
    teb.recipe(_Around(model).net.layers[0], "speed")  # a newer one, of a part of it
    way(model, backend).sum().backward()
    expected = set(NAMES)
    if way.__name__ == "each_block":
        # Dynamo compiles the code of equal blocks once, and the first one's names stay.
        expected = {name for name in expected if name.startswith("layers.0.")}
    assert _named(backend) == expected


def _named(backend):
    """Return the parameters in buckets; check that nothing was warned of."""
    assert not [w for report in backend.reports for w in report.warnings]
    buckets = [bucket for report in backend.reports for bucket in report.buckets]
    return {fqn for bucket in buckets for member in bucket.members for fqn in member.fqns}


def test_names_of_other_parameters_are_guesses(fake_world):
    """Parameters outside the model of the recipe have names, but a warning names them."""
    model = sharded(model=Lean())
    around = _Around(model)
    sharded(model=around.head)
    backend = teb.backend("aot_eager", teb.recipe(model, "speed"), agree=False)
    with pytest.warns(GuessedNamesWarning, match=r"1 sharded parameter.*head.*Make the recipe for"):
        torch.compile(around.training_step, backend=backend)(TOKENS).sum().backward()


def test_a_recipe_of_an_equal_model_names_another_one(fake_world):
    passes = teb.recipe(sharded(model=Lean()), "speed")  # that model is gone
    backend = teb.backend("aot_eager", passes)
    compiled = torch.compile(_decorated(sharded(model=Lean())), backend=backend)
    compiled(TOKENS).sum().backward()
    assert _named(backend) == set(NAMES)


def test_a_recipe_s_cache_key_has_no_model(fake_world):
    """Two recipes of equal models have one key, and pickle."""
    keys = [
        [p.uuid() for p in teb.recipe(sharded(), "speed", memory=teb.PeakMemory(gib=1))]
        for _ in range(2)
    ]
    assert keys[0] == keys[1]
    assert all(keys[0])


# --- several models ------------------------------------------------------------------


def distillation(student, teacher, tokens):
    with torch.no_grad():
        target = teacher(tokens)
    return (student(tokens) - target).square().mean()


@pytest.mark.parametrize(
    ("calls", "frozen"),
    [
        (True, True),
        at_night(True, False),
        at_night(False, True),
    ],
)
def test_several_models_share_a_recipe(fake_world, calls, frozen):
    """The units of each are used, by their own names, whichever function compiles them together."""
    mesh = init_device_mesh("cpu", (4,))
    models = [Lean(), Lean()]
    for model in models:
        if calls:
            for unit in teb.transformer_block_plan(model):
                teb.fsdp.fully_shard([model.get_submodule(name) for name in unit], mesh=mesh)
            teb.fsdp.fully_shard(model, mesh=mesh)
        else:
            teb.data_parallel(model, mesh)
    student, teacher = models
    teacher.requires_grad_(not frozen)
    passes = teb.recipe(models)
    made = teb.backend("aot_eager", passes=passes)
    del model, models
    torch.compile(distillation, backend=made)(
        student, teacher, torch.zeros(2, 3, dtype=torch.long)
    ).backward()
    report = made.last_report()
    units = len(teb.transformer_block_plan(student).units)
    assert not report.warnings
    assert report.graph("forward").collectives_after == {"all_gather": 2 * units}
    assert report.graph("backward").collectives_after["reduce_scatter"] == units
    owners = {fqn[0] for bucket in report.buckets for m in bucket.members for fqn in m.fqns}
    assert owners == {"0", "1"}


def test_a_list_of_models_is_checked(fake_world):
    model = sharded()
    with pytest.raises(ValueError, match="each model once"):
        teb.recipe([model, model])
    with pytest.raises(TypeError, match="or a list of them, got"):
        teb.recipe([model, "teacher"])
    with pytest.raises(ValueError, match="reference= is one model's"):
        teb.recipe([model], reference=model)


@pytest.mark.parametrize("goal", ["parity", at_night("speed")])
def test_a_planned_step_of_several_models(fake_world, goal):
    """The optimizer's model is updated in the graph; the other one keeps its weights."""
    student, teacher = models = [sharded(model=Lean()) for _ in range(2)]
    teacher.requires_grad_(False)
    step = teb.train_step(
        models,
        torch.optim.AdamW(student.parameters(), lr=0.1),
        distillation,
        max_norm=1.0,
        passes=teb.recipe(models, goal),
        compiler="aot_eager",
    )
    before = [p.to_local().clone() for model in models for p in model.parameters()]
    step(torch.zeros(2, 3, dtype=torch.long))
    after = [p.to_local() for model in models for p in model.parameters()]
    count = len(before) // 2
    assert all(torch.equal(a, b) for a, b in zip(before[count:], after[count:], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[:count], after[:count], strict=True))
    assert step.total_norm is not None
