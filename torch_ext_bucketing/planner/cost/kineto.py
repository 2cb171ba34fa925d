"""Times of collectives and kernels from traces of torch's profiler, one trace per rank.

A collective ends when the last of its ranks has come and the data have moved. On a rank that came
early its kernel, or gloo's worker thread, waits for the others, and that wait is in its duration::

    rank 0   |--- waits ---|--- moves ---|
    rank 1                 |--- moves ---|      counted

So the k-th collective of a group is looked up in the traces of all its ranks, and the shortest
duration counts, that of the rank which waited for nobody. No clocks are compared for that; traces
of one host, which share a clock, must overlap in it. (Before 2.13 torch's traces name no host.)

The names are those of ``saveNcclMeta`` (``torch/csrc/profiler/util.cpp``), which kernels of NCCL
carry as arguments. Events of gloo name neither group nor kind: each is found by the operator that
launched it, and the process may have one group only.
"""

from __future__ import annotations

import gzip
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...graph.collectives import COLLECTIVES

_US = 1e-3
_ITEMSIZE = {
    **dict.fromkeys(("Byte", "Char", "Bool", "unsigned char", "signed char", "bool"), 1),
    **dict.fromkeys(("Float8_e4m3fn", "Float8_e5m2"), 1),
    **dict.fromkeys(("BFloat16", "Half", "Short", "c10::BFloat16", "c10::Half", "short int"), 2),
    **dict.fromkeys(("Float", "Int", "float", "int"), 4),
    **dict.fromkeys(("Double", "Long", "double", "long int"), 8),
}
_DTYPE = {"c10::BFloat16": "bfloat16", "c10::Half": "float16", "float": "float32"}
_LARGE_COPY, _LARGE_PRODUCT = 2**20, 2**26
"""Bytes and operations from which on a kernel tells a rate: what is smaller takes time to start."""


class _Event(NamedTuple):
    kind: str
    group: str
    ranks: tuple[int, ...]
    nbytes: int  # input and output together
    begin: float  # microseconds after the trace's base; on the host's clock they would be rounded
    end: float


class RankTrace(NamedTuple):
    """One trace: whose it is, and the collectives in it in the order of their launches. ``host`` is
    "" where it is not named."""

    path: str
    rank: int
    world_size: int
    host: str
    base_us: float
    events: list[_Event]
    operators: list[dict[str, Any]]
    kernel_us: Mapping[Any, float]


def read_trace(path: str | Path) -> RankTrace:
    """Read one file, ``.json`` or ``.json.gz``.

    Raises:
        ValueError: it is no trace, not of a distributed run, or does not say what is needed.
        OSError: it can't be read.
    """
    try:
        packed = Path(path).read_bytes()
        document = json.loads(gzip.decompress(packed) if str(path).endswith(".gz") else packed)
        events = document["traceEvents"]
        found = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no trace of torch's profiler: {error!r}") from error
    told = document.get("distributedInfo") or {}
    if "rank" not in told or "world_size" not in told:
        raise ValueError(
            f"{path} is not of a distributed run: it has no distributedInfo; start the profiler "
            "after init_process_group, on each rank"
        )
    configs = told.get("pg_config") or []
    listed = configs.values() if isinstance(configs, dict) else configs
    groups = {str(c["pg_name"]): tuple(sorted(c["ranks"])) for c in listed if c.get("ranks")}
    base = float(document.get("baseTimeNanoseconds", 0)) / 1e3
    found.sort(key=lambda e: float(e["ts"]))
    kernel_us: dict[Any, float] = {}
    for event in found:
        if event.get("cat") == "kernel":
            key = event.get("args", {}).get("External id")
            kernel_us[key] = kernel_us.get(key, 0.0) + float(event["dur"])
    try:
        collectives = _of_nccl(found, groups) or _of_gloo(found, groups)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return RankTrace(
        str(path),
        int(told["rank"]),
        int(told["world_size"]),
        str(document.get("host_name", "")),
        base,
        collectives,
        [e for e in found if e.get("cat") == "cpu_op"],
        kernel_us,
    )


def _of_nccl(
    found: Iterable[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]
) -> list[_Event]:
    """Kernels that say which collective they are of; all of one launch are one collective."""
    events: dict[Any, _Event] = {}
    for number, event in enumerate(found):
        args = event.get("args", {})
        kind = _kind(args.get("Collective name"))
        if event.get("cat") != "kernel" or kind is None:
            continue
        group = str(args.get("Process Group Name", ""))
        ranks = groups.get(group) or _ranks(args.get("Process Group Ranks"))
        if not ranks:
            raise ValueError(f"it does not say which ranks process group {group!r} has")
        elements = int(args["In msg nelems"]) + int(args["Out msg nelems"])
        nbytes = elements * _itemsize(args.get("dtype"))
        begin = float(event["ts"])
        end = begin + float(event["dur"])
        key = (group, args.get("External id", -1 - number))
        if key in events:
            begin, end = events[key].begin, max(end, events[key].end)
        events[key] = _Event(kind, group, ranks, nbytes, begin, end)
    return list(events.values())


def _of_gloo(
    found: Sequence[dict[str, Any]], groups: Mapping[str, tuple[int, ...]]
) -> list[_Event]:
    """Events of gloo's threads, each with the operator that launched it."""
    open_ = [e for e in found if e["name"] in [f"gloo:{kind}" for kind in COLLECTIVES]]
    if not open_:
        return []
    several = {name: ranks for name, ranks in groups.items() if len(ranks) > 1}
    if len(several) != 1:
        raise ValueError(
            f"its events of gloo don't say of which of {len(several)} process groups they are: "
            "trace a run with one group, or measure"
        )
    ((group, ranks),) = several.items()
    if not all(_dims(e) for e in open_):
        raise ValueError("it has no sizes: profile with record_shapes=True")
    launched_kind = {name: kind for kind, row in COLLECTIVES.items() for name in row.launches}
    events = []
    for launch in found:
        kind = launched_kind.get(launch["name"])
        if kind is None:
            continue
        dims = _dims(launch)
        given, made = _elements(dims[COLLECTIVES[kind].input_at]), _elements(dims[0])
        fits = (e for e in open_ if e["ts"] >= launch["ts"] and _elements(_dims(e)) == given)
        event = next(fits, None)
        if event is None:
            raise ValueError(f"nothing in it is what {launch['name']} launched at {launch['ts']}")
        open_.remove(event)
        begin = float(event["ts"])
        size = _itemsize(event["args"]["Input type"][0])
        nbytes = (given + made) * size
        events.append(_Event(kind, group, ranks, nbytes, begin, begin + float(event["dur"])))
    return events


def _kind(name: Any) -> str | None:
    """The kind of a collective by the name that a process group gives it."""
    plain = str(name).replace("_", "")
    return next((kind for kind in COLLECTIVES if plain.startswith(kind.replace("_", ""))), None)


def _ranks(text: Any) -> tuple[int, ...]:
    """``"[0, 1]"``; nothing where the list is cut short, as it is for large groups."""
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
    """Number of elements of a tensor, of a list of tensors, or of a list of arguments."""
    if all(isinstance(n, int) for n in dims):
        return math.prod(dims) if dims else 0
    return sum(map(_elements, dims))


def collective_times(
    traces: Sequence[RankTrace],
) -> tuple[dict[tuple[str, tuple[int, ...]], dict[int, float]], dict[tuple[int, ...], list[int]]]:
    """Milliseconds of collectives by kind, ranks and bytes; and groups with ranks that no trace is
    of, with these ranks: their times can't be told from waiting for the missing ones.

    Raises:
        ValueError: two traces of one rank or of different runs, or the ranks of a group don't show
            the same collectives.
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
            ms = min(e.end - e.begin for e in same) * _US
            sizes.setdefault(max(e.nbytes for e in same), []).append(ms)
    return {
        key: {nbytes: statistics.median(ms) for nbytes, ms in sorted(sizes.items())}
        for key, sizes in samples.items()
    }, missing


def _matched(
    ranks: Sequence[int], events: Mapping[int, list[_Event]], traces: Mapping[int, RankTrace]
) -> Iterable[list[_Event]]:
    counts = {rank: len(events.get(rank, ())) for rank in ranks}
    if len(set(counts.values())) > 1:
        low, high = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        raise ValueError(
            f"the ranks of group {list(ranks)} don't show the same collectives: "
            f"{traces[low].path} has {counts[low]}, {traces[high].path} {counts[high]}; "
            "profile the same steps on all ranks"
        )
    for number, same in enumerate(zip(*(events[rank] for rank in ranks), strict=True)):
        first = same[0]
        for rank, other in zip(ranks, same, strict=True):
            alike = not COLLECTIVES[first.kind].rounds or first.nbytes == other.nbytes
            one_clock = traces[rank].host == traces[ranks[0]].host != ""
            later = traces[rank].base_us - traces[ranks[0]].base_us
            apart = one_clock and (
                other.begin + later > first.end or first.begin > other.end + later
            )
            if other.kind != first.kind or not alike or apart:
                raise ValueError(
                    f"collective {number} of group {list(ranks)} is {_said(first)} in "
                    f"{traces[ranks[0]].path} and {_said(other)} in {traces[rank].path}; profile "
                    "the same steps on all ranks"
                )
        yield list(same)


def _said(event: _Event) -> str:
    return f"{event.kind} of {event.nbytes} bytes from {event.begin:.0f} to {event.end:.0f} us"


def rates(traces: Sequence[RankTrace]) -> tuple[dict[str, float], float | None]:
    """Operations per second of large products, by dtype, and bytes per second of large copies, None
    where there are none. Needs shapes in the traces."""
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
                what, least = "copies", _LARGE_COPY
            else:
                done = 2.0 * math.prod(dims[0]) * dims[1][-1]
                what, least = _DTYPE.get(dtypes[0], ""), _LARGE_PRODUCT
            if what and done >= least:
                work.setdefault(what, []).append((done, us))
    found = {}
    for what, pairs in sorted(work.items()):
        done, us = map(sum, zip(*pairs, strict=True))
        found[what] = done / us * 1e6
    bandwidth = found.pop("copies", None)
    return found, bandwidth
