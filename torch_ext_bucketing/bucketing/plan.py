"""Plan buckets: by unit, or as few as a byte cap allows.

Planners are :class:`.ByUnit` (one bucket per unit), :class:`.ByCap` (buckets up to a byte cap),
:class:`.BySearch` (the byte caps of the fastest schedule), and users' own.

By cap, all bucket keys share one contraction, so no two buckets form a cycle. The planner takes the
members of a bucket key in the order of their waits, since their results are needed in that order.
The first member that stays out gives the bucket's cause:

- ``"bytes"``: it would exceed the cap;
- ``"run"``: a reduce-scatter would wait for too many compute nodes after the previous bucket;
- ``"dependency"``: it and the bucket need each other, directly or through other buckets, or a write
  to a tensor stands between them;
- ``"end"``: none, as no member is left.

A member that would exceed the cap is passed over, and later ones may still join. The bucket ends
once it has passed over four times its cap, or 320 MiB; members that exceed the cap by themselves
don't count, as they stand alone::

    members, of the cap     norm 0   q 60%   k 20%   mlp 300%   norm 0   q 60%   k 20%
    buckets                 [norm    q       k                  norm             k]
                                                    [mlp]                [q]

So small members are gathered a little earlier, or reduced a little later, than their neighbours.
If the largest of these members first fill a tenth of the cap more, the bucket has them instead::

    members, of the cap     q 5%   kv 15%   o 45%   gate 50%   up 55%
    in wait order           [q     kv       o]      [gate]     [up]
    largest first           [q     kv                          up]
                                            [o      gate]

Any other cause ends a bucket.

torch's greedy bucketing buckets neighbours first, and merges whole buckets where
``bucket_max_collectives_between`` is set (see ``torch_patches``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import torch.fx as fx

from .._torch.inductor import default_cap_mb
from ..errors import check_count, check_positive
from ..fsdp.units import Units
from ..graph.analysis import UNTAGGED, Collective, GraphAnalysis
from ..graph.nodes import FSDP_KINDS, KINDS, Kind, check_kinds
from ..reports.base import LeftAlone, LeftCause
from ..reports.compile import ClosedBy, Unmerged
from .contraction import Bucket as Bucket
from .contraction import BucketPlanner as BucketPlanner
from .contraction import Contraction, left_alone, reading_only
from .contraction import MergePlan as MergePlan
from .contraction import merge_groups as merge_groups

Groups: TypeAlias = Collection[str] | None
"""Names of process groups, planned one after the other; None: all groups, planned together."""


def check_groups(groups: Groups) -> tuple[str, ...] | None:
    """Return ``groups`` as a tuple; raise a TypeError for other values than names."""
    if groups is None:
        return None
    if isinstance(groups, str) or not isinstance(groups, Collection):
        raise TypeError(f"groups must be a list of names or None, got {groups!r}")
    if not all(isinstance(name, str) for name in groups):
        raise TypeError(f"groups must be names of process groups, got {groups!r}")
    return tuple(dict.fromkeys(groups))


@dataclass(frozen=True)
class ByUnit:
    """Plan one bucket per unit and bucket key, or more where dependencies require it."""

    units: Units
    kinds: Collection[Kind] = FSDP_KINDS

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Plan a graph in topological order."""
        uncovered: dict[str, None] = {}
        alone: list[LeftAlone] = []
        groups: dict[tuple[int, Any, bool], list[Collective]] = {}
        for c in analysis.collectives.values():
            if c.kind not in self.kinds:
                continue
            unit, unknown = self.units.unit_of(*c.fqns), self.units.unknown(c.fqns)
            uncovered.update(dict.fromkeys(unknown))
            if unit is None:
                alone.append(_without_unit(c, unknown))
                continue
            if c.why_not:
                alone.append(left_alone(c, c.why_not))
                continue
            # In a trace of a whole step, backward gathers a parameter again so that its memory is
            # free in between: don't merge that gather with forward's.
            again = c.kind == "all_gather" and c.in_backward
            groups.setdefault((unit, c.key, again), []).append(c)
        plan = merge_groups(analysis, ((unit, members) for (unit, *_), members in groups.items()))
        alone += plan.ineligible
        return replace(plan, uncovered=tuple(uncovered), ineligible=tuple(alone))


def _without_unit(c: Collective, unknown: Sequence[str]) -> LeftAlone:
    """Record why no unit has all parameters of a collective."""
    if not c.fqns:
        return left_alone(c, UNTAGGED, LeftCause.UNTAGGED)
    if unknown:
        return left_alone(c, f"no unit has {', '.join(unknown)}")
    return left_alone(c, f"its parameters {', '.join(c.fqns)} are in several units")


Cap: TypeAlias = float | tuple[float, ...] | Callable[[int], float]
CapMb: TypeAlias = Cap | Mapping[str, Cap] | Mapping[tuple[str, str], Cap] | None
Eligible: TypeAlias = Literal["tag"] | Callable[[fx.Node], bool]

_MIB = 1024 * 1024
_PASSED_OVER = 4
"""Bytes of members that a bucket passes over, relative to its cap. On models of transformers this
leaves 1.00 to 1.06 times the bins of first-fit decreasing (see benchmarks/README.md)."""
_MOST_PASSED_OVER = 320 * _MIB
"""The most bytes that a bucket passes over. Its reduction waits for all of its members: with a cap
of 2 GiB and no such limit, a backward of LLaMA-3 70B took 935 ms instead of 886."""


_FULLER = 0.1
"""How much more of its cap a bucket is filled by the largest members first, else in wait order.
Below that a backward of DeepSeek-V3 had as many gathers, and the largest buckets missed its bound
on memory."""


@dataclass(frozen=True)
class ByCap:
    """Fill buckets in wait order up to a byte cap.

    Args:
        cap_mb: cap in MiB on the sum, over members, of the larger of input and output: a number; a
            tuple with one number per bucket of a bucket key, the last one for all further buckets;
            a callable of the bucket's index (0, 1, ...); or a mapping to these from process group
            names, or from pairs of group name and kind. None, or a missing entry: the size that
            saturates the group's network by torch's estimate. A member above the cap stays alone.
        kinds: kinds to bucket; others are not reported one by one.
        eligible: ``"tag"``: collectives with a tag, which serve parameters. Or a callable of the
            start node.
        groups: process groups to bucket, see :data:`.Groups`. A gather in a smaller group
            (``ReshardAfterForward(to=...)``) counts for the group that shards the parameter.
        max_compute_run: see :class:`.MaxComputeRun`.
    """

    cap_mb: CapMb = None
    _: KW_ONLY
    kinds: Collection[Kind] = FSDP_KINDS
    eligible: Eligible = "tag"
    groups: Groups = None
    max_compute_run: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", check_kinds(self.kinds))
        object.__setattr__(self, "groups", check_groups(self.groups))
        if self.eligible != "tag" and not callable(self.eligible):
            raise ValueError(f"eligible must be 'tag' or a callable, got {self.eligible!r}")
        if self.max_compute_run is not None:
            check_count("max_compute_run", self.max_compute_run, least=1)
        check_caps(self.cap_mb)

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Plan a graph; ``buckets`` and ``unmerged`` give the reasons why buckets were closed.

        A ``RuntimeError`` chains the error of a callable that failed, changed the graph or
        communicated.
        """
        caps = list(self.cap_mb.values()) if isinstance(self.cap_mb, Mapping) else [self.cap_mb]
        cap_mb = next(filter(callable, caps), None)
        with reading_only(analysis.graph, cap_mb=cap_mb, eligible=self.eligible):
            return CapPlanner(analysis, self).plan(self.cap_mb, self.max_compute_run)


class _Filled(NamedTuple):
    """A bucket that was filled: its members, their bytes, and how it ended."""

    members: list[Collective]
    nbytes: int
    tried: int  # candidates, joined or not
    closed_by: ClosedBy
    detail: str


class CapPlanner:
    """Plan one graph under several caps, reading the graph once.

    Caps and ``max_compute_run`` of ``options`` are ignored; callers guard a user's ``eligible``
    with :func:`.reading_only`.
    """

    def __init__(self, analysis: GraphAnalysis, options: ByCap) -> None:
        self.analysis = analysis
        self._default_cap = cache(default_cap_mb)
        mergeable, self._left = _candidates(analysis, options.kinds, options.eligible)
        groups = options.groups
        self._left += [
            left_alone(c, f"its process group {c.home} is not one of groups=")
            for c in mergeable
            if groups is not None and c.home not in groups
        ]
        chosen = [c for c in mergeable if groups is None or c.home in groups]
        homes = tuple(dict.fromkeys(c.home for c in chosen))
        # Groups in one scope are planned together, scopes one after the other.
        self._scopes = [homes] if groups is None else [(home,) for home in homes]
        self._in_wait_order = sorted(
            chosen, key=lambda c: (KINDS.index(c.kind), analysis.position[c.wait])
        )
        self._contracted = Contraction(analysis)
        self._position = self._contracted.position

    def plan(self, cap_mb: CapMb = None, max_compute_run: int | None = None) -> MergePlan:
        """Plan with one cap and one bound on compute runs."""
        # A search plans one graph hundreds of times: only the buckets are forgotten in between.
        self._contracted.reset()
        self._cap_mb, self._max_run = cap_mb, max_compute_run
        self._buckets: list[Bucket] = []
        self._unmerged: list[tuple[int, Unmerged]] = []
        for groups in self._scopes:
            for alike in _by_key(c for c in self._in_wait_order if c.home in groups):
                self._fill(alike)
        return MergePlan(
            buckets=tuple(sorted(self._buckets, key=lambda b: self._position(b.members[0]))),
            ineligible=tuple(self._left),
            unmerged=tuple(u for _, u in sorted(self._unmerged, key=lambda item: item[0])),
        )

    def _fill(self, candidates: list[Collective]) -> None:
        """Plan the buckets of one bucket key."""
        cap_of = self._cap_of(candidates[0])
        index, remaining = 0, candidates
        self._reached = 0  # compute nodes up to the previous bucket's last member
        while remaining:
            cap, first = cap_of(index), remaining[0]
            most_over = min(_PASSED_OVER * cap, _MOST_PASSED_OVER)
            filled = self._first_fit(remaining, cap, most_over)
            if filled.closed_by == "bytes":
                tried = remaining[1 : filled.tried]
                largest = [first, *sorted(tried, key=lambda c: c.wire_bytes, reverse=True)]
                if _first_fit_bytes(largest, cap) - filled.nbytes >= _FULLER * cap:
                    fuller = self._first_fit(largest, cap, math.inf)
                    # Dependencies may keep a large member out.
                    worse = fuller.nbytes <= filled.nbytes
                    filled = self._first_fit(remaining, cap, most_over) if worse else fuller
            self._end(filled, cap)
            index, joined = index + 1, {c.start for c in filled.members}
            remaining = [c for c in remaining if c.start not in joined]

    def _first_fit(self, candidates: list[Collective], cap: int, most_over: float) -> _Filled:
        """Open a bucket with the first candidate, and add members in this order."""
        first = candidates[0]
        self._contracted.open(first.start)
        members, nbytes, over = [first], first.wire_bytes, 0
        closed_by: ClosedBy = "end"
        detail = ""
        for place, c in enumerate(candidates[1:], 1):
            refused, why = self._refused_by(c, nbytes, cap)
            if refused is None:
                members.append(c)
                nbytes += c.wire_bytes
                continue
            if closed_by == "end":
                closed_by, detail = refused, why
            over += c.wire_bytes if c.wire_bytes <= cap else 0
            if refused != "bytes":
                return _Filled(members, nbytes, place, closed_by, detail)
            if over > most_over or nbytes >= cap:
                return _Filled(members, nbytes, place + 1, closed_by, detail)
        return _Filled(members, nbytes, len(candidates), closed_by, detail)

    def _refused_by(self, c: Collective, filled: int, cap: int) -> tuple[ClosedBy | None, str]:
        """Try to add ``c`` to the open bucket; return why not and a text, or ``(None, "")``."""
        # Cheap checks first; only the contraction's changes the bucket.
        filled += c.wire_bytes
        if filled > cap:
            return "bytes", f"with {c.start.name}: {filled} bytes, above the cap of {cap}"
        if self._max_run is not None and c.kind == "reduce_scatter":
            run = self.analysis.compute_before[c.start] - self._reached
            if run > self._max_run:
                return "run", f"with {c.start.name}: {run} compute nodes since the bucket before"
        if self._contracted.try_add(c.start):
            return None, ""
        return "dependency", self._contracted.why(c.start)

    def _end(self, filled: _Filled, cap: int) -> None:
        """Close the open bucket, with the reason."""
        self._contracted.close()
        members, nbytes, _, closed_by, detail = filled
        if self._max_run is not None:
            self._reached = max(self.analysis.compute_before[c.start] for c in members)
        first = members[0]
        if len(members) > 1:
            ordered = tuple(sorted((c.start for c in members), key=self._position))
            self._buckets.append(Bucket(first.kind, None, ordered, closed_by, detail, nbytes, cap))
            return
        if closed_by == "end":
            detail = "no other collective of its bucket key follows"
        unmerged = Unmerged(
            first.fqns, detail, first.start.name, first.kind, first.group, nbytes, closed_by
        )
        self._unmerged.append((self._position(first.start), unmerged))

    def _cap_of(self, c: Collective) -> Callable[[int], int]:
        """Return the cap in bytes of each bucket of the group of ``c``, by the bucket's index."""
        cap: Any = self._cap_mb
        if isinstance(cap, Mapping):
            cap = cap.get((c.group, c.kind), cap.get(c.group))
        if cap is None:
            cap = self._default_cap(c.ranks)

        def cap_bytes(index: int) -> int:
            value = cap[min(index, len(cap) - 1)] if isinstance(cap, tuple) else cap
            if callable(cap):
                try:
                    value = cap(index)
                except Exception as error:
                    where = f"bucket {index} of the {c.kind} group {c.group}"
                    raise RuntimeError(f"cap_mb failed for {where}") from error
            check_positive(f"the cap of bucket {index}", value, "number of MiB")
            return int(min(value * _MIB, 2**63))  # a huge float has no place in a report

        return cap_bytes


def _first_fit_bytes(candidates: Iterable[Collective], cap: int) -> int:
    """Count the bytes of members that fit into one bucket in this order, without dependencies."""
    nbytes = 0
    for c in candidates:
        nbytes += c.wire_bytes if nbytes + c.wire_bytes <= cap else 0
    return nbytes


def _candidates(
    analysis: GraphAnalysis, kinds: Collection[Kind], eligible: Eligible
) -> tuple[list[Collective], list[LeftAlone]]:
    """Return the mergeable collectives and the others."""
    mergeable: list[Collective] = []
    alone: list[LeftAlone] = []
    for c in analysis.collectives.values():
        if c.kind not in kinds:
            continue
        try:
            is_chosen = bool(c.tag if eligible == "tag" else eligible(c.start))
        except Exception as error:
            raise RuntimeError(f"eligible failed at {c.start.format_node()}") from error
        if c.why_not:
            alone.append(left_alone(c, c.why_not))
        elif is_chosen:
            mergeable.append(c)
        elif eligible == "tag":
            alone.append(left_alone(c, UNTAGGED, LeftCause.UNTAGGED))
        else:
            alone.append(left_alone(c, "it is not eligible"))
    return mergeable, alone


def _by_key(collectives: Iterable[Collective]) -> list[list[Collective]]:
    """Group collectives by bucket key, and keep their order."""
    groups: dict[Any, list[Collective]] = {}
    for c in collectives:
        groups.setdefault(c.key, []).append(c)
    return list(groups.values())


def check_caps(cap_mb: CapMb) -> None:
    """Raise a ValueError unless all numbers in ``cap_mb`` of :class:`ByCap` are positive."""
    caps: dict[Any, Any] = dict(cap_mb) if isinstance(cap_mb, Mapping) else {"": cap_mb}
    for group, cap in caps.items():
        if cap is not None and not callable(cap):
            for number in cap if isinstance(cap, tuple) and cap else (cap,):
                name = f"cap_mb of group {group}" if group else "cap_mb"
                check_positive(name, number, "number of MiB")
