"""Buckets by size: as few collectives as a byte cap allows.

:func:`plan_by_cap` reads the graph only; :func:`.apply_plan` merges what it plans. Kinds,
groups and dtypes are planned one after the other, on one contraction: no two buckets form a cycle
together. Per bucket key, members are taken in the order of their waits, which is the order in
which their results are needed, and one bucket is open at a time. It is closed

- by ``"bytes"``: the next member would exceed the cap;
- by the ``"run"``: a reduce-scatter would leave too many compute nodes behind the one before;
- by a ``"dependency"``: it needs the bucket or is needed by it, directly or by way of buckets
  planned before, or a write to a tensor stands between them;
- by the ``"end"``: there is no next member.

The next member then starts a bucket. That is the rule of torch's greedy bucketing with
``bucket_non_adjacent`` set (see ``torch_patches``), and gives the same buckets for the same
settings; but torch takes every write for a barrier, and does not look at members that are buckets
already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch.fx as fx

from .._torch.estimates import default_cap_mb
from ..fsdp.tags import home_group, is_bucket, member_count, tag_of
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import (
    KINDS,
    Kind,
    bucket_key,
    check_kinds,
    group_name,
    group_size,
    is_wait,
    kind_of,
    waited_for,
    wire_bytes,
)
from ..reports.base import LeftAlone
from ..reports.buckets import ClosedBy, Unmerged
from .contraction import Contraction
from .groups import Counts, GroupFilter, chosen_groups
from .hook_guard import reading_only
from .members import UNTAGGED, left_alone, unmergeable
from .plan import Bucket, MergePlan
from .structure import fsdp_starts

Cap: TypeAlias = float | Callable[[int], float]
CapMb: TypeAlias = Cap | Mapping[str, Cap] | Mapping[tuple[str, str], Cap] | None
Eligible: TypeAlias = Literal["tag", "structure"] | Callable[[fx.Node], bool]

_MIB = 1024 * 1024
_ALL = 2**63  # bytes: more than any bucket has


def plan_by_cap(
    graph: fx.Graph | GraphAnalysis,
    cap_mb: CapMb = None,
    *,
    kinds: Collection[Kind] = KINDS,
    eligible: Eligible = "tag",
    group_filter: GroupFilter | None = None,
    max_compute_run: int | None = None,
    non_adjacent: bool = True,
) -> MergePlan:
    """Buckets filled in wait order up to a byte cap. Reads the graph only.

    Args:
        graph: in topological order, or what is known of it.
        cap_mb: in MiB, counted as the larger of a member's input and output: a number, a callable
            of the bucket's index within its bucket key (0, 1, ...), or either per process group
            name, or per group name and kind. None, and what the mapping lacks: what saturates the
            network of a group of that size, by torch's own estimate. A member above the cap is a
            bucket of its own.
        kinds: what is bucketed; others are left alone and not reported one by one.
        eligible: ``"tag"``: collectives with a tag, those that serve parameters. ``"structure"``:
            those that torch takes for FSDP's by their place in the graph. Or a callable of the
            start.
        group_filter: called with ``counts[group][kind]``, the number of eligible collectives of
            each kind per process group, in graph order; only collectives of the groups that it
            returns are bucketed, group by group. None buckets all. Of kinds that are not in
            ``kinds``, all-gathers alone are counted. A gather in a smaller group
            (``ReshardAfterForward(to=...)``) counts for the group of the parameter's shards.
        max_compute_run: bound on the compute nodes (see :func:`.is_compute`), in graph order, that
            a bucket of reduce-scatters has to wait for after the one before of its bucket key; see
            :class:`.CapComputeRun`.
        non_adjacent: False merges only members whose waits follow each other among the eligible
            waits of one kind; the bucket index then starts at 0 at each such run.

    Returns:
        A plan whose ``buckets`` and ``unmerged`` say why they were closed.

    Raises:
        TypeError: ``group_filter`` is no callable.
        ValueError: an unknown kind or ``eligible``, a cap that is no positive number, a run below
            1, or a graph that is not in topological order.
        RuntimeError: ``eligible``, ``group_filter`` or a cap callable failed (the cause is
            chained), changed the graph or communicated; a symbolic size has no hint (torch's own).
    """
    planner = CapPlanner(graph, kinds=kinds, eligible=eligible, group_filter=group_filter)
    return planner.plan(cap_mb, max_compute_run=max_compute_run, non_adjacent=non_adjacent)


class CapPlanner:
    """Plans of one graph under several caps. The graph is read once.

    Arguments and errors are those of :func:`plan_by_cap`; the graph must stay unchanged.
    """

    def __init__(
        self,
        graph: fx.Graph | GraphAnalysis,
        *,
        kinds: Collection[Kind] = KINDS,
        eligible: Eligible = "tag",
        group_filter: GroupFilter | None = None,
    ) -> None:
        check_options(kinds=kinds, eligible=eligible, group_filter=group_filter)
        analysis = GraphAnalysis.of(graph)
        self._graph = analysis.graph
        with _reading_only(self._graph, eligible=eligible, group_filter=group_filter):
            self._contracted = Contraction(analysis.nodes, analysis.unordered_writes)
            self._candidates = _candidates(self._graph, kinds, eligible)
            self._scopes = _scopes(self._candidates.counts, group_filter)
        self._analysis = analysis

    def plan(
        self,
        cap_mb: CapMb = None,
        *,
        max_compute_run: int | None = None,
        non_adjacent: bool = True,
    ) -> MergePlan:
        """The plan under one cap."""
        check_options(cap_mb, max_compute_run=max_compute_run)
        caps = list(cap_mb.values()) if isinstance(cap_mb, Mapping) else [cap_mb]
        self._contracted.reset()
        reached = {} if max_compute_run is None else self._analysis.compute_before
        planner = _Planner(self._contracted, cap_mb, max_compute_run, reached)
        found = self._candidates
        left = list(found.left)
        with _reading_only(self._graph, cap_mb=next(filter(callable, caps), None)):
            for groups in self._scopes:
                for kind, starts in found.in_wait_order.items():
                    members = [s for s in starts if groups is None or found.group[s] in groups]
                    for run in _runs(members, non_adjacent):
                        planner.fill(kind, run)
        if self._scopes != [None]:
            chosen = {group for groups in self._scopes for group in groups or ()}
            left += [
                left_alone(start, f"the group filter leaves out group {group}")
                for start, group in found.group.items()
                if group not in chosen
            ]
        place = self._contracted.position
        return MergePlan(
            buckets=tuple(sorted(planner.buckets, key=lambda b: place(b.members[0]))),
            ineligible=tuple(left),
            unmerged=tuple(u for _, u in sorted(planner.unmerged, key=lambda item: item[0])),
        )


def _reading_only(graph: fx.Graph, **hooks: Any) -> contextlib.AbstractContextManager[Any]:
    """Watch the graph while hooks of the user may be called; without any, that costs nothing."""
    given = [name for name, hook in hooks.items() if callable(hook)]
    return reading_only(graph, " or ".join(given)) if given else contextlib.nullcontext()


@dataclass
class _Candidates:
    """Args:
    group: of every start that may be merged, in graph order.
    counts: of what is eligible, by group and kind.
    in_wait_order: the starts by kind.
    left: what may not be merged.
    """

    group: dict[fx.Node, str] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    in_wait_order: dict[Kind, list[fx.Node]] = field(default_factory=lambda: {k: [] for k in KINDS})
    left: list[LeftAlone] = field(default_factory=list)


def _candidates(graph: fx.Graph, kinds: Collection[Kind], eligible: Eligible) -> _Candidates:
    found = _Candidates()
    if eligible == "tag":
        is_eligible: Callable[[fx.Node], Any] = tag_of
        otherwise = UNTAGGED
    elif eligible == "structure":
        is_eligible = fsdp_starts(graph).__contains__
        otherwise = "it is no collective of FSDP by its place in the graph"
    else:
        is_eligible = _asking(eligible)
        otherwise = "it is not eligible"

    for node in graph.nodes:
        kind = kind_of(node)
        if kind is not None:
            if kind not in kinds and kind != "all_gather":
                continue
            wanted = is_eligible(node) or (is_bucket(node) and eligible == "structure")
            if wanted:
                # A bucket counts as its members, so that planning again comes out the same.
                counts = found.counts.setdefault(home_group(node), dict.fromkeys(KINDS, 0))
                counts[kind] += member_count(node)
            if kind not in kinds:
                continue
            why = unmergeable(node) or ("" if wanted else otherwise)
            if why:
                found.left.append(left_alone(node, why))
            else:
                found.group[node] = home_group(node)
        elif is_wait(node) and (start := waited_for(node)) in found.group:
            assert start is not None
            mine = kind_of(start)
            assert mine is not None
            found.in_wait_order[mine].append(start)
    return found


def _asking(eligible: Callable[[fx.Node], Any]) -> Callable[[fx.Node], bool]:
    def ask(start: fx.Node) -> bool:
        try:
            return bool(eligible(start))
        except Exception as error:
            raise RuntimeError(f"eligible failed at {start.format_node()}") from error

    return ask


def _scopes(counts: Counts, group_filter: GroupFilter | None) -> list[tuple[str, ...] | None]:
    """The groups to plan together, scope after scope; None stands for all."""
    if group_filter is None or not counts:
        return [None]
    return [(g,) for g in chosen_groups(group_filter, counts)]


def _runs(members: list[fx.Node], non_adjacent: bool) -> list[list[fx.Node]]:
    """Members of one bucket key each, in wait order."""
    runs: dict[Any, list[fx.Node]] = {}
    previous: Any = None
    number = 0
    for start in members:
        key = bucket_key(start)
        if not non_adjacent:
            number += key != previous
            previous = key
        runs.setdefault((number, key), []).append(start)
    return list(runs.values())


class _Planner:
    def __init__(
        self,
        contracted: Contraction,
        cap_mb: CapMb,
        max_run: int | None,
        compute_before: Mapping[fx.Node, int],
    ) -> None:
        self.contracted = contracted
        self.buckets: list[Bucket] = []
        self.unmerged: list[tuple[int, Unmerged]] = []
        self._cap_mb = cap_mb
        self._max_run, self._compute_before = max_run, compute_before
        self._reached = 0  # compute nodes before the last member of the bucket before
        self._default: dict[int, float] = {}

    def fill(self, kind: Kind, starts: list[fx.Node]) -> None:
        """Plan the buckets of one key."""
        cap_of = self._cap_of(starts[0])
        index, cap = 0, cap_of(0)
        members: list[fx.Node] = []
        filled = self._reached = 0
        for start in starts:
            nbytes = wire_bytes(start)
            if members:
                closed_by, detail = self._closed_by(start, nbytes, filled, cap)
                if closed_by is None:
                    members.append(start)
                    filled += nbytes
                    continue
                self._end(kind, members, filled, cap, closed_by, detail)
                index += 1
                cap = cap_of(index)
            self.contracted.open(start)
            members, filled = [start], nbytes
        self._end(kind, members, filled, cap, "end", "")

    def _closed_by(
        self, start: fx.Node, nbytes: int, filled: int, cap: int
    ) -> tuple[ClosedBy | None, str]:
        if filled + nbytes > cap:
            return "bytes", f"with {start.name}: {filled + nbytes} bytes, above the cap of {cap}"
        if self._max_run is not None and kind_of(start) == "reduce_scatter":
            run = self._compute_before[start] - self._reached
            if run > self._max_run:
                return "run", f"with {start.name}: {run} compute nodes since the bucket before"
        if self.contracted.try_add(start):
            return None, ""
        return "dependency", self.contracted.why(start)

    def _end(
        self,
        kind: Kind,
        members: list[fx.Node],
        filled: int,
        cap: int,
        closed_by: ClosedBy,
        detail: str,
    ) -> None:
        self.contracted.close()
        if self._max_run is not None:
            self._reached = max(map(self._compute_before.__getitem__, members))
        position = self.contracted.position
        if len(members) > 1:
            ordered = tuple(sorted(members, key=position))
            self.buckets.append(Bucket(kind, None, ordered, closed_by, detail, filled, cap))
            return
        (start,) = members
        tag = tag_of(start)
        if closed_by == "end":
            detail = "no other collective of its bucket key follows"
        unmerged = Unmerged(
            () if tag is None else tag.fqns,
            detail,
            start.name,
            kind,
            group_name(start),
            filled,
            closed_by,
        )
        self.unmerged.append((position(start), unmerged))

    def _cap_of(self, start: fx.Node) -> Callable[[int], int]:
        cap: Any = self._cap_mb
        if isinstance(cap, Mapping):
            group = group_name(start)
            cap = cap.get((group, kind_of(start)), cap.get(group))
        if cap is None:
            size = group_size(start)
            if size not in self._default:
                self._default[size] = default_cap_mb(size)
            cap = self._default[size]

        def cap_bytes(index: int) -> int:
            value = cap
            if callable(cap):
                try:
                    value = cap(index)
                except Exception as error:
                    where = f"bucket {index} of the {kind_of(start)} group {group_name(start)}"
                    raise RuntimeError(f"cap_mb failed for {where}") from error
            check_cap(value, f"the cap of bucket {index}")
            return int(min(value * _MIB, _ALL))

        return cap_bytes


def check_options(
    cap_mb: CapMb = None,
    *,
    kinds: Collection[Kind] = KINDS,
    eligible: Eligible = "tag",
    group_filter: GroupFilter | None = None,
    max_compute_run: int | None = None,
    non_adjacent: bool = True,
) -> None:
    """Check options of :func:`plan_by_cap` without a graph; errors are those of that function."""
    check_kinds(kinds)
    if eligible not in ("tag", "structure") and not callable(eligible):
        raise ValueError(f"eligible must be 'tag', 'structure' or a callable, got {eligible!r}")
    if group_filter is not None and not callable(group_filter):
        raise TypeError(f"group_filter must be a callable or None, got {group_filter!r}")
    most = max_compute_run
    if most is not None and (not isinstance(most, int) or isinstance(most, bool)):
        raise ValueError(f"max_compute_run must be a number of nodes, got {most!r}")
    if most is not None and most < 1:
        raise ValueError(f"max_compute_run must be at least 1, got {most!r}")
    caps: list[tuple[Any, Any]] = (
        list(cap_mb.items()) if isinstance(cap_mb, Mapping) else [("", cap_mb)]
    )
    for group, cap in caps:
        if cap is not None and not callable(cap):
            check_cap(cap, f"cap_mb of group {group}" if group else "cap_mb")


def check_cap(cap: Any, what: str) -> None:
    """Raise a ValueError about ``what`` unless ``cap`` is a positive number."""
    if isinstance(cap, bool) or not isinstance(cap, (int, float)) or not 0 < cap < float("inf"):
        raise ValueError(f"{what} must be a positive number of MiB, got {cap!r}")
