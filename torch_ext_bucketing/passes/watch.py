"""Watch the first runs of a compiled function for gradients that are not reduced as planned.

A run shows what the graph does not, where blocks are compiled one by one::

      embed, head: not compiled         reduced one by one, unless FSDP2 runs their units
      blocks[1] has other units         it runs blocks[0]'s graph, packed as blocks[0]'s units
      blocks[1] is blocks[0]            one graph runs twice in a step, and reduces twice
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn

from .._torch.aot import current_backward
from .._torch.dynamo import registered_model
from .._torch.fsdp2 import is_distributed
from .._torch.process_groups import default_group
from ..errors import NotBucketedWarning
from ..fqns import format_names, parameter_names
from ..fsdp.modules import gathered_by, shards_of_units
from ..fsdp.units import Units
from .base import Compilation

_MOST_MODULES = 256
"""Modules per graph whose parameters are checked: code may make new ones for every call."""
_MOST_BACKWARDS = 4
"""Calls per module whose backward is checked: the first step shows what all steps do."""


@dataclass
class _Calls:
    """The calls of one module: how many were checked, and the ID of their last ``backward()``."""

    number: int = 0
    backward: int | None = None


@dataclass
class _ModelWatch:
    """Parameters of one model: in compiled graphs, and watched because they were in none."""

    compiled: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    warned: bool = False


# Shared by all backends: each block may be compiled with its own.
_watch_by_model: weakref.WeakKeyDictionary[nn.Module, _ModelWatch] = weakref.WeakKeyDictionary()


def _look_for_shards(parameters: Sequence[Any], names: str, compilation: Compilation) -> None:
    """Warn if a compile that reads ``parameters`` has no collectives."""
    group = default_group()
    if group is None or group.size() < 2 or compilation.has_collectives:
        return
    # FSDP2 gathers a block around a graph of its own.
    if gathered_by(parameters[0]) is not None:
        return
    # A replica is never gathered, and reduced in training only.
    if not any(is_distributed(p) for p in parameters):
        compilation.warn(
            f"nothing is bucketed: no collective serves {names}, which are not sharded. Shard the "
            "model before it is compiled: torch_ext_bucketing.fsdp.fully_shard, or "
            "data_parallel(model, mesh). DistributedDataParallel and eager FSDP2's fully_shard "
            "reduce gradients outside of the graph and leave nothing to bucket",
            NotBucketedWarning,
        )


def watch_for_shards(run: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """Wrap ``run``, which has no units, to look for shards in its first call."""
    fqns = compilation.input_fqns
    if not fqns:
        return run
    looked = False

    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal looked
        if not looked:
            looked = True
            _look_for_shards([args[i] for i in fqns], format_names(fqns.values()), compilation)
        return run(*args, **kwargs)

    return watched


class RunWatch:
    """Watch the first runs of a compiled function for ``units`` that are not reduced as planned."""

    def __init__(self, units: Units, compilation: Compilation) -> None:
        self._units = units
        self._compilation = compilation
        fqns = compilation.input_fqns or {}
        self._planned = {i: f for i, f in fqns.items() if units.unit_of(f) is not None}
        self._names = format_names(self._planned.values())

    def watch(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``compiled`` to check its first calls."""
        if not self._planned:
            return compiled
        first = next(iter(self._planned))
        calls: dict[int, _Calls] = {}

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            # Modules of one class share a graph, and differ by their first parameter.
            module = id(args[first])
            module_calls = calls.get(module)
            if module_calls is None:
                if len(calls) == _MOST_MODULES:
                    return compiled(*args, **kwargs)
                module_calls = calls[module] = _Calls()
                parameters = [args[i] for i in self._planned]
                _look_for_shards(parameters, self._names, self._compilation)
                if gathered_by(parameters[0]) is None:
                    self._look_at_module(parameters)
            out = compiled(*args, **kwargs)
            if module_calls.number < _MOST_BACKWARDS and torch.is_grad_enabled():
                module_calls.number += 1
                self._watch_backward(out, module_calls)
            return out

        return run

    def _look_at_module(self, parameters: Sequence[Any]) -> None:
        """Check the parameters of a module that runs the graph for the first time."""
        model = registered_model(parameters[0], self._compilation.model)
        if model is None:
            return
        names = {p: fqns[0] for p, fqns in parameter_names(model).items()}
        members: dict[int | None, list[str]] = {}  # by unit, in its order
        for name in names.values():
            members.setdefault(self._units.unit_of(name), []).append(name)
        for unit, fqns in members.items():
            listed = {} if unit is None else {f: i for i, f in enumerate(self._units.units[unit])}
            fqns.sort(key=lambda fqn: listed.get(fqn, -1))
        ran = [names[p] for p in parameters if p in names]
        watch = _watch_by_model.setdefault(model, _ModelWatch())
        watch.compiled.update(ran)
        self._watch_others(model, names, members, watch)
        planned = list(self._planned.values())
        if len(ran) < len(parameters) or ran == planned:
            return
        if self._packing(ran, members) != self._packing(planned, members):
            self._compilation.warn_of_bits(
                f"{format_names(ran)} run the graph that was compiled for {self._names}, and are "
                "packed like those, but their units differ",
                "Modules of one class share a graph: give them equal units, in eager FSDP2 as "
                "well, or compile each with a backend(...) of its own",
            )

    def _packing(
        self, fqns: Sequence[str], members: dict[int | None, list[str]]
    ) -> list[tuple[list[int], bool]]:
        """List per unit the positions in ``fqns`` of its members, and whether these are all."""
        place = {fqn: i for i, fqn in enumerate(fqns)}
        units = dict.fromkeys(self._units.unit_of(fqn) for fqn in fqns)
        return [
            ([place[m] for m in members[unit] if m in place], place.keys() >= set(members[unit]))
            for unit in units
        ]

    def _watch_others(
        self,
        model: nn.Module,
        names: dict[nn.Parameter, str],
        members: dict[int | None, list[str]],
        watch: _ModelWatch,
    ) -> None:
        """Watch gradients of parameters that are in no compiled graph."""
        # FSDP2 reduces units that are not compiled, as a whole.
        by_fsdp2 = shards_of_units(model)
        trained = {
            name
            for p, name in names.items()
            if p.requires_grad and is_distributed(p) and p not in by_fsdp2
        }
        packed = {
            name
            for unit, fqns in members.items()
            if unit is not None and len(trained.intersection(fqns)) > 1
            for name in fqns
        }
        unwatched = (trained & packed) - watch.compiled - watch.watched
        watch.watched |= unwatched
        for parameter, name in names.items():
            if name in unwatched:
                self._watch_gradient(parameter, name, watch)

    def _watch_gradient(self, parameter: nn.Parameter, name: str, watch: _ModelWatch) -> None:
        def reduced(_: torch.Tensor) -> None:
            handle.remove()
            uncompiled = watch.watched - watch.compiled  # without graphs compiled since
            if watch.warned or name not in uncompiled:
                return
            watch.warned = True
            self._compilation.warn_of_bits(
                f"{format_names(sorted(uncompiled))} are in no compiled graph, and the gradient of "
                f"{name} was reduced without its unit",
                "Compile the whole model, or make each a unit, in eager FSDP2 as well",
            )

        handle = parameter.register_post_accumulate_grad_hook(reduced)

    def _watch_backward(self, out: Any, calls: _Calls) -> None:
        """Watch for two calls of a module in one ``backward()``."""

        def begins(_: Any) -> None:
            backward = current_backward()
            if calls.backward == backward:
                calls.number = _MOST_BACKWARDS
                self._compilation.warn_of_bits(
                    f"the graph that was compiled for {self._names} ran twice with the same "
                    "parameters in one step, and reduced their gradients twice",
                    "Compile the whole model, with MatchFSDP2() first among the passes",
                )
            calls.backward = backward

        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
                return
