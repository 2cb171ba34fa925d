"""Lists of passes: their order, their conflicts, and the list that an error suggests."""

import itertools
from dataclasses import dataclass, field

import pytest
import torch
from sharded_models import TwoBlocks
from torch.distributed.device_mesh import init_device_mesh

import torch_ext_bucketing as teb
from torch_ext_bucketing.errors import PassOrderError
from torch_ext_bucketing.passes.add_by_unit import AddByUnit
from torch_ext_bucketing.passes.base import ORDER, GraphPass
from torch_ext_bucketing.passes.combine_uses import CombineUses, MergeAmax
from torch_ext_bucketing.passes.pipeline import DISABLE, Pipeline
from torch_ext_bucketing.passes.reduce_scatter_first import ReduceScatterFirst

UNITS = [["layers.0"], ["layers.1"], ["embedding", "head"]]


REFUSED = {
    r"BucketByCap comes after Schedule and would undo what that decides, the order of the "
    r"nodes\. A list that works: \[BucketByCap, BucketByUnit, Schedule\]": (
        lambda: [teb.Schedule(teb.Overlap()), teb.BucketByCap(), teb.BucketByUnit(UNITS)]
    ),
    "Schedule and Schedule both decide the order of the nodes: give one of them": (
        lambda: [teb.Schedule(teb.Overlap()), teb.ReshardAfterForward(), teb.Schedule([])]
    ),
    "BucketAndSchedule and Schedule both decide the order": (
        lambda: [teb.BucketAndSchedule(teb.Overlap()), teb.Schedule(teb.Overlap())]
    ),
    r"FixedOrderReduce comes after BucketAndSchedule .* "
    r"A list that works: \[BucketAndSchedule\(\.\.\., reduce=FixedOrderReduce\(\)\)\]": (
        lambda: [teb.BucketAndSchedule(teb.Overlap()), teb.FixedOrderReduce()]
    ),
    "both decide which parameters backward gathers again": (
        lambda: [teb.ReshardAfterForward(), teb.ReshardAfterForward(keep=["head"])]
    ),
    "both decide the tags of collectives": lambda: [
        teb.hooks.TagParameters(),
        teb.hooks.TagParameters(),
    ],
}


@pytest.mark.parametrize("match", REFUSED)
def test_a_list_in_which_passes_undo_each_others_work_is_refused(match):
    with pytest.raises(PassOrderError, match=match):
        teb.backend("aot_eager", REFUSED[match]())


def test_the_right_order_is_taken():
    passes = [teb.BucketByCap(), teb.BucketByUnit(UNITS), teb.Schedule(teb.Overlap())]
    assert Pipeline(passes).forward_backward == tuple(passes)


def test_a_pass_that_misses_what_it_requires_is_refused():
    class Needs(GraphPass):
        stage = "forward_backward"
        requires = frozenset({ORDER})

        def run(self, graph, compilation):
            raise AssertionError("only looked at")

    text = "Needs requires the order of the nodes, which no pass before it provides"
    with pytest.raises(PassOrderError, match=text) as refused:
        Pipeline([Needs(), teb.Schedule(teb.Overlap())])
    assert [p.name for p in refused.value.working] == ["Schedule", "Needs"]
    with pytest.raises(PassOrderError, match=text) as refused:
        Pipeline([Needs(), teb.BucketByCap()])
    assert [p.name for p in refused.value.working] == ["BucketByCap"]
    assert len(Pipeline([teb.Schedule(teb.Overlap()), Needs()]).forward_backward) == 2


# -- advice -------------------------------------------------------------------------------------


def one_of_each(world):
    mesh, model = init_device_mesh("cpu", (world,)), TwoBlocks()
    passes = [
        teb.hooks.TagParameters(),
        AddByUnit(model, ["layers.0", "layers.1", ""]),
        CombineUses(),
        MergeAmax(),
        ReduceScatterFirst(),
        teb.ReshardAfterForward(),
        teb.SeparateGroups(mesh),
        teb.BucketByUnit(UNITS),
        teb.BucketByCap(),
        teb.FixedOrderReduce(),
        teb.Schedule(teb.Overlap()),
        teb.BucketAndSchedule(teb.Overlap()),
        teb.BucketAndSchedule(teb.Overlap(), reduce=teb.FixedOrderReduce(torch.float64)),
    ]
    classes = {getattr(teb, name) for name in teb.__all__}
    known = {c for c in classes if isinstance(c, type) and issubclass(c, GraphPass)} - {GraphPass}
    # MatchFSDP2 stands for four that are listed here.
    assert {type(p) for p in passes} >= known - {teb.MatchFSDP2}
    return passes


def test_following_the_advice_works_for_every_list_of_three(fake_world):
    """Every pair is in such a list; a pass may be in it twice."""
    refused = set()
    for given in itertools.product(one_of_each(fake_world), repeat=3):
        working = advice(given)
        if working is None:
            continue
        refused.update(itertools.combinations([p.name for p in given], 2))
        assert working, given
        Pipeline(working)
        # The list has each pass, or a pass with it as a part, or one that decides the same.
        kept = {q for p in working for q in (p, *p.parts)}
        decided = {fact for p in kept for fact in p.provides}
        for p in given:
            assert p in kept or decided.issuperset(p.provides), given
    assert ("BucketAndSchedule", "FixedOrderReduce") in refused
    assert ("FixedOrderReduce", "BucketAndSchedule") in refused


def advice(given):
    """Return the list that the error suggests; None without an error."""
    try:
        Pipeline(given)
    except PassOrderError as error:
        return error.working
    return None


def test_a_pass_that_can_be_a_part_becomes_one(fake_world):
    both = [teb.BucketAndSchedule(teb.Overlap(depth=3), kinds=["all_gather"])]
    sums = teb.FixedOrderReduce(torch.float64)
    for given in ([*both, sums], [sums, *both]):
        with pytest.raises(PassOrderError) as refused:
            Pipeline(given)
        *_, merged = refused.value.working
        assert isinstance(merged, teb.BucketAndSchedule)
        assert merged.reduce is sums
        assert merged.policies == both[0].policies
        assert merged.kinds == both[0].kinds


# -- passes of a user ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Limited(GraphPass):
    """A pass like the one in the documentation."""

    stage = "forward_backward"
    limit: int = 3
    names: list[str] = field(default_factory=list)

    def run(self, graph, compilation):
        raise AssertionError("only looked at")


def test_fields_are_the_settings():
    assert Limited().settings() == (3, [])
    assert Limited(4).settings() == (4, [])
    assert repr(Limited(4)) == "Limited(limit=4, names=[])"


def test_a_pass_that_is_not_hashable_runs():
    limited = Limited(names=["a"])
    with pytest.raises(TypeError, match="unhashable"):
        hash(limited)
    assert Pipeline([limited]).forward_backward == (limited,)


def test_a_subclass_that_adds_nothing_has_the_settings_of_its_base():
    class Own(teb.BucketByCap):
        """A subclass with another name."""

    assert Own(25).settings() == teb.BucketByCap(25).settings()
    assert repr(Own(25)) == "Own(cap_mb=25)"


def test_settings_that_are_in_no_field_keep_the_caches_away(caplog):
    class Own(GraphPass):
        stage = "forward_backward"

        def __init__(self, limit):
            self.limit = limit

        def run(self, graph, compilation):
            raise AssertionError("only looked at")

    class Named(Own):
        def settings(self):
            return (self.limit,)

    assert Own(3).uuid() is None
    assert "make it a frozen dataclass, or define settings()" in caplog.text
    assert Named(3).settings() == (3,)


# -- MatchFSDP2: four rewrites under one name -------------------------------------------------------

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
