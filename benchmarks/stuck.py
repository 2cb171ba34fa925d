"""Starts each everyday case again and again, and reports every rank that dies or waits too long.

    export OMP_NUM_THREADS=1
    python -m benchmarks.stuck                                  # two loops, 20 starts of each case
    python -m benchmarks.stuck --only 'regional*' --starts 5
    python -m benchmarks.stuck --minutes 12 --json out.json     # as many as come to an end
    python -m benchmarks.stuck --minutes 12 --json out.json --resume    # and on from there

Loops run side by side and keep each other's ranks waiting. In each, a start is 4 ranks on 2
simulated nodes that compile a case, run its first steps and end as a script ends. The ranks are
forks of one process, which has imported torch and this package and has no threads. At its end a
rank collects what it made itself, and not what it had when it was forked, which takes most of an
end's time. What comes of a start:

- ``done``: all ranks ended, with exit code 0;
- ``failed``: a rank ended with an error, which is shown; the others, too, within their timeout;
- ``died``: a rank ended by a signal, or without a message;
- ``stuck``: a rank was still there when the timeout of its process groups had long passed; the
  stacks of its threads are shown.

Exit status: 0, or 1 if any start was something else than done.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import platform
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx
import torch.distributed.checkpoint.state_dict

from benchmarks.parity_cases import CaseRuns
from benchmarks.parity_ranks import row_group, runs_of
from benchmarks.parity_rows import ROWS
from torch_ext_bucketing.testing.ranks import Rank

TIMEOUT_S = 300.0
"""Of the process groups, and so for how long a rank may wait for another."""
LIMIT_S = 3 * TIMEOUT_S
"""For a start: a wait to its timeout, and what is computed before and after it."""
_TAIL = 6000


def main(argv: Sequence[str] | None = None) -> int:
    """Run the loops and print what came of the starts; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.stuck",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases")
    parser.add_argument("--starts", type=int, default=20, metavar="N", help="in each loop")
    parser.add_argument("--loops", type=int, default=2, metavar="N", help="(default: 2)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="even (default: 4)")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no start after these")
    parser.add_argument("--json", type=Path, help="also write the results here, a .txt beside it")
    parser.add_argument(
        "--resume", action="store_true", help="keep the starts in --json, and make those missing"
    )
    args = parser.parse_args(argv)
    cases = [row.case for row in ROWS if row.case]
    names = [name for name in cases if fnmatchcase(name, args.only)]
    if not names:
        parser.error(f"--only {args.only}: no such case; there are {', '.join(cases)}")
    if args.ranks < 2 or args.ranks % 2:
        parser.error(f"--ranks must be even and at least 2, got {args.ranks}")
    if args.starts < 1 or args.loops < 1:
        parser.error("--starts and --loops must be at least 1")
    if args.resume and (args.json is None or not args.json.exists()):
        parser.error("--resume goes on from the file that --json names, and there is none")
    document: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.stuck", *(argv or sys.argv[1:])]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "minutes": 0.0,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "ranks": args.ranks,
        "loops": args.loops,
        "cases": names,
        "starts": [],
    }
    if args.resume:
        earlier = json.loads(args.json.read_text())
        for key in ("torch", "ranks", "loops", "cases"):
            if earlier[key] != document[key]:
                parser.error(
                    f"--resume: {args.json} was made with {key} {earlier[key]}, not {document[key]}"
                )
        document |= {key: earlier[key] for key in ("minutes", "starts")}
    had = {(s["loop"], s["number"], s["case"]) for s in document["starts"]}
    prepare()
    began = time.monotonic()
    until = None if args.minutes is None else began + 60 * args.minutes
    folder = Path(tempfile.mkdtemp(prefix="stuck-"))  # forks would remove a TemporaryDirectory
    loops = {folder / f"loop{number}": 0 for number in range(args.loops)}
    for number, file in enumerate(loops):
        file.touch()
        loops[file] = os.fork()
        if not loops[file]:
            # Others' cases beside one's own: every second loop goes backwards.
            mine = names[:: -1 if number % 2 else 1]
            todo = [
                (round_, name)
                for round_ in range(args.starts)
                for name in mine
                if (number, round_, name) not in had
            ]
            return _loop(todo, args.ranks, until, file, number)
    for file, pid in loops.items():
        os.waitpid(pid, 0)
        document["starts"] += map(json.loads, file.read_text().splitlines())
    shutil.rmtree(folder)
    document["minutes"] += round((time.monotonic() - began) / 60, 1)
    text = table(document)
    print(text, end="")
    if args.json:
        args.json.write_text(json.dumps(document) + "\n")
        args.json.with_suffix(".txt").write_text(text)
    # A loop that came to no end has starts missing.
    ended = until is not None or len(document["starts"]) == args.loops * args.starts * len(names)
    return 0 if ended and all(s["outcome"] == "done" for s in document["starts"]) else 1


def prepare() -> None:
    """Settings of this process and all its forks.

    Nothing is run here that knows of ranks: torch keeps some of what it finds, and every fork would
    take itself for the rank that this process was.

    Raises:
        RuntimeError: this process has other threads, whose locks a fork would copy.
    """
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # or each rank tries what the compiler can do
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(
            f"this process has {threads} threads, so its forks could hang: set OMP_NUM_THREADS=1"
        )
    # Or every fork's end looks through all that torch imports: 1.7 CPU seconds, and 0.4 without.
    gc.collect()
    gc.freeze()


def _loop(
    todo: Sequence[tuple[int, str]], world: int, until: float | None, file: Path, number: int
) -> int:
    """Start cases, given with their round, in turn, a line in ``file`` for each; returns the exit
    status."""
    for round_, name in todo:
        if until is not None and time.monotonic() > until:
            return 0
        began = time.monotonic()
        outcome, said = start(name, world, file.parent)
        seconds = round(time.monotonic() - began, 1)
        result = {
            "case": name,
            "loop": number,
            "number": round_,
            "outcome": outcome,
            "seconds": seconds,
            "said": said,
        }
        with open(file, "a") as lines:
            lines.write(json.dumps(result) + "\n")
        print(f"loop {number}, {name} {round_ + 1}: {outcome}, {seconds} s", file=sys.stderr)
        if said:
            print(said, file=sys.stderr, flush=True)
    return 0


def start(name: str, world: int, parent: Path) -> tuple[str, str]:
    """One start: what came of it, and what there is to say of it.

    Args:
        name: of the case.
        world: number of ranks.
        parent: the folder for the folder of this start.
    """
    folder = Path(tempfile.mkdtemp(dir=parent))
    sys.stdout.flush()
    sys.stderr.flush()
    logs = [folder / f"log{r}" for r in range(world)]
    pids: dict[int, int] = {}
    for r, log in enumerate(logs):
        pid = os.fork()
        if not pid:
            # SystemExit unwinds to the interpreter, which ends as that of a script does.
            sys.exit(_rank(name, r, world, folder, log))
        pids[pid] = r
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT_S
    while pids and time.monotonic() < deadline:
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)  # their stacks
    time.sleep(1.0 if pids else 0.0)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    said = {r: log.read_text(errors="replace").strip() for r, log in enumerate(logs)}
    shutil.rmtree(folder)
    died = [r for r, code in codes.items() if code < 0 or (code and not said[r])]
    failed = [r for r, code in codes.items() if code]
    outcome = "stuck" if pids else "died" if died else "failed" if failed else "done"
    shown = dict.fromkeys([*pids.values(), *died, *failed])
    return outcome, "\n".join(f"rank {r}, {_end(codes.get(r))}: {said[r][-_TAIL:]}" for r in shown)


def _end(code: int | None) -> str:
    if code is None:
        return "running"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _rank(name: str, rank: int, world: int, folder: Path, log: Path) -> int:
    """One rank, with all it prints in ``log``; returns its exit code."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with contextlib.suppress(ValueError):  # a crash's stack is in the log
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _kept, pipe = Pipe(duplex=False)
    me = Rank(rank, world, f"{folder}/store", timedelta(seconds=TIMEOUT_S), pipe)
    (row,) = [row for row in ROWS if row.case == name]
    # A case that goes on from a checkpoint does so after two steps, another compiles again.
    steps = 3 if name.startswith("resume") else 2
    try:
        with row_group(me, row):
            runs = runs_of(me, row, steps)
            assert isinstance(runs, CaseRuns)
            _, compiled = runs.ways()
            runs.run(compiled)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def table(document: dict[str, Any]) -> str:
    """How often each case was started, what came of it, and what there was to say."""
    starts = document["starts"]
    counts = Counter((s["case"], s["outcome"]) for s in starts)
    outcomes = ("done", "failed", "died", "stuck")
    lines = [
        f"{document['date']}, torch {document['torch']}, Python {document['python']}, "
        f"{document['cpus']} CPUs",
        f"command: {document['command']}",
        f"{document['loops']} loops side by side, {document['ranks']} ranks each; "
        f"{len(starts)} starts in {document['minutes']:.0f} minutes; a start took "
        f"{max((s['seconds'] for s in starts), default=0.0):.0f} s at most",
        "",
        f"{'case':30}" + "".join(f"{o:>8}" for o in outcomes),
    ]
    for case in document["cases"]:
        lines.append(f"{case:30}" + "".join(f"{counts[case, o]:8}" for o in outcomes))
    for s in starts:
        if s["outcome"] != "done":
            lines += ["", f"{s['case']}, loop {s['loop']}, {s['number'] + 1}: {s['outcome']}"]
            lines.append(s["said"])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
