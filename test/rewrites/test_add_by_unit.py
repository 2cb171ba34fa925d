"""Gradients of activations that several units read are added as in eager FSDP2."""

import copy
import dataclasses
from collections import defaultdict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn as nn
from examples import by_night
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from marks import at_night
from sharded_models import eager_fsdp2
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.fsdp2 import WRAPS_DATACLASSES
from torch_ext_bucketing.fsdp import unit_inputs
from torch_ext_bucketing.fsdp.unit_inputs import register_input_nodes
from torch_ext_bucketing.passes.add_by_unit import AddByUnit
from torch_ext_bucketing.passes.pipeline import in_order

DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("fresh_dynamo")]


@dataclasses.dataclass
class Both:
    one: Any
    other: Any = None


Pair = namedtuple("Pair", "one other")


CONTAINERS = {
    "positional": lambda x: ((*x,), {}),
    "keywords": lambda x: ((x[0],), {f"k{i}": t for i, t in enumerate(x[1:])}),
    "list": lambda x: ((list(x),), {}),
    "dict": lambda x: ((), {"more": {"a": x[0], "b": tuple(x[1:])}}),
    "pair": lambda x: ((Pair(x[0], [x[1:], None]),), {}),
    "dataclass": lambda x: ((), {"both": Both(x[0], {"c": Both(x[1:])})}),
}


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Both):
        return leaves([value.one, value.other])
    if isinstance(value, dict):
        return leaves(list(value.values()))
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return []


class Unit(nn.Module):
    """Reads each of its inputs several times."""

    def __init__(self, inner: nn.Module | None = None):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.inner = inner

    def forward(self, *args, reads, **kwargs):
        tensors = leaves((args, kwargs))
        y = self.linear(tensors[0])
        for number in range(max(reads)):
            for tensor, times in zip(tensors, reads, strict=False):
                if number < times:
                    y = torch.tanh(y * tensor) + tensor
        if self.inner is not None:
            y = self.inner(tensors[-1], y, reads=(2, 1)) + self.inner(y, tensors[0], reads=(1, 2))
        return y, tensors[0]


@dataclasses.dataclass
class Call:
    unit: int
    inputs: list[int]
    reads: list[int]
    container: str
    passes: bool
    checkpointed: bool


class Program(nn.Module):
    """Calls units on earlier results; later units may read every result."""

    def __init__(self, calls: list[Call], units: int, nested: bool):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.units = nn.ModuleList(
            Unit(Inner() if nested and not i else None) for i in range(units)
        )
        self.calls = calls

    def forward(self, x):
        made = [self.first(x), self.second(x)]
        for call in self.calls:
            inputs = [made[i % len(made)] for i in call.inputs]
            if call.inputs[0] % 3 == 0:
                inputs.append(x)  # needs no gradient
            args, kwargs = CONTAINERS[call.container](inputs)
            unit = self.units[call.unit]
            if call.checkpointed:
                y, first = checkpoint(unit, *args, reads=call.reads, use_reentrant=False, **kwargs)
            else:
                y, first = unit(*args, reads=call.reads, **kwargs)
            made.append(y)
            if call.passes:
                made[call.inputs[0] % len(made[:-1])] = first
        return sum((torch.tanh(t).float().square().mean() for t in made), start=x.new_zeros(()))


class Inner(Unit):
    def forward(self, *args, reads):
        return super().forward(*args, reads=reads)[0]


def gradients(model, run, x):
    run(x).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    return {n: None if g is None else g.to_local().clone() for n, g in grads.items()}


def differing(one, other):
    def same(a, b):
        return a is b if a is None or b is None else torch.equal(a, b)

    return [name for name in one if not same(one[name], other[name])]


def both(model, units, x, starts=(0, 1), **options):
    """Compute gradients with eager FSDP2, and compiled with passes from each of ``starts`` on."""
    mesh = init_device_mesh("cpu", (1,))
    eager = eager_fsdp2(copy.deepcopy(model), units, mesh, **DTYPES)
    found = [gradients(eager, eager, x)]
    for start in starts:
        torch._dynamo.reset()
        compiled = teb.data_parallel(copy.deepcopy(model), mesh, **DTYPES)
        passes = in_order(teb.recipe(compiled, units=units))[1:]  # without TagParameters
        assert isinstance(passes[0], AddByUnit)
        backend = teb.backend("aot_eager", passes[start:])
        found.append(gradients(compiled, torch.compile(compiled, backend=backend, **options), x))
        if not start:
            report = backend.reports
    return *found, report


def inputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


@st.composite
def programs(draw):
    units = draw(st.integers(1, 3))
    containers = [c for c in CONTAINERS if WRAPS_DATACLASSES or c != "dataclass"]
    calls = []
    for _ in range(draw(st.integers(1, 4))):
        number = draw(st.integers(2, 4))
        calls.append(
            Call(
                draw(st.integers(0, units - 1)),
                draw(st.lists(st.integers(0, 7), min_size=number, max_size=number)),
                draw(st.lists(st.integers(1, 3), min_size=number, max_size=number)),
                draw(st.sampled_from(containers)),
                draw(st.booleans()),
                draw(st.booleans()),
            )
        )
    return calls, units, draw(st.booleans())


PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # an example takes seconds


@settings(max_examples=12 if by_night() else 2, phases=PHASES)
@given(programs(), st.integers(0, 1000))
def test_any_program_of_units(program, seed):
    torch.manual_seed(seed)
    model = Program(*program)
    nested = ["units.0.inner"] if program[2] else []
    units = [*nested, *(f"units.{i}" for i in range(program[1])), ""]
    eager, ours, _ = both(model, units, inputs(3, 4), starts=(0,), fullgraph=True)
    assert not differing(eager, ours)


class Layer(nn.Module):
    """Self-attention with a shared bias, which it returns, and cross-attention on a memory."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, bias, memory=None):
        read = self.norm(x) if memory is None else memory
        scores = x @ self.k(read).transpose(-1, -2)
        if memory is None:
            scores = scores + bias
        return x + scores.softmax(-1) @ self.v(read), bias


class EncoderDecoder(nn.Module):
    """Like T5: decoder layers read the encoder's result, all encoder layers one trained bias."""

    def __init__(self, dim: int = 8):
        super().__init__()
        self.embed = nn.Embedding(16, dim)
        self.bias = nn.Parameter(torch.randn(1, 6, 6))
        self.encoder, self.decoder = (nn.ModuleList(Layer(dim) for _ in range(2)) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 16, bias=False)

    def forward(self, tokens):
        x, bias = self.embed(tokens), self.bias * 2
        for layer in self.encoder:
            x, bias = layer(x, bias)
        y = self.embed(tokens.flip(-1))
        for layer in self.decoder:
            y, _ = layer(y, None, memory=x)
        return self.head(self.norm(y)).float().logsumexp(-1).mean()


UNITS = [f"{side}.{i}" for side in ("encoder", "decoder") for i in range(2)]


@pytest.mark.torch
def test_cross_attention_and_a_shared_bias():
    torch.manual_seed(0)
    tokens = torch.randint(16, (2, 6), generator=torch.Generator().manual_seed(0))
    units = [*UNITS, ["norm", "head"], ""]
    eager, ours, plain, reports = both(EncoderDecoder(), units, tokens, fullgraph=True)
    assert not differing(eager, ours)
    wrong = differing(eager, plain)
    assert any(name.startswith("encoder.") for name in wrong)
    assert not any(name.startswith(("decoder.", "head")) for name in wrong)
    (report,) = reports
    said = report.to_text()
    assert "added by unit:" in said
    assert "made in encoder.1: 1 sums" in said
    # No views of inputs are left in the graph.
    (added,) = (r for r in report.rewrites if r.as_dict()["rewrite"] == "added by unit")
    assert all(a.sums > 0 for a in added.added)


class Reader(nn.Module):
    """Reads an activation a number of times before a graph break, and after it."""

    def __init__(self, before: int, behind: int = 0):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.before, self.behind = before, behind

    def forward(self, y, shared):
        y = self.linear(y)
        for _ in range(self.before):
            y = torch.tanh(y + shared) * 3
        if self.behind:
            torch._dynamo.graph_break()
        for _ in range(self.behind):
            y = torch.tanh(y + shared) * 3
        return y


class Broken(nn.Module):
    """Units that read the first linear's result, with graph breaks before some of them."""

    def __init__(self, readers, breaks=()):
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.units = nn.ModuleList(Reader(*reader) for reader in readers)
        self.breaks = breaks

    def forward(self, x):
        shared, y = self.first(x), self.second(x)
        # Not a loop: with a graph break in a loop, Dynamo skips the whole forward.
        if 0 in self.breaks:
            torch._dynamo.graph_break()
        y = self.units[0](y, shared)
        if 1 in self.breaks:
            torch._dynamo.graph_break()
        y = self.units[1](y, shared)
        if 2 in self.breaks:
            torch._dynamo.graph_break()
        return self.units[2](y, shared).float().square().mean()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("readers", "breaks", "named"),
    [
        ([(2,), (2, 1), (2,)], (), "'shared', an input of unit 'units.1',"),
        ([(2,), (2,), (2,)], (0, 1), ""),
        at_night([(2,), (1, 2), (2,)], (), ""),
        at_night(
            [(2,), (2,), (2,)],
            (0, 2),
            "'shared', an input of unit 'units.0', 'units.1', 'units.2',",
        ),
    ],
)
def test_additions_that_a_graph_break_takes_apart_are_named(readers, breaks, named):
    """Additions without a warning are eager FSDP2's."""
    torch.manual_seed(0)
    model = Broken(readers, breaks)
    units = [*(f"units.{i}" for i in range(3)), ""]
    eager, ours, reports = both(model, units, inputs(64, 4), starts=(0,))
    said = [text for r in reports for text in r.warnings if "graph by graph" in text]
    assert len(said) == bool(named)
    assert all(named in text for text in said)
    assert differing(eager, ours) == ["first.weight"] * bool(named)


class Unread(nn.Module):
    """The second half gets inputs that it does not read."""

    def __init__(self):
        super().__init__()
        self.read, self.unread = nn.Linear(4, 4), nn.Linear(4, 4)
        self.units = nn.ModuleList(Reads() for _ in range(2))

    def forward(self, x):
        y, z = self.read(x), self.unread(x)
        for unit in self.units:
            y = unit(y, unread=[z])
        return y.float().square().mean()


class Reads(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x, unread):
        return super().forward(x)


@pytest.mark.torch
def test_what_a_unit_does_not_read_gets_zeros():
    x, units = inputs(3, 4), ["units.0", "units.1", ""]
    eager, ours, plain, _ = both(Unread(), units, x, fullgraph=True)
    assert not differing(eager, ours)
    assert differing(eager, plain) == ["unread.weight", "unread.bias"]
    assert not eager["unread.weight"].any()


def hooks(model):
    return [
        name
        for name, module in model.named_modules()
        if unit_inputs._hook in module._forward_pre_hooks.values()
    ]


@pytest.mark.torch
def test_hooks_come_with_the_backend_and_once():
    mesh = init_device_mesh("cpu", (1,))
    model = teb.data_parallel(EncoderDecoder(), mesh)
    passes = teb.recipe(model, units=[*UNITS, ["norm", "head"], ""])
    assert hooks(model) == []
    for _ in range(2):
        teb.backend("aot_eager", passes)
    assert hooks(model) == ["", *UNITS, "norm"]
    assert all(len(m._forward_pre_hooks) < 3 for m in model.modules())
    assert not hooks(teb.data_parallel(EncoderDecoder(), mesh))


def test_a_unit_that_holds_no_parameter_gets_none():
    """Eager FSDP2 does not give it one, either."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    teb.backend("aot_eager", [AddByUnit(model, ["0", "1", ""])])
    assert hooks(model) == ["0", "1"]


def test_switched_off_there_are_no_hooks(monkeypatch):
    monkeypatch.setenv("TORCH_EXT_BUCKETING_DISABLE", "AddByUnit")
    model = nn.Linear(2, 2)
    teb.backend("aot_eager", [AddByUnit(model, [""])])
    assert hooks(model) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_a_dict_with_a_default_stays_one(compiled):
    class Reads(nn.Module):
        def forward(self, given):
            return given["x"] * len(given["none"])

    model = Reads()
    register_input_nodes([model])
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    x = torch.ones(3, requires_grad=True)
    assert run(defaultdict(lambda: (1, 2), x=x)).tolist() == [2.0, 2.0, 2.0]


def test_units_that_do_not_fit():
    with pytest.raises(ValueError, match="no module is named 'layers'"):
        AddByUnit(nn.Linear(2, 2), ["layers"])


def test_units_and_modules_with_hooks_count_in_keys():
    one, none = nn.Sequential(nn.Linear(1, 1)), nn.Sequential(nn.ReLU())
    given = [(one, ["0"]), (none, ["0"]), (one, ["0", ""])]
    uuids = [AddByUnit(*each).uuid() for each in given]
    assert None not in uuids
    assert len(set(uuids)) == 3
    assert uuids[0] == AddByUnit(*given[0]).uuid()
