"""Check which starts hit Inductor's caches and which miss, under ``torchrun`` on gloo ranks.

    python -m benchmarks.warm_cells
    python -m benchmarks.warm_cells --json out.json

Five starts with one cache folder, which the first finds empty. Each compiles small models, forward
and backward, in these ways:

- this package's ``data_parallel``, sharded over all ranks, and HSDP on a mesh of 2 x 2;
- torchtitan's, the same two, and with tensor parallelism on a mesh of 2 x 2 (where torchtitan is
  installed);
- with a pass of a user's module.

The second start must hit in every rank, for the forward and the backward graph and in AOTAutograd's
cache. It then changes one thing at a time: the order of the parameters, the policy, the mesh. The
later starts change the source of the user's pass, that of this package, and the number of ranks.
What was changed must miss, and every start must compute the values of the first one.

Exit status: 0, or 1 if anything was otherwise.
"""

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_ext_bucketing as teb
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.differences import whole_digest
from torch_ext_bucketing.testing.trial import hash_of

from .command import add_json, document_of, parser_of, write_results
from .warm import cache_counts, counted, environment, pair, step_of_pair

LIMIT_S = 1200
ROOT = Path(__file__).resolve().parents[1]
HOOKS = "import torch_ext_bucketing as teb\n\nclass OwnPass(teb.BucketByUnit):\n    number = 1\n"

OURS = ("ours, FSDP", "ours, HSDP")
TORCHTITAN = ("torchtitan, FSDP", "torchtitan, HSDP", "torchtitan, FSDP and TP")
OWN = "pass of a user"
CHANGED = ("other order", "other policy", "other mesh")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = parser_of("python -m benchmarks.warm_cells", __doc__)
    add_json(parser)
    parser.add_argument("--rank", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.rank:
        run_rank(args.rank)
    titan = TORCHTITAN if importlib.util.find_spec("torchtitan") else ()
    cells = (*OURS, *titan, OWN)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("torch_ext_bucketing", "torch_patches", "benchmarks"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns(".cache"))
        hooks = folder / "hooks.py"
        hooks.write_text(HOOKS)
        rows = start(folder, "first", 4, dict.fromkeys(cells, "miss"))
        rows += start(
            folder, "second", 4, dict.fromkeys(cells, "hit") | dict.fromkeys(CHANGED, "miss")
        )
        hooks.write_text(HOOKS.replace("1", "2"))
        rows += start(folder, "user's pass edited", 4, {OWN: "miss", OURS[0]: "hit"})
        with open(folder / "torch_ext_bucketing" / "bucketing" / "plan.py", "a") as file:
            file.write("# edited\n")
        rows += start(folder, "package edited", 4, {OURS[0]: "miss"})
        rows += start(folder, "2 ranks", 2, {OURS[0]: "miss"})
    values = {row["cell"]: row["values"] for row in reversed(rows) if row["ranks"] == 4}
    for row in rows:
        changed = row["ranks"] != 4
        row["ok"] = row["found"] == row["expected"] and (
            changed or row["values"] == values[row["cell"]]
        )
    document = {**document_of("python -m benchmarks.warm_cells", argv), "rows": rows}
    write_results(args.json, document, table(document))
    return 0 if all(row["ok"] for row in rows) else 1


def start(folder: Path, name: str, world: int, expected: dict[str, str]) -> list[dict[str, Any]]:
    """Start all ranks once; return a row for each cell."""
    env = environment(folder / "cache") | {"PYTHONPATH": str(folder)}
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [sys.executable, *run, "-m", "benchmarks.warm_cells", "--rank", *expected],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the start {name!r} failed:\n{done.stderr[-6000:]}")
    ranks = sorted(map(json.loads, done.stdout.splitlines()), key=lambda r: r["rank"])
    rows = []
    for cell, state in expected.items():
        graphs, aot = (
            [sum(r["cells"][cell][kind][i] for r in ranks) for i in range(3)]
            for kind in ("graphs", "aot")
        )
        place = ("hit", "miss", "bypass").index(state)
        as_expected = all(
            r["cells"][cell][kind] == [n * (i == place) for i in range(3)]
            for r in ranks
            for kind, n in (("graphs", 2), ("aot", 1))
        )
        rows.append(
            {
                "start": name,
                "ranks": world,
                "cell": cell,
                "graphs": graphs,
                "aot": aot,
                "expected": state,
                "found": state if as_expected else "something else",
                "values": whole_digest([r["cells"][cell]["values"] for r in ranks])[:12],
            }
        )
    return rows


def run_rank(cells: Sequence[str]) -> None:
    """Run one rank under ``torchrun``, print each cell's cache counts, and end the process."""
    torch.set_num_threads(1)
    functorch_config.autograd_cache_allow_custom_autograd_functions = True
    dist.init_process_group("gloo")
    result = {
        "rank": dist.get_rank(),
        "cells": {cell: run_cell(cell) for cell in cells},
    }
    sys.stdout.write(json.dumps(result) + "\n")  # at once, so that lines of ranks don't mix
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)


def run_cell(cell: str) -> dict[str, Any]:
    """Compile a step, or load it, and run it."""
    torch._dynamo.reset()
    counters.clear()
    model = pair()
    shard: Callable[..., nn.Module] = teb.data_parallel
    if cell in TORCHTITAN:
        simple_fsdp = importlib.import_module("torchtitan.experiments.graph_trainer.simple_fsdp")
        simple_fsdp._wrap_class_cache.clear()
        shard = simple_fsdp.data_parallel
    world = dist.get_world_size()
    if cell.endswith("HSDP"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        shard(model, mesh, mode="hybrid_shard")
    elif cell == "other mesh":
        # Of HSDP: the replicas are ranks side by side.
        ranks = torch.arange(world).view(2, -1).t().contiguous()
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        shard(model, mesh, mode="hybrid_shard")
    elif cell.endswith("TP"):
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        shard(model, mesh["dp"], mode="fully_shard")
    else:
        shard(model, init_device_mesh("cpu", (world,)), mode="fully_shard")
    names = ["a.weight", "b.weight"]
    order = teb.FSDPParamOrder.from_fqns([names[::-1] if cell == "other order" else names])
    if cell == OWN:
        bucket = importlib.import_module("hooks").OwnPass(order)
    else:
        bucket = teb.BucketByUnit(order)
    overlap = teb.Overlap(depth=2) if cell == "other policy" else teb.Overlap()
    compiled = torch.compile(
        model, backend=teb.backend("inductor", [bucket, teb.Schedule(overlap)])
    )
    return {**cache_counts(), "values": hash_of(step_of_pair(model, compiled))}


def table(document: dict[str, Any]) -> str:
    """Render a line for each start and cell."""
    rows = [["start", "cell", "graphs", "AOT", "as expected"]]
    for row in document["rows"]:
        said = f"yes: {row['expected']}" if row["ok"] else f"NO: not {row['expected']}"
        rows.append([row["start"], row["cell"], *counted(row), said])
    about = "hit/miss/bypass of all ranks together; graphs: the FX graph cache, AOT: AOTAutograd's"
    return f"{about}\n\n{columns(rows)}"


if __name__ == "__main__":
    sys.exit(main())
