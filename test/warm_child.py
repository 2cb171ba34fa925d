"""What the processes of test_warm.py do. Ranks of a fake group take turns in one process; others are
a gloo group.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from extended_models import OtherScaled, TensorScaled, wrap
from sharded_models import shard_by_parametrization
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import torch_ext_bucketing as teb
from torch_ext_bucketing.testing.ranks import Rank

ORDER = teb.FSDPParamOrder.from_fqns([["a.weight", "b.weight"]])


class Pair(nn.Module):
    """Two layers. Where they are of one size and turned round, the graphs are the same but for the
    names."""

    def __init__(self, rows: int = 8, turned: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, rows, bias=False)
        self.b = nn.Linear(rows, 8, bias=False)
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(x)) if self.turned else self.b(self.a(x))


def shard_scaled(model: nn.Module, mesh: Any, cls: Any = TensorScaled) -> nn.Module:
    """With gathers in float8."""
    for linear in model.children():
        wrap(linear, cls)
    return teb.data_parallel(model, mesh)


Shard = Callable[[nn.Module, Any], nn.Module]
WAYS: dict[str, tuple[Shard, int]] = {
    # Nothing of an even graph but the merged gather differs between ranks.
    "even": (shard_by_parametrization, 8),
    "uneven": (shard_by_parametrization, 7),
    # Gradients are reduced in a wider dtype, which makes a node of the package's own.
    "data_parallel": (partial(teb.data_parallel, reduce_dtype=torch.float64), 7),
    "data_parallel, even": (partial(teb.data_parallel, reduce_dtype=torch.float64), 8),
    "float8": (shard_scaled, 8),
    "other float8": (partial(shard_scaled, cls=OtherScaled), 8),
}


@contextmanager
def fake_rank(rank: int, world: int = 2) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def model_of(way: str) -> nn.Module:
    shard, rows = WAYS[way]
    torch.manual_seed(0)
    return shard(Pair(rows), init_device_mesh("cpu", (dist.get_world_size(),)))


def step(model: Any) -> list[Any]:
    """The output, and this rank's gradients."""
    x = torch.arange(32.0).view(4, 8).add(dist.get_rank())
    y = model(x)
    (y * y).sum().backward()
    params = model.parameters()
    grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    return [t.detach().flatten().tolist() for t in (y, *grads)]


def states() -> dict[str, list[int]]:
    """Hits, misses and bypasses of the FX graph cache and of AOTAutograd's."""
    kinds = ("hit", "miss", "bypass")
    return {
        "graphs": [counters["inductor"][f"fxgraph_cache_{k}"] for k in kinds],
        "aot": [counters["aot_autograd"][f"autograd_cache_{k}"] for k in kinds],
    }


def compile_step(way: str) -> dict[str, Any]:
    """Compile a step, or load it, and run it."""
    torch._dynamo.reset()
    counters.clear()
    model = model_of(way)
    backend = teb.backend("inductor", [teb.BucketUnits(ORDER)])
    found: list[Any] = []
    compiled = torch.compile(model, backend=backend)
    codes = run_and_get_code(lambda: found.extend(step(compiled)))[1]
    # The place of this rank's shards in the buffer, in elements. What is reduced is sent whole.
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
    with fake_rank(rank):
        return {**compile_step(way), "rank": rank, "values": None}


def ranks(way: str, folder: str) -> list[dict[str, Any]]:
    """Rank 0 fills ``folder``, of which ``folder-0`` is a copy, rank 1 comes to it, and both come
    again."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    results = [as_rank(0, way)]
    shutil.copytree(folder, folder + "-0")
    return results + [as_rank(rank, way) for rank in (1, 0, 1)]


def turns(folder: str, *ways: str) -> list[dict[str, Any]]:
    """Ranks 0, 1, 0, ... come to ``folder``."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    return [as_rank(number % 2, way) for number, way in enumerate(ways)]


def artifacts(*ways: str) -> list[dict[str, Any]]:
    """What rank 0 saves is loaded into a new folder, for rank 1 and then for rank 0."""
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


def damaged(way: str) -> list[dict[str, Any]]:
    """Rank 1 three times, with every entry of the caches cut in half before the second time."""
    with fresh_cache():
        results = [as_rank(1, way)]
        cut = 0
        for name in ("fxgraph", "aotautograd"):
            for path in Path(cache_dir(), name).rglob("*"):
                if path.is_file():
                    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
                    cut += 1
        if cut != 2 + 1:
            raise AssertionError(f"{cut} entries")
        return results + [as_rank(1, way) for _ in range(2)]


@contextmanager
def gloo(rank: Rank) -> Iterator[None]:
    store = dist.FileStore(rank.store_path, rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def real(rank: Rank, way: str) -> dict[str, Any]:
    """A rank of a gloo group, and what the model without a compiler gives."""
    configure()
    with gloo(rank):
        return {"expected": step(model_of(way)), **compile_step(way)}


def one_for_all(rank: Rank, way: str) -> dict[str, Any]:
    """A rank of a gloo group, compiling for all ranks: what it makes, what the artifacts of rank 0
    make of it, and what the model without a compiler gives."""
    configure()
    torch.distributed.config.compile_on_one_rank = True
    with gloo(rank):
        return _one_for_all(way)


def _one_for_all(way: str) -> dict[str, Any]:
    with fresh_cache():
        each = compile_step(way)
        saved = torch.compiler.save_cache_artifacts()
    box = [saved[0] if saved is not None and dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    with fresh_cache():
        torch.compiler.load_cache_artifacts(box[0])
        loaded = compile_step(way)
    return {"each": each, "loaded": loaded, "expected": step(model_of(way))}


def configure() -> None:
    torch.set_num_threads(1)
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    # The code that calls kernels shows whatever a pass changes; none need be compiled.
    inductor_config.fallback_by_default = True


def in_turns(rank: Rank, name: str, *arguments: str) -> list[dict[str, Any]]:
    """What a function makes of several ranks in this process."""
    configure()
    return globals()[name](*arguments)
