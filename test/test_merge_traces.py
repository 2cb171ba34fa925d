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
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from torch_ext_bucketing._torch import merge_traces as _merge_traces
from torch_ext_bucketing._torch.record import CannotRecordError, record
from torch_ext_bucketing.bucketing import merge as buckets_module
from torch_ext_bucketing.bucketing.caps import plan_by_cap
from torch_ext_bucketing.bucketing.merge import apply_plan

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


def without_aliases(gm: fx.GraphModule) -> fx.GraphModule:
    """torch 2.15 turns a ``detach`` into an alias where it traces; 2.13 and a record leave it out."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.alias.default):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return gm


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
    if hasattr(config.aten_distributed_optimizations, "bucket_mode"):
        settings = {"aten_distributed_optimizations.bucket_mode": mode}
    elif mode == "default":
        settings = {}
    else:
        pytest.skip(f"torch {torch.__version__} can't be set to another mode than its default")
    with config.patch(settings):
        ours = merged(model())
        monkeypatch.setattr(buckets_module, "shared_traces", _each_traced)
        reference = without_aliases(merged(model()))
    assert len(starts(ours)) < len(starts(model()))
    assert described(ours) == described(reference)
    assert storages(ours) == storages(reference)


def test_each_kind_of_bucket_is_traced_once(monkeypatch):
    recorded, before = [], bucketing._trace

    def counting(function, inputs):
        recorded.append(function.__name__)
        return record(function, inputs)

    monkeypatch.setattr(_merge_traces, "record", counting)
    monkeypatch.setattr(bucketing, "_trace", lambda *args: pytest.fail("traced in full"))
    traced_by_torch = bucketing._trace
    gm = merged(model())
    assert len(starts(gm, "all_gather")) == 3
    assert sum("all_gather" in name for name in recorded) == 1
    assert bucketing._trace is traced_by_torch is not before, "torch's function is back afterwards"


def test_what_cannot_be_recorded_is_traced_in_full(monkeypatch):
    def failing(function, inputs):
        raise CannotRecordError("no")

    reference = merged(model())
    monkeypatch.setattr(_merge_traces, "record", failing)
    assert described(merged(model())) == described(reference)


@pytest.mark.parametrize("mode", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
def test_a_record_is_a_trace(mode):
    """Views, copies into views, lists of results, several dtypes, an operator in place."""

    def pack(xs, size, dtype):
        out = torch.empty(sum(x.numel() for x in xs) * size, dtype=dtype, device=xs[0].device)
        parts = out.narrow(0, 0, sum(x.numel() for x in xs)).split([x.numel() for x in xs])
        torch._foreach_copy_(list(parts), [x.reshape(-1) for x in xs])
        halves = out.view(torch.int16).chunk(2)
        total = torch.zeros_like(halves[0]).add_(halves[1])
        return [total.detach().reshape(size, -1), halves[0].to(torch.float32), out.t()]

    fake = FakeTensorMode()
    inputs = (
        [fake.from_tensor(torch.ones(3, 4).t()), fake.from_tensor(torch.ones(4))],
        2,
        torch.bfloat16,
    )
    with mode():
        ours = record(pack, inputs)
        theirs = without_aliases(bucketing._trace(pack, inputs))
    inner = [
        [line for line in described(gm) if line[0] in ("call_function", "output")]
        for gm in (ours, theirs)
    ]
    names = [{n.name for n in gm.graph.find_nodes(op="placeholder")} for gm in (ours, theirs)]
    # Placeholders have names of their own, so arguments are compared by the storages below.
    assert [(*x[1:3], *x[4:]) for x in inner[0]] == [(*x[1:3], *x[4:]) for x in inner[1]]
    assert len(names[0]) == len(names[1])
    assert storages(ours) == storages(theirs)


def test_a_constant_in_a_function_cannot_be_recorded():
    constant, fake = torch.ones(2), FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.raises(CannotRecordError, match="not made here"):
        record(lambda xs: [xs[0] + constant], ([fake.from_tensor(torch.ones(2))],))
    with pytest.raises(CannotRecordError, match="no fake tensor"):
        record(lambda xs: xs, ([1],))


def test_torchs_function_is_back_after_an_error(monkeypatch):
    before = bucketing._trace

    def failing(*args, **kwargs):
        raise RuntimeError("no")

    monkeypatch.setattr(bucketing, "merge_all_gather_bucket", failing)
    with pytest.raises(RuntimeError, match="no"):
        merged(model())
    assert bucketing._trace is before


def test_symbolic_sizes_and_a_tensor_twice_are_traced_anew(monkeypatch):
    calls, in_full = [], []

    def recording(function, inputs):
        calls.append(inputs)
        return record(function, inputs)

    def tracing(function, inputs):
        in_full.append(inputs)
        return original(function, inputs)

    monkeypatch.setattr(_merge_traces, "record", recording)
    original = bucketing._trace
    traces = _merge_traces._Traces(tracing)

    def double(xs):
        return [x + xs[0] for x in xs]

    mode = FakeTensorMode(shape_env=ShapeEnv())
    fixed = [mode.from_tensor(torch.ones(3), static_shapes=True) for _ in range(3)]
    for pair in (fixed[:2], fixed[1:]):
        traces(double, (pair,))
    assert (len(calls), len(in_full)) == (1, 0)
    for _ in range(2):
        traces(double, ([fixed[0]] * 2,))
    assert (len(calls), len(in_full)) == (1, 2), "one tensor as two inputs is another trace"
    symbolic = mode.from_tensor(torch.ones(5))
    assert not isinstance(symbolic.shape[0], int)
    for _ in range(2):
        traces(double, ([symbolic],))
    assert (len(calls), len(in_full)) == (1, 4)
