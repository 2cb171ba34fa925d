"""Work around two faults of gloo's process group that abort a rank (torch 2.13, 2.15).

*A race.* Both threads of a ``ProcessGroupGloo`` write the name of a finished operation to one
``std::string`` without a lock (``lastCompletedWorkName`` in ``ProcessGroupGloo.cpp``). Two that end
at once free it twice, in one of three runs of two ranks for 15 seconds. So :func:`make_gloo` makes
groups with one thread, which runs operations in call order, like a GPU's communication stream.

*Exit.* The thread frees an operation's tensors after ``wait`` returned, and needs the interpreter's
lock if Python has seen them. In a process that exits, that calls ``terminate``, in about one of 200
processes that end right after a collective. So Python's exit waits for the last operation.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Seconds that exit waits for gloo's thread, which takes microseconds unless a peer is gone.
_EXIT_S = 1.0


def make_gloo(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Make gloo's backend with one thread; ``ranks`` are global ranks in group order."""
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

    def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
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
    deadline = time.monotonic() + _EXIT_S
    for flight in list(_all_in_flight):
        while not flight.is_done() and time.monotonic() < deadline:
            time.sleep(1e-4)  # releases the interpreter's lock
