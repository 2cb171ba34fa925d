"""What the stages of a pipeline hold on one rank, action by action of its schedule::

UNSHARD   F0  F1  B0  F2  B1  B2  REDUCE_GRAD      of one stage
gathered parameters ............
          saved of 0 ..
              saved of 1 ......
                    gradients ............

and, under a bound in bytes, when the parameters of each are gathered and let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...reports.compile import CompileReport
from ...reports.stage import StageReport

Action = tuple[tuple[int, str], ...]
"""What a rank does at a time: the stage and the kind, ``"UNSHARD"``, ``"RESHARD"``, ``"F"``,
``"B"``, its halves ``"I"`` and ``"W"``, ``"REDUCE_GRAD"``; others hold nothing. Of two stages where
the schedule overlaps them."""

_MOVES = ("UNSHARD", "RESHARD")


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage's graphs.

    Args:
        gathered: its parameters.
        saved: beside these, of one microbatch from forward to backward.
        gradients: the sums that are reduced, from the first backward on.
        running: by the kind of an action, what its graph has at its peak beside its inputs and
            what counts as one of the others.
        reads: the kinds of actions that read the parameters.
    """

    gathered: int
    saved: int
    gradients: int
    running: Mapping[str, int]
    reads: frozenset[str] = frozenset("FBIW")


@dataclass
class Held:
    """What a stage comes to in a step.

    Attributes:
        peak_bytes: the most at a time; 0 until it has run.
        gathers: how often its parameters are gathered.
        under_way: the most microbatches between forward and the end of backward.
    """

    peak_bytes: int = 0
    gathers: int = 0
    under_way: int = 0


@dataclass
class _Beside:
    """What stages hold beside gathered parameters, as a schedule goes on."""

    stages: Mapping[int, StageBytes]
    under_way: Counter[int] = field(default_factory=Counter)
    added: set[int] = field(default_factory=set)

    def begin(self, action: Action) -> dict[int, int]:
        """Bytes of each stage while the action runs."""
        mine = [(stage, kind) for stage, kind in action if stage in self.stages]
        self.under_way.update(stage for stage, kind in mine if kind == "F")
        self.added.update(stage for stage, kind in mine if kind in ("B", "W"))
        now = self.at_rest()
        for stage, kind in mine:
            of = self.stages[stage]
            now[stage] += max(0, of.running.get(kind, 0) - (kind == "F") * of.saved)
        return now

    def end(self, action: Action) -> None:
        """The action has run."""
        done = [stage for stage, kind in action if stage in self.stages and kind in ("B", "W")]
        self.under_way.subtract(done)
        self.added.difference_update(stage for stage, kind in action if kind == "REDUCE_GRAD")

    def at_rest(self) -> dict[int, int]:
        """Bytes of each stage between actions."""
        return {
            stage: self.under_way[stage] * of.saved + (stage in self.added) * of.gradients
            for stage, of in self.stages.items()
        }


def held_by_stages(
    actions: Sequence[Action], stages: Mapping[int, StageBytes]
) -> tuple[dict[int, Held], int]:
    """What each stage, and all of them together, hold while a rank runs its schedule.

    Args:
        actions: in order.
        stages: those of this rank.

    Returns:
        Each stage's, and the peak of the rank in bytes.
    """
    held = {stage: Held() for stage in stages}
    beside, resident = _Beside(stages), set[int]()
    peak = 0
    for action in actions:
        for stage, kind in action:
            if stage not in stages:
                continue
            if (kind == "UNSHARD" or kind in stages[stage].reads) and stage not in resident:
                resident.add(stage)
                held[stage].gathers += 1
            elif kind == "RESHARD":
                resident.discard(stage)
        now = beside.begin(action)
        for stage in resident:
            now[stage] += stages[stage].gathered
        for stage, mine in held.items():
            mine.peak_bytes = max(mine.peak_bytes, now[stage])
            mine.under_way = max(mine.under_way, beside.under_way[stage])
        peak = max(peak, sum(now.values()))
        beside.end(action)
    return held, peak


def with_residency(
    actions: Sequence[Action], stages: Mapping[int, StageBytes], bound: int | None
) -> list[Action | int]:
    """A schedule in which parameters are gathered for the fewest bytes that a bound allows::

        UNSHARD F0 F1 B0 B1 RESHARD            all of them fit
        UNSHARD F0 RESHARD .. UNSHARD B0 ..    they don't, beside those of other stages

    Of all ways, by what is resident after each action: a rank has few stages. Where no way keeps
    the bound, the least peak that one has takes its place.

    Args:
        actions: in order; their own gathers and releases don't count.
        stages: those of this rank.
        bound: for all of them together, in bytes; None: there is none.

    Returns:
        The places in ``actions`` of what stays, and what is put between.
    """
    beside = _Beside(stages)
    places: list[tuple[int, frozenset[int], int, int]] = []
    for i, action in enumerate(actions):
        if action[0][1] not in _MOVES:
            at_rest = sum(beside.at_rest().values())
            running = sum(beside.begin(action).values())
            beside.end(action)
            needed = frozenset(s for s, kind in action if s in stages and kind in stages[s].reads)
            places.append((i, needed, at_rest, running))

    def size(of: Iterable[int]) -> int:
        return sum(stages[s].gathered for s in of)

    last = {s: i for i, needed, _, _ in places for s in needed}
    least = max((running + size(needed) for _, needed, _, running in places), default=0)
    ways: dict[frozenset[int], tuple[int, list[frozenset[int]]]] = {frozenset(): (0, [])}
    for i, needed, at_rest, running in places:
        found: dict[frozenset[int], tuple[int, list[frozenset[int]]]] = {}
        for resident, (cost, path) in ways.items():
            kept = frozenset(s for s in resident if last[s] >= i)
            missing = needed - kept
            cost += size(missing)
            gathering = max((stages[s].running.get("UNSHARD", 0) for s in missing), default=0)
            room = None if bound is None else max(bound, least) - max(running, at_rest + gathering)
            for now in _largest(kept | needed, needed, stages, room):
                if now not in found or cost < found[now][0]:
                    found[now] = (cost, [*path, now])
        ways = found
    path = min(ways.values(), key=lambda way: way[0])[1]
    made: list[Action | int] = []
    resident = frozenset[int]()
    for (i, *_), now in zip(places, path, strict=True):
        made += [((s, "RESHARD"),) for s in sorted(resident - now)]
        made += [((s, "UNSHARD"),) for s in sorted(now - resident)]
        made.append(i)
        resident = now
    return made + [((s, "RESHARD"),) for s in sorted(resident)]


def _largest(
    all_of: frozenset[int],
    needed: frozenset[int],
    stages: Mapping[int, StageBytes],
    room: int | None,
) -> list[frozenset[int]]:
    """The sets of stages with all that are needed whose parameters fit, without those that are
    part of another; what is needed alone, where nothing fits."""
    if room is None:
        return [all_of]
    others, found = sorted(all_of - needed), list[frozenset[int]]()
    for n in range(len(others), 0, -1):
        for some in combinations(others, n):
            now = needed.union(some)
            if sum(stages[s].gathered for s in now) <= room and not any(now < f for f in found):
                found.append(now)
    return found or [needed]


def stage_reports(
    actions: Sequence[Action],
    compiled: Mapping[int, CompileReport],
    stages: Mapping[int, StageBytes],
) -> list[StageReport]:
    """A report of each stage of a rank, see :func:`held_by_stages`.

    Args:
        actions: of the rank.
        compiled: of the graphs of each stage that gather and reduce.
        stages: bytes of each stage.
    """
    held, peak = held_by_stages(actions, stages)
    return [
        StageReport(
            stage=stage,
            compiled=compiled[stage],
            gathers=mine.gathers,
            reductions=sum((stage, "REDUCE_GRAD") in action for action in actions),
            under_way=mine.under_way,
            gathered_bytes=stages[stage].gathered,
            gradient_bytes=stages[stage].gradients,
            saved_bytes=stages[stage].saved,
            peak_bytes=mine.peak_bytes,
            rank_peak_bytes=peak,
        )
        for stage, mine in held.items()
    ]


def bytes_of(graph: fx.Graph, outputs_from: int = 0) -> tuple[int, int]:
    """What a graph makes: bytes of the outputs from a place on that are no inputs; and of
    everything, at its peak.

    Args:
        graph: with fake tensors in ``meta["val"]``, run by a caller that keeps the inputs.
        outputs_from: the first output that counts.
    """
    analysis = GraphAnalysis(graph, donated=lambda node: False)
    live = analysis.liveness
    given = {s for n in graph.find_nodes(op="placeholder") for s in live.of_node[n]}
    made = {s for each in _outputs(analysis)[outputs_from:] for s in each}
    return sum(live.size[s] for s in made - given), analysis.peak_bytes - live.at_start


def views_of(graph: fx.Graph, inputs: Iterable[fx.Node]) -> list[bool]:
    """Which outputs of ``graph`` are views of some of its inputs, or these themselves."""
    analysis = GraphAnalysis(graph, donated=lambda node: False)
    given = {s for n in inputs for s in analysis.liveness.of_node[n]}
    return [not given.isdisjoint(each) for each in _outputs(analysis)]


def _outputs(analysis: GraphAnalysis) -> list[set[int]]:
    """The storages of each output."""
    (output,) = analysis.graph.find_nodes(op="output")
    (values,) = output.args
    return [
        set(analysis.liveness.of_node[value]) if isinstance(value, fx.Node) else set()
        for value in values
    ]
