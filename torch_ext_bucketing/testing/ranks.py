"""Run a function on ranks that are processes of this machine and never outlive the run.

One rank's failure ends all ranks. They also end, with their child processes, when the caller of
:func:`run_ranks` is gone. Ranks meet through a file in a temporary folder, not a port, so any
number of runs can share a machine. torch is not imported here.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from ..errors import check_count, check_positive

T = TypeVar("T")

# Seconds that ranks may still report after a failure. A dead rank's peers, which see a closed
# connection, may report first.
_GRACE_S = 0.5
_LOG_TAIL = 4000  # characters of a rank's output in an error
_CRASH = "Fatal Python error"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_server: BaseContext | None = None  # of preload()


class RankError(RuntimeError):
    """A rank raised or died. The message names it and has its traceback or output."""


class RanksTimedOut(RankError):
    """The time limit passed. The message has the stack of each unfinished rank."""


@dataclass
class Rank:
    """One rank of a run, the first argument of its function.

    ``store_path`` is for a ``torch.distributed.FileStore``, ``timeout`` for process groups.
    """

    rank: int
    world_size: int
    store_path: str
    timeout: timedelta
    _pipe: Connection = field(repr=False)

    def send(self, message: object) -> None:
        """Send ``message`` (picklable) to the caller's ``on_message``."""
        self._pipe.send(("message", message))


def preload(*modules: str) -> None:
    """Fork later ranks from a server that has imported ``modules``: importing torch takes seconds.

    Forking is safe only if the modules start no thread: importing torch starts none, compiling
    does. The server starts with the first rank, with this process's environment and ``sys.path``,
    and ends with this process. Its ranks skip ``atexit``.
    """
    global _server
    _server = multiprocessing.get_context("forkserver")
    _server.set_forkserver_preload(list(modules))


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[T]:
    """Run ``function(rank, *args)`` on ``world_size`` ranks and return their results by rank.

    All processes of the ranks have then ended, with their children. A ``RankError`` means that a
    rank raised or died, or an import of :func:`preload` failed.

    Args:
        function: importable by name. It takes a :class:`Rank` and ``args``, and returns something
            picklable.
        timeout_s: limit in seconds for the whole run, imports included (:class:`RanksTimedOut`).
        environment: more environment variables for the ranks, which have one OpenMP and MKL thread.
        on_message: called in this process with ``(rank, message)`` for each :meth:`Rank.send`. Its
            exceptions end the ranks and reach the caller.
    """
    check_count("world_size", world_size, least=1)
    check_positive("timeout_s", timeout_s, "number of seconds")
    with tempfile.TemporaryDirectory(prefix="torch-ext-bucketing-") as folder:
        run = _Run(world_size, Path(folder), timeout_s)
        try:
            run.start(function, args, environment or {})
            return run.collect(on_message)
        finally:
            run.end()


class _Run:
    """The parent's side of one run."""

    def __init__(self, world_size: int, folder: Path, timeout_s: float) -> None:
        self.world_size = world_size
        self.folder = folder
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.results: dict[int, Any] = {}
        self.tracebacks: dict[int, str] = {}

    def start(
        self, function: Callable[..., Any], args: tuple[object, ...], environment: Mapping[str, str]
    ) -> None:
        """Start one process for each rank."""
        context = _context()
        variables = {
            **_ONE_THREAD,
            # Inductor would start a pool of processes per rank, for Triton only.
            "TORCH_WARM_POOL": "0",
            # Ranks must iterate over sets in the same order.
            "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
            **environment,
        }
        store, timeout = str(self.folder / "store"), timedelta(seconds=self.timeout_s)
        with _environment(variables):
            for rank in range(self.world_size):
                pipe, childs_pipe = context.Pipe(duplex=False)
                self.pipes.append(pipe)
                me = Rank(rank, self.world_size, store, timeout, childs_pipe)
                process = context.Process(  # type: ignore[attr-defined]
                    target=_rank_main,
                    args=(me, str(self._log_path(rank)), variables, function, args),
                    name=f"rank{rank}",
                    daemon=True,
                )
                try:
                    process.start()
                except EOFError as error:
                    raise RankError(
                        "the server that forks ranks ended while it imported the modules of "
                        "preload(); see its last output"
                    ) from error
                self.processes.append(process)
                childs_pipe.close()  # or its end would never be seen

    def collect(self, on_message: Callable[[int, Any], None] | None) -> list[Any]:
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        until, failed = self.deadline, False
        while open_pipes and (now := time.monotonic()) < until:
            for ready in wait(list(open_pipes), timeout=until - now):
                assert isinstance(ready, Connection)
                rank = open_pipes[ready]
                try:
                    kind, payload = ready.recv()
                except (EOFError, OSError):
                    kind, payload = "end", None
                    del open_pipes[ready]
                if kind == "result":
                    self.results[rank] = payload
                elif kind == "message":
                    if on_message is not None and not failed:
                        on_message(rank, payload)
                elif rank not in self.results:
                    if kind == "traceback":
                        self.tracebacks[rank] = payload
                    if not failed:
                        failed, until = True, min(until, time.monotonic() + _GRACE_S)
        ranks, running = range(self.world_size), sorted(open_pipes.values())
        if len(self.results) == self.world_size:
            return [self.results[rank] for rank in ranks]
        if not failed:
            raise self._timeout(running)
        silent = [r for r in ranks if r not in {*self.results, *self.tracebacks, *running}]
        if not silent:
            rank, text = next(iter(self.tracebacks.items()))
            raise RankError(f"rank {rank} failed:\n{text.rstrip()}")
        # Report a rank that died silently first: its peers' tracebacks only show a closed
        # connection.
        died = self.processes[silent[0]]
        died.join(timeout=1.0)
        code, how = died.exitcode, f"exit code {died.exitcode}"
        if code is None:
            how = "it closed its pipe and did not exit"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        raise RankError(f"rank {silent[0]} died: {how}{self._log_text(silent[0])}")

    def _timeout(self, running: list[int]) -> RanksTimedOut:
        """Let unfinished ranks dump their stacks; return the error to raise."""
        for rank in running:
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(_GRACE_S)
        where = "".join(self._log_text(rank) for rank in running)
        ranks = ", ".join(str(rank) for rank in running)
        return RanksTimedOut(
            f"time limit of {self.timeout_s:g} s reached; unfinished ranks: {ranks}{where}"
        )

    def _log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def _log_text(self, rank: int) -> str:
        """Return the end of a rank's output, or the part around Python's report of a crash."""
        path = self._log_path(rank)
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        if not text:
            return f"\n(rank {rank} printed nothing)"
        crash, last = text.rfind(_CRASH), len(text) - _LOG_TAIL
        begin = max(0, last if crash < 0 else min(crash - _LOG_TAIL // 4, last))
        return f"\n--- end of rank {rank}'s output ---\n{text[begin : begin + _LOG_TAIL]}"

    def end(self) -> None:
        """End every rank's process group and collect the processes."""
        groups = [process.pid for process in self.processes if process.pid is not None]
        for process in self.processes:
            # A rank leads its own session from its first line on, so this also ends compilers
            # that it started.
            _signal_group(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        # The ranks' children are not ours to join. Wait until their groups are gone.
        deadline = time.monotonic() + _GRACE_S
        while any(_signal_group(g, 0) for g in groups) and time.monotonic() < deadline:
            time.sleep(0.01)
        for pipe in self.pipes:
            pipe.close()


def _signal_group(group: int | None, number: int) -> bool:
    """Send a signal to a process group; return whether the group exists and is ours."""
    try:
        if group is not None:
            os.killpg(group, number)
        return group is not None
    except (ProcessLookupError, PermissionError):  # a foreign group may take over the number
        return False


def _rank_main(
    me: Rank,
    log_path: str,
    variables: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    """Run the function as one rank, in a process of its own."""
    os.setsid()
    os.environ.update(variables)  # a fork server's process has the server's environment
    _start_watcher()
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    try:
        me._pipe.send(("result", function(me, *args)))
    except BaseException:
        me._pipe.send(("traceback", traceback.format_exc()))
        sys.stdout.flush()  # not sys.exit: destructors can wait for peers that never answer
        sys.stderr.flush()
        os._exit(1)


def _start_watcher() -> None:
    """Fork a process that ends this rank's process group when the caller is gone."""
    # Forking is safe: this process has no threads yet. A thread could not act while another one
    # hangs with the interpreter's lock.
    caller = multiprocessing.parent_process()
    assert caller is not None
    group = os.getpid()
    if os.fork():
        return
    # Keep only the sentinel: a copy of the rank's pipe would hide the rank's death.
    os.closerange(0, caller.sentinel)
    os.closerange(caller.sentinel + 1, os.sysconf("SC_OPEN_MAX"))
    select.select([caller.sentinel], [], [])
    os.killpg(group, signal.SIGKILL)
    os._exit(0)


def _context() -> BaseContext:
    """Return the server of :func:`preload`, running, or "spawn" without one."""
    if _server is None:
        return multiprocessing.get_context("spawn")
    # Before Python 3.14 a server does not get sys.path.
    with _environment({**_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}):
        forkserver.ensure_running()
    return _server


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables.keys() - before:
            del os.environ[name]
        os.environ.update(before)


def sayer() -> Callable[[str], None]:
    """Return a function that prints a line with the seconds since now to standard error."""
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:4.0f} s] {text}", file=sys.stderr, flush=True)

    return say
