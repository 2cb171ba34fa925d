"""Inductor reuses no memory of a collective between its start and its wait."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from marks import at_night
from sharded_models import TwoBlocks, step
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing._torch import inductor
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.fsdp.units import FSDPParamOrder
from torch_ext_bucketing.graph.nodes import KINDS
from torch_ext_bucketing.planner.cost.machine import H100

C10D = torch.ops._c10d_functional
STARTS = (
    C10D.all_gather_into_tensor,
    C10D.all_gather_into_tensor_out,
    C10D.reduce_scatter_tensor,
    C10D.all_reduce_,
    C10D.all_to_all_single,
)
TOKENS = torch.zeros(2, 3, dtype=torch.long)

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh_dynamo", "fake_world")]


class InFlight:
    """The collectives between start and wait, which may read and write their tensors any time."""

    def __init__(self) -> None:
        self.changed: list[str] = []
        self.started = 0
        self._wait = C10D.wait_tensor.default
        self._flying: dict[int, tuple[str, list[torch.Tensor], list[torch.Tensor]]] = {}

    def start(self, op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = op(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        tensors.append(result)
        # NaN is not equal to itself, bytes are.
        copies = [x.clone().view(torch.uint8) for x in tensors]
        self._flying[result.data_ptr()] = str(op), tensors, copies
        self.started += 1
        return result

    def wait(self, result: torch.Tensor) -> torch.Tensor:
        name, tensors, copies = self._flying.pop(result.data_ptr())
        if any(
            not torch.equal(x.view(torch.uint8), c) for x, c in zip(tensors, copies, strict=True)
        ):
            self.changed.append(name)
        return self._wait(result)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the collectives of Inductor's code, which looks operators up when it runs."""
        with pytest.MonkeyPatch.context() as patch:
            for packet in STARTS:
                op = packet.default
                patch.setattr(packet, "default", lambda *a, op=op, **k: self.start(op, *a, **k))
            patch.setattr(C10D.wait_tensor, "default", self.wait)
            yield
        assert not self._flying


def order() -> FSDPParamOrder:
    return FSDPParamOrder.from_model(TwoBlocks(), ["layers.0", "layers.1", ""])


# The host would bound so small a model, whose order is then that of the graph.
APART = teb.Schedule(teb.Overlap(), machine=replace(H100, host_ms={}))
CASES: dict[str, Callable[[], list[teb.GraphPass]]] = {
    "unmerged": lambda: [APART],
    "units apart": lambda: [teb.BucketByUnit(order(), KINDS), APART],
    "caps": lambda: [teb.BucketAndSchedule(teb.Overlap(), kinds=KINDS)],
    "all-to-all": lambda: [teb.BucketByUnit(order(), KINDS), teb.FixedOrderReduce(), APART],
}


def scribble(self: AsyncCompile, types: Sequence[str], source: str) -> Callable[..., None]:
    """Replace a generated kernel by one that overwrites each float tensor it may write."""

    def kernel(*args: Any) -> None:
        for arg, kind in zip(args, types, strict=True):
            if kind.endswith("*") and not kind.startswith("const") and arg.is_floating_point():
                arg.fill_(next(NUMBERS))

    return kernel


@contextlib.contextmanager
def no_caches() -> Iterator[None]:
    """Compile anew, and keep no code with replaced kernels."""
    with (
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


NUMBERS = itertools.cycle(range(1, 200))  # exact in bfloat16, and never the number before


def watched_step(passes: list[teb.GraphPass], mode: str) -> tuple[InFlight, int]:
    """Run a compiled step twice, the second time watched; return the number of reuses, too."""
    sizes = {"fully_shard": {"shard": 4}, "hybrid_shard": {"replicate": 2, "shard": 2}}[mode]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model = data_parallel(TwoBlocks(), mesh, mode, param_dtype=torch.bfloat16)
    compiled = torch.compile(model, backend=teb.backend("inductor", passes))
    watch = InFlight()
    with pytest.MonkeyPatch.context() as patch, no_caches():
        patch.setattr(AsyncCompile, "cpp_pybinding", scribble)
        patch.setattr(inductor, "NO_HOLDS", {})  # with as many reuses as without an order
        _, code = run_and_get_code(lambda: step(compiled, TOKENS))
        with watch.watching():
            step(compiled, TOKENS)
    return watch, sum(text.count("# reuse") for text in code)


@pytest.mark.parametrize(
    ("case", "mode"),
    [
        ("units apart", "hybrid_shard"),
        at_night("caps", "fully_shard"),
        at_night("all-to-all", "hybrid_shard"),
    ],
)
def test_no_memory_of_a_collective_is_reused_before_its_wait(case, mode):
    watch, reuses = watched_step(CASES[case](), mode)
    assert watch.started > 0
    assert reuses > 0
    assert watch.changed == []


def test_a_reuse_before_the_wait_is_seen(monkeypatch):
    """A kernel overwrites a collective's input if the wait does not keep it alive."""
    monkeypatch.setattr(ir._WaitKernel, "get_volatile_reads", lambda self: [])
    watch, _ = watched_step(CASES["unmerged"](), "fully_shard")
    assert "_c10d_functional.reduce_scatter_tensor.default" in watch.changed
