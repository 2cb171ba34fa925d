"""Ranks are spawned or forked from a server, and never outlive a run."""

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torch_ext_bucketing.testing import ranks
from torch_ext_bucketing.testing.ranks import Rank, RankError, RanksTimedOut, run_ranks

ROOT = Path(__file__).resolve().parents[2]

# The imports above do not load torch, so spawned ranks start fast.


def square(rank: Rank, offset: int) -> int:
    rank.send(f"hello from {rank.rank}")
    return rank.rank**2 + offset


def raise_on_last(rank: Rank) -> None:
    if rank.rank == rank.world_size - 1:
        raise LookupError("no such weight")
    time.sleep(60)


def die_on_last(rank: Rank, how: str) -> None:
    rank.send(os.getpid())
    if rank.rank < rank.world_size - 1:
        time.sleep(60)
    print("last words", flush=True)
    if how == "exit":
        os._exit(7)
    if how == "abort":
        print("Fatal Python error: Aborted\n  File ...\nExtension modules:", "numpy._core, " * 1000)
        sys.stdout.flush()
        os._exit(134)
    os.kill(os.getpid(), signal.SIGKILL)


def hang_with_the_interpreters_lock(rank: Rank) -> None:
    # Unlike CDLL, PyDLL keeps the interpreter's lock: no other thread of this rank can run.
    rank.send((os.getpid(),))
    ctypes.PyDLL(None).sleep(600)


def hang_in_here(rank: Rank) -> None:
    # A grandchild must end with its rank.
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    rank.send((os.getpid(), child.pid))
    time.sleep(600)


@pytest.fixture(params=["spawn", "forkserver"])
def start(request, monkeypatch):
    """Run the test with each way to start ranks."""
    if request.param == "spawn":
        monkeypatch.setattr(ranks, "_server", None)


def _alive(pid: int) -> bool:
    """Return whether ``pid`` is a running process (a zombie is not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _wait_gone(pids: list[int], seconds: float = 10.0) -> list[int]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = [pid for pid in pids if _alive(pid)]
        if not left:
            return []
        time.sleep(0.05)
    return left


@pytest.mark.usefixtures("start")
def test_ranks_return_results_by_rank_and_messages_arrive():
    said: list[tuple[int, str]] = []
    results = run_ranks(
        square, 3, 10, timeout_s=60, on_message=lambda rank, text: said.append((rank, text))
    )
    assert results == [10, 11, 14]
    assert sorted(said) == [(r, f"hello from {r}") for r in range(3)]


@pytest.mark.usefixtures("start")
def test_a_rank_that_raises_ends_all_with_its_traceback():
    with pytest.raises(RankError) as caught:
        run_ranks(raise_on_last, 3, timeout_s=60)
    assert caught.type is RankError  # and not RanksTimedOut: the other ranks were ended
    assert "rank 2 failed" in str(caught.value)
    assert "LookupError: no such weight" in str(caught.value)
    assert "in raise_on_last" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("exit", "exit code 7"),
        ("kill", "killed by SIGKILL"),
        ("abort", "Fatal Python error: Aborted\n  File"),
    ],
)
@pytest.mark.usefixtures("start")
def test_a_rank_that_dies_ends_all(how, text):
    pids: list[int] = []
    with pytest.raises(RankError) as caught:
        run_ranks(die_on_last, 2, how, timeout_s=60, on_message=lambda rank, pid: pids.append(pid))
    assert "rank 1 died" in str(caught.value)
    assert text in str(caught.value)
    assert "last words" in str(caught.value)
    assert pids
    assert not _wait_gone(pids, 1.0)


# Spawned ranks need time to import torch on a busy machine before they hang.
@pytest.mark.parametrize(
    ("start", "limit"),
    [pytest.param("spawn", 12, marks=pytest.mark.slow), ("forkserver", 2)],
    indirect=["start"],
)
def test_the_time_limit_shows_where_ranks_hang_and_leaves_nothing(start, limit):
    pids: list[int] = []
    with pytest.raises(RanksTimedOut) as caught:
        run_ranks(hang_in_here, 2, timeout_s=limit, on_message=lambda rank, both: pids.extend(both))
    assert f"time limit of {limit} s" in str(caught.value)
    assert "hang_in_here" in str(caught.value)
    assert len(pids) == 4
    assert not _wait_gone(pids, 1.0)


@pytest.mark.parametrize(
    ("how", "hang"),
    [
        (signal.SIGKILL, hang_in_here),
        (signal.SIGTERM, hang_in_here),
        (signal.SIGKILL, hang_with_the_interpreters_lock),
    ],
)
def test_ranks_end_with_their_parent(tmp_path, how, hang):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
            from torch_ext_bucketing.testing.ranks import run_ranks
            from test_ranks import {hang.__name__} as hang

            if __name__ == "__main__":
                run_ranks(
                    hang, 2, timeout_s=300,
                    on_message=lambda rank, pids: print(*pids, flush=True),
                )
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in parent.stdout.readline().split()]
        assert len(pids) in (2, 4)
        assert all(_alive(pid) for pid in pids)
    finally:
        parent.send_signal(how)
        parent.wait(timeout=30)
    assert not _wait_gone(pids)


@pytest.mark.parametrize(("size", "limit", "name"), [(0, 1, "world_size"), (1, 0, "timeout_s")])
def test_ranks_arguments_are_checked(size, limit, name):
    with pytest.raises(ValueError, match=name):
        run_ranks(square, size, 0, timeout_s=limit)


# --- the server of the tests' own ranks ---


def _modules_threads_and_environment(rank: Rank) -> tuple[list[str], int, str | None]:
    threads = len(list(Path("/proc/self/task").iterdir()))
    return sorted(sys.modules), threads, os.environ.get("OF_THIS_RUN")


def test_ranks_have_torch_imported_and_one_thread():
    found = run_ranks(
        _modules_threads_and_environment,
        2,
        timeout_s=120,
        environment={"OF_THIS_RUN": "yes"},
    )
    for modules, threads, value in found:
        assert {"torch._inductor.compile_fx", "torch_ext_bucketing.passes.backends"} <= {*modules}
        assert threads == 1
        assert value == "yes"
    # The environment of one run does not leak into the next one.
    (again,) = run_ranks(_modules_threads_and_environment, 1, timeout_s=120)
    assert again[2] is None


def test_an_import_that_fails_in_the_server_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('no such thing')")
    (tmp_path / "parent.py").write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
            from torch_ext_bucketing.testing.ranks import preload, run_ranks
            from test_ranks import square

            if __name__ == "__main__":
                preload("broken")
                run_ranks(square, 2, 0, timeout_s=60)
            """
        )
    )
    command = [sys.executable, str(tmp_path / "parent.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "RankError: the server that forks ranks ended" in done.stderr
    assert "ValueError: no such thing" in done.stderr
