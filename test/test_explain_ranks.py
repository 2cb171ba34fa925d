"""The plan that explain prints is the plan that a job of ranks makes."""

from typing import Any

import torch
import torch.distributed as dist
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


def train(rank: int) -> list[dict[str, Any]]:
    gib, host_gib = BOUND.values()
    plans = []
    for compiler, goal, options in (
        ("aot_eager", "parity", {}),
        ("inductor", "speed", {"memory": teb.PeakMemory(gib=gib, host_gib=host_gib)}),
    ):
        torch._dynamo.reset()
        model, tokens = build()
        backend = teb.backend(compiler, teb.recipe(model, goal, **options))
        with inductor_config.patch(fallback_by_default=True):  # without compiling kernels
            torch.compile(model, backend=backend)(tokens).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        plans.append(plan(backend.last_report()))
    return plans


def test_explain_prints_the_plan_of_a_job():
    first, last = on_ranks(train, world=RANKS, timeout_s=300)
    target = f"{__name__}:build"
    for given, mine, other in zip(
        (
            {"goal": "parity", "backend": "aot_eager"},
            {"backend": "inductor", "goal": "speed", **BOUND},
        ),
        first,
        last,
        strict=True,
    ):
        torch._dynamo.reset()
        found = plan(explain(target, world_size=RANKS, on_cpu=True, **given).report)
        assert found == mine
        # The last rank's shards are smaller: it pads them, by nodes that rank 0 has not.
        assert found["graphs"] == other["graphs"]
        assert found["rewrites"] == other["rewrites"]
