"""The passes on a trace of a whole step, made without Dynamo."""

import copy

import pytest
import torch
import torch.nn as nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.nodes import kind_of
from torch_ext_bucketing.passes.base import Compilation
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.passes.pipeline import whole_step_pass

pytestmark = pytest.mark.torch

UNITS = ["blocks.0", "blocks.1", ""]


class Model(nn.Module):
    """Two blocks, one weight frozen, and a head whose weight is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.blocks[0].weight.requires_grad_(False)
        self.norm = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.sigmoid(block(x))
        return self.head(self.head(x * self.norm)).sum()


def extras(parameter):
    """List the tensors of a ``DTensor`` besides its shard: nothing, or its mesh."""
    attributes, _ = parameter.__tensor_flatten__()
    return [torch.zeros(1)] * (len(attributes) - 1)


def traced(model):
    """Trace loss and gradients of a step on fake tensors, without subclasses."""
    parameters = dict(model.named_parameters())

    def step(*tensors):
        given = iter(tensors)
        leaves = {}
        for name, p in parameters.items():
            shard = next(given)
            for _ in extras(p):
                next(given)
            whole = DTensor.from_local(
                shard, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
            )
            leaves[name] = whole.detach().requires_grad_(p.requires_grad)
        loss = functional_call(model, leaves, (next(given),))
        trained = [name for name, p in parameters.items() if p.requires_grad]
        grads = torch.autograd.grad(loss, [leaves[name] for name in trained])
        results = [
            [g.to_local(), *extras(parameters[n])] for n, g in zip(trained, grads, strict=True)
        ]
        return [loss.detach(), *(tensor for each in results for tensor in each)]

    inputs = [t for p in parameters.values() for t in (p.detach().to_local(), *extras(p))]
    with FakeTensorMode() as mode:
        return make_fx(step)(*(mode.from_tensor(t) for t in (*inputs, torch.zeros(2, 8))))


def gathers(graph):
    return [n for n in graph.nodes if kind_of(n) == "all_gather"]


@pytest.fixture
def model(fake_world):
    return teb.data_parallel(Model(), init_device_mesh("cpu", (fake_world,)))


def test_one_collective_per_unit_and_kind(model):
    gm = traced(model)
    compilation = Compilation()
    run = whole_step_pass(model, teb.recipe(model, units=UNITS), compilation)
    assert run(gm, None) is gm
    report = compilation.report
    assert not report.warnings
    assert report.collectives_before == {"all_gather": 7, "reduce_scatter": 6}
    assert report.collectives_after == {"all_gather": 3, "reduce_scatter": 3}
    found = [[f for m in b.members for f in m.fqns] for b in report.buckets]
    first, second, root = (
        ["blocks.0.weight", "blocks.0.bias"],
        ["blocks.1.weight", "blocks.1.bias"],
        ["head.weight", "head.bias", "norm"],
    )
    assert sorted(found) == sorted([first, second, second, root, root])
    # The head is read twice: one gather, one reduction.
    (combined,) = (r for r in report.rewrites if getattr(r, "combined", ()))
    assert sorted(c.fqns[0] for c in combined.combined) == ["head.bias", "head.weight"]


def test_what_is_gathered_again_in_backward_stays_so(model):
    """Otherwise a whole unit would stay in memory from forward to backward."""
    gm = traced(model)
    start = gathers(gm.graph)[2]
    (wait,) = start.users
    reader = list(wait.users)[-1]
    with gm.graph.inserting_before(reader):
        again = gm.graph.node_copy(start)
        again_wait = gm.graph.node_copy(wait, lambda n: again if n is start else n)
    for node in (again, again_wait):
        node.meta["autograd_backward"] = True
    reader.replace_input_with(wait, again_wait)
    before = copy.deepcopy(gm)
    whole_step_pass(model, teb.recipe(model, units=UNITS))(gm)
    assert len(gathers(gm.graph)) == 4
    whole_step_pass(model, [CombineUses()])(before)
    assert len(gathers(before.graph)) == 8


def test_a_graph_of_another_model_is_left(model):
    gm = traced(model)
    code = gm.code
    with pytest.raises(ValueError, match="this is not a step of ModuleList, whose parameters are"):
        whole_step_pass(nn.ModuleList([model, Model(), Model()]), [])(gm)
    assert gm.code == code
