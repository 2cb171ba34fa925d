"""Read the order of collectives, waits and compute nodes from the code that Inductor generates."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import config, ir
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from torch.utils import _triton

from benchmarks.graphs import Graph
from torch_ext_bucketing.graph.nodes import is_collective, is_compute, started_by
from torch_ext_bucketing.passes import backends
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.passes.pin import pin_order


class Generated(BaseException):
    """Ends a compile with its code; not an Exception, which Inductor would wrap."""


def stop(code: str) -> None:
    raise Generated(code)


def orders(
    graph: Graph, passes: list[GraphPass], options: dict[str, Any], *, pinned: bool = True
) -> tuple[list[str], list[str]]:
    """Compile a graph with passes; list its nodes as scheduled and as in the generated code."""
    backend = backends.backend("inductor", passes, size_hints=graph.config.size_hints)
    compilation = backend.pipeline.compilation(size_hints=graph.config.size_hints)
    planned: list[str] = []

    def record(g: fx.Graph) -> int:
        planned.extend(
            n.name for n in g.nodes if is_collective(n) or is_compute(n) or started_by(n)
        )
        return pin_order(g) if pinned else 0

    inputs = [n.meta["val"] for n in graph.gm.graph.nodes if n.op == "placeholder"]
    patches = {
        **options,
        "post_grad_custom_post_pass": backends._InductorPass(
            backends._Compile(backend, compilation), "forward_backward"
        ),
        "fx_graph_cache": False,
    }
    with (
        mock.patch.object(backends, "pin_order", record),
        config.patch(patches),
        tracing(TracingContext(graph.mode)),
        _names_in_code(),
        fake_gpu() if inputs[-1].is_cuda else contextlib.nullcontext(),
    ):
        try:
            compile_fx_inner(graph.gm, inputs, is_backward=graph.phase == "backward")
        except Generated as done:
            (code,) = done.args
    names = set(planned)
    return planned, [n for n in re.findall(r"# node: (\w+)", _inlined(code)) if n in names]


def _inlined(code: str) -> str:
    """Put the functions of CUDA graphs' partitions, which come first, where they are called."""
    functions, calls = code, ""
    if "\nclass Runner" in code:
        functions, calls = code.split("\nclass Runner")
    head, *bodies = re.split(r"\ndef partition_\d+\(", functions)
    if not bodies:
        return code
    return head + re.sub(r"self\.partitions\[(\d+)\]\(", lambda m: bodies[int(m[1])], calls)


@contextlib.contextmanager
def _names_in_code() -> Iterator[None]:
    """Write a comment with the node's name before each call of an external kernel; stop there."""
    lowered: dict[str, str] = {}
    running: list[str] = []
    run_node, register = GraphLowering.run_node, GraphLowering.register_operation

    def run(self: GraphLowering, node: fx.Node) -> Any:
        running.append(node.name)
        try:
            return run_node(self, node)
        finally:
            running.pop()

    def name(self: GraphLowering, op: ir.Operation) -> str:
        number = register(self, op)
        lowered[number] = running[0] if running else ""  # of the graph, not of a wrapped node's
        return number

    def comment(self: Any, wrapper: Any, kernel_name: str | None = None) -> None:
        wrapper.make_comment(f"# node: {lowered[self.operation_name]}")

    with (
        mock.patch.object(GraphLowering, "run_node", run),
        mock.patch.object(GraphLowering, "register_operation", name),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)),
        mock.patch.object(ir.ExternKernel, "codegen_comment", comment),
    ):
        yield


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Let Inductor generate code for fake CUDA tensors on a machine without a GPU."""
    from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]
    from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

    h100 = SimpleNamespace(
        name="NVIDIA H100",
        major=9,
        minor=0,
        multi_processor_count=132,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=227 * 1024,
        shared_memory_per_multiprocessor=228 * 1024,
        L2_cache_size=50 * 2**20,
        warp_size=32,
        total_memory=80 * 2**30,
    )
    target = mock.Mock(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0
    )
    values: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": h100.name,
        "get_device_properties": h100,
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "get_rng_state": torch.get_rng_state(),
        "set_rng_state": None,
        "synchronize": None,
        "current_stream": mock.Mock(),
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, v=value, **__: v))
        properties = staticmethod(lambda *_, **__: h100)
        stack.enter_context(mock.patch.object(CudaInterface, "get_device_properties", properties))
        stack.enter_context(mock.patch.object(fake_tensor, "init_gpu_context"))
        # "~" initialises CUDA, unlike the function.
        stack.enter_context(
            mock.patch.object(torch.Tensor, "__invert__", lambda x: torch.bitwise_not(x))
        )
        stack.enter_context(mock.patch.object(driver, "_active", target))
        # An earlier compile for the CPU has kept that triton has no device.
        _forget_triton()
        stack.callback(_forget_triton)
        yield


def _forget_triton() -> None:
    for function in vars(_triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()
