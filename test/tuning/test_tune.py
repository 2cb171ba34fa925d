"""The tuner in one process: turns, agreement on a fake clock, bounds, records."""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch._inductor.runtime.autotune_cache import AutotuneCacheArtifact
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager

import torch_ext_bucketing as teb
from torch_ext_bucketing.errors import BoundNotKeptWarning, TuningError
from torch_ext_bucketing.tuning import tune as module

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Clock:
    """Moves on as the candidates run; a stand-in for :class:`.Meter`."""

    def __init__(self):
        self.ms, self.peak, self.device = 0.0, 0, torch.device("cpu")

    def now_ms(self):
        return self.ms

    def restart_peak(self):
        self.peak = 0

    def peak_bytes(self):
        return self.peak


class Named:
    """A backend that runs the graph as it is, and takes some time and memory on the clock."""

    def __init__(self, name, clock, ms, peak=1):
        self.name, self.clock, self.ms, self.peak = name, clock, ms, peak
        self.compiled, self.ran = 0, []

    def __call__(self, gm, inputs, **kwargs):
        self.compiled += 1

        def run(*args):
            self.ran.append(self.name)
            self.clock.ms += self.ms
            self.clock.peak = max(self.clock.peak, self.peak)
            return gm(*args)

        return run

    def uuid(self):
        return self.name


class Training:
    """A module, its tuner on a fake clock, and a step that squares the module's weight."""

    def __init__(self, monkeypatch, ms, peaks=None, others=(), **options):
        self.clock = Clock()
        monkeypatch.setattr(module, "Meter", lambda device: self.clock)
        self.model = nn.Linear(2, 2)
        peaks = peaks or {}
        self.named = {n: Named(n, self.clock, t, peaks.get(n, 1)) for n, t in ms.items()}
        self.tuner = teb.tune(self.model, self.named, **options)
        if others:
            self.tuner._meeting = SimpleNamespace(size=2, candidate="", meet=self.meet)
            self.others = others
        self.run = torch.compile(self.model, backend=self.tuner)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.step = self.tuner.step(self.plain_step)
        self.points = []

    def meet(self, point, value=""):
        """Stand for a second rank with figures of its own."""
        self.points.append(point)
        if point != "the choice":
            return [value, value]
        mine, estimates = json.loads(value)
        theirs = {n: [[ms, ms, 1] for ms in self.others[n][: len(mine[n])]] for n in mine}
        return [value, json.dumps([theirs, estimates])]

    def plain_step(self):
        self.run(torch.ones(1, 2)).sum().backward()
        self.clock.ms += 5.0  # the optimizer's
        self.optimizer.step()
        self.optimizer.zero_grad()

    def until_chosen(self):
        taken = 0
        while self.tuner.chosen is None and taken < 30:
            self.step()
            taken += 1
        return taken


def test_candidates_take_turns_and_the_fastest_is_kept(monkeypatch):
    with fresh_cache():
        t = Training(monkeypatch, {"a": 30.0, "b": 10.0, "c": 20.0}, steps=2)
        weight = t.model.weight.detach().clone()
        assert t.until_chosen() == 9
        assert t.tuner.chosen == "b"
        report = t.tuner.report
        # Backward is not compiled by these backends, so it takes no time.
        assert [(c.name, c.graphs_ms) for c in report.candidates] == [
            ("a", 35),
            ("b", 15),
            ("c", 25),
        ]
        assert report.steps == 2
        assert not torch.equal(t.model.weight, weight)
        assert all(len(n.ran) == 3 and n.compiled == 1 for n in t.named.values())
        t.step()
        assert [len(t.named[n].ran) for n in "abc"] == [3, 4, 3]


def test_close_candidates_are_measured_again(monkeypatch):
    with fresh_cache():
        t = Training(monkeypatch, {"a": 104.0, "b": 100.0, "c": 200.0}, steps=2)
        assert t.until_chosen() == 3 * (1 + 2) + 2 * 2
        assert (t.tuner.chosen, t.tuner.report.steps) == ("b", 4)
        assert [len(t.named[n].ran) for n in "abc"] == [5, 5, 3]


def test_the_slowest_rank_decides_for_all(monkeypatch):
    with fresh_cache():
        others = {"a": [12.0, 12.0], "b": [50.0, 50.0]}
        t = Training(monkeypatch, {"a": 11.0, "b": 1.0}, others=others, steps=2)
        assert t.until_chosen() == 6
        assert t.tuner.chosen == "a"  # alone this rank would take "b"
        assert [c.step_ms for c in t.tuner.report.candidates] == [16.0, 50.0]
        assert t.points == [
            "the step",
            "the look-up of an earlier choice",
            "the end of compiling",
            "the optimizer's step",
            *["the step", "the optimizer's step"] * 5,
            "the choice",
        ]


def test_a_bound_on_memory_excludes_a_candidate(monkeypatch):
    with fresh_cache():
        ms, peaks = {"a": 10.0, "b": 20.0}, {"a": 2**31, "b": 2**29}
        t = Training(monkeypatch, ms, peaks, memory=teb.PeakMemory(gib=1), steps=1)
        t.until_chosen()
        assert t.tuner.chosen == "b"
        t = Training(monkeypatch, ms, peaks, memory=teb.PeakMemory(gib=0.1), steps=1)
        with pytest.warns(BoundNotKeptWarning, match="'b' needs least"):
            t.until_chosen()


@pytest.mark.torch
def test_a_step_that_compiles_is_measured_again(monkeypatch):
    with fresh_cache():
        t = Training(monkeypatch, {"a": 10.0, "b": 20.0}, steps=1)
        t.step(), t.step(), t.step()
        torch._dynamo.reset()  # the second step of "a" was measured, that of "b" compiles
        t.step()
        assert t.tuner.chosen is None
        assert t.until_chosen() == 2
        assert t.tuner.report.candidates[1].step_ms == 25.0


def test_a_later_start_takes_the_choice_without_measuring(monkeypatch):
    with fresh_cache():
        first = Training(monkeypatch, {"a": 30.0, "b": 10.0}, steps=1)
        first.until_chosen()
        torch._dynamo.reset()
        again = Training(monkeypatch, {"a": 1.0, "b": 2.0}, steps=1)
        assert again.until_chosen() == 1
        assert again.tuner.chosen == "b"
        assert again.tuner.report.from_cache
        assert again.named["a"].compiled == 0  # only the chosen one is compiled
        assert again.tuner.report.candidates == first.tuner.report.candidates
        for other in (
            {"ms": {"a": 1.0, "c": 2.0}},
            {"ms": {"a": 1.0, "b": 2.0}, "memory": teb.PeakMemory(gib=1)},
        ):
            torch._dynamo.reset()
            assert Training(monkeypatch, **other, steps=1).until_chosen() == 4


def test_ranks_without_the_same_record_measure(monkeypatch):
    with fresh_cache():
        Training(monkeypatch, {"a": 30.0, "b": 10.0}, steps=1).until_chosen()
        torch._dynamo.reset()
        others = {"a": [1.0], "b": [2.0]}
        t = Training(monkeypatch, {"a": 30.0, "b": 10.0}, others=others, steps=1)

        def meet(point, value=""):
            return [value, ""] if "look-up" in point else Training.meet(t, point, value)

        t.tuner._meeting.meet = meet
        assert t.until_chosen() == 4


def test_a_candidate_without_identity_is_measured_at_every_start(monkeypatch):
    with fresh_cache():
        for _ in range(2):
            torch._dynamo.reset()
            t = Training(monkeypatch, {"a": 30.0, "b": 10.0}, steps=1)
            t.tuner.candidates["a"] = lambda gm, inputs, **kwargs: gm
            assert t.until_chosen() == 4


def test_an_error_of_a_step_names_the_candidate_and_leaves_the_weights(monkeypatch):
    with fresh_cache():
        t = Training(monkeypatch, {"a": 30.0, "b": 10.0})
        t.step()
        weight = t.model.weight.detach().clone()

        def raising():
            t.run(torch.ones(1, 2)).sum().backward()
            raise ValueError("no")

        with pytest.raises(TuningError, match=r"'b': rank 0 failed .*ValueError: no") as raised:
            t.tuner.step(raising)()
        assert (raised.value.ranks, raised.value.candidate) == ((0,), "b")
        assert torch.equal(t.model.weight, weight)
        with pytest.raises(TuningError, match="ValueError: no"):
            t.step()  # the ranks have stopped


def test_options_are_checked():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="at least one candidate"):
        teb.tune(model, {})
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1"):
        teb.tune(model, {"a": "eager"}, steps=0)
    with pytest.raises(ValueError, match="PeakMemory"):
        teb.tune(model, {"a": "eager"}, memory=teb.PeakMemory(ratio=1.1))


@pytest.mark.torch
def test_a_choice_travels_in_cache_artifacts(monkeypatch):
    CacheArtifactManager.clear()
    with fresh_cache():
        Training(monkeypatch, {"a": 30.0, "b": 10.0}, steps=1).until_chosen()
        saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    for _ in range(2):
        with fresh_cache():
            torch.compiler.load_cache_artifacts(saved[0])
            CacheArtifactManager.clear()
            torch._dynamo.reset()
            t = Training(monkeypatch, {"a": 1.0, "b": 2.0}, steps=1)
            assert t.until_chosen() == 1
            assert t.tuner.report.from_cache
            saved = torch.compiler.save_cache_artifacts()  # and on from there
        assert saved is not None


def test_a_choice_is_taken_from_a_folder_that_can_not_be_written(monkeypatch):
    def write(self):
        raise PermissionError(self.key)

    with fresh_cache():
        Training(monkeypatch, {"a": 30.0, "b": 10.0}, steps=1).until_chosen()
        torch._dynamo.reset()
        monkeypatch.setattr(AutotuneCacheArtifact, "populate_cache", write)
        t = Training(monkeypatch, {"a": 1.0, "b": 2.0}, steps=1)
        assert t.until_chosen() == 1
        assert t.tuner.report.from_cache


def test_the_bound_reaches_the_default_candidates(monkeypatch):
    given = []
    monkeypatch.setattr(
        module, "default_candidates", lambda model, memory: given.append(memory) or {"a": "eager"}
    )
    bound = teb.PeakMemory(gib=1)
    teb.tune(nn.Linear(2, 2), memory=bound)
    assert given == [bound]
