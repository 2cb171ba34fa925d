"""Groups on one network level share it."""

import random
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.fx as fx
from random_graphs import Trainer

from torch_ext_bucketing.graph.nodes import is_collective, is_compute, started_by
from torch_ext_bucketing.planner.cost.cost import Costs
from torch_ext_bucketing.planner.cost.machine import Machine
from torch_ext_bucketing.planner.schedule.list_schedule import ListScheduler
from torch_ext_bucketing.planner.schedule.merged_model import merged_model
from torch_ext_bucketing.planner.schedule.model import model_of
from torch_ext_bucketing.planner.schedule.policy import Options
from torch_ext_bucketing.planner.schedule.timeline import Streams, Timeline

GROUPS = {"far": [0, 8], "further": [0, 9], "near": [0, 1], "nearer": [0, 2]}
MS = {"far": 4.0, "further": 2.0, "near": 2.0, "nearer": 3.0}


def _two_gathers(first: str, second: str, per_node: int | None = 8) -> tuple[fx.Graph, Machine]:
    """Launch ``first`` at 0 and ``second`` after a product of 1 ms, then wait for both."""
    names = {dist.new_group(GROUPS[g]).group_name: g for g in dict.fromkeys((first, second))}
    by_group = {g: name for name, g in names.items()}
    b = Trainer()
    shards, x = [b.matrix(), b.matrix()], b.matrix()
    waits = [b.start("all_gather", shard) for shard in shards]
    mm = b.mm(x, x)
    starts = [started_by(w) for w in waits]
    for start, group in zip(starts, (first, second), strict=True):
        start.args = (*start.args[:-1], by_group[group])
    starts[0].append(mm)
    mm.append(starts[1])
    gm = b.finish([mm, *waits])

    def estimate(node: fx.Node, nbytes: int | None) -> float:
        return MS[names[node.args[-1]]] if is_collective(node) else float(is_compute(node))

    return gm.graph, Machine(estimate=estimate, ranks_per_node=per_node)


@pytest.mark.parametrize("fake_world", [16], indirect=True)
@pytest.mark.parametrize(
    ("first", "second", "per_node", "ends"),
    [
        # Both between nodes: from 1 to 5 at half the rate, then the first one has 1 ms left.
        ("far", "further", 8, [6.0, 5.0]),
        # The second one inside the node, or the nodes are unknown: each for itself.
        ("far", "near", 8, [4.0, 3.0]),
        ("far", "further", None, [4.0, 3.0]),
        # Inside the node: 1 ms alone, then 1 ms each in 2, and 2 of the second one's 3 are left.
        ("near", "nearer", 8, [3.0, 5.0]),
        # One stream: one after the other.
        ("far", "far", 8, [4.0, 8.0]),
    ],
)
def test_ends_by_hand(fake_world, first, second, per_node, ends):
    graph, machine = _two_gathers(first, second, per_node)
    model = model_of(graph, machine)
    timeline = Timeline.of(model)
    starts = [i for i, group in enumerate(model.group) if group is not None]
    assert [timeline.end[i] for i in starts] == pytest.approx(ends)
    assert timeline.step_ms == pytest.approx(max(ends))
    if per_node and len(set(model.shared.values())) == 1:  # the level has all of it to move
        assert model.paths.bound_ms == pytest.approx(MS[first] + MS[second])
    scheduler = ListScheduler(model, Options())
    order = scheduler.run()
    assert scheduler.end == pytest.approx(Timeline.of(model, order).end)
    assert merged_model(model, [], Costs(machine)).shared == model.shared


def test_a_level_is_never_idle_and_never_faster():
    rng = random.Random(3)
    for _ in range(50):
        count = rng.randint(1, 8)
        group = [rng.choice("abc") for _ in range(count)]
        ms = [rng.choice((0.0, 0.5, 1.0, 3.0)) for _ in range(count)]
        at = sorted(rng.uniform(0, 6) for _ in range(count))
        nodes = {"group": group, "ms": ms, "host": [0.0] * count, "start_of": [-1] * count}
        streams = Streams(SimpleNamespace(**nodes, shared=dict.fromkeys("abc", "level")))
        said = []
        for i, now in enumerate(at):
            streams.now = now
            said.append(streams.would_end(i))
            streams.run(i)
            if i + 1 == count:
                assert streams.end[i] <= said[i] + 1e-9  # at most what it would have to wait
        busy_until = 0.0  # as if all went one after the other: the same total rate
        for now, work in zip(at, ms, strict=True):
            busy_until = max(busy_until, now) + work
        assert streams.last_end() == pytest.approx(busy_until)
        for i, now in enumerate(at):
            alone = Streams(SimpleNamespace(**nodes, shared={}))
            for j in range(i + 1):
                alone.now = at[j]
                alone.run(j)
            assert streams.end[i] >= alone.end[i] - 1e-9
            assert now <= streams.begin[i] <= streams.end[i] + 1e-9
