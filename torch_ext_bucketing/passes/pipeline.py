"""Check a list of passes and run it."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch.fx as fx
import torch.nn as nn

from .._torch import aot as _aot
from .._torch.inductor import readable, trace_artifact
from ..errors import PassOrderError
from ..graph.nodes import GraphLike, graph_of
from ..reports.compile import PassTime
from .base import GraphPass, Stage
from .cache_key import brief, digest
from .compilation import Compilation
from .diagnostics import warn_of_silence
from .facts import Baseline, Fact, Order, Tags
from .tagging import TagParameters

DISABLE = "TORCH_EXT_BUCKETING_DISABLE"
"""Environment variable: class names of passes to switch off, separated by commas."""

log = logging.getLogger("torch_ext_bucketing")


class Pipeline:
    """The passes of a backend, in the order they run.

    1. ``TagParameters``, added if missing. Other passes read tags, and only the joint graph has the
       descriptors that they are made from.
    2. The other joint passes, in the given order. The partitioner carries out what they mark for
       recomputation.
    3. The forward/backward passes, in the given order, on each graph after the partitioner. A
       bucket made earlier could not be split between forward and backward again.

    Args:
        passes: passes of one stage in the order they run; the stages may be mixed.
        model: see :func:`.backend`.

    Raises:
        TypeError: something in ``passes`` is not a pass.
        PassOrderError: a pass undoes the work of one before it, two passes decide the same, or a
            pass requires a fact that none before it provides.
        ValueError: a pass has an unknown stage, or ``TORCH_EXT_BUCKETING_DISABLE``, read here, has
            an unknown name.
    """

    def __init__(self, passes: Iterable[GraphPass] = (), model: nn.Module | None = None) -> None:
        given = tuple(passes)
        for p in given:
            if not isinstance(p, GraphPass):
                raise TypeError(f"{p!r} is not a pass: it must be a GraphPass")
        ours = [q for p in given for q in p.expanded()]
        if not any(Tags() in p.provides for p in ours):
            ours.insert(0, TagParameters(model))
        ours.sort(key=lambda p: Tags() not in p.provides)
        _check(ours, {id(q): p for p in given for q in p.expanded()})
        self.disabled = _switched_off([*given, *(q for p in ours for q in (p, *p.parts))])
        # By id: a user's dataclass may not be hashable.
        off = {id(q) for p in given if p.name in self.disabled for q in p.expanded()}
        running = [p for p in ours if p.name not in self.disabled and id(p) not in off]
        self.joint = tuple(p for p in running if p.stage == "joint")
        self.forward_backward = tuple(p for p in running if p.stage == "forward_backward")
        for p in running:
            p.install()

    @property
    def ahead(self) -> tuple[Fact, ...]:
        """Facts that the passes after the partitioner provide, in the order of the passes."""
        passes = self.forward_backward
        off = [f for p in passes for q in p.parts if q.name in self.disabled for f in q.provides]
        return tuple(fact for p in passes for fact in p.provides if fact not in off)

    def compilation(self, **known: Any) -> Compilation:
        """Start a compile; ``known`` are other fields of :class:`.Compilation`."""
        compilation = Compilation(ahead=self.ahead, **known)
        compilation.report.disabled = self.disabled
        return compilation

    def run(self, stage: Stage, graph: GraphLike, compilation: Compilation) -> None:
        """Run the passes of one stage, and warn about what they did not bucket.

        The report gets the time of each pass. The graph before and after each pass goes to
        ``TORCH_TRACE``, and to the package's logger at DEBUG.
        """
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
        if stage == "forward_backward":
            compilation.complete(graph)
        warn_of_silence(g, compilation.report.graphs[done:], compilation)

    def planned_with(self, compilation: Compilation) -> str:
        """Name what graphs are planned with, for ranks to compare.

        These are machines and size hints of an order, the dtype of sums in rank order, and what a
        pass chose on the joint graph.
        """
        found = [fact.planned_with for fact in self.ahead]
        if any(isinstance(fact, Order) and fact.planned_with for fact in self.ahead):
            hints = compilation.size_hints
            found.append(f"size hints {brief(hints) if callable(hints) else hints}")
        chosen = "" if compilation.choice is None else compilation.choice.text
        return ", ".join(filter(None, [*found, chosen]))

    def uuid(self) -> str | None:
        """Make a cache key from the keys of all passes; None if a pass has none."""
        uuids = [p.uuid() for p in (*self.joint, *self.forward_backward)]
        return digest(*map(str, uuids), *self.disabled) if all(uuids) else None


def _check(passes: Sequence[GraphPass], given: Mapping[int, GraphPass]) -> None:
    """Check that every pass finds what it requires and undoes nothing.

    Args:
        given: by id of a pass, the one of the user's list that stands for it.

    Raises:
        ValueError: a pass has an unknown stage.
        PassOrderError: the list can't run.
    """
    for p in passes:
        if p.stage not in ("joint", "forward_backward"):
            raise ValueError(
                f"{p.name}.stage must be 'joint' or 'forward_backward', got {p.stage!r}"
            )
    passes = sorted(passes, key=lambda p: p.stage != "joint")
    conflict = _first_conflict(passes)
    if conflict is None:
        return
    text, working = conflict
    for _ in range(len(passes) ** 2):  # resolving one conflict may make another
        following = _first_conflict(working)
        if following is None:
            break
        working = following[1]
    if len(working) == len(passes) and all(any(p is q for q in passes) for p in working):
        right = {id(p): p for p in (given.get(id(q)) for q in working) if p is not None}
        text += f". The right order: [{', '.join(p.name for p in right.values())}]"
    raise PassOrderError(text, working)


def _first_conflict(passes: list[GraphPass]) -> tuple[str, list[GraphPass]] | None:
    """Find the first pass that can't run at its place.

    Returns:
        Why, and the list without that conflict; empty if no such list is known.
    """
    provided: list[tuple[Fact, int]] = []
    for late, p in enumerate(passes):
        for wanted in p.requires:
            if wanted is not Baseline and not any(isinstance(f, wanted) for f, _ in provided):
                return f"{p.name} requires {wanted.text}, which no pass before it provides", []
        for fact, early in provided:
            if fact.once and any(isinstance(mine, type(fact)) for mine in p.provides):
                text = f"{passes[early].name} and {p.name} both decide {fact.text}: give one"
                # Keep the pass that decides more.
                less = late if len(p.provides) <= len(passes[early].provides) else early
                return f"{text} of them", [*passes[:less], *passes[less + 1 :]]
        for fact, early in provided:
            if isinstance(fact, p.conflicts_with):
                text = f"{p.name} comes after {passes[early].name} and would undo what that decides"
                return _without_conflict(f"{text}, {fact.text}", passes, early, late)
        provided += [(fact, late) for fact in p.provides]
    return None


def _without_conflict(
    text: str, passes: list[GraphPass], early: int, late: int
) -> tuple[str, list[GraphPass]]:
    """Move the late pass before the early one, or make one of them a part of the other."""
    first, second = passes[early], passes[late]
    before, rest = passes[:early], [*passes[early + 1 : late], *passes[late + 1 :]]
    if not any(isinstance(fact, first.conflicts_with) for fact in second.provides):
        return text, [*before, second, first, *rest]
    for whole, part in ((first, second), (second, first)):
        both = whole.with_part(part)
        if both is not None:
            option = next(f.name for f in fields(both) if getattr(both, f.name) is part)
            text = f"{text}. Give {both.name}(..., {option}={part!r})"
            return text, [*before, both, *rest]
    return text, []


def _switched_off(passes: Iterable[GraphPass]) -> tuple[str, ...]:
    """List the class names that are switched off; subclasses of these classes stay on."""
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
    """List the passes of the package, imported or not."""
    package = importlib.import_module(__package__.partition(".")[0])
    for name in package.__all__:
        getattr(package, name)
    found, names = [GraphPass], []
    for cls in found:
        found += cls.__subclasses__()
        if cls.__module__.startswith(f"{package.__name__}.") and not inspect.isabstract(cls):
            names.append(cls.__name__)
    return names


def _show(graph: fx.Graph, name: str) -> None:
    """Trace a graph as an artifact, and log it at DEBUG."""
    trace_artifact(f"torch_ext_bucketing_{name}", lambda: readable(graph))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s\n%s", name, readable(graph))
