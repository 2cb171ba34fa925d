"""The README's examples run as they stand."""

from typing import Any
from unittest import mock

import pytest
import torch
from collective_graphs import NON_ADJACENT, PAYLOAD_ORDER
from readme_examples import EXAMPLES
from torch._inductor import config
from torch._inductor.fx_passes import bucketing
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from eager_parity.ranks import aten_kernels
from torch_ext_bucketing.testing.model import ModelConfig, Transformer


@pytest.fixture
def scope(fake_world: int) -> dict[str, Any]:
    """The names that the examples use."""
    torch._dynamo.reset()
    model = Transformer(ModelConfig(layers=2, dim=32, heads=2, kv_heads=1, hidden=48, vocab=64))
    mesh = init_device_mesh("cpu", (fake_world,))
    order = teb.FSDPParamOrder.from_model(model, units=teb.transformer_block_plan(model))
    return {"model": model, "mesh": mesh, "order": order, "torch": torch}


def run_step(compiled: torch.nn.Module) -> None:
    compiled(torch.zeros(1, 16, dtype=torch.long)).float().sum().backward()


def test_there_are_four_examples():
    assert len(EXAMPLES) == 4


def counts_of_units(scope: dict[str, Any]) -> list[dict[str, int]]:
    """Collectives per parameter and per unit. Backward gathers again all but the embedding, whose
    weight it does not read, and the last unit, which stays gathered."""
    last = len(scope["order"].units[-1])
    parameters, units = len(list(scope["model"].parameters())), len(scope["order"].units)
    return [
        {"all_gather": 2 * n - 1 - kept, "reduce_scatter": n}
        for n, kept in ((parameters, last), (units, 1))
    ]


def test_quick_start(scope: dict[str, Any]):
    with config.patch({"force_disable_caches": True}):
        # The passes are the same; what Inductor makes of the graphs is slow and not looked at.
        exec(EXAMPLES[0].replace('"inductor"', '"aot_eager"'), scope)
        run_step(scope["compiled"])
    report = scope["backend"].last_report()
    assert [report.collectives_before, report.collectives_after] == counts_of_units(scope)
    for bucket in report.buckets:
        members = [f for m in bucket.members for f in m.fqns]
        assert tuple(members) == scope["order"].units[bucket.unit]


@pytest.mark.filterwarnings("ignore::torch_ext_bucketing.errors.BoundNotKeptWarning")
@pytest.mark.parametrize("name", ["parity", "speed"])
def test_passes_written_out(scope: dict[str, Any], name: str):
    """On a model this small one all-gather is more than 2% of memory; that is said, and it runs."""
    teb.data_parallel(scope["model"], scope["mesh"])
    exec(EXAMPLES[1], scope | {"teb": teb}, scope)
    compiler = teb.backend("aot_eager", scope[name])
    run_step(torch.compile(scope["model"], backend=compiler))
    report = compiler.last_report()
    assert len(report.schedules) == len(report.graphs) == 2
    assert report.buckets
    assert {b.packed_by for b in report.buckets} == {"FSDPParamOrder"}
    for schedule in report.schedules:
        assert schedule.step_ms[1] >= schedule.bound_ms
        bounded = any("ratio=1.02" in policy for policy in schedule.policies)
        assert bounded == (name == "speed")


@pytest.mark.hooks
@pytest.mark.slow
def test_config_example(scope: dict[str, Any]):
    teb.data_parallel(scope["model"], scope["mesh"], param_dtype=torch.bfloat16)
    # What the example sets is put back on leaving.
    settings = {
        "joint_custom_post_pass": None,
        "bucket_all_gathers_fx": "none",
        "bucket_reduce_scatters_fx": "none",
        PAYLOAD_ORDER: None,
        NON_ADJACENT: False,
    }
    merge = bucketing.process_collective_bucket
    with (
        aten_kernels(),
        config.patch(settings),
        mock.patch.object(bucketing, "process_collective_bucket", side_effect=merge) as merged,
    ):
        exec(EXAMPLES[3], scope)
        run_step(scope["compiled"])
    sizes = [len(call.args[1]) for call in merged.call_args_list]
    # Forward gathers, and the gradients of all parameters.
    assert sizes
    assert min(sizes) > 1
    assert sum(sizes) >= 2 * len(list(scope["model"].parameters())) - 2
    # Every member has a place, and its bucket is packed by it.
    for call in merged.call_args_list:
        places = [start.meta["fsdp_payload_order"] for start in call.args[1]]
        assert None not in places
        assert len(set(places)) == len(places)
