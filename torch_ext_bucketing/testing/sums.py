"""The additions of NCCL's ring reductions, in NCCL's order, as pure functions on tensors.

Floating-point addition is not associative, so the bits of a gradient depend on which rank is added
first. In a ring reduction that is decided by where the element lies in the buffer:

    byte offset -> piece of ``chunk_bytes`` -> channel -> the channel's ring order -> first rank

With one node every channel has the same ring, so a reduce-scatter's order does not depend on the
offset. With several nodes the rings of the channels differ, and moving a parameter inside a bucket
changes its bits. This module is that mapping and nothing else; :mod:`.ring` puts
it behind a process group.

The rules are those of NCCL's ring kernels (``src/device/reduce_scatter.h``, ``all_reduce.h``):

- **reduce-scatter**: what ends on rank ``r`` starts at the rank after ``r`` in the ring and travels
  once around it; each rank adds its own contribution, ``r`` itself the last one.
- **all-reduce**: a reduce-scatter over the ring *positions* followed by an all-gather. ``n`` pieces
  in a row make one loop of a channel; piece ``j`` of a loop ends on the rank at position ``j`` of
  that ring (counted from group rank 0, NCCL's ``ring->index``). So here the order depends on the
  offset with a single node as well.
- every addition rounds to the tensor's own dtype.

What is simplified: loops are dealt out to channels in turn (loop ``p`` to channel ``p % channels``,
NCCL's layout up to 2.18; later versions give each channel one contiguous range), the last loop is
not shrunk to spread a short tail over all channels, and neither NCCL's tree and NVLS algorithms nor
its LL and LL128 protocols are modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "RingTopology",
    "ring_order",
    "simulate_all_reduce",
    "simulate_reduce_scatter",
]

_LARGEST_ITEM = 16  # bytes of a complex128: a piece never splits an element of any dtype


@dataclass(frozen=True)
class RingTopology:
    """How ranks sit on nodes, and how a buffer is dealt out to rings.

    Global rank ``r`` is on node ``r // ranks_per_node``; this holds for sub-groups as well.

    Args:
        ranks_per_node: ranks on each node.
        channels: parallel rings. The default of 8 is one per network card of an eight-GPU node,
            which is what makes the rings of such nodes differ; NCCL itself picks 2 to 32
            (``NCCL_MIN_NCHANNELS``, ``NCCL_MAX_NCHANNELS``).
        chunk_bytes: bytes that one channel takes in a row, a multiple of 16. NCCL's Simple
            protocol takes 2 MiB: ``NCCL_BUFFSIZE`` (4 MiB) / ``NCCL_STEPS`` (8) per step, 4 steps
            per chunk. The default of 512 bytes is deliberately far smaller, so that the parameters
            of a small test model span several channels as those of a large one do.
        nodes: number of nodes, if the world size is to be checked against it. ``None`` derives it
            from the world size.

    Raises:
        ValueError: a number that is not a positive integer, or ``chunk_bytes`` that is not a
            multiple of 16.
    """

    ranks_per_node: int
    channels: int = 8
    chunk_bytes: int = 512
    nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("ranks_per_node", "channels", "chunk_bytes", "nodes"):
            value = getattr(self, name)
            if name == "nodes" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"RingTopology: {name} must be a positive integer, got {value!r}")
        if self.chunk_bytes % _LARGEST_ITEM:
            raise ValueError(
                f"RingTopology: chunk_bytes={self.chunk_bytes} is not a multiple of "
                f"{_LARGEST_ITEM}, so a chunk could end inside an element; use "
                f"{-(-self.chunk_bytes // _LARGEST_ITEM) * _LARGEST_ITEM}"
            )

    def nodes_of(self, world_size: int) -> int:
        """Number of nodes of a world of ``world_size`` ranks.

        Raises:
            ValueError: the world does not fill whole nodes, or ``nodes`` says otherwise.
        """
        if world_size < 1 or world_size % self.ranks_per_node:
            raise ValueError(
                f"RingTopology: a world of {world_size} ranks does not fill nodes of "
                f"ranks_per_node={self.ranks_per_node}; start a multiple of "
                f"{self.ranks_per_node} ranks or choose a divisor of {world_size}"
            )
        nodes = world_size // self.ranks_per_node
        if self.nodes is not None and self.nodes != nodes:
            raise ValueError(
                f"RingTopology: nodes={self.nodes} with ranks_per_node={self.ranks_per_node} needs "
                f"{self.nodes * self.ranks_per_node} ranks, but the world has {world_size}; "
                f"use nodes={nodes} or leave nodes out"
            )
        return nodes


def ring_order(topology: RingTopology, channel: int, group_ranks: Sequence[int]) -> tuple[int, ...]:
    """The ring of one channel over a process group.

    Within one node all channels share the group's own order. Over several nodes a ring enters each
    node at the GPU next to the channel's network card, passes through the node and leaves for the
    next, as in NCCL's log lines for two nodes of four::

        Channel 00 : 0 1 2 3 4 5 6 7
        Channel 01 : 0 5 6 7 4 1 2 3        each node entered at its second GPU: 1 2 3 0 | 5 6 7 4

    Once the channels have entered at every GPU, the next round visits the nodes in reverse. That
    is an assumption: it stands for what cross-rail and several-switch fabrics do, and it is the
    only difference left for a group with one rank per node (the replicas of HSDP).

    Args:
        topology: nodes and channels.
        channel: 0 <= channel < topology.channels.
        group_ranks: *global* ranks of the group, in group order.

    Returns:
        The global ranks in ring order, starting at ``group_ranks[0]``.

    Raises:
        ValueError: no such channel, an empty group, or a rank listed twice.
    """
    if not 0 <= channel < topology.channels:
        raise ValueError(
            f"ring_order: channel {channel} does not exist, the topology has channels 0 to "
            f"{topology.channels - 1}"
        )
    if not group_ranks or len(set(group_ranks)) != len(group_ranks) or min(group_ranks) < 0:
        raise ValueError(
            f"ring_order: group_ranks must be distinct global ranks >= 0, got {list(group_ranks)}"
        )
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


@lru_cache(maxsize=256)
def _rings(topology: RingTopology, group_ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Every channel's ring as group-rank indices; a single ring if all channels agree."""
    index = {rank: i for i, rank in enumerate(group_ranks)}
    rings = tuple(
        tuple(index[rank] for rank in ring_order(topology, channel, group_ranks))
        for channel in range(topology.channels)
    )
    return rings[:1] if len(set(rings)) == 1 else rings


@dataclass(frozen=True)
class Reduction:
    """One reduce op on one dtype, as NCCL's device functions do it.

    ``pre`` is applied to every contribution and rounds, ``combine`` adds into its first argument in
    place, ``post`` finishes the sum in place.
    """

    pre: Callable[[Tensor], Tensor]
    combine: Callable[[Tensor, Tensor], object]
    post: Callable[[Tensor], object]


def _same(x: Tensor) -> Tensor:
    return x


def _nothing(x: Tensor) -> None:
    return None


def make_reduction(
    op: dist.ReduceOp | dist.ReduceOp.RedOpType, dtype: torch.dtype, world_size: int, where: str
) -> Reduction:
    """The arithmetic of ``op`` on ``dtype`` over ``world_size`` ranks.

    AVG follows NCCL (``hostToDevRedOp`` in ``src/enqueue.cc``): floating-point inputs are each
    multiplied by ``1 / world_size``, rounded to the dtype, *before* they are added; integers are
    added and divided at the end, towards zero. PREMUL_SUM multiplies by its own factor, and like
    NCCL's is for floating point only.

    Args:
        where: the collective and group, for the error message.

    Raises:
        NotImplementedError: an op or dtype that NCCL's rings do not reduce either.
    """
    kind = dist.ReduceOp.RedOpType
    name = str(op.name if isinstance(op, kind) else op.op.name)
    floating = dtype.is_floating_point or dtype.is_complex
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise NotImplementedError(
            f"{where}: ReduceOp.{name} on {dtype} is not simulated, the CPU has no 8-bit float "
            f"addition; reduce in bfloat16 or float32"
        )

    def premul(factor: float | Tensor) -> Callable[[Tensor], Tensor]:
        scale = torch.as_tensor(factor).reshape(()).to(dtype)
        return lambda x: x * scale

    if name == "SUM":
        return Reduction(_same, Tensor.add_, _nothing)
    if name == "AVG" and floating:
        return Reduction(premul(1.0 / world_size), Tensor.add_, _nothing)
    if name == "AVG" and dtype != torch.bool:
        return Reduction(_same, Tensor.add_, lambda x: x.div_(world_size, rounding_mode="trunc"))
    if name == "PREMUL_SUM" and floating:
        return Reduction(premul(op.factor), Tensor.add_, _nothing)
    if name == "PRODUCT":
        return Reduction(_same, Tensor.mul_, _nothing)
    if name == "MAX" and not dtype.is_complex:
        return Reduction(_same, lambda x, y: torch.maximum(x, y, out=x), _nothing)
    if name == "MIN" and not dtype.is_complex:
        return Reduction(_same, lambda x, y: torch.minimum(x, y, out=x), _nothing)
    raise NotImplementedError(
        f"{where}: ReduceOp.{name} on {dtype} is not simulated; use SUM, AVG, PREMUL_SUM "
        f"(floating point), PRODUCT, MAX or MIN, or a gloo group for the others"
    )


def _around(
    parts: Tensor, ring: Sequence[int], ends: Sequence[int], reduction: Reduction, out: Tensor
) -> None:
    """Carry ``len(ends)`` partial sums around one ring at once.

    Args:
        parts: ``[n, d, ...]``, contribution of each group rank to each partial sum.
        ring: group ranks in ring order.
        ends: ``d`` ring positions; sum ``i`` starts one after ``ends[i]`` and ends there.
        out: ``[d, ...]``, written.
    """
    n = len(ring)
    rows = torch.arange(len(ends))

    def contribution(step: int) -> Tensor:
        ranks = [ring[(end + 1 + step) % n] for end in ends]
        # One sum, as on a real rank: a view. Many, as in a simulation: one gather for all.
        return parts[ranks[0]] if len(ranks) == 1 else parts[torch.tensor(ranks), rows]

    out.copy_(reduction.pre(contribution(0)))
    for step in range(1, n):
        reduction.combine(out, reduction.pre(contribution(step)))
    reduction.post(out)


def _loops(count: int, size: int, channels: int) -> Iterator[tuple[int, int, int, int]]:
    """Deal ``count`` elements in loops of ``size`` to channels in turn.

    Yields ``(channel, offset, loops, stride)``: loops ``0, 1, ...`` of the channel start at
    ``offset + i * stride`` and hold ``size`` elements each, but a last, short one, which comes
    alone with ``stride == 0`` and ends at ``count``.
    """
    full, tail = divmod(count, size)
    for channel in range(min(channels, full)):
        loops = len(range(channel, full, channels))
        yield channel, channel * size, loops, channels * size
    if tail:
        yield full % channels, full * size, 1, 0


def _windows(x: Tensor, offset: int, loops: int, stride: int, size: int) -> Tensor:
    """``[..., count] -> [..., loops, size]``: a view of equally spaced windows of the last dim."""
    last = x.stride(-1)
    return x.as_strided(
        (*x.shape[:-1], loops, size),
        (*x.stride()[:-1], stride * last, last),
        x.storage_offset() + offset * last,
    )


def reduce_scatter_slices(
    slices: Tensor,
    destinations: Sequence[int],
    topology: RingTopology,
    group_ranks: Sequence[int],
    reduction: Reduction,
) -> Tensor:
    """Ring sums of the slices that end on the given ranks.

    Args:
        slices: ``[n, d, count]``, what each of the ``n`` group ranks contributes to the slice of
            each of ``d`` destinations.
        destinations: ``d`` group ranks.

    Returns:
        ``[d, count]``, a new tensor of the dtype of ``slices``.
    """
    out = torch.empty(slices.shape[1:], dtype=slices.dtype)
    count = slices.shape[-1]
    rings = _rings(topology, tuple(group_ranks))
    # One ring for all channels: where pieces begin makes no difference.
    piece = max(count, 1) if len(rings) == 1 else topology.chunk_bytes // slices.dtype.itemsize
    for channel, offset, loops, stride in _loops(count, piece, len(rings)):
        ring = rings[channel]
        size = piece if stride else count - offset
        _around(
            _windows(slices, offset, loops, stride, size),
            ring,
            [ring.index(rank) for rank in destinations],
            reduction,
            _windows(out, offset, loops, stride, size),
        )
    return out


def all_reduce_buffer(
    buffers: Tensor,
    topology: RingTopology,
    group_ranks: Sequence[int],
    reduction: Reduction,
) -> Tensor:
    """Ring sum of whole buffers.

    Args:
        buffers: ``[n, count]``, the buffer of each of the ``n`` group ranks.

    Returns:
        ``[count]``, a new tensor of the dtype of ``buffers``.
    """
    n, count = buffers.shape
    out = torch.empty(count, dtype=buffers.dtype)
    rings = _rings(topology, tuple(group_ranks))
    piece = topology.chunk_bytes // buffers.dtype.itemsize
    for channel, offset, loops, stride in _loops(count, n * piece, len(rings)):
        length = n * piece if stride else count - offset
        # A short last loop has full pieces at its first positions and perhaps one short piece.
        whole, rest = divmod(length, piece)
        for first, pieces, size in ((0, whole, piece), (whole, 1 if rest else 0, rest)):
            if not pieces:
                continue
            # [..., count] -> [..., loops, pieces * size] -> [..., pieces, loops, size]
            source, target = (
                _windows(x, offset + first * piece, loops, stride, pieces * size)
                .unflatten(-1, (pieces, size))
                .transpose(-3, -2)
                for x in (buffers, out)
            )
            _around(source, rings[channel], range(first, first + pieces), reduction, target)
    return out


def _check_inputs(
    inputs: Sequence[Tensor], group_ranks: Sequence[int] | None, where: str
) -> tuple[int, ...]:
    ranks = tuple(range(len(inputs)) if group_ranks is None else group_ranks)
    if not inputs or len(ranks) != len(inputs):
        raise ValueError(
            f"{where}: needs one input per rank of the group, got {len(inputs)} inputs for "
            f"{len(ranks)} ranks"
        )
    for i, x in enumerate(inputs):
        if x.shape != inputs[0].shape or x.dtype != inputs[0].dtype:
            raise ValueError(
                f"{where}: inputs must agree in shape and dtype, input 0 is {inputs[0].dtype}"
                f"{list(inputs[0].shape)} and input {i} is {x.dtype}{list(x.shape)}"
            )
    return ranks


@torch.no_grad()
def simulate_reduce_scatter(
    inputs: Sequence[Tensor],
    topology: RingTopology,
    group_ranks: Sequence[int] | None = None,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """What every rank would hold after ``reduce_scatter_tensor``, without any process group.

    Args:
        inputs: one tensor per rank of the group, all of one shape ``[n * d0, ...]`` and dtype.
        topology: nodes, channels and chunk size.
        group_ranks: global ranks of the group in group order; ``range(len(inputs))`` if ``None``.
        op: SUM, AVG, PREMUL_SUM, PRODUCT, MAX or MIN.

    Returns:
        One ``[d0, ...]`` tensor per rank, views of one new buffer, bit for bit those of a ``ring``
        group of real ranks.

    Raises:
        ValueError: inputs that don't match each other, the group, or ``n``.
        NotImplementedError: another op.
    """
    where = "simulate_reduce_scatter"
    ranks = _check_inputs(inputs, group_ranks, where)
    n, shape = len(ranks), inputs[0].shape
    if not shape or shape[0] % n:
        raise ValueError(
            f"{where}: dim 0 of the inputs, shape {list(shape)}, does not divide by {n} ranks; "
            f"pad it"
        )
    reduction = make_reduction(op, inputs[0].dtype, n, where)
    stacked = torch.stack([x.reshape(n, -1) if x.numel() else x.new_empty(n, 0) for x in inputs])
    out = reduce_scatter_slices(stacked, range(n), topology, ranks, reduction)
    return list(out.view(n, shape[0] // n, *shape[1:]).unbind(0))


@torch.no_grad()
def simulate_all_reduce(
    inputs: Sequence[Tensor],
    topology: RingTopology,
    group_ranks: Sequence[int] | None = None,
    op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> list[Tensor]:
    """What every rank would hold after ``all_reduce``, without any process group.

    A buffer of exactly one loop of one channel (``n * chunk_bytes`` bytes), over a ring that is the
    group's own order, gives what :func:`simulate_reduce_scatter` gives; other buffers need not.

    Args:
        inputs: one tensor per rank of the group, all of one shape and dtype.
        topology: nodes, channels and chunk size.
        group_ranks: global ranks of the group in group order; ``range(len(inputs))`` if ``None``.
        op: SUM, AVG, PREMUL_SUM, PRODUCT, MAX or MIN.

    Returns:
        One new tensor per rank, all equal.

    Raises:
        ValueError: inputs that don't match each other or the group.
        NotImplementedError: another op.
    """
    where = "simulate_all_reduce"
    ranks = _check_inputs(inputs, group_ranks, where)
    reduction = make_reduction(op, inputs[0].dtype, len(ranks), where)
    stacked = torch.stack([x.reshape(-1) for x in inputs])
    out = all_reduce_buffer(stacked, topology, ranks, reduction).view(inputs[0].shape)
    return [out, *(out.clone() for _ in ranks[1:])]
