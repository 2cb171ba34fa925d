"""Trace a model without its weights, and with a GPU's operators on a machine that has none.

Tensors are fake and say that they are on the CPU, since the autograd engine has no queue for a
device that is not there. Code that names CUDA gets such a tensor, too. Attention is the operator
that CUDA would take; torch knows its shapes and gradients without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias
from unittest import mock

import torch
import torch.fx as fx
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from . import private_torch

with private_torch():
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_stands_for_cuda: ContextVar[bool] = ContextVar("_stands_for_cuda", default=False)

_CUDNN_FIRST = ("H100", "H200", "B200")
"""Parts of names of GPUs of compute capability 9.0 and 10.0, where torch tries cuDNN first."""

_aten = torch.ops.aten

_Inputs: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, float, bool
]
"""Query, key, value, mask, probability of dropout, and whether attention is causal."""


def stands_for_cuda() -> bool:
    """Return whether CPU tensors stand for CUDA's now, within :func:`fake_tensors`."""
    return _stands_for_cuda.get()


@contextlib.contextmanager
def fake_tensors(gpu: str | None) -> Iterator[None]:
    """Make every new tensor fake, and give it CUDA's operators.

    Device meshes are real, and of the CPU whatever device they name.

    Args:
        gpu: the name of a GPU, for its attention operator; None: the CPU's operators.
    """
    with private_torch():
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

    def real(method: Callable[..., Any]) -> Callable[..., Any]:
        """Let a method of ``DeviceMesh`` make real tensors on the CPU."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            ranks = kwargs.get("_rank_map")
            if method.__name__ == "__init__":
                kwargs.pop("device_type", None)
                args = (args[0], "cpu", *args[2:])
            with unset_fake_temporarily():
                if isinstance(ranks, FakeTensor):  # of init_device_mesh(): all ranks, in order
                    kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=ranks.dtype)
                return method(*args, **kwargs)

        return call

    def any_device(*_: Any) -> None:
        """Accept the CPU, where FlexAttention has no backward."""

    token = _stands_for_cuda.set(gpu is not None)
    try:
        with contextlib.ExitStack() as stack:
            for name, method in _of_meshes():
                wrapped = real(getattr(method, "__func__", method))
                patched = staticmethod(wrapped) if isinstance(method, staticmethod) else wrapped
                stack.enter_context(mock.patch.object(DeviceMesh, name, patched))
            if gpu is not None:
                from torch.nn.attention import flex_attention

                if hasattr(flex_attention, "_validate_device"):
                    patched = mock.patch.object(flex_attention, "_validate_device", any_device)
                    stack.enter_context(patched)
                stack.enter_context(_attention_of(gpu))
            if hasattr(_fsdp_param, "_chunk_with_empty"):
                stack.enter_context(mock.patch.object(_fsdp_param, "_chunk_with_empty", _Chunks))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield
    finally:
        _stands_for_cuda.reset(token)


def _of_meshes() -> list[tuple[str, Any]]:
    """Return the methods of device meshes that may read or make tensors of ranks."""
    special = ("__init__", "__getitem__")
    return [
        (name, method)
        for name, method in vars(DeviceMesh).items()
        if inspect.isfunction(getattr(method, "__func__", method))
        and (name in special or not name.startswith("__"))
    ]


class _Chunks(Sequence[torch.Tensor]):
    """The chunks of a tensor by rank, made as they are read, with empty ones at the end.

    ``fully_shard`` cuts each parameter into one chunk a rank, twice, and reads two. That took four
    fifths of the time to shard a model of fake tensors over 64 ranks.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._number, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, i: Any) -> Any:
        if not 0 <= i < self._number:
            raise IndexError(i)
        size = self._tensor.size(self._dim)
        length = -(-size // self._number)
        begin = i * length
        if i and begin >= size:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, begin, min(length, size - begin))


class OnCpu(TorchFunctionMode):
    """Make CPU tensors in place of CUDA or ``meta`` tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        moves = func is torch.Tensor.to
        args = tuple(_on_cpu(a, moves) for a in args)
        kwargs_on_cpu = {k: _on_cpu(v, k == "device") for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs_on_cpu)


def _on_cpu(value: Any, named: bool) -> Any:
    is_device = isinstance(value, torch.device) or (named and isinstance(value, str))
    moves = is_device and torch.device(value).type in ("cuda", "meta")
    return torch.device("cpu") if moves else value


@contextlib.contextmanager
def _attention_of(gpu: str) -> Iterator[None]:
    """Make ``scaled_dot_product_attention`` call the operator that it takes on a GPU."""
    with private_torch():
        from torch.library import _scoped_library

        default = torch._C._get_sdp_priority_order()
    first = SDPBackend.CUDNN_ATTENTION if any(n in gpu for n in _CUDNN_FIRST) else None

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        order = [SDPBackend(n) for n in torch._C._get_sdp_priority_order()]
        if first is not None and [int(b) for b in order] == default:
            order = [first, *(b for b in order if b != first)]
        inputs = (q, k, v, attn_mask, dropout_p, is_causal)
        for kernel in order:
            if _takes(kernel, inputs):
                return _call(kernel, inputs, scale, enable_gqa)
        raise RuntimeError(f"no attention kernel that is switched on takes these inputs on {gpu}")

    # Compiles make torch remember which kernel the operator has.
    remembered = _aten.scaled_dot_product_attention.default._dispatch_cache
    try:
        with _scoped_library("aten", "IMPL") as library:
            library.impl("scaled_dot_product_attention", attend, "AutogradCPU", allow_override=True)
            remembered.clear()
            yield
    finally:
        remembered.clear()


# The rules for dense inputs are those of torch's aten/src/ATen/native/transformers/cuda/
# sdp_utils.cpp on Ampere and later (cuDNN 9.11 and later), and on ROCm but for wider heads.
def _takes(kernel: SDPBackend, inputs: _Inputs) -> bool:
    q, k, v, mask, dropout, causal = inputs
    enabled = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
    }
    if kernel not in enabled or not enabled[kernel]():
        return False
    if kernel == SDPBackend.MATH:
        return True
    half = q.dtype in (torch.bfloat16, torch.float16)
    width, of_v = q.shape[-1], v.shape[-1]
    if q.dim() != 4 or not q.dtype == k.dtype == v.dtype:
        return False
    if kernel == SDPBackend.FLASH_ATTENTION:
        square = not causal or q.shape[-2] == k.shape[-2]
        return half and mask is None and width == of_v and width <= 256 and square
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        step = 8 if half else 4
        fits = width % step == of_v % step == 0
        return (half or q.dtype == torch.float32) and fits and q.shape[1] == k.shape[1]
    fits = (width <= 128 and of_v <= 128) or (width, of_v) == (192, 128)
    whole = width % 8 == of_v % 8 == 0 and (dropout * 16).is_integer()
    return half and fits and whole and not torch.are_deterministic_algorithms_enabled()


def _call(
    kernel: SDPBackend, inputs: _Inputs, scale: float | None, enable_gqa: bool
) -> torch.Tensor:
    q, k, v, mask, dropout, causal = inputs
    out: torch.Tensor
    if kernel == SDPBackend.MATH:
        attend = _aten._scaled_dot_product_attention_math
        out = attend(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa)[0]
        return out
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if kernel == SDPBackend.FLASH_ATTENTION:
        width = q.shape[-1]
        if width % 8:
            scale = width**-0.5 if scale is None else scale
            q, k, v = (F.pad(x, (0, -width % 8)) for x in (q, k, v))
        flash = _aten._scaled_dot_product_flash_attention
        out = flash(q, k, v, dropout, causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    if mask is not None:
        mask = mask.expand(*q.shape[:-1], k.shape[-2])
    if kernel == SDPBackend.EFFICIENT_ATTENTION:
        efficient = _aten._scaled_dot_product_efficient_attention
        out = efficient(q, k, v, mask, saves, dropout, causal, scale=scale)[0]
        return out
    cudnn = _aten._scaled_dot_product_cudnn_attention
    out = cudnn(q, k, v, mask, saves, dropout, causal, False, scale=scale)[0]
    return out


class Planned(BaseException):  # no handler of errors in Inductor may take it
    """A graph is planned, and nothing has to compile it."""

    def __init__(self, graph: fx.Graph) -> None:
        super().__init__()
        self.graph = graph


def results_alone(
    graph: fx.Graph, number: Callable[[Any], int]
) -> Callable[[Sequence[Any]], list[Any]]:
    """Make a stand-in for a compiled graph, which returns empty tensors of the results' shapes.

    ``number`` replaces a symbolic size.
    """
    inputs = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    (output,) = graph.find_nodes(op="output")

    def result(node: Any, args: Sequence[Any]) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node in inputs:
            return args[inputs[node]]
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return number(value)
        if not isinstance(value, torch.Tensor) or is_traceable_wrapper_subclass(value):
            return value
        size, stride = ([number(n) for n in sizes] for sizes in (value.shape, value.stride()))
        return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)

    def run(args: Sequence[Any]) -> list[Any]:
        return [result(node, args) for node in output.args[0]]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def reads_values(error: BaseException) -> bool:
    """Return whether an error, or its cause, is that a fake tensor's values were read."""
    with private_torch():
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
        )

    cause: BaseException | None = error
    while cause is not None and not isinstance(
        cause, DataDependentOutputException | DynamicOutputShapeException
    ):
        cause = cause.__cause__ or cause.__context__
    return cause is not None
