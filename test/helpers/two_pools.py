"""Run graphs with device memory and host memory as two pools, on a machine that has one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_POISON = 113  # of integers


class PoolError(AssertionError):
    """A graph reads what is not there."""


class TwoPools(TorchDispatchMode):
    """The pools of one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.parked = self.most_in_flight = 0
        self._host: dict[int, torch.Tensor] = {}  # by storage; the tensor keeps its address taken
        self._flying: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # source, and a copy of it

    def __call__(self, gm: Callable[..., Any], example_inputs: Any) -> Callable[..., Any]:
        """Compile a graph: it runs in the pools. What it returns has arrived."""

        def run(*args: Any) -> Any:
            with self:
                results = gm(*args)
            if self._flying:
                raise PoolError(f"the graph returns while {len(self._flying)} copies are under way")
            return results

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "ao":
            for value in pytree.tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    self._check(func, value, host=False)
            return func(*args, **kwargs)
        first = args[0]
        if func._opname == "offload":
            self._check(func, first, host=False)
            pinned = 1  # torch's allocator gives powers of two
            while pinned < first.numel() * first.itemsize:
                pinned *= 2
            self.parked += pinned
            host = self._launch(first, torch.empty_like(first))
            self._host[_at(host)] = host
            return host
        if func._opname == "reload":
            self._check(func, first, host=True)
            _, device, size, stride = args
            empty = torch.empty_strided(size, stride, dtype=first.dtype, device=device)
            return self._launch(first, empty)
        _, keepalive, source = (*args, None)[:3]  # a dispatcher leaves defaults out
        if _at(first) not in self._flying:
            raise PoolError("a wait for a copy that was not launched")
        given, values = self._flying.pop(_at(first))
        if keepalive is not None or source is None or _at(source) != _at(given):
            raise PoolError("the source may be freed before the copy has arrived, or read after")
        if not torch.equal(given, values):
            raise PoolError("the source was written to before the copy had arrived")
        return first.copy_(values)

    def _launch(self, source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        result.fill_(float("nan") if result.is_floating_point() else _POISON)
        self._flying[_at(result)] = source, source.clone()
        self.most_in_flight = max(self.most_in_flight, len(self._flying))
        return result

    def _check(self, func: Any, value: torch.Tensor, *, host: bool) -> None:
        if _at(value) in self._flying:
            raise PoolError(f"{func} reads a copy that has not arrived")
        if (_at(value) in self._host) is not host:
            raise PoolError(f"{func} reads what is {'not ' * host}in host memory")


def _at(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
