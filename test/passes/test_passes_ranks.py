"""Bucketed training on real ranks: the same bits as without buckets, and as eager FSDP2."""

import pytest
import torch
import torch.distributed as dist
from blocks_on_ranks import UNITS, assert_equal, gradients, mesh, model, shard, tokens
from marks import at_night
from rank_pool import on_ranks
from sharded_models import OneBlock, eager_fsdp2
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.fsdp.units import FSDPParamOrder
from torch_ext_bucketing.passes.backends import backend
from torch_ext_bucketing.passes.bucketing import BucketByUnit, SeparateGroups
from torch_ext_bucketing.planner.resharding import ReshardAfterForward

pytestmark = [pytest.mark.torch, pytest.mark.long]

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def bucketing_passes(reshard):
    order = FSDPParamOrder.from_model(OneBlock(), UNITS)
    passes = [BucketByUnit(order, KINDS)]
    return [*passes, ReshardAfterForward()] if reshard else passes


def _compiled_equals_eager(rank, mode, reduce_dtype):
    """Replicas have no eager FSDP2: the model without a compiler stands for it."""
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": reduce_dtype}
    module = shard(mode, **dtypes)
    expected = gradients(module, module, rank)
    reshard = mode != "replicate"
    if reshard:
        eager = eager_fsdp2(model(), UNITS, mesh(mode), **dtypes)
        assert_equal(gradients(eager, eager, rank), expected)
    b = backend("aot_eager", bucketing_passes(reshard))
    compiled = torch.compile(module, backend=b)
    for _ in range(2):
        assert_equal(gradients(compiled, module, rank), expected)
    assert max(b.last_report().collectives_before.values()) >= 6
    # With resharding, two gathers in forward and in backward: the head is alone in its unit.
    for kind, number in b.last_report().collectives_after.items():
        assert number == (4 if reshard and kind == "all_gather" else 2), kind
    with torch.no_grad():
        assert torch.equal(compiled(tokens(rank)), module(tokens(rank)))


@pytest.mark.parametrize(
    ("mode", "world", "reduce_dtype"),
    [
        ("hybrid_shard", 4, torch.float32),
        at_night("fully_shard", 2, None),
        at_night("replicate", 2, torch.float32),
    ],
)
def test_compiled_and_uncompiled_steps_equal_eager_fsdp2(mode, world, reduce_dtype):
    on_ranks(_compiled_equals_eager, mode, reduce_dtype, world=world)


def _inductor_equals_inductor_without_buckets(rank):
    # Shards are even, so ranks share their kernels.
    module = shard("fully_shard", 8, 14, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    expected = gradients(torch.compile(module), module, rank)
    torch._dynamo.reset()
    b = backend("inductor", bucketing_passes(False))
    compiled = torch.compile(module, backend=b)
    for _ in range(2):
        assert_equal(gradients(compiled, module, rank), expected)
    assert b.last_report().collectives_after == {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.slow
def test_inductor_equals_inductor_without_buckets():
    on_ranks(_inductor_equals_inductor_without_buckets)


def _reductions_on_their_own_groups(rank, mode):
    where = mesh(mode)
    module = data_parallel(model(), where, mode, reduce_dtype=torch.float32)
    expected = gradients(module, module, rank)
    separate = SeparateGroups(where, ["reduce_scatter", "all_reduce"])
    assert len(separate.second) == where.ndim
    for dim in range(where.ndim):
        second = separate.second[where.get_group(dim).group_name]
        group = torch.distributed.distributed_c10d._resolve_process_group(second)
        assert dist.get_process_group_ranks(group) == dist.get_process_group_ranks(
            where.get_group(dim)
        )
    b = backend("aot_eager", [separate, *bucketing_passes(True)])
    compiled = torch.compile(module, backend=b)
    for _ in range(2):
        assert_equal(gradients(compiled, module, rank), expected)
    groups = {kind: set() for kind in KINDS}
    for graph in b.last_report().graphs:
        for bucket in graph.buckets:
            groups[bucket.kind].add(bucket.group)
    shard_group = where.get_group(where.ndim - 1).group_name
    assert groups["all_gather"] == {shard_group}
    assert groups["reduce_scatter"] == {separate.second[shard_group]}
    if mode == "hybrid_shard":
        assert groups["all_reduce"] == {separate.second[where.get_group(0).group_name]}


@pytest.mark.parametrize(
    ("mode", "world"),
    [("fully_shard", 2), at_night("hybrid_shard", 4)],
)
def test_reductions_on_their_own_groups(mode, world):
    on_ranks(_reductions_on_their_own_groups, mode, world=world)


def test_separate_groups_names_what_is_wrong(fake_world):
    flat = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="kinds must be some of"):
        SeparateGroups(flat, kinds=["broadcast"])
