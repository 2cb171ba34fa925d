"""What ``benchmarks/nccl.py`` runs, what makes it pass, and its table. No torch in here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from benchmarks.parity_cells import Reference, RunReport
from torch_ext_bucketing.testing.demo.results import whole_digest
from torch_ext_bucketing.testing.demo.table import columns

BACKENDS = ("aot_eager", "inductor")
PARALLELISM = ("fsdp", "hsdp")
RUNS = ("ours", "graph_order", "torch_buckets", "unbucketed")
"""The compiled runs that can be asked for, the proof of parity first."""

LABELS = {
    "eager": "eager FSDP2",
    "eager_again": "eager FSDP2, again",
    "unbucketed": "unbucketed",
    "torch_buckets": "unpatched torch's buckets",
    "graph_order": "ours, payload order off",
    "ours": "ours, payload order on",
    "aten_kernels": "  the same on ATen's kernels",
}
"""Every run, in the order of the table."""

WARMUP_STEPS = 3
"""Steps left out of the step time: compilation, lazy initialization, communicators."""

MIB = 2**20


@dataclass(frozen=True)
class Settings:
    """What all ranks of a launch know.

    Attributes:
        backend: ``"nccl"`` or ``"gloo"``.
        steps: of the runs that are compared with eager FSDP2.
        timed_steps: most steps of the runs that are there for their time and memory; fewer, but
            one after the warm-up, where ``run_s`` or ``soft_s`` has passed.
        layers: blocks of the model.
        dim: its width.
        batch: sequences per rank and step.
        soft_s: seconds from a launch's start after which no further run of the second kind begins.
        run_s: seconds after which such a run ends.
    """

    backend: str
    steps: int
    timed_steps: int
    layers: int
    dim: int
    batch: int
    soft_s: float
    run_s: float = 15.0


@dataclass(frozen=True)
class Key:
    """One run. ``backend`` is ``"-"`` for eager FSDP2."""

    ranks: int
    parallelism: str
    backend: str
    run: str

    @property
    def name(self) -> str:
        """What ``--only`` matches, such as ``4/hsdp/inductor/ours``."""
        return f"{self.ranks}/{self.parallelism}/{self.backend}/{self.run}"

    @property
    def reference(self) -> Reference:
        """The eager run that this one is compared with. HSDP shards over pairs of ranks."""
        return Reference("llama", max(1, self.ranks // 2), self.ranks, self.parallelism, "bf16")


@dataclass
class TimedReport(RunReport):
    """One run on one rank.

    Attributes:
        step_ms: wall time of every step, the device's work included, in milliseconds.
        peak_bytes: most memory that was allocated on the device during a step after the first,
            over what was allocated before the run; None on the CPU.
        collectives: per step, by kind.
    """

    step_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)


@dataclass
class RunResult:
    """One run on all ranks.

    Attributes:
        key: which one.
        steps: that were run.
        hashes: of all weights, after each step.
        loss: of rank 0, at each step.
        step_ms: median time of a step after the first few, of the slowest rank.
        peak_bytes: of the rank with the most; None on the CPU.
        collectives: per step, by kind.
        layout_differences: where the buckets' bytes are not eager FSDP2's, in words.
        seconds: wall time, compilation included.
        skipped: why the run was left out; "" where it was not.
    """

    key: Key
    steps: int = 0
    hashes: list[str] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    peak_bytes: int | None = None
    collectives: dict[str, int] = field(default_factory=dict)
    layout_differences: list[str] = field(default_factory=list)
    seconds: float = 0.0
    skipped: str = ""

    def equal_steps(self, other: RunResult) -> int:
        """Steps of this run after which all weights are those of ``other``, bit for bit."""
        return sum(a == b for a, b in zip(self.hashes, other.hashes, strict=False))

    def first_difference(self, other: RunResult) -> int | None:
        """The first step after which they are not, from 1; None if there is none."""
        for step, (a, b) in enumerate(zip(self.hashes, other.hashes, strict=False), 1):
            if a != b:
                return step
        return None


def select(ranks: Sequence[int], only: str = "*") -> list[Key]:
    """The compiled runs whose name matches ``only``. HSDP needs two groups of two ranks."""
    return [
        key
        for world in ranks
        for parallelism in PARALLELISM
        if parallelism != "hsdp" or (world >= 4 and world % 2 == 0)
        for backend in BACKENDS
        for run in RUNS
        if fnmatchcase((key := Key(world, parallelism, backend, run)).name, only)
    ]


def in_order(keys: Sequence[Key]) -> list[Key]:
    """The proofs of parity first: whatever runs out of time, they do not."""
    return sorted(keys, key=lambda key: key.run != "ours")


def nccl_environment(rank: int, ranks: int, devices: int) -> dict[str, str]:
    """Environment variables of one NCCL rank.

    With a GPU for every rank NCCL is left alone. With fewer, NCCL refuses two ranks on one GPU of
    one host, so every rank says that it is a host of its own (``NCCL_HOSTID``) and talks over
    sockets on the loopback interface.

    Raises:
        ValueError: the GPUs can't be shared evenly, which ``DeviceMesh`` asks for.
    """
    # cuBLAS picks an algorithm by what workspace it has; a fixed one is asked for by name.
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    if ranks <= devices:
        return variables
    if ranks % devices:
        raise ValueError(
            f"{ranks} ranks can't be spread evenly over {devices} GPUs; "
            "hide some with CUDA_VISIBLE_DEVICES"
        )
    return variables | {
        "NCCL_HOSTID": f"simulated-host-{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
    }


def soft_limit(left_s: float, ranks: int, to_come: Sequence[int]) -> float:
    """Seconds of ``left_s`` for a launch of so many ranks before others start: ranks that share a
    device take turns, so more of them take longer, though not in proportion."""
    mine = 1 + math.log2(ranks)
    share = mine / (mine + sum(1 + math.log2(other) for other in to_come))
    return left_s * min(share, 0.85)


def combine(key: Key, reports: Sequence[TimedReport]) -> RunResult:
    """One run's result from the reports of all its ranks."""
    peaks = [r.peak_bytes for r in reports if r.peak_bytes is not None]
    return RunResult(
        key,
        steps=len(reports[0].digests),
        hashes=[whole_digest(s) for s in zip(*(r.digests for r in reports), strict=True)],
        loss=reports[0].loss,
        step_ms=max(_median_ms(r.step_ms) for r in reports),
        peak_bytes=max(peaks, default=None),
        collectives=reports[0].collectives,
        layout_differences=[
            f"rank {rank}: {text}"
            for rank, r in enumerate(reports)
            for text in r.layout_differences
        ],
        seconds=max(r.seconds for r in reports),
    )


def _median_ms(step_ms: Sequence[float]) -> float:
    return statistics.median(step_ms[min(WARMUP_STEPS, len(step_ms) - 1) :])


def problems(results: Mapping[Key, RunResult], keys: Sequence[Key], steps: int) -> list[str]:
    """What keeps the whole from passing, one text per run: ``ours`` must be eager FSDP2's weights
    after every step and its bytes in every bucket, and nothing that was asked for may be missing,
    other than what was skipped to keep the time limit.

    Where Inductor's own kernels round differently the weights must be equal once ATen's kernels
    take their place: then nothing else differs.
    """
    found = []
    for key in keys:
        mine = results.get(key)
        if mine is None:
            found.append(f"{key.name}: not run")
            continue
        if key.run != "ours":
            continue
        if mine.layout_differences:
            found.append(f"{key.name}: another layout: {'; '.join(mine.layout_differences[:3])}")
        eager = results[Key(key.ranks, key.parallelism, "-", "eager")]
        equal = mine.equal_steps(eager)
        aten = results.get(Key(key.ranks, key.parallelism, key.backend, "aten_kernels"))
        if equal == steps or (aten is not None and aten.equal_steps(eager) == steps):
            continue
        text = f"{key.name}: weights equal to eager FSDP2's after {equal} of {steps} steps"
        if aten is not None:
            text += f", on ATen's kernels after {aten.equal_steps(eager)}"
        again = results.get(Key(key.ranks, key.parallelism, "-", "eager_again"))
        if again is not None and again.equal_steps(eager) < again.steps:
            text += (
                f"; eager FSDP2 itself is reproducible for {again.equal_steps(eager)} steps only"
            )
        found.append(text)
    return found


def render(header: Mapping[str, Any], results: Mapping[Key, RunResult]) -> str:
    """The table: one block per number of ranks and parallelism."""
    rows = [
        ["run", "backend", "ranks", "", "collectives", "equal to", "first", "last", "step"],
        ["", "", "", "", "AG+RS+AR", "eager", "difference", "loss", "ms"],
    ]
    rows[0] += ["/", "peak"]
    rows[1] += ["eager", "MiB"]
    for block in dict.fromkeys((k.ranks, k.parallelism) for k in results):
        mine = [k for k in results if (k.ranks, k.parallelism) == block]
        mine.sort(key=lambda k: (k.backend, list(LABELS).index(k.run)))
        eager = results.get(Key(*block, "-", "eager"))
        rows.append([""] * len(rows[0]))
        rows += [_row(results[key], eager) for key in mine]
    return f"{_title(header)}\n\n{columns(rows)}"


def _row(result: RunResult, eager: RunResult | None) -> list[str]:
    key = result.key
    head = [LABELS[key.run], key.backend, str(key.ranks), key.parallelism]
    if result.skipped or eager is None:
        return [*head, result.skipped or "no eager run", "", "", "", "", "", ""]
    first = result.first_difference(eager)
    return [
        *head,
        "+".join(str(result.collectives.get(k, 0)) for k in _KINDS),
        "" if result is eager else f"{result.equal_steps(eager)} of {result.steps}",
        "" if result is eager else ("none" if first is None else f"step {first}"),
        f"{result.loss[-1]:.6f}",
        f"{result.step_ms:.2f}",
        f"{result.step_ms / eager.step_ms:.2f}",
        "-" if result.peak_bytes is None else f"{result.peak_bytes / MIB:.1f}",
    ]


_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def _title(header: Mapping[str, Any]) -> str:
    where = header.get("device", "?")
    more = ", ".join(f"{name} {header[name]}" for name in ("nccl", "gpus") if name in header)
    return (
        f"{header['date']}, torch {header.get('torch', '?')}, Python {header['python']}, "
        f"{where}{', ' + more if more else ''}\n"
        f"LLaMA-style model, {header['layers']} blocks of width {header['dim']}, bf16, "
        f"{header['batch']} x 16 bytes of text per rank and step\n"
        f"command: {header['command']}"
    )
