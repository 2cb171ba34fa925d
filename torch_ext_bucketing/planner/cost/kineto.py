"""Times of collectives and kernels from torch profiler traces, one trace per rank.

A collective ends when its last rank has arrived and the data have moved. On a rank that arrives
early, its kernel or gloo's worker thread waits for the others, and its duration includes the wait::

    rank 0   |--- waits ---|--- moves ---|
    rank 1                 |--- moves ---|      counted

So we match the k-th collective of a group across the traces of all its ranks and count the shortest
duration, that of the rank that waited for nobody. This compares no clocks. Traces of one host share
a clock, so there the matched events must overlap. (Traces name their host since torch 2.13.)

Kernels of NCCL carry their collective as arguments (``saveNcclMeta``,
``torch/csrc/profiler/util.cpp``). Events of gloo name neither group nor kind: we look for the
operator that launched each one, and the process may have one group only.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...graph.collectives import COLLECTIVES

_ITEMSIZE = {
    **dict.fromkeys(("Byte", "Char", "Bool", "unsigned char", "signed char", "bool"), 1),
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short", "c10::BFloat16", "c10::Half", "short int"), 2),
    **dict.fromkeys(("Float", "Int", "float", "int"), 4),
    **dict.fromkeys(("Double", "Long", "double", "long int"), 8),
}
_DTYPE = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32"}
# Smaller kernels measure the launch, not the rate.
_LEAST_COPY_BYTES, _LEAST_PRODUCT_FLOPS = 2**20, 2**26


class _Event(NamedTuple):
    kind: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int  # input and output together
    begin: float  # microseconds since the trace's base: on the host's clock they would be rounded
    end: float

    def __str__(self) -> str:
        return f"{self.kind} of {self.nbytes} bytes from {self.begin:.0f} to {self.end:.0f} us"


class RankTrace(NamedTuple):
    """One rank's trace."""

    path: str
    rank: int
    world_size: int
    host: str  # "" where the trace does not name it
    base_us: float
    events: list[_Event]  # in the order of their launches
    operators: list[dict[str, Any]]
    kernel_us: Mapping[Any, float]  # GPU time by the ID of the operator


def read_trace(path: str | Path) -> RankTrace:
    """Read a trace file, ``.json`` or ``.json.gz``.

    Raises:
        ValueError: the file is not a trace of a distributed run, or lacks sizes or groups.
        OSError: the file can't be read.
    """
    try:
        packed = Path(path).read_bytes()
        document = json.loads(gzip.decompress(packed) if str(path).endswith(".gz") else packed)
        events = document["traceEvents"]
        found = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace of torch's profiler: {error!r}") from error
    info = document.get("distributedInfo") or {}
    if "rank" not in info or "world_size" not in info:
        raise ValueError(
            f"{path} is not of a distributed run: it has no distributedInfo; start the profiler "
            "after init_process_group, on each rank"
        )
    configs = info.get("pg_config") or []
    listed = configs.values() if isinstance(configs, dict) else configs
    groups = {str(c["pg_name"]): tuple(sorted(c["ranks"])) for c in listed if c.get("ranks")}
    found.sort(key=lambda e: float(e["ts"]))
    kernel_us: dict[Any, float] = {}
    for event in found:
        if event.get("cat") == "kernel":
            key = event.get("args", {}).get("External id")
            kernel_us[key] = kernel_us.get(key, 0.0) + float(event["dur"])
    try:
        collectives = _nccl_events(found, groups) or _gloo_events(found, groups)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return RankTrace(
        str(path),
        int(info["rank"]),
        int(info["world_size"]),
        str(document.get("host_name", "")),
        float(document.get("baseTimeNanoseconds", 0)) / 1e3,
        collectives,
        [e for e in found if e.get("cat") == "cpu_op"],
        kernel_us,
    )


def _nccl_events(
    found: Iterable[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]
) -> list[_Event]:
    """Read the kernels of NCCL. All kernels of one launch are one collective."""
    events: dict[Any, _Event] = {}
    for number, event in enumerate(found):
        args = event.get("args", {})
        name = str(args.get("Collective name")).replace("_", "")
        kind = next((k for k in COLLECTIVES if name.startswith(k.replace("_", ""))), None)
        if event.get("cat") != "kernel" or kind is None:
            continue
        group = str(args.get("Process Group Name", ""))
        ranks = groups.get(group) or _ranks(args.get("Process Group Ranks"))
        if not ranks:
            raise ValueError(f"it does not list the ranks of process group {group!r}")
        elements = int(args["In msg nelems"]) + int(args["Out msg nelems"])
        nbytes = elements * _itemsize(args.get("dtype"))
        begin, end = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        key = (group, args.get("External id", -1 - number))
        if key in events:
            begin, end = events[key].begin, max(end, events[key].end)
        events[key] = _Event(kind, group, ranks, nbytes, begin, end)
    return list(events.values())


def _gloo_events(
    found: Sequence[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]
) -> list[_Event]:
    """Read the events of gloo's threads and match each with the operator that launched it."""
    open_ = [e for e in found if e["name"] in [f"gloo:{kind}" for kind in COLLECTIVES]]
    if not open_:
        return []
    several = {name: ranks for name, ranks in groups.items() if len(ranks) > 1}
    if len(several) != 1:
        raise ValueError(
            f"its events of gloo don't name their group, and there are {len(several)} process "
            "groups: trace a run with one group, or measure"
        )
    ((group, ranks),) = several.items()
    if not all(_dims(e) for e in open_):
        raise ValueError("it has no sizes: profile with record_shapes=True")
    kinds = {name: kind for kind, row in COLLECTIVES.items() for name in row.launches}
    events = []
    for launch in found:
        kind = kinds.get(launch["name"])
        if kind is None:
            continue
        dims = _dims(launch)
        sent, received = _elements(dims[COLLECTIVES[kind].input_at]), _elements(dims[0])
        fits = (e for e in open_ if e["ts"] >= launch["ts"] and _elements(_dims(e)) == sent)
        event = next(fits, None)
        if event is None:
            raise ValueError(f"it lacks the event that {launch['name']} launched at {launch['ts']}")
        open_.remove(event)
        begin = float(event["ts"])
        nbytes = (sent + received) * _itemsize(event["args"]["Input type"][0])
        events.append(_Event(kind, group, ranks, nbytes, begin, begin + float(event["dur"])))
    return events


def _ranks(text: Any) -> tuple[int, ...]:
    """Parse ``"[0, 1]"``. Lists of large groups are cut short and give no ranks."""
    try:
        return tuple(sorted(map(int, json.loads(text) if isinstance(text, str) else text)))
    except (TypeError, ValueError):
        return ()


def _itemsize(dtype: Any) -> int:
    if dtype not in _ITEMSIZE:
        raise ValueError(f"its collectives are of an unknown dtype, {dtype!r}")
    return _ITEMSIZE[dtype]


def _dims(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("Input Dims")


def _elements(dims: Any) -> int:
    """Count the elements of a tensor, of a list of tensors, or of a list of arguments."""
    if all(isinstance(n, int) for n in dims):
        return math.prod(dims) if dims else 0
    return sum(map(_elements, dims))


def collective_times(
    traces: Sequence[RankTrace],
) -> tuple[dict[tuple[str, tuple[int, ...]], dict[int, float]], dict[tuple[int, ...], list[int]]]:
    """Compute the milliseconds of collectives by kind, ranks and bytes.

    Returns:
        The times, and the ranks without a trace of each group that has some. Such a group has no
        times: they can't be told apart from the wait for the missing ranks.

    Raises:
        ValueError: two traces are of one rank or of different runs, or the ranks of a group don't
            show the same collectives.
    """
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        other = by_rank.setdefault(trace.rank, trace)
        if other is not trace:
            raise ValueError(f"{other.path} and {trace.path} are both of rank {trace.rank}")
        first = traces[0]
        if trace.world_size != first.world_size:
            raise ValueError(
                f"{first.path} is of {first.world_size} ranks, {trace.path} of {trace.world_size}"
            )
    of_group: dict[tuple[str, tuple[int, ...]], dict[int, list[_Event]]] = {}
    for rank, trace in sorted(by_rank.items()):
        for event in trace.events:
            one = of_group.setdefault((event.group, event.ranks), {})
            one.setdefault(rank, []).append(event)
    samples: dict[tuple[str, tuple[int, ...]], dict[int, list[float]]] = {}
    missing: dict[tuple[int, ...], list[int]] = {}
    for (_, ranks), events in of_group.items():
        absent = [rank for rank in ranks if rank not in by_rank]
        if absent:
            missing[ranks] = absent
            continue
        for same in _matched(ranks, events, by_rank):
            sizes = samples.setdefault((same[0].kind, ranks), {})
            ms = min(e.end - e.begin for e in same) * 1e-3
            sizes.setdefault(max(e.nbytes for e in same), []).append(ms)
    return {
        key: {nbytes: statistics.median(ms) for nbytes, ms in sorted(sizes.items())}
        for key, sizes in samples.items()
    }, missing


def _matched(
    ranks: Sequence[int], events: Mapping[int, list[_Event]], traces: Mapping[int, RankTrace]
) -> Iterator[tuple[_Event, ...]]:
    """Yield the events of each collective of a group, one event per rank."""
    counts = {rank: len(events.get(rank, ())) for rank in ranks}
    low, high = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    if counts[low] != counts[high]:
        raise ValueError(
            f"the ranks of group {list(ranks)} don't show the same collectives: "
            f"{traces[low].path} has {counts[low]}, {traces[high].path} {counts[high]}; "
            "profile the same steps on all ranks"
        )
    reference = traces[ranks[0]]
    for number, same in enumerate(zip(*(events[rank] for rank in ranks), strict=True)):
        first = same[0]
        for trace, other in zip((traces[rank] for rank in ranks), same, strict=True):
            alike = not COLLECTIVES[first.kind].rounds or first.nbytes == other.nbytes
            later = trace.base_us - reference.base_us
            overlap = other.begin + later <= first.end and first.begin <= other.end + later
            one_clock = trace.host == reference.host != ""
            if other.kind != first.kind or not alike or (one_clock and not overlap):
                raise ValueError(
                    f"collective {number} of group {list(ranks)} is {first} in {reference.path} "
                    f"and {other} in {trace.path}; profile the same steps on all ranks"
                )
        yield same


def rates(traces: Sequence[RankTrace]) -> tuple[dict[str, float], float | None]:
    """Compute FLOPs per second of large products, by dtype, and bytes per second of large copies.

    The traces need shapes. Without large copies their rate is None.
    """
    work: dict[str, list[tuple[float, float]]] = {}
    for trace in traces:
        on_gpu = bool(trace.kernel_us)
        for event in trace.operators:
            name, dims = event["name"], _dims(event)
            if name not in ("aten::mm", "aten::bmm", "aten::copy_") or not dims:
                continue
            args = event["args"]
            us = trace.kernel_us.get(args.get("External id"), 0.0) if on_gpu else event["dur"]
            dtypes = args.get("Input type") or [""]
            if not us or dtypes[0] not in _ITEMSIZE:
                continue
            if name == "aten::copy_":
                sides = zip(dims[:2], dtypes[:2], strict=True)
                done = float(sum(_elements(d) * _ITEMSIZE.get(t, 0) for d, t in sides))
                what, least = "copies", _LEAST_COPY_BYTES
            else:
                done = 2.0 * math.prod(dims[0]) * dims[1][-1]
                what, least = _DTYPE.get(dtypes[0], ""), _LEAST_PRODUCT_FLOPS
            if what and done >= least:
                work.setdefault(what, []).append((done, us))
    found = {
        what: sum(done for done, _ in pairs) / sum(us for _, us in pairs) * 1e6
        for what, pairs in sorted(work.items())
    }
    bandwidth = found.pop("copies", None)
    return found, bandwidth
