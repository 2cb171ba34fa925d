"""Prove parity for more ranks than there are machines: all data-parallel shards in one process.

Every virtual rank's gradients are computed in turn. They are packed twice: by the byte layout that
was read from the compiled, bucketed backward graph, and by eager FSDP2's own copy-in over its param
groups, both made for that world size on a fake process group. What NCCL's rings would make of
either buffer is then simulated, and a step is taken on the full weights.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import torch_ext_bucketing as teb
from benchmarks.eager_parity.models import batch_of, build, units_of
from benchmarks.eager_parity.ranks import in_graph_order, wrap_units
from torch_ext_bucketing.reports.compile import BucketReport
from torch_ext_bucketing.testing.experiments import (
    Payload,
    bucket_payloads,
    fsdp_payloads,
    layout_differences,
)
from torch_ext_bucketing.testing.sums import RingTopology, simulate_reduce_scatter
from torch_ext_bucketing.testing.training import digest

RANKS_PER_NODE = 8
CHUNK_BYTES = 64
"""Far below NCCL's, so that one rank's few hundred bytes of a small model span several channels."""
DTYPE = torch.bfloat16
"""Of computation and reduction; weights are float32."""

Grads = Mapping[str, Tensor]
"""Gradients by FQN: ``[ranks, *shape]`` before the reduction, ``shape`` after it."""


def run_virtual(model: str, ranks: int, steps: int, layers: int) -> dict[str, Any]:
    """Train ``model`` on ``ranks`` virtual ranks, over nodes of eight."""
    begin = time.perf_counter()
    topology = RingTopology(RANKS_PER_NODE, chunk_bytes=CHUNK_BYTES)
    nodes = topology.nodes_of(ranks)
    with _fake_world(ranks) as mesh:
        payloads = eager_payloads(model, layers, mesh)
        ours = compiled_buckets(model, layers, mesh, in_order=True)
        graph_order = compiled_buckets(model, layers, mesh, in_order=False)

    units = [[member.fqn for member in payload.members] for payload in payloads]
    eager = _Training(model, layers, lambda grads: reduce_by_copy_in(grads, units, topology))
    compiled = _Training(model, layers, lambda grads: reduce_by_layout(grads, ours, topology))
    control: _Training | None = _Training(
        model, layers, lambda grads: reduce_by_layout(grads, graph_order, topology)
    )
    equal, first_different = 0, None
    for step in range(steps):
        grads = eager.grads(step, ranks)
        shared = compiled.digest() == eager.digest()
        # Equal weights have equal gradients: they are computed once.
        compiled_grads = grads if shared else compiled.grads(step, ranks)
        eager.step(grads)
        compiled.step(compiled_grads)
        equal += compiled.digest() == eager.digest()
        if control is not None:
            control.step(grads)
            if control.digest() != eager.digest():
                first_different, control = step + 1, None
    layout_equal = not layout_differences(payloads, bucket_payloads(ours))
    return {
        "model": model,
        "ranks": ranks,
        "nodes": nodes,
        "steps": steps,
        "steps_equal": equal,
        "control_first_different_step": first_different,
        "layout_equal": layout_equal,
        "seconds": round(time.perf_counter() - begin, 1),
        "passed": equal == steps and layout_equal and first_different is not None,
        "torch": torch.__version__,
    }


@contextmanager
def _fake_world(ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def eager_payloads(model: str, layers: int, mesh: DeviceMesh) -> list[Payload]:
    """Return the payloads that eager FSDP2's param groups reduce-scatter."""
    module = build(model, layers=layers)
    policy = MixedPrecisionPolicy(DTYPE, DTYPE)
    wrap_units(module, units_of(model, module), mesh=mesh, mp_policy=policy)
    order = teb.FSDPParamOrder.from_fsdp(module)
    found = fsdp_payloads(module, order, shards=mesh.size(), param_dtype=DTYPE, reduce_dtype=DTYPE)
    return [payload for payload in found if payload.kind == "reduce_scatter"]


def compiled_buckets(
    model: str, layers: int, mesh: DeviceMesh, *, in_order: bool
) -> list[BucketReport]:
    """Return the reduce-scatters of the compiled backward graph, one per unit."""
    torch._dynamo.reset()
    module = build(model, layers=layers)
    teb.data_parallel(module, mesh, param_dtype=DTYPE, reduce_dtype=DTYPE)
    passes = teb.recipe(module, units=units_of(model, module))
    if not in_order:
        passes = [in_graph_order(p) if isinstance(p, teb.BucketByUnit) else p for p in passes]
    compiler = teb.backend("aot_eager", passes=passes, model=module)
    torch.compile(module, backend=compiler, fullgraph=True)(*batch_of(0, 0)).backward()
    backward = compiler.last_report().graph("backward")
    assert backward is not None
    return [b for b in backward.buckets if b.kind == "reduce_scatter"]


def reduce_by_layout(
    grads: Grads, buckets: Sequence[BucketReport], topology: RingTopology
) -> Grads:
    """Reduce gradients packed by the buckets' byte layout."""
    reduced: dict[str, Tensor] = {}
    for bucket in buckets:
        ranks, part = bucket.group_size, bucket.nbytes // DTYPE.itemsize
        buffers = torch.empty(ranks, ranks, part, dtype=DTYPE)  # [source, destination, elements]
        places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        for member in bucket.members:
            (fqn,) = member.fqns
            first = member.offset // DTYPE.itemsize
            where = slice(first, first + member.nbytes // DTYPE.itemsize)
            places[fqn] = (where, member.shape)
            buffers[:, :, where] = _padded(grads[fqn], ranks * member.shape[0]).reshape(
                ranks, ranks, -1
            )
        sums = _reduce(buffers, topology)
        for fqn, (where, shape) in places.items():
            rows = sums[:, where].reshape(ranks * shape[0], *shape[1:])
            reduced[fqn] = rows[: grads[fqn].shape[1]]
    return reduced


def reduce_by_copy_in(
    grads: Grads, units: Sequence[Sequence[str]], topology: RingTopology
) -> Grads:
    """Reduce gradients packed by FSDP2's own operator, like ``foreach_reduce_scatter_copy_in``."""
    reduced: dict[str, Tensor] = {}
    for unit in units:
        ranks = grads[unit[0]].shape[0]
        shapes = [grads[fqn].shape[1:] for fqn in unit]
        rows = [-(-shape[0] // ranks) for shape in shapes]
        numels = [n * shape[1:].numel() for n, shape in zip(rows, shapes, strict=True)]
        buffers = torch.empty(ranks, ranks, sum(numels), dtype=DTYPE)
        for rank in range(ranks):
            torch.ops.fsdp.chunk_cat(
                [grads[fqn][rank] for fqn in unit], dim=0, num_chunks=ranks, out=buffers[rank]
            )
        shards = _reduce(buffers, topology).split(numels, dim=1)
        for fqn, shape, n, shard in zip(unit, shapes, rows, shards, strict=True):
            reduced[fqn] = shard.reshape(ranks * n, *shape[1:])[: shape[0]]
    return reduced


def _reduce(buffers: Tensor, topology: RingTopology) -> Tensor:
    """Average ``[source, destination, elements]`` to ``[destination, elements]``."""
    inputs = [buffer.view(-1) for buffer in buffers]
    return torch.stack(simulate_reduce_scatter(inputs, topology, op=dist.ReduceOp.AVG))


def _padded(grads: Tensor, rows: int) -> Tensor:
    missing = rows - grads.shape[1]
    return nn.functional.pad(grads, (0, 0) * (grads.ndim - 2) + (0, missing))


class _Training:
    """Full weights, their optimizer, and a way to reduce gradients."""

    def __init__(self, model: str, layers: int, reduce: Callable[[Grads], Grads]) -> None:
        self._module = build(model, layers=layers)
        self._parameters = dict(self._module.named_parameters())
        self._optimizer = torch.optim.AdamW(self._parameters.values(), lr=1e-3, foreach=True)
        self._reduce = reduce

    def grads(self, step: int, ranks: int) -> Grads:
        """Return every virtual rank's gradients, computed one after another."""
        stacked = {
            fqn: torch.empty(ranks, *p.shape, dtype=DTYPE) for fqn, p in self._parameters.items()
        }
        weights = {
            fqn: p.detach().to(DTYPE).requires_grad_() for fqn, p in self._parameters.items()
        }
        for rank in range(ranks):
            loss = torch.func.functional_call(self._module, weights, batch_of(step, rank, size=1))
            found = torch.autograd.grad(loss, list(weights.values()))
            for fqn, grad in zip(weights, found, strict=True):
                stacked[fqn][rank] = grad
        return stacked

    def step(self, grads: Grads) -> None:
        """Reduce, and take an optimizer step on the full weights."""
        for fqn, grad in self._reduce(grads).items():
            self._parameters[fqn].grad = grad.to(self._parameters[fqn].dtype)
        self._optimizer.step()

    def digest(self) -> str:
        """Hash all weights."""
        return digest(self._module)
