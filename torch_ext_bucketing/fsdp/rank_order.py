"""Replace eager FSDP2's reduce-scatter by an all-to-all and a sum in rank order.

This is the eager counterpart of the pass :class:`.FixedOrderReduce`. Both do the same additions on
the same values, so their bits are equal for any buckets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._torch.fsdp2 import DefaultAllocMixin, ReduceScatter
from ..errors import check_argument
from ..graph.nodes import Kind


def check_accumulate(dtype: torch.dtype) -> torch.dtype:
    """Return ``dtype``; raise a ValueError if it is not ``torch.float32`` or ``torch.float64``."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate must be torch.float32 or torch.float64, got {dtype!r}")
    return dtype


def sum_in_rank_order(
    received: torch.Tensor, ranks: int, accumulate: torch.dtype, average: bool
) -> torch.Tensor:
    """Add the ranks' parts, ``((p0 + p1) + p2) + ...``, and round once.

    ``received`` has the parts one after the other, [ranks * n] in floating point. They are added in
    ``accumulate``, unless their own dtype is wider, and with ``average`` multiplied by ``1 /
    ranks``. The sum is [n] in the dtype of ``received``, in new memory.
    """
    wire = received.dtype
    first, *parts = received.view(ranks, received.numel() // ranks).unbind()
    total = first.to(torch.promote_types(wire, accumulate), copy=True)
    for part in parts:
        total += part
    if average:
        # Not divided: on a GPU neither ATen nor Inductor divides by a constant.
        total *= 1 / ranks
    return total.to(wire)


_library = torch.library.Library("torch_ext_bucketing", "FRAGMENT")
_library.define(
    "sum_in_rank_order(Tensor received, int ranks, ScalarType accumulate, bool average) -> Tensor"
)
_library.impl("sum_in_rank_order", sum_in_rank_order, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torch_ext_bucketing::sum_in_rank_order",
    lambda received, ranks, *_: received.new_empty([received.numel() // ranks]),
    lib=_library,
)
SUM = torch.ops.torch_ext_bucketing.sum_in_rank_order.default
""":func:`sum_in_rank_order` as an operator in graphs."""


def steps_of(kind: Kind, ranks: int, fixed_size: bool = True) -> tuple[str, ...]:
    """Return the collectives that replace a reduction; the sum follows the first one."""
    # For an all-reduce, each rank either adds its own part, which is then gathered, or gathers all
    # inputs and adds everything. With two ranks both move the same bytes. Without a fixed size,
    # dividing into parts takes too many nodes.
    if kind == "reduce_scatter":
        return ("all_to_all",)
    return ("all_gather",) if ranks == 2 or not fixed_size else ("all_to_all", "all_gather")


class AllToAllReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Reduce-scatter for eager FSDP2's ``set_custom_reduce_scatter``, on every wrapped module.

    ::

        reduce = AllToAllReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduce)

    Gradients then equal those of a model compiled with :class:`.FixedOrderReduce`, bit for bit, for
    any units and byte caps. A rank receives as many bytes as it sends, the size of the unit's
    packed gradients, and holds both while it adds. ``accumulate`` is the dtype of the sums,
    ``torch.float32`` or ``torch.float64``.

    With hybrid sharding FSDP2 all-reduces over the replicas itself. With two replicas that gives
    the same bits in any order; for more replicas see :class:`AllToAllAllReduce`.
    """

    def __init__(self, accumulate: torch.dtype = torch.float32) -> None:
        self.accumulate = check_accumulate(accumulate)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Reduce-scatter [ranks * n], rank by rank, into ``output_tensor`` [n].

        Both have one floating-point dtype. Work runs on the current stream. A ``ValueError`` comes
        before anything is sent.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"AllToAllReduceScatter sums or averages, got {op}. With "
                "set_gradient_divide_factor also call set_force_sum_reduction_for_comms(True), so "
                "that FSDP2 divides"
            )
        wire = input_tensor.dtype
        if async_op or not wire.is_floating_point or output_tensor.dtype is not wire:
            raise ValueError(
                "AllToAllReduceScatter needs async_op=False and floating-point tensors of one "
                f"dtype, got async_op={async_op}, {wire} and {output_tensor.dtype}"
            )
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        average = op == dist.ReduceOp.AVG
        total = sum_in_rank_order(received, group.size(), self.accumulate, average)
        output_tensor.copy_(total.view(output_tensor.shape))


class AllToAllAllReduce:
    """Average over any number of replicas, as eager FSDP2's ``set_all_reduce_hook``.

    FSDP2's own all-reduce can't be replaced, and its hook runs after it. So wrap the modules over
    the shards alone, and let the hook average over the replicas::

        mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
        reduce = AllToAllReduceScatter()
        average = AllToAllAllReduce(mesh["replicate"].get_group())
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
            module.set_custom_reduce_scatter(reduce)
            module.set_all_reduce_hook(average)

    All replicas must start with the same weights. The hook runs after every backward.
    ``accumulate``: see :class:`AllToAllReduceScatter`.
    """

    def __init__(self, group: dist.ProcessGroup, accumulate: torch.dtype = torch.float32) -> None:
        check_argument("group", group, dist.ProcessGroup)
        self.group = group
        self.accumulate = check_accumulate(accumulate)

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average a flat, contiguous floating-point tensor over the replicas, in place."""
        ranks, size = self.group.size(), reduced.numel()
        steps = steps_of("all_reduce", ranks)
        if steps == ("all_gather",):
            received = reduced.new_empty(ranks * size)
            dist.all_gather_into_tensor(received, reduced, group=self.group)
        else:
            padded = torch.nn.functional.pad(reduced, [0, -size % ranks])
            received = torch.empty_like(padded)
            dist.all_to_all_single(received, padded, group=self.group)
        total = sum_in_rank_order(received, ranks, self.accumulate, average=True)
        if len(steps) > 1:
            dist.all_gather_into_tensor(received, total, group=self.group)
            total = received[:size]
        reduced.copy_(total)
