"""A checked list of passes, in the order in which they run."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch.fx as fx
import torch.nn as nn

from .._torch import aot as _aot
from .._torch.trace import readable, trace_artifact
from ..graph.unwrap import GraphLike, graph_of
from ..reports.compile import PassTime
from .base import GraphPass, Stage
from .cache_key import brief, digest
from .compilation import Compilation
from .diagnostics import warn_of_silence
from .facts import Baseline, Fact, Order, Tags
from .tagging import TagParameters

DISABLE = "TORCH_EXT_BUCKETING_DISABLE"
"""Environment variable: names of classes of passes that are switched off, separated by commas, to
find which is to blame."""

log = logging.getLogger("torch_ext_bucketing")


class Pipeline:
    """The passes of a backend, in the order in which they run:

    1. ``TagParameters``, first: everything else reads tags, and only the joint graph has the
       descriptors that they are made from. Added when missing.
    2. the other joint passes, in the order given: what they decide (recomputation) is carried out
       by the partitioner that follows.
    3. the forward/backward passes, in the order given, on each graph after the partitioner: what a
       bucket may hold is known only once it is known which graph a collective is in, and a bucket
       made earlier could not be split between forward and backward again.

    ``TORCH_EXT_BUCKETING_DISABLE``, as it is when this is made, switches passes off by the names of
    their classes.

    Args:
        passes: in any order of stages, and within a stage in the order in which they run.
        model: as of :func:`.backend`.

    Raises:
        TypeError: something is no pass.
        ValueError: a pass with an unknown stage, one that comes after a pass whose work it undoes,
            two passes that decide the same; ``TORCH_EXT_BUCKETING_DISABLE`` has an unknown name.
    """

    def __init__(self, passes: Iterable[GraphPass] = (), model: nn.Module | None = None) -> None:
        self.given = tuple(passes)
        for p in self.given:
            if not isinstance(p, GraphPass):
                raise TypeError(f"{p!r} is no pass: it must be a GraphPass")
        ours = list(self.given)
        if not any(Tags() in p.provides for p in ours):
            ours.insert(0, TagParameters(model))
        ours.sort(key=lambda p: Tags() not in p.provides)
        _check(ours)
        self.disabled = _switched_off([q for p in ours for q in (p, *p.parts)])
        running = [p for p in ours if p.name not in self.disabled]
        self.joint = tuple(p for p in running if p.stage == "joint")
        self.forward_backward = tuple(p for p in running if p.stage == "forward_backward")
        for p in running:
            p.install()

    @property
    def ahead(self) -> tuple[Fact, ...]:
        """The facts that the passes after the partitioner give, in the order in which they run."""
        passes = self.forward_backward
        off = [f for p in passes for q in p.parts if q.name in self.disabled for f in q.provides]
        return tuple(fact for p in passes for fact in p.provides if fact not in off)

    def compilation(self, **known: Any) -> Compilation:
        """A compile with these passes; ``known`` are other fields of :class:`.Compilation`."""
        compilation = Compilation(ahead=self.ahead, **known)
        compilation.report.disabled = self.disabled
        return compilation

    def run(self, stage: Stage, graph: GraphLike, compilation: Compilation) -> None:
        """Run the passes of one stage, and warn where they did not bucket as was asked for. The
        report gets each one's time; the graph before and after each goes to ``TORCH_TRACE``, and to
        the package's logger at DEBUG."""
        g, done = graph_of(graph), len(compilation.report.graphs)
        passes = self.joint if stage == "joint" else self.forward_backward
        name = stage if stage == "joint" else _aot.stage_of(g)
        measures = next((p for p in passes if Baseline in p.requires), None)
        clock = time.perf_counter()
        if measures is not None:
            compilation.measure(g)
        measured = time.perf_counter() - clock
        if stage == "forward_backward":
            for p in self.joint:
                p.finish(graph, compilation)
                compilation.changed()
        for i, p in enumerate(passes):
            _show(g, f"{name}_{i}_{p.name}_before")
            clock = time.perf_counter()
            p.run(graph, compilation)
            seconds = time.perf_counter() - clock + (measured if p is measures else 0.0)
            compilation.changed()
            _show(g, f"{name}_{i}_{p.name}_after")
            compilation.report.passes.append(PassTime(name, p.name, seconds))
        warn_of_silence(g, compilation.report.graphs[done:], compilation)

    def planned_with(self, compilation: Compilation) -> str:
        """What graphs are planned with, in short, which ranks compare: times and size hints of an
        order, a pass's choice on the joint graph, the dtype of sums."""
        found = [fact.planned_with for fact in self.ahead]
        if any(isinstance(fact, Order) and fact.planned_with for fact in self.ahead):
            hints = compilation.size_hints
            found.append(f"size hints {brief(hints) if callable(hints) else hints}")
        chosen = "" if compilation.choice is None else compilation.choice.text
        return ", ".join(filter(None, [*found, chosen]))

    def uuid(self) -> str | None:
        """A cache key of all passes in order, and of what is switched off; None where a pass has
        none."""
        uuids = [p.uuid() for p in (*self.joint, *self.forward_backward)]
        return digest(*map(str, uuids), *self.disabled) if all(uuids) else None


def _check(passes: Sequence[GraphPass]) -> None:
    """See that every pass finds what it needs and that none undoes what another has given."""
    for p in passes:
        if p.stage not in ("joint", "forward_backward"):
            raise ValueError(
                f"{p.name}.stage must be 'joint' or 'forward_backward', got {p.stage!r}"
            )
    given: dict[type[Fact], GraphPass] = {}
    for p in sorted(passes, key=lambda p: p.stage != "joint"):
        for fact in p.requires:
            if fact is not Baseline and fact not in given:
                raise ValueError(f"{p.name} needs {fact.text}: no pass before it gives that")
        decides = {type(fact) for fact in p.provides if fact.once}
        for fact in given.keys() & decides:
            raise ValueError(
                f"{given[fact].name} and {p.name} both decide {fact.text}: give one of them"
            )
        for fact in given.keys() & p.conflicts_with:
            right = ", ".join(_right_order([q for q in passes if q.stage == p.stage]))
            raise ValueError(
                f"{p.name} comes after {given[fact].name} and would undo what that decides, "
                f"{fact.text}. The right order: [{right}]"
            )
        given.update((type(fact), p) for fact in p.provides)


def _right_order(passes: list[GraphPass]) -> list[str]:
    """Names of the passes in an order in which none undoes what another has given."""

    def undoes(p: GraphPass, other: GraphPass) -> bool:
        return any(isinstance(fact, p.conflicts_with) for fact in other.provides)

    names = []
    while passes:
        free = (p for p in passes if not any(undoes(q, p) for q in passes if q is not p))
        first = next(free, passes[0])
        names.append(first.name)
        passes = [p for p in passes if p is not first]
    return names


def _switched_off(passes: Iterable[GraphPass]) -> tuple[str, ...]:
    """Names of the classes among ``passes`` that are switched off, each once. A class's subclasses
    stay: ``Schedule`` does not stand for ``BucketAndSchedule``."""
    wanted = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    if not wanted:
        return ()
    given = dict.fromkeys(p.name for p in passes)
    known = sorted({*given, *_names_of_passes()})
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"{DISABLE} names {', '.join(unknown)}; the passes are {', '.join(known)}")
    return tuple(name for name in given if name in wanted)


def _names_of_passes() -> list[str]:
    """The public passes of this package, whether imported yet or not."""
    package = importlib.import_module(__package__.partition(".")[0])
    public = [getattr(package, name) for name in package.__all__]
    passes = [p for p in public if isinstance(p, type) and issubclass(p, GraphPass)]
    return [p.__name__ for p in passes if p is not GraphPass]


def _show(graph: fx.Graph, name: str) -> None:
    """Log a graph and trace it as an artifact, where somebody looks."""
    trace_artifact(f"torch_ext_bucketing_{name}", lambda: readable(graph))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", name, readable(graph))
