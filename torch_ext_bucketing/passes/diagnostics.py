"""Warnings about compiles and runs that do not bucket as requested.

All of these are legal and cost what the package is for, so each is one warning per compile.

- Nothing is bucketed, or not in the payload order (:func:`warn_of_silence`).
- A unit's gradients are reduced in several graphs, or several times in one
  (:class:`DividedUnits`). A graph break divides a step into graphs, and a bucket lies within one.
  Its offsets then differ from eager FSDP2's, and so do the bits::

      unit [embed, norm, head]      eager FSDP2    one reduce-scatter: embed norm head
      graph break before norm       graph 1        reduce-scatter: embed
                                    graph 2        reduce-scatter: norm head

- A run shows what the graph does not (:class:`RunWatch`), where blocks are compiled one by one::

      embed, head: not compiled         reduced one by one, in no bucket
      blocks[1] has other units         it runs blocks[0]'s graph, packed as blocks[0]'s units
      blocks[1] is blocks[0]            one graph runs twice in a step, and reduces twice
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx
import torch.nn as nn

from .._torch.aot import current_backward
from .._torch.dynamo import model_of
from .._torch.fsdp2 import is_distributed
from .._torch.process_groups import default_group
from ..errors import DividedUnitWarning, NotBucketedWarning, PayloadOrderWarning
from ..fqns import format_names, parameter_names
from ..fsdp.units import Units
from ..graph.nodes import Kind
from ..graph.tags import member_tags, replaced_kind, tag_of
from ..reports.base import Cause, LeftAlone
from ..reports.graph import GraphReport, Unmerged

if TYPE_CHECKING:
    from .compilation import Compilation

_SHOWN = 8
"""Names in one warning; the report has all."""

_REDUCTIONS: frozenset[Kind] = frozenset(("reduce_scatter", "all_reduce"))
_NAME_KIND = "name the kind in kinds= of the pass"
_GIVE_MODEL = "give the backend the model whose parameters they serve: backend(..., model=model)"


def warn_of_silence(
    graph: fx.Graph, reports: Sequence[GraphReport], compilation: Compilation
) -> None:
    """Warn if the passes that made ``reports`` bucketed nothing, or lost the payload order."""
    if not any(report.kinds for report in reports):
        return
    if reports[0].collectives_before == reports[-1].collectives_after:
        text = _nothing_bucketed(graph, reports, compilation.tagged > 0)
        if any(report.uncovered for report in compilation.report.graphs):
            text = ""  # compilation.warn_uncovered() has warned already
    else:
        text = _kind_left_out(graph, reports)
    if text:
        compilation.warn(text, NotBucketedWarning)
    buckets = [bucket for report in reports for bucket in report.buckets]
    lost = [bucket for bucket in buckets if bucket.no_key]
    if lost:
        keyless = dict.fromkeys(name for bucket in lost for name in bucket.no_key)
        compilation.warn(
            f"{len(lost)} of {len(buckets)} buckets of the {reports[0].stage} graph keep graph "
            f"order: the payload order has no key for {format_names(keyless, _SHOWN)}. Make the "
            "order from the compiled model, with units that hold all its parameters. If FQNs are "
            "relative to another module, give that to the backend: backend(..., model=model)",
            PayloadOrderWarning,
        )


def _nothing_bucketed(graph: fx.Graph, reports: Sequence[GraphReport], has_tags: bool) -> str:
    """Explain why no collective of a graph was merged; empty if none could be."""
    starts = [node for node in graph.nodes if replaced_kind(node) is not None]
    serving = [node for node in starts if tag_of(node) is not None]
    if has_tags and not serving:
        return ""  # Only activations'; the parameters' are in other graphs of the compile.
    starts = serving or starts
    if len(starts) < 2:
        return ""
    left: dict[str, LeftAlone] = {x.node: x for r in reports for x in (*r.unmerged, *r.ineligible)}
    asked = {kind for report in reports for kind in report.kinds}
    whys: Counter[tuple[str, str]] = Counter()  # by why, and what to change
    for node in starts:
        kind, alone, way = replaced_kind(node), left.get(node.name), ""
        if isinstance(alone, Unmerged) and alone.closed_by == "search":
            return ""  # the caps that the search chose are the fastest ones
        if isinstance(alone, Unmerged):
            why = f"closed by {alone.closed_by}"
            way = "raise cap_mb" if alone.closed_by == "bytes" else ""
        elif alone is not None:
            why, way = alone.reason, _GIVE_MODEL if alone.cause is Cause.UNTAGGED else ""
        elif kind in asked:
            why = "their unit has no other collective of the same kind, group and dtype"
            way = "make larger units"
        else:
            why, way = f"no pass buckets {kind}", _NAME_KIND
        whys[why, way] += 1
    counts = Counter(str(replaced_kind(node)) for node in starts)
    has = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    reasons = format_names([f"{why} ({n})" for (why, _), n in whys.most_common()], _SHOWN)
    ways = "; ".join(dict.fromkeys(way for _, way in whys if way))
    text = f"nothing is bucketed in the {reports[0].stage} graph, which has {has}: {reasons}."
    return text + (f" To change that: {ways}." if ways else "")


def _kind_left_out(graph: fx.Graph, reports: Sequence[GraphReport]) -> str:
    """Explain that one kind of reduction is bucketed and another is not; empty otherwise."""
    left = _REDUCTIONS - {kind for report in reports for kind in report.kinds}
    if len(left) != 1:
        return ""
    (kind,) = left
    number = sum(replaced_kind(node) == kind and tag_of(node) is not None for node in graph.nodes)
    if number < 2:
        return ""
    return (
        f"the {number} {kind} of the {reports[0].stage} graph are not bucketed: no pass buckets "
        "them. Eager FSDP2 packs them like the other reductions of the same parameters. To change "
        f"that: {_NAME_KIND}, or take the passes of recipe()."
    )


def _warn_of_bits(compilation: Compilation, what: str, instead: str) -> None:
    compilation.warn(
        f"{what}, so weights do not match eager FSDP2's bit for bit. {instead}", DividedUnitWarning
    )


class DividedUnits:
    """Record what each graph reduces of ``units``, over all compiles of a pass."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._seen: dict[int, dict[int, tuple[str, ...]]] = {}  # unit -> frame -> parameters

    def look(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Record what ``graph`` reduces, and warn if it divides a unit.

        Gathers do not count: they copy, at any offset.
        """
        if compilation.frame is None:
            return
        tags = (tag for node in graph.nodes for tag in member_tags(node) if tag is not None)
        reduced = Counter((t.kind, fqn) for t in tags if t.kind != "all_gather" for fqn in t.fqns)
        here: dict[int, dict[str, None]] = {}
        several = []
        for (_, fqn), times in reduced.items():
            if (unit := self._units.unit_of(fqn)) is not None:
                here.setdefault(unit, {})[fqn] = None
                several += [fqn] * (times > 1)
        if several:
            _warn_of_bits(
                compilation,
                f"{format_names(several)} have several uses in one graph, whose gradients are "
                "reduced one by one instead of their sum",
                "Put MatchFSDP2() first among the passes, as recipe() does; if it is there, the "
                "report names the reason",
            )
        divided = []
        for unit, fqns in here.items():
            frames = self._seen.setdefault(unit, {})
            frames[compilation.frame] = tuple(fqns)
            # A recompiled frame replaces its graph. Graphs of equal parameters take turns in a
            # step (ReduceOnce), and divide nothing.
            elsewhere = [f for f in frames.values() if set(f) != set(fqns)]
            divided += [(there, fqns) for there in elsewhere[-1:]]
        if divided:
            (there, these), more = divided[0], len(divided) - 1
            _warn_of_bits(
                compilation,
                f"one unit's gradients are reduced in several graphs: {format_names(there)} in an "
                f"earlier one, {format_names(these)} in this one"
                + (f" (and {more} more unit(s))" if more else ""),
                "Remove the graph break between them (torch.compile(..., fullgraph=True) reports "
                "it), or make each side's parameters a unit, in eager FSDP2 as well",
            )


# Code that makes new parameters for every call would pay for each of them.
_MODULES = 256
"""Modules per graph whose parameters are checked."""
# The first step shows what all steps do.
_BACKWARDS = 4
"""Calls per module whose backward is checked."""


@dataclass
class _Calls:
    """The calls of one module: how many were checked, and the ID of their last ``backward()``."""

    number: int = 0
    backward: int | None = None


@dataclass
class _Known:
    """Parameters of one model: in compiled graphs, and watched because they were in none."""

    compiled: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    warned: bool = False


# Shared by all backends: each block may be compiled with its own.
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def look_for_shards(parameters: Sequence[Any], names: str, compilation: Compilation) -> None:
    """Warn if a compile that reads these parameters, such as those in units, has no collectives."""
    group, report = default_group(), compilation.report
    if group is None or group.size() < 2 or compilation.tagged or report.collectives_before:
        return
    if any(is_distributed(p) for p in parameters):
        return  # A replica is never gathered, and reduced in training only.
    if not any(graph.from_cache for graph in report.graphs):
        compilation.warn(
            f"nothing is bucketed: no collective serves {names}, which are not sharded. Shard the "
            "model before it is compiled: torch_ext_bucketing.fsdp.fully_shard, or "
            "data_parallel(model, mesh). DistributedDataParallel and eager FSDP2's fully_shard "
            "reduce gradients outside of the graph and leave nothing to bucket",
            NotBucketedWarning,
        )


def watch_for_shards(compiled: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """Wrap ``compiled``, which has no units, to look for shards in its first call."""
    fqns: Any = compilation.input_fqns or {}
    if not fqns:
        return compiled
    looked = False

    @functools.wraps(compiled)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal looked
        if not looked:
            looked = True
            look_for_shards([args[i] for i in fqns], format_names(fqns.values()), compilation)
        return compiled(*args, **kwargs)

    return run


class RunWatch:
    """Watch the first runs of a compiled function for ``units`` that are not reduced as planned."""

    def __init__(self, units: Units, compilation: Compilation) -> None:
        self._units = units
        self._compilation = compilation
        fqns: Any = compilation.input_fqns or {}
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
            module = id(args[first])
            mine = calls.get(module)
            if mine is None:
                if len(calls) == _MODULES:
                    return compiled(*args, **kwargs)
                mine = calls[module] = _Calls()
                parameters = [args[i] for i in self._planned]
                look_for_shards(parameters, self._names, self._compilation)
                self._look_at_module(parameters)
            out = compiled(*args, **kwargs)
            if mine.number < _BACKWARDS and torch.is_grad_enabled():
                mine.number += 1
                self._watch_backward(out, mine)
            return out

        return run

    def _look_at_module(self, parameters: Sequence[Any]) -> None:
        """Check the parameters of a module that runs the graph for the first time."""
        model = model_of(parameters[0], self._compilation.model)
        if model is None:
            return
        names = {p: fqns[0] for p, fqns in parameter_names(model).items()}
        members: dict[int | None, list[str]] = {}  # by unit, in its order
        for name in names.values():
            members.setdefault(self._units.unit_of(name), []).append(name)
        for unit, fqns in members.items():
            listed = {} if unit is None else {f: i for i, f in enumerate(self._units.units[unit])}
            fqns.sort(key=lambda fqn: listed.get(fqn, -1))
        own = [names[p] for p in parameters if p in names]
        known = _known.setdefault(model, _Known())
        known.compiled.update(own)
        self._watch_others(names, members, known)
        planned = list(self._planned.values())
        if len(own) < len(parameters) or own == planned:
            return
        if self._packing(own, members) != self._packing(planned, members):
            _warn_of_bits(
                self._compilation,
                f"{format_names(own)} run the graph that was compiled for {self._names}, and are "
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
        self, names: dict[nn.Parameter, str], members: dict[int | None, list[str]], known: _Known
    ) -> None:
        """Watch gradients of parameters that are in no compiled graph."""
        trained = {name for p, name in names.items() if p.requires_grad and is_distributed(p)}
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
                self._watch_gradient(parameter, name, known)

    def _watch_gradient(self, parameter: nn.Parameter, name: str, known: _Known) -> None:
        def reduced(_: torch.Tensor) -> None:
            handle.remove()
            rest = known.watched - known.compiled  # without graphs compiled since
            if known.warned or name not in rest:
                return
            known.warned = True
            _warn_of_bits(
                self._compilation,
                f"{format_names(sorted(rest))} are in no compiled graph, and the gradient of "
                f"{name} was reduced without its unit",
                "Compile the whole model, or make each a unit, in eager FSDP2 as well",
            )

        handle = parameter.register_post_accumulate_grad_hook(reduced)

    def _watch_backward(self, out: Any, mine: _Calls) -> None:
        """Watch for two calls of a module in one ``backward()``."""

        def begins(_: Any) -> None:
            backward = current_backward()
            if mine.backward == backward:
                mine.number = _BACKWARDS
                _warn_of_bits(
                    self._compilation,
                    f"the graph that was compiled for {self._names} ran twice with the same "
                    "parameters in one step, and reduced their gradients twice",
                    "Compile the whole model, with MatchFSDP2() first among the passes",
                )
            mine.backward = backward

        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begins)
                return
