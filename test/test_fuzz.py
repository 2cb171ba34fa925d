"""A bounded run of ``test/fuzz.py``; see there for what an example is and how to repeat one."""

from __future__ import annotations

from collections.abc import Iterator

import fuzz
import pytest
import torch.distributed as dist

import torch_ext_bucketing as teb

EXAMPLES, SEED = 600, 20_000

# What an example calls by another name than its own, and what only describes results.
ELSEWHERE = {
    "reports": {"CompileReport"},
    "plans": {"manual_plan", "transformer_block_plan"},
    "schedule": {"Overlap", "CapComputeRun", "PeakMemory", "Policy", "Machine"},
}
NOT_CALLED = {"BoundNotKeptWarning", "GraphPass", "NotBucketedWarning"}
NOT_CALLED |= {"PlanMismatchError", "RankMissingError"}
NOT_CALLED |= {"AllToAllAllReduce", "AllToAllReduceScatter"}  # eager FSDP2 calls it, on ranks


@pytest.fixture
def two_ranks() -> Iterator[None]:
    fuzz.start_world()
    yield
    dist.destroy_process_group()


def test_every_public_name_is_called():
    called = set(fuzz.CALLS) | {name for names in ELSEWHERE.values() for name in names}
    assert set(teb.__all__) - NOT_CALLED <= called


def test_a_bounded_run(two_ranks):
    found = fuzz.run(EXAMPLES, SEED)
    assert found.total() == EXAMPLES
    for name in fuzz.CALLS:  # each call was made, and most of them also with values that are good
        assert any(called == name for called, _ in found), name
    assert sum(count for (_, end), count in found.items() if end == "ok") > EXAMPLES / 2
