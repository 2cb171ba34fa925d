"""Gloo without two faults of torch's: the one place that touches what is private of gloo.

Both end a rank with SIGABRT. Seen with torch 2.13.0 alone and, in ring groups, with 2.15.0 as well.

*Two threads, one string.* A ``ProcessGroupGloo`` has two threads, and each, when its operation is
done, writes the operation's name to one ``std::string`` of the group and takes no lock
(``lastCompletedWorkName`` in ``runLoop`` of ``ProcessGroupGloo.cpp``). Two that end at once free
the string twice: ``malloc(): unaligned tcache chunk detected``, or a segmentation fault, in one of
three runs of two ranks for 15 seconds. So a group of :func:`make_gloo` has one thread. It does one
operation at a time, in the order of the calls, as a communication stream of a GPU does.

*The interpreter is gone.* Gloo's thread lets go of an operation's tensors after ``wait`` has
returned, and needs the interpreter's lock for one that Python has seen. Asked for in a process that
has begun to end, that ends the thread where C++ allows no such thing: ``terminate called without an
active exception``, in about one of 200 processes that end right after a collective. So what
:meth:`~InFlight.run` gave the thread last is waited for when Python ends; what was given earlier is
done by then, as there is one thread.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import ParamSpec, TypeVar

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor

_P = ParamSpec("_P")
_T = TypeVar("_T")

_EXIT_S = 1.0
"""How long the end of a process waits for gloo's thread, in seconds. It takes microseconds, or for
ever: an operation whose peer is gone ends by its own timeout, and Python shall not wait for that.
"""


def make_gloo(
    store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta
) -> dist.ProcessGroupGloo:
    """Gloo's backend with one thread, on a store of its own; ``ranks`` are the global ranks in
    group order."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = 1
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    return dist.ProcessGroupGloo(store, rank, size, options)


class InFlight:
    """The tensors that one group's thread was given last."""

    def __init__(self) -> None:
        # Weak, so that no buffer lives longer for it: a tensor's Python object lives as long as
        # C++ has the tensor.
        self._tensors: list[tuple[weakref.ref[Tensor], int]] = []
        _all_in_flight.add(self)

    def run(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """``call(*args, **kwargs)``, a gloo operation on the tensors among the arguments."""
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = (x for x in leaves if isinstance(x, Tensor))
        self._tensors = [(weakref.ref(x), x._use_count()) for x in tensors]
        return call(*args, **kwargs)

    def is_done(self) -> bool:
        """Whether C++ refers to no tensor more often than it did before the call."""
        return all(
            (tensor := ref()) is None or tensor._use_count() <= before
            for ref, before in self._tensors
        )


_all_in_flight: weakref.WeakSet[InFlight] = weakref.WeakSet()


@atexit.register
def _wait_for_threads() -> None:
    """Python may end once nothing is in flight. Sleeping lets gloo's threads have its lock."""
    deadline = time.monotonic() + _EXIT_S
    for flight in list(_all_in_flight):
        while not flight.is_done() and time.monotonic() < deadline:
            time.sleep(1e-4)
