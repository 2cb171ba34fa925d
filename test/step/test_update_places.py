"""Where updates stand without clipping: ahead of the wait for the last reduction."""

import re
from dataclasses import replace

import pytest
import torch
from sharded_models import small_transformer
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.graph.nodes import is_wait, kind_of
from torch_ext_bucketing.planner.cost.machine import H100
from torch_ext_bucketing.step.rules import UPDATE

pytestmark = pytest.mark.torch

UNITS = ["blocks.0", "blocks.1", ""]
TOKENS = torch.zeros(2, 8, dtype=torch.long)
NO_HOST = replace(H100, host_ms={})
"""The host would bound so small a model, and no order would fill a wait sooner than another."""


@pytest.fixture
def model(fake_world):
    torch._dynamo.reset()
    return teb.data_parallel(small_transformer(), init_device_mesh("cpu", (fake_world,)))


def loss_of(model, tokens):
    return model(tokens).float().logsumexp(-1).mean()


def planned(model, passes, compiler):
    adam = torch.optim.AdamW(model.parameters(), foreach=True)
    return teb.train_step(model, adam, loss_of, passes=passes, compiler=compiler)


def passes_of(model, goal):
    """Return passes that make several buckets, which the caps of "speed" are too large for."""
    if goal == "parity":
        return teb.recipe(model, units=UNITS, machine=NO_HOST)
    *first, _ = teb.recipe(model, "speed")
    return [*first, teb.BucketByUnit(UNITS), teb.Schedule([teb.Overlap()], machine=NO_HOST)]


def filled(steps):
    """Return whether all buckets but the last are updated before that is waited for."""
    assert sorted(steps) == ["update"] * len(UNITS) + ["wait"] * len(UNITS)
    return steps[-2:] == ["wait", "update"]


def is_reduced(node):
    return is_wait(node) and kind_of(node.args[0]) == "reduce_scatter"


@pytest.mark.parametrize("goal", ["parity", "speed"])
def test_updates_fill_the_wait_for_the_last_reduction(model, goal):
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return gm.forward

    planned(model, passes_of(model, goal), keep)(TOKENS)
    nodes = list(graphs[-1].nodes)
    place = {node: i for i, node in enumerate(nodes)}
    steps = ["wait" if is_reduced(n) else "update" for n in nodes if is_reduced(n) or _updates(n)]
    assert filled(steps)
    for update in filter(_updates, nodes):
        for gradient in update.args[1]:
            assert max(map(place.__getitem__, gradient.users)) == place[update]


def _updates(node):
    return node.target is UPDATE


@pytest.mark.slow
def test_inductor_keeps_them_there(model):
    step = planned(model, passes_of(model, "parity"), "inductor")
    _, codes = run_and_get_code(step, TOKENS)
    backward = codes[-1]
    # Inductor names a wait's argument: the buffer that its reduction has written.
    found = re.findall(r"(wait_tensor)\.default\((\w+)\)|\.(update_)\.default\(", backward)
    reduced = set(re.findall(r"(\w+) = torch\.ops\._c10d_functional\.reduce_scatter", backward))
    steps = [wait or update for wait, of, update in found if update or of in reduced]
    assert filled([step.partition("_")[0] for step in steps])
