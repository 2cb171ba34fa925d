"""The choice among candidates by the figures of all ranks."""

import json
import math

from torch_ext_bucketing.tuning.choice import (
    CandidateReport,
    Figures,
    TuneReport,
    best_of,
    combine,
)

INF = math.inf


def steps(*ms, peak=100):
    return [Figures(step, step - 1.0, peak) for step in ms]


def test_the_slowest_rank_of_a_step_counts_before_the_median_does():
    # Each rank alone has a median of 10 for "a"; together they never take less than 20.
    ranks = [
        {"a": steps(10, 20, 10, 20, 10), "b": steps(15, 15, 15, 15, 15)},
        {"a": steps(20, 10, 20, 10, 20), "b": steps(15, 15, 15, 15, 15)},
    ]
    found = combine(ranks, None)
    assert [c.step_ms for c in found] == [20, 15]
    assert best_of(found).name == "b"
    assert [c.graphs_ms for c in found] == [19, 14]


def test_a_step_in_which_a_rank_compiles_does_not_count():
    ranks = [{"a": steps(5, 10, 10)}, {"a": steps(INF, 11, 12)}]
    assert combine(ranks, None)[0].step_ms == 11.5
    ranks = [{"a": steps(5)}, {"a": steps(INF)}]
    assert combine(ranks, None)[0].step_ms == INF


def test_a_machine_whose_speed_drifts_does_not_change_the_choice():
    # "b" is faster in every round, but its steps happen to have the larger median.
    ranks = [{"a": steps(10, 30, 11, 40), "b": steps(9, 28, 10, 38)}]
    drifting = [{"a": steps(10, 10, 10, 30), "b": steps(9, 9, 28, 28)}]
    assert best_of(combine(ranks, None)).name == "b"
    found = combine(drifting, None)
    assert found[0].step_ms < found[1].step_ms
    assert best_of(found).name == "b"


def test_the_first_rounds_of_those_compared_again_count_too():
    ranks = [{"a": steps(10, 10, 10), "b": steps(11, 9, 9), "c": steps(20)}]
    assert best_of(combine(ranks, None, ["a", "b"])).name == "b"


def test_a_bound_excludes_the_fastest_candidate():
    ranks = [
        {"a": steps(10, peak=90), "b": steps(20, peak=50), "c": steps(15, peak=60)},
        {"a": steps(10, peak=70), "b": steps(20, peak=50), "c": steps(15, peak=61)},
    ]
    assert best_of(combine(ranks, None)).name == "a"
    found = combine(ranks, 80)  # one rank of "a" is above
    assert [c.fits for c in found] == [False, True, True]
    assert best_of(found).name == "c"
    assert best_of(combine(ranks, 10)).name == "b"  # none fits: the least memory


def test_the_first_of_equal_candidates_is_kept():
    assert best_of(combine([{"b": steps(3), "a": steps(3)}], None)).name == "b"


def test_the_report_shows_measured_beside_estimated_and_survives_json():
    candidates = (
        CandidateReport("a", 12.5, 10.0, 2**30, False, 8.0, 2**20),
        CandidateReport("b", 13.0, 11.0, 2**29),
    )
    report = TuneReport("b", candidates, 3, 2, 2**29, True)
    text = report.to_text()
    assert "b (chosen)" in text
    assert [n for n in ("12.50", "8.00") if n not in text] == []
    assert "1.000 GiB, above the bound" in text
    assert "bits depend on the choice" in text
    assert TuneReport.from_dict(json.loads(report.to_json())) == report
