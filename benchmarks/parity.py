"""Train models on ranks in many ways and compare all weights with eager FSDP2's, bit for bit.

    python benchmarks/parity.py
    python benchmarks/parity.py --models llama --backends aot_eager --parallelism fsdp
    python benchmarks/parity.py --only 'moe/4x2/*/hsdp/*' --json moe.json
    python benchmarks/parity.py --rows 'torchtitan/*' --json torchtitan.json
    python benchmarks/parity.py --rows 'everyday/*' --steps 6
    python benchmarks/parity.py --rows 'float8/*'
    python benchmarks/parity.py --rows 'everyday/*' --steps 3 --starts 20
    python benchmarks/parity.py --virtual-ranks 64,128,256
    python benchmarks/parity.py --device cuda --topologies 1x2,2x2,4x2 --parallelism fsdp,hsdp

Without ``--rows`` these are the rows of a matrix, models x topologies x backends x parallelism x
dtypes; with it, what people train, by name (:mod:`.eager_parity.rows` has both). Reductions add
in the order of NCCL's rings over the simulated nodes, or are NCCL's own on GPUs, with wider models
(ranks that share one: ``.eager_parity.devices``). Every row runs the compiled step with
buckets in FSDP2's payload order, and as a control in graph order. Rows of the Inductor backend run
a third time with every operator on ATen's kernels: where Inductor's own kernels round differently
from eager's, that run shows that nothing else differs. A rank that dies, or waits longer than
``--timeout``, is named, with the end of what it printed or its stacks; ``--starts`` looks for those
that seldom do.

Exit status: 0 if every row passes, 1 if one does not (weights differ without a proven cause, the
layout differs, or the control matches where it must not) or all were left out, 2 for bad options.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.command import (
    add_json,
    add_names,
    add_number,
    document_of,
    now,
    parser_of,
    sayer,
    title,
    write_json,
)
from benchmarks.eager_parity.devices import why_no_nccl
from benchmarks.eager_parity.models import MODELS
from benchmarks.eager_parity.rows import MORE_TOPOLOGIES, PARALLELISM, ROWS, TOPOLOGIES, Row, matrix
from benchmarks.parity_results import RowResult, combine, first_different, render, verdict
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.ranks import Rank, RankError, preload, run_ranks

if TYPE_CHECKING:
    from benchmarks.eager_parity.ranks import RowReport, Runs

BACKENDS = ("aot_eager", "inductor")
DTYPES = ("bf16", "fp32")
START_S = 900.0
"""For one of several starts of a row."""
GROUPS = tuple(dict.fromkeys(m.group for m in MODELS.values() if m.group))
IN_MATRIX = tuple(name for name, m in MODELS.items() if m.parallelism)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.virtual_ranks:
        return virtual(args, argv)
    if args.device == "cuda" and (why := why_no_nccl()):
        parser.error(why)
    rows = chosen(args)
    if not rows:
        parser.error(
            "no row is left by these options; names look like llama/2x2/aot_eager/fsdp/bf16, or "
            f"with --rows like {ROWS[0].name}"
        )
    resumed = [row.name for row in rows if row.case.startswith("resume")]
    least = 3 if resumed else 1
    if args.steps < least:
        parser.error(f"--steps must be at least {least}{' for '.join(['', *resumed[:1]])}")
    left_out = {row: row.why_left_out(MODELS) for row in rows}
    todo = [row for row in rows if not left_out[row]] * args.starts
    results: list[RowResult] = []
    begin = time.monotonic()
    say = sayer(begin)

    def finish(result: RowResult) -> None:
        results.append(replace(result, date=now()))
        say(f"{len(results)}/{len(todo)} {result.row.name}: {verdict(result)}")
        write_json(args.json, [r.as_dict() for r in results])

    errors = run(todo, args.steps, finish, begin + args.timeout, alone=args.starts > 1)
    results.sort(key=lambda result: rows.index(result.row))
    write_json(args.json, [r.as_dict() for r in results])
    print(f"{title(document_of('benchmarks/parity.py', argv))}\n")
    print(render(results, [f"{row.name}: {why}" for row, why in left_out.items() if why]))
    for error in errors:
        print(f"parity.py: {error}", file=sys.stderr)
    missing = len(todo) - len(results)
    if missing:
        print(f"\n{missing} of {len(todo)} rows did not finish")
    return 1 if errors or missing or not todo or any(r.problems for r in results) else 0


def chosen(args: argparse.Namespace) -> list[Row]:
    """Return the rows that the options select."""
    if args.rows:
        patterns = args.rows.split(",")
        rows = [row for row in ROWS if any(fnmatchcase(row.name, p) for p in patterns)]
        found = [replace(row, device=args.device) for row in rows]
    else:
        names = [n for n in IN_MATRIX if {n, MODELS[n].group} & set(args.models)]
        found = [
            row
            for row in matrix(
                {name: MODELS[name] for name in names}, args.topologies, args.device, args.layers
            )
            if row.backend in args.backends
            and row.dtype in args.reduce_dtype
            and row.name.split("/")[3] in args.parallelism
        ]
    return [row for row in found if fnmatchcase(row.name, args.only)]


def run(
    rows: Sequence[Row],
    steps: int,
    finish: Callable[[RowResult], None],
    deadline: float,
    alone: bool = False,
) -> list[str]:
    """Run the rows; return errors by row."""

    def key(row: Row) -> Any:
        return row.backend, row.ranks, row.nodes, row.chunk_bytes, row.device, row.expert

    # The quick backend first: a run that is cut short leaves the most.
    ordered = sorted(rows, key=lambda row: row.backend)
    groups = [[row] for row in ordered]
    if not alone:
        groups = [
            [row for row in ordered if key(row) == topology]
            for topology in dict.fromkeys(map(key, ordered))
        ]
    errors = []
    for left in groups:
        while left and time.monotonic() < deadline:
            limit = deadline - time.monotonic()
            limit = min(limit, START_S) if alone else limit
            done, error = run_topology(left, steps, finish, limit)
            if error:
                at = left[done].name if done < len(left) else f"after {left[-1].name}"
                errors.append(f"{at}: {error}")
            left = left[done + 1 :]
    return errors


def run_topology(
    rows: Sequence[Row],
    steps: int,
    finish: Callable[[RowResult], None],
    timeout_s: float,
) -> tuple[int, str]:
    """Run rows of one topology on one set of ranks; return how many finished, and an error."""
    reports: dict[str, dict[int, RowReport]] = {}
    done = 0

    def on_message(rank: int, report: RowReport) -> None:
        nonlocal done
        by_rank = reports.setdefault(report.row.name, {})
        by_rank[rank] = report
        if len(by_rank) == rows[0].ranks:
            done += 1
            finish(combine([by_rank[r] for r in sorted(by_rank)], steps))

    try:
        run_ranks(
            run_rows, rows[0].ranks, list(rows), steps, timeout_s=timeout_s, on_message=on_message
        )
    except RankError as error:
        return done, str(error)
    return done, ""


def run_rows(rank: Rank, rows: Sequence[Row], steps: int) -> None:
    """Run ``rows``, all of one topology, on this rank, and send a report of each."""
    from benchmarks.eager_parity.ranks import row_group

    with row_group(rank, rows[0]):
        for row in rows:
            rank.send(runs_of(rank, row, steps).report())


def runs_of(rank: Rank, row: Row, steps: int) -> Runs:
    """Return the object that runs a row on this rank."""
    from benchmarks.eager_parity.ranks import Runs, mesh_of

    kind: type[Runs] = Runs
    if row.case:
        from benchmarks.eager_parity.cases import CaseRuns as kind
    elif row.optimizer and row.client == "torchtitan's model":
        from benchmarks.parity_titan import TitanStepRuns as kind
    elif row.optimizer:
        from benchmarks.eager_parity.steps import StepRuns as kind
    elif row.client in ("torchtitan's model", "torchtitan's calls"):
        from benchmarks.parity_titan import TitanRuns as kind
    elif row.client == "accelerate's calls":
        from benchmarks.parity_accelerate import AccelerateRuns as kind
    elif row.client == "torchtitan's trainer":
        from benchmarks.parity_trainer import TrainerRuns as kind
    return kind(rank, row, mesh_of(row), steps)


def virtual(args: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Run ``--virtual-ranks``; return the exit status."""
    from benchmarks.parity_virtual import run_virtual

    torch.set_num_threads(1)
    results = []
    equal = f"steps equal of {args.steps}"
    rows = [["model", "ranks", "nodes", equal, "control differs", "layout equal", ""]]
    for ranks in args.virtual_ranks:
        r = run_virtual("llama", ranks, args.steps, args.layers)
        results.append(r)
        print(f"{ranks} virtual ranks: {r['seconds']:g} s", file=sys.stderr, flush=True)
        write_json(args.json, results)
        sizes = [str(r["ranks"]), str(r["nodes"]), str(r["steps_equal"])]
        layout = "yes" if r["layout_equal"] else "no"
        control = first_different(r["control_first_different_step"])
        rows.append([r["model"], *sizes, control, layout, "ok" if r["passed"] else "FAILED"])
    print(f"{title(document_of('benchmarks/parity.py', argv))}\n\n{columns(rows)}")
    return 0 if all(r["passed"] for r in results) else 1


def _virtual_ranks(given: str) -> list[int]:
    numbers = [int(part) for part in given.split(",")]
    if any(number < 16 or number % 8 for number in numbers):
        raise argparse.ArgumentTypeError("give multiples of 8 from 16 on: nodes have eight ranks")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("parity.py", __doc__)

    all_here = [name for name in IN_MATRIX if not MODELS[name].needs]
    topologies = (*TOPOLOGIES, *MORE_TOPOLOGIES)
    add_names(parser, "models", (*IN_MATRIX, *GROUPS), "models, or groups of them", all_here)
    add_names(parser, "topologies", topologies, "nodes x ranks per node", TOPOLOGIES)
    add_names(parser, "backends", BACKENDS, "backends of torch.compile")
    add_names(parser, "parallelism", tuple(PARALLELISM), "parallelism")
    add_names(parser, "reduce-dtype", DTYPES, "dtypes of gathers and reductions")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="rows whose name matches")
    parser.add_argument("--rows", metavar="PATTERNS", help="instead: named rows, such as 'blocks'")
    add_number(parser, "steps", 25, "optimizer steps")
    add_number(parser, "layers", 1, "blocks of the matrix's models")
    add_number(
        parser, "starts", 1, "how often each row is run; more than once: on ranks of its own"
    )
    add_json(parser, "written after every row")
    parser.add_argument(
        "--virtual-ranks",
        type=_virtual_ranks,
        metavar="LIST",
        help="instead: simulate these numbers of ranks, such as 64,128,256, in this process",
    )
    parser.add_argument("--timeout", type=float, default=7200.0, metavar="S", help="for all rows")
    return parser


if __name__ == "__main__":
    preload("benchmarks.eager_parity.ranks")
    sys.exit(main())
