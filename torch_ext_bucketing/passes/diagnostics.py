"""Warnings for compiles and runs in which bucketing does something else than was asked for.

All of these are legal, and all cost what the package was installed for, so none is silent: one
warning per compile says what happened, why, and what to do.

- Nothing is bucketed, or not in the payload order (:func:`warn_of_silence`).
- A unit's gradients are reduced in several graphs, or several times in one
  (:class:`DividedUnits`). A graph break divides what one step runs into graphs, and a bucket lies
  within one of them. Each payload is the unit's own, but its offsets are others, and so are the
  bits::

      unit [embed, norm, head]      eager FSDP2    one reduce-scatter: embed norm head
      graph break before norm       graph 1        reduce-scatter: embed
                                    graph 2        reduce-scatter: norm head

- What shows only when compiled code runs (:class:`RunWatch`). Where blocks are compiled one by
  one, or a graph break leaves them to be, the graph of a block says nothing of what runs around
  it, nor whether parameters without collectives were left unsharded::

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
from .._torch.dynamo_inputs import model_of
from .._torch.process_groups import default_group
from .._torch.sharded import is_distributed
from ..errors import DividedUnitWarning, NotBucketedWarning, PayloadOrderWarning
from ..fqns import format_names, parameter_names
from ..fsdp.units import Units
from ..graph.collectives import Kind
from ..graph.tags import member_tags, replaced_kind, tag_of
from ..reports.base import Cause, LeftAlone
from ..reports.buckets import Unmerged
from ..reports.graph import GraphReport

if TYPE_CHECKING:
    from .compilation import Compilation

# ---------------------------------------------------------------- after the passes

_SHOWN = 8
"""How many names one warning shows; the report has all."""

_REDUCTIONS: frozenset[Kind] = frozenset(("reduce_scatter", "all_reduce"))
_NAME_KIND = "name the kind in kinds= of the pass"
_WAYS_OUT = {
    Cause.UNTAGGED: (
        "give the backend the model whose parameters they serve: backend(..., model=model)"
    ),
    Cause.NO_UNIT: (
        "name the parameters' modules in the units, as they are called in the compiled model"
    ),
}


def warn_of_silence(
    graph: fx.Graph, reports: Sequence[GraphReport], compilation: Compilation
) -> None:
    """Warn where the passes that bucket, of which ``reports`` are, did nothing to a graph, or lost
    the payload order."""
    if not any(report.kinds for report in reports):
        return
    if reports[0].collectives_before == reports[-1].collectives_after:
        text = _nothing_bucketed(graph, reports, compilation.tagged > 0)
        if any(report.uncovered for report in compilation.report.graphs):
            text = ""  # a warning about those says the same
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
            f"order, not the payload order that was asked for, which has no key for "
            f"{format_names(keyless, _SHOWN)}. Make the order from the model that is compiled, "
            "with units that hold all its parameters; where FQNs are relative to another module, "
            "give that to the backend: backend(..., model=model)",
            PayloadOrderWarning,
        )


def _nothing_bucketed(graph: fx.Graph, reports: Sequence[GraphReport], has_tags: bool) -> str:
    """The warning for a graph with unchanged collectives; empty where nothing was to be merged."""
    starts = [node for node in graph.nodes if replaced_kind(node) is not None]
    serving = [node for node in starts if tag_of(node) is not None]
    if has_tags and not serving:
        return ""  # activations' alone; those of parameters are in the compile's other graphs
    starts = serving or starts
    if len(starts) < 2:
        return ""
    left: dict[str, LeftAlone] = {x.node: x for r in reports for x in (*r.unmerged, *r.ineligible)}
    asked = {kind for report in reports for kind in report.kinds}
    whys: Counter[str] = Counter()
    ways: dict[str, None] = {}
    for node in starts:
        kind, alone, way = replaced_kind(node), left.get(node.name), ""
        if isinstance(alone, Unmerged):
            why = f"closed by {alone.closed_by}"
            way = "raise cap_mb" if alone.closed_by == "bytes" else ""
        elif alone is not None:
            why, way = alone.reason, _WAYS_OUT.get(alone.cause, "")
        elif kind in asked:
            why = "nothing else in their unit has the same kind, group and dtype"
            way = "make larger units"
        else:
            why, way = f"no pass was asked for {kind}", _NAME_KIND
        whys[why] += 1
        if way:
            ways[way] = None
    counts = Counter(str(replaced_kind(node)) for node in starts)
    text = (
        f"nothing is bucketed in the {reports[0].stage} graph, although it has "
        f"{', '.join(f'{n} {kind}' for kind, n in counts.items())}: "
        f"{format_names([f'{why} ({n})' for why, n in whys.most_common()], _SHOWN)}."
    )
    return text + (f" To change that: {'; '.join(ways)}." if ways else "")


def _kind_left_out(graph: fx.Graph, reports: Sequence[GraphReport]) -> str:
    """The warning where one kind of reduction is bucketed and another, of the same parameters, was
    not asked for; empty where that is not so."""
    left = _REDUCTIONS - {kind for report in reports for kind in report.kinds}
    if len(left) != 1:
        return ""
    (kind,) = left
    number = sum(replaced_kind(node) == kind and tag_of(node) is not None for node in graph.nodes)
    if number < 2:
        return ""
    return (
        f"the {number} {kind} of the {reports[0].stage} graph are not bucketed: no pass was asked "
        "for them. Eager FSDP2 packs them as it packs the other reductions of the same "
        f"parameters. To change that: {_NAME_KIND}, or take the passes of recipe()."
    )


# ---------------------------------------------------------------- across graphs


class DividedUnits:
    """Knows what the graphs of the compiles so far reduce of ``units``."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._seen: dict[int, dict[int, tuple[str, ...]]] = {}  # unit -> frame -> parameters

    def look(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Note what ``graph`` reduces; warn, once per compile, where that divides a unit. A graph
        of code that was compiled before stands for that, and one with the same parameters of a unit
        takes turns with it (``ReduceOnce``). Gathers don't count: they copy, wherever they lie."""
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
            compilation.warn(
                f"{format_names(several)} have several uses in one graph, whose gradients are "
                "reduced one by one, where eager FSDP2 adds them and reduces once, so their "
                "weights are not eager FSDP2's bit for bit. Put CombineUses() first among the "
                "passes, which recipe() has; where it is, the report says why it left them",
                DividedUnitWarning,
            )
        divided = []
        for unit, fqns in here.items():
            frames = self._seen.setdefault(unit, {})
            frames[compilation.frame] = tuple(fqns)
            elsewhere = [f for f in frames.values() if set(f) != set(fqns)]
            divided += [(there, fqns) for there in elsewhere[-1:]]
        if divided:
            (there, these), more = divided[0], len(divided) - 1
            compilation.warn(
                f"one unit's gradients are reduced in several graphs: {format_names(there)} in an "
                f"earlier one, {format_names(these)} in this one"
                + (f"; and so are those of {more} more unit(s)" if more else "")
                + ". A step that runs both has a payload in each, where eager FSDP2 has one, so "
                "its weights are not eager FSDP2's bit for bit. Mend the graph break between them "
                "(torch.compile(..., fullgraph=True) says where it is), or make each side's "
                "parameters a unit of its own, in eager FSDP2 as well",
                DividedUnitWarning,
            )


# ---------------------------------------------------------------- when compiled code runs

_MODULES = 256
"""How many modules that run one graph are looked at. Code that makes new parameters for every call
would pay for each of them."""
_BACKWARDS = 4
"""How many calls of each module have their backward looked at. The first step shows what all do."""


@dataclass
class _Calls:
    """The calls of one module: how many had their backward looked at, and which ``backward()`` ran
    last through them."""

    number: int = 0
    backward: int | None = None


@dataclass
class _Known:
    """Parameters of one model: those that some compiled graph has; those whose gradients are looked
    at, as no graph had them; and whether there was a warning about these."""

    compiled: set[str] = field(default_factory=set)
    watched: set[str] = field(default_factory=set)
    warned: bool = False


# Of all backends together: each block may have one of its own.
_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


class RunWatch:
    """Watches the first runs of one compile's code, and warns where ``units``, which were bucketed,
    are not reduced as planned."""

    def __init__(self, units: Units, compilation: Compilation) -> None:
        self._units = units
        self._compilation = compilation
        fqns: Any = compilation.input_fqns or {}
        self._planned = {i: f for i, f in fqns.items() if units.unit_of(f) is not None}
        self._names = format_names(self._planned.values())

    def watch(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``compiled`` wrapped to look at its first calls."""
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
                self._look_for_shards(parameters)
                self._look_at_module(parameters)
            out = compiled(*args, **kwargs)
            if mine.number < _BACKWARDS and torch.is_grad_enabled():
                mine.number += 1
                self._watch_backward(out, mine)
            return out

        return run

    def _look_for_shards(self, parameters: Sequence[Any]) -> None:
        """Warn where the collectives of the units are missing from the compile altogether."""
        group, compilation = default_group(), self._compilation
        report = compilation.report
        if group is None or group.size() < 2 or compilation.tagged or report.collectives_before:
            return
        if any(is_distributed(p) for p in parameters):
            return  # a replica is gathered nowhere, and reduced in training alone
        if not any(graph.from_cache for graph in report.graphs):  # made from graphs unseen here
            compilation.warn(
                f"nothing is bucketed: no collective serves {self._names}, "
                "which are in units and not sharded. Shard the model before it is compiled: "
                "data_parallel(model, mesh). What reduces gradients outside of the graph "
                "(DistributedDataParallel, fully_shard) leaves nothing to bucket",
                NotBucketedWarning,
            )

    def _look_at_module(self, parameters: Sequence[Any]) -> None:
        """Look at the parameters of a module that runs the graph for the first time."""
        model = model_of(parameters[0], self._compilation.model)
        if model is None:
            return
        names = {p: fqns[0] for p, fqns in parameter_names(model).items()}
        members: dict[int | None, list[str]] = {}  # of each unit, in its order
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
            self._compilation.warn(
                f"{format_names(own)} are reduced by the graph that was compiled for "
                f"{self._names}, whose units are made up otherwise, and are "
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
        units = dict.fromkeys(self._units.unit_of(fqn) for fqn in fqns)
        return [
            ([place[m] for m in members[unit] if m in place], place.keys() >= set(members[unit]))
            for unit in units
        ]

    def _watch_others(
        self, names: dict[nn.Parameter, str], members: dict[int | None, list[str]], known: _Known
    ) -> None:
        """Notice gradients of parameters that no graph was compiled with."""
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
            rest = known.watched - known.compiled  # graphs compiled since are in it
            if known.warned or name not in rest:
                return
            known.warned = True
            self._compilation.warn(
                f"{format_names(sorted(rest))} are in no compiled graph: the gradient of {name} "
                "was reduced by itself, where eager FSDP2 packs its unit into one payload, so its "
                "weights are not eager FSDP2's bit for bit. Compile what uses them with the same "
                "backend, the whole model say, or make each a unit of its own, in eager FSDP2 as "
                "well",
                DividedUnitWarning,
            )

        handle = parameter.register_post_accumulate_grad_hook(reduced)

    def _watch_backward(self, out: Any, mine: _Calls) -> None:
        """Notice a second backward of one module's calls in one ``backward()``."""

        def begins(_: Any) -> None:
            backward = current_backward()
            if mine.backward == backward:
                mine.number = _BACKWARDS
                self._compilation.warn(
                    f"the graph that was compiled for {self._names} ran twice with the same "
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
