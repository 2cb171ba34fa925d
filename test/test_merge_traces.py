"""Equal buckets are traced once, and come out as if each had been traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from collective_graphs import all_gather, all_reduce, reduce_scatter, starts, trace
from torch._inductor import config
from torch._inductor.fx_passes import bucketing

from torch_ext_bucketing import buckets as buckets_module
from torch_ext_bucketing.buckets import apply_plan
from torch_ext_bucketing.caps import plan_by_cap

pytestmark = pytest.mark.usefixtures("fake_world")


def model() -> fx.GraphModule:
    """Three layers with a gather bucket, a reduction bucket and an all-reduce bucket each."""
    world = dist.group.WORLD

    def step(*params: torch.Tensor) -> list[torch.Tensor]:
        out = []
        x = torch.ones(8, 8)
        for i in range(0, len(params), 2):
            a, b = (all_gather(p.to(torch.bfloat16), world) for p in params[i : i + 2])
            x = torch.relu(x @ a.float()) @ b.float()
            gradients = [reduce_scatter(torch.outer(x[k], x[k]), world) for k in range(2)]
            out += [all_reduce(g, world) for g in gradients]
        return out

    return trace(step, *(torch.randn(2, 8) for _ in range(6)))


def merged(gm: fx.GraphModule) -> fx.GraphModule:
    cap = 2.5 * 8 * 8 * 2 / 2**20  # two gathers
    gathers = plan_by_cap(gm.graph, cap, kinds=["all_gather"], eligible=lambda start: True)
    apply_plan(gm.graph, gathers)
    rest = plan_by_cap(
        gm.graph,
        2.5 * 8 * 8 * 4 / 2**20,
        kinds=["reduce_scatter", "all_reduce"],
        eligible=lambda start: True,
    )
    apply_plan(gm.graph, rest)
    return gm


@contextlib.contextmanager
def _each_traced() -> Iterator[None]:
    yield


def described(gm: fx.GraphModule) -> list[Any]:
    def value(val: Any) -> Any:
        if isinstance(val, torch.Tensor):
            return (val.shape, val.stride(), val.storage_offset(), val.dtype, str(val.device))
        return [value(v) for v in val] if isinstance(val, (list, tuple)) else val

    return [
        (n.op, n.name, str(n.target), str(n.args), str(n.kwargs), value(n.meta.get("val")))
        + tuple(sorted(k for k in n.meta if k != "val"))
        for n in gm.graph.nodes
    ]


def storages(gm: fx.GraphModule) -> list[list[int]]:
    """For each storage, which nodes' values lie in it."""
    found: dict[int, list[int]] = {}
    for i, node in enumerate(gm.graph.nodes):
        val = node.meta.get("val")
        for v in val if isinstance(val, (list, tuple)) else [val]:
            if isinstance(v, torch.Tensor):
                found.setdefault(v.untyped_storage()._cdata, []).append(i)
    return sorted(found.values())


@pytest.mark.parametrize("mode", ["default", "custom_ops"])
def test_the_graph_is_the_one_that_tracing_each_bucket_gives(monkeypatch, mode):
    with config.patch({"aten_distributed_optimizations.bucket_mode": mode}):
        ours = merged(model())
        monkeypatch.setattr(buckets_module, "shared_traces", _each_traced)
        reference = merged(model())
    assert len(starts(ours)) < len(starts(model()))
    assert described(ours) == described(reference)
    assert storages(ours) == storages(reference)


def test_each_kind_of_bucket_is_traced_once(monkeypatch):
    traced = []
    original = bucketing._trace

    def counting(function, inputs):
        traced.append(function.__name__)
        return original(function, inputs)

    monkeypatch.setattr(bucketing, "_trace", counting)
    gm = merged(model())
    assert len(starts(gm, "all_gather")) == 3
    assert sum("all_gather" in name for name in traced) == 1
    assert bucketing._trace is counting, "torch's function is back afterwards"


def test_torchs_function_is_back_after_an_error(monkeypatch):
    before = bucketing._trace

    def failing(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(bucketing, "merge_all_gather_bucket", failing)
    with pytest.raises(RuntimeError, match="no"):
        merged(model())
    assert bucketing._trace is before


def test_symbolic_sizes_and_a_tensor_twice_are_traced_anew():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from torch_ext_bucketing._merge_traces import _Traces

    calls = []

    def tracing(function, inputs):
        calls.append(inputs)
        return original(function, inputs)

    original = bucketing._trace
    traces = _Traces(tracing)

    def double(xs):
        return [x + xs[0] for x in xs]

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fixed = [mode.from_tensor(torch.ones(3), static_shapes=True) for _ in range(3)]
    for pair in (fixed[:2], fixed[1:]):
        traces(double, (pair,))
    assert len(calls) == 1
    for _ in range(2):
        traces(double, ([fixed[0]] * 2,))
    assert len(calls) == 3, "one tensor as two inputs is another trace"
    symbolic = mode.from_tensor(torch.ones(5))
    assert not isinstance(symbolic.shape[0], int)
    for _ in range(2):
        traces(double, ([symbolic],))
    assert len(calls) == 5
