"""Choose among candidates by the steps that all ranks measured, and keep the choice.

The choice lies in the folder of Inductor's caches for later starts. Its key has everything that it
depends on: the graph and its inputs, the candidates, the bound, the machine, the process groups,
torch and this package.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx as fx

from .._source import package_digest
from .._torch.dynamo import cache_dir, keep_json
from .._torch.process_groups import group_places
from ..errors import NoUuidError
from ..passes.backends import BucketingBackend
from ..passes.cache_key import describe, digest, log_no_uuid
from ..reports.base import Record, Report, sizes_text, table
from ..reports.schedule import EstimateReport


@dataclass(frozen=True)
class CandidateReport(Record):
    """One candidate: medians over measured steps of the slowest rank, in milliseconds."""

    name: str
    step_ms: float  # of whole steps
    graphs_ms: float  # until the optimizer begins: forward, loss and backward
    # Most that a rank held in a step, by the device's allocator; on CPU the process's resident
    # memory.
    peak_bytes: int
    fits: bool = True  # whether that is within the bound
    estimated_ms: float | None = None  # the cost model's time of the graphs; None: not estimated
    estimated_bytes: int | None = None  # its peak of live bytes of the larger graph
    corrected_ms: float | None = None  # the estimate with the report's factors
    # Median of its steps, each over the median of all candidates in the same round; the choice is
    # made by it.
    relative: float = 1.0


@dataclass(frozen=True)
class TuneReport(Report):
    """The result of :func:`.tune`, alike on every rank but for estimates."""

    chosen: str  # name of the candidate that was kept
    candidates: tuple[CandidateReport, ...]  # in the given order
    steps: int  # measured steps of the chosen one; those that were not close have fewer
    ranks: int
    bound_bytes: int | None = None  # the bound on a rank's memory; None: none
    bits_depend: bool = True  # whether another choice gives other bits
    # Corrections of the cost model's times by the measured steps, by kind of collective and for
    # ``"kernel"``; empty without estimates.
    factors: Mapping[str, float] = field(default_factory=dict)
    from_cache: bool = False  # whether an earlier run's choice was taken without measuring

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TuneReport:
        """Read the result of :meth:`as_dict`."""
        candidates = tuple(CandidateReport(**each) for each in fields["candidates"])
        return cls(**{**fields, "candidates": candidates})

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a table of the candidates, and lines on the choice."""

        def ms(value: float | None) -> str:
            return "-" if value is None else f"{value:.2f}"

        def size(value: int | None) -> str:
            return "-" if value is None else sizes_text(value)[0]

        columns: dict[str, Callable[[CandidateReport], str]] = {
            "candidate": lambda c: f"{c.name} (chosen)" if c.name == self.chosen else c.name,
            "relative": lambda c: ms(c.relative),
            "step, ms": lambda c: ms(c.step_ms),
            "graphs, ms": lambda c: ms(c.graphs_ms),
            "estimate": lambda c: ms(c.estimated_ms),
            "corrected": lambda c: ms(c.corrected_ms),
            "peak": lambda c: size(c.peak_bytes) + ("" if c.fits else ", above the bound"),
            "graph's": lambda c: size(c.estimated_bytes),
        }
        yield from table(columns, self.candidates, right=(1, 2, 3, 4, 5))
        earlier = "taken from an earlier run without measuring: " if self.from_cache else ""
        bound = "" if self.bound_bytes is None else f", bound {size(self.bound_bytes)}"
        yield (
            f"{earlier}medians of up to {self.steps} steps of the slowest of {self.ranks} "
            f"rank(s){bound}"
        )
        yield (
            "bits depend on the choice: give every candidate FixedOrderReduce to have the same ones"
            if self.bits_depend
            else "bits do not depend on the choice: gradients are added in rank order"
        )
        if self.factors:
            of = ", ".join(f"{kind} {factor:.2f}" for kind, factor in self.factors.items())
            yield f"measured over estimated times: {of}"


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
    candidates, each step is divided by the median of its round (of candidates ``compared``, which
    took all rounds; by default all), because a machine's speed may drift. Times are infinite if in
    each step some rank compiled.
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
    """Return the fastest candidate that fits, else the one that needs least memory."""
    fitting = [c for c in candidates if c.fits]
    if fitting:
        return min(fitting, key=lambda c: c.relative)
    return min(candidates, key=lambda c: c.peak_bytes)


def correct(
    reports: Sequence[CandidateReport], estimates: Estimates
) -> tuple[list[CandidateReport], dict[str, float]]:
    """Add the candidates' estimates, as they are and with factors that fit the measured times."""
    known = [(estimates[c.name], c.graphs_ms) for c in reports if estimates[c.name]]
    factors = fit_factors(known)

    def corrected(c: CandidateReport) -> CandidateReport:
        graphs = estimates[c.name]
        if not graphs or not factors:
            return c
        return replace(
            c,
            estimated_ms=sum(e.step_ms for e in graphs),
            estimated_bytes=max(e.peak_bytes for e in graphs),
            corrected_ms=corrected_ms(graphs, factors),
        )

    return list(map(corrected, reports)), factors


Measured = tuple[Sequence[EstimateReport], float]
"""The estimates of a candidate's graphs, and their measured milliseconds."""

KERNEL = "kernel"
# The weight of a factor's distance from the common one, against a candidate's error: kinds that the
# measurements do not tell apart get the same factor.
_PULL = 1e-4


def fit_factors(measured: Sequence[Measured]) -> dict[str, float]:
    """Find one factor per kind, kernels included, that brings estimates near measured times.

    Kinds that no graph has are left out, so a machine keeps their times.
    """
    busy = sorted({kind for es, _ in measured for e in es for kind in e.busy_ms})
    if not measured or any(sum(e.step_ms for e in es) <= 0 for es, _ in measured):
        return {}
    ratios = [math.log(ms / sum(e.step_ms for e in es)) for es, ms in measured]
    common = math.exp(statistics.fmean(ratios))
    factors = dict.fromkeys([KERNEL, *busy], common)

    def error(factors: Mapping[str, float]) -> float:
        errors = sum(math.log(corrected_ms(es, factors) / ms) ** 2 for es, ms in measured)
        return errors + _PULL * sum(math.log(f / common) ** 2 for f in factors.values())

    def moved(sizes: Sequence[float]) -> dict[str, float]:
        """Return the best of ``factors`` times each combination of ``sizes``."""
        moves = itertools.product(sizes, repeat=len(factors))
        tried = ({k: factors[k] * by for k, by in zip(factors, m, strict=True)} for m in moves)
        return min(tried, key=error)

    # Squared errors of logarithms: a grid around the common factor first, since the error has
    # several minima, then ever smaller steps.
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


def choice_key(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    candidates: Mapping[str, Any],
    bound_bytes: int | None,
    device: torch.device,
) -> str:
    """Make the record's key; "" if a candidate can't be identified, and log why."""
    shapes = [(tuple(x.shape), x.dtype) for x in inputs if isinstance(x, torch.Tensor)]
    try:
        names = [(name, _identity(each)) for name, each in candidates.items()]
    except NoUuidError as error:
        log_no_uuid("the choice of a candidate", error)
        return ""
    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else ""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # How many ranks share a node counts, too.
    node = (platform.machine(), os.cpu_count(), os.environ.get("LOCAL_WORLD_SIZE", ""))
    known = (torch.__version__, package_digest(), device_name, node, backend, group_places())
    return digest(gm.code, *map(repr, (shapes, names, bound_bytes, known)))


def load(key: str) -> TuneReport | None:
    """Read a record; None without a readable one."""
    try:
        text = Path(cache_dir(), _name(key)).read_text(encoding="utf-8")
        report = TuneReport.from_dict(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # So that it travels on. The folder may be read-only here.
    keep_json(_name(key), report.as_dict(), is_written=True)
    return report


def save(key: str, report: TuneReport) -> None:
    """Write a record, also to the artifacts of ``torch.compiler.save_cache_artifacts``."""
    keep_json(_name(key), report.as_dict())


def _name(key: str) -> str:
    return f"torch_ext_bucketing/choices/{key}.json"


def _identity(candidate: Any) -> Any:
    if isinstance(candidate, BucketingBackend):
        uuid = candidate.pipeline.uuid()
        if uuid is None:
            raise NoUuidError(f"{candidate!r} has a pass without a cache key")
        return uuid, describe(candidate.compiler), candidate.prefetch
    return describe(candidate)
