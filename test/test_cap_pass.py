"""Bucketing by byte cap as a pass, and what the Inductor backend is told beside it."""

from __future__ import annotations

import pytest
import torch
from sharded_models import TwoBlocks
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing._torch.inductor import compile_inductor
from torch_ext_bucketing.bucketing.groups import primary_group
from torch_ext_bucketing.fsdp.order import FSDPParamOrder
from torch_ext_bucketing.fsdp.simple_fsdp import data_parallel
from torch_ext_bucketing.passes import backends as backend_module
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.bucketing import BucketByCap
from torch_ext_bucketing.rewrites.resharding import ReshardAfterForward

TOKENS = torch.zeros(2, 3, dtype=torch.long)
PREFIX = "aten_distributed_optimizations."


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled_report(by_cap, mode="fully_shard"):
    torch.manual_seed(0)
    shape = (2, 2) if mode == "hybrid_shard" else (4,)
    model = data_parallel(TwoBlocks(), init_device_mesh("cpu", shape), mode)
    compiler = backend("aot_eager", [ReshardAfterForward(), by_cap])
    torch.compile(model, backend=compiler)(TOKENS).sum().backward()
    return compiler.last_report()


def test_both_phases_and_all_kinds(fake_world):
    report = compiled_report(BucketByCap(1.0), "hybrid_shard")
    assert report.graph("forward").collectives_after == {"all_gather": 1}
    after = report.graph("backward").collectives_after
    assert after == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}


def test_a_small_cap_is_kept(fake_world):
    report = compiled_report(BucketByCap(1024 / 2**20))
    assert report.buckets
    for bucket in report.buckets:
        assert bucket.wire_bytes <= bucket.cap_bytes == 1024


def test_payload_is_packed_in_the_callers_order(fake_world):
    order = FSDPParamOrder.from_model(TwoBlocks(), ["layers.0", "layers.1", ""])
    rank = {fqn: i for i, fqn in enumerate(f for unit in order.units for f in unit)}
    report = compiled_report(BucketByCap(1.0, payload_order=order))
    assert [b.kind for b in report.buckets] == ["all_gather", "all_gather", "reduce_scatter"]
    for bucket in report.buckets:
        packed = [rank[f] for m in bucket.members for f in m.fqns]
        assert packed == sorted(packed)


def test_bad_options_are_known_at_once():
    with pytest.raises(ValueError, match="cap_mb must be a positive number"):
        BucketByCap(-1)
    with pytest.raises(TypeError, match="payload_order must be a callable"):
        BucketByCap(1.0, payload_order=True)
    with pytest.raises(TypeError, match="max_spam"):
        BucketByCap(1.0, max_spam=3)


def test_uuids():
    same = [BucketByCap({"b": 2.0, "a": 1.0}, group_filter=primary_group).uuid() for _ in range(2)]
    assert same[0] == same[1]
    others = [
        BucketByCap().uuid(),
        BucketByCap(1.0).uuid(),
        BucketByCap(1.0, kinds=("all_gather",)).uuid(),
        BucketByCap(1.0, non_adjacent=False).uuid(),
        same[0],
    ]
    assert len(set(others)) == len(others)
    assert None not in others
    assert BucketByCap({"a": lambda i: 1.0}).uuid() is None
    assert BucketByCap(eligible=lambda n: True).uuid() is None


@pytest.mark.parametrize(
    ("set_by_user", "prefetch", "expected"),
    [
        ({}, 50, None),  # no overlap scheduling
        ({"enable_overlap_scheduling": True}, 50, 50),
        ({"enable_overlap_scheduling": True}, 7, 7),
        ({"enable_overlap_scheduling": True}, None, None),
        ({"enable_overlap_scheduling": True, "max_compute_pre_fetch": 9}, 50, None),
    ],
)
@pytest.mark.parametrize("as_options", [False, True])
def test_prefetch_depth_is_set_where_the_scheduler_takes_it(
    monkeypatch, set_by_user, prefetch, expected, as_options
):
    import torch._inductor.compile_fx as inductor

    seen = {}

    def compile_fx(gm, inputs, config_patches, **_):
        seen.update(config_patches)
        with inductor_config.patch(config_patches):
            depth = inductor_config.aten_distributed_optimizations.max_compute_pre_fetch
        return lambda *args: depth

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    given = {PREFIX + k: v for k, v in set_by_user.items()}
    before = inductor_config.aten_distributed_optimizations.max_compute_pre_fetch
    with inductor_config.patch({} if as_options else given):
        compiled = compile_inductor(
            None,
            (),
            joint=None,
            post_grad=None,
            options=given if as_options else None,
            prefetch=prefetch,
        )
    user = set_by_user.get("max_compute_pre_fetch")
    assert compiled() == (user if user is not None else expected)
    assert (PREFIX + "max_compute_pre_fetch" in seen) == (
        expected is not None or (as_options and user is not None)
    )
    assert inductor_config.aten_distributed_optimizations.max_compute_pre_fetch == before


def test_backend_passes_its_prefetch_depth_on(monkeypatch):
    seen = []

    def compile_inductor(gm, inputs, **kwargs):
        seen.append(kwargs["prefetch"])
        return gm.forward

    monkeypatch.setattr(backend_module, "compile_inductor", compile_inductor)
    for compiler in (backend(), backend(prefetch=3), backend(prefetch=None)):
        torch._dynamo.reset()
        torch.compile(lambda x: x + 1, backend=compiler)(torch.ones(1))
    assert seen == [50, 3, None]
    with pytest.raises(ValueError, match="at least 0"):
        backend(prefetch=-1)
