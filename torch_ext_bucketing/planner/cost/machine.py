"""Describe GPUs and networks, and time collectives by NCCL's tuning model.

NCCL sends by one of three protocols. LL and LL128 write a flag beside the data, so a step takes
little and bandwidth is lost; Simple waits for whole chunks. An estimate takes the fastest. Formulas
and latencies are those of NCCL's ``src/graph/tuning.cc``, which torch's
``torch/_inductor/comm_analysis.py`` has, too.

The time of a collective depends on its group's *layout*: the number of ranks, and the number of
nodes that they are on. Ranks of one node use one level of the network, nodes another, which may be
ten times slower. So eight ranks of one node and eight ranks on eight nodes are different groups.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from ...errors import check_argument, check_count, check_positive
from ...graph.nodes import COLLECTIVES, CollectiveType

_TREE_SHARE = 0.6
"""A tree's share of a ring's bandwidth.

NCCL's ``treeCorrectionFactor`` falls from 0.9 to 0.4 or 0.5 and comes back, by size and protocol.
"""


class Protocol(NamedTuple):
    """Bandwidth and latencies of one of NCCL's protocols on one level of a network."""

    base_ms: float  # milliseconds of a collective without its steps
    ring_ms: float  # milliseconds of a step of a ring
    # Milliseconds of a step of a tree, and of a ring with one rank on each node, where nothing
    # hides the network.
    tree_ms: float
    share: float = 1.0  # of the level's bandwidth
    # Bytes per second that a whole group reaches at most; None: no such limit.
    limit: float | None = None

    def reached(self, bandwidth: float) -> float:
        """Return the bytes per second that the protocol reaches at ``bandwidth``."""
        return min(bandwidth * self.share, math.inf if self.limit is None else self.limit)


@dataclass(frozen=True)
class Level:
    """One level of a network.

    Args:
        bandwidth: bytes per second that each rank sends and, at the same time, receives.
        latency_ms: milliseconds of the smallest message, a step of a ring.
        protocols: in place of ``latency_ms``, those of NCCL, in the same order on both levels of a
            machine.
    """

    bandwidth: float
    latency_ms: float = 0.0
    protocols: tuple[Protocol, ...] = ()

    def __post_init__(self) -> None:
        check_positive("bandwidth", self.bandwidth, "rate per second")
        check_time("latency_ms", self.latency_ms)
        if self.protocols and self.latency_ms:
            raise ValueError("give latency_ms or protocols, not both")
        for protocol in self.protocols:
            if not isinstance(protocol, Protocol):
                raise ValueError(f"protocols must be Protocol(...), got {protocol!r}")
            for name in ("base_ms", "ring_ms", "tree_ms"):
                check_time(name, getattr(protocol, name))
            check_positive("share", protocol.share)
            if protocol.limit is not None:
                check_positive("limit", protocol.limit)


def nvlink(limit: float) -> tuple[Protocol, ...]:
    """Return NCCL's LL, LL128 and Simple on NVLink; LL reaches ``limit`` bytes per second."""
    return (
        Protocol(0.0066, 0.0006, 0.0006, 0.5, limit),
        Protocol(0.014, 0.0019, 0.00125, 0.92),
        Protocol(0.0084, 0.0034, 0.004),
    )


INFINIBAND = (
    Protocol(0.0066, 0.0027, 0.005, 0.5, 20.4e9),
    Protocol(0.014, 0.004, 0.0085, 0.92),
    Protocol(0.0084, 0.014, 0.014),
)
"""The same between nodes. LL's limit is that of four nodes or more."""


def levels_ms(
    kind: CollectiveType, members: Sequence[int], nbytes: int, intra: Level, inter: Level
) -> float:
    """Estimate the milliseconds of a collective.

    A ring moves (n - 1) / n of the buffer past every one of n ranks, for an all-reduce twice, at
    the bandwidth of the slower level: ``intra``'s, or the sum of ``inter``'s over the ranks of a
    node. Of its n - 1 steps, k - 1 have the latency between k nodes. A tree, which NCCL has for
    all-reduces between nodes, goes up and down log2(k) steps between them. In an all-to-all each
    rank sends one message to each level at the same time.

    ``members``: ranks of the group on each of its nodes, at least two in all. ``nbytes``: input and
    output together.
    """
    n, nodes, fewest, most = sum(members), len(members), min(members), max(members)
    count = max(len(intra.protocols), len(inter.protocols), 1)
    pairs = list(zip(_protocols(intra, count), _protocols(inter, count), strict=False))
    if not kind.rounds:
        near, far = nbytes / 2 * (most - 1) / n, nbytes / 2 * (n - fewest) / n
        parts = ((near, 0, intra.bandwidth), (far, 1, inter.bandwidth))
        return max(
            min(
                pair[i].base_ms + pair[i].ring_ms + part / pair[i].reached(speed) * 1e3
                for pair in pairs
            )
            for part, i, speed in parts
            if part
        )
    whole = (n if kind.whole_input else 1) + (n if kind.whole_output else 1)
    buffer = nbytes * n / whole
    trees = kind.rounds == 2 and nodes > 1 and intra.protocols and inter.protocols
    estimates = []
    for inside, between in pairs:  # a ring is as fast as its slowest hop
        speeds = [inside.reached(intra.bandwidth)] if most > 1 else []
        speeds += [between.reached(fewest * inter.bandwidth)] if nodes > 1 else []
        base = max(inside.base_ms, between.base_ms) if nodes > 1 else inside.base_ms
        step = between.ring_ms if most > 1 else between.tree_ms
        steps = (n - nodes) * inside.ring_ms + (nodes - 1) * step
        moving = buffer / min(speeds) * 1e3
        estimates.append(base + kind.rounds * (moving * (n - 1) / n + steps))
        if trees:
            steps = (most - 1) * inside.tree_ms + math.log2(nodes) * between.tree_ms
            estimates.append(base + 2 * (moving / _TREE_SHARE + steps))
    return min(estimates)


def _protocols(level: Level, count: int) -> Sequence[Protocol]:
    return level.protocols or [Protocol(0.0, level.latency_ms, level.latency_ms)] * count


def is_time(value: Any) -> bool:
    """Return whether ``value`` is a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value < math.inf


def check_time(name: str, value: object) -> None:
    """Raise a ValueError unless ``value`` is a time of at least 0."""
    if not is_time(value):
        raise ValueError(f"{name} must be a time of at least 0, got {value!r}")


GroupLayout = tuple[int, int]
"""The number of ranks of a process group, and the number of nodes that they are on."""
Table = Mapping[tuple[str, int | GroupLayout], Sequence[tuple[int, float]]]
_FORMAT = 1


@dataclass(frozen=True)
class Machine:
    """One GPU and its networks.

    Args:
        name: for reports.
        flops: operations per second that matrix products reach, by dtype name such as
            ``"bfloat16"``.
        other_flops: the same for dtypes that ``flops`` does not name.
        bandwidth: bytes per second that kernels read and write.
        kernel_ms: milliseconds of the smallest kernel.
        collectives: measured times, ``(kind, (ranks, nodes))`` to ``(bytes, ms)`` pairs. Kind is a
            key of :data:`.COLLECTIVES`, bytes are input and output together. ``(kind, ranks)``
            stands for groups on one node, and for all groups where ``ranks_per_node`` is None.
            Times are interpolated between sizes and extrapolated by bandwidth beyond the last.
        ranks_per_node: ranks 0 to n - 1 are on one node, the next n on another, and so on. None:
            unknown, all groups count as on one node.
        intra: the network inside a node. Groups without a time in ``collectives`` take that of the
            two levels (:meth:`.Machine.network_ms`), or torch's estimate where there are none.
        inter: the network between nodes, with ``intra`` and ``ranks_per_node``. Every rank of a
            node has its ``bandwidth``. Both levels have the same protocols.
        factors: what times are multiplied by, by kind of collective and ``"kernel"``; others by 1.
        fuses: whether elementwise operators and reductions run as the kernels that Inductor would
            fuse them to, instead of each alone. None: as the backend does that compiles the graph.
        estimate: ``(node, nbytes | None) -> ms | None``, called first, for kernels and collectives.
            ``nbytes`` (input and output) is given for a bucket that isn't merged yet. None leaves
            the node to the rest of the machine. It must return the same on every rank, so it must
            read no clock. Without a ``uuid()`` it disables Inductor's caches.
        host_bandwidth: bytes per second of copies between the GPU and pinned host memory, each way.
        host_ms: milliseconds that the host takes to launch a collective with its wait, by kind, a
            ``"kernel"``, and a kernel from ``"generated"`` code, which is Inductor's; without that
            entry as long as any kernel. Others take none.
    """

    name: str = "machine"
    flops: Mapping[str, float] = field(default_factory=dict)
    other_flops: float = 50e12
    bandwidth: float = 2e12
    kernel_ms: float = 0.002
    collectives: Table = field(default_factory=dict)
    ranks_per_node: int | None = None
    intra: Level | None = None
    inter: Level | None = None
    factors: Mapping[str, float] = field(default_factory=dict)
    fuses: bool | None = None
    estimate: Callable[[fx.Node, int | None], float | None] | None = None
    host_bandwidth: float = 50e9
    host_ms: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_argument("name", self.name, str)
        check_argument("fuses", self.fuses, bool | None)
        for name in ("flops", "factors", "collectives", "host_ms"):
            check_argument(name, getattr(self, name), Mapping)
        rates = {"other_flops": self.other_flops, "bandwidth": self.bandwidth}
        for name, rate in {**rates, "host_bandwidth": self.host_bandwidth, **self.flops}.items():
            check_positive(name, rate, "rate per second")
        for kind, factor in self.factors.items():
            if (kind != "kernel" and kind not in COLLECTIVES) or not is_time(factor) or not factor:
                raise ValueError(
                    f"factors[{kind!r}] = {factor!r}: a key is 'kernel' or a kind of collective, a "
                    "factor positive"
                )
        for kind, ms in self.host_ms.items():
            if kind not in ("kernel", "generated", *COLLECTIVES):
                raise ValueError(
                    f"host_ms[{kind!r}]: a key is 'kernel', 'generated' or a kind of collective"
                )
            check_time(f"host_ms[{kind!r}]", ms)
        check_time("kernel_ms", self.kernel_ms)
        check_argument("intra", self.intra, Level | None)
        check_argument("inter", self.inter, Level | None)
        if self.ranks_per_node is not None:
            check_count("ranks_per_node", self.ranks_per_node, least=1)
        if self._levels is None and (self.intra or self.inter):
            raise ValueError("give intra, inter and ranks_per_node together, or none of the levels")
        if self._levels is not None:
            both = [len(level.protocols) for level in self._levels[:2] if level.protocols]
            if len({*both}) > 1:
                raise ValueError("intra and inter must have the same protocols, in the same order")
        check_argument("estimate", self.estimate, Callable | None)
        for key, series in self.collectives.items():
            if not _is_key(key):
                raise ValueError(
                    f"collectives[{key!r}]: a key is (kind, (ranks, nodes)) or (kind, ranks)"
                )
            if not series:
                raise ValueError(f"collectives[{key!r}] has no measurement")
            for point in series:
                pair = isinstance(point, (tuple, list)) and len(point) == 2
                if not pair or not all(map(is_time, point)) or not point[0]:
                    raise ValueError(f"collectives[{key!r}]: {point!r} is not (bytes above 0, ms)")

    @property
    def _levels(self) -> tuple[Level, Level, int] | None:
        """The levels and the number of ranks of a node, where all three are known."""
        if self.intra is None or self.inter is None or self.ranks_per_node is None:
            return None
        return self.intra, self.inter, self.ranks_per_node

    def describe(self) -> str:
        """Return its name and the number of ranks per node, for a report."""
        n = self.ranks_per_node
        nodes = "nodes unknown" if n is None else f"{n} rank(s) a node"
        return f"{self.name}, {nodes}{', fused kernels' if self.fuses else ''}"

    def for_backend(self, fuses: bool | None, captured: bool = False) -> Machine:
        """Return the machine for a backend, which ``fuses`` kernels unless :attr:`fuses` is given.

        The host launches a graph that is ``captured`` as a CUDA graph at once.
        """
        if fuses is None:
            # Torch's default backend fuses. An estimate of one's own times operators as they are.
            fuses = self.estimate is None
        fuses = fuses if self.fuses is None else self.fuses
        return replace(self, fuses=fuses, host_ms={} if captured else self.host_ms)

    def layout_of(self, ranks: Sequence[int]) -> GroupLayout:
        """Count the ranks of a group and the nodes that these global ranks are on."""
        n = self.ranks_per_node
        return len(ranks), 1 if n is None else len({rank // n for rank in ranks})

    def network_ms(self, kind: str, ranks: Sequence[int], nbytes: int) -> float | None:
        """Estimate the milliseconds of a collective; None without a table entry or levels.

        ``ranks`` are the group's global ranks, ``nbytes`` input and output together.
        """
        layout = self.layout_of(ranks)
        series = self.collectives.get((kind, layout))
        if series is None and layout[1] == 1:
            series = self.collectives.get((kind, layout[0]))
        if series is not None:
            return _interpolated(series, nbytes)
        if self._levels is None:
            return None
        if layout[0] == 1:
            return 0.0
        intra, inter, per_node = self._levels
        members = Counter(rank // per_node for rank in ranks).values()
        return levels_ms(COLLECTIVES[kind], list(members), nbytes, intra, inter)

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON, for :meth:`load`; one with an ``estimate`` can't be saved."""
        if self.estimate is not None:
            raise ValueError(
                "a machine with an estimate can't be saved: no file can hold a callable"
            )
        document = {"format": _FORMAT, **vars(self), "flops": dict(self.flops)}
        document["factors"], document["host_ms"] = dict(self.factors), dict(self.host_ms)
        del document["estimate"]
        for name in ("intra", "inter"):
            level = getattr(self, name)
            document[name] = level and list(vars(level).values())
        document["collectives"] = [
            [*key, [list(point) for point in series]] for key, series in self.collectives.items()
        ]
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a file of :meth:`save` or of ``python -m torch_ext_bucketing measure``."""
        text = Path(path).read_text(encoding="utf-8")
        try:
            fields = dict(json.loads(text))
            if fields.pop("format") != _FORMAT:
                raise ValueError(f"its format is not {_FORMAT}")
            for name in ("intra", "inter"):
                if fields[name] is not None:
                    # Files from before protocols have no third entry: they keep their latency.
                    bandwidth, latency_ms, *more = fields[name]
                    protocols_of = tuple(Protocol(*p) for protocols in more for p in protocols)
                    fields[name] = Level(bandwidth, latency_ms, protocols_of)
            fields["collectives"] = {
                (kind, group if isinstance(group, int) else tuple(group)): tuple(map(tuple, series))
                for kind, group, series in fields["collectives"]
            }
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no machine: {error}") from error


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_key(key: object) -> bool:
    if not isinstance(key, tuple) or len(key) != 2 or key[0] not in COLLECTIVES:
        return False
    layout = key[1] if isinstance(key[1], tuple) else (key[1],)
    return len(layout) in (1, 2) and all(map(_is_count, layout))


def tensor_core_rates(half: float, eight: float | None = None) -> dict[str, float]:
    """Map dtypes to rates: ``half`` in 16 bit, half of that in TF32, and ``eight`` in 8 bit."""
    rates = {"bfloat16": half, "float16": half, "float32": half / 2}
    return rates if eight is None else {**rates, "float8_e4m3fn": eight, "float8_e5m2": eight}


H100 = Machine(
    "H100",
    # NVIDIA's data sheet: 989 TFLOP/s dense in 16 bit, 494 in TF32, 1979 in 8 bit, 3.35 TB/s. Large
    # matrix products reach about seven tenths of that, copies about eight tenths.
    flops=tensor_core_rates(692e12, 1385e12),
    bandwidth=2.7e12,
    # The same sheet: PCIe 5 at 128 GB/s, 64 GB/s each way. Copies reach eight tenths of that, too.
    # torch plans with 50 GB/s (activation_offload_cpu_gpu_bw).
    host_bandwidth=51e9,
    # A DGX H100 has eight, with NVLink at 450 GB/s each way and an adapter of 400 Gbit/s for each.
    # About eight tenths of both are reached. NCCL's model has 48 GB/s for the adapter.
    ranks_per_node=8,
    intra=Level(360e9, protocols=nvlink(141e9)),
    inter=Level(42e9, protocols=INFINIBAND),
    # Measured with torch 2.11 and NCCL 2.28; a gather with its wait takes 42 to 58 us. All-to-alls
    # were not measured: as reduce-scatters.
    host_ms={
        "all_gather": 0.05,
        "reduce_scatter": 0.048,
        "all_reduce": 0.054,
        "all_to_all": 0.048,
        "kernel": 0.0087,
        "generated": 0.014,
    },
)
"""Nodes of eight H100s: the default where a job's own machine is unknown."""


def _interpolated(series: Sequence[tuple[int, float]], nbytes: int) -> float:
    points = sorted(series)
    above = bisect.bisect_left(points, (nbytes, -math.inf))
    if above == 0:
        return points[0][1]
    if above == len(points):
        size, ms = points[-1]
        return ms * nbytes / size
    (low, low_ms), (high, high_ms) = points[above - 1], points[above]
    return low_ms + (high_ms - low_ms) * (nbytes - low) / (high - low)


# From NVIDIA's data sheets: dense operations per second in 16 bit, in TF32 and in 8 bit, bytes per
# second of memory, of NVLink each way, of a GPU's adapter, and of its link to host memory each way.
# As with the H100, products reach about seven tenths of that, copies and links eight tenths. The
# limits of NCCL's LL are its own.
A100 = replace(  # 312 and 156 TFLOP/s, 2.04 TB/s, 300 GB/s; PCIe 4, 32 GB/s; DGX A100: 200 Gbit/s
    H100,
    name="A100",
    flops=tensor_core_rates(218e12),
    bandwidth=1.63e12,
    host_bandwidth=25e9,
    intra=Level(240e9, protocols=nvlink(87.7e9)),
    inter=Level(21e9, protocols=INFINIBAND),
)
H200 = replace(H100, name="H200", bandwidth=3.84e12)  # an H100 with 4.8 TB/s
B200 = replace(  # 2,250, 1,125, 4,500 TFLOP/s, 8 TB/s, 900 GB/s; a DGX B200 has 400 Gbit/s
    H100,
    name="B200",
    flops=tensor_core_rates(1575e12, 3150e12),
    bandwidth=6.4e12,
    intra=Level(720e9, protocols=nvlink(282e9)),
)
# 2,500, 1,250, 5,000 TFLOP/s; NVLink joins a rack of 72 GPUs, 400 Gbit/s beyond. NVLink-C2C to the
# Grace CPU: 900 GB/s, half of it each way, shared by two GPUs.
GB200 = replace(
    B200,
    name="GB200",
    flops=tensor_core_rates(1750e12, 3500e12),
    host_bandwidth=180e9,
    ranks_per_node=72,
)

# AMD's data sheet: 1,307, 654 and 2,615 TFLOP/s, 5.3 TB/s, seven Infinity Fabric links of 64 GB/s
# each way, PCIe 5; 400 Gbit/s. The same parts of them are taken as reached; nothing was measured.
MI300X = replace(
    H100,
    name="MI300X",
    flops=tensor_core_rates(915e12, 1830e12),
    bandwidth=4.24e12,
    intra=Level(358e9, protocols=nvlink(140e9)),
)

_DEVICES = (GB200, B200, H200, H100, A100, MI300X)  # a name may contain a later one's
DATA_SHEETS = {machine.name.lower(): machine for machine in _DEVICES}
"""GPUs by name, with their usual nodes."""


def job_machine() -> Machine:
    """Return the machine that estimates are for by default.

    Rates and links are those of the current CUDA device, found by its name. An unknown device, or
    none, counts as an H100, and the machine's name shows that. A node has ``LOCAL_WORLD_SIZE``
    ranks, which torchrun sets, else as many as the device's usual node. Ranks compare the machine
    before they run a plan made with it.
    """
    machine, why = H100, ", for want of a CUDA device"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
        unknown = (H100, f", for want of the data sheet of {device}")
        machine, why = next(((m, "") for m in _DEVICES if m.name in device), unknown)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(local) if local.isdecimal() and int(local) else machine.ranks_per_node
    if machine is GB200:  # NVLink joins the hosts of a rack
        ranks = machine.ranks_per_node
    return replace(machine, name=machine.name + why, ranks_per_node=ranks)
