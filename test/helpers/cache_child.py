"""Compile under caches, in a process of its own: ``python cache_child.py FUNCTION [ARGUMENT ...]``.

``cache_runs.run`` starts it. Prints one line of JSON per rank. Ranks of a fake group take turns in
one process; under torchrun they are a gloo group.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from collective_graphs import fake_group
from extended_models import OtherScaled, TensorScaled, wrap
from sharded_models import shard_by_parametrization
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import torch_ext_bucketing as teb
from torch_ext_bucketing import _source

ORDER = teb.FSDPParamOrder.from_fqns([["a.weight", "b.weight"]])


class Pair(nn.Module):
    """Two linear layers. If both have one size, the graph of ``turned`` differs in names alone."""

    def __init__(self, rows: int = 8, turned: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, rows, bias=False)
        self.b = nn.Linear(rows, 8, bias=False)
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(x)) if self.turned else self.b(self.a(x))


def shard_scaled(model: nn.Module, mesh: Any, cls: Any = TensorScaled) -> nn.Module:
    """Shard with all-gathers in float8."""
    for linear in model.children():
        wrap(linear, cls)
    return teb.data_parallel(model, mesh)


class TensorParallelPair(Pair):
    """A pair whose parameters are sharded over both dimensions of a mesh."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mesh = self.a.parametrizations.weight.original.device_mesh
        placements = [Shard(0), Replicate()]
        y = super().forward(DTensor.from_local(x, mesh, placements))
        return y.redistribute(placements=placements).to_local()


class GatheredOverTheFirst(nn.Module):
    def forward(self, weight: DTensor) -> DTensor:
        return weight.redistribute(placements=[Replicate(), weight.placements[1]])


def shard_twice(model: nn.Module, mesh: Any) -> nn.Module:
    model.__class__ = TensorParallelPair
    for linear, rows in ((model.a, 1), (model.b, 0)):
        shards = distribute_tensor(linear.weight.detach(), mesh, [Shard(rows), Shard(1 - rows)])
        linear.weight = nn.Parameter(shards)
        parametrize.register_parametrization(linear, "weight", GatheredOverTheFirst(), unsafe=True)
    return model


WAYS: dict[str, tuple[Callable[[nn.Module, Any], nn.Module], int]] = {
    # With even shards only the merged all-gather differs between ranks.
    "even": (shard_by_parametrization, 8),
    "uneven": (shard_by_parametrization, 7),
    # A wider dtype for reductions adds an operator of the package to the graph.
    "data_parallel": (partial(teb.data_parallel, reduce_dtype=torch.float64), 7),
    "data_parallel, even": (partial(teb.data_parallel, reduce_dtype=torch.float64), 8),
    "2-D": (shard_by_parametrization, 8),
    "2-D, tensor parallel": (shard_twice, 8),
    "2-D, data_parallel": (partial(teb.data_parallel, mode="hybrid_shard"), 8),
    "float8": (shard_scaled, 8),
    "other float8": (partial(shard_scaled, cls=OtherScaled), 8),
}


def mesh_of(way: str) -> Any:
    world = dist.get_world_size()
    if way.startswith("2-D"):
        return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def model_of(way: str, mesh: Any = None) -> nn.Module:
    shard, rows = WAYS[way]
    torch.manual_seed(0)
    return shard(Pair(rows), mesh or mesh_of(way))


def step(model: Any) -> list[Any]:
    """Run a step and return the output and this rank's gradients."""
    x = torch.arange(32.0).view(4, 8).add(dist.get_rank())
    y = model(x)
    (y * y).sum().backward()
    params = model.parameters()
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    return [t.detach().flatten().tolist() for t in (y, *grads)]


def states() -> dict[str, list[int]]:
    """Read the hits, misses and bypasses of the FX graph cache and of AOTAutograd's cache."""
    kinds = ("hit", "miss", "bypass")
    return {
        "graphs": [counters["inductor"][f"fxgraph_cache_{k}"] for k in kinds],
        "aot": [counters["aot_autograd"][f"autograd_cache_{k}"] for k in kinds],
    }


def compile_step(way: str, mesh: Any = None) -> dict[str, Any]:
    """Compile a step or load it from a cache, and run it."""
    torch._dynamo.reset()
    counters.clear()
    model = model_of(way, mesh)
    backend = teb.backend("inductor", [teb.BucketByUnit(ORDER)])
    found: list[Any] = []
    compiled = torch.compile(model, backend=backend)
    codes = run_and_get_code(lambda: found.extend(step(compiled)))[1]
    # The offset of this rank's shards in the buffer, in elements.
    places = re.findall(
        r"aten\.empty\.memory_format\(.*?aten\.slice\.Tensor\(\w+, 0, (\d+), \d+\)",
        "".join(codes),
        re.DOTALL,
    )
    return {
        **states(),
        "places": [int(place) for place in places],
        "values": found,
        "report": backend.last_report().as_dict(),
        "text": backend.last_report().to_text(),
    }


def as_rank(rank: int, way: str) -> dict[str, Any]:
    with fake_group(2, rank):
        return {**compile_step(way), "rank": rank, "values": None}


def ranks(way: str, folder: str) -> list[dict[str, Any]]:
    """Compile on rank 0, copy ``folder`` to ``folder-0``, then compile on ranks 1, 0 and 1."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    results = [as_rank(0, way)]
    shutil.copytree(folder, folder + "-0")
    return results + [as_rank(rank, way) for rank in (1, 0, 1)]


def turns(folder: str, *ways: str) -> list[dict[str, Any]]:
    """Compile each way with the cache in ``folder``, on ranks 0, 1, 0, ..."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return [as_rank(number % 2, way) for number, way in enumerate(ways)]


def artifacts(*ways: str) -> list[dict[str, Any]]:
    """Load the artifacts of rank 0 into an empty cache, then compile on rank 1 and on rank 0."""
    return [result for way in ways for result in _artifacts(way)]


def _artifacts(way: str) -> list[dict[str, Any]]:
    from torch.compiler._cache import CacheArtifactManager

    CacheArtifactManager.clear()
    with fresh_cache():
        results = [as_rank(0, way)]
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    with fresh_cache():
        torch.compiler.load_cache_artifacts(saved[0])
        return results + [as_rank(rank, way) for rank in (1, 0)]


def real(way: str) -> list[dict[str, Any]]:
    """Compile on a rank of a gloo group, and run the model without a compiler."""
    dist.init_process_group("gloo")
    result = {"expected": step(model_of(way)), "rank": dist.get_rank(), **compile_step(way)}
    dist.barrier()
    return [result]


def one_for_all(*ways: str) -> list[dict[str, Any]]:
    """Compile for all ranks on each rank of a gloo group, then load the artifacts of rank 0."""
    torch.distributed.config.compile_on_one_rank = True
    dist.init_process_group("gloo")
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [_for_all(way) for way in ways])
    return [result for mine in found for result in mine] if dist.get_rank() == 0 else []


def _for_all(way: str) -> dict[str, Any]:
    mesh = mesh_of(way)  # shared, as each mesh makes process groups
    with fresh_cache():
        each = compile_step(way, mesh)
        saved = torch.compiler.save_cache_artifacts()
    box = [saved[0] if saved is not None and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    with fresh_cache():
        torch.compiler.load_cache_artifacts(box[0])
        loaded = compile_step(way, mesh)
    result = {"way": way, "rank": dist.get_rank(), "each": each, "loaded": loaded}
    result["expected"] = step(model_of(way, mesh))
    dist.barrier()
    return result


# --- passes and config entries -------------------------------------------------------------------

AB = teb.FSDPParamOrder.from_fqns([["a.weight", "b.weight"]])
BA = teb.FSDPParamOrder.from_fqns([["b.weight", "a.weight"]])
ENTRIES = "aten_distributed_optimizations."


class PassOfAScript(teb.BucketByUnit):
    """A pass that is defined in a script, where no import finds it."""


def by_backend(make):
    return lambda model: (teb.backend("inductor", [make()]), {})


def by_config(order, **entries):
    """Configure torch's own bucketing by config entries alone."""

    def setup(model):
        settings = {
            "bucket_all_gathers_fx": "fsdp",
            "bucket_reduce_scatters_fx": "fsdp",
            ENTRIES + "bucket_max_collectives_between": None,
            **{ENTRIES + name: value for name, value in entries.items()},
        }
        if order is not None:
            write = teb.hooks.TagParameters(model, order=order)
            settings["joint_custom_post_pass"] = write
            settings[ENTRIES + "bucket_payload_order_key"] = "fsdp_payload_order"
        return "inductor", settings

    return setup


def own_pass():
    """Make the pass of the module that the test edits."""
    import hooks

    return hooks.OwnPass(AB)


def edited_own_pass():
    """Edit the module and import it as a new process does."""
    import hooks

    path = Path(hooks.__file__)
    path.write_text(path.read_text().replace("1 > 0", "-1 > 0"))
    del sys.modules["hooks"]
    importlib.invalidate_caches()
    _source._noted.clear()
    _source.source_digest.cache_clear()
    return own_pass()


def edited(model):
    """Set up as if the package had been edited."""
    _source._PACKAGE = "another digest"
    return SETUPS["backend"](model)


SETUPS = {
    "backend": by_backend(lambda: teb.BucketByUnit(AB)),
    "backend, other order": by_backend(lambda: teb.BucketByUnit(BA)),
    "backend, lambda": by_backend(lambda: teb.BucketByUnit(AB, payload_order=lambda start: 0)),
    "backend, pass of a script": by_backend(lambda: PassOfAScript(AB)),
    "backend, own pass": by_backend(own_pass),
    "backend, own pass edited": by_backend(edited_own_pass),
    "backend, edited": edited,
    "config": by_config(AB),
    "config, other order": by_config(BA),
    "config, model turned": by_config(AB),
    "config, filter": by_config(AB, fsdp_group_filter=["default_pg"]),
    "config, values only": by_config(None),
}


@contextlib.contextmanager
def codes_run():
    """Collect the digests of the wrapper code that Inductor loads, compiled or from a cache."""
    from torch._inductor.codecache import PyCodeCache

    digests: list[str] = []
    load = PyCodeCache.load_by_key_path

    def spy(key, path, *args, **kwargs):
        with open(path, encoding="utf-8") as file:
            # Comments have the number of the graph in the process.
            text = "".join(line for line in file if not line.lstrip().startswith("#"))
        digests.append(hashlib.sha256(text.encode()).hexdigest()[:12])
        return load(key, path, *args, **kwargs)

    PyCodeCache.load_by_key_path = spy
    try:
        yield digests
    finally:
        PyCodeCache.load_by_key_path = load


class Log(logging.Handler):
    """Keeps the messages about bypassed caches."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "ypass" in record.getMessage():
            self.messages.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def state_of(name: str, mesh: Any) -> dict[str, Any]:
    from torch._inductor import config

    torch._dynamo.reset()
    counters.clear()
    log = Log()
    names = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")
    loggers = [logging.getLogger(n) for n in (*names, "torch_ext_bucketing")]
    for logger in loggers:
        logger.addHandler(log)
        if logger.level in (logging.NOTSET, logging.WARNING):
            logger.setLevel(logging.INFO)
    model = Pair(turned="turned" in name)
    compiler, settings = SETUPS[name](model)
    shard_by_parametrization(model, mesh)
    with config.patch(settings), codes_run() as codes:
        torch.compile(model, backend=compiler)(torch.ones(4, 8)).sum().backward()
    for logger in loggers:
        logger.removeHandler(log)
    return {"name": name, **states(), "codes": codes, "log": log.messages, "file": teb.__file__}


def uuids(name: str) -> dict[str, Any]:
    """Disable passes that nothing has imported yet, and compute the UUIDs of others."""
    off = ["combine_uses", "separate_groups"]
    assert not [m for m in off if f"torch_ext_bucketing.passes.{m}" in sys.modules]
    os.environ["TORCH_EXT_BUCKETING_DISABLE"] = "CombineUses, SeparateGroups"
    disabled = teb.backend("aot_eager").pipeline.disabled
    from torch_ext_bucketing.passes.pipeline import Pipeline

    order = teb.FSDPParamOrder.from_fqns([["a.w", "b.w"], ["c.w"]])
    passes = [
        teb.ReshardAfterForward(keep=["a"]),
        teb.hooks.TagParameters(),
        teb.ReshardAfterForward(),
        teb.BucketByUnit(order),
        teb.BucketByUnit(order, payload_order=None),
        teb.BucketByUnit(order, kinds=("all_gather",)),
        teb.BucketByUnit([["a"]]),
    ]
    found = [*(p.uuid() for p in passes), Pipeline(passes[1:]).uuid()]
    del os.environ["TORCH_EXT_BUCKETING_DISABLE"]
    return {"name": name, "disabled": disabled, "uuids": found}


def plans(name: str) -> dict[str, Any]:
    """Plan and schedule random graphs, to compare with a process of another hash seed."""
    from random_graphs import layered_graph, random_graph

    from torch_ext_bucketing.bucketing.plan import ByCap
    from torch_ext_bucketing.graph.analysis import GraphAnalysis
    from torch_ext_bucketing.planner.scheduling import schedule

    found = []
    for _ in range(2):
        dist.new_group(list(range(dist.get_world_size())))
    for seed in range(40):
        graph = random_graph(seed, 20, ("0", "1", "2")).graph
        plan = ByCap(400 / 2**20, eligible=lambda start: True).plan(GraphAnalysis(graph))
        buckets = [[b.kind, [m.name for m in b.members], b.detail] for b in plan.buckets]
        found.append([buckets, [str(alone) for alone in plan.unmerged]])
    order = schedule(layered_graph(2000, 100, ["0", "0"], share=False), teb.Overlap()).order
    return {"name": name, "plans": found, "order": order}


WITHOUT_COMPILING = {"uuids": uuids, "plans": plans}


def setups(*names: str) -> list[dict[str, Any]]:
    """Compile each of ``SETUPS`` by name, or run a function of ``WITHOUT_COMPILING``."""
    if any(name.startswith("config") for name in names):
        teb.hooks.install()
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        return [
            WITHOUT_COMPILING[n](n) if n in WITHOUT_COMPILING else state_of(n, mesh) for n in names
        ]


def main() -> None:
    torch.set_num_threads(1)
    name, *arguments = sys.argv[1:]
    functorch_config.autograd_cache_allow_custom_autograd_functions = name != "setups"
    # The wrapper code shows every change of a pass, so kernels are not compiled.
    inductor_config.fallback_by_default = True
    results = globals()[name](*arguments)
    lines = "".join(json.dumps(r) + "\n" for r in results)
    sys.stdout.write(lines)  # in one write, so that lines of two ranks don't mix
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
