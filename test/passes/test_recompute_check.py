"""Plant values that backward recomputes differently: the check finds each, and none elsewhere."""

import logging
import warnings

import pytest
import torch
import torch.nn as nn
from marks import at_night
from rank_pool import on_ranks
from sharded_models import small_transformer
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch.aot import must_recompute
from torch_ext_bucketing.errors import BucketingWarning, RecomputeError
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.graph.nodes import graph_of
from torch_ext_bucketing.passes.recompute_check import digest_of

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo")]
library = torch.library.Library("recompute_test", "FRAGMENT")
STATE = torch.zeros(())


def _operator(name, function):
    library.define(f"{name}(Tensor x) -> Tensor", tags=torch.Tag.pt2_compliant_tag)
    library.impl(name, function, "CPU")
    library.impl(name, torch.empty_like, "Meta")
    torch.library.register_autograd(
        f"recompute_test::{name}", lambda ctx, grad: grad * 2, lib=library
    )
    return getattr(torch.ops.recompute_test, name).default


OPERATORS = {
    "draws": _operator("draws", lambda x: x * torch.rand(())),
    "reads": _operator("reads", lambda x: x + STATE),
    "writes": _operator("writes", lambda x: x.add_(1).clone()),
    "copies": _operator("copies", lambda x: x.clone()),
}


class Model(nn.Module):
    """A checkpointed block, with functions before and between its layers, and a buffer."""

    def __init__(self, between, before=None):
        super().__init__()
        self.block = nn.Module()
        self.block.first, self.block.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.between, self.before = between, before or nn.Identity()

    def _block(self, x):
        y = self.between(self.block.first(self.before(x)) * self.scale)
        return self.block.second(y.sin()).cos()

    def forward(self, x):
        return checkpoint(self._block, x, use_reentrant=False).square().sum()


def step(model, compiler="aot_eager", passes=(), between=lambda: None, steps=1):
    """Take steps with the check."""
    torch.manual_seed(0)
    backend = teb.backend(compiler, passes, check_recompute=True)
    compiled = torch.compile(model, backend=backend)
    for _ in range(steps):
        loss = compiled(torch.ones(4, 8))
        between()
        loss.backward()


class MarkTheResults(teb.GraphPass):
    """Marks dropout's results alone. The partitioner then saves no generator's state."""

    stage = "joint"

    def run(self, graph, compilation):
        for node in graph_of(graph).nodes:
            if must_recompute(node) and "dropout" in node.name:
                del node.meta["recompute"]


@pytest.mark.parametrize("compiler", ["aot_eager", at_night("inductor")])
def test_an_operator_that_draws_without_a_tag_is_found(compiler):
    with pytest.raises(RecomputeError, match=r"draws \(recompute_test.draws.default\)") as error:
        step(Model(OPERATORS["draws"]), compiler)
    assert error.value.node == "draws"
    assert f"{__file__}:" in str(error.value)


def test_a_write_to_what_is_saved_is_found():
    with pytest.raises(RecomputeError) as error:
        step(Model(OPERATORS["copies"], OPERATORS["writes"]))
    assert error.value.node == "writes"


def test_a_state_that_changes_is_found():
    with pytest.raises(RecomputeError) as error:
        step(Model(OPERATORS["reads"]), between=lambda: STATE.add_(1))
    assert error.value.node == "reads"


def test_a_buffer_that_changes_is_found():
    """Writes through ``data`` are not seen by autograd's versions."""
    model = Model(OPERATORS["copies"])
    with pytest.raises(RecomputeError, match="mul") as error:
        step(model, between=lambda: model.scale.data.add_(1))
    assert error.value.node == "mul"


def test_redrawn_dropout_is_found():
    with pytest.raises(RecomputeError, match="getitem"):
        step(Model(nn.Dropout(0.5)), passes=[MarkTheResults()])


def _checked(caplog):
    texts = [r.getMessage() for r in caplog.records if "check_recompute" in r.getMessage()]
    return [int(text.split(" all ")[1].split()[0]) for text in texts]


@pytest.mark.parametrize("compiler", ["aot_eager", at_night("inductor")])
def test_nothing_is_found_where_values_are_equal(compiler, caplog):
    """torch restores a generator's state for dropout in a checkpoint."""
    with caplog.at_level(logging.INFO, "torch_ext_bucketing"):
        step(Model(nn.Dropout(0.5)), compiler, steps=2)
    (values,) = _checked(caplog)
    assert values >= 3


def test_gradients_are_those_without_the_check():
    grads = []
    for check in (False, True):
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = Model(OPERATORS["copies"])
        backend = teb.backend("aot_eager", check_recompute=check)
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            compiled(torch.ones(4, 8)).backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *grads))


def test_several_forwards_may_run_before_the_first_backward(caplog):
    backend = teb.backend("aot_eager", check_recompute=True)
    compiled = torch.compile(Model(OPERATORS["copies"]), backend=backend)
    with caplog.at_level(logging.INFO, "torch_ext_bucketing"):
        first, second = (compiled(torch.rand(4, 8)) for _ in range(2))
        second.backward()
        first.backward()
    assert len(_checked(caplog)) == 1


def _recipe(rank):
    warnings.simplefilter("ignore", BucketingWarning)
    logs = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())
    log = logging.getLogger("torch_ext_bucketing")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    model = data_parallel(small_transformer(layers=1), init_device_mesh("cpu", (2,)))
    passes = teb.recipe(model, "speed", memory=teb.PeakMemory(ratio=0.5))
    backend = teb.backend("aot_eager", passes, model=model, check_recompute=True)
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        compiled(torch.zeros(2, 8, dtype=torch.long)).float().sum().backward()
    return [text for text in logs if "check_recompute" in text]


def test_nothing_is_found_under_a_recipe():
    for logs in on_ranks(_recipe):
        assert len(logs) == 1
        assert int(logs[0].split(" all ")[1].split()[0]) > 10


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]
)
def test_a_digest_sees_each_bit_and_place(dtype):
    x = torch.arange(12).reshape(3, 4).to(dtype)
    assert digest_of(x) == digest_of(x.clone()) == digest_of(x.t().clone().t())
    changed = x.clone()
    changed.view(torch.uint8)[-1, -1] ^= 1
    moved = x.clone()
    moved[0, 0], moved[0, 1] = x[0, 1], x[0, 0]
    assert digest_of(changed) != digest_of(x) != digest_of(moved)
