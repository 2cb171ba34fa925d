"""The candidates to start from, for a model.

Choose among candidates by what all ranks measured, and correct a machine by it.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.fx as fx
import torch.nn as nn

from .._torch.estimates import bucket_fsdp
from ..fsdp.blocks import transformer_block_plan
from ..fsdp.units import UnitSpec
from ..graph.edits import unchanged_on_error
from ..graph.nodes import GraphLike, graph_of
from ..passes.backends import BucketingBackend
from ..passes.base import GraphPass, Stage
from ..passes.bucketing import BucketByCap, FixedOrderReduce
from ..passes.compilation import Compilation
from ..planner.cost.machine import Machine
from ..planner.schedule.memory import PeakMemory
from ..planner.schedule.policy import Overlap
from ..planner.scheduling import BucketAndSchedule, Estimate, Schedule
from ..recipes import recipe
from ..reports.schedule import EstimateReport
from ..reports.tuning import CandidateReport

_CAP_MB = 25.0


@dataclass(frozen=True, eq=False, repr=False)
class TorchBuckets(GraphPass):
    """Merge FSDP's collectives by torch's own passes, with their default caps."""

    stage: ClassVar[Stage] = "forward_backward"

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        gm = graph_of(graph).owning_module
        assert isinstance(gm, fx.GraphModule)
        with unchanged_on_error(gm.graph):
            bucket_fsdp(gm)


def candidates(
    model: nn.Module,
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
    *,
    units: UnitSpec | Sequence[str | Sequence[str]] | None = None,
    reduce: Literal["all_to_all"] | None = None,
    machine: Machine | None = None,
    memory: PeakMemory | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, BucketingBackend]:
    """Return plans that differ in buckets and order, for :func:`.tune`.

    - ``"estimate"``: those of ``recipe(model, "speed")``;
    - ``"units"``, ``"cap"``: buckets of FSDP2's units, or up to 25 MiB, in an order that overlaps,
      and in the graph's order;
    - ``"torch's buckets"``: torch's own merging, in its order;
    - ``"no buckets"``: one collective per parameter.

    All give the model eager FSDP2's collectives first and gather the same parameters again for
    backward. With ``reduce`` all give the same bits. Without transformer blocks and ``units`` those
    by unit are left out.

    Args:
        model: see :func:`.recipe`, also for the options.
        compiler: see :func:`.backend`.
    """
    options: dict[str, Any] = {"machine": machine, "reduce": reduce, "memory": memory}
    options["optimizer"] = optimizer
    *first, both = recipe(model, "speed", **options)
    assert isinstance(both, BucketAndSchedule)
    sums = [FixedOrderReduce()] if reduce else []
    order = Schedule([Overlap()], machine)
    lists: dict[str, list[GraphPass]] = {"estimate": [*first, both]}
    if units is not None or _has_blocks(model):
        *by_unit, _ = recipe(model, units=units, **options)
        lists |= {"units": [*by_unit, order], "units, graph's order": by_unit}
    by_cap = [*first, BucketByCap(_CAP_MB, kinds=both.kinds), *sums]
    lists |= {
        "cap": [*by_cap, order],
        "cap, graph's order": by_cap,
        "torch's buckets": [*first, TorchBuckets(), *sums],
        "no buckets": [*first, *sums],
    }
    last = Estimate(machine)
    return {
        name: BucketingBackend(compiler, [*passes, last], model) for name, passes in lists.items()
    }


def _has_blocks(model: nn.Module) -> bool:
    try:
        transformer_block_plan(model)
    except ValueError:
        return False
    return True


class Figures(NamedTuple):
    """One step on one rank. Times are infinite if the rank compiled in it."""

    step_ms: float
    graphs_ms: float
    peak_bytes: int


RankFigures = Mapping[str, Sequence[Figures]]
"""The measured steps of each candidate on one rank."""
Estimates = Mapping[str, Sequence[EstimateReport]]
"""The estimates of each candidate's graphs."""


def combine(
    ranks: Sequence[RankFigures], bound_bytes: int | None, compared: Sequence[str] = ()
) -> list[CandidateReport]:
    """Combine the ranks' figures, alike on every rank.

    A step takes as long as on its slowest rank, and the median over the steps counts. To compare
    candidates, each step is divided by the median of its round, because a machine's speed may
    drift. Times are infinite if in each step some rank compiled.

    Args:
        compared: candidates that took all rounds, which divide; by default all.
    """
    steps = {
        name: [
            Figures(*map(max, zip(*each, strict=True)))
            for each in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }
    rounds = zip(*(steps[name] for name in compared or steps), strict=True)
    usual = [
        statistics.median([s.step_ms for s in each if s.step_ms < math.inf] or [1])
        for each in rounds
    ]

    def report(name: str, mine: Sequence[Figures]) -> CandidateReport:
        timed = [(s, of) for s, of in zip(mine, usual, strict=False) if s.step_ms < math.inf]
        values = zip(*((s.step_ms, s.graphs_ms, s.step_ms / of) for s, of in timed), strict=True)
        step, graphs, relative = map(statistics.median, values) if timed else (math.inf,) * 3
        peak = max(s.peak_bytes for s, _ in timed or [(s, 0) for s in mine])
        fits = bound_bytes is None or peak <= bound_bytes
        return CandidateReport(name, step, graphs, peak, fits, relative=relative)

    return [report(name, mine) for name, mine in steps.items()]


def best_of(candidates: Sequence[CandidateReport]) -> CandidateReport:
    """Return the fastest candidate that fits; if none does, the one that needs least memory.

    Of equal ones the first.
    """
    fitting = [c for c in candidates if c.fits]
    if fitting:
        return min(fitting, key=lambda c: c.relative)
    return min(candidates, key=lambda c: c.peak_bytes)


def correct(
    found: Sequence[CandidateReport], estimates: Estimates
) -> tuple[list[CandidateReport], dict[str, float]]:
    """Add the candidates' estimates, as they are and with factors that fit the measured times."""
    known = [(estimates[c.name], c.graphs_ms) for c in found if estimates[c.name]]
    factors = fit_factors(known)
    if not factors:
        return list(found), {}
    with_estimates = [
        replace(
            c,
            estimated_ms=sum(e.step_ms for e in of),
            estimated_bytes=max(e.peak_bytes for e in of),
            corrected_ms=corrected_ms(of, factors),
        )
        if (of := estimates[c.name])
        else c
        for c in found
    ]
    return with_estimates, factors


Measured = tuple[Sequence[EstimateReport], float]
"""The estimates of a candidate's graphs, and their measured milliseconds."""

KERNEL = "kernel"
# The weight of a factor's distance from the common one, against a candidate's error: what the
# measurements do not tell apart gets the same factor.
_PULL = 1e-4


def fit_factors(measured: Sequence[Measured]) -> dict[str, float]:
    """Find one factor per kind that brings estimates near measured times.

    The sum of squared errors is minimized, in logarithms. A factor for all kinds comes first, then
    a grid around it, then steps of 1.2 to 1.01.

    Returns:
        The factors of collectives by kind and of kernels (:data:`KERNEL`), which
        :meth:`.Machine.corrected` takes. Kinds that no graph has are left out, so a machine keeps
        their times. Empty if ``measured`` is.
    """
    busy = sorted({kind for es, _ in measured for e in es for kind in e.busy_ms})
    if not measured or any(sum(e.step_ms for e in es) <= 0 for es, _ in measured):
        return {}
    ratios = [math.log(ms / sum(e.step_ms for e in es)) for es, ms in measured]
    common = math.exp(statistics.fmean(ratios))
    factors = dict.fromkeys([KERNEL, *busy], common)

    def error(factors: Mapping[str, float]) -> float:
        found = sum(math.log(corrected_ms(es, factors) / ms) ** 2 for es, ms in measured)
        return found + _PULL * sum(math.log(f / common) ** 2 for f in factors.values())

    def moved(sizes: Sequence[float]) -> dict[str, float]:
        """Return the best of ``factors`` times each combination of ``sizes``."""
        moves = itertools.product(sizes, repeat=len(factors))
        tried = ({k: factors[k] * by for k, by in zip(factors, m, strict=True)} for m in moves)
        return min(tried, key=error)

    # From a grid on: the error has several minima.
    factors = moved([2.0 ** (i / 2) for i in (0, -1, 1, -2, 2, -3, 3)])
    for by in (1.2, 1.05, 1.01):
        while (better := moved((1.0, by, 1 / by))) != factors:
            factors = better
    return factors


def corrected_ms(estimates: Sequence[EstimateReport], factors: Mapping[str, float]) -> float:
    """Time graphs with corrected kernels and collectives, in milliseconds.

    The kernels that hid a collective hide as much of it as they take longer::

        exposed = max(0, factor * busy - kernel factor * (busy - exposed before))
    """
    total = 0.0
    for e in estimates:
        total += factors[KERNEL] * e.kernels_ms
        for kind, busy in e.busy_ms.items():
            hidden = busy - e.exposed_ms.get(kind, 0.0)
            total += max(0.0, factors[kind] * busy - factors[KERNEL] * hidden)
    return total
