"""Measure several plans in the first steps of a training, and keep the fastest.

::

    tuner = teb.tune(model)
    run = torch.compile(model, backend=tuner)
    step = tuner.step(train_step)      # forward, backward and optimizer, as before
    for batch in data:
        loss = step(batch)

Dynamo traces the model once, and every candidate compiles that graph. A call runs one of the
compiled functions, and a whole step the same one. The module, its parameters and the optimizer are
common to all, so training goes on through the measurement.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

import torch
import torch.fx as fx
import torch.nn as nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .._torch.dynamo import Compiler, compile_variant, keep_json
from .._torch.inductor import bucket_fsdp
from ..errors import BoundNotKeptWarning, TuningError, check_argument, check_count
from ..fsdp.plans import transformer_block_plan
from ..fsdp.units import Units
from ..passes.backends import BucketingBackend
from ..passes.base import Compilation, GraphPass, Stage, last_of
from ..passes.bucketing import BucketByCap, FixedOrderReduce
from ..planner.cost.machine import Machine
from ..planner.schedule.policy import Overlap, PeakMemory
from ..planner.scheduling import BucketAndSchedule, Estimate, Schedule
from ..recipes import recipe
from ..reports.compile import CompileReport
from . import choice
from .choice import Figures, Meeting, TuneReport, best_of, combine, with_estimates

_P = ParamSpec("_P")
_T = TypeVar("_T")

# Candidates that take at most this much longer than the fastest are measured again: medians of a
# few steps differ by some percent from run to run.
_CLOSE = 1.1
_CAP_MB = 25.0  # DDP's default for a bucket


def tune(
    model: nn.Module,
    candidates: Mapping[str, str | Compiler] | None = None,
    *,
    steps: int = 5,
    memory: PeakMemory | None = None,
    timeout: timedelta | None = None,
) -> Tuner:
    """Return a backend for ``torch.compile`` that tries ``candidates`` and keeps the fastest.

    Steps of :meth:`.Tuner.step` try one candidate each, in turn: one step that compiles and warms
    up, then ``steps`` measured ones, and as many again for those within 10% of the fastest. A step
    takes as long as on its slowest rank; medians of it, over the other candidates' steps of the
    same round, decide alike on all ranks. The fastest candidate within ``memory`` is kept. The
    choice is stored in the folder of Inductor's caches; a later start with the same graph,
    candidates and machine takes it without measuring. A step that compiles something on any rank is
    not counted.

    The backend's ``step`` wraps a training step, ``chosen`` is the kept candidate's name, and
    ``report`` has the measurements, alike on every rank; both are None until all candidates are
    measured.

    Args:
        model: the sharded model, not compiled yet.
        candidates: backends of ``torch.compile`` by name; None: those of
            :func:`default_candidates` for Inductor, with ``memory``. All ranks give the
            same.
        steps: measured steps of each candidate; the closest ones get twice as many.
        memory: a bound on the memory of a rank in a step, as the device's allocator counts it (on
            CPU: resident memory), in ``gib``; None: no bound. If no candidate keeps it, the one
            that needs least memory is kept, with a ``BoundNotKeptWarning``.
        timeout: how long a rank waits for the others before a step and before the optimizer, their
            compile times included; None: the default process group's timeout.
    """
    check_count("steps", steps, least=1)
    check_argument("memory", memory, PeakMemory | None)
    check_argument("candidates", candidates, Mapping | None)
    check_argument("timeout", timeout, timedelta | None)
    if memory is not None and memory.gib is None:
        raise ValueError("memory= is a bound in GiB here: PeakMemory(gib=...)")
    if candidates is None:
        candidates = default_candidates(model, memory=memory)
    if not candidates:
        raise ValueError("give at least one candidate")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    bound = None if memory is None or memory.gib is None else int(memory.gib * 2**30)
    return Tuner(candidates, steps, bound, device, Meeting(timeout))


class Tuner:
    """Compile and measure candidates; :func:`tune` makes it, and has the attributes."""

    def __init__(
        self,
        candidates: Mapping[str, str | Compiler],
        steps: int,
        bound_bytes: int | None,
        device: torch.device,
        meeting: Meeting,
    ) -> None:
        self.candidates: dict[str, str | Compiler] = dict(candidates)
        self.chosen: str | None = None
        self.report: TuneReport | None = None
        self._steps = steps
        self._bound = bound_bytes
        self._meeting, self._meter = meeting, Meter(device)
        self._running = list(self.candidates)
        self._current = self._running[0]
        self._round, self._left = 0, list(self._running)  # in this round
        self._rounds = 1 + steps
        self._figures: dict[str, list[Figures]] = {name: [] for name in self.candidates}
        self._versions: list[dict[str, Callable[..., Any]]] = []
        self._key: str | None = None
        self._in_step = self._compiled = False

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        """Compile the graph of a frame by all candidates, or by the chosen one, for Dynamo."""
        self._compiled = True
        is_first = self._in_step and self._key is None
        if is_first:
            self._look_up(gm, example_inputs)
        versions: dict[str, Callable[..., Any]] = {}
        for name in list(self.candidates) if self.chosen is None else [self.chosen]:
            self._meeting.candidate = name  # for errors
            versions[name] = compile_variant(self.candidates[name], gm, example_inputs, **kwargs)
        self._meeting.candidate = self._current
        self._versions.append(versions)
        if is_first:  # no rank waits in a collective for one that could not compile
            self._meeting.meet("the end of compiling")

        def run(*args: Any) -> Any:
            return versions[self._current](*args)

        return run

    def step(self, function: Callable[_P, _T]) -> Callable[_P, _T]:
        """Wrap a whole training step, the optimizer's included, to be measured until the choice.

        Every rank calls it for every step. ``function`` is called once per call. Until the choice,
        a ``TuningError`` means that a rank failed or came late. The ranks have the weights of the
        last step that all of them have taken, if an optimizer of ``torch.optim`` takes it.
        """

        @functools.wraps(function)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if self.chosen is not None:
                return function(*args, **kwargs)
            return self._measured(functools.partial(function, *args, **kwargs))

        return run

    def _measured(self, function: Callable[[], _T]) -> _T:
        """Take one step with the candidate whose turn it is."""
        self._current = self._meeting.candidate = self._left[0]
        self._compiled, self._in_step = False, True
        meeting, meter = self._meeting, self._meter
        pause: list[float] = []  # while ranks meet, once they have their gradients

        def before_optimizer(*_: Any) -> None:
            if not pause:
                pause.append(meter.now_ms())
                # No rank changes a weight before all have their gradients.
                meeting.meet("the optimizer's step")
                pause.append(meter.now_ms())

        try:
            meeting.meet("the step")  # so that no candidate pays for a late rank
            meter.restart_peak()
            begin = meter.now_ms()
            hook = register_optimizer_step_pre_hook(before_optimizer)
            try:
                result = function()
            finally:
                hook.remove()
            before_optimizer()  # if no optimizer of torch took the step
            end = meter.now_ms()
        except TuningError:
            raise
        except Exception as error:
            where = "after its optimizer began a step" if pause else "before the optimizer's step"
            raise meeting.failed(error, where) from error
        finally:
            self._in_step = False
        if self.chosen is not None:  # found by a compile of this step
            return result
        # The step without the time that ranks met, and its part before the optimizer.
        times = (end - pause[1] + pause[0] - begin, pause[0] - begin)
        times = (math.inf, math.inf) if self._compiled else times
        self._figures[self._left.pop(0)].append(Figures(*times, meter.peak_bytes()))
        if not self._left:
            self._end_round()
        return result

    def _end_round(self) -> None:
        """Choose if there were enough rounds, else begin another one with the next candidate."""
        self._round += 1
        if self._round >= self._rounds:
            self._choose()
        turn = self._round % len(self._running)
        self._left = self._running[turn:] + self._running[:turn]

    def _choose(self) -> None:
        """Compare figures with all ranks; choose, unless candidates need more steps."""
        figures = {name: timed[1:] for name, timed in self._figures.items()}
        sent = json.dumps([figures, self._estimates()])
        ranks = [json.loads(text) for text in self._meeting.meet("the choice", sent)]
        reports = combine([each for each, _ in ranks], self._bound, self._running)
        if any(c.step_ms == math.inf for c in reports):
            return  # ranks still compile: another round
        best = best_of(reports)
        close = [c.name for c in reports if c.fits and c.relative <= _CLOSE * best.relative]
        if best.fits and len(close) > 1 and self._rounds == 1 + self._steps:
            self._running, self._rounds = close, self._round + self._steps
            return
        # Rank 0's estimates on all ranks: their shards, and so their peaks, may differ.
        reports = with_estimates(reports, ranks[0][1])
        steps, size, bits = len(figures[best.name]), self._meeting.size, self._bits_depend()
        report = TuneReport(best.name, tuple(reports), steps, size, self._bound, bits)
        self._keep(report)
        if self._key:
            keep_json(choice.file_of(self._key), report.as_dict())
        if not best.fits:
            warnings.warn(
                f"no candidate keeps the bound of {self._bound} bytes; {best.name!r} needs least, "
                f"{best.peak_bytes}",
                BoundNotKeptWarning,
                stacklevel=5,
            )

    def _look_up(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Take the choice of an earlier run, if all ranks have the same."""
        self._key = choice.choice_key(gm, inputs, self.candidates, self._bound, self._meter.device)
        earlier = choice.load(self._key) if self._key else None
        chosen = "" if earlier is None or earlier.chosen not in self.candidates else earlier.chosen
        names = set(self._meeting.meet("the look-up of an earlier choice", chosen))
        if earlier is not None and names == {chosen} and chosen:
            self._keep(replace(earlier, from_cache=True))

    def _keep(self, report: TuneReport) -> None:
        self.report, self.chosen, self._current = report, report.chosen, report.chosen
        for versions in self._versions:  # free the others
            for name in set(versions) - {self.chosen}:
                del versions[name]

    def _estimates(self) -> dict[str, tuple[float, int]]:
        """Return this rank's estimates of the candidates that have some."""
        estimates = {}
        for name, candidate in self.candidates.items():
            if not isinstance(candidate, BucketingBackend):
                continue
            graphs = CompileReport.joined(candidate.reports).estimates
            graphs = [e for e in graphs if e.stage in ("forward", "backward")]
            if graphs:
                step_ms = sum(e.step_ms for e in graphs)
                estimates[name] = step_ms, max(e.peak_bytes for e in graphs)
        return estimates

    def _bits_depend(self) -> bool:
        """Return whether candidates may give different bits, by sums or by Inductor's kernels."""
        backends = [c for c in self.candidates.values() if isinstance(c, BucketingBackend)]
        added = (last_of(c.pipeline.ahead, FixedOrderReduce) for c in backends)
        sums = {None if p is None else p.accumulate for p in added}
        compilers = {c.compiler for c in backends}
        alike = len(sums) == len(compilers) == 1 and not {None, "inductor"} & {*sums, *compilers}
        return len(self.candidates) > 1 and not (alike and len(backends) == len(self.candidates))


@dataclass
class Meter:
    """A clock that waits for the device, and its peak of allocated bytes."""

    device: torch.device

    def now_ms(self) -> float:
        """Return the time once the device has done all work."""
        if self._has_allocator:
            torch.accelerator.synchronize(self.device)
        return time.perf_counter() * 1e3

    def restart_peak(self) -> None:
        """Begin a new peak at the bytes held now."""
        if self._has_allocator:
            torch.accelerator.reset_peak_memory_stats(self.device)
            return
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # or a step would run in memory that others have left
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the largest number of bytes held since :meth:`restart_peak`."""
        if self._has_allocator:
            return torch.accelerator.max_memory_allocated(self.device)
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return 0

    @property
    def _has_allocator(self) -> bool:
        return self.device.type not in ("cpu", "meta")


@dataclass(frozen=True, eq=False, repr=False)
class TorchBuckets(GraphPass):
    """Merge FSDP's collectives by torch's own passes, with their default caps."""

    stage: ClassVar[Stage] = "forward_backward"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        gm = graph.owning_module
        assert isinstance(gm, fx.GraphModule)
        bucket_fsdp(gm)


def default_candidates(
    model: nn.Module,
    compiler: Literal["aot_eager", "inductor"] | Callable[..., Any] = "inductor",
    *,
    units: Units | Sequence[str | Sequence[str]] | None = None,
    reduce: Literal["all_to_all"] | None = None,
    machine: Machine | None = None,
    memory: PeakMemory | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> dict[str, BucketingBackend]:
    """Return plans that differ in buckets and order, for :func:`tune`; options as :func:`.recipe`.

    - ``"estimate"``: those of ``recipe(model, "speed")``;
    - ``"units"``, ``"cap"``: buckets of FSDP2's units, or up to 25 MiB, in an order that overlaps,
      and in the graph's order;
    - ``"torch's buckets"``: torch's own merging, in its order;
    - ``"no buckets"``: one collective per parameter.

    All give the model eager FSDP2's collectives first and gather the same parameters again for
    backward. With ``reduce`` and ``"aot_eager"`` all give the same bits; Inductor's kernels round
    otherwise in another plan. Without transformer blocks and ``units`` those by unit are left out.
    """
    options: dict[str, Any] = {"machine": machine, "reduce": reduce, "memory": memory}
    options |= {"optimizer": optimizer}
    *first, bucketing = recipe(model, "speed", **options)
    assert isinstance(bucketing, BucketAndSchedule)
    sums = [FixedOrderReduce()] if reduce else []
    order = Schedule([Overlap()], machine)
    lists: dict[str, list[GraphPass]] = {"estimate": [*first, bucketing]}
    if units is not None or _has_blocks(model):
        *by_unit, _ = recipe(model, units=units, **options)
        lists |= {"units": [*by_unit, order], "units, graph's order": by_unit}
    by_cap = [*first, BucketByCap(_CAP_MB, kinds=bucketing.kinds), *sums]
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
