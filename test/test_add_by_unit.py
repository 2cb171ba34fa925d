"""The gradients of activations that several units read are added as eager FSDP2 adds them: on one
rank, where nothing else can differ."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.fsdp2 import WRAPS_DATACLASSES
from torch_ext_bucketing.passes.diagnostics import DividedUnitWarning

DTYPES = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_dynamo():
    yield
    torch._dynamo.reset()


@dataclasses.dataclass
class Both:
    one: Any
    other: Any = None


Pair = namedtuple("Pair", "one other")


class Odd(list):
    """No container to make another one of."""

    def __init__(self, one, other):
        super().__init__([one, other])


CONTAINERS = {
    "positional": lambda x: ((*x,), {}),
    "keywords": lambda x: ((x[0],), {f"k{i}": t for i, t in enumerate(x[1:])}),
    "list": lambda x: ((list(x),), {}),
    "dict": lambda x: ((), {"more": {"a": x[0], "b": tuple(x[1:])}}),
    "pair": lambda x: ((Pair(x[0], [Odd(x[1:], None)]),), {}),
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
    """Reads what it is called with, each tensor several times."""

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
    """Calls of units on what was made before; each result may be read by all that come later."""

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


def both(model, units, x, **options):
    """Gradients of eager FSDP2, of the compiled model and of that without the pass; its report."""
    mesh = init_device_mesh("cpu", (1,))
    eager = copy.deepcopy(model)
    for name in units:
        modules = [eager.get_submodule(n) for n in ([name] if isinstance(name, str) else name)]
        policy = MixedPrecisionPolicy(**DTYPES, cast_forward_inputs=False)
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, mp_policy=policy)
    found = [gradients(eager, eager, x)]
    for start in (0, 1):
        torch._dynamo.reset()
        compiled = teb.data_parallel(copy.deepcopy(model), mesh, **DTYPES)
        passes = teb.recipe(compiled, units=units)
        assert isinstance(passes[0], teb.AddByUnit)
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


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), st.integers(0, 1000))
def test_any_program_of_units(program, seed):
    torch.manual_seed(seed)
    model = Program(*program)
    nested = ["units.0.inner"] if program[2] else []
    units = [*nested, *(f"units.{i}" for i in range(program[1])), ""]
    eager, ours, _, _ = both(model, units, inputs(3, 4), fullgraph=True)
    assert not differing(eager, ours)
