"""Choose among candidates by the steps that all ranks measured, and keep the choice.

The choice lies in the folder of Inductor's caches for later starts. Its key has everything that it
depends on: the graph and its inputs, the candidates, the bound, the machine, the process groups,
torch and this package.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx as fx

from .._source import package_digest
from .._torch import process_groups as groups
from .._torch.dynamo import cache_dir, keep_json
from .._torch.process_groups import group_places
from ..errors import NoUuidError, TuningError
from ..passes.backends import BucketingBackend
from ..passes.cache_key import describe, digest, log_no_uuid
from ..reports.base import Record, Report, sizes_text, table
from ..runtime.launches import ranks_text
from ..runtime.meeting import LINGER_S, NO_STORE, Point, linger, poll

_GO = "go"  # the outcome of a point that all ranks came to; any other is a reason to stop
_numbers = itertools.count()  # ranks make their meetings in one order


class Meeting:
    """This rank's part in the points of one program (:mod:`.runtime.meeting`).

    Args:
        timeout: how long a rank waits for the others at a point; None: the default group's.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        group = groups.default_group()
        self.rank, self.size = 0, 1
        self.candidate = ""
        self._stopped: TuningError | None = None
        if group is None or not groups.has_peers(group):
            return
        self.rank, self.size = group.rank(), group.size()
        self._timeout = timeout or groups.group_timeout(group)
        # torchrun may keep one store for a job and its restarts.
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._prefix = f"tuning/{start}/{next(_numbers)}"
        self._points = itertools.count()
        self._last: Point | None = None

    def _next(self) -> Point:
        prefix = f"{self._prefix}/{next(self._points)}"
        return Point(prefix, range(self.size), self._timeout)

    def meet(self, name: str, value: str = "") -> list[str]:
        """Wait for all ranks at a point, named for errors; return their values by rank.

        Raises:
            TuningError: on every rank: one did not come in time, or failed on its way.
        """
        if self._stopped is not None:
            raise self._stopped
        if self.size == 1:
            return [value]
        point = self._next()

        def is_decided() -> bool:
            if point.is_complete():
                point.decide(_GO)
            elif point.is_late:
                late = point.missing()
                text = f"{ranks_text(late)} did not come to {name} in {point.timeout_s:g} s"
                point.decide(self._reason(text, late))
            return point.outcome() is not None

        try:
            point.arrive(value)
            poll(is_decided)
            outcome = point.outcome()
            if outcome == _GO:
                values = point.texts(range(self.size))
                self._forget_last()
                self._last = point
                return values
        except RuntimeError as error:  # c10d's own errors are RuntimeErrors
            text = f"candidate {self.candidate!r}: at {name} {NO_STORE} ({error})"
            self._stopped = TuningError(text, self.candidate)
            raise self._stopped from error
        raise self._error(point, outcome or "")

    def failed(self, error: Exception, where: str) -> TuningError:
        """Return the error to raise for one on the way to the next point; stop the other ranks."""
        if self._stopped is not None:  # and the error came of that, such as from Dynamo
            return self._stopped
        text = f"rank {self.rank} failed {where}: {type(error).__name__}: {error}"
        reason = self._reason(text, [self.rank])
        if self.size == 1:
            return self._error(None, reason)
        point = self._next()
        try:
            point.write("")  # and does not arrive: nobody goes on
            if isinstance(error, RuntimeError):
                # A collective of torch fails if a peer has ended. Had that one raised an error,
                # it would have left word; others that see its end will, soon.
                poll(lambda: point.outcome() is not None or not point.missing(), LINGER_S)
                if silent := point.missing():
                    text += f" ({ranks_text(silent)} did not get to that point, either)"
                    reason = self._reason(text, [self.rank, *silent])
            reason = point.decide(reason)
        except RuntimeError:
            reason = self._reason(f"{text} ({NO_STORE})", [self.rank])
        return self._error(point, reason)

    def _reason(self, text: str, ranks: Sequence[int]) -> str:
        return json.dumps([text, self.candidate, ranks])

    def _error(self, point: Point | None, reason: str) -> TuningError:
        text, candidate, ranks = json.loads(reason)
        if point is not None:
            linger([point], [self.size])
        self._stopped = TuningError(f"candidate {candidate!r}: {text}", candidate, ranks)
        return self._stopped

    def _forget_last(self) -> None:
        """Delete the keys of the point before, which all ranks have left."""
        with contextlib.suppress(RuntimeError):
            if self._last is not None:
                counters = ("arrived", "outcome") if self.rank == 0 else ()
                self._last.forget(f"rank{self.rank}", *counters)


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
    from_cache: bool = False  # whether an earlier run's choice was taken without measuring

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> TuneReport:
        """Read the result of :meth:`as_dict`."""
        candidates = tuple(CandidateReport(**candidate) for candidate in fields["candidates"])
        return cls(**{**fields, "candidates": candidates})

    def lines(self, members: bool = True) -> Iterator[str]:
        """Yield a table of the candidates, and lines on the choice."""

        def ms(value: float | None) -> str:
            return "-" if value is None else f"{value:.2f}"

        def size(value: int | None) -> str:
            return "-" if value is None else sizes_text(value)[0]

        columns: dict[str, Callable[[CandidateReport], str]] = {
            "candidate": lambda c: f"{c.name} (chosen)" if c.name == self.chosen else c.name,
            "relative:n": lambda c: ms(c.relative),
            "step, ms:n": lambda c: ms(c.step_ms),
            "graphs, ms:n": lambda c: ms(c.graphs_ms),
            "estimate:n": lambda c: ms(c.estimated_ms),
            "peak": lambda c: size(c.peak_bytes) + ("" if c.fits else ", above the bound"),
            "graph's": lambda c: size(c.estimated_bytes),
        }
        yield from table(columns, self.candidates)
        earlier = "taken from an earlier run without measuring: " if self.from_cache else ""
        bound = "" if self.bound_bytes is None else f", bound {size(self.bound_bytes)}"
        yield (
            f"{earlier}medians of up to {self.steps} steps of the slowest of {self.ranks} "
            f"rank(s){bound}"
        )
        yield (
            'bits depend on the choice: they do not with FixedOrderReduce and "aot_eager" in all'
            if self.bits_depend
            else "bits do not depend on the choice: gradients are added in rank order"
        )


class Figures(NamedTuple):
    """One step on one rank. Times are infinite if the rank compiled in it."""

    step_ms: float
    graphs_ms: float
    peak_bytes: int


RankFigures = Mapping[str, Sequence[Figures]]
"""The measured steps of each candidate on one rank."""
Estimates = Mapping[str, tuple[float, int]]
"""The estimated milliseconds of each candidate's step, and the peak in bytes."""


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
            Figures(*map(max, zip(*per_rank, strict=True)))
            for per_rank in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
    }
    rounds = zip(*(steps[name] for name in compared or steps), strict=True)
    usual = [
        statistics.median([s.step_ms for s in per_candidate if s.step_ms < math.inf] or [1])
        for per_candidate in rounds
    ]

    def report(name: str, figures: Sequence[Figures]) -> CandidateReport:
        timed = [(s, ms) for s, ms in zip(figures, usual, strict=False) if s.step_ms < math.inf]
        values = zip(*((s.step_ms, s.graphs_ms, s.step_ms / ms) for s, ms in timed), strict=True)
        step, graphs, relative = map(statistics.median, values) if timed else (math.inf,) * 3
        peak = max(s.peak_bytes for s, _ in timed or [(s, 0) for s in figures])
        fits = bound_bytes is None or peak <= bound_bytes
        return CandidateReport(name, step, graphs, peak, fits, relative=relative)

    return [report(name, figures) for name, figures in steps.items()]


def best_of(candidates: Sequence[CandidateReport]) -> CandidateReport:
    """Return the fastest candidate that fits, else the one that needs least memory."""
    fitting = [c for c in candidates if c.fits]
    if fitting:
        return min(fitting, key=lambda c: c.relative)
    return min(candidates, key=lambda c: c.peak_bytes)


def with_estimates(
    reports: Sequence[CandidateReport], estimates: Estimates
) -> list[CandidateReport]:
    """Add the cost model's estimates of the candidates."""
    estimated = []
    for report in reports:
        step_ms, peak_bytes = estimates.get(report.name, (None, None))
        estimated.append(replace(report, estimated_ms=step_ms, estimated_bytes=peak_bytes))
    return estimated


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
        names = [(name, _identity(candidate)) for name, candidate in candidates.items()]
    except NoUuidError as error:
        log_no_uuid("the choice of a candidate", error)
        return ""
    backend = dist.get_backend() if dist.is_available() and dist.is_initialized() else ""
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    # How many ranks share a node counts, too.
    node = (platform.machine(), os.cpu_count(), os.environ.get("LOCAL_WORLD_SIZE", ""))
    environment = (torch.__version__, package_digest(), device_name, node, backend, group_places())
    return digest(gm.code, *map(repr, (shapes, names, bound_bytes, environment)))


def load(key: str) -> TuneReport | None:
    """Read a record; None without a readable one."""
    try:
        text = Path(cache_dir(), file_of(key)).read_text(encoding="utf-8")
        report = TuneReport.from_dict(json.loads(text))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # So that it travels on. The folder may be read-only here.
    keep_json(file_of(key), report.as_dict(), is_written=True)
    return report


def file_of(key: str) -> str:
    """Return a record's path in the folder of Inductor's caches."""
    return f"torch_ext_bucketing/choices/{key}.json"


def _identity(candidate: Any) -> Any:
    if isinstance(candidate, BucketingBackend):
        uuid = candidate.pipeline.uuid()
        if uuid is None:
            raise NoUuidError(f"{candidate!r} has a pass without a cache key")
        return uuid, describe(candidate.compiler), candidate.prefetch
    return describe(candidate)
