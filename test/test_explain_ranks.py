"""The plan that explain prints is the plan that a job of ranks makes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_models import small_transformer
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.reports.compile import CompileReport
from torch_ext_bucketing.testing.ranks import Rank, run_ranks

RANKS = 2
GIB = 2**30
JOBS: dict[str, tuple[Any, Any, dict[str, float]]] = {
    "parity": ("aot_eager", "parity", {}),
    "bound": ("aot_eager", "speed", {"gib": 0.62e6 / GIB, "host_gib": 0.05e6 / GIB}),
    "inductor": ("inductor", "speed", {"gib": 0.62e6 / GIB}),
}


def build():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = small_transformer()
    teb.data_parallel(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return model, torch.zeros(4, 8, dtype=torch.long)


def plan(report: CompileReport) -> dict[str, Any]:
    """Return all that a report has but times of the search, and what explain adds."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("seconds", "curve", "passes", "tried")
            return {k: without(v) for k, v in value.items() if k not in left_out}
        return [without(v) for v in value] if isinstance(value, list | tuple) else value

    found = without(report.as_dict())
    assert found["graphs"][0]["buckets"]
    return found


def train(rank: Rank) -> dict[str, Any]:
    store = dist.FileStore(rank.store_path, rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
    plans = {}
    for name, (compiler, goal, bound) in JOBS.items():
        torch._dynamo.reset()
        model, tokens = build()
        memory = {"memory": teb.PeakMemory(**bound)} if bound else {}
        backend = teb.backend(compiler, teb.recipe(model, goal, **memory))
        torch.compile(model, backend=backend)(tokens).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        plans[name] = plan(backend.last_report())
    return plans


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(train, RANKS, timeout_s=300)


@pytest.mark.parametrize("name", JOBS)
def test_explain_prints_the_plan_of_a_job(of_ranks, name):
    compiler, goal, bound = JOBS[name]
    torch._dynamo.reset()
    found = explain(
        f"{__name__}:build",
        goal=goal,
        world_size=RANKS,
        memory_gib=bound.get("gib"),
        host_gib=bound.get("host_gib"),
        backend=compiler,
        on_cpu=True,
    )
    mine, first, last = plan(found.report), *(plans[name] for plans in of_ranks)
    assert mine == first
    # The last rank's shards are smaller: it pads them, by nodes that rank 0 has not.
    assert mine["graphs"] == last["graphs"]
    assert mine["rewrites"] == last["rewrites"]
