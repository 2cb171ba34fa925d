"""Eager FSDP2's reduce-scatter as an all-to-all and a sum over the ranks in their order.

The eager twin of the pass :class:`.FixedOrderReduce`: both do the same additions on the same
values, so their bits are equal whatever is packed with what.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._torch.fsdp2 import DefaultAllocMixin, ReduceScatter
from ..graph.collectives import Kind


def check_accumulate(dtype: torch.dtype) -> torch.dtype:
    """``dtype``; a ValueError unless it is ``torch.float32`` or ``torch.float64``."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"accumulate must be torch.float32 or torch.float64, got {dtype!r}")
    return dtype


def sum_in_rank_order(
    received: torch.Tensor, ranks: int, accumulate: torch.dtype, average: bool
) -> torch.Tensor:
    """``((p0 + p1) + p2) + ...`` of the parts of ``received``, one per rank, rounded once.

    Args:
        received: the ranks' parts one after the other, of one size and in floating point.
        ranks: how many.
        accumulate: the dtype of the additions, unless that of the parts is wider.
        average: whether the sum is multiplied by ``1 / ranks`` before it is rounded. Not divided:
            on a GPU neither ATen nor Inductor divides by a constant.

    Returns:
        The sum of the parts, flat, in their dtype and in memory of its own.
    """
    wire = received.dtype
    first, *others = received.view(ranks, received.numel() // ranks).unbind()
    total = first.to(torch.promote_types(wire, accumulate), copy=True)
    for part in others:
        total += part
    if average:
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
    """The collectives that stand for a reduction, with the sum behind the first of them.

    Of an all-reduce each rank adds its own part, which is then gathered, or all. With two ranks
    either moves as much. A part of what has no fixed size is not worth its nodes.
    """
    if kind == "reduce_scatter":
        return ("all_to_all",)
    return ("all_gather",) if ranks == 2 or not fixed_size else ("all_to_all", "all_gather")


class AllToAllReduceScatter(DefaultAllocMixin, ReduceScatter):
    """For ``set_custom_reduce_scatter`` of eager FSDP2, on every module that is wrapped::

        reduce = AllToAllReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduce)

    Gradients are then those of a model compiled with :class:`.FixedOrderReduce`, bit for bit, with
    any units and byte caps there. A rank receives as many bytes as it sends, the size of the
    unit's packed gradients, and holds these as well while it adds.

    With hybrid sharding FSDP2 all-reduces over the replicas itself. Two replicas give the same bits
    in either order; for more of them see :class:`AllToAllAllReduce`.

    Args:
        accumulate: the dtype of the sums, ``torch.float32`` or ``torch.float64``.

    Raises:
        ValueError: another dtype.
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
        """Reduce-scatter; on return the result is in ``output_tensor``, on the current stream.

        Args:
            output_tensor: of n elements.
            input_tensor: of n elements for each rank, rank by rank, in the same float dtype.

        Raises:
            ValueError: ``op`` is no sum and no average, ``async_op``, or dtypes that differ or are
                no floating-point ones. Nothing was sent.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"AllToAllReduceScatter sums or averages, got {op}. Beside "
                "set_gradient_divide_factor call set_force_sum_reduction_for_comms(True): FSDP2 "
                "then divides itself"
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
    """Hybrid sharding over any number of replicas, for ``set_all_reduce_hook`` of eager FSDP2.

    FSDP2's own all-reduce can't be replaced, and its hook runs behind it. So the modules are
    wrapped over the shards alone, and the hook averages over the replicas::

        mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("replicate", "shard"))
        reduce = AllToAllReduceScatter()
        average = AllToAllAllReduce(mesh["replicate"].get_group())
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh["shard"], mp_policy=policy)
            module.set_custom_reduce_scatter(reduce)
            module.set_all_reduce_hook(average)

    All replicas must start with the same weights. The hook runs after every backward.

    Args:
        group: the replicas.
        accumulate: as of :class:`AllToAllReduceScatter`.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, group: dist.ProcessGroup, accumulate: torch.dtype = torch.float32) -> None:
        self.group = group
        self.accumulate = check_accumulate(accumulate)

    def __call__(self, reduced: torch.Tensor) -> None:
        """Average a contiguous, flat tensor in floating point over the replicas, in place."""
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
