"""Warm starts: a rank hits its own cache entries, and never those of another rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cache_runs import CHILD, HIT, MISS, assert_state, run

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# test_caches checks that the rank is in the key.
pytestmark = [pytest.mark.torch, pytest.mark.long, pytest.mark.slow]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Compile as rank 0 and then as rank 1 in one folder; copy it in between ("-0")."""
    folder = tmp_path_factory.mktemp("ranks") / "cache"
    return folder, run(str(CHILD), "ranks", "even", str(folder))


def test_ranks_that_share_a_folder_run_their_own_code(ranks):
    results = ranks[1]
    for result, state in zip(results, (MISS, MISS, HIT, HIT), strict=True):
        assert_state(result, state)
        # Two shards of 32 elements in a buffer of 128.
        assert result["places"] == [64 * result["rank"]]


def test_a_hit_shows_the_report_of_the_compile_that_filled_the_cache(ranks):
    first, _, again, _ = ranks[1]
    for result, cached in ((first, False), (again, True)):
        graphs = result["report"]["graphs"]
        assert [g.pop("from_cache") for g in graphs] == [cached] * 2
        assert [g["stage"] for g in graphs] == ["forward", "backward"]
        assert result["text"].count(", from cache: ") == 2 * cached
        times = result["report"].pop("passes")
        assert all(t["stage"] == "joint" for t in times) if cached else times, times
    assert again["report"] == first["report"]
    assert [len(g["buckets"]) for g in again["report"]["graphs"]] == [1, 1]


def test_a_folder_that_rank_0_made_serves_rank_0_alone(ranks):
    results = run(*TORCHRUN, str(CHILD), "real", "even", TORCHINDUCTOR_CACHE_DIR=f"{ranks[0]}-0")
    zero, one = sorted(results, key=lambda r: r["rank"])
    assert_state(zero, HIT)
    assert_state(one, MISS)
    for result in (zero, one):
        for value, expected in zip(result["values"], result["expected"], strict=True):
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected))


def test_gathers_in_float8_hit_and_those_of_another_kind_miss(tmp_path: Path):
    """Only the FX graph cache hits: AOTAutograd's refuses graphs with the package's operator."""
    results = run(str(CHILD), "turns", str(tmp_path), *4 * ("float8",), "other float8")
    states = [result["graphs"] for result in results]
    # Backward reads what forward unpacked.
    assert states == [[0, 2, 0], [0, 2, 0], [2, 0, 0], [2, 0, 0], [1, 1, 0]]


def test_artifacts_of_rank_0_serve_rank_0_alone():
    """Shards are uneven."""
    saved, one, zero = run(str(CHILD), "artifacts", "data_parallel")
    assert_state(saved, MISS)
    assert_state(one, MISS)
    assert_state(zero, HIT)
    for result in (saved, zero):
        del result["report"]["passes"]
    assert [g.pop("from_cache") for g in zero["report"]["graphs"]] == [True] * 2
    assert [g.pop("from_cache") for g in saved["report"]["graphs"]] == [False] * 2
    assert zero["report"] == saved["report"]
    assert saved["places"] == zero["places"] == [0]
    # Rank 0 has 4 of 7 rows of 8, and 4 rows of 7.
    assert one["places"] == [4 * 8 + 4 * 7]


FOR_ALL = ("data_parallel, even", "2-D", "2-D, data_parallel", "2-D, tensor parallel")
"""Ways to shard; for each, one rank compiles a step for all."""


@pytest.fixture(scope="module")
def for_all() -> list[dict[str, Any]]:
    """Compile each on 4 ranks, by themselves and with the artifacts of rank 0."""
    return run(*TORCHRUN[:-1], "4", str(CHILD), "one_for_all", *FOR_ALL)


@pytest.mark.parametrize("way", FOR_ALL)
def test_artifacts_of_one_rank_that_compiles_for_all_serve_all(for_all, way):
    """Code, keys and cached values have nothing of a rank."""
    results = [result for result in for_all if result["way"] == way]
    assert sorted(result["rank"] for result in results) == [0, 1, 2, 3]
    for result in results:
        each, loaded = result["each"], result["loaded"]
        assert_state(each, MISS)
        assert_state(loaded, HIT)
        assert each["places"] == loaded["places"] == []
        assert loaded["values"] == each["values"], "the same bits"
        for value, expected in zip(loaded["values"], result["expected"], strict=True):
            torch.testing.assert_close(torch.tensor(value), torch.tensor(expected))
        for one, from_cache in ((each, False), (loaded, True)):
            for graph in one["report"]["graphs"]:
                assert graph.pop("from_cache") == from_cache
                for bucket in graph["buckets"]:
                    assert bucket.pop("group")  # as the rank that compiled calls it
        assert loaded["report"]["graphs"] == each["report"]["graphs"]
