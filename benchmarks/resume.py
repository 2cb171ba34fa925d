"""Resume the documented training script under ``torchrun`` after a rank was killed.

    python -m benchmarks.resume                            # 2 and 4 ranks, Inductor
    python -m benchmarks.resume --ranks 2 --json out.json

On each number of ranks the script of ``docs/training-script.md`` runs

- ``whole``: from start to end;
- ``restarted``: the last rank is killed (SIGKILL) when step 4 is printed, after the checkpoint of
  step 3; ``torchrun --max-restarts 1`` ends the others and starts all again;
- ``started again``: the same without a restart, then the same command once more;
- ``from eager``: under eager FSDP2 up to step 3, then the command of ``whole``.

The weights of every rank must be those of ``whole``, but for ``from eager``: Inductor's kernels do
not round as eager's do, so that the first three steps are others; there the run has to end, and all
must go on from the checkpoint of step 3.

Exit status: 0, or 1 if anything was otherwise.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_ext_bucketing.reports.base import columns

from .command import add_json, document_of, parser_of, write_results

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "torch_ext_bucketing" / "docs" / "training-script.md"
SCRIPT = "train.py"
STEPS, SAVED, KILLED = 6, 3, 4
LIMIT_S = 900


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.resume", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    add_json(parser)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as name:
            (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
            Path(name, SCRIPT).write_text(source)
            for way in ("whole", "restarted", "started again", "from eager"):
                began = time.monotonic()
                row = run(way, ranks, Path(name) / way.replace(" ", "-"))
                row |= {"way": way, "ranks": ranks}
                row["seconds"] = round(time.monotonic() - began)
                rows.append(row)
                print(f"{ranks} ranks, {way}: {row}", file=sys.stderr, flush=True)
    document = document_of("python -m benchmarks.resume", argv)
    document |= {"compiler": "inductor", "rows": rows}
    text, well = table(document)
    write_results(args.json, document, text)
    return 0 if well else 1


def run(way: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Train in one way; return a summary of what each start printed."""
    whole = ["--steps", str(STEPS), "--compiler", "inductor"]
    if way == "whole":
        starts = [start(ranks, folder, whole)]
    elif way == "restarted":
        starts = [start(ranks, folder, whole, kill=True, restarts=1)]
    elif way == "started again":
        starts = [start(ranks, folder, whole, kill=True), start(ranks, folder, whole)]
    else:
        starts = [start(ranks, folder, ["--steps", str(SAVED), "--eager"])]
        starts += [start(ranks, folder, whole)]
    last = starts[-1]["text"]
    return {
        "ended": [s["ended"] for s in starts],
        "going on from": [int(n) for n in re.findall(r"going on from \S*/(\d+)\b", last)],
        "weights": [w for _, w in sorted(re.findall(r"rank (\d+): weights (\w+)", last))],
        "loss": re.findall(r"held-out loss ([\d.]+)", last)[-1:],
        "text": "" if last and starts[-1]["ended"] == 0 else last[-4000:],
    }


def start(
    ranks: int, folder: Path, options: Sequence[str], kill: bool = False, restarts: int = 0
) -> dict[str, Any]:
    """Run ``torchrun`` to its end; with ``kill``, kill the last rank once."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += [str(folder.parent / SCRIPT), "--folder", str(folder)]
    command += ["--save-every", str(SAVED), "--layers", "2", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    with tempfile.TemporaryFile("w+") as out:
        began = time.monotonic()
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
        try:
            while process.poll() is None:
                if time.monotonic() - began > LIMIT_S:
                    return {"ended": "STUCK", "text": read(out)}
                if kill and f"step {KILLED} of" in read(out):
                    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
                    kill = False
                time.sleep(0.01)
            return {"ended": process.returncode, "text": read(out)}
        finally:
            process.kill()  # the agent's end is that of its ranks
            process.wait()


def read(file: Any) -> str:
    file.seek(0)
    return str(file.read())


def ranks_of(pid: int) -> list[int]:
    """Return the agent's processes that train, in the order of their ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = []
    for child in children:
        with open(f"/proc/{child}/cmdline") as file:
            if any(part.endswith(f"/{SCRIPT}") for part in file.read().split("\0")):
                found.append(int(child))
    return found


def table(document: dict[str, Any]) -> tuple[str, bool]:
    """Render a line for each run; return it and whether all is well."""
    lines = [["ranks", "run", "ended with", "going on from", "held-out", "s", "weights"]]
    texts: list[str] = []
    well = True
    for row in document["rows"]:
        whole = next(r for r in document["rows"] if r["ranks"] == row["ranks"])
        ended = len(row["weights"]) == row["ranks"] and row["ended"][-1] == 0
        same = row["weights"] == whole["weights"]
        from_steps = [] if row["way"] == "whole" else [SAVED]
        ok = ended and row["going on from"] == from_steps and same == (row["way"] != "from eager")
        well &= ok
        said = "the same" if same else "others" if ended else "MISSING"
        ends = [", ".join(map(str, row[what])) for what in ("ended", "going on from")]
        said += "" if ok else ": NOT AS EXPECTED"
        cells = [*ends, "".join(row["loss"]), str(row["seconds"]), said]
        lines.append([str(row["ranks"]), row["way"], *cells])
        texts += [] if ok else [row["text"]]
    about = f"{document['compiler']}; weights: of all ranks"
    return "\n".join([about, "", columns(lines), *texts]), well


if __name__ == "__main__":
    sys.exit(main())
