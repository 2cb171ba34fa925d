"""Train a matrix of models on CPU ranks and compare all weights with eager FSDP2's, bit for bit.

    python benchmarks/parity.py
    python benchmarks/parity.py --models llama --backends aot_eager --parallelism fsdp
    python benchmarks/parity.py --only 'moe/4x2/*/hsdp/*' --json moe.json
    python benchmarks/parity.py --virtual-ranks 64,128,256
    python benchmarks/parity.py --rows 'torchtitan/*' --json torchtitan.json
    python benchmarks/parity.py --device cuda --topologies 1x2,2x2,4x2 --parallelism fsdp,hsdp

Reductions add in the order of NCCL's rings over the simulated nodes, or are NCCL's own on GPUs,
with wider models (see ``benchmarks/devices.py`` for ranks that share one). Every cell runs the
compiled step with buckets in FSDP2's payload order, and as a control in graph order. Cells of the
Inductor backend run a third time with every operator on ATen's kernels: where Inductor's own
kernels round differently from eager's, that run shows that nothing else differs.

Exit status: 0 if every cell passes, 1 if one does not (weights differ without a proven cause, the
layout differs, or the control matches where it must not), 2 for bad options.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import parity_cells as cells_
from benchmarks.parity_cells import Cell, CellReport, CellResult, RunReport, on_messages, select
from benchmarks.parity_rows import RowResult, render_rows, run_table
from torch_ext_bucketing.testing.demo.table import columns
from torch_ext_bucketing.testing.payloads import whole_digest
from torch_ext_bucketing.testing.ranks import Rank, RankError, preload, run_ranks

KERNELS = (
    "Inductor's decompositions and generated kernels round differently from eager's kernels; with "
    "ATen's kernels in their place the same Inductor compile equals eager"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    command = " ".join(["benchmarks/parity.py", *(sys.argv[1:] if argv is None else argv)])
    if args.virtual_ranks:
        return virtual(args, command)
    if args.rows:
        return rows(args, command)
    cells = select(
        args.models,
        args.topologies,
        args.backends,
        args.parallelism,
        args.reduce_dtype,
        args.only,
        args.device,
    )
    if args.device == "cuda":
        from benchmarks.devices import why_no_nccl

        if why := why_no_nccl():
            parser.error(why)
    if not cells:
        parser.error(
            "no cell is left by these options; names look like llama/2x2/aot_eager/fsdp/bf16"
        )
    results: list[CellResult] = []
    header = _header(args, command)
    start = time.monotonic()
    say = _sayer(start)

    def finish(result: CellResult) -> None:
        result.date = _now()
        results.append(result)
        say(f"{len(results)}/{len(cells)} {result.cell.name}: {_verdict(result)}")
        _save(args.json, [r.as_dict() for r in results])

    done = _read_passed(args.json) if args.resume else {}
    results += [done[cell] for cell in cells if cell in done]
    failed = False
    # The quick backend first: a run that is cut short leaves the most.
    for backend, ranks, nodes in dict.fromkeys(
        (c.backend, c.ranks, c.nodes) for c in sorted(cells, key=lambda c: c.backend)
    ):
        mine = [
            cell
            for cell in cells
            if (cell.backend, cell.ranks, cell.nodes) == (backend, ranks, nodes)
            and cell not in done
        ]
        if not mine:
            continue
        left = max(1.0, args.timeout - (time.monotonic() - start))
        note = say if args.verbose else _quiet
        try:
            run_topology(mine, args.steps, args.layers, finish, note, left)
        except RankError as error:
            print(f"parity.py: {nodes} nodes x {ranks // nodes} ranks: {error}", file=sys.stderr)
            failed = True
    results.sort(key=lambda result: cells.index(result.cell))
    header["torch"] = ", ".join(dict.fromkeys(r.torch for r in results))
    _save(args.json, [r.as_dict() for r in results])
    print(render(header, results))
    missing = len(cells) - len(results)
    if missing:
        print(f"\n{missing} of {len(cells)} cells did not finish")
    return 1 if failed or missing or any(r.problems for r in results) else 0


def virtual(args: argparse.Namespace, command: str) -> int:
    """``--virtual-ranks``; returns the exit status."""
    import torch

    from benchmarks.parity_virtual import run_virtual

    torch.set_num_threads(1)
    header = {**_header(args, command), "torch": torch.__version__}
    results = []
    for ranks in args.virtual_ranks:
        result = run_virtual("llama", ranks, args.steps, args.layers)
        results.append(result)
        print(f"{ranks} virtual ranks: {result.seconds:g} s", file=sys.stderr, flush=True)
        _save(args.json, [{**r.as_dict(), "torch": torch.__version__} for r in results])
    rows = [
        [
            "model",
            "ranks",
            "nodes",
            f"steps equal of {args.steps}",
            "control differs",
            "layout equal",
            "",
        ]
    ]
    for result in results:
        first = result.control_first_different_step
        rows.append(
            [
                result.model,
                str(result.ranks),
                str(result.nodes),
                str(result.steps_equal),
                "none" if first is None else f"step {first}",
                "yes" if result.layout_equal else "no",
                "ok" if result.passed else "FAILED",
            ]
        )
    print(f"{_title(header)}\n\n{columns(rows)}")
    return 0 if all(result.passed for result in results) else 1


def _sayer(start: float) -> Callable[[str], None]:
    """Prints a line of progress, with the seconds since ``start``."""

    def say(text: str) -> None:
        print(f"[{time.monotonic() - start:5.0f} s] {text}", file=sys.stderr, flush=True)

    return say


def rows(args: argparse.Namespace, command: str) -> int:
    """``--rows``; returns the exit status."""
    results: list[RowResult] = []
    say = _sayer(time.monotonic())

    def finish(result: RowResult) -> None:
        result.date = _now()
        results.append(result)
        _save(args.json, [r.as_dict() for r in results])

    errors = run_table(args.rows, args.steps, args.timeout, finish, say)
    if not results and not errors:
        print(f"parity.py: no row is named like {args.rows!r}", file=sys.stderr)
        return 2
    header = _header(args, command)
    versions = ", ".join(dict.fromkeys(r.torch for r in results))
    title = f"{header['date']}, torch {versions}, Python {header['python']}\ncommand: {command}"
    print("\n".join([title, "", render_rows(results), *errors]))
    return 1 if errors or any(r.problems for r in results) else 0


def run_topology(
    cells: Sequence[Cell],
    steps: int,
    layers: int,
    finish: Callable[[CellResult], None],
    say: Callable[[str], None],
    timeout_s: float,
) -> None:
    """Run cells of one topology on one set of ranks; ``finish`` is called with each one's result.

    Raises:
        RankError: a rank failed or the time limit passed; cells finished before are unaffected.
    """
    world = cells[0].ranks
    run_ranks(
        _run_cells,
        world,
        list(cells),
        steps,
        layers,
        timeout_s=timeout_s,
        on_message=on_messages(
            world, lambda r: r.cell, lambda by_rank: finish(combine(by_rank, steps)), say
        ),
    )


def _run_cells(rank: Rank, cells: list[Cell], steps: int, layers: int) -> None:
    # Imported by the ranks alone: this process never needs torch.
    from benchmarks.parity_ranks import run_cells

    run_cells(rank, cells, steps, layers)


def combine(reports: Sequence[CellReport], steps: int) -> CellResult:
    """One cell's result from the reports of all its ranks."""
    cell = reports[0].cell
    eager = _hashes([r.eager for r in reports])

    def equal(name: str) -> list[bool]:
        hashes = _hashes([r.runs[name] for r in reports])
        return [a == b for a, b in zip(hashes, eager, strict=False)]

    def first_different(name: str) -> int | None:
        found = equal(name)
        return found.index(False) + 1 if False in found else None

    differences = [
        f"rank {rank}, {name}: {text}"
        for rank, report in enumerate(reports)
        for name, run in report.runs.items()
        if name != "control"
        for text in run.layout_differences
    ]
    result = CellResult(
        cell,
        steps,
        sum(equal("fsdp_order")),
        first_different("control"),
        not differences,
        cause=cell.reference.why_no_control,
        layout_differences=differences[:5],
        torch=reports[0].torch,
        seconds=round(max(sum(r.seconds for r in x.runs.values()) for x in reports), 1),
    )
    if cell.backend == "inductor":
        gaps = [
            max(abs(a - b) for a, b in zip(r.runs["fsdp_order"].loss, r.eager.loss, strict=True))
            for r in reports
        ]
        result.experiment |= {
            "aten_kernels_steps_equal": sum(equal("aten_kernels")),
            "first_different_step": first_different("fsdp_order"),
            "ranks_with_other_loss_before_any_reduction": sum(
                r.runs["fsdp_order"].loss[0] != r.eager.loss[0] for r in reports
            ),
            "largest_loss_difference": max(gaps),
        }
        if result.steps_equal != steps:
            kernels = (
                KERNELS if result.experiment["aten_kernels_steps_equal"] == steps else "unknown"
            )
            result.cause = "; ".join(text for text in (kernels, result.cause) if text)
    return result


def _hashes(runs: Sequence[RunReport]) -> list[str]:
    return [whole_digest(shards) for shards in zip(*(r.digests for r in runs), strict=True)]


def _verdict(result: CellResult) -> str:
    first = result.control_first_different_step
    control = "none" if first is None else f"step {first}"
    text = f"{result.steps_equal} of {result.steps} equal, control differs at {control}"
    if "aten_kernels_steps_equal" in result.experiment:
        text += f", on ATen's kernels {result.experiment['aten_kernels_steps_equal']} equal"
    problems = f"; FAILED: {'; '.join(result.problems)}" if result.problems else ""
    return f"{text}, layout {'equal' if result.layout_equal else 'differs'}{problems}"


def render(header: dict[str, Any], results: Sequence[CellResult]) -> str:
    """The table, with the causes below it."""
    rows = [
        [
            "model",
            "nodes",
            "ranks",
            "backend",
            "parallelism",
            "reduce",
            "steps equal",
            "on ATen's",
            "control",
            "layout",
            "",
            "cause",
        ],
        [
            "",
            "",
            "",
            "",
            "",
            "dtype",
            f"of {header['steps']}",
            "kernels",
            "differs",
            "equal",
            "",
            "",
        ],
    ]
    causes: dict[str, int] = {}
    for r in results:
        first = r.control_first_different_step
        rows.append(
            [
                r.cell.model,
                str(r.cell.nodes),
                str(r.cell.ranks),
                r.cell.backend,
                r.cell.parallelism,
                r.cell.reduce_dtype,
                str(r.steps_equal),
                str(r.experiment.get("aten_kernels_steps_equal", "")),
                "none" if first is None else f"step {first}",
                "yes" if r.layout_equal else "no",
                "FAILED" if r.problems else "ok",
                f"[{causes.setdefault(r.cause, len(causes) + 1)}]" if r.cause else "",
            ]
        )
    passed = sum(not r.problems for r in results)
    notes = [f"[{number}] {cause}" for cause, number in causes.items()]
    failures = [f"{r.cell.name}: {'; '.join(r.problems)}" for r in results if r.problems]
    failures += [f"  {text}" for r in results for text in r.layout_differences]
    return "\n".join(
        [
            _title(header),
            "",
            columns(rows),
            "",
            *notes,
            *failures,
            f"{passed} of {len(results)} cells pass",
        ]
    )


def _title(header: dict[str, Any]) -> str:
    return (
        f"{header['date']}, torch {header.get('torch', '?')}, Python {header['python']}, "
        f"blocks per model: {header['layers']}\ncommand: {header['command']}"
    )


def _save(path: Path | None, document: list[dict[str, Any]]) -> None:
    if path is not None:
        partial = path.with_name(path.name + ".part")
        partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def _read_passed(path: Path | None) -> dict[Cell, CellResult]:
    """The cells of an earlier run that passed."""
    if path is None or not path.exists():
        return {}
    results = [CellResult.from_dict(d) for d in json.loads(path.read_text())]
    return {result.cell: result for result in results if not result.problems}


def _header(args: argparse.Namespace, command: str) -> dict[str, Any]:
    return {
        "command": command,
        "date": _now(),
        "python": platform.python_version(),
        "steps": args.steps,
        "layers": args.layers,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _quiet(text: str) -> None:
    pass


def _virtual_ranks(given: str) -> list[int]:
    numbers = [int(part) for part in given.split(",")]
    if any(number < 16 or number % 8 for number in numbers):
        raise argparse.ArgumentTypeError("give multiples of 8 from 16 on: nodes have eight ranks")
    return numbers


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def choice(
        name: str, values: Sequence[str], text: str, default: Sequence[str] | None = None
    ) -> None:
        def parse(given: str) -> list[str]:
            names = [part.strip() for part in given.split(",")]
            for part in names:
                if part not in values:
                    raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(values)}")
            return names

        parser.add_argument(
            f"--{name}",
            type=parse,
            default=list(default or values),
            metavar="LIST",
            help=f"{text}, separated by commas (default: {','.join(default or values)})",
        )

    choice("models", (*cells_.MODELS, *cells_.REUSE_MODELS), "models")
    topologies = (*cells_.TOPOLOGIES, *cells_.MORE_TOPOLOGIES)
    choice("topologies", topologies, "nodes x ranks per node", cells_.TOPOLOGIES)
    choice("backends", cells_.BACKENDS, "backends of torch.compile")
    choice("parallelism", (*cells_.PARALLELISM, *cells_.MORE_PARALLELISM), "parallelism")
    choice("reduce-dtype", cells_.REDUCE_DTYPES, "dtypes that gradients are reduced in")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="cells whose name matches")
    parser.add_argument("--steps", type=int, default=25, metavar="N", help="default: 25")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="blocks (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every cell")
    parser.add_argument(
        "--resume", action="store_true", help="keep the cells that pass in --json's file"
    )
    parser.add_argument(
        "--virtual-ranks",
        type=_virtual_ranks,
        metavar="LIST",
        help="instead: simulate so many ranks, such as 64,128,256, in this process",
    )
    parser.add_argument(
        "--rows",
        metavar="PATTERN",
        help="instead: what people train, where the row's name matches, such as 'torchtitan/*'",
    )
    parser.add_argument("--timeout", type=float, default=7200.0, metavar="S", help="for all cells")
    parser.add_argument("--verbose", action="store_true", help="name every run when it starts")
    return parser


if __name__ == "__main__":
    preload("benchmarks.parity_ranks")
    sys.exit(main())
