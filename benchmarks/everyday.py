"""What people do around a training step, each case compared with eager FSDP2 doing the same.

    python -m benchmarks.everyday                        # all cases, 4 ranks on 2 simulated nodes
    python -m benchmarks.everyday --only 'resume*'

Weights are hashed on every rank after every step. The exit status is 1 where a case is not equal
that should be, one that can't be is without a warning, or nothing was bucketed in one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch

from benchmarks.everyday_ranks import CASES, STEPS, UNLIKE_EAGER, CaseReport, run_cases
from torch_ext_bucketing.testing.ranks import preload, run_ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.everyday",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="*", metavar="PATTERN", help="names of cases")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="even (default: 4)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"(default: {STEPS})")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="for all")
    args = parser.parse_args(argv)
    names = [name for name in CASES if fnmatchcase(name, args.only)]
    if not names:
        parser.error(f"--only {args.only}: no such case; there are {', '.join(CASES)}")
    if args.ranks < 2 or args.ranks % 2:
        parser.error(f"--ranks must be even and at least 2, got {args.ranks}")
    if args.steps < 3:
        parser.error(f"--steps must be at least 3, as resuming is after 2, got {args.steps}")
    start = time.monotonic()

    def tell(rank: int, name: str) -> None:
        if rank == 0:
            print(f"[{time.monotonic() - start:4.0f} s] {name}", file=sys.stderr, flush=True)

    reports = run_ranks(
        run_cases, args.ranks, names, args.steps, timeout_s=args.timeout, on_message=tell
    )
    print(f"torch {torch.__version__}, {args.ranks} ranks on 2 simulated nodes, aot_eager unless")
    print("the case says otherwise; steps after which all ranks' weights are eager FSDP2's\n")
    width = max(map(len, names))
    failed = 0
    for name in names:
        steps, said, passed = verdict(name, [report[name] for report in reports], args.steps)
        print(f"{name:{width}}  {steps} of {args.steps}  {said}")
        failed += not passed
    print(f"\n{'FAIL' if failed else 'PASS'}: {len(names) - failed} of {len(names)} as expected")
    return 1 if failed else 0


def verdict(name: str, reports: Sequence[CaseReport], steps: int) -> tuple[int, str, bool]:
    """Steps equal on all ranks, what there is to say of them, and whether it is as expected."""
    equal = min(report.equal for report in reports)
    error = next((report.error for report in reports if report.error), "")
    if error:
        return equal, error.strip().splitlines()[-1], False
    if not any(report.merged for report in reports):  # all ranks plan alike, or don't take part
        return equal, "nothing was bucketed", False
    warned = any(report.warned for report in reports)
    if name in UNLIKE_EAGER:
        said = UNLIKE_EAGER[name] + ("" if warned else ", and nothing warned")
        return equal, said, equal < steps and warned
    if warned and equal == steps:
        return equal, "warned that it isn't", False
    return equal, "" if equal == steps else "not eager FSDP2's weights", equal == steps


if __name__ == "__main__":
    preload("benchmarks.everyday_ranks")
    sys.exit(main())
