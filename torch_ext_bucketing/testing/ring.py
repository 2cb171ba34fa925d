"""Provide a process group over gloo that adds in the order of NCCL's rings.

It tests, on CPU ranks, code that depends on the bits of reductions over several nodes::

    from torch_ext_bucketing.testing.ring import RingTopology, init_ring_process_group

    init_ring_process_group(rank, world_size, topology=RingTopology(ranks_per_node=2))
    mesh = init_device_mesh("cpu", (world_size,))      # sub-groups are ring groups too
    fully_shard(model, mesh=mesh)

All forms of ``reduce_scatter`` and ``all_reduce`` are simulated: gloo moves the bytes, and each
rank adds in the order of :mod:`.sums`. Other reductions raise; everything else is gloo's.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout
from torch.futures import Future

from .ranks import Rank, run_ranks
from .sums import RingTopology, make_reduction, ring_sums

P = ParamSpec("P")
T = TypeVar("T")

# Seconds that exit waits for gloo's thread, which takes microseconds unless a peer is gone.
_EXIT_S = 1.0


def make_gloo(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Make gloo's backend with one thread; ``ranks`` are global ranks in group order."""
    # Both threads of a ProcessGroupGloo write the name of a finished operation to one std::string
    # without a lock (lastCompletedWorkName in ProcessGroupGloo.cpp; torch 2.13, 2.15). Two that end
    # at once free it twice, in one of three runs of two ranks for 15 seconds. One thread runs
    # operations in call order, as a GPU's stream does.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    return dist.ProcessGroupGloo(store, rank, size, options)


class InFlight:
    """The tensors of one group's last operation."""

    def __init__(self) -> None:
        # Weak, so that no buffer lives longer. A tensor's Python object lives as long as C++ has
        # the tensor.
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        _all_in_flight.add(self)

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Start ``call``, a gloo operation on the tensors among its arguments."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = (x for x in leaves if isinstance(x, Tensor))
        self._tensors = [(weakref.ref(x), x._use_count()) for x in tensors]
        # Within a compile the Python dispatcher would hold the interpreter's lock, which gloo's
        # thread needs to free finished tensors while the caller waits for its mutex: a hang.
        with torch._C._DisablePythonDispatcher():
            return call(*args, **kwargs)

    def is_done(self) -> bool:
        """Return whether C++ refers to no tensor more often than before the call."""
        return all(
            (tensor := ref()) is None or tensor._use_count() <= before
            for ref, before in self._tensors
        )


_all_in_flight: weakref.WeakSet[InFlight] = weakref.WeakSet()


@atexit.register
def _wait_for_threads() -> None:
    """Delay Python's exit until no operation is in flight."""
    # Gloo's thread frees an operation's tensors after ``wait`` returned, and needs the
    # interpreter's lock if Python has seen them. In a process that exits, that calls ``terminate``,
    # in about one of 200 processes that end right after a collective (torch 2.13, 2.15).
    deadline = time.monotonic() + _EXIT_S
    for flight in list(_all_in_flight):
        while not flight.is_done() and time.monotonic() < deadline:
            time.sleep(1e-4)  # releases the interpreter's lock


_BACKEND = "ring"
_topology: RingTopology | None = None  # of the last call of init_ring_process_group()


class _RingWork(dist.Work):
    """Gloo's transfers in the background, then the additions on the first thread that waits."""

    # Not in a callback on gloo's threads: the interpreter may be gone before they are. On 2.13,
    # ranks that exited right after a collective were terminated.

    def __init__(
        self, transfers: list[dist.Work], outputs: list[Tensor], finish: Callable[[], None]
    ) -> None:
        super().__init__()
        self._transfers = transfers
        self._outputs = outputs
        self._finish: Callable[[], None] | None = finish
        self._lock = threading.Lock()
        # The waiting thread, such as autograd's, may have other modes.
        self._inference = torch.is_inference_mode_enabled()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for transfer in self._transfers:
            transfer.wait(timeout)
        with self._lock:
            if self._finish is not None:
                with torch.inference_mode(self._inference), torch.no_grad():
                    self._finish()
                self._finish = None  # and with it the received buffers
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(transfer.is_completed() for transfer in self._transfers) and self.wait()

    def get_future(self) -> Future[list[Tensor]]:
        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(self._outputs)
        return future


class RingProcessGroup(dist.ProcessGroup):
    """One rank of a group with simulated ring reductions, created by c10d.

    ``store`` belongs to this group alone; ``group_ranks`` are global ranks in group order.
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
        self._plain = dist.ProcessGroup(store, rank, size)
        kind = dist.ProcessGroup.BackendType.GLOO
        for group in (self, self._plain):
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, self._gloo)

    def __repr__(self) -> str:
        return (
            f"RingProcessGroup(rank={self.rank()}, ranks={list(self.group_ranks)}, {self.topology})"
        )

    def getBackendName(self) -> str:  # the name that the C++ side looks up
        return _BACKEND

    def get_group_store(self) -> dist.Store:
        return self._store

    def reduce_scatter(
        self,
        outputs: list[Tensor],
        inputs: list[list[Tensor]],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        """Reduce the list form: ``inputs[0][r]`` ends on group rank ``r``; sizes may differ."""
        return self._reduce("reduce_scatter", inputs, outputs, opts, scatter=True)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: dist.ReduceScatterOptions | None = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        n, name = self.size(), "reduce_scatter_tensor"
        for output, flat in zip(outputs, inputs, strict=True):
            if flat.numel() != output.numel() * n:
                raise ValueError(
                    f"{self._where(name)}: an output of {output.numel()} elements on each of {n} "
                    f"ranks needs an input of {output.numel() * n}, got {flat.numel()}; pad the "
                    f"input to a multiple of {n}"
                )
        slices = [x.detach().contiguous().view(-1).tensor_split(n) for x in inputs]
        return self._reduce(name, slices, outputs, opts, scatter=True)

    # Names of older callers. C++ looks up the newer one first, eager callers use either.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def allreduce(
        self, tensors: Tensor | list[Tensor], opts: dist.AllreduceOptions | None = None
    ) -> dist.Work:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        return self._reduce("all_reduce", [[x] for x in tensors], tensors, opts, scatter=False)

    allreduce_coalesced = allreduce

    def _reduce(
        self,
        name: str,
        inputs: Sequence[Sequence[Tensor]],
        outputs: Sequence[Tensor],
        opts: dist.ReduceScatterOptions | dist.AllreduceOptions | None,
        scatter: bool,
    ) -> dist.Work:
        """Start one all-to-all per scattered output, or one all-gather per reduced output."""
        # Not an all-to-all and an all-gather of the sums, which would move less: gloo matches
        # operations by launch order, and the second could only start after the first.
        n, me, where = self.size(), self.rank(), self._where(name)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        index = me if scatter else 0
        for slices, output in zip(inputs, outputs, strict=True):
            for x in (*slices, output):
                if x.layout != torch.strided or x.device.type != "cpu":
                    raise NotImplementedError(
                        f"{where}: tensors must be dense and on the CPU, got {x.layout} on "
                        f"{x.device}"
                    )
            if slices[index].dtype != output.dtype or slices[index].numel() != output.numel():
                raise ValueError(
                    f"{where}: the output is {output.dtype} of {output.numel()} elements, this "
                    f"rank's input {slices[index].dtype} of {slices[index].numel()}"
                )
        reductions = [make_reduction(op, output.dtype, n, where) for output in outputs]

        transfers, received = [], []
        for slices in inputs:
            # As bytes: gloo moves any number of them.
            send = [x.detach().contiguous().view(-1).view(torch.uint8) for x in slices]
            size = send[index].numel()
            recv = torch.empty(n, size, dtype=torch.uint8)
            received.append(recv)
            if scatter and any(x.numel() for x in send):
                flat, splits = recv.view(-1), [x.numel() for x in send]
                call, args = self._gloo.alltoall_base, (flat, torch.cat(send), [size] * n, splits)
                transfers.append(self._in_flight.run(call, *args))
            elif size:
                rows = [list(recv.unbind(0))]
                transfers.append(self._in_flight.run(self._gloo.allgather, rows, send))

        def finish() -> None:
            for output, recv, reduction in zip(outputs, received, reductions, strict=True):
                parts = recv.view(-1).view(output.dtype).view(n, 1, output.numel())
                ends = [me] if scatter else None
                total = ring_sums(parts, self.topology, self.group_ranks, reduction, ends)
                output.detach().copy_(total.view(output.shape))

        return _RingWork(transfers, list(outputs), finish)

    def _refuse(self, *args: object, **kwargs: object) -> dist.Work:
        raise NotImplementedError(
            f"{self._where('reduce, split_group or merge_remote_group')}: gloo would add in an "
            "order of its own; use all_reduce, or dist.new_group, a device mesh, or one world"
        )

    reduce = split_group = merge_remote_group = _refuse
    splitGroup = mergeRemoteGroup = _refuse  # the names that C++ looks up

    def _where(self, op: str) -> str:
        return f"{op} on ring group {self.group_name!r} (ranks {list(self.group_ranks)})"


_GLOO_OPS = [
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
]
"""Operations that go to gloo unchanged, through a plain group of the same ranks.

The base class would run them with the interpreter's lock held (``WORK_OVERRIDE`` in
``PyProcessGroup.hpp``, 2.13 to 2.15). Gloo's threads need that lock to free finished tensors, and
hold a mutex that the caller waits for: a hang after some hundred calls of ``scatter``. A plain
group's methods release the lock first.
"""


def _to_gloo(self: RingProcessGroup, name: str, *args: object, **kwargs: object) -> dist.Work:
    return self._in_flight.run(getattr(self._plain, name), *args, **kwargs)


for _name in _GLOO_OPS:
    if hasattr(dist.ProcessGroup, _name):  # some are named so by newer versions only
        setattr(RingProcessGroup, _name, functools.partialmethod(_to_gloo, _name))


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


def init_ring_process_group(
    rank: int,
    world_size: int,
    store: dist.Store | None = None,
    init_method: str | None = None,
    topology: RingTopology | None = None,
    timeout: timedelta = default_pg_timeout,
) -> None:
    """Call ``dist.init_process_group`` with the ring backend for all groups.

    c10d creates subgroups by the backend's name, so a group takes the topology of the last call.
    Without ``topology``, all ranks are on one node.
    """
    global _topology
    _topology = topology or RingTopology(ranks_per_node=world_size)
    _topology.nodes_of(world_size)
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _create, extended_api=True, devices=["cpu"])
    dist.init_process_group(
        _BACKEND,
        rank=rank,
        world_size=world_size,
        store=store,
        init_method=init_method,
        timeout=timeout,
    )


@contextlib.contextmanager
def ring_rank(
    rank: Rank, topology: RingTopology | None = None, *, caches: bool = False
) -> Iterator[None]:
    """Make this process one rank of a ring group in the block, on little more than one core.

    Without ``caches``, compiled graphs don't come from Inductor's and AOTAutograd's caches, so that
    all passes run.
    """
    torch.set_num_threads(1)
    # Compilers run in threads of this process. Two per rank keep the cores busy, because ranks wait
    # for one another's kernels instead of compiling them twice.
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
    yield
    dist.barrier()  # no rank leaves while others still send to it
    # Not in `finally`: peers of a rank that fails would see a closed connection before that rank
    # has reported its exception, and be taken for the cause.
    dist.destroy_process_group()


def on_ranks(
    function: Callable[..., T], *args: object, world: int = 2, timeout_s: float = 240
) -> list[T]:
    """Call ``function``, with the rank's number, on ``world`` ranks of one ring group on a node."""
    return run_ranks(_in_group, world, function, args, timeout_s=timeout_s)


def _in_group(rank: Rank, function: Callable[..., T], args: tuple[object, ...]) -> T:
    with ring_rank(rank, caches=True):
        return function(rank.rank, *args)
