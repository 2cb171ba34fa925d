"""What people train, one row each, for ``parity.py --rows``. Needs no torch itself.

A row compares one way to train with eager FSDP2 with the same training compiled, on the passes of
:func:`.recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from benchmarks.parity_cells import on_messages
from torch_ext_bucketing.testing.demo.table import columns
from torch_ext_bucketing.testing.payloads import whole_digest
from torch_ext_bucketing.testing.ranks import Rank, RankError, run_ranks

__all__ = ["ROWS", "Row", "RowReport", "RowResult", "Traffic", "render_rows", "run_table"]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Args:
        name: what ``--rows`` matches.
        model: of ``parity_rows_models.MODELS``.
        mesh: sizes of the mesh, (ranks), (replicas, shards) or (shards, tensor-parallel ranks).
        client: whose sharding is compiled: this package's ``data_parallel``, or torchtitan's as it
            is installed; or torchtitan's of its own model, by
            Dynamo or by its graph trainer's tracer.
        mode: of ``data_parallel``.
        tensor: parallelize the blocks over the mesh's second dimension, with the sequence sharded
            between them or not.
        microbatches: forwards and backwards per step.
        sync: when gradients are reduced, after each backward or after the last.
        checkpoint: activation checkpointing of every block, of all of it or saving its matmuls.
        regional: each block is compiled by itself, and the rest, whose every parameter is a unit,
            is not: what that sends is not counted.
        graphs: pairs of forward and backward graphs that a run compiles.
        nodes: simulated.
        dtype: of gathers and reductions.
        chunk_bytes: of a buffer that go to one ring channel in a row; 0 for the matrix's.
        expert: ranks that share the experts.
        layers: of torchtitan's model, from the first on; 0 for all.
    """

    name: str
    model: str = "decoder"
    mesh: tuple[int, ...] = (4,)
    client: Literal["ours", "torchtitan", "torchtitan's model", "torchtitan's trainer"] = "ours"
    mode: Literal["fully_shard", "hybrid_shard", "replicate"] = "fully_shard"
    tensor: Literal["", "tensor", "tensor+sequence"] = ""
    microbatches: int = 1
    sync: Literal["each", "last"] = "each"
    checkpoint: Literal["", "full", "selective"] = ""
    regional: bool = False
    graphs: int = 1
    nodes: int = 2
    dtype: Literal["bf16", "fp32"] = "bf16"
    chunk_bytes: int = 0
    expert: int = 1
    layers: int = 0

    @property
    def ranks(self) -> int:
        total = 1
        for size in self.mesh:
            total *= size
        return total

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data."""
        return self.mesh[0] if self.tensor else self.ranks


_TITAN: dict[str, Any] = {"client": "torchtitan"}
_MODEL: dict[str, Any] = {"client": "torchtitan's model", "chunk_bytes": 4096}
_TRAINER: dict[str, Any] = {**_MODEL, "client": "torchtitan's trainer", "layers": 2}

ROWS: tuple[Row, ...] = (
    Row("torchtitan/fully_shard", **_TITAN),
    Row("torchtitan/replicate", mode="replicate", **_TITAN),
    Row("torchtitan/hybrid_shard_2x4", mesh=(2, 4), mode="hybrid_shard", nodes=4, **_TITAN),
    Row("torchtitan/hybrid_shard_4x2", mesh=(4, 2), mode="hybrid_shard", nodes=4, **_TITAN),
    Row("torchtitan/fsdp2_tp2", "tensor", (2, 2), tensor="tensor", **_TITAN),
    Row("torchtitan/fsdp2_tp2_sp", "tensor", (2, 2), tensor="tensor+sequence", **_TITAN),
    Row("torchtitan/hybrid_shard_2x2", mesh=(2, 2), mode="hybrid_shard", **_TITAN),
    Row("torchtitan/fsdp4_tp2", "tensor", (4, 2), tensor="tensor", nodes=4, **_TITAN),
    Row("torchtitan/fsdp4_tp2_sp", "tensor", (4, 2), tensor="tensor+sequence", nodes=4, **_TITAN),
    Row("torchtitan/blocks", regional=True, **_TITAN),
    Row("blocks", regional=True),
    Row("checkpoint/every_block", checkpoint="full"),
    Row("checkpoint/selective", checkpoint="selective"),
    Row("accumulate/reduce_each", microbatches=3),
    # The reduction is a graph of its own.
    Row("accumulate/reduce_last", microbatches=3, sync="last", graphs=2),
    Row("frozen_parameter", "frozen"),
    Row("unused_parameter", "unused"),
    Row("branch", "branch", graphs=2),
    Row("torchtitan_model/llama3", "llama3", **_MODEL),
    Row("torchtitan_model/deepseek_v3", "deepseek_v3", **_MODEL),
    Row("torchtitan_model/deepseek_v3_experts", "deepseek_v3", expert=2, **_MODEL),
    Row("graph_trainer/llama3", "llama3", **_TRAINER),
    Row("graph_trainer/deepseek_v3_experts", "deepseek_v3", expert=2, **_TRAINER),
)


def _select(pattern: str) -> Iterator[list[Row]]:
    """The rows whose name matches, those of one number of ranks and nodes together."""
    chosen = [row for row in ROWS if any(fnmatchcase(row.name, p) for p in pattern.split(","))]
    for key in dict.fromkeys((row.ranks, row.nodes, row.chunk_bytes) for row in chosen):
        yield [row for row in chosen if (row.ranks, row.nodes, row.chunk_bytes) == key]


Traffic = dict[str, dict[str, list[int]]]
"""Collectives of parameters in one step, per network level ("inside nodes", "between nodes") and
kind: their number and the bytes of their full buffers, on one rank. What is gathered a second time,
for backward, is a kind of its own."""


@dataclass
class RowReport:
    """A row on one rank: a digest of this rank's weights after every step, per run."""

    row: Row
    digests: dict[str, list[str]]
    before: Traffic
    after: Traffic
    eager_collectives: dict[str, int]
    notes: list[str] = field(default_factory=list)
    torch: str = ""
    seconds: float = 0.0


@dataclass
class RowResult:
    """What came out of a row.

    Attributes:
        steps_equal: steps after which the hash of all ranks' weights is eager's.
        control_first_different_step: with buckets in graph order; None where all were equal.
        notes: what the compile report says was left alone or could not be done.
    """

    row: Row
    steps: int
    steps_equal: int
    control_first_different_step: int | None
    before: Traffic
    after: Traffic
    eager_collectives: dict[str, int]
    notes: list[str]
    torch: str
    seconds: float
    date: str = ""

    @property
    def problems(self) -> list[str]:
        found = []
        if self.steps_equal != self.steps:
            found.append(f"equal in {self.steps_equal} of {self.steps} steps only")
        if self.control_first_different_step is None and max(self.row.mesh) > 2:
            found.append("graph order gives the same bits")
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the row's fields, then the rest."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "row"}
        return {**asdict(self.row), **own, "problems": self.problems}


def run_table(
    pattern: str,
    steps: int,
    timeout_s: float,
    finish: Callable[[RowResult], None],
    say: Callable[[str], None],
) -> list[str]:
    """Run the rows whose name matches; ``finish`` is called with each one's result.

    Returns how ranks failed, by row; the rows after such a one are run on new ranks.
    """
    errors = []
    for rows in _select(pattern):
        left = rows
        while left:
            done: list[RowResult] = []

            def keep(result: RowResult, done: list[RowResult] = done) -> None:
                done.append(result)
                finish(result)

            try:
                _run_topology(left, steps, timeout_s, keep, say)
            except RankError as error:
                errors.append(f"{left[len(done)].name}: {error}")
                left = left[len(done) + 1 :]
            else:
                left = []
    return errors


def _run_topology(
    rows: Sequence[Row],
    steps: int,
    timeout_s: float,
    finish: Callable[[RowResult], None],
    say: Callable[[str], None],
) -> None:
    def complete(by_rank: list[RowReport]) -> None:
        result = _combine(by_rank, steps)
        say(f"{result.row.name}: {'; '.join(result.problems) or 'equal'}")
        finish(result)

    world = rows[0].ranks
    run_ranks(
        _run_rows,
        world,
        list(rows),
        steps,
        timeout_s=timeout_s,
        on_message=on_messages(world, lambda r: r.row.name, complete, say),
    )


def _run_rows(rank: Rank, rows: list[Row], steps: int) -> None:
    from benchmarks.parity_rows_ranks import run_rows  # the ranks alone need torch

    run_rows(rank, rows, steps)


def _combine(reports: Sequence[RowReport], steps: int) -> RowResult:
    first = reports[0]

    def hashes(name: str) -> list[str]:
        return [
            whole_digest(shards) for shards in zip(*(r.digests[name] for r in reports), strict=True)
        ]

    eager, ours, control = map(hashes, ("eager", "fsdp_order", "control"))
    different = [i for i, digest in enumerate(control) if digest != eager[i]]
    return RowResult(
        first.row,
        steps,
        sum(a == b for a, b in zip(ours, eager, strict=True)),
        different[0] + 1 if different else None,
        first.before,
        first.after,
        first.eager_collectives,
        list(dict.fromkeys(note for r in reports for note in r.notes)),
        first.torch,
        round(max(r.seconds for r in reports), 1),
    )


def render_rows(results: Sequence[RowResult]) -> str:
    """The table: equal steps, and what a step sends per network level before and after."""
    head = ["row", "ranks", "equal of", "control", "collectives", "KiB inside nodes", "KiB between"]
    rows = [head, ["", "x nodes", "", "differs", "eager's", "", "nodes"]]
    for r in results:
        first = r.control_first_different_step
        counts = [str(_total(traffic, 0)) for traffic in (r.before, r.after)]
        rows.append(
            [
                r.row.name,
                f"{r.row.ranks} x {r.row.nodes}",
                f"{r.steps_equal} of {r.steps}",
                "none" if first is None else f"step {first}",
                f"{' -> '.join(counts)} ({sum(r.eager_collectives.values())})",
                *(
                    f"{_total(r.before, 1, level) / 1024:.0f} -> "
                    f"{_total(r.after, 1, level) / 1024:.0f}"
                    for level in ("inside nodes", "between nodes")
                ),
            ]
        )
    notes = [f"{r.row.name}: {note}" for r in results for note in (*r.problems, *r.notes)]
    return "\n".join([columns(rows), *notes])


def _total(traffic: Traffic, what: int, level: str = "") -> int:
    """The number (0) or the bytes (1) of all collectives of a level."""
    return sum(
        entry[what]
        for name, kinds in traffic.items()
        if level in ("", name)
        for kind, entry in kinds.items()
        if kind != "gathered again"
    )
