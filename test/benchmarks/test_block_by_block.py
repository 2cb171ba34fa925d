"""``benchmarks.block_by_block``: FSDP2's order, and the number of compiles."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_ext_bucketing as teb
from benchmarks.block_by_block import InFSDP2Order, Planner, compiles
from torch_ext_bucketing.fsdp.shard import data_parallel
from torch_ext_bucketing.graph.nodes import is_compute, kind_of, member_tags, started_by
from torch_ext_bucketing.passes.base import GraphPass
from torch_ext_bucketing.testing.training import ModelConfig, Transformer


@dataclass(frozen=True, eq=False, repr=False)
class Record(GraphPass):
    """Lists what each graph launches, awaits and computes, by unit."""

    stage = "forward_backward"
    graphs: list[Any]

    def run(self, graph, compilation):
        events = [""]
        for node in graph.nodes:
            start = started_by(node) or node
            if kind := kind_of(start):
                first, number, *_ = member_tags(start)[0].fqns[0].split(".")
                unit = {"embed": "E", "blocks": number}.get(first, "H")
                event = f"{'launch' if start is node else 'await'} {kind} {unit}"
            else:
                event = "compute" if is_compute(node) else events[-1]
            events += [event] if event != events[-1] else []
        self.graphs.append(events[1:])


def test_order_of_launches_and_waits():
    """Two blocks between an embedding and a head, whose parameters stay gathered."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    model = data_parallel(Transformer(ModelConfig(layers=2)), init_device_mesh("cpu", (8,)))
    graphs = []
    passes = [*teb.recipe(model)[:-1], InFSDP2Order(), Record(graphs)]
    run = torch.compile(model, backend=Planner("aot_eager", passes, model))
    run(torch.zeros(1, 16, dtype=torch.long)).sum().backward()
    dist.destroy_process_group()
    forward, backward = graphs
    assert forward == [
        *("launch all_gather E", "launch all_gather 0"),
        *("await all_gather E", "launch all_gather 1"),
        *("await all_gather 0", "launch all_gather H", "compute"),
        *("await all_gather 1", "compute"),
        *("await all_gather H", "compute"),
    ]
    assert [event for event in backward if "reduce_scatter" not in event] == [
        *("launch all_gather 1", "compute", "await all_gather 1", "launch all_gather 0"),
        *("compute", "await all_gather 0", "compute"),
    ]
    assert [event for event in backward if "reduce_scatter" in event] == [
        f"{verb} reduce_scatter {unit}" for unit in "H10E" for verb in ("launch", "await")
    ]


def test_compiles_do_not_grow_with_depth():
    assert compiles(2) == compiles(5) == 1
