"""torchtitan's own tests of its graph trainer, with this package beside them.

    python -m benchmarks.titan_tests                    # torch 2.15, torchtitan 0.3.0
    python -m benchmarks.titan_tests --files test_passes test_precompile --json out.json

Each file of tests that torchtitan installs is run three times by pytest: ``plain``, ``imported``,
with ``torch_ext_bucketing.trainers.torchtitan`` imported before it, and ``passes``, where moreover
each list of passes that torchtitan makes for a model has ours in the place of its bucketing, under
the name of what it replaces. Every test must end as it does ``plain``.

Exit status: 0, or 1 if one did not.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ext_bucketing.testing.demo.table import columns

from .command import add_json, document_of, parser_of, title, write_results

WAYS = ("plain", "imported", "passes")
FILES = (
    "test_chunked_loss",
    "test_custom_codegen",
    "test_graph_pp_passes",
    "test_graph_pp_runner",
    "test_passes",
    "test_performance_passes",
    "test_precompile",
    "test_simple_fsdp",
    "test_trace_module",
)
FOLDER = "torchtitan.experiments.graph_trainer.tests"
WAY = "TITAN_TESTS_WAY"
USED = "ours ran on "
LIMIT_S = 1200


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = parser_of("python -m benchmarks.titan_tests", __doc__)
    parser.add_argument("--files", nargs="+", default=FILES)
    add_json(parser)
    args = parser.parse_args(argv)
    rows = []
    for file in args.files:
        found = {way: _outcomes(file, way) for way in WAYS}
        plain, _ = found["plain"]
        for way, (outcomes, used) in found.items():
            others = {t: [plain.get(t), o] for t, o in outcomes.items() if plain.get(t) != o}
            others |= {t: [o, None] for t, o in plain.items() if t not in outcomes}
            row = {"file": file, "way": way, **Counter(outcomes.values())}
            rows.append(row | {"used": used, "otherwise": others})
            print(rows[-1], file=sys.stderr, flush=True)
    document = document_of("python -m benchmarks.titan_tests", argv) | {"rows": rows}
    ends = ("passed", "failed", "skipped")
    table = [["file", "way", *ends, "graphs with our passes", "otherwise than plain"]]
    for row in rows:
        counts = [str(row.get(end, 0)) for end in ends]
        table.append(
            [row["file"], row["way"], *counts, str(row["used"]), str(len(row["otherwise"]))]
        )
    write_results(args.json, document, f"{title(document)}\n\n{columns(table)}")
    return 1 if any(row["otherwise"] for row in rows) else 0


def _outcomes(file: str, way: str) -> tuple[dict[str, str], int]:
    """How each test of a file ended, and the number of graphs that our passes ran on."""
    path = Path(str(importlib.import_module(FOLDER).__file__)).with_name(f"{file}.py")
    with tempfile.TemporaryDirectory() as name:
        results = Path(name) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(path)]
        command += ["-p", __spec__.name, f"--junit-xml={results}"]
        environment = os.environ | {"PYTHONPATH": os.getcwd(), WAY: way, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, env=environment, cwd=name, capture_output=True, text=True, timeout=LIMIT_S
        )
        if not results.exists():
            raise RuntimeError(f"{file}, {way}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        cases = xml.etree.ElementTree.parse(results).iter("testcase")
        ends = {"failure": "failed", "error": "failed", "skipped": "skipped"}
        outcomes = {
            f"{case.get('classname')}::{case.get('name')}": next(
                (ends[child.tag] for child in case if child.tag in ends), "passed"
            )
            for case in cases
        }
        return outcomes, done.stdout.count(USED)


# --- in pytest, as its plugin --------------------------------------------------------


def _put_ours_in() -> None:
    """Have torchtitan's lists made with our passes, for the models that it has traced."""
    ours = importlib.import_module("torch_ext_bucketing.trainers.torchtitan")
    tracer: Any = importlib.import_module("torchtitan.experiments.graph_trainer.make_fx_tracer")
    passes: Any = importlib.import_module("torchtitan.experiments.graph_trainer.passes")
    trace, list_passes = tracer.minimal_fx_tracer, passes.compile_time_passes
    models: dict[int, Any] = {}

    def and_remember(*args: Any, **kwargs: Any) -> Any:
        run = trace(*args, **kwargs)

        def traced(*inputs: Any, **more: Any) -> Any:
            result = run(*inputs, **more)
            models[id(result.gm)] = kwargs.get("module")
            return result

        return traced

    def with_ours(traced: Any, *args: Any, **kwargs: Any) -> Any:
        listed = list_passes(traced, *args, **kwargs)
        model = models.get(id(getattr(traced, "gm", None)))
        names = [getattr(p, "func", p).__name__ for p in listed]
        if model is not None and ours._REPLACED in names:
            run = ours.whole_step_pass(model, ours.recipe(model))

            def named(*inputs: Any) -> Any:
                print(f"\n{USED}{type(model).__name__}")
                return run(*inputs)

            named.__name__ = ours._REPLACED
            listed[names.index(ours._REPLACED)] = named
        return listed

    tracer.minimal_fx_tracer, passes.compile_time_passes = and_remember, with_ours


if os.environ.get(WAY) == "imported":
    importlib.import_module("torch_ext_bucketing.trainers.torchtitan")
elif os.environ.get(WAY) == "passes":
    _put_ours_in()

if __name__ == "__main__":
    sys.exit(main())
