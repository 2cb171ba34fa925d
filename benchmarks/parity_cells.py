"""The cells of the parity matrix and what makes one pass. No torch in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any

MODELS = ("llama", "moe", "vit", "uneven")
REUSE_MODELS = (
    "twice",
    "tied",
    "tied_chunked",
    "chunked_head",
    "block_twice",
    "two_dtypes",
    "checkpointed",
)
"""Those that use a parameter more than once: run as they are, on ``aot_eager``."""
TOPOLOGIES = ("2x2", "4x2")
MORE_TOPOLOGIES = ("1x2",)
"""For GPUs: one pair of ranks, of which HSDP would have no replicas."""
BACKENDS = ("aot_eager", "inductor")
PARALLELISM = ("fsdp", "hsdp", "fsdp+chunked_loss")
MORE_PARALLELISM = ("fsdp+tp",)
"""For the LLaMA-style model alone: it is written for tensor parallelism."""
REDUCE_DTYPES = ("bf16", "fp32")

CHANNELS = 8
CHUNK_BYTES = 128
"""Bytes of a buffer that go to one ring channel in a row: small, for small models."""

LOSS_CHUNKS = 4


@dataclass(frozen=True)
class Reference:
    """One eager run, which the cells of all backends are compared with."""

    model: str
    nodes: int
    ranks: int
    parallelism: str
    reduce_dtype: str
    device: str = "cpu"

    @property
    def ranks_per_node(self) -> int:
        return self.ranks // self.nodes

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh: HSDP replicates across nodes and shards inside them; tensor
        parallelism stays inside nodes."""
        if self.parallelism in ("hsdp", "fsdp+tp"):
            return (self.nodes, self.ranks_per_node)
        return (self.ranks,)

    @property
    def shard_size(self) -> int:
        """Ranks that share one parameter's shards."""
        return self.mesh_shape[0] if self.parallelism == "fsdp+tp" else self.mesh_shape[-1]

    @property
    def replicas(self) -> int:
        return self.mesh_shape[0] if self.parallelism == "hsdp" else 1

    @property
    def why_no_control(self) -> str:
        """Why payload order can't change a bit here, or "" where it can."""
        if max(self.shard_size, self.replicas) == 2:
            return "groups of two ranks: a + b is b + a"
        if self.device == "cuda":
            return "whether NCCL's order depends on the place in a buffer is up to the machine"
        return ""


@dataclass(frozen=True)
class Cell:
    """One combination. ``ranks`` counts all ranks, on all nodes; those on GPUs talk by NCCL."""

    model: str
    nodes: int
    ranks: int
    backend: str
    parallelism: str
    reduce_dtype: str
    device: str = "cpu"

    @property
    def reference(self) -> Reference:
        return Reference(
            self.model, self.nodes, self.ranks, self.parallelism, self.reduce_dtype, self.device
        )

    @property
    def name(self) -> str:
        """What ``--only`` matches, such as ``llama/2x2/aot_eager/fsdp/bf16``."""
        topology = f"{self.nodes}x{self.ranks // self.nodes}"
        return "/".join((self.model, topology, self.backend, self.parallelism, self.reduce_dtype))


@dataclass
class RunReport:
    """One run on one rank: what is sent to the launching process."""

    digests: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    layout_differences: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class CellReport:
    """All of a cell's runs on one rank, by the name of the run."""

    cell: Cell
    eager: RunReport
    runs: dict[str, RunReport]
    torch: str = ""


@dataclass
class CellResult:
    """What came out of a cell.

    Attributes:
        steps: steps that were run.
        steps_equal: steps after which the hash of all weights is eager FSDP2's.
        control_first_different_step: first step after which it is not when buckets are packed in
            graph order; None where every step was equal.
        layout_equal: every bucket's members and byte offsets are those of eager's param groups.
        cause: why weights differ, or why the control can't; "" where there is nothing to explain.
        experiment: the figures that prove the cause.
        layout_differences: the first few, in words.
        seconds: wall time of the cell's own runs.
        torch: its version.
        date: when the cell was run.
    """

    cell: Cell
    steps: int
    steps_equal: int
    control_first_different_step: int | None
    layout_equal: bool
    cause: str = ""
    experiment: dict[str, Any] = field(default_factory=dict)
    layout_differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    torch: str = ""
    date: str = ""

    @property
    def problems(self) -> list[str]:
        """What keeps the cell from passing."""
        found = []
        if not self.layout_equal:
            found.append("the payload layout is not eager's")
        proven = self.experiment.get("aten_kernels_steps_equal") == self.steps
        if self.steps_equal != self.steps and not proven:
            found.append(f"weights equal after {self.steps_equal} of {self.steps} steps only")
        expected = not self.cell.reference.why_no_control
        if expected and self.control_first_different_step is None:
            found.append("graph order gives the same bits")
        return found

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> CellResult:
        """The result that :meth:`as_dict` was made from."""
        cell = Cell(**{f.name: data[f.name] for f in fields(Cell) if f.name in data})
        return cls(cell, **{f.name: data[f.name] for f in fields(cls) if f.name != "cell"})

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the cell's fields, then the rest."""
        own = {k: v for k, v in asdict(self).items() if k != "cell"}
        return {**asdict(self.cell), **own, "passed": not self.problems, "problems": self.problems}


def select(
    models: Sequence[str],
    topologies: Sequence[str],
    backends: Sequence[str],
    parallelism: Sequence[str],
    reduce_dtypes: Sequence[str],
    only: str = "*",
    device: str = "cpu",
) -> list[Cell]:
    """The cells asked for, those of one eager run next to each other."""
    return [
        replace(cell, device=device)
        for cell in _all(topologies)
        if cell.model in models
        and cell.backend in backends
        and cell.parallelism in parallelism
        and cell.reduce_dtype in reduce_dtypes
        and (cell.nodes > 1 or cell.parallelism != "hsdp")
        and fnmatchcase(cell.name, only)
    ]


def _all(topologies: Sequence[str]) -> Iterator[Cell]:
    for topology in topologies:
        nodes, per_node = (int(n) for n in topology.split("x"))
        ranks = nodes * per_node
        for model in MODELS:
            kinds = (*PARALLELISM, *(MORE_PARALLELISM if model == "llama" else ()))
            for parallelism in kinds:
                for reduce_dtype in REDUCE_DTYPES:
                    for backend in BACKENDS:
                        yield Cell(model, nodes, ranks, backend, parallelism, reduce_dtype)
        for model in REUSE_MODELS:
            for parallelism in ("fsdp", "hsdp"):
                for reduce_dtype in REDUCE_DTYPES:
                    yield Cell(model, nodes, ranks, "aot_eager", parallelism, reduce_dtype)


def on_messages(
    world: int,
    key: Callable[[Any], Any],
    complete: Callable[[list[Any]], None],
    say: Callable[[str], None],
) -> Callable[[int, tuple[str, Any]], None]:
    """What handles the messages of ranks: rank 0's ``("run", text)`` is said; of other messages
    ``complete`` gets the payloads with one ``key``, by rank, when all ranks have sent theirs."""
    reports: dict[Any, list[Any]] = {}

    def on_message(rank: int, message: tuple[str, Any]) -> None:
        kind, payload = message
        if kind == "run":
            if rank == 0:
                say(payload)
            return
        by_rank = reports.setdefault(key(payload), [None] * world)
        by_rank[rank] = payload
        if None not in by_rank:
            complete(reports.pop(key(payload)))

    return on_message
