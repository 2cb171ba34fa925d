"""Bounds on memory that the wanted order misses by little: they are met, at a stated cost.

The graph is the one that compilers ran out of memory on (openxla/xla 45753): in backward, the
gradients of the weights need not be computed before anything else, and putting them off keeps
activations and their gradients alive.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from test_schedule import _MODE, DIM, Trainer, machine, schedule

from torch_ext_bucketing.graph.collectives import started_by
from torch_ext_bucketing.scheduling.memory import PeakMemory
from torch_ext_bucketing.scheduling.overlap import Overlap
from torch_ext_bucketing.scheduling.policy import Policy

pytestmark = pytest.mark.parametrize("fake_world", [2], indirect=True)
LAYERS, ROWS = 12, 16 * DIM


def backward_with_deferrable_gradients() -> fx.GraphModule:
    """Per layer the gradient of the input, which the next layer waits for over the network of
    tensor parallelism, and the gradient of the weight, which nothing waits for."""
    b = Trainer()
    tensor_parallel = dist.new_group([0, 1]).group_name

    def leaf(rows: int, columns: int) -> fx.Node:
        node = b.matrix()
        with _MODE:
            node.meta["val"] = torch.empty(rows, columns)
        return node

    def exchanged(x: fx.Node) -> fx.Node:
        for kind in ("reduce_scatter", "all_gather"):
            x = b.start(kind, x)
            start = started_by(x)
            start.args = (*start.args[:-1], tensor_parallel)
        return x

    weight, x = leaf(DIM, DIM), leaf(ROWS, DIM)
    saved = [leaf(DIM, ROWS) for _ in range(LAYERS)]
    gradients = []
    for i, activation in enumerate(saved):
        y = b.mm(x, weight)
        x = exchanged(y)
        gradients.append(b.start("reduce_scatter", b.mm(activation, y), f"layers.{i}.w"))
    return b.finish([x, *gradients])


def scheduled(policies: Policy | Sequence[Policy]):
    gm = backward_with_deferrable_gradients()
    on = machine(collective_ms=4.0)  # a product takes 16 ms
    return schedule(gm, policies, machine=on, donated=lambda node: True)


def test_a_bound_that_is_missed_by_a_hair_is_met_without_giving_the_gain_away(fake_world):
    wanted = scheduled(Overlap())
    missed_by = wanted.peak_bytes[1] - wanted.peak_bytes[0]
    assert 0 < missed_by < 0.005 * wanted.peak_bytes[0]
    assert wanted.bounds_cost_ms == 0

    kept = scheduled([Overlap(), PeakMemory(ratio=1.0)])
    assert kept.misses == 0
    assert kept.peak_bytes[1] <= kept.limit_bytes == kept.peak_bytes[0]
    assert "waiting where memory is short" in kept.chosen
    # One exchange is waited for, where the most is alive; all others stay hidden.
    assert wanted.step_ms[1] < kept.step_ms[1] == wanted.step_ms[1] + 4.0
    assert kept.step_ms[1] < kept.step_ms[0] - 80
    assert kept.bounds_cost_ms == pytest.approx(4.0)
    assert "bounds cost, ms" in kept.to_text()
    assert not kept.warnings


@pytest.mark.parametrize("ratio", [1.0, 1.005, 1.02, 1.2])
def test_a_looser_bound_costs_no_more(fake_world, ratio):
    report = scheduled([Overlap(), PeakMemory(ratio=ratio)])
    assert report.misses == 0
    assert report.peak_bytes[1] <= ratio * report.reference_bytes
    assert 0 <= report.bounds_cost_ms <= 4.0


def test_a_bound_that_nothing_keeps_is_still_said(fake_world):
    with pytest.warns(UserWarning, match="no order tried needs less"):
        report = scheduled([Overlap(), PeakMemory(ratio=0.5)])
    assert report.misses > 0
    assert report.peak_bytes[1] <= report.peak_bytes[0]
