"""Run the code that Inductor generates on tensors without data, and count its live bytes.

The code is that of ``compile_fx_inner``, its kernels are left out. Calls of other libraries and of
collectives run on meta tensors, so allocations, frees and reuse are Inductor's own and Python's::

    buf0 = empty_strided_cuda(...)      a storage
    triton_poi_fused_0.run(...)         nothing
    buf1 = buf0; del buf0  # reuse      the same storage
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from generated_order import Generated, fake_gpu, stop
from torch._guards import TracingContext, tracing
from torch._inductor import async_compile, config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


def generated_code(
    gm: fx.GraphModule, mode: FakeTensorMode, is_backward: bool, options: dict[str, Any]
) -> str:
    """Return the code of a graph on the CPU or on fake CUDA, under Inductor's ``options``."""

    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    on_gpu = any(isinstance(v, torch.Tensor) and v.is_cuda for v in inputs)
    with (
        config.patch({"fx_graph_cache": False, **options}),
        tracing(TracingContext(mode)),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)),
        fake_gpu() if on_gpu else contextlib.nullcontext(),
    ):
        try:
            compile_fx_inner(gm, inputs, is_backward=is_backward)
        except Generated as done:
            (code,) = done.args
    assert isinstance(code, str)
    return code


class _Kernel:
    """A kernel that does nothing."""

    def run(self, *_: Any, **__: Any) -> None:
        """Leave all results as they are."""

    __call__ = run


class _Kernels:
    """Stands for Inductor's ``AsyncCompile``."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Kernel()

    def wait(self, _: Any) -> None:
        """Return at once, as nothing is compiled."""


class Live(TorchDispatchMode):
    """Counts the bytes of storages that exist; ``at`` is the line of code of the largest count."""

    def __init__(self) -> None:
        super().__init__()
        self._there: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self.profile: list[tuple[str, int]] = []

    def now(self) -> int:
        self._there = {k: v for k, v in self._there.items() if not v[0].expired()}
        return sum(nbytes for _, nbytes in self._there.values())

    def add(self, value: Any, name: str = "") -> None:
        found = value if isinstance(value, (list, tuple)) else [value]
        more = False
        for tensor in found:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._there or self._there[storage._cdata][0].expired():
                    self._there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    more = True
        if more:
            now = self.now()
            self.peak = max(self.peak, now)
            self.profile.append((name, now))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.utils._python_dispatch._disable_current_modes())
            out = func(
                *args, **{k: "meta" if k == "device" else v for k, v in (kwargs or {}).items()}
            )
        collective = func.namespace == "_c10d_functional"
        if collective and (func.name().endswith("wait_tensor") or func._schema.is_mutable):
            return args[0]  # a copy on meta tensors
        self.add(out, str(func))
        return out


def live_of(code: str, inputs: Sequence[Any], kept: Sequence[bool]) -> Live:
    """Run generated code; return what it counted."""
    meta: dict[int, torch.Tensor] = {}

    def as_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        at = value.untyped_storage()._cdata
        if at not in meta:
            nbytes = value.untyped_storage().nbytes()
            meta[at] = torch.empty(int(nbytes), dtype=torch.uint8, device="meta")
        base = torch.empty(0, dtype=value.dtype, device="meta")
        return base.set_(
            meta[at].untyped_storage(), value.storage_offset(), value.size(), value.stride()
        )

    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device="meta")

    names: dict[str, Any] = {"__name__": "generated"}
    quiet = mock.MagicMock()
    with (
        mock.patch.object(async_compile, "AsyncCompile", _Kernels),
        mock.patch.object(torch.cuda, "_DeviceGuard", quiet),
        mock.patch.object(torch.cuda, "set_device", quiet),
    ):
        exec(compile(code, "generated", "exec"), names)
        for name in names:
            if re.match(r"empty_strided_(cpu|cuda)", name):
                names[name] = empty
            elif name.startswith("assert_"):
                names[name] = lambda *_: None  # a mock would keep the tensors
        for name in list(names):
            if re.match(r"_?get_raw_.*stream", name):
                names[name] = lambda _: 0
        live = Live()
        given = [as_meta(v) for v in inputs]
        live.add(given, "inputs")
        meta.clear()
        hold = [v for v, stays in zip(given, kept, strict=True) if stays]
        with live:
            out = names["call"](given)
        live.profile.append(("end", live.now()))
        del out, hold
    return live
