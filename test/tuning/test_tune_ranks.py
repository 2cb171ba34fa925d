"""The tuner on real gloo ranks: the same bits, failing and late ranks, records."""

import ast
import contextlib
import multiprocessing
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from marks import at_night
from sharded_models import OneBlock
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from benchmarks.eager_parity.devices import start
from torch_ext_bucketing.errors import TuningError
from torch_ext_bucketing.testing.ranks import Rank, run_ranks
from torch_ext_bucketing.testing.training import digest
from torch_ext_bucketing.tuning.tune import default_candidates

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::UserWarning")]

NAMES = ("estimate", "units, graph's order", "no buckets")
SOON = timedelta(seconds=60)


@contextlib.contextmanager
def gloo(rank):
    torch.set_num_threads(1)
    start(rank, "gloo")
    try:
        yield init_device_mesh("cpu", (rank.world_size,))
    finally:
        dist.destroy_process_group()


class Training:
    """A small model's training; ``digests`` are of the weights after each step."""

    def __init__(self, rank, mesh, reduce="all_to_all", compiler="aot_eager", dim=8):
        torch.manual_seed(0)
        self.rank, self.model = rank.rank, OneBlock(dim)
        teb.data_parallel(self.model, mesh, param_dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        units = ["layers.0", ""]
        found = default_candidates(self.model, compiler, units=units, reduce=reduce)
        self.candidates = {name: found[name] for name in NAMES}
        self.digests = [digest(self.model)]

    def compile(self, backend):
        self.run = torch.compile(self.model, backend=backend, fullgraph=True)

    def by_plans(self, names):
        """Take a step with each of these candidates; return the digests."""
        torch._dynamo.reset()
        runs = {
            name: torch.compile(self.model, backend=self.candidates[name], fullgraph=True)
            for name in dict.fromkeys(names)
        }
        for name in names:
            self.run = runs[name]
            self.step()
        return self.digests

    def step(self, before_optimizer=lambda: None):
        torch.manual_seed(len(self.digests) * 100 + self.rank)
        self.run(torch.randint(12, (2, 3))).square().mean().backward()
        before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.digests.append(digest(self.model))


def _tunes(rank, compiler, dim):
    with gloo(rank) as mesh:
        tuned = Training(rank, mesh, compiler=compiler, dim=dim)
        tuner = teb.tune(tuned.model, tuned.candidates, steps=2, timeout=SOON)
        tuned.compile(tuner)
        ran, chosen_after = [], []

        def noted():
            ran.append(tuner._current)
            tuned.step()

        step = tuner.step(noted)
        for _ in range(16):
            step()
            chosen_after.append(tuner.chosen)
        # A later start: another model, compiled again.
        torch._dynamo.reset()
        again = Training(rank, mesh, compiler=compiler, dim=dim)
        later = teb.tune(again.model, again.candidates, steps=2, timeout=SOON)
        again.compile(later)
        for _ in range(3):
            later.step(again.step)()
        # All candidates have the bits of one plan. Inductor's kernels round otherwise in another
        # plan, so that a step has the bits of the plan that it ran.
        for found, plans in ((tuned.digests, ran), (again.digests, [later.chosen] * 3)):
            one = Training(rank, mesh, compiler=compiler, dim=dim)
            given = plans if compiler == "inductor" else [NAMES[1]] * len(plans)
            assert found == one.by_plans(given)
        assert (later.report.from_cache, later.chosen) == (True, tuner.chosen)
        assert [len(c.reports) for c in again.candidates.values()].count(0) == len(NAMES) - 1
        return chosen_after, tuner.report


@pytest.mark.parametrize(
    ("compiler", "dim"),
    [
        at_night("aot_eager", 8),
        ("aot_eager", 7),  # rows that two ranks can't share evenly
        at_night("inductor", 8),
    ],
)
def test_training_goes_on_through_it_with_the_bits_of_its_plans(compiler, dim, tmp_path):
    folder = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    (mine, report), other = run_ranks(_tunes, 2, compiler, dim, timeout_s=400, environment=folder)
    assert other == (mine, report)
    # A step of each that compiles and two that are measured; again two of those that are close.
    first = mine.index(report.chosen) + 1
    assert first in (9, 9 + 4, 9 + 6)
    assert mine == [None] * (first - 1) + [report.chosen] * (17 - first)
    assert report.bits_depend == (compiler == "inductor")
    assert [c.name for c in report.candidates] == list(NAMES)
    assert (report.ranks, report.steps) == (2, 2 if first == 9 else 4)
    for c in report.candidates:
        assert 0 < c.graphs_ms < c.step_ms
        assert min(c.estimated_ms, c.estimated_bytes) > 0
        assert c.peak_bytes > 2**20
    fastest = min(report.candidates, key=lambda c: c.relative)
    assert fastest.name == report.chosen


class CompileError(Exception):
    """What a backend raises."""


def _raising_backend(gm, inputs, **kwargs):
    raise CompileError("no compiler")


def _stops(rank, how):
    with gloo(rank) as mesh:
        training = Training(rank, mesh, reduce=None)
        timeout = timedelta(seconds=2 if how == "late" else 60)
        given = dict(training.candidates)
        if how == "compile" and rank.rank == 1:
            given["no buckets"] = _raising_backend
        tuner = teb.tune(training.model, given, steps=2, timeout=timeout)
        training.compile(tuner)
        step = tuner.step(training.step)

        def fail():
            raise ValueError("boom")

        if how != "compile":
            step(), step()
            dist.barrier()
        whole = training.digests[-1]
        began = time.monotonic()
        try:
            if rank.rank == 1:
                if how == "late":
                    time.sleep(4)
                step(fail if how == "raise" else lambda: None)
            else:
                step()
        except TuningError as error:
            assert digest(training.model) == whole
            return str(error), error.candidate, error.ranks, time.monotonic() - began
        return None


FAILED = "rank 1 failed before the optimizer's step"


@pytest.mark.parametrize(
    ("how", "texts"),
    [
        ("raise", (FAILED, "ValueError: boom")),
        at_night("late", ("rank 1 did not come to the step in 2 s",)),
        pytest.param(
            "compile", (FAILED, "no compiler"), marks=[pytest.mark.torch, pytest.mark.slow]
        ),
    ],
)
def test_a_rank_that_fails_or_is_late_stops_all_with_the_weights_of_before(how, texts):
    for text, candidate, ranks, seconds in run_ranks(_stops, 2, how, timeout_s=200):
        assert text.startswith(f"candidate 'no buckets': {texts[0]}")
        assert texts[-1] in text
        assert (candidate, ranks) == ("no buckets", (1,))
        assert seconds < 30


def start_ranks(function, ranks, folder):
    """Run ``function`` on ranks that may die; return their exit codes."""
    context = multiprocessing.get_context("spawn")
    store, limit = str(folder / "store"), timedelta(seconds=200)
    given = [Rank(r, ranks, store, limit, None) for r in range(ranks)]
    processes = [context.Process(target=function, args=(r, folder)) for r in given]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(200)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()


def _ends(rank, folder):
    """Kill the last rank before its optimizer; the first of three comes late to that step."""
    with gloo(rank) as mesh:
        training = Training(rank, mesh, reduce=None)
        tuner = teb.tune(training.model, training.candidates, steps=2, timeout=timedelta(seconds=8))
        training.compile(tuner)
        step = tuner.step(training.step)
        step(), step()
        dist.barrier()
        whole = training.digests[-1]
        if rank.rank == 0 and rank.world_size == 3:
            time.sleep(3)
        kill = rank.rank == rank.world_size - 1
        try:
            step(lambda: os.kill(os.getpid(), signal.SIGKILL) if kill else None)
        except TuningError as error:
            same = digest(training.model) == whole
            (folder / str(rank.rank)).write_text(repr((str(error), error.ranks, same)))
            raise


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_is_named_and_no_other_has_changed_a_weight(ranks, tmp_path):
    # run_ranks gives the others half a second once one has died, so they are started by hand.
    killed = ranks - 1
    found = start_ranks(_ends, ranks, tmp_path)
    assert found[killed] == -signal.SIGKILL
    for rank in range(killed):
        text, guilty, same = ast.literal_eval((tmp_path / str(rank)).read_text())
        assert f"rank {killed}" in text
        assert killed in guilty
        assert same
