"""Accumulate gradients of several microbatches, and reduce them once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch.dynamo import sums_gradients_of
from ..errors import check_argument
from .gather import Unshard


class _ReduceLate(torch.autograd.Function):
    """Returns zero; backward gives the shard the reduced ``total`` as gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, shard: torch.Tensor, total: torch.Tensor, unshard: Unshard
    ) -> torch.Tensor:
        ctx.unshard = unshard
        ctx.dtype = shard.dtype
        ctx.save_for_backward(total)
        return torch.zeros((), dtype=shard.dtype, device=shard.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (total,) = ctx.saved_tensors
        reduction = ctx.unshard.reduction_of(ctx.dtype)
        finish = reduction.over_replicas if reduction.scatters_each else reduction
        return finish(total).to(ctx.dtype), None, None


class ReduceOnce:
    """Reduce the gradients of several backwards once, for gradient accumulation.

    Eager FSDP2 does so with ``set_requires_gradient_sync(False)``::

        reduce_once = ReduceOnce(model, backend("aot_eager", recipe(model), model=model))
        with reduce_once:
            for batch in microbatches:
                compiled(batch).backward()
        optimizer.step()

    In the block, every rank adds the gradients of the full parameters in the dtype of the
    reductions. At its end they are reduced, in the buckets of ``backend``, and added to the
    parameters' ``grad``. This takes one full gradient of every parameter in memory (4 bytes per
    element with float32) and saves all reductions but one, which does not overlap with compute.

    With hybrid sharding ``scatter_each`` saves only those between replicas, the slow ones if a
    group of shards is a node. A rank then holds the sum of its shards (4 bytes per element and
    shard)::

        each microbatch   reduce-scatter over the shards, added to the sum
        at the end        all-reduce over the replicas

    Code in the block is compiled separately, once. Bits are eager FSDP2's, except for a parameter
    that one forward reads several times, with a reduce dtype that is not the gathered one: eager
    adds its uses in one dtype and its microbatches in the other.

    Args:
        model: sharded by :func:`data_parallel`.
        backend: compiles the reductions, and the gathers with ``gather_once``; None runs them one
            by one. With buckets it needs ``model=`` to identify the parameters.
        gather_once: gather every parameter on entering, not in each microbatch, like eager FSDP2's
            ``set_reshard_after_backward(False)``. Takes a full copy of every parameter until the
            end of the block, and later writes to parameters are not visible in it.
        scatter_each: reduce-scatter the gradients of each microbatch, and once all-reduce their sum
            over the replicas, like eager FSDP2's ``set_requires_all_reduce(False)``. Parameters
            without replicas are reduced in each microbatch, as they are there.

    Raises:
        ValueError: no parameter to train is sharded, or with ``scatter_each`` none has replicas.
        RuntimeError: the block is entered within itself.
    """

    def __init__(
        self,
        model: nn.Module,
        backend: Callable[..., Any] | None = None,
        *,
        gather_once: bool = False,
        scatter_each: bool = False,
    ) -> None:
        check_argument("model", model, nn.Module)
        check_argument("backend", backend, Callable | None)
        check_argument("gather_once", gather_once, bool)
        check_argument("scatter_each", scatter_each, bool)
        self._of: dict[nn.Parameter, list[Unshard]] = {}
        for module in model.modules():
            for name, unshard in module.__dict__.get("_unshards", {}).items():
                param = module._parameters.get(name)
                if param is not None:
                    self._of.setdefault(param, []).append(unshard)
        self._trained = [p for p in self._of if p.requires_grad]
        if not self._trained:
            raise ValueError(
                f"{type(model).__name__} has no parameter to train that data_parallel() has "
                "sharded: call data_parallel(model, mesh) first"
            )
        if scatter_each:
            self._trained = [p for p in self._trained if self._of[p][0].reduction.replica_group]
            if not self._trained:
                raise ValueError(
                    f"scatter_each=True all-reduces once over replicas, and the parameters of this "
                    f"{type(model).__name__} have none: shard them on a 2-D mesh (HSDP). Without "
                    "ReduceOnce each microbatch is reduce-scattered and added"
                )
        self._gather_once, self._scatter_each = gather_once, scatter_each
        self._unreduced: list[torch.Tensor] = []
        compiled = functools.partial(torch.compile, backend=backend, fullgraph=True)
        self._gather = compiled(_gather_all) if backend else _gather_all
        self._reduce = compiled(_reduce_late) if backend else _reduce_late

    def __enter__(self) -> ReduceOnce:
        if self._unreduced:
            raise RuntimeError("this ReduceOnce is entered already: leave it before entering again")
        if self._gather_once:
            with torch.no_grad():
                gathered = self._gather([u[0] for u in self._of.values()], list(self._of))
            for unshards, full in zip(self._of.values(), gathered, strict=True):
                for unshard in unshards:
                    unshard.full = full
        for param in self._trained:
            unshards = self._of[param]
            for unshard in unshards:
                unshard.reduction = unshard.reduction._replace(scatters_each=self._scatter_each)
            leaf = unshards[0].leaf(param)
            if self._scatter_each:
                sums_gradients_of(leaf, param)
            self._unreduced.append(leaf)
            for unshard in unshards:
                unshard.unreduced = leaf
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        totals = [leaf.grad for leaf in self._unreduced]
        self._unreduced = []
        every = [unshard for unshards in self._of.values() for unshard in unshards]
        for unshard in every:
            unshard.unreduced = unshard.full = None
        try:
            if kind is None:  # a failed step leaves no gradients
                self._reduce_all(totals)
        finally:
            for unshard in every:
                unshard.reduction = unshard.reduction._replace(scatters_each=False)

    def _reduce_all(self, totals: list[torch.Tensor | None]) -> None:
        """Reduce the gradients that were added up, into ``.grad`` of the shards."""
        pairs = zip(self._trained, totals, strict=True)
        used = [(self._of[p][0], p, total) for p, total in pairs if total is not None]
        if used:
            units, shards, sums = (list(part) for part in zip(*used, strict=True))
            del used, pairs
            totals.clear()
            self._reduce(units, shards, sums).backward()


def _gather_all(units: list[Unshard], shards: list[DTensor]) -> list[torch.Tensor]:
    return [unit.gather(shard.to_local()) for unit, shard in zip(units, shards, strict=True)]


def _reduce_late(
    units: list[Unshard], shards: list[DTensor], totals: list[torch.Tensor]
) -> torch.Tensor:
    parts = zip(units, shards, totals, strict=True)
    return torch.stack([_ReduceLate.apply(s.to_local(), t, u) for u, s, t in parts]).sum()
