"""Bucketed graphs of the patched torch, for each hook alone and for all together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from collective_graphs import (
    GROUP_FILTER,
    MAX_SPAN,
    NON_ADJACENT,
    PAYLOAD_ORDER,
    all_gather,
    all_reduce,
    reduce_scatter,
    show,
    trace,
)
from expecttest import assert_expected_inline
from torch._inductor import config
from torch._inductor.fx_passes import bucketing, fsdp
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_features import needs_pre_bucketing


@pytest.fixture(autouse=True)
def groups() -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD, dist.new_group([0, 1])
    dist.destroy_process_group()


def normalized(gm: torch.fx.GraphModule, groups: tuple[dist.ProcessGroup, ...]) -> str:
    stable_topological_sort(gm.graph)
    gm.graph.lint()
    gm.recompile()
    text = show(gm)
    for group, name in zip(groups, ("'dp'", "'ep'"), strict=True):
        text = text.replace(f"'{group.group_name}'", name)
    return text


def by_size(start: torch.fx.Node) -> int:
    """Smallest member first."""
    return start.args[0].meta["val"].numel()


def test_payload_order(groups):
    def fn(x, y, z):
        grads = [reduce_scatter(v * 2, groups[0]) for v in (x, y, z)]
        return [all_gather(g, groups[0]) for g in grads]

    gm = trace(fn, torch.zeros(6), torch.zeros(2), torch.zeros(4))
    with config.patch({PAYLOAD_ORDER: by_size}):
        bucketing.bucket_reduce_scatter(gm, lambda _: 1.0, "custom_ops")
        bucketing.bucket_all_gather(gm, lambda _: 1.0, "custom_ops")
    assert_expected_inline(
        normalized(gm, groups),
        """\
def forward(self, x_1, y_1, z_1):
    mul = aten.mul.Tensor(x_1, 2)
    mul_1 = aten.mul.Tensor(y_1, 2)
    mul_2 = aten.mul.Tensor(z_1, 2)
    _pre_bucket_reduce_scatter = bucketing._pre_bucket_reduce_scatter.default([mul_1, mul_2, mul], 2)
    reduce_scatter_tensor_3 = _c10d_functional.reduce_scatter_tensor.default(_pre_bucket_reduce_scatter, 'sum', 2, 'dp')
    wait_tensor_6 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_3)
    _pre_bucket_all_gather = bucketing._pre_bucket_all_gather.default([_, _, _], 2, ...)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'dp', out = _pre_bucket_all_gather)
    wait_tensor_7 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out)
    return [_, _, _]
""",
    )


def test_payload_order_of_all_reduces(groups):
    gm = trace(
        lambda x, y: [all_reduce(v + 1, groups[0]) for v in (x, y)], torch.zeros(3), torch.zeros(2)
    )
    with config.patch({PAYLOAD_ORDER: by_size}):
        bucketing.bucket_all_reduce(gm, lambda _: 1.0)
    assert_expected_inline(
        normalized(gm, groups),
        """\
def forward(self, x_1, y_1):
    add = aten.add.Tensor(x_1, 1)
    add_1 = aten.add.Tensor(y_1, 1)
    cat = aten.cat.default([_, _])
    all_reduce_2 = _c10d_functional.all_reduce.default(cat, 'sum', 'dp')
    wait_tensor_2 = _c10d_functional.wait_tensor.default(all_reduce_2)
    return [_, _]
""",
    )


def two_groups(groups):
    def fn(a, b, c, d):
        gathered = [all_gather(v, g) for v, g in ((a, groups[0]), (b, groups[0]))]
        gathered += [all_gather(v, groups[1]) for v in (c, d)]
        on = (groups[0], groups[0], groups[1], groups[1])
        return [reduce_scatter(g * 2, group) for g, group in zip(gathered, on, strict=True)]

    return trace(fn, *(torch.zeros(n) for n in (1, 2, 3, 4)))


@needs_pre_bucketing
def test_group_filter(groups):
    gm = two_groups(groups)
    with config.patch({GROUP_FILTER: lambda counts: [groups[1].group_name]}):
        fsdp.pre_bucket_fsdp_collectives(gm, "custom_ops", 1.0)
    assert_expected_inline(
        normalized(gm, groups),
        """\
def forward(self, a_1, b_1, c_1, d_1):
    all_gather_into_tensor = _c10d_functional.all_gather_into_tensor.default(a_1, 2, 'dp')
    wait_tensor = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(b_1, 2, 'dp')
    wait_tensor_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    _pre_bucket_all_gather = bucketing._pre_bucket_all_gather.default([c_1, d_1], 2, ...)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'ep', out = _pre_bucket_all_gather)
    wait_tensor_8 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out)
    mul = aten.mul.Tensor(wait_tensor, 2)
    reduce_scatter_tensor = _c10d_functional.reduce_scatter_tensor.default(mul, 'sum', 2, 'dp')
    wait_tensor_4 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    mul_1 = aten.mul.Tensor(wait_tensor_1, 2)
    reduce_scatter_tensor_1 = _c10d_functional.reduce_scatter_tensor.default(mul_1, 'sum', 2, 'dp')
    wait_tensor_5 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_1)
    mul_2 = aten.mul.Tensor(_, 2)
    mul_3 = aten.mul.Tensor(_, 2)
    _pre_bucket_reduce_scatter = bucketing._pre_bucket_reduce_scatter.default([mul_2, mul_3], 2)
    reduce_scatter_tensor_4 = _c10d_functional.reduce_scatter_tensor.default(_pre_bucket_reduce_scatter, 'sum', 2, 'ep')
    wait_tensor_9 = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_4)
    return [wait_tensor_4, wait_tensor_5, _, _]
""",
    )


def interleaved(groups):
    def fn(*xs):
        return [all_gather(x, g) + 1 for x, g in zip(xs, groups * 3, strict=True)]

    return trace(fn, *(torch.zeros(n) for n in (5, 2, 1, 4, 3, 6)))


def test_non_adjacent(groups):
    gm = interleaved(groups)
    with config.patch({NON_ADJACENT: True}):
        bucketing.bucket_all_gather(gm, lambda _: 1.0, "custom_ops")
    assert_expected_inline(
        normalized(gm, groups),
        """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1):
    _pre_bucket_all_gather = bucketing._pre_bucket_all_gather.default([arg0_1, arg2_1, arg4_1], 2, ...)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'dp', out = _pre_bucket_all_gather)
    wait_tensor_6 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out)
    add = aten.add.Tensor(_, 1)
    add_2 = aten.add.Tensor(_, 1)
    add_4 = aten.add.Tensor(_, 1)
    _pre_bucket_all_gather_1 = bucketing._pre_bucket_all_gather.default([arg1_1, arg3_1, arg5_1], 2, ...)
    all_gather_into_tensor_out_1 = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'ep', out = _pre_bucket_all_gather_1)
    wait_tensor_7 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out_1)
    add_1 = aten.add.Tensor(_, 1)
    add_3 = aten.add.Tensor(_, 1)
    add_5 = aten.add.Tensor(_, 1)
    return [add, add_1, add_2, add_3, add_4, add_5]
""",
    )


def test_span_bound(groups):
    gm = interleaved(groups)
    with config.patch({NON_ADJACENT: True, MAX_SPAN: 6}):
        bucketing.bucket_all_gather(gm, lambda _: 1.0, "custom_ops")
    assert_expected_inline(
        normalized(gm, groups),
        """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1):
    _pre_bucket_all_gather = bucketing._pre_bucket_all_gather.default([arg0_1, arg2_1], 2, ...)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'dp', out = _pre_bucket_all_gather)
    wait_tensor_6 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out)
    add = aten.add.Tensor(_, 1)
    add_2 = aten.add.Tensor(_, 1)
    _pre_bucket_all_gather_1 = bucketing._pre_bucket_all_gather.default([arg1_1, arg3_1], 2, ...)
    all_gather_into_tensor_out_1 = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'ep', out = _pre_bucket_all_gather_1)
    wait_tensor_7 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out_1)
    add_1 = aten.add.Tensor(_, 1)
    add_3 = aten.add.Tensor(_, 1)
    all_gather_into_tensor_4 = _c10d_functional.all_gather_into_tensor.default(arg4_1, 2, 'dp')
    wait_tensor_4 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_4)
    add_4 = aten.add.Tensor(wait_tensor_4, 1)
    all_gather_into_tensor_5 = _c10d_functional.all_gather_into_tensor.default(arg5_1, 2, 'ep')
    wait_tensor_5 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_5)
    add_5 = aten.add.Tensor(wait_tensor_5, 1)
    return [add, add_1, add_2, add_3, add_4, add_5]
""",
    )


@needs_pre_bucketing
def test_all_hooks_together(groups):
    gm = interleaved(groups)
    hooks = {
        PAYLOAD_ORDER: by_size,
        GROUP_FILTER: lambda counts: [max(counts, key=lambda g: counts[g]["all_gather"])],
        NON_ADJACENT: True,
        MAX_SPAN: 100,
    }
    with config.patch(hooks):
        fsdp.pre_bucket_fsdp_collectives(gm, "custom_ops", 1.0)
    assert_expected_inline(
        normalized(gm, groups),
        """\
def forward(self, arg0_1, arg1_1, arg2_1, arg3_1, arg4_1, arg5_1):
    all_gather_into_tensor_1 = _c10d_functional.all_gather_into_tensor.default(arg1_1, 2, 'ep')
    wait_tensor_1 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    add_1 = aten.add.Tensor(wait_tensor_1, 1)
    all_gather_into_tensor_3 = _c10d_functional.all_gather_into_tensor.default(arg3_1, 2, 'ep')
    wait_tensor_3 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_3)
    add_3 = aten.add.Tensor(wait_tensor_3, 1)
    _pre_bucket_all_gather = bucketing._pre_bucket_all_gather.default([arg2_1, arg4_1, arg0_1], 2, ...)
    all_gather_into_tensor_out = _c10d_functional.all_gather_into_tensor_out.default(_, 2, 'dp', out = _pre_bucket_all_gather)
    wait_tensor_6 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_out)
    add_2 = aten.add.Tensor(_, 1)
    add = aten.add.Tensor(_, 1)
    add_4 = aten.add.Tensor(_, 1)
    all_gather_into_tensor_5 = _c10d_functional.all_gather_into_tensor.default(arg5_1, 2, 'ep')
    wait_tensor_5 = _c10d_functional.wait_tensor.default(all_gather_into_tensor_5)
    add_5 = aten.add.Tensor(wait_tensor_5, 1)
    return [add, add_1, add_2, add_3, add_4, add_5]
""",
    )
