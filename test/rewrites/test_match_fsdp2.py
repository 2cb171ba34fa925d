"""``MatchFSDP2``: four rewrites under one name. ``test_recipe`` and the parity rows train with it."""

import pytest
from sharded_models import TwoBlocks

import torch_ext_bucketing as teb
from torch_ext_bucketing.passes.pipeline import DISABLE, Pipeline

PARTS = ["AddByUnit", "CombineUses", "MergeAmax", "ReduceScatterFirst"]


def joint_passes(*passes):
    return [p.name for p in Pipeline(passes).joint if p.name != "TagParameters"]


def match():
    model = TwoBlocks()
    return teb.MatchFSDP2(model, teb.transformer_block_plan(model))


def test_a_pipeline_runs_the_passes_that_it_stands_for():
    assert joint_passes(match()) == PARTS
    assert joint_passes(teb.MatchFSDP2()) == PARTS[1:]


@pytest.mark.parametrize("off", [*PARTS, "MatchFSDP2"])
def test_it_and_each_part_can_be_switched_off(monkeypatch, off):
    monkeypatch.setenv(DISABLE, off)
    assert joint_passes(match()) == [p for p in PARTS if off not in (p, "MatchFSDP2")]
    assert Pipeline([match()]).disabled == (off,)


def test_units_and_model_belong_together():
    with pytest.raises(TypeError, match="give model and units, or neither"):
        teb.MatchFSDP2(TwoBlocks())
    with pytest.raises(TypeError, match="give model and units, or neither"):
        teb.MatchFSDP2(units=["a"])
