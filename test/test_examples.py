"""The documented training script, run a few steps, killed once and resumed."""

import functools
import os
import runpy
import signal
from pathlib import Path

import pytest
from pages import code_of

from torch_ext_bucketing.testing.ranks import Rank, RankError, run_ranks
from torch_ext_bucketing.testing.ring import init_ring_process_group

OPTIONS = ("--steps", "3", "--save-every", "2", "--layers", "1", "--compiler", "aot_eager")


def train_on(rank: Rank, folder: str, killed_in: int, *options: str) -> str:
    """Train as under ``torchrun``; rank 1 dies when it fetches the batch of step ``killed_in``."""
    from torch_ext_bucketing.testing import ring, text

    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.world_size), LOCAL_RANK="0")
    ring.init_ring_process_group = functools.partial(  # needs no free port
        init_ring_process_group, init_method=f"file://{rank.store_path}"
    )
    batch = text.batch

    def dying(step: int, number: int, **sizes: int):
        if step == killed_in and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return batch(step, number, **sizes)

    text.batch = dying
    (source,) = code_of("training-script")
    script = Path(folder).parent / f"train-{rank.rank}.py"
    script.write_text(source)
    return runpy.run_path(str(script))["main"](["--folder", folder, *OPTIONS, *options])


def on_two_ranks(*args: object) -> list[str]:
    return run_ranks(train_on, 2, *args, timeout_s=240)


@pytest.mark.torch
@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path):
    """Under eager FSDP2 until it is killed, compiled from its checkpoint on."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    weights = on_two_ranks(str(whole), 0)
    assert len(set(weights)) == 2  # each rank's own shards
    with pytest.raises(RankError, match=r"rank 1 died: .*SIGKILL"):
        on_two_ranks(str(killed), 3, "--eager")
    assert [path.name for path in killed.iterdir()] == ["2"]
    (killed / "3").mkdir()  # as an interrupted save leaves it: without .metadata
    assert on_two_ranks(str(killed), 0) == weights
