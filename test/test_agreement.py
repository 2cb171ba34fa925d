"""Ranks compare what they launch: real ranks that agree, differ, die and have caches."""

from __future__ import annotations

import re

import agreement_ranks
import pytest
import torch
from collective_graphs import all_gather, all_reduce, trace

import torch_ext_bucketing as teb
from torch_ext_bucketing.agreement import exchange as agreement
from torch_ext_bucketing.agreement.before_run import agree
from torch_ext_bucketing.agreement.differences import Version, mismatch_text
from torch_ext_bucketing.agreement.launches import (
    GraphLaunches,
    GroupLaunches,
    Launch,
    Member,
    launches_of,
)
from torch_ext_bucketing.testing.ranks import run_ranks


def on_ranks(function, *args, world=2):
    """A function of ``agreement_ranks`` on ranks of one group; the results by rank."""
    return run_ranks(agreement_ranks.in_group, world, function, *args, timeout_s=300)


@pytest.mark.once
def test_ranks_that_disagree():
    ranks = on_ranks(agreement_ranks.disagree)
    differ = (
        "other model",
        "other hook",
        "other units",
        "other schedule",
        "other times",
        "no buckets",
        "other float8",
    )
    for result in ranks:
        for case in ("same", "second step", "recompiled by one", "off"):
            assert result[case][0] is None, result[case]
        assert result["keys left"] == 0
        for case in differ:
            assert result[case][0] == "PlanMismatchError", (case, result[case])
            assert "group '0' (2 ranks)" in result[case][1]
    assert [r["compiles"] for r in ranks] == [1, 2]
    # Without a comparison nothing is raised, and the gradients are wrong.
    assert all(r["mixed"] for r in ranks)
    # Every rank says the same, with both versions.
    for case in differ:
        assert ranks[0][case][1] == ranks[1][case][1]

    def lines(case):
        return [line.strip() for line in ranks[0][case][1].splitlines()]

    hook = lines("other hook")
    assert hook[1] == "The first to differ is collective 1 of 3 on this group:"
    assert hook[2:5] == [
        "rank 0: all_gather float32, bucket of 2: embedding.weight at byte 0, 252 bytes float32; "
        "head.weight at byte 252, 252 bytes float32",
        "rank 1: all_gather float32, bucket of 2: head.weight at byte 0, 252 bytes float32; "
        "embedding.weight at byte 252, 252 bytes float32",
        "(their members differ from number 1 on)",
    ]
    model = lines("other model")
    assert model[1] == "The first to differ is collective 2 of 3 on this group:"
    for rank in (0, 1):
        assert model[2 + rank].startswith(
            f"rank {rank}: all_gather float32, bucket of 2: layers.{rank}.weight at byte 0"
        )
    assert "rank 1: all_gather float32, embedding.weight at byte 0" in lines("no buckets")[3]
    # The same bytes, of other values.
    for rank, kind in enumerate(("e4m3fn", "e5m2")):
        assert f"head.weight at byte 224, 56 bytes float8_{kind}" in lines("other float8")[2 + rank]
    # Scheduling changes no bucket here, but the order in which they are launched.
    schedule = lines("other schedule")
    assert "backward graph" in schedule[0]
    kinds = {line.split(": ")[1].split()[0] for line in schedule[2:4]}
    assert kinds == {"all_gather", "reduce_scatter"}
    # Nor do times change anything here, until the model changes.
    times = lines("other times")
    assert times[1] == "They planned with different times or size hints:"
    for rank in (0, 1):
        assert re.fullmatch(
            rf"rank {rank}: machine measured \w{{12}}, size hints None", times[2 + rank]
        )
    assert "Their collectives are still the same" in times[4]


def test_a_mismatch_reaches_the_other_groups_of_a_mesh():
    ranks = on_ranks(agreement_ranks.in_another_group, world=4)
    for result in ranks:
        error, text, _ = result["backward"]
        assert error == "PlanMismatchError", text
        assert "rank 2: reduce_scatter" in text
        assert "rank 3: reduce_scatter" in text


@pytest.mark.once
def test_ranks_that_are_gone():
    _, alive, _ = run_ranks(agreement_ranks.dies, 3, timeout_s=300)
    error, text, seconds = alive["step"]
    assert error == "RankMissingError", text
    assert re.search(
        r"rank [01] waited 2 s to compare the forward graph's launches on process group '0'", text
    )
    assert "rank 2 did not come" in text
    assert seconds < 60
    # Whoever is left when the store has gone says so.
    error, text, _ = alive["agree"]
    assert error == "AgreementError", text
    assert "the process that hosts it, rank 0" in text


@pytest.mark.once
def test_another_edition_of_the_package():
    for error, text, _ in on_ranks(agreement_ranks.other_edition):
        assert error == "PlanMismatchError", text
        said = re.findall(r"rank (\d): torch (\S+), torch_ext_bucketing (.{12})$", text, re.M)
        assert [s[0] for s in said] == ["0", "1"]
        assert said[0][1] == said[1][1]
        assert [s[2] == "another edit" for s in said] == [False, True]
        assert "Their buckets are the same, but not the code that packs them." in text


@pytest.mark.slow
def test_a_warm_cache_and_a_cold_one(tmp_path):
    ranks = on_ranks(agreement_ranks.inductor, str(tmp_path))
    for result in ranks:
        for name in ("cold", "warm"):
            assert result[name]["outcome"][0] is None, result[name]["outcome"]
            # The comparison comes before every collective, in forward and in backward.
            assert [calls[0] for calls in result[name]["calls"]] == ["agree", "agree"]
            assert all(len(calls) > 2 for calls in result[name]["calls"])
        assert result["warm"]["gradients"] == result["cold"]["gradients"]
        error, text, _ = result["other"]["outcome"]
        assert error == "PlanMismatchError", text
        assert "rank 0: all_gather float32, bucket of 2: weight at byte 0" in text
        assert "rank 1: all_gather float32, bucket of 2: bias at byte 0" in text
    # Rank 0 was served from its cache, so that no pass of ours ran there; rank 1 compiled.
    cached = [
        [set(result[name]["graphs"]) for name in ("cold", "warm", "other")] for result in ranks
    ]
    assert cached == [[{False}, {True}, {True}], [{False}, {False}, {False}]]


# ---------------------------------------------------------------- without ranks


def of_group(*members, group="0", kind="all_gather"):
    launch = Launch(kind, None, "float32", len(members) > 1, tuple(members))
    return GroupLaunches(group, (launch,))


def test_launches_survive_their_encoding():
    first = of_group(Member(("a", "b"), 0, 16, "float32"), Member(("c",), 16, 4, "float32"))
    second = GroupLaunches("1", (Launch("all_to_all_single", None, "int64", False),))
    whole = GraphLaunches("backward", (first, second))
    assert GraphLaunches.decode(whole.encode()) == whole
    assert whole.digest() != GraphLaunches("backward", (second, first)).digest()


def test_launches_are_what_ranks_must_share(fake_world):
    group = torch.distributed.group.WORLD

    def function(x, y):
        return all_gather(x, group), all_reduce(y, group, "avg")

    both = [
        launches_of(trace(function, torch.zeros(n, 2), torch.zeros(3)).graph, "forward")
        for n in (2, 5)
    ]
    assert [str(launch.to_text()) for launch in both[0].groups[0].launches] == [
        "all_gather float32, of no parameter",
        "all_reduce avg float32, of no parameter",
    ]
    assert both[0] == both[1]  # sizes of what serves no parameter may differ between ranks


def test_without_other_ranks_nothing_is_exchanged(fake_world, monkeypatch):
    def no_store():
        raise AssertionError("asked for the store")

    monkeypatch.setattr(agreement.groups, "default_store", no_store)
    group = torch.distributed.group.WORLD
    agree(trace(lambda x: all_gather(x, group), torch.zeros(2, 2)))


def test_a_message_shows_no_more_of_a_large_bucket_than_differs():
    members = [Member((f"layers.{i}.weight",), 8 * i, 8, "float32") for i in range(300)]
    swapped = [*members[:200], members[201], members[200], *members[202:]]
    versions = [
        ([0, 1, 2, 5], Version("torch", "forward", of_group(*members))),
        ([4], Version("torch", "forward", of_group(*swapped))),
    ]
    text = mismatch_text(versions, [3], 6)
    assert "ranks 0-2, 5: all_gather float32, bucket of 300: ...; layers.198.weight" in text
    assert "(their members differ from number 201 on)" in text
    assert "Not heard of yet: rank 3." in text
    assert len(text) < 1500


@pytest.mark.parametrize("bad", [5, -1, "10 s"])
def test_a_bad_timeout(bad):
    with pytest.raises(TypeError, match="agree_timeout must be a"):
        teb.backend("aot_eager", agree_timeout=bad)
