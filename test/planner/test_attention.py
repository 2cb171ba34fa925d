"""Check what may be recomputed, by torch's partitioners: attention, and operators of the user's."""

import pytest
import torch
import torch.fx as fx
import torch.nn as nn
from collective_graphs import trace
from cuda_attention import DIM, HEADS, KERNELS, TOKENS, Blocks, fused, halves, outcome, register
from marks import at_night
from rank_pool import on_ranks

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.dependencies import is_known, may_run_twice

pytestmark = pytest.mark.torch

library = torch.library.Library("attention_test", "FRAGMENT")
SCHEMA = "(Tensor x) -> (Tensor, Tensor)"
for name, tags in {
    "untagged": (),
    "compliant": (torch.Tag.pt2_compliant_tag,),
    "pointwise": (torch.Tag.pointwise,),
    "draws": (torch.Tag.pointwise, torch.Tag.nondeterministic_seeded),
}.items():
    library.define(f"{name}{SCHEMA}", tags=tags)
    for key in ("CompositeExplicitAutograd", "Meta"):
        library.impl(name, lambda x: (x.sin(), x.cos()), key)
    torch.library.register_autograd(
        f"attention_test::{name}",
        lambda ctx, grad, _: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
        lib=library,
    )
ops = torch.ops.attention_test


@pytest.mark.usefixtures("fresh_dynamo", "two_ranks")
@pytest.mark.parametrize(
    ("kernel", "compiler"),
    [
        ("FlexAttention", "inductor"),
        *(at_night(k, "inductor") for k in ("cudnn", "math", "varlen", "flash", "efficient")),
        at_night("cudnn", "aot_eager"),
    ],
)
def test_attention_without_dropout_is_recomputed(kernel, compiler):
    assert outcome(KERNELS[kernel], compiler) == "recomputed"


@pytest.mark.usefixtures("fresh_dynamo", "two_ranks")
@pytest.mark.parametrize("compiler", ["inductor", at_night("aot_eager")])
def test_attention_with_dropout_is_saved(compiler):
    assert outcome(fused("efficient", 0.1), compiler) == "saved"


def _gradients(rank):
    register()
    made = []
    for bound in (0.1, 100.0):
        torch.manual_seed(0)
        model = Blocks(fused("cudnn"))
        graphs, _ = halves(model, "aot_eager", memory=teb.PeakMemory(ratio=bound))
        made.append([p.grad.to_local().tolist() for p in model.parameters()])
        made.append(sum("cudnn" in n.name for n in graphs["backward"].graph.nodes))
        (output,) = graphs["forward"].graph.find_nodes(op="output")
        values = [n.meta["val"] for n in output.args[0] if isinstance(n, fx.Node)]
        made.append(sum(not isinstance(v, torch.Tensor) for v in values))
    return made


def test_recomputed_attention_gives_the_gradients_of_saved_one():
    """On 2.13 the meshes of gradients are among forward's outputs, where states would stand."""
    for again, twice, meshes, saved, once, _ in on_ranks(_gradients):
        assert (twice, once) == (4, 2)
        assert again == saved
        assert meshes or not torch.__version__.startswith("2.13")


class Custom(nn.Module):
    """A block whose activation function is an operator with two results."""

    def __init__(self, op):
        super().__init__()
        self.first, self.second = nn.Linear(HEADS * DIM, 96), nn.Linear(96, HEADS * DIM)
        self.op = op

    def forward(self, x):
        return x + self.second(self.op(self.first(x))[0])


class Stack(Blocks):
    def __init__(self, op):
        super().__init__(None)
        self.layers = nn.ModuleList([Custom(op) for _ in range(2)])


@pytest.mark.usefixtures("fresh_dynamo", "two_ranks")
@pytest.mark.parametrize("compiler", ["inductor", at_night("aot_eager")])
def test_an_operator_is_recomputed_only_if_its_tags_allow_that(compiler):
    for name, again in {"untagged": 0, "pointwise": 2}.items():
        graphs, report = halves(Stack(getattr(ops, name).default), compiler)
        calls = [n for n in graphs["backward"].graph.nodes if name in str(n.target)]
        assert len(calls) == again
        (kept,) = (r for r in report.rewrites if r.rewrite == "keep gathered")
        shown = () if again else (("attention_test.untagged.default", 2),)
        assert kept.unknown == shown
        assert ("attention_test.untagged.default (2)" in kept.to_text()) == (not again)


def test_purity_is_read_from_tags_and_schemas():
    def calls(x):
        y = [f(x)[0] for f in (ops.untagged, ops.compliant, ops.pointwise, ops.draws)]
        z = torch.nn.functional.dropout(x, 0.5), x.sin(), x.clone().add_(1)
        q = x.view(1, 1, TOKENS, -1)
        return *y, *z, fused("cudnn")(q, q, q), fused("cudnn", 0.1)(q, q, q)

    nodes = trace(calls, torch.ones(TOKENS, 8)).graph.nodes
    found = {}
    for node in nodes:
        if node.op == "call_function":
            name = str(node.target).removeprefix("attention_test.").removeprefix("aten.")
            found.setdefault(name.split(".")[0], []).append((is_known(node), may_run_twice(node)))
    assert found["untagged"] == found["compliant"] == [(False, False)]
    assert found["pointwise"] == found["sin"] == [(True, True)]
    assert found["draws"] == found["add_"] == [(True, False)]
    assert found["_scaled_dot_product_cudnn_attention"] == [(True, True), (True, False)]
