"""How long each node of a graph takes on a described machine.

Compute nodes take what torch's FLOP counter counts, over the machine's rate for their dtype, or the
time to move their bytes if that is longer; other kernels move their bytes; views take nothing.
Collectives take what torch's model of NCCL says (``torch._inductor.comm_analysis``, which follows
NCCL's tuning model), or what a measured table says.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from .._torch.estimates import nccl_estimate_ms
from .._torch.process_groups import group_size_of
from ..graph.collectives import group_name, is_collective, is_compute, is_view, kind_of, tensors_in
from ..graph.size_hints import SizeHints

__all__ = [
    "H100",
    "Costs",
    "Machine",
    "check_machine",
]

Table = Mapping[tuple[str, int], Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Machine:
    """One GPU and its networks.

    Args:
        name: for reports.
        flops: operations per second that matrix products reach, by dtype name such as
            ``"bfloat16"``.
        other_flops: the same for dtypes that ``flops`` does not name.
        bandwidth: bytes per second that kernels move, read and written.
        kernel_ms: least time of a kernel, in milliseconds.
        collectives: measured times: ``(kind, group size)`` to ``(bytes, ms)`` pairs; kind is one of
            ``all_gather``, ``reduce_scatter``, ``all_reduce`` and ``all_to_all``, bytes are the
            input's and the output's together. Between two sizes the time is interpolated, beyond
            the last one extrapolated by bandwidth. What the table lacks is torch's estimate.

    Raises:
        TypeError: ``flops`` or ``collectives`` is no mapping.
        ValueError: a rate that is no positive number, a time that is none of at least 0, or a
            series of measurements that is empty or holds something else than bytes above 0 and
            times.
    """

    name: str = "machine"
    flops: Mapping[str, float] = field(default_factory=dict)
    other_flops: float = 50e12
    bandwidth: float = 2e12
    kernel_ms: float = 0.002
    collectives: Table = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, mapping in (("flops", self.flops), ("collectives", self.collectives)):
            if not isinstance(mapping, Mapping):
                raise TypeError(f"{name} must be a mapping, got {mapping!r}")
        rates = {**self.flops, "other_flops": self.other_flops, "bandwidth": self.bandwidth}
        for name, rate in rates.items():
            if not _is_number(rate) or not rate > 0:
                raise ValueError(f"{name} must be a positive rate per second, got {rate!r}")
        if not _is_number(self.kernel_ms) or not 0 <= self.kernel_ms < math.inf:
            raise ValueError(f"kernel_ms must be a time of at least 0, got {self.kernel_ms!r}")
        for key, series in self.collectives.items():
            if not series:
                raise ValueError(f"collectives[{key!r}] has no measurement")
            for point in series:
                pair = isinstance(point, (tuple, list)) and len(point) == 2
                if not pair or not all(map(_is_number, point)) or not _is_measurement(*point):
                    raise ValueError(f"collectives[{key!r}]: {point!r} is no (bytes above 0, ms)")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_measurement(nbytes: float, ms: float) -> bool:
    return 0 < nbytes < math.inf and 0 <= ms < math.inf


H100 = Machine(
    "H100",
    # NVIDIA's data sheet: 989 TFLOP/s dense in 16 bit, 494 in TF32, 3.35 TB/s. Large matrix
    # products reach about seven tenths of that, copies about eight tenths.
    flops={"bfloat16": 692e12, "float16": 692e12, "float32": 346e12},
    bandwidth=2.7e12,
)
"""The default machine."""


def check_machine(machine: object) -> None:
    """Raise a TypeError unless ``machine`` is one."""
    if not isinstance(machine, Machine):
        raise TypeError(f"machine must be a Machine, such as H100, got {machine!r}")


class Costs:
    """Milliseconds per node.

    Args:
        machine: what it runs on.
        hints: numbers for sizes that depend on data.
    """

    def __init__(self, machine: Machine = H100, hints: SizeHints | None = None) -> None:
        self.machine = machine
        self.hints = hints or SizeHints()
        self._known: dict[Any, float] = {}

    def __call__(self, node: fx.Node) -> float:
        """Milliseconds that ``node`` keeps its stream busy; 0 for a view or a wait."""
        if is_view(node):
            return 0.0
        if is_collective(node):
            return self.collective(node)
        machine = self.machine
        inputs = sum(map(self.result_bytes, node.all_input_nodes))
        ms = self.kernel(self.result_bytes(node) + inputs)
        if is_compute(node):
            dtype = next((t.dtype for t in tensors_in(node.meta.get("val"))), torch.float32)
            rate = machine.flops.get(str(dtype).removeprefix("torch."), machine.other_flops)
            ms = max(ms, self._flops(node) / rate * 1e3)
        return ms

    def kernel(self, nbytes: int) -> float:
        """Milliseconds of a kernel that reads and writes so many bytes and does little else."""
        return max(nbytes / self.machine.bandwidth * 1e3, self.machine.kernel_ms)

    def collective(self, node: fx.Node, nbytes: int | None = None) -> float:
        """Milliseconds of a collective; ``nbytes``: as if it moved so many, input and output."""
        if nbytes is None:
            nbytes = self.collective_bytes(node)
        group = group_name(node)
        key = (node.target, group, nbytes)
        if key not in self._known:
            kind = kind_of(node) or "all_to_all"
            series = self.machine.collectives.get((kind, group_size_of(group)))
            self._known[key] = (
                _interpolated(series, nbytes) if series else nccl_estimate_ms(node, nbytes)
            )
        return self._known[key]

    def collective_bytes(self, node: fx.Node) -> int:
        """What a collective moves: its input and its output."""
        out = node.kwargs.get("out")
        inputs = (a for a in node.all_input_nodes if a is not out)
        return self.result_bytes(node) + sum(map(self.result_bytes, inputs))

    def result_bytes(self, node: fx.Node) -> int:
        """Bytes of the tensors that a node returns."""
        tensors = tensors_in(node.meta.get("val"))
        return sum(self.hints(t.numel()) * t.dtype.itemsize for t in tensors)

    def _flops(self, node: fx.Node) -> float:
        from torch.utils.flop_counter import flop_registry

        target: Any = node.target
        count = flop_registry.get(getattr(target, "overloadpacket", None)) or flop_registry[target]
        # Torch's formulas compare sizes, which ones that depend on data don't let them.
        known = self.hints.concrete
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known(n.meta.get("val")))
        try:
            return float(count(*args, **kwargs, out_val=known(node.meta.get("val"))))
        except (TypeError, AssertionError, ValueError, AttributeError):
            return 0.0  # an overload that torch's formula does not take: its bytes are what counts


def _interpolated(series: Sequence[tuple[int, float]], nbytes: int) -> float:
    points = sorted(series)
    at = bisect.bisect_left(points, (nbytes, -math.inf))
    if at == 0:
        return points[0][1]
    if at == len(points):
        size, ms = points[-1]
        return ms * nbytes / size
    (low, low_ms), (high, high_ms) = points[at - 1], points[at]
    return low_ms + (high_ms - low_ms) * (nbytes - low) / (high - low)
