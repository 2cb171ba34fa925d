"""A c10d process group over gloo whose reductions add in the order of NCCL's rings.

For testing, on CPU ranks, whatever depends on the bits of a reduction on many nodes::

    from torch_ext_bucketing.testing.ring import RingTopology, init_ring_process_group

    init_ring_process_group(rank, world_size, topology=RingTopology(ranks_per_node=2))
    mesh = init_device_mesh("cpu", (world_size,))      # sub-groups are ring groups too
    fully_shard(model, mesh=mesh)

``reduce_scatter``, ``all_reduce`` and ``reduce``, in all their forms, are simulated; everything
else is gloo's. What is added in which order, and what is left out of NCCL, is told in
:mod:`.sums`, whose public names are available here.

How it works: gloo only moves bytes. For a reduce-scatter each rank sends every other rank the slice
that ends there (all-to-all), for an all-reduce its whole buffer (all-gather, so memory is ``n``
buffers), and the receiver adds on its own, in ring order. All ranks of an all-reduce do the same
additions, so they agree bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.futures import Future

from .gloo import InFlight, make_gloo
from .ranks import Rank, run_ranks
from .sums import (
    Reduction,
    RingTopology,
    all_reduce_buffer,
    make_reduction,
    reduce_scatter_slices,
    ring_order,
    simulate_all_reduce,
    simulate_reduce_scatter,
)

__all__ = [
    "RingProcessGroup",
    "RingTopology",
    "init_ring_process_group",
    "on_ranks",
    "register_ring_backend",
    "ring_order",
    "ring_rank",
    "simulate_all_reduce",
    "simulate_reduce_scatter",
]

T = TypeVar("T")

_BACKEND = "ring"

# c10d creates sub-groups by backend name alone, so the topology can't travel with the call.
_topology: RingTopology | None = None


class _RingWork(dist.Work):
    """Gloo's transfers, then the additions, as one handle.

    Transfers run in the background, the additions on the thread that first waits. Not in a callback
    on gloo's own threads: those would need the interpreter, which may be gone before they are (seen
    on 2.13: ``terminate called`` in ranks that exit right after a collective). So outputs are valid
    once ``wait`` has returned or ``is_completed`` has said so, and ``get_future`` waits first.
    """

    def __init__(
        self, transfers: Sequence[dist.Work], outputs: list[Tensor], finish: Callable[[], None]
    ) -> None:
        super().__init__()
        self._transfers = list(transfers)
        self._outputs = outputs
        self._finish: Callable[[], None] | None = finish
        self._error: Exception | None = None
        self._future: Future[list[Tensor]] | None = None
        self._lock = threading.Lock()
        # Whoever waits may be on another thread, autograd's for one, with other modes.
        self._inference = torch.is_inference_mode_enabled()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            for transfer in self._transfers:
                transfer.wait(timeout)
            with self._lock:
                if self._finish is not None:
                    with torch.inference_mode(self._inference), torch.no_grad():
                        self._finish()
                    self._finish = None  # and with it the received buffers
        except Exception as error:
            self._error = error
            raise
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not all(transfer.is_completed() for transfer in self._transfers):
            return False
        # What went wrong, if anything did, is told by exception() and again by wait().
        with contextlib.suppress(Exception):
            self.wait()
        return True

    def is_success(self) -> bool:
        return self._finish is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> Future[list[Tensor]]:
        if self._future is None:
            future: Future[list[Tensor]] = Future()
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self._outputs)
            self._future = future
        return self._future


def _bytes_of(x: Tensor) -> Tensor:
    """``x`` as a 1-D uint8 tensor: gloo then moves any dtype."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


class RingProcessGroup(dist.ProcessGroup):
    """One rank of a group with simulated ring reductions. Made by c10d, not by hand.

    What is no reduction goes to gloo (see :data:`_GLOO_OPS`).

    Args:
        store: the group's own (prefixed) store.
        rank: group rank.
        size: ranks in the group.
        group_ranks: global ranks of the group in group order.
        topology: nodes and channels.
        timeout: of gloo's operations.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        group_ranks: Sequence[int],
        topology: RingTopology,
        timeout: timedelta,
    ) -> None:
        # Without the store: on 2.13 that constructor refuses Python subclasses.
        super().__init__(rank, size)
        self._store = store
        self.topology = topology
        self.group_ranks = tuple(group_ranks)
        self._gloo = make_gloo(store, rank, size, group_ranks, timeout)
        self._in_flight = InFlight()
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._plain = dist.ProcessGroup(store, rank, size)
        self._plain._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._plain._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._gloo
        )

    def __repr__(self) -> str:
        return (
            f"RingProcessGroup(rank={self.rank()}, ranks={list(self.group_ranks)}, {self.topology})"
        )

    def getBackendName(self) -> str:  # the name that the C++ side looks up
        return _BACKEND

    def get_group_store(self) -> dist.Store:
        return self._store

    # ---- reduce_scatter -------------------------------------------------------------------------

    def reduce_scatter(
        self,
        output_tensors: Tensor | list[Tensor],
        input_tensors: list[Tensor] | list[list[Tensor]],
        opts: dist.ReduceScatterOptions | dist.ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        op: dist.ReduceOp | None = None,
    ) -> dist.Work:
        """List form: ``input_tensors[0][r]`` ends on group rank ``r``; sizes may differ by rank."""
        if isinstance(output_tensors, Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        where = self._where("reduce_scatter")
        if len(output_tensors) != 1 or len(input_tensors) != 1:
            raise ValueError(
                f"{where}: takes one output and one list of inputs, got {len(output_tensors)} and "
                f"{len(input_tensors)}"
            )
        slices = input_tensors[0]
        if len(slices) != self.size():
            raise ValueError(
                f"{where}: needs one input per rank, got {len(slices)} for {self.size()} ranks"
            )
        return self._reduce_scatter(where, output_tensors, [list(slices)], _op_of(opts, op))

    def reduce_scatter_single(
        self,
        output: Tensor,
        input: Tensor,
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        where = self._where("reduce_scatter_tensor")
        if len(outputs) != len(inputs):
            raise ValueError(f"{where}: got {len(outputs)} outputs for {len(inputs)} inputs")
        n = self.size()
        per_rank = []
        for output, flat in zip(outputs, inputs, strict=True):
            if flat.numel() != output.numel() * n:
                raise ValueError(
                    f"{where}: an output of {output.numel()} elements on each of {n} ranks needs "
                    f"an input of {output.numel() * n}, got {flat.numel()}; pad the input to a "
                    f"multiple of {n}"
                )
            per_rank.append(list(flat.detach().contiguous().view(-1).tensor_split(n)))
        return self._reduce_scatter(where, outputs, per_rank, _op_of(opts))

    # The names of older callers. C++ looks for the newer one first, eager callers use either.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, where: str, outputs: list[Tensor], inputs: list[list[Tensor]], op: dist.ReduceOp
    ) -> dist.Work:
        """One all-to-all per output; ``inputs[i][r]`` ends in output ``i`` of group rank ``r``."""
        n, me = self.size(), self.rank()
        reductions = []
        for output, slices in zip(outputs, inputs, strict=True):
            self._check_tensors(where, [output, *slices])
            for x in slices:
                if x.dtype != output.dtype:
                    raise ValueError(
                        f"{where}: the output is {output.dtype}, an input {x.dtype}; cast one"
                    )
            if slices[me].numel() != output.numel():
                raise ValueError(
                    f"{where}: the output has {output.numel()} elements, the input for this rank "
                    f"({me}) has {slices[me].numel()}"
                )
            reductions.append(make_reduction(op, output.dtype, n, where))

        transfers, received = [], []
        for output, slices in zip(outputs, inputs, strict=True):
            send = torch.cat([_bytes_of(x) for x in slices])
            size = output.numel() * output.dtype.itemsize
            recv = torch.empty(n * size, dtype=torch.uint8)
            received.append(recv)
            if send.numel():
                splits = [x.numel() * x.dtype.itemsize for x in slices]
                transfers.append(
                    self._in_flight.run(self._gloo.alltoall_base, recv, send, [size] * n, splits)
                )

        def finish() -> None:
            for output, recv, reduction in zip(outputs, received, reductions, strict=True):
                # [n * bytes] -> [n contributions, 1 destination, elements]
                slices = recv.view(output.dtype).view(n, 1, output.numel())
                shard = self._to_rank(slices, me, reduction)
                output.detach().copy_(shard.view(output.shape))

        return _RingWork(transfers, outputs, finish)

    def _to_rank(self, slices: Tensor, rank: int, reduction: Reduction) -> Tensor:
        return reduce_scatter_slices(slices, [rank], self.topology, self.group_ranks, reduction)

    # ---- all_reduce -----------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Tensor | list[Tensor],
        opts: dist.AllreduceOptions | dist.ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        op: dist.ReduceOp | None = None,
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        where = self._where("all_reduce")
        if len(tensors) != 1:
            raise ValueError(f"{where}: takes one tensor, got {len(tensors)}")
        return self._all_reduce(where, tensors, _op_of(opts, op))

    def allreduce_coalesced(
        self, tensors: list[Tensor], opts: dist.AllreduceCoalescedOptions | None = None
    ) -> dist.Work:
        return self._all_reduce(self._where("all_reduce_coalesced"), list(tensors), _op_of(opts))

    def _all_reduce(self, where: str, tensors: list[Tensor], op: dist.ReduceOp) -> dist.Work:
        """One all-gather per tensor.

        Not an all-to-all and an all-gather of the sums, which would move and add less: gloo matches
        operations by the order in which ranks launch them, and a second one could only be launched
        when the first is done.
        """
        n = self.size()
        self._check_tensors(where, tensors)
        reductions = [make_reduction(op, x.dtype, n, where) for x in tensors]
        transfers, received = [], []
        for x in tensors:
            send = _bytes_of(x)
            recv = torch.empty(n, send.numel(), dtype=torch.uint8)
            received.append(recv)
            if send.numel():
                transfers.append(
                    self._in_flight.run(self._gloo.allgather, [list(recv.unbind(0))], [send])
                )

        def finish() -> None:
            for x, recv, reduction in zip(tensors, received, reductions, strict=True):
                buffers = recv.view(-1).view(x.dtype).view(n, x.numel())
                total = all_reduce_buffer(buffers, self.topology, self.group_ranks, reduction)
                x.detach().copy_(total.view(x.shape))

        return _RingWork(transfers, tensors, finish)

    # ---- reduce ---------------------------------------------------------------------------------

    def reduce(
        self,
        tensors: Tensor | list[Tensor],
        opts: dist.ReduceOptions | int | None = None,
        op: dist.ReduceOp | None = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """To one rank: the order of a reduce-scatter slice that ends on the root."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        where = self._where("reduce")
        if len(tensors) != 1:
            raise ValueError(f"{where}: takes one tensor, got {len(tensors)}")
        if isinstance(opts, dist.ReduceOptions):
            root, op = opts.rootRank, opts.reduceOp
        elif root is None:
            root = opts or 0
        n, (x,) = self.size(), tensors
        self._check_tensors(where, tensors)
        reduction = make_reduction(_op_of(op), x.dtype, n, where)
        send = _bytes_of(x)
        at_root = self.rank() == root
        recv = torch.empty(n if at_root else 0, send.numel(), dtype=torch.uint8)
        gather = dist.GatherOptions()
        gather.rootRank = root
        transfers = []
        if send.numel():
            rows = [list(recv.unbind(0))] if at_root else []
            transfers.append(self._in_flight.run(self._gloo.gather, rows, [send], gather))

        def finish() -> None:
            if at_root:
                slices = recv.view(-1).view(x.dtype).view(n, 1, x.numel())
                x.detach().copy_(self._to_rank(slices, root, reduction).view(x.shape))

        return _RingWork(transfers, tensors, finish)

    # ---- what gloo would do, but not as a ring --------------------------------------------------

    def split_group(self, *args: object, **kwargs: object) -> dist.ProcessGroup:
        raise NotImplementedError(
            f"{self._where('split_group or merge_remote_group')}: the new group would add in "
            f"gloo's order; use dist.new_group, a device mesh, or one world"
        )

    merge_remote_group = splitGroup = mergeRemoteGroup = split_group  # C++ looks the latter two up

    # ---- checks ---------------------------------------------------------------------------------

    def _where(self, op: str) -> str:
        return f"{op} on ring group {self.group_name!r} (ranks {list(self.group_ranks)})"

    def _check_tensors(self, where: str, tensors: Sequence[Tensor]) -> None:
        for x in tensors:
            if x.layout != torch.strided:
                raise NotImplementedError(f"{where}: {x.layout} tensors; use to_dense() first")
            if x.device.type != "cpu":
                raise NotImplementedError(
                    f"{where}: a tensor on {x.device}; ring groups are on the CPU, move it there"
                )


_GLOO_OPS = (
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "recv",
    "recv_anysource",
    "scatter",
    "send",
)
"""What goes to gloo unchanged, through a plain group of the same ranks.

Not left to the base class: what a Python subclass doesn't override, C++ runs while it holds the
interpreter's lock (``WORK_OVERRIDE`` in ``PyProcessGroup.hpp``, 2.13 to 2.15). Gloo's threads free
finished tensors while they hold their queue's mutex, and to free one that Python has seen they need
that lock; the caller holds it and waits for the mutex. Seen as a hang after some hundred calls of
``scatter`` or ``broadcast``. A plain group's methods release the lock first.
"""


def _to_gloo(name: str) -> Callable[..., dist.Work]:
    def method(self: RingProcessGroup, *args: object, **kwargs: object) -> dist.Work:
        work: dist.Work = self._in_flight.run(getattr(self._plain, name), *args, **kwargs)
        return work

    method.__name__ = name
    return method


for _name in _GLOO_OPS:
    if hasattr(dist.ProcessGroup, _name):  # some are named so by newer versions only
        setattr(RingProcessGroup, _name, _to_gloo(_name))


def _op_of(opts: object, op: dist.ReduceOp | None = None) -> dist.ReduceOp:
    """The reduce op of c10d's several ways to call: options, an op in their place, or neither."""
    if op is not None:
        return op
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _create(options: dist._DistributedBackendOptions, _: object) -> RingProcessGroup:
    world = dist.get_world_size() if dist.is_initialized() else options.group_size
    topology = _topology or RingTopology(ranks_per_node=world)
    topology.nodes_of(world)
    return RingProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        # c10d lists no ranks for the default group
        options.global_ranks_in_group or range(options.group_size),
        topology,
        options.timeout,
    )


def register_ring_backend(topology: RingTopology | None = None) -> None:
    """Make ``dist.init_process_group("ring", ...)`` work. May be called again.

    c10d creates sub-groups (``new_group``, device meshes) by the backend's name, so the topology is
    kept in this module: every group takes the one set by the last call that named one, at the time
    when the group is created. Where none was ever named, all ranks are on one node.
    """
    global _topology
    if topology is not None:
        _topology = topology
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])


def init_ring_process_group(
    rank: int,
    world_size: int,
    store: dist.Store | None = None,
    init_method: str | None = None,
    topology: RingTopology | None = None,
    timeout: timedelta = default_pg_timeout,
) -> None:
    """``dist.init_process_group`` with the ring backend for all groups.

    Args:
        rank: global rank.
        world_size: number of ranks; must fill whole nodes of the topology.
        store: or ``init_method``: as for ``dist.init_process_group``. With neither, ``env://``.
        topology: nodes and channels; all ranks on one node if ``None``, whatever was registered
            before.
        timeout: of gloo's operations.

    Raises:
        ValueError: a world that doesn't fit the topology, before any rank is contacted.
    """
    topology = topology or RingTopology(ranks_per_node=world_size)
    topology.nodes_of(world_size)
    register_ring_backend(topology)
    if store is None and init_method is None:
        store = _store_after_restart(rank, world_size, timeout)
    dist.init_process_group(
        _BACKEND,
        rank=rank,
        world_size=world_size,
        store=store,
        init_method=init_method,
        timeout=timeout,
    )


def _store_after_restart(rank: int, world_size: int, timeout: timedelta) -> dist.Store | None:
    """The store of ``env://``, without what the ranks left in it that ``torchrun`` has restarted;
    None where it has restarted none.

    Its agent keeps one store for all restarts (torch 2.13 and 2.15; see pytorch 135712). A rank
    that finds there the address of a peer that is gone, sooner than its successor writes its own,
    fails, or waits for it until the time is up, in plain gloo as well. The count is that of one
    agent, so of one node.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not restarts:
        return None
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"restart_{restarts}", store)


@contextlib.contextmanager
def ring_rank(
    rank: Rank, topology: RingTopology | None = None, *, caches: bool = False
) -> Iterator[None]:
    """Inside the block this process is one rank of a ring group, on little more than one core.

    Args:
        rank: of :func:`.run_ranks`.
        topology: as for :func:`init_ring_process_group`.
        caches: whether compiled graphs may come from Inductor's and AOTAutograd's caches. Such a
            graph has not been through the passes, and that compiling anew gives the same bits goes
            unproven.
    """
    torch.set_num_threads(1)
    # Compilers run in threads of this process: two per rank keep the cores busy, because ranks
    # wait for one another's kernels rather than compile them twice.
    inductor_config.compile_threads = 2
    if not caches:
        inductor_config.fx_graph_cache = False
        functorch_config.enable_autograd_cache = False
    init_ring_process_group(
        rank.rank,
        rank.world_size,
        store=dist.FileStore(rank.store_path, rank.world_size),
        topology=topology,
        timeout=rank.timeout,
    )
    try:
        yield
        dist.barrier()  # so that no rank leaves while others still send to it
    finally:
        dist.destroy_process_group()


def on_ranks(
    function: Callable[..., T], *args: object, world: int = 2, timeout_s: float = 240
) -> list[T]:
    """Results by rank of ``function(rank, *args)`` on ranks of one ring group.

    Args:
        function: as for :func:`.run_ranks`, but its first argument is the rank's number.
        args: picklable.
        world: number of ranks, all on one node.
        timeout_s: limit in seconds.

    Raises:
        RankError: as of :func:`.run_ranks`.
    """
    return run_ranks(_in_group, world, function, args, timeout_s=timeout_s)


def _in_group(rank: Rank, function: Callable[..., T], args: tuple[object, ...]) -> T:
    with ring_rank(rank, caches=True):
        return function(rank.rank, *args)
