"""Train models with gradients added in the order of the ranks, and look for a second result.

    python benchmarks/rank_order.py
    python benchmarks/rank_order.py --models moe --topologies 2x2 --backend inductor

Each model is trained under eager FSDP2 with ``AllToAllReduceScatter`` (per block, and as one unit),
and compiled with ``FixedOrderReduce`` for each byte cap and each schedule, on every topology. All
weights of all ranks make one hash per run: there has to be one of a model and mesh, wherever the
nodes end. Rings are run beside them (two sets of eager's units, two byte caps), to see how many
results they have on the same model.

Exit status: 0 if every model and mesh has one hash, 1 if one has more or a rank failed, 2 for bad
options.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

import torch_ext_bucketing as teb
from benchmarks.command import (
    add_json,
    add_names,
    add_number,
    document_of,
    parser_of,
    sayer,
    title,
    write_json,
)
from benchmarks.eager_parity.base import Unit
from benchmarks.eager_parity.devices import why_no_nccl
from benchmarks.eager_parity.models import MODELS, build
from benchmarks.eager_parity.ranks import Runs, mesh_of, row_group
from benchmarks.eager_parity.rows import Row
from torch_ext_bucketing.graph.nodes import KINDS
from torch_ext_bucketing.passes.combine_uses import CombineUses
from torch_ext_bucketing.passes.reduce_scatter_first import ReduceScatterFirst
from torch_ext_bucketing.reports.base import columns
from torch_ext_bucketing.testing.ranks import Rank, RankError, preload, run_ranks

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "1x4": {"nodes": 1},
    "2x2": {"nodes": 2},
    "4x1": {"nodes": 4},
    "HSDP 2x2": {"nodes": 2, "mesh": (2, 2), "mode": "hybrid_shard"},
}
"""Nodes x ranks per node."""
WIDTH = 256
CAPS_MB = (1.0, 25.0, 500.0)
SCHEDULES: dict[str, list[Any]] = {
    "graph order": [],
    "overlap": [teb.Schedule(teb.Overlap())],
    "memory": [teb.Schedule([teb.Overlap(), teb.PeakMemory(ratio=1.0), teb.MaxComputeRun(2)])],
}


class RankOrderRuns(Runs):
    """A model in many ways, each with a name and a hash of this rank's weights."""

    one_unit = False
    schedules: Sequence[str] = tuple(SCHEDULES)

    def plain(self) -> tuple[nn.Module, DeviceMesh]:
        """Make the model, wide enough for several buckets of 1 MiB."""
        model = build(self.row.model, layers=self.row.layers, dim=WIDTH)
        return model.to(self.row.device), self.mesh

    def units(self, model: nn.Module) -> list[Unit]:
        """Return the row's units, or the whole model as one."""
        return [""] if self.one_unit else super().units(model)

    def all(self) -> Iterator[tuple[str, str]]:
        """Run sums in rank order, then rings; the names of these begin with "rings"."""
        for rings in (False, True):
            for self.one_unit in (False, True):
                model = self.eager()
                for module in model.modules():
                    if isinstance(module, FSDPModule) and not rings:
                        module.set_custom_reduce_scatter(teb.fsdp.AllToAllReduceScatter())
                name = f"eager, {'one unit' if self.one_unit else 'per block'}"
                yield f"{'rings ' * rings}{name}", self._hash(model, model)
            self.one_unit = False
            for cap in CAPS_MB[::2] if rings else (None, *CAPS_MB):
                for schedule in ("graph order",) if rings else self.schedules:
                    passes = SCHEDULES[schedule]
                    name = f"{'per unit' if cap is None else f'{cap:g} MiB'}, {schedule}"
                    yield f"{'rings ' * rings}{name}", self._compiled(cap, rings, passes)

    def _compiled(self, cap: float | None, rings: bool, schedule: list[Any]) -> str:
        model = self.sharded()
        if cap is None:
            order = teb.FSDPParamOrder.from_model(model, units=self.units(model))
            bucket: Any = teb.BucketByUnit(order, KINDS)
        else:
            bucket = teb.BucketByCap(cap, kinds=KINDS)
        hybrid = [ReduceScatterFirst()] if len(self.row.mesh) > 1 else []
        passes = [CombineUses(), *hybrid, teb.ReshardAfterForward(), bucket]
        passes += [] if rings else [teb.FixedOrderReduce()]
        compiler = teb.backend(self.row.backend, [*passes, *schedule], model=model)
        return self._hash(model, self.compiled(model, compiler))

    def _hash(self, model: nn.Module, run: Callable[..., Any]) -> str:
        return self.train(model, self.step(model, run)).digests[-1]


def _run(rank: Rank, row: Row, steps: int, schedules: Sequence[str]) -> None:
    with row_group(rank, row):
        runs = RankOrderRuns(rank, row, mesh_of(row), steps)
        runs.schedules = schedules
        for name, found in runs.all():
            rank.send((name, found))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.device == "cuda" and (why := why_no_nccl()):
        parser.error(f"--device cuda: {why}")
    say = sayer(time.monotonic())
    found: dict[str, dict[str, dict[str, str]]] = {}
    failed = False
    for model in args.models:
        for topology in args.topologies:
            fields = {"backend": args.backend, "device": args.device, **TOPOLOGIES[topology]}
            row = Row(f"{model}/{topology}", model, **fields)
            hashes: dict[str, dict[int, str]] = {}

            def on_message(
                rank: int, message: tuple[str, str], hashes: dict[str, dict[int, str]] = hashes
            ) -> None:
                hashes.setdefault(message[0], {})[rank] = message[1]

            try:
                run_ranks(
                    _run,
                    row.ranks,
                    row,
                    args.steps,
                    args.schedules,
                    timeout_s=args.timeout,
                    on_message=on_message,
                )
            except RankError as error:
                print(f"rank_order.py: {row.name}: {error}", file=sys.stderr)
                failed = True
            whole = {
                name: hashlib.sha256(repr(sorted(ranks.items())).encode()).hexdigest()[:12]
                for name, ranks in hashes.items()
                if len(ranks) == row.ranks
            }
            found.setdefault(model, {})[topology] = whole
            say(f"{row.name}: {len(whole)} runs")
            write_json(args.json, found)
    print(f"{title(document_of('benchmarks/rank_order.py', argv))}\n")
    text, passed = render(found)
    print(text)
    return 0 if passed and not failed else 1


def render(found: dict[str, dict[str, dict[str, str]]]) -> tuple[str, bool]:
    """Render the table; return it and whether every model has one hash per mesh."""
    rows = [["model", "topology", "runs", "hashes", "hash", "rings: runs", "hashes"]]
    of_mesh: dict[tuple[str, int], set[str]] = {}
    for model, topologies in found.items():
        for topology, runs in topologies.items():
            rings = [v for k, v in runs.items() if k.startswith("rings")]
            sums = [v for k, v in runs.items() if not k.startswith("rings")]
            of_mesh.setdefault((model, topology.count("HSDP")), set()).update(sums)
            numbers = [str(len(rings)), str(len({*rings}))]
            one = ", ".join(dict.fromkeys(sums))
            rows.append([model, topology, str(len(sums)), str(len({*sums})), one, *numbers])
    passed = all(len(hashes) == 1 for hashes in of_mesh.values())
    return columns(rows), passed


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("rank_order.py", __doc__)
    add_names(parser, "models", tuple(MODELS), "models", ("llama", "moe", "uneven"))
    add_names(parser, "topologies", tuple(TOPOLOGIES), "nodes x ranks per node")
    add_names(parser, "schedules", tuple(SCHEDULES), "schedules of sums in rank order")
    parser.add_argument("--backend", choices=("aot_eager", "inductor"), default="aot_eager")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="rings or NCCL (default: cpu)"
    )
    add_number(parser, "steps", 3, "optimizer steps")
    add_number(parser, "timeout", 1800, "seconds for a model on a topology")
    add_json(parser, "written after every topology")
    return parser


if __name__ == "__main__":
    preload("benchmarks.eager_parity.ranks")
    sys.exit(main())
