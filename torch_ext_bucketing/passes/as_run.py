"""Warnings for what shows only when compiled code runs: units are not reduced as they were planned.

Where blocks are compiled one by one, or a graph break leaves them to be, the graph of a block says
nothing of what runs around it::

    embed, head: not compiled         reduced one by one, in no bucket
    blocks[1] has other units         it runs blocks[0]'s graph, packed as blocks[0]'s units
    blocks[1] is blocks[0]            one graph runs twice in a step, and reduces twice

Each is legal, and in none of them a unit is reduced in one payload, as it is by eager FSDP2. Nor
does a graph say whether parameters without collectives were left unsharded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._torch.aot import current_backward
from .._torch.dynamo_inputs import model_of
from .._torch.process_groups import default_group
from ..fqns import parameter_names
from .base import Compilation
from .bucketing import BucketUnits
from .divided import DividedUnitWarning, some
from .silence import NotBucketedWarning

__all__ = ["AsRun"]

_MODULES = 256
"""Modules that run one graph and are looked at: who makes new parameters for every call shall not
pay for each."""
_BACKWARDS = 4
"""Of each module, the calls whose backward is looked at: what a step does, its first one does."""


@dataclass
class _Calls:
    """Those of one module."""

    number: int = 0
    backward: int | None = None


@dataclass
class _Known:
    """Of one model."""

    compiled: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    warned: bool = False


# Of all backends together: each block may have one of its own.
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class AsRun:
    """Watches what was compiled for units.

    Args:
        units: the pass that buckets them.
        model: as of :func:`.backend`.
    """

    def __init__(self, units: BucketUnits, model: nn.Module | None) -> None:
        self._units = units
        self._model = model

    def watch(self, compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
        """``compiled``, whose first calls are looked at; ``compilation`` takes the warnings."""
        fqns: Any = compilation.input_fqns or {}
        planned = {i: f for i, f in fqns.items() if self._units.index.unit_of(f) is not None}
        if not planned:
            return compiled
        first = next(iter(planned))
        calls: dict[int, _Calls] = {}

        @functools.wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            module = id(args[first])
            mine = calls.get(module)
            if mine is None:
                if len(calls) == _MODULES:
                    return compiled(*args, **kwargs)
                mine = calls[module] = _Calls()
                parameters = [args[i] for i in planned]
                self._sharded(planned, parameters, compilation)
                self._new(planned, parameters, compilation)
            out = compiled(*args, **kwargs)
            if mine.number < _BACKWARDS and torch.is_grad_enabled():
                mine.number += 1
                self._watch_backward(out, mine, list(planned.values()), compilation)
            return out

        return run

    def _sharded(
        self, planned: dict[int, str], parameters: Sequence[Any], compilation: Compilation
    ) -> None:
        """Warn where the collectives of the units are missing from the compile altogether."""
        group, report = default_group(), compilation.report
        if group is None or group.size() < 2 or compilation.tagged or report.collectives_before:
            return
        if any(isinstance(p, DTensor) for p in parameters):
            return  # a replica is gathered nowhere, and reduced in training alone
        if not any(graph.from_cache for graph in report.graphs):  # made from graphs unseen here
            compilation.warn(
                f"nothing is bucketed: no collective serves {some(list(planned.values()))}, which "
                "are in units and not sharded. Shard the model before it is compiled: "
                "data_parallel(model, mesh). What reduces gradients outside of the graph "
                "(DistributedDataParallel, fully_shard) leaves nothing to bucket",
                NotBucketedWarning,
            )

    def _new(
        self, planned: dict[int, str], parameters: Sequence[Any], compilation: Compilation
    ) -> None:
        """A module runs the graph for the first time."""
        model = model_of(parameters[0], self._model)
        if model is None:
            return
        names = {p: fqns[0] for p, fqns in parameter_names(model).items()}
        members: dict[int | None, list[str]] = {}  # of each unit, in its order
        for name in names.values():
            members.setdefault(self._units.index.unit_of(name), []).append(name)
        for unit, fqns in members.items():
            listed = {} if unit is None else {f: i for i, f in enumerate(self._units.units[unit])}
            fqns.sort(key=lambda fqn: listed.get(fqn, -1))
        own = [names[p] for p in parameters if p in names]
        known = _known.setdefault(model, _Known())
        known.compiled.update(own)
        self._watch_others(names, members, known, compilation)
        if len(own) < len(parameters) or own == list(planned.values()):
            return
        if self._packing(own, members) != self._packing(list(planned.values()), members):
            compilation.warn(
                f"{some(own)} are reduced by the graph that was compiled for "
                f"{some(list(planned.values()))}, whose units are made up otherwise, and are "
                "packed like those, so their weights are not eager FSDP2's bit for bit. Modules "
                "of one class share a compiled graph: give them units that are made up alike, in "
                "eager FSDP2 as well, or compile each with a backend(...) of its own, for which "
                "the graph is compiled anew",
                DividedUnitWarning,
            )

    def _packing(
        self, fqns: Sequence[str], members: dict[int | None, list[str]]
    ) -> list[tuple[list[int], bool]]:
        """Per unit, the places in ``fqns`` of what is packed together, and whether that is all of
        the unit."""
        place = {fqn: i for i, fqn in enumerate(fqns)}
        units = dict.fromkeys(self._units.index.unit_of(fqn) for fqn in fqns)
        return [
            ([place[m] for m in members[unit] if m in place], place.keys() >= set(members[unit]))
            for unit in units
        ]

    def _watch_others(
        self,
        names: dict[nn.Parameter, str],
        members: dict[int | None, list[str]],
        known: _Known,
        compilation: Compilation,
    ) -> None:
        """Notice gradients of parameters that no graph was compiled with."""
        trained = {name for p, name in names.items() if p.requires_grad and isinstance(p, DTensor)}
        packed = {
            name
            for unit, fqns in members.items()
            if unit is not None and len(trained.intersection(fqns)) > 1
            for name in fqns
        }
        others = (trained & packed) - known.compiled - known.watched
        known.watched |= others
        for parameter, name in names.items():
            if name in others:
                self._watch_gradient(parameter, name, known, compilation)

    def _watch_gradient(
        self, parameter: nn.Parameter, name: str, known: _Known, compilation: Compilation
    ) -> None:
        def reduced(_: torch.Tensor) -> None:
            handle.remove()
            rest = known.watched - known.compiled  # graphs compiled since are in it
            if known.warned or name not in rest:
                return
            known.warned = True
            compilation.warn(
                f"{some(sorted(rest))} are in no compiled graph: the gradient of {name} was "
                "reduced by itself, where eager FSDP2 packs its unit into one payload, so its "
                "weights are not eager FSDP2's bit for bit. Compile what uses them with the same "
                "backend, the whole model say, or make each a unit of its own, in eager FSDP2 as "
                "well",
                DividedUnitWarning,
            )

        handle = parameter.register_post_accumulate_grad_hook(reduced)

    def _watch_backward(
        self, out: Any, mine: _Calls, fqns: Sequence[str], compilation: Compilation
    ) -> None:
        """Notice a second backward of one module's calls in one ``backward()``."""

        def begins(_: Any) -> None:
            backward = current_backward()
            if mine.backward == backward:
                mine.number = _BACKWARDS
                compilation.warn(
                    f"the graph that was compiled for {some(fqns)} ran twice with the same "
                    "parameters in one step, and reduced their gradients twice, where eager FSDP2 "
                    "adds them and reduces once, so their weights are not eager FSDP2's bit for "
                    "bit. Compile what makes both calls, the whole model say, with CombineUses() "
                    "among the passes, which recipe() has",
                    DividedUnitWarning,
                )
            mine.backward = backward

        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
                return
