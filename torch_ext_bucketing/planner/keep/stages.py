"""Compute the memory of pipeline stages on one rank, action by action of its schedule.

::

    UNSHARD   F0  F1  B0  F2  B1  B2  REDUCE_GRAD      of one stage
    gathered parameters ............
              saved by microbatch 0
                  saved by 1 ......
                        gradients ............

Under a bound in bytes, :func:`with_residency` decides when each stage gathers and frees parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch.fx as fx

from ...graph.analysis import GraphAnalysis
from ...reports.compile import CompileReport, StageReport

Action = tuple[tuple[int, str], ...]
"""Stage and kind of an action, or of two actions that the schedule overlaps.

Kinds are ``"UNSHARD"``, ``"RESHARD"``, ``"F"``, ``"B"``, its halves ``"I"`` and ``"W"``, and
``"REDUCE_GRAD"``; others hold no memory.
"""

_RESIDENCY = ("UNSHARD", "RESHARD")


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage's graphs."""

    gathered: int  # gathered parameters
    saved: int  # other tensors that one microbatch saves from forward to backward
    gradients: int  # gradient sums, live from the first backward to their reduction
    # By kind of action, the peak of its graph above the inputs and the bytes above.
    running: Mapping[str, int]
    reads: frozenset[str] = frozenset("FBIW")  # kinds of actions that read the parameters


@dataclass
class StageMemory:
    """Memory and gathers of one stage in a step.

    ``under_way``: most microbatches between the start of forward and the end of backward.
    """

    peak_bytes: int = 0
    gathers: int = 0
    under_way: int = 0


@dataclass
class _Beside:
    """Bytes of stages without gathered parameters, as a schedule runs."""

    stages: Mapping[int, StageBytes]
    under_way: Counter[int] = field(default_factory=Counter)
    added: set[int] = field(default_factory=set)

    def begin(self, action: Action) -> dict[int, int]:
        """Begin an action, and return the bytes of each stage while it runs."""
        own_actions = [(stage, kind) for stage, kind in action if stage in self.stages]
        self.under_way.update(stage for stage, kind in own_actions if kind == "F")
        self.added.update(stage for stage, kind in own_actions if kind in ("B", "W"))
        resident = self.at_rest()
        for stage, kind in own_actions:
            holding = self.stages[stage]
            resident[stage] += max(0, holding.running.get(kind, 0) - (kind == "F") * holding.saved)
        return resident

    def end(self, action: Action) -> None:
        """End an action."""
        done = [stage for stage, kind in action if stage in self.stages and kind in ("B", "W")]
        self.under_way.subtract(done)
        self.added.difference_update(stage for stage, kind in action if kind == "REDUCE_GRAD")

    def at_rest(self) -> dict[int, int]:
        """Return the bytes of each stage between actions."""
        return {
            stage: self.under_way[stage] * holding.saved + (stage in self.added) * holding.gradients
            for stage, holding in self.stages.items()
        }


def held_by_stages(
    actions: Sequence[Action], stages: Mapping[int, StageBytes]
) -> tuple[dict[int, StageMemory], int]:
    """Compute the memory of each stage, and all stages' peak, while a rank runs its schedule."""
    held = {stage: StageMemory() for stage in stages}
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
        live = beside.begin(action)
        for stage in resident:
            live[stage] += stages[stage].gathered
        for stage, stage_bytes in held.items():
            stage_bytes.peak_bytes = max(stage_bytes.peak_bytes, live[stage])
            stage_bytes.under_way = max(stage_bytes.under_way, beside.under_way[stage])
        peak = max(peak, sum(live.values()))
        beside.end(action)
    return held, peak


def with_residency(
    actions: Sequence[Action], stages: Mapping[int, StageBytes], bound: int | None
) -> list[Action | int]:
    """Place gathers and releases so that the fewest bytes are gathered under a bound.

    Returns indices of the remaining ``actions``, with gathers and releases between them::

        UNSHARD F0 F1 B0 B1 RESHARD            the parameters of all stages fit
        UNSHARD F0 RESHARD .. UNSHARD B0 ..    they do not

    The bound is for all stages together, in bytes. If it can't be kept, the smallest possible peak
    takes its place.
    """
    # Dynamic program over the set of resident stages after each action: a rank has few stages.
    beside = _Beside(stages)
    places: list[tuple[int, frozenset[int], int, int]] = []
    for i, action in enumerate(actions):
        if action[0][1] not in _RESIDENCY:
            at_rest = sum(beside.at_rest().values())
            running = sum(beside.begin(action).values())
            beside.end(action)
            needed = frozenset(s for s, kind in action if s in stages and kind in stages[s].reads)
            places.append((i, needed, at_rest, running))

    def size(of: Iterable[int]) -> int:
        return sum(stages[s].gathered for s in of)

    last = {s: i for i, needed, _, _ in places for s in needed}
    # No placement has a smaller peak than the largest action alone.
    least = max((running + size(needed) for _, needed, _, running in places), default=0)
    ways: dict[frozenset[int], tuple[int, list[frozenset[int]]]] = {frozenset(): (0, [])}
    for i, needed, at_rest, running in places:
        onwards: dict[frozenset[int], tuple[int, list[frozenset[int]]]] = {}
        for resident, (cost, path) in ways.items():
            kept = frozenset(s for s in resident if last[s] >= i)  # others are not read again
            missing = needed - kept
            cost += size(missing)
            gathering = max((stages[s].running.get("UNSHARD", 0) for s in missing), default=0)
            room = None if bound is None else max(bound, least) - max(running, at_rest + gathering)
            for wanted in _largest(kept | needed, needed, stages, room):
                if wanted not in onwards or cost < onwards[wanted][0]:
                    onwards[wanted] = (cost, [*path, wanted])
        ways = onwards
    path = min(ways.values(), key=lambda way: way[0])[1]
    schedule: list[Action | int] = []
    resident = frozenset[int]()
    for (i, *_), wanted in zip(places, path, strict=True):
        schedule += [((s, "RESHARD"),) for s in sorted(resident - wanted)]
        schedule += [((s, "UNSHARD"),) for s in sorted(wanted - resident)]
        schedule.append(i)
        resident = wanted
    return schedule + [((s, "RESHARD"),) for s in sorted(resident)]


def _largest(
    all_of: frozenset[int],
    needed: frozenset[int],
    stages: Mapping[int, StageBytes],
    room: int | None,
) -> list[frozenset[int]]:
    """Return the maximal sets that contain ``needed`` and whose parameters fit, or ``needed``."""
    if room is None:
        return [all_of]
    others, largest = sorted(all_of - needed), list[frozenset[int]]()
    for n in range(len(others), 0, -1):
        for some in combinations(others, n):
            chosen = needed.union(some)
            if sum(stages[s].gathered for s in chosen) <= room and not any(
                chosen < f for f in largest
            ):
                largest.append(chosen)
    return largest or [needed]


def stage_reports(
    actions: Sequence[Action],
    compiled: Mapping[int, CompileReport],
    stages: Mapping[int, StageBytes],
) -> list[StageReport]:
    """Report each stage of a rank; ``compiled``: the graphs that gather and reduce, by stage."""
    held, peak = held_by_stages(actions, stages)
    return [
        StageReport(
            stage=stage,
            compiled=compiled[stage],
            gathers=stage_bytes.gathers,
            reductions=sum((stage, "REDUCE_GRAD") in action for action in actions),
            under_way=stage_bytes.under_way,
            gathered_bytes=stages[stage].gathered,
            gradient_bytes=stages[stage].gradients,
            saved_bytes=stages[stage].saved,
            peak_bytes=stage_bytes.peak_bytes,
            rank_peak_bytes=peak,
        )
        for stage, stage_bytes in held.items()
    ]


def bytes_of(graph: fx.Graph, outputs_from: int = 0) -> tuple[int, int]:
    """Return the bytes of outputs that are not inputs, and the graph's peak above its inputs.

    The caller keeps the inputs. Outputs count from ``outputs_from`` on.
    """
    analysis = GraphAnalysis(graph, donated=lambda node: False)
    live = analysis.liveness
    inputs = {s for n in graph.find_nodes(op="placeholder") for s in live.of_node[n]}
    outputs = {s for each in _outputs(analysis)[outputs_from:] for s in each}
    return sum(live.size[s] for s in outputs - inputs), analysis.peak_bytes - live.at_start


def views_of(graph: fx.Graph, inputs: Iterable[fx.Node]) -> list[bool]:
    """Return, for each output, whether it is one of ``inputs`` or a view of one."""
    analysis = GraphAnalysis(graph, donated=lambda node: False)
    input_storages = {s for n in inputs for s in analysis.liveness.of_node[n]}
    return [not input_storages.isdisjoint(each) for each in _outputs(analysis)]


def _outputs(analysis: GraphAnalysis) -> list[set[int]]:
    """Return the storages of each output."""
    (output,) = analysis.graph.find_nodes(op="output")
    (values,) = output.args
    return [
        set(analysis.liveness.of_node[value]) if isinstance(value, fx.Node) else set()
        for value in values
    ]
