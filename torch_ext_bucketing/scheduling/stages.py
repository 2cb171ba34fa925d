"""What the stages of a pipeline hold on one rank, action by action of its schedule::

UNSHARD   F0  F1  B0  F2  B1  B2  REDUCE_GRAD      of one stage
gathered parameters ............
          saved of 0 ..
              saved of 1 ......
                    gradients ............
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from ..graph.analysis import GraphAnalysis
from ..reports.compile import CompileReport
from ..reports.stage import StageReport


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one stage's graphs.

    Args:
        gathered: its parameters, from their gathers to the last backward that reads them.
        saved: beside these, of one microbatch from forward to backward.
        gradients: the sums that are reduced, from the first backward on.
        running: by the kind of an action, what its graph has at its peak beside its inputs and
            what counts as one of the others.
    """

    gathered: int
    saved: int
    gradients: int
    running: Mapping[str, int]


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


def held_by_stages(
    actions: Iterable[tuple[int, str]], stages: Mapping[int, StageBytes]
) -> tuple[dict[int, Held], int]:
    """What each stage, and all of them together, hold while a rank runs its schedule.

    Args:
        actions: stage and kind, in order: ``"UNSHARD"``, ``"RESHARD"``, ``"F"``, ``"B"``, its
            halves ``"I"`` and ``"W"``, ``"REDUCE_GRAD"``. Others hold nothing.
        stages: those of this rank.

    Returns:
        Each stage's, and the peak of the rank in bytes.
    """
    held = {stage: Held() for stage in stages}
    resident, added = dict.fromkeys(stages, False), dict.fromkeys(stages, False)
    under_way: Counter[int] = Counter()
    peak = 0
    for stage, kind in actions:
        if stage not in stages:
            continue
        mine = held[stage]
        if kind in ("UNSHARD", "F") and not resident[stage]:
            # What backward saved of the parameters stays with it.
            resident[stage] = True
            mine.gathers += 1
        elif kind == "RESHARD":
            resident[stage] = False
        if kind == "F":
            under_way[stage] += 1
            mine.under_way = max(mine.under_way, under_way[stage])
        added[stage] |= kind in ("B", "W")
        now = {
            s: (resident[s] or under_way[s] > 0) * b.gathered
            + under_way[s] * b.saved
            + added[s] * b.gradients
            for s, b in stages.items()
        }
        now[stage] += max(
            0, stages[stage].running.get(kind, 0) - (kind == "F") * stages[stage].saved
        )
        mine.peak_bytes = max(mine.peak_bytes, now[stage])
        peak = max(peak, sum(now.values()))
        under_way[stage] -= kind in ("B", "W")
        added[stage] &= kind != "REDUCE_GRAD"
    return held, peak


def stage_reports(
    actions: Sequence[tuple[int, str]],
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
            reductions=actions.count((stage, "REDUCE_GRAD")),
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
    given = {s for n in graph.find_nodes(op="placeholder") for s in live.storages_of(n)}
    (output,) = graph.find_nodes(op="output")
    (values,) = output.args
    made = {
        s
        for value in values[outputs_from:]
        if isinstance(value, fx.Node)
        for s in live.storages_of(value)
    }
    return sum(live.size[s] for s in made - given), analysis.peak_bytes - live.at_start
