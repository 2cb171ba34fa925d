"""Live bytes by part."""

import pytest
import torch
import torch.distributed as dist
from marks import at_night
from sharded_models import TwoBlocks
from torch.distributed.device_mesh import init_device_mesh

from torch_ext_bucketing.explain import explain
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.planner.schedule.picture import PARTS

RANKS = 2


def two_blocks():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return data_parallel(TwoBlocks(), mesh), torch.zeros(2, 3, dtype=torch.long)


@pytest.fixture(scope="module", params=[None, at_night("all_to_all")])
def drawn(request):
    torch._dynamo.reset()
    target = f"{__name__}:two_blocks"
    yield explain(target, reduce=request.param, world_size=RANKS, draw=True).drawn
    torch._dynamo.reset()


def test_parts_add_up_to_the_live_bytes(drawn):
    for d in drawn:
        assert [*map(sum, zip(*d.live.values(), strict=True))] == list(d.timeline.live)
        assert [*d.live] == [*PARTS]


def test_each_part_is_what_its_nodes_are_for(drawn):
    whole = sum(p.numel() * p.itemsize for p in TwoBlocks().parameters())
    shard = whole // RANKS
    forward, merged, backward, after = (d.live for d in drawn)
    for live in (forward, merged, backward, after):
        assert set(live["parameters"]) == {shard}
    # One parameter after the other is gathered and freed, or all of a unit by one buffer.
    assert max(forward["buckets"]) == 0 < max(forward["gathered"]) < whole
    assert max(merged["buckets"]) > 0
    assert 0 < max(merged["gathered"]) < whole
    assert max(backward["buckets"]) == 0 < max(after["buckets"])
    for live in (forward, merged):
        assert max(live["gradients"]) == 0
    for live in (backward, after):
        assert live["gradients"][0] == 0
        assert live["activations"][0] == forward["activations"][-1] > live["activations"][-1]
    for d in drawn[2:]:
        of_storage, live = d.parts.of_storage, d.model.liveness
        kept = [live.size[s] for s in live.kept if of_storage[s] == "gradients"]
        assert sum(kept) == shard  # the reduced ones
    # The head stays gathered, as eager FSDP2's last unit does.
    kept = forward["gathered"][-1]
    assert kept == merged["gathered"][-1] == backward["gathered"][0] == after["gathered"][0] > 0
