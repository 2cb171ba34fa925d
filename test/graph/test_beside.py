"""Check what is counted beside a graph, and the warning about one large block."""

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_ext_bucketing._torch.estimates import cublas_workspace_bytes
from torch_ext_bucketing.graph.liveness import beside_bytes, beside_text
from torch_ext_bucketing.passes.compilation import Compilation
from torch_ext_bucketing.planner.schedule.memory import PeakMemory
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.policy import Case
from torch_ext_bucketing.planner.schedule.timeline import Timeline

aten, MIB = torch.ops.aten, 2**20


def product(device, *, stage="inference", size=64, target=aten.mm.default):
    graph, mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, x))
    with mode:
        for one in (x, node):
            one.meta["val"] = torch.empty(size, size, device=device)
    if stage != "inference":
        node.meta["partitioner_tag"] = f"is_{stage}"
    graph.output((node,))
    return graph


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [(None, 32 * MIB), (":4096:8", 32 * MIB), (":16:8", 128 * 1024), (":4096:2:16:8", 8519680)],
)
def test_a_workspace_is_as_large_as_configured(monkeypatch, config, nbytes):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cublas_workspace_bytes() == nbytes


def test_workspaces_count_once_for_each_thread_with_products(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:1")
    assert beside_bytes(product("cpu")) == 0
    assert beside_text(product("cpu")) == ""
    assert beside_bytes(product("cuda", target=aten.add.Tensor)) == 0
    assert beside_bytes(product("cuda")) == MIB
    training = product("cuda", stage="forward")
    assert beside_bytes(training) == 2 * MIB
    assert "2 workspaces of cuBLAS of 1 MiB" in beside_text(training)


def test_a_bound_covers_workspaces(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":1024:3")
    graph, compilation = product("cuda"), Compilation()
    compilation.measure(graph)
    values = 2 * 4 * 64 * 64
    assert compilation.baseline.peak_bytes == values + 3 * MIB


@pytest.mark.parametrize(("factor", "warns"), [(3.9, True), (4.1, False)])
def test_one_block_over_a_quarter_of_the_bound_is_named(factor, warns):
    size = 2048
    model = model_of(product("cpu", size=size))
    block = 4 * size * size
    assert model.largest == ("mm_default", block)
    line = Timeline.of(model)
    report = PeakMemory(gib=factor * block / 2**30).report(Case(model, line, 0), line)
    assert bool(report.warning) == warns
    assert not warns or "one block of 16.000 MiB, of mm_default" in report.warning
    # A ratio names no card's memory.
    assert not PeakMemory(ratio=1.0).report(Case(model, line, line.peak_bytes), line).warning
