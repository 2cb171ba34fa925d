"""The unit that ``fully_shard`` leaves on a module, and the methods that trainers call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._torch.fsdp2 import Sent, sent
from .._torch.process_groups import ranks_of
from .shard import Layout

UNITS: weakref.WeakValueDictionary[int, Unit] = weakref.WeakValueDictionary()
"""All units by number."""


@dataclass(eq=False)
class Unit:
    """One call of :func:`.fully_shard`.

    Attributes:
        number: ascends in the order of the calls.
        modules: those of the call, without modules inside others.
        payloads: per mesh, the first place (module and name) of each parameter, in payload order.
        layouts: of the parameters, like ``payloads``.
        policy: as given.
        reshard: as given; None: unless the unit is the root.
        ignored: parameters that the call leaves alone.
        running: whether a forward has begun. Until then reading a parameter returns the shard, for
            initialization in place.
        read: whether a recipe was made of it.
        factor, only_sums: see :class:`.Sent`.
    """

    number: int
    modules: tuple[nn.Module, ...]
    payloads: tuple[tuple[tuple[nn.Module, str], ...], ...]
    layouts: tuple[tuple[Layout, ...], ...]
    policy: MixedPrecisionPolicy
    reshard: bool | int | None
    ignored: frozenset[nn.Parameter]
    originals: list[weakref.ref[nn.Parameter]] = field(repr=False)
    running: bool = False
    read: bool = False
    factor: float | None = None
    only_sums: bool = False

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that forward begins; a forward pre-hook."""
        if torch.compiler.is_compiling():
            _begin(self.number)
        else:
            self.running = True

    def divide(self, factor: float | None, only_sums: bool) -> None:
        """Set the divisor of gradients."""
        for (module, name), layout in self.parameters():
            floats = (torch.float32, torch.bfloat16)
            reduced = sent_by(module, name, layout, self)
            exact = only_sums or factor in (None, 1, layout.shards)
            if not exact and reduced.reduced in (*floats, None):
                raise ValueError(
                    f"set_gradient_divide_factor({factor}) needs a process group that multiplies "
                    "before it adds, which functional collectives have not: first "
                    "set_force_sum_reduction_for_comms(True), which divides after the sum, or a "
                    f"factor of 1 or {layout.shards}"
                )
        self.factor, self.only_sums = factor, only_sums
        # Every place of a shared parameter gathers by itself.
        for inner in dict.fromkeys(m for top in self.modules for m in top.modules()):
            for unshard in inner.__dict__.get("_unshards", {}).values():
                if unshard.gate is self:
                    unshard.divide_by(factor, only_sums)

    def parameters(self) -> Iterator[tuple[tuple[nn.Module, str], Layout]]:
        """Yield the place and the layout of each parameter."""
        for places, layouts in zip(self.payloads, self.layouts, strict=True):
            yield from zip(places, layouts, strict=True)


@torch.compiler.assume_constant_result
def _begin(number: int) -> bool:
    # Dynamo calls this while it traces, instead of tracing a write to the unit.
    unit = UNITS.get(number)
    if unit is not None:
        unit.running = True
    return True


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of the ``fully_shard`` call that a module was given to, or None."""
    return module.__dict__.get("_fully_shard_unit")


class FSDPModule:
    """The methods of a module that :func:`.fully_shard` was called on, those of FSDP2's own.

    Settings of eager FSDP2's streams, buffers and prefetching have no effect: a compiled step's
    passes order and merge its collectives. Settings that a compiled step can't follow are errors
    that name the way to do it here.
    """

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``, before the recipe is made."""
        if not isinstance(reshard_after_forward, bool):
            raise TypeError(f"give True or False, got {reshard_after_forward!r}")
        for unit in self._changed(recurse, "set_reshard_after_forward"):
            unit.reshard = reshard_after_forward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide gradients by ``factor`` instead of the number of ranks."""
        for unit in self._changed(False, "set_gradient_divide_factor"):
            unit.divide(float(factor), unit.only_sums)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Only add in collectives, and divide before or after them."""
        for unit in self._changed(False, "set_force_sum_reduction_for_comms"):
            unit.divide(unit.factor, bool(enable))

    def unshard(self, async_op: bool = False) -> Any:
        """Do nothing: a compiled step gathers parameters where its passes put the gathers."""
        return _Handle() if async_op else None

    def reshard(self) -> None:
        """Do nothing: gathered parameters live inside a compiled step."""

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Accept True; see the error for False."""
        if not requires_gradient_sync:
            raise NotImplementedError(_instead("set_requires_gradient_sync(False)", _REDUCE_ONCE))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accept True; see the error for False."""
        if not requires_all_reduce:
            raise NotImplementedError(_instead("set_requires_all_reduce(False)", _REDUCE_ONCE))

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Accept True; see the error for False."""
        if not reshard_after_backward:
            way = _REDUCE_ONCE.replace("backend)", "backend, gather_once=True)")
            raise NotImplementedError(_instead("set_reshard_after_backward(False)", way))

    def set_reduce_scatter_unused_params(self, enable: bool, **_: Any) -> None:
        """Accept False; see the error for True."""
        if enable:
            way = (
                "all ranks run one graph, so a parameter is unused on all of them or on none; for "
                "a gradient of zeros, add `0 * parameter.sum()` to the loss"
            )
            raise NotImplementedError(_instead("set_reduce_scatter_unused_params(True)", way))

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise: collectives of a compiled step are nodes of its graph."""
        raise NotImplementedError(_instead("set_custom_all_gather", "write a pass, teb.GraphPass"))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise: collectives of a compiled step are nodes of its graph."""
        way = (
            "recipe(model, reduce='all_to_all') adds in rank order, or write a pass, teb.GraphPass"
        )
        raise NotImplementedError(_instead("set_custom_reduce_scatter", way))

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Raise: collectives of a compiled step are nodes of its graph."""
        way = "a 2-D mesh all-reduces, or write a pass, teb.GraphPass"
        raise NotImplementedError(_instead("set_all_reduce_hook", way))

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Do nothing: :class:`.Schedule` orders the gathers."""
        _check_prefetched(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Do nothing: :class:`.Schedule` orders the gathers."""
        _check_prefetched(modules)

    def _no_effect(self, *_: Any, **__: Any) -> None:
        """Do nothing: it sets how eager FSDP2 runs, not what it computes."""

    finalize_backward = _no_effect
    reset_iter_state = _no_effect
    set_allocate_memory_from_process_group_for_comm = _no_effect
    set_is_last_backward = _no_effect
    set_keep_unsharded_storage = _no_effect
    set_manual_backward_finalization = _no_effect
    set_post_optim_event = _no_effect
    set_reduce_scatter_max_input_buffers = _no_effect
    set_separate_reduce_scatter_group = _no_effect
    set_symm_mem_for_comm = _no_effect
    set_unshard_in_backward = _no_effect

    def _changed(self, recurse: bool, method: str) -> Iterator[Unit]:
        """Yield the units that a method changes; raise a RuntimeError if it comes too late."""
        assert isinstance(self, nn.Module)
        modules = self.modules() if recurse else [self]
        units = dict.fromkeys(u for m in modules if (u := unit_of(m)) is not None)
        if any(unit.read or unit.running for unit in units):
            raise RuntimeError(
                f"{method}() comes too late: a recipe was made of the model, or it ran. Call it "
                "after fully_shard(), before recipe(model)"
            )
        return iter(units)


class _Handle:
    def wait(self) -> None:
        """Do nothing; see :meth:`FSDPModule.unshard`."""


_REDUCE_ONCE = (
    "run the microbatches in `with ReduceOnce(model, backend): ...`, from "
    "torch_ext_bucketing.fsdp.shard"
)


def _instead(method: str, way: str) -> str:
    return f"{method} has no counterpart in a compiled step. Instead: {way}"


def _check_prefetched(modules: Iterable[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise TypeError(f"give modules that fully_shard() was called on, got {module!r}")


def sent_by(module: nn.Module, name: str, layout: Layout, unit: Unit | None = None) -> Sent:
    """Describe how a parameter is sharded and sent."""
    param = module._parameters[name]
    assert param is not None
    mesh, dims = layout.mesh, (layout.shard_dim, layout.replica_dim)
    shards, replicas = (() if d is None else ranks_of(mesh.get_group(d)) for d in dims)
    policy = MixedPrecisionPolicy(layout.param_dtype, layout.reduce_dtype)
    factor, only_sums = (None, False) if unit is None else (unit.factor, unit.only_sums)
    return sent(layout.dim, shards, replicas, param.dtype, policy, factor, only_sums)
