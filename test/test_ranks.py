"""The server that ranks of tests are forked from."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ranks import fork_server, on_ranks

from torch_ext_bucketing.testing.ranks import Rank, RankError, run_ranks


def _modules_threads_and_environment(rank: Rank) -> tuple[list[str], int, str | None]:
    threads = len(list(Path("/proc/self/task").iterdir()))
    return sorted(sys.modules), threads, os.environ.get("OF_THIS_RUN")


def _group(rank: int, offset: int) -> int:
    import torch

    x = torch.tensor([float(rank + offset)])
    torch.distributed.all_reduce(x)
    return int(x)


def _dies(rank: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os._exit(7)


def test_ranks_have_torch_imported_and_one_thread():
    found = run_ranks(
        _modules_threads_and_environment,
        2,
        timeout_s=120,
        environment={"OF_THIS_RUN": "yes"},
        context=fork_server(),
    )
    for modules, threads, value in found:
        assert {"torch._inductor.compile_fx", "torch_ext_bucketing.passes.backends"} <= {*modules}
        assert threads == 1
        assert value == "yes"
    # What one run put into its ranks' environment is not in the next one's.
    (again,) = run_ranks(_modules_threads_and_environment, 1, timeout_s=120, context=fork_server())
    assert again[2] is None


def test_ranks_share_a_group():
    assert on_ranks(_group, 10) == [21, 21]
    assert on_ranks(_group, 0, world=3) == [3, 3, 3]


def test_a_rank_that_dies_is_shown_with_its_last_words():
    with pytest.raises(RankError, match=r"rank 1 died: exit code 7(?s:.*)last words"):
        on_ranks(_dies)
