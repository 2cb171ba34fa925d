"""What the ranks of ``test_agreement`` run: functions of a :class:`.Rank`."""

from __future__ import annotations

import os
import re
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from collective_graphs import C10D
from extended_models import OtherScaled, TensorScaled, wrap
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torch_ext_bucketing as teb
from torch_ext_bucketing.agreement import exchange as agreement
from torch_ext_bucketing.agreement.before_run import agree
from torch_ext_bucketing.testing.ring import ring_rank

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
SOON = timedelta(seconds=60)


class Backwards:
    """An order the other way round, for the given kinds."""

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
    """Ends a rank's part in the middle of compiling."""

    stage = "forward_backward"

    def run(self, graph, compilation):
        raise RuntimeError("gone")


class Layers(nn.Module):
    """Few parameters, as each makes a compile longer."""

    def __init__(self, dim=8, vocabulary=12):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class OtherLayers(Layers):
    """The same parameters, used the other way round."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class Plain(nn.Module):
    """Shards of two parameters, gathered by hand: with no DTensor in it, torch 2.13 caches it."""

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
    """The head is gathered in float8."""
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
    """``[error type, message, seconds]``; the type is None where nothing was raised."""
    started = time.perf_counter()
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error), time.perf_counter() - started]
    return [None, "", time.perf_counter() - started]


def in_group(rank, function, *args):
    """``function(rank.rank, *args)`` in a group of all ranks."""
    with ring_rank(rank, caches=True):
        return function(rank.rank, *args)


def disagree(rank):
    """Cases one after the other, in one pair of processes: a failed comparison breaks nothing."""
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
    same = [teb.BucketUnits(order), teb.ReshardAfterForward()]
    module, compiled, backend = case("same", same)
    expected = gradients(module)
    dist.barrier()
    results["keys left"] = agreement.groups.default_store().num_keys() - before

    # Launches are compared once: without a store, a second step and a second compile would fail.
    store, agreement.groups.default_store = agreement.groups.default_store, None
    results["second step"] = outcome(lambda: step(compiled, tokens()))
    results["recompiled by one"] = outcome(lambda: step(compiled, tokens(3 if second else 2)))
    results["compiles"] = len(backend.reports)
    agreement.groups.default_store = store

    case("other model", same, two_layers(model=OtherLayers if second else Layers))
    hook = Backwards(order) if second else order
    case("other hook", [teb.BucketUnits(order, payload_order=hook)])
    units = [["layers.0"], ["layers.1", "head"]] if second else [["layers.0"], ["layers.1"]]
    case("other units", [teb.BucketUnits(units, payload_order=order)])
    overlap = teb.Schedule([teb.Overlap()] if second else [])
    case("other schedule", [*same, overlap])
    machine = teb.Machine("measured", bandwidth=2e9 if second else 1e9)
    case("other times", [*same, teb.Schedule([], machine=machine)])
    case("no buckets", [] if second else same)
    case("other float8", same, in_float8(OtherScaled if second else TensorScaled))

    # What comes of it without a comparison: the bytes of one parameter as those of another.
    module, _, _ = case("off", [teb.BucketUnits(order, payload_order=hook)], agree=False)
    found = gradients(module)
    results["mixed"] = any(
        not torch.allclose(torch.tensor(found[n]), torch.tensor(expected[n])) for n in expected
    )
    return results


def in_another_group(rank):
    """Ranks 2 and 3 shard together, and differ in their reduce-scatters."""
    order = fsdp_order()
    hook = Backwards(order, ("reduce_scatter",)) if rank == 3 else order
    module = two_layers(mode="hybrid_shard")
    passes = [teb.BucketUnits(order, KINDS, payload_order=hook)]
    compiled = torch.compile(module, backend=teb.backend("aot_eager", passes, agree_timeout=SOON))
    return {"backward": outcome(lambda: step(compiled, tokens()))}


def dies(rank):
    """Rank 2 is gone in the middle of compiling; then rank 0, which hosts the store."""
    store = _tcp_store(rank)
    sizes = {"rank": rank.rank, "world_size": rank.world_size}
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=90), **sizes)
    passes = [teb.BucketUnits(fsdp_order()), *([Die()] if rank.rank == 2 else [])]
    backend = teb.backend("aot_eager", passes, agree_timeout=timedelta(seconds=2))
    compiled = torch.compile(two_layers(), backend=backend)
    results = {"step": outcome(lambda: step(compiled, tokens()))}
    if rank.rank != 1:
        return None  # and the process ends
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(C10D.all_reduce.default, (x, "sum", "0")))
    results["agree"] = outcome(lambda: agree(graph, timeout=SOON))
    return results


def _tcp_store(rank):
    """Hosted by rank 0, which tells its port in a file."""
    port = Path(rank.store_path).with_name("port")
    if rank.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, rank.world_size, True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), rank.world_size, False)


def other_edition(rank):
    """Of the package, on rank 1; what makes an edition is of ``test_caches``."""
    if rank == 1:
        agreement.package_digest = "another edition".__str__
    passes = [teb.BucketUnits(fsdp_order())]
    compiled = torch.compile(
        two_layers(), backend=teb.backend("aot_eager", passes, agree_timeout=SOON)
    )
    return outcome(lambda: step(compiled, tokens()))


def _inductor(hook, order):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Plain()
    backend = teb.backend(
        "inductor", [teb.BucketUnits(order, payload_order=hook)], agree_timeout=SOON
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
    """All compile; then rank 1 has lost its cache; then it has another hook, too."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    order = teb.FSDPParamOrder.from_fqns(["weight", "bias"])
    results = {"cold": _inductor(order, order)}
    for name, hook in (("warm", order), ("other", Backwards(order))):
        with fresh_cache() if rank == 1 else nullcontext():
            results[name] = _inductor(hook if rank == 1 else order, order)
    return results
