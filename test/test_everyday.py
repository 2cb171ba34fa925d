"""Everyday uses of a training step: what they change, and what is warned of.

``parity.py --rows 'everyday/*'`` compares their bits with eager FSDP2's.
"""

import warnings

import pytest
import torch
import torch.nn as nn
from marks import at_night
from sharded_models import Lean, TwoBlocks, mesh_for
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from torch_ext_bucketing._torch import inductor
from torch_ext_bucketing.errors import DividedUnitWarning, NotBucketedWarning
from torch_ext_bucketing.fsdp.gather import Unshard
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.fsdp.units import FSDPParamOrder
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.bucketing import BucketByUnit
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.planner.resharding import ReshardAfterForward
from torch_ext_bucketing.recipes import recipe

pytestmark = pytest.mark.long


def sharded(model):
    return data_parallel(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),)))


@pytest.mark.torch
def test_names_are_those_from_before(fake_world):
    model = TwoBlocks()
    model.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    model.listed = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4))])
    parameters = [n for n, _ in model.named_parameters()]
    state, modules = list(model.state_dict()), [n for n, _ in model.named_modules()]
    sharded(model)
    assert [n for n, _ in model.named_parameters()] == parameters
    assert list(model.state_dict()) == state
    assert [n for n, _ in model.named_modules()] == modules
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert isinstance(model.layers[0], type(TwoBlocks().layers[0]))
    for read in (model.head.weight, model.listed[1]):
        assert isinstance(read, DTensor)  # outside of forward


@pytest.mark.torch
def test_a_checkpoint_gathers_nothing(fake_world, monkeypatch):
    model = sharded(TwoBlocks())
    optimizer = torch.optim.AdamW(model.parameters())

    def gather(*_):
        raise AssertionError("gathered a parameter")

    monkeypatch.setattr(Unshard, "__call__", gather)
    with pytest.raises(AssertionError, match="gathered a parameter"):
        model(torch.zeros(2, 3, dtype=torch.long))
    of_model, of_optimizer = get_state_dict(model, optimizer)
    assert list(of_model) == [n for n, _ in TwoBlocks().named_parameters()]
    assert "layers.0.scale" in of_optimizer["state"]
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    model.load_state_dict(of_model)


@pytest.mark.torch
def test_modules_of_one_class_share_compiled_code(fake_world):
    """All blocks share one graph with the names of the first block."""
    model = sharded(TwoBlocks())
    assert type(model.layers[0]) is type(model.layers[1])
    b = backend("aot_eager", agree=False)
    for layer in reversed(model.layers):
        layer.compile(backend=b)
    model.layers[1](torch.randn(2, 8))
    model.layers[0](torch.randn(2, 8))
    assert len(b.reports) == 1


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([3.0]))

    def forward(self, full):
        assert not isinstance(full, DTensor)
        assert full.shape == (6, 4)
        return full * self.factor


@pytest.mark.torch
def test_parametrizations_get_the_gathered_parameter(fake_world):
    x = torch.randn(2, 4)
    plain = sharded(nn.Linear(4, 6))
    scaled = nn.Linear(4, 6)
    parametrize.register_parametrization(scaled, "weight", Scaled())
    sharded(scaled)
    out = scaled(x)
    (3 * out.sum()).backward()
    assert out.shape == (2, 6)
    assert sum(p.grad is not None for p in scaled.parameters()) == 3
    assert plain(x).shape == (2, 6)  # of the same class, and without a parametrization


def test_a_parameter_may_be_removed(fake_world):
    module = sharded(nn.Linear(4, 6))
    module.bias = None
    assert module.bias is None
    assert module(torch.randn(2, 4)).shape == (2, 6)
    del module.weight
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        _ = module.weight


class Broken(Lean):
    def forward(self, tokens):
        x = self.layers[0](self.embedding(tokens))
        torch._dynamo.graph_break()
        return self.head(self.layers[1](x))


def divided(model, units, lengths=(2, 3)):
    """Run steps of these lengths; return the warnings and the reports."""
    order = FSDPParamOrder.from_model(model, units)
    b = backend("aot_eager", [ReshardAfterForward(), BucketByUnit(order)], agree=False)
    run = torch.compile(sharded(model), backend=b, dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in lengths:
            run(torch.zeros(1, length, dtype=torch.long)).sum().backward()
            with torch.no_grad():
                run(torch.zeros(1, length, dtype=torch.long))
    assert len(b.reports) == len(lengths) * (4 if isinstance(model, Broken) else 2)
    return [w for w in caught if issubclass(w.category, DividedUnitWarning)], b.reports


@pytest.mark.torch
def test_a_unit_that_a_graph_break_divides_is_named(fake_world):
    given, reports = divided(Broken(), ["layers.0", "layers.1", ""])
    text = str(given[0].message)
    assert "of one unit's gradients" not in text
    assert "head.weight in an earlier one, embedding.weight in this one" in text
    assert "fullgraph=True" in text
    assert [sum(t == text for t in r.warnings) for r in reports[:2]] == [1, 0]
    assert all(sum("several graphs" in t for t in r.warnings) <= 1 for r in reports)


@pytest.mark.parametrize(
    ("model", "units"),
    [
        (Broken, ["embedding", "layers.0", "layers.1", "head"]),
        at_night(Lean, ["layers.0", ""]),
    ],
)
def test_units_that_no_graph_break_divides_get_no_warning(fake_world, model, units):
    assert divided(model(), units, lengths=(2,))[0] == []


APART = ("embedding", "layers.0", "layers.1", "head")
NESTED = ("embedding", "layers.0", "layers.1.w1", "layers.1", "head")
ROOTED = ("layers.0", "layers.1", "")


@pytest.mark.parametrize(
    ("units", "make", "expected"),
    [
        (ROOTED, "blocks", "embedding.weight, head.weight are in no compiled"),
        (APART, "blocks", ""),
        (NESTED, "blocks", "their units differ"),
        (NESTED, "backends", ""),
        (("embedding", "layers.0", "head"), "one block", "reduced their gradients twice"),
        (("embedding", "layers.0", "head"), "one block, whole", ""),
    ],
)
def test_what_only_running_shows_is_warned_of(fake_world, units, make, expected):
    """A warning appears once in three steps, and not where its advice is followed."""
    model = Lean()
    if make.startswith("one block"):
        model.layers[1] = model.layers[0]
    order = FSDPParamOrder.from_model(model, units)
    sharded(model)
    passes = [CombineUses(), ReshardAfterForward(), BucketByUnit(order)]
    backends = [backend("aot_eager", passes, agree=False) for _ in range(2)]
    run = model
    if make == "one block, whole":
        run = torch.compile(model, backend=backends[0])
    else:
        for layer, b in zip(model.layers, backends, strict=True):
            layer.compile(backend=b if make == "backends" else backends[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            run(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    given = [str(w.message) for w in caught if issubclass(w.category, DividedUnitWarning)]
    assert len(given) == bool(expected)
    assert expected in "".join(given)
    assert [
        t for b in backends for r in b.reports for t in r.warnings if "bit for bit" in t
    ] == given
    assert [len(b.reports) for b in backends] == [1, make == "backends"]


def tied():
    model = Lean()
    model.head.weight = model.embedding.weight
    return model


@pytest.mark.parametrize(
    ("make", "mode", "passes", "expected"),
    [
        (Lean, "hybrid_shard", "units", "6 all_reduce of the backward graph are not"),
        at_night(Lean, "hybrid_shard", "recipe", ""),
        (tied, "fully_shard", "units", "embedding.weight have several uses in one graph"),
        at_night(tied, "fully_shard", "recipe", ""),
        (Lean, "", "units", "no collective serves embedding.weight, "),
        (Lean, "half", "recipe", "2 parameter(s) of Lean are trained and not sharded"),
        (Lean, "replicate", "recipe", ""),
    ],
)
def test_what_a_list_of_passes_leaves_out_is_warned_of(fake_world, make, mode, passes, expected):
    torch._dynamo.reset()  # otherwise the cases exceed the recompile limit
    model, units = make(), ROOTED
    mesh = mesh_for(mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if mode == "half":
            data_parallel(model.layers, mesh)
        elif mode:
            data_parallel(model, mesh, mode)
        given = [ReshardAfterForward(), BucketByUnit(FSDPParamOrder.from_model(model, units))]
        if passes == "recipe":
            given = recipe(model, units=units)
        run = torch.compile(model, backend=backend("aot_eager", given, agree=False))
        tokens = torch.zeros(1, 2, dtype=torch.long)
        with torch.no_grad():
            run(tokens)  # where replicas have no collective
        run(tokens).sum().backward()
    said = [
        str(w.message)
        for w in caught
        if issubclass(w.category, (DividedUnitWarning, NotBucketedWarning))
    ]
    assert bool(said) == bool(expected)
    assert all(expected in text for text in said)


@pytest.mark.torch
def test_mode_reaches_inductor(fake_world, monkeypatch):
    seen = []

    def compile_fx(gm, example_inputs, config_patches, **options):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    compiled = torch.compile(
        nn.Linear(2, 2), backend=backend("inductor"), mode="max-autotune-no-cudagraphs"
    )
    compiled(torch.ones(1, 2))
    assert seen[0]["max_autotune"] is True
    with pytest.raises(RuntimeError, match="Unrecognized mode"):
        inductor.mode_options("fast")
    assert inductor.mode_options(None) == {}
