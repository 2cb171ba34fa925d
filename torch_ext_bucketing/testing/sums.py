"""Add in the order of NCCL's rings.

Floating-point addition is not associative, so a gradient's bits depend on the rank that is added
first. In a ring reduction that depends on the element's offset in the buffer:

    byte offset -> piece of ``chunk_bytes`` -> channel -> the channel's ring order -> first rank

On one node all channels have the same ring, so a reduce-scatter's order does not depend on the
offset. On several nodes rings differ, and moving a parameter inside a bucket changes its bits.

The rules are those of NCCL's ring kernels (``src/device/reduce_scatter.h``, ``all_reduce.h``):

- **reduce-scatter**: the sum that ends on rank ``r`` starts at the next rank of the ring and goes
  around once; each rank adds its contribution, ``r`` last.
- **all-reduce**: a reduce-scatter over the ring *positions*, then an all-gather. ``n`` pieces make
  one loop of a channel; piece ``j`` of a loop ends on the rank at position ``j`` of the ring
  (counted from group rank 0, NCCL's ``ring->index``), so the offset matters on one node, too.
- every addition rounds to the tensor's dtype.

Simplified: loop ``p`` goes to channel ``p % channels`` (NCCL up to 2.18; later versions give each
channel a contiguous range), a short last loop is not spread over all channels, and NCCL's tree and
NVLS algorithms and its LL and LL128 protocols are not modelled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import check_count

_LARGEST_ITEM = 16  # bytes of a complex128: a piece never splits an element of any dtype


@dataclass(frozen=True)
class RingTopology:
    """The nodes of ranks, and the rings of a buffer.

    Global rank ``r`` is on node ``r // ranks_per_node``, in subgroups as well.

    Args:
        channels: parallel rings. The default of 8 is one per network card of an eight-GPU node;
            NCCL picks 2 to 32.
        chunk_bytes: bytes per channel in a row, a multiple of 16. NCCL's Simple protocol takes 2
            MiB: ``NCCL_BUFFSIZE`` (4 MiB) / ``NCCL_STEPS`` (8) per step, 4 steps per chunk. The
            default is smaller, so that parameters of a small model span several channels.
    """

    ranks_per_node: int
    channels: int = 8
    chunk_bytes: int = 512

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "channels", "chunk_bytes"):
            check_count(name, getattr(self, name), least=1)
        if self.chunk_bytes % _LARGEST_ITEM:
            raise ValueError(
                f"RingTopology: chunk_bytes={self.chunk_bytes} is not a multiple of "
                f"{_LARGEST_ITEM}, so a chunk could end inside an element"
            )

    def nodes_of(self, world_size: int) -> int:
        """Return the number of nodes; raise ValueError if ``world_size`` does not fill them."""
        if world_size < 1 or world_size % self.ranks_per_node:
            raise ValueError(
                f"RingTopology: a world of {world_size} ranks does not fill nodes of "
                f"ranks_per_node={self.ranks_per_node}; start a multiple of "
                f"{self.ranks_per_node} ranks or choose a divisor of {world_size}"
            )
        return world_size // self.ranks_per_node


def ring_order(topology: RingTopology, channel: int, group_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return one channel's ring over a group, as global ranks from ``group_ranks[0]`` on.

    Within one node all channels have the group's order. Over several nodes a ring enters each node
    at the GPU next to the channel's network card, as in NCCL's log lines for two nodes of four::

        Channel 00 : 0 1 2 3 4 5 6 7
        Channel 01 : 0 5 6 7 4 1 2 3        each node entered at its second GPU: 1 2 3 0 | 5 6 7 4

    After the channels have entered at every GPU, the next ones visit the nodes in reverse. This
    assumption models fabrics with several rails or switches, and is the only difference between
    rings of a group with one rank per node (the replicas of HSDP).
    """
    by_node: dict[int, list[int]] = {}
    for rank in group_ranks:
        by_node.setdefault(rank // topology.ranks_per_node, []).append(rank)
    nodes = list(by_node.values())
    if len(nodes) == 1:
        return tuple(group_ranks)
    if (channel // max(map(len, nodes))) % 2:
        nodes.reverse()
    ring: list[int] = []
    for node in nodes:
        entry = channel % len(node)
        ring += node[entry:] + node[:entry]
    start = ring.index(group_ranks[0])
    return tuple(ring[start:] + ring[:start])


@functools.lru_cache(maxsize=256)
def _rings(topology: RingTopology, group_ranks: tuple[int, ...]) -> Tensor:
    """Return every channel's ring as group ranks, ``[channels, n]``."""
    channels = range(topology.channels)
    rings = [map(group_ranks.index, ring_order(topology, c, group_ranks)) for c in channels]
    return torch.tensor(list(map(list, rings)))


_COMBINE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "SUM": Tensor.add_,
    "AVG": Tensor.add_,
    "PREMUL_SUM": Tensor.add_,
    "PRODUCT": Tensor.mul_,
    "MAX": lambda x, y: torch.maximum(x, y, out=x),
    "MIN": lambda x, y: torch.minimum(x, y, out=x),
}

Reduction = Callable[[Iterable[Tensor]], Tensor]
"""Adds contributions in the given order into the first of them."""


def make_reduction(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype, world_size: int, where: str
) -> Reduction:
    """Return the arithmetic of ``op`` on ``dtype`` over ``world_size`` ranks.

    AVG follows NCCL (``hostToDevRedOp`` in ``src/enqueue.cc``): floating-point inputs are
    multiplied by ``1 / world_size`` and rounded *before* they are added; integers are added, then
    divided towards zero. PREMUL_SUM multiplies by its factor, floating point only.
    """
    kind = dist.ReduceOp.RedOpType
    name = str(op.name if isinstance(op, kind) else op.op.name)
    floating = dtype.is_floating_point or dtype.is_complex
    if (
        name not in _COMBINE
        or (dtype.is_floating_point and dtype.itemsize == 1)
        or (name == "AVG" and dtype == torch.bool)
        or (name == "PREMUL_SUM" and not floating)
        or (name in ("MAX", "MIN") and dtype.is_complex)
    ):
        raise NotImplementedError(
            f"{where}: ReduceOp.{name} on {dtype} is not simulated; use SUM, AVG, PREMUL_SUM "
            f"(floating point), PRODUCT, MAX or MIN, on 16 bits or more where it is floating "
            f"point, or a gloo group for the others"
        )
    combine, scale, divisor = _COMBINE[name], None, None
    if name == "AVG" and not floating:
        divisor = world_size
    elif name in ("AVG", "PREMUL_SUM"):
        factor = torch.as_tensor(1.0 / world_size if name == "AVG" else op.factor)
        scale = factor.reshape(()).to(dtype)

    def reduce(contributions: Iterable[Tensor]) -> Tensor:
        scaled = (x if scale is None else x * scale for x in contributions)
        total = next(scaled)
        for x in scaled:
            combine(total, x)
        return total if divisor is None else total.div_(divisor, rounding_mode="trunc")

    return reduce


def ring_sums(
    parts: Tensor,
    topology: RingTopology,
    group_ranks: Sequence[int],
    reduction: Reduction,
    ends: Sequence[int] | None,
) -> Tensor:
    """Add the contributions of a group's ranks, each element in the order of its ring.

    ``parts`` is ``[n, sums, count]``, the contribution of each of ``n`` group ranks to each sum;
    the result is ``[sums, count]``, a new tensor. ``ends``: the group rank that each sum of a
    reduce-scatter ends on; None for an all-reduce.
    """
    n, sums, count = parts.shape
    size = topology.chunk_bytes // parts.dtype.itemsize
    piece = torch.arange(-(-count // size))
    rings = _rings(topology, tuple(group_ranks))
    if ends is None:
        channel, position = piece // n % topology.channels, (piece % n).expand(sums, -1)
    else:
        channel = piece % topology.channels
        position = rings.argsort(1)[channel][:, list(ends)].T
    steps = (position.unsqueeze(-1) + 1 + torch.arange(n)) % n
    order = rings[channel.unsqueeze(-1), steps].reshape(-1, n)  # [sums * pieces, n]

    padded = parts.new_zeros(n, sums, len(piece) * size)
    padded[..., :count] = parts
    pieces = padded.view(n, len(order), size)
    rows = torch.arange(len(order))
    total = reduction(pieces[order[:, step], rows] for step in range(n))
    return total.view(sums, len(piece) * size)[:, :count]


@torch.no_grad()
def simulate_reduce_scatter(
    inputs: Sequence[Tensor],
    topology: RingTopology,
    group_ranks: Sequence[int] | None = None,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Compute each rank's result of ``reduce_scatter_tensor`` without a process group.

    Results are views of one buffer, bit for bit those of a ring group of real ranks. ``inputs`` has
    a tensor per group rank, all of one shape ``[n * d0, ...]`` and dtype. ``group_ranks``: global
    ranks in group order.
    """
    n, shape = len(inputs), inputs[0].shape
    reduction = make_reduction(op, inputs[0].dtype, n, "simulate_reduce_scatter")
    parts = torch.stack([x.reshape(n, x.numel() // n) for x in inputs])
    out = ring_sums(parts, topology, group_ranks or range(n), reduction, range(n))
    return list(out.reshape(n, shape[0] // n, *shape[1:]).unbind(0))


@torch.no_grad()
def simulate_all_reduce(
    inputs: Sequence[Tensor],
    topology: RingTopology,
    group_ranks: Sequence[int] | None = None,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """Compute each rank's result of ``all_reduce``, of inputs of any shape."""
    reduction = make_reduction(op, inputs[0].dtype, len(inputs), "simulate_all_reduce")
    parts = torch.stack([x.reshape(1, x.numel()) for x in inputs])
    out = ring_sums(parts, topology, group_ranks or range(len(inputs)), reduction, None)
    return [out.reshape(inputs[0].shape).clone() for _ in inputs]
