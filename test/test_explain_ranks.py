"""The plan that explain prints is the plan that a job of ranks makes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import at_night
from rank_pool import on_ranks
from sharded_models import TwoBlocks
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.reports.compile import CompileReport

RANKS = 2
GIB = 2**30
# The bound is kept by a product that is computed again and an activation in host memory.
BOUND = {"memory_gib": 82e3 / GIB, "host_gib": 30e3 / GIB}


def build():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = TwoBlocks(9, 13)
    teb.data_parallel(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return model, torch.zeros(64, 8, dtype=torch.long)


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


def train(rank: int, compiler: str, goal: str, bound: dict[str, float]) -> dict[str, Any]:
    torch._dynamo.reset()
    model, tokens = build()
    options: dict[str, Any] = {}
    if bound:
        gib, host_gib = bound.values()
        options["memory"] = teb.PeakMemory(gib=gib, host_gib=host_gib)
    backend = teb.backend(compiler, teb.recipe(model, goal, **options))
    with inductor_config.patch(fallback_by_default=True):  # without compiling kernels
        torch.compile(model, backend=backend)(tokens).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return plan(backend.last_report())


@pytest.mark.parametrize(
    ("compiler", "goal", "bound"),
    [("inductor", "speed", BOUND), at_night("aot_eager", "parity", {})],
)
def test_explain_prints_the_plan_of_a_job(compiler, goal, bound):
    first, last = on_ranks(train, compiler, goal, bound, world=RANKS, timeout_s=300)
    torch._dynamo.reset()
    given = {"backend": compiler, "goal": goal, **bound}
    found = plan(explain(f"{__name__}:build", world_size=RANKS, on_cpu=True, **given).report)
    assert found == first
    # The last rank's shards are smaller: it pads them, by nodes that rank 0 has not.
    assert found["graphs"] == last["graphs"]
    assert found["rewrites"] == last["rewrites"]
