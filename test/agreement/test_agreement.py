"""Ranks compare their launches: ranks that agree, differ, die, or load from caches."""

import os
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from collective_graphs import C10D, all_gather, all_reduce, trace
from examples import by_night
from extended_models import OtherScaled, TensorScaled, wrap
from rank_pool import on_ranks
from sharded_models import TwoBlocks
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torch_ext_bucketing as teb
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.runtime import agreement
from torch_ext_bucketing.runtime.agreement import agree
from torch_ext_bucketing.runtime.launches import (
    GroupLaunches,
    Launch,
    Member,
    Version,
    launches_of,
    mismatch_text,
)
from torch_ext_bucketing.testing.ranks import run_ranks

pytestmark = pytest.mark.long

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
SOON = timedelta(seconds=60)


class Backwards:
    """Reverses an order for the given kinds."""

    def __init__(self, order, kinds=KINDS):
        self.order = order
        self.kinds = kinds

    def __call__(self, start):
        key = self.order(start)
        if key is None or not any(kind in str(start.target) for kind in self.kinds):
            return key
        return tuple(-k for k in key)

    def uuid(self):
        return f"backwards {self.kinds} {self.order.uuid()}"


class Die(teb.GraphPass):
    """Raises while a rank compiles."""

    stage = "forward_backward"

    def run(self, graph, compilation):
        raise RuntimeError("gone")


class Layers(TwoBlocks):
    """A model of few parameters, because each makes a compile longer."""

    def __init__(self, dim=8, vocabulary=12):
        super().__init__(dim, vocabulary)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))


class OtherLayers(Layers):
    """A model with the same parameters, used in the opposite order."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class Plain(nn.Module):
    """A model that all-gathers two shards without DTensor, so that torch 2.13 caches it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 6))
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, x):
        weight = all_gather_tensor_autograd(self.weight, 0, dist.group.WORLD)
        bias = all_gather_tensor_autograd(self.bias, 0, dist.group.WORLD)
        return nn.functional.linear(x, weight, bias)


def sharded(model, mode="fully_shard"):
    world = dist.get_world_size()
    if mode == "hybrid_shard":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    return teb.data_parallel(model, mesh, mode)


def two_layers(mode="fully_shard", model=Layers):
    torch.manual_seed(0)
    return sharded(model(dim=9, vocabulary=13), mode)


def in_float8(cls):
    """Make a model whose head is all-gathered in float8."""
    torch.manual_seed(0)
    model = Layers(vocabulary=14)
    wrap(model.head, cls)
    return sharded(model, "fully_shard")


def fsdp_order():
    return teb.FSDPParamOrder.from_model(Layers(), ["layers.0", "layers.1", ""])


def tokens(rows=2):
    return torch.arange(4 * rows).add(dist.get_rank()).remainder(13).view(rows, 4)


def step(compiled, x):
    compiled(x).float().logsumexp(-1).mean().backward()


def gradients(model):
    found = {}
    for name, p in model.named_parameters():
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        found[name] = grad.flatten().tolist()
        p.grad = None
    return found


def outcome(function):
    """Call a function; return the error's type (None without an error), its message and seconds."""
    started = time.perf_counter()
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), time.perf_counter() - started]
    return [None, "", time.perf_counter() - started]


def disagree(rank, every):
    """Run the cases in one pair of processes: a failed comparison leaves the next one intact."""
    second = rank == 1
    order = fsdp_order()
    results = {}

    def case(name, passes, model=None, **options):
        torch._dynamo.reset()
        module = two_layers() if model is None else model
        backend = teb.backend("aot_eager", passes, agree_timeout=SOON, **options)
        compiled = torch.compile(module, backend=backend, dynamic=False)
        results[name] = outcome(lambda: step(compiled, tokens()))
        return module, compiled, backend

    before = agreement.groups.default_store().num_keys()
    same = [teb.BucketByUnit(order), teb.ReshardAfterForward()]
    module, compiled, backend = case("same", same)
    expected = gradients(module)
    dist.barrier()
    results["keys left"] = agreement.groups.default_store().num_keys() - before

    # Launches are compared once: without a store, another comparison would fail.
    store, agreement.groups.default_store = agreement.groups.default_store, None
    results["second step"] = outcome(lambda: step(compiled, tokens()))
    results["recompiled by one"] = outcome(lambda: step(compiled, tokens(3 if second else 2)))
    results["compiles"] = len(backend.reports)
    agreement.groups.default_store = store

    hook = Backwards(order) if second else order
    case("other hook", [teb.BucketByUnit(order, payload_order=hook)])
    # The host would bound so small a model, whose order is then that of the graph.
    overlap = [teb.Overlap()] if second else []
    case("other schedule", [*same, teb.Schedule(overlap, machine=replace(H100, host_ms={}))])
    machine = teb.Machine("measured", bandwidth=2e9 if second else 1e9)
    case("other times", [*same, teb.Schedule([], machine=machine)])
    if every:  # these find the same difference as another hook: a launch
        case("other model", same, two_layers(model=OtherLayers if second else Layers))
        units = [["layers.0"], ["layers.1", "head"]] if second else [["layers.0"], ["layers.1"]]
        case("other units", [teb.BucketByUnit(units, payload_order=order)])
        case("no buckets", [] if second else same)
        case("other float8", same, in_float8(OtherScaled if second else TensorScaled))
    # test_caches has the tests of the digest.
    digest = agreement.package_digest
    agreement.package_digest = "another edition".__str__ if second else digest
    case("other edition", same)
    agreement.package_digest = digest

    # Without a comparison a rank reads the bytes of one parameter as those of another.
    module, _, _ = case("off", [teb.BucketByUnit(order, payload_order=hook)], agree=False)
    found = gradients(module)
    results["mixed"] = any(
        not torch.allclose(torch.tensor(found[n]), torch.tensor(expected[n])) for n in expected
    )
    return results


def in_another_group(rank):
    """Let ranks 2 and 3, which shard together, pack their reduce-scatters differently."""
    order = fsdp_order()
    hook = Backwards(order, ("reduce_scatter",)) if rank == 3 else order
    module = two_layers(mode="hybrid_shard")
    passes = [teb.BucketByUnit(order, KINDS, payload_order=hook)]
    compiled = torch.compile(module, backend=teb.backend("aot_eager", passes, agree_timeout=SOON))
    return {"backward": outcome(lambda: step(compiled, tokens()))}


def dies(rank):
    """End rank 2 while it compiles, then rank 0, which hosts the store."""
    store = _tcp_store(rank)
    sizes = {"rank": rank.rank, "world_size": rank.world_size}
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=90), **sizes)
    passes = [teb.BucketByUnit(fsdp_order()), *([Die()] if rank.rank == 2 else [])]
    backend = teb.backend("aot_eager", passes, agree_timeout=timedelta(seconds=2))
    compiled = torch.compile(two_layers(), backend=backend)
    results = {"step": outcome(lambda: step(compiled, tokens()))}
    if rank.rank != 1:
        return None  # the process ends
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(C10D.all_reduce.default, (x, "sum", "0")))
    results["agree"] = outcome(lambda: agree(graph, timeout=SOON))
    return results


def _tcp_store(rank):
    """Make a TCPStore on rank 0, which writes its port to a file."""
    port = Path(rank.store_path).with_name("port")
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, rank.world_size, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), rank.world_size, False)


def _inductor(hook, order):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Plain()
    backend = teb.backend(
        "inductor", [teb.BucketByUnit(order, payload_order=hook)], agree_timeout=SOON
    )
    compiled = torch.compile(module, backend=backend)
    x = torch.arange(12.0).view(2, 6).add(dist.get_rank())
    codes = []

    def run():
        codes.extend(run_and_get_code(lambda: step(compiled, x))[1])

    result = outcome(run)
    calls = [
        re.findall(r"torch\.ops\.(?:torch_ext_bucketing|_c10d_functional)\.(\w+)\.default\(", code)
        for code in codes
    ]
    found = gradients(module) if result[0] is None else {}
    graphs = [g.from_cache for g in backend.last_report().graphs]
    return {"outcome": result, "gradients": found, "graphs": graphs, "calls": calls}


def inductor(rank, folder):
    """Compile on both ranks; then rank 1 loses its cache; then it also changes the hook."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    order = teb.FSDPParamOrder.from_fqns(["weight", "bias"])
    with inductor_config.patch(fallback_by_default=True):  # without compiling kernels
        results = {"cold": _inductor(order, order)}
        for name, hook in (("warm", order), ("other", Backwards(order))):
            with fresh_cache() if rank == 1 else nullcontext():
                results[name] = _inductor(hook if rank == 1 else order, order)
    return results


def test_ranks_that_disagree():
    ranks = on_ranks(disagree, by_night(), timeout_s=300)
    differ = ["other hook", "other schedule", "other times", "other edition"]
    if by_night():
        differ += ["other model", "other units", "no buckets", "other float8"]
    for result in ranks:
        for case in ("same", "second step", "recompiled by one", "off"):
            assert result[case][0] is None, result[case]
        assert result["keys left"] == 0
        for case in differ:
            assert result[case][0] == "PlanMismatchError", (case, result[case])
            assert "group '0' (2 ranks)" in result[case][1]
    assert [r["compiles"] for r in ranks] == [1, 2]
    # Without a comparison nothing is raised, and the gradients are wrong.
    assert all(r["mixed"] for r in ranks)
    # Every rank has the same message, with both versions.
    for case in differ:
        assert ranks[0][case][1] == ranks[1][case][1]

    def lines(case):
        return [line.strip() for line in ranks[0][case][1].splitlines()]

    hook = lines("other hook")
    assert hook[1] == "The first to differ is collective 1 of 3 on this group:"
    assert hook[2:5] == [
        "rank 0: all_gather float32, bucket of 2: embedding.weight at byte 0, 252 bytes float32; "
        "head.weight at byte 252, 252 bytes float32",
        "rank 1: all_gather float32, bucket of 2: head.weight at byte 0, 252 bytes float32; "
        "embedding.weight at byte 252, 252 bytes float32",
        "(their members differ from number 1 on)",
    ]
    if by_night():
        model = lines("other model")
        assert model[1] == "The first to differ is collective 2 of 3 on this group:"
        for rank, kind in enumerate(("e4m3fn", "e5m2")):
            assert model[2 + rank].startswith(
                f"rank {rank}: all_gather float32, bucket of 2: layers.{rank}.weight at byte 0"
            )
            # The number of bytes is the same, the dtype is not.
            float8 = lines("other float8")[2 + rank]
            assert f"head.weight at byte 224, 56 bytes float8_{kind}" in float8
        assert "rank 1: all_gather float32, embedding.weight at byte 0" in lines("no buckets")[3]
    # Scheduling changes no bucket here, but the launch order.
    schedule = lines("other schedule")
    assert "backward graph" in schedule[0]
    kinds = {line.split(": ")[1].split()[0] for line in schedule[2:4]}
    assert kinds == {"all_gather", "reduce_scatter"}
    # Other times change nothing here, but could for another model.
    times = lines("other times")
    assert times[1] == "They planned with different times or size hints:"
    for rank in (0, 1):
        assert re.fullmatch(
            rf"rank {rank}: machine measured \w{{12}}, size hints None", times[2 + rank]
        )
    assert "Their collectives are still the same" in times[4]
    text = ranks[0]["other edition"][1]
    said = re.findall(r"rank (\d): torch (\S+), torch_ext_bucketing (.{12})$", text, re.M)
    assert [s[0] for s in said] == ["0", "1"]
    assert said[0][1] == said[1][1]
    assert [s[2] == "another edit" for s in said] == [False, True]
    assert "Their buckets are the same, but not the code that packs them." in text


@pytest.mark.torch
def test_a_mismatch_reaches_the_other_groups_of_a_mesh():
    ranks = on_ranks(in_another_group, world=4)
    for result in ranks:
        error, text, _ = result["backward"]
        assert error == "PlanMismatchError", text
        assert "rank 2: reduce_scatter" in text
        assert "rank 3: reduce_scatter" in text


def test_ranks_that_are_gone():
    _, alive, _ = run_ranks(dies, 3, timeout_s=300)
    error, text, seconds = alive["step"]
    assert error == "RankMissingError", text
    assert re.search(
        r"rank [01] waited 2 s to compare the forward graph's launches on process group '0'", text
    )
    assert "rank 2 did not arrive" in text
    assert seconds < 60
    # The remaining rank names the process that hosted the store.
    error, text, _ = alive["agree"]
    assert error == "AgreementError", text
    assert "the process that hosts it, rank 0" in text


@pytest.mark.torch
@pytest.mark.slow
def test_a_warm_cache_and_a_cold_one(tmp_path):
    ranks = on_ranks(inductor, str(tmp_path), timeout_s=300)
    for result in ranks:
        for name in ("cold", "warm"):
            assert result[name]["outcome"][0] is None, result[name]["outcome"]
            # The comparison precedes every collective, in forward and in backward.
            assert [calls[0] for calls in result[name]["calls"]] == ["agree", "agree"]
            assert all(len(calls) > 2 for calls in result[name]["calls"])
        assert result["warm"]["gradients"] == result["cold"]["gradients"]
        error, text, _ = result["other"]["outcome"]
        assert error == "PlanMismatchError", text
        assert "rank 0: all_gather float32, bucket of 2: weight at byte 0" in text
        assert "rank 1: all_gather float32, bucket of 2: bias at byte 0" in text
    # Rank 0 loaded from its cache, without running our passes; rank 1 compiled.
    cached = [
        [set(result[name]["graphs"]) for name in ("cold", "warm", "other")] for result in ranks
    ]
    assert cached == [[{False}, {True}, {True}], [{False}, {False}, {False}]]


# ---------------------------------------------------------------- without ranks


def of_group(*members, group="0", kind="all_gather"):
    launch = Launch(kind, None, "float32", len(members) > 1, tuple(members))
    return GroupLaunches(group, (launch,))


@pytest.mark.torch
def test_launches_are_what_ranks_must_share(fake_world):
    group = torch.distributed.group.WORLD

    def function(x, y):
        return all_gather(x, group), all_reduce(y, group, "avg")

    both = [
        launches_of(trace(function, torch.zeros(n, 2), torch.zeros(3)).graph, "forward")
        for n in (2, 5)
    ]
    assert [str(launch.to_text()) for launch in both[0].groups[0].launches] == [
        "all_gather float32, of no parameter",
        "all_reduce avg float32, of no parameter",
    ]
    assert both[0] == both[1]  # without a parameter, sizes may differ between ranks


def test_without_other_ranks_nothing_is_exchanged(fake_world, monkeypatch):
    def no_store():
        raise AssertionError("asked for the store")

    monkeypatch.setattr(agreement.groups, "default_store", no_store)
    group = torch.distributed.group.WORLD
    agree(trace(lambda x: all_gather(x, group), torch.zeros(2, 2)))


def test_a_message_shows_no_more_of_a_large_bucket_than_differs():
    members = [Member((f"layers.{i}.weight",), 8 * i, 8, "float32") for i in range(300)]
    swapped = [*members[:200], members[201], members[200], *members[202:]]
    versions = [
        ([0, 1, 2, 5], Version("torch", "forward", of_group(*members))),
        ([4], Version("torch", "forward", of_group(*swapped))),
    ]
    text = mismatch_text(versions, [3], 6)
    assert "ranks 0-2, 5: all_gather float32, bucket of 300: ...; layers.198.weight" in text
    assert "(their members differ from number 201 on)" in text
    assert "Not arrived yet: rank 3." in text
    assert len(text) < 1500


@pytest.mark.parametrize("bad", [5, -1, "10 s"])
def test_a_bad_timeout(bad):
    with pytest.raises(TypeError, match="agree_timeout must be a"):
        teb.backend("aot_eager", agree_timeout=bad)
