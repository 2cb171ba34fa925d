"""Test the memory of pipeline stages against numbers computed by hand."""

import itertools
import random

import pytest
import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from torch_ext_bucketing.planner.keep.stages import (
    StageBytes,
    bytes_of,
    held_by_stages,
    stage_reports,
    views_of,
    with_residency,
)
from torch_ext_bucketing.reports.compile import CompileReport

STAGE = StageBytes(gathered=100, saved=10, gradients=200, running={"F": 1, "B": 2, "W": 3, "I": 4})
BOTH = {0: STAGE, 1: StageBytes(1000, 0, 0, {"UNSHARD": 7})}


def actions_in(schedule: str) -> list[tuple[tuple[int, str], ...]]:
    return [tuple((int(one[0]), one[1:]) for one in word.split(",")) for word in schedule.split()]


@pytest.mark.parametrize(
    ("schedule", "stages", "gathers", "under_way", "peak", "rank_peak"),
    [
        ("0UNSHARD 0F 0B 0REDUCE_GRAD 0RESHARD", {0: STAGE}, 1, 1, 312, 312),
        ("0UNSHARD 0F 0F 0F 0B 0B 0B 0REDUCE_GRAD", {0: STAGE}, 1, 3, 332, 332),
        ("0UNSHARD 0F 0I 0W", {0: STAGE}, 1, 1, 313, 313),
        ("0F 0RESHARD 0F 0B 0B", {0: STAGE}, 2, 2, 322, 322),
        ("0F 0RESHARD 1F 1RESHARD 0I 0RESHARD 1B 0W", BOTH, 3, 1, 313, 1313),
        ("0UNSHARD 1UNSHARD 0F 0B,1F", BOTH, 1, 1, 312, 1312),
        ("0UNSHARD 0F 0B 0REDUCE_GRAD 0RESHARD 1UNSHARD", BOTH, 1, 1, 312, 1007),
        ("0UNSHARD 0F 1UNSHARD 2SEND_F 0B", BOTH, 1, 1, 312, 1312),
    ],
)
def test_a_schedule_is_added_up(schedule, stages, gathers, under_way, peak, rank_peak):
    actions = actions_in(schedule)
    compiled = {stage: CompileReport() for stage in stages}
    report = stage_reports(actions, compiled, stages)[0]
    found = (report.gathers, report.under_way, report.peak_bytes, report.rank_peak_bytes)
    assert found == (gathers, under_way, peak, rank_peak)
    assert f"gathered {gathers} and reduced {schedule.count('REDUCE')} times" in report.to_text()


def test_what_a_graph_saves_is_not_what_it_was_given():
    def forward(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x @ weight
        return hidden.sum(), weight.t(), hidden, x

    gm: fx.GraphModule = make_fx(forward, tracing_mode="fake")(torch.ones(4, 8), torch.ones(2, 4))
    assert bytes_of(gm.graph, outputs_from=1) == (2 * 8 * 4, 2 * 8 * 4 + 4)
    weight, _ = gm.graph.find_nodes(op="placeholder")
    assert views_of(gm.graph, [weight]) == [False, True, False, False]


def held(actions, made, stages):
    """Return bytes gathered in a step and the peak, with other gathers and releases."""
    found, peak = held_by_stages([actions[a] if isinstance(a, int) else a for a in made], stages)
    return sum(stages[s].gathered * of.gathers for s, of in found.items()), peak


@pytest.mark.parametrize("seed", range(40))
def test_parameters_stay_where_that_gathers_the_fewest_bytes_under_a_bound(seed):
    """Compare with every way to keep some stages after each action."""
    rng = random.Random(seed)
    stages = {
        s: StageBytes(
            gathered=rng.randint(1, 9),
            saved=rng.randint(0, 4),
            gradients=rng.randint(0, 4),
            running={"F": rng.randint(0, 5), "B": rng.randint(0, 5)},
            reads=frozenset("FBIW" if rng.random() < 0.8 else "F"),
        )
        for s in range(rng.randint(1, 2))
    }
    queue = [(s, i) for i in range(2) for s in stages]
    begun = rng.sample(queue, len(queue))
    actions = actions_in(" ".join(f"{s}F" for s, _ in begun))
    actions += actions_in(" ".join(f"{s}B" for s, _ in rng.sample(begun, len(begun))))
    each = []
    for action in actions:
        ((stage, kind),) = action
        needed = {stage} if kind in stages[stage].reads else set()
        others = [s for s in stages if s not in needed]
        sets = [c for n in range(len(others) + 1) for c in itertools.combinations(others, n)]
        each.append([needed.union(c) for c in sets])
    ways = set()
    for path in itertools.product(*each):
        made, resident = [], set()
        for i, now in enumerate(path):
            made += [((s, "RESHARD"),) for s in resident - now]
            made += [((s, "UNSHARD"),) for s in now - resident]
            made.append(i)
            resident = now
        ways.add(held(actions, made, stages))
    least = min(peak for _, peak in ways)
    for bound in (None, *range(least - 1, max(peak for _, peak in ways) + 1)):
        cost, peak = held(actions, with_residency(actions, stages, bound), stages)
        allowed = float("inf") if bound is None else max(bound, least)
        assert peak <= allowed
        assert cost == min(cost for cost, peak in ways if peak <= allowed)
