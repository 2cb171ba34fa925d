"""Merge collectives of any planner's plan without a cycle.

A :class:`MergePlan` has the buckets of a graph. Planners make it by :func:`merge_groups`, or bucket
by bucket on a :class:`Contraction`: the graph contracted by the buckets planned so far. Two buckets
whose members are independent can form a cycle together::

    a1 --> b1        {a1, a2} and {b1, b2} are independent each,
                     but as buckets A and B:   A --> B --> A
    b2 --> a2

One pass over the nodes projects reachability onto starts: each start gets the set of starts that it
needs, as a Python integer with one bit per start.

Some writes are barriers. If an operator writes to a tensor that others read directly (``copy_`` on
an input), only positions order it against these readers, and merging moves nodes::

    g1 = ag(p) ... copy_(p, new) ... g2 = ag(p)        g2 must not move up, nor g1 down

Only starts between the same two writes may merge. A bucket casts its members itself, so it reads
what their casts read; a start with a write between its cast and itself stays alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol, TypeAlias

import torch.fx as fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph.analysis import Collective, GraphAnalysis
from ..graph.edits import Snapshot
from ..graph.layout import merged_cast
from ..graph.nodes import Kind
from ..reports.base import LeftAlone, LeftCause
from ..reports.compile import ClosedBy, NotMerged


@dataclass(frozen=True)
class Bucket:
    """Starts, in graph order, to merge into one collective."""

    kind: Kind
    unit: int | None  # index of the unit; None for a bucket by size
    members: tuple[fx.Node, ...]
    # The reason that kept the next candidate out; ``"end"``: no candidate was left.
    closed_by: ClosedBy = "end"
    detail: str = ""  # the candidate and the reason, for reports
    # Bytes of all members that count against ``cap_bytes``; None without a cap.
    wire_bytes: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True)
class MergePlan(NotMerged):
    """The buckets of one graph, by their first members; each has at least two members."""

    buckets: tuple[Bucket, ...] = ()


class BucketPlanner(Protocol):
    """Plan the buckets of a graph.

    Most planners group collectives and call :func:`merge_groups`. A planner is a frozen dataclass:
    cache keys are made of its fields, and reports show its ``repr``.
    """

    def plan(self, analysis: GraphAnalysis) -> MergePlan:
        """Plan a graph without changing it.

        All ranks must get the same plan: it must not depend on hash order, ids, time or the rank.
        """


def merge_groups(
    analysis: GraphAnalysis, groups: Iterable[tuple[int | None, Sequence[Collective]]]
) -> MergePlan:
    """Merge each group into as few buckets as dependencies allow.

    A group is a unit's index, or None, and collectives of one bucket key in graph order. A member
    that would close a cycle goes into a further bucket of its group.
    """
    contracted = Contraction(analysis)
    buckets, splits, alone = list[Bucket](), list[str](), list[LeftAlone]()
    # One contraction for all groups: several buckets may form a cycle that no single one shows.
    for unit, candidates in groups:
        first, remaining = candidates[0], list(candidates)
        # A group of one has nothing to merge, and is not reported.
        while remaining and len(candidates) > 1:
            members, remaining, detail = _fill(contracted, remaining)
            if members[0] is not first:
                splits += [
                    f"{c.start.name} depends on the bucket of {first.start.name} or is needed by "
                    "it, and goes into a further bucket"
                    for c in members
                ]
            if len(members) > 1:
                closed_by: ClosedBy = "dependency" if remaining else "end"
                starts = tuple(c.start for c in members)
                buckets.append(Bucket(first.kind, unit, starts, closed_by, detail))
            else:
                why = "nothing can be merged with it without a cycle"
                alone.append(left_alone(members[0], why))
    buckets.sort(key=lambda b: contracted.position(b.members[0]))
    return MergePlan(tuple(buckets), ineligible=tuple(alone), splits=tuple(splits))


def _fill(
    contracted: Contraction, candidates: list[Collective]
) -> tuple[list[Collective], list[Collective], str]:
    """Fill the first candidate's bucket; return its members, the others, and the first reason."""
    contracted.open(candidates[0].start)
    members, refused, detail = [candidates[0]], [], ""
    for c in candidates[1:]:
        if contracted.try_add(c.start):
            members.append(c)
        else:
            refused.append(c)
            detail = detail or contracted.why(c.start)
    contracted.close()
    return members, refused, detail


def checked_plan(planner: BucketPlanner, analysis: GraphAnalysis) -> MergePlan:
    """Plan a graph with a user's planner, and check that the plan can be applied.

    A ``RuntimeError`` chains the planner's failure, change of the graph or communication. A
    ``ValueError`` names a member that can't be in its bucket.
    """
    try:
        with reading_only(analysis.graph, planner=planner.plan):
            plan = planner.plan(analysis)
    except Exception as error:
        raise RuntimeError(f"the planner {planner!r} failed") from error
    contracted, free = Contraction(analysis), dict(analysis.collectives)  # not in a bucket yet
    # The buckets are built again one member after the other, so that the error names a member.
    for bucket in plan.buckets:
        first = free.get(bucket.members[0])
        for member in bucket.members:
            c = free.pop(member, None)
            if c is None or first is None:
                why = "it is not a collective of the graph, or is in another bucket"
            elif c.why_not or c.key != first.key:
                why = c.why_not or f"its bucket key is not that of {first.start.name}"
            elif c is first:
                contracted.open(member)
                continue
            elif contracted.try_add(member):
                continue
            else:
                why = contracted.why(member)
            raise ValueError(f"{planner!r} can't put {member.name} into a bucket: {why}")
        contracted.close()
    return plan


def left_alone(c: Collective, reason: str, cause: LeftCause = LeftCause.OTHER) -> LeftAlone:
    """Record that a collective is not in any bucket."""
    return LeftAlone(c.fqns, reason, c.start.name, cause=cause)


_Start = NewType("_Start", int)
"""A start, by its number among the graph's starts."""
_Epoch = NewType("_Epoch", int)
"""The number of barriers before a start."""
_Starts: TypeAlias = int
"""A set of starts: a bit for each."""


@dataclass(slots=True, eq=False)
class _Contracted:
    """Sets of starts of a bucket.

    ``reach`` is the starts that the members need, and once the bucket is closed also the members.
    ``settled`` starts need nothing that ``reach`` lacks.
    """

    members: _Starts = 0
    reach: _Starts = 0
    settled: _Starts = 0


class Contraction:
    """Contract each planned bucket of a graph's starts to one node.

    Call ``open(a)``, then ``try_add(b)`` for each candidate, then ``close()``. A bucket of one
    start contracts nothing. A start in a closed bucket brings the whole bucket along.
    """

    def __init__(self, analysis: GraphAnalysis) -> None:
        self.starts: list[fx.Node] = []
        self._index: dict[fx.Node, _Start] = {}
        self._up: list[_Starts] = []  # starts that each start needs by edges of the graph
        self._epoch: list[_Epoch] = []
        self._alone: dict[_Start, fx.Node] = {}  # the barrier between a start and its cast
        self._writes = analysis.writes.unordered
        self._project(analysis)
        self.reset()

    def reset(self) -> None:
        """Forget all buckets."""
        self._merged: _Starts = 0  # members of closed buckets that reach other starts
        self._bucket_of: dict[_Start, _Contracted] = {}
        self._closed: list[_Contracted] = []
        self._open = _Contracted()

    def _project(self, analysis: GraphAnalysis) -> None:
        """Find the starts that each start needs, its epoch, and a barrier after its cast."""
        writes = dict.fromkeys(self._writes)
        needs: dict[fx.Node, _Starts] = {}
        uses: dict[fx.Node, int] = {}
        epoch = _Epoch(0)
        epochs: dict[fx.Node, _Epoch] = {}
        for node in analysis.nodes:
            if node.op == "output":
                continue
            mask = 0
            for arg in node.all_input_nodes:
                uses_left = uses.get(arg)
                if uses_left is None:
                    raise ValueError(
                        f"{node.name} stands before its input {arg.name}: sort the graph "
                        "topologically before planning"
                    )
                argument_needs = needs[arg]
                # Most nodes add nothing: share the set, so that memory grows with the starts.
                if argument_needs is not mask and (joined := mask | argument_needs) != mask:
                    mask = argument_needs if joined == argument_needs else joined
                if uses_left == 1:  # its last use: memory follows the graph's width, not its length
                    del needs[arg]
                uses[arg] = uses_left - 1
            if node in analysis.kinds:
                start = self._index[node] = _Start(len(self.starts))
                self._up.append(mask)
                self._epoch.append(epoch)
                if epoch:  # packing would read the cast's input after the write
                    cast = merged_cast(node)
                    read = epoch if cast is None else epochs[cast]
                    if read < epoch:
                        self._alone[start] = self._writes[read]
                mask |= 1 << start
                self.starts.append(node)
            if writes:
                epochs[node] = epoch
                epoch = _Epoch(epoch + (node in writes))
            uses[node] = count = len(node.users)
            if count:
                needs[node] = mask

    def position(self, start: fx.Node) -> int:
        """Return the index of ``start`` among the starts of the graph."""
        return self._index[start]

    def open(self, start: fx.Node) -> None:
        """Open a bucket with ``start``; an open one is forgotten."""
        index = self._index[start]
        members, up = self._own(index)
        self._open = _Contracted(members, *self._closure(up, 0))
        self._static = self._up[index]
        self._open_epoch = self._epoch[index]
        self._open_alone = self._alone.get(index)

    def try_add(self, start: fx.Node) -> bool:
        """Add ``start`` to the open bucket if that closes no cycle; return whether it was added."""
        index, old = self._index[start], self._open
        if self._write_between(index) is not None:
            return False
        bits, up = self._own(index)
        # Starts that the bucket reached stay settled: only the new member's needs are followed.
        joined = _Contracted(old.members | bits, *self._closure(old.reach | up, old.settled))
        # A member that another one needs, directly or through buckets, would be its own input.
        if joined.reach & joined.members:
            return False
        self._open = joined
        self._static |= self._up[index]
        return True

    def why(self, start: fx.Node) -> str:
        """Explain why :meth:`try_add` just refused ``start``."""
        index = self._index[start]
        write = self._write_between(index)
        if write is not None:
            return f"{write.name} between them writes to a tensor that others read"
        needed = self._up[index] & self._open.members
        if needed:
            return f"{start.name} needs the result of {self.starts[_listed(needed)[0]].name}"
        if self._static >> index & 1:
            return f"the bucket needs the result of {start.name}"
        return f"{start.name} and the bucket need each other by way of other buckets"

    def _write_between(self, index: _Start) -> fx.Node | None:
        """Find the barrier that keeps a start out of the open bucket."""
        if self._epoch[index] != self._open_epoch:
            return self._writes[min(self._epoch[index], self._open_epoch)]
        return self._alone.get(index, self._open_alone)

    def close(self) -> None:
        """Contract the open bucket's members: a start that needs one of them needs them all.

        A bucket of at most one start contracts nothing.
        """
        closed, self._open = self._open, _Contracted()
        if closed.members.bit_count() < 2:
            return
        starts = _listed(closed.members)
        # A member of an earlier bucket has brought that whole bucket along: it ends here.
        for absorbed in dict.fromkeys(self._bucket_of.get(i) for i in starts):
            if absorbed is not None:
                self._closed.remove(absorbed)
                # What reached its members now reaches more, and has to be followed again.
                for earlier in self._closed:
                    earlier.settled &= ~absorbed.members
        if closed.reach:  # most gathers reach no other start and need no closure
            self._merged |= closed.members
        closed.reach |= closed.members
        closed.settled = closed.reach & self._merged
        self._closed.append(closed)
        self._bucket_of.update(dict.fromkeys(starts, closed))

    def _own(self, index: _Start) -> tuple[_Starts, _Starts]:
        """Return the members of a start's bucket, and the starts that they need."""
        bucket = self._bucket_of.get(index)
        if bucket is None:
            return 1 << index, self._up[index]
        return bucket.members, bucket.reach & ~bucket.members

    def _closure(self, reach: _Starts, settled: _Starts) -> tuple[_Starts, _Starts]:
        """Close ``reach`` under the needs of closed buckets; return it with its settled part."""
        # Start with the last bucket: its reach tends to hold most earlier ones, settled already.
        pending = reach & self._merged & ~settled
        while pending:
            bucket = self._bucket_of[_Start(pending.bit_length() - 1)]
            reach |= bucket.reach
            settled |= bucket.settled
            pending = reach & self._merged & ~settled
        return reach, settled


def _listed(starts: _Starts) -> list[_Start]:
    indices = []
    while starts:
        low = starts & -starts
        indices.append(_Start(low.bit_length() - 1))
        starts ^= low
    return indices


_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem")


class _NoCollectives(TorchDispatchMode):
    def __init__(self, hooks: str) -> None:
        super().__init__()
        self._hooks = hooks

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in _NAMESPACES:
            raise RuntimeError(
                f"{self._hooks} called the collective {func}, which waits for ranks that may not "
                "be compiling this graph: communicate before compiling"
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def reading_only(graph: fx.Graph, **hooks: object) -> Iterator[None]:
    """Call hooks in the block that may read ``graph`` and write metadata, but nothing else.

    Of ``hooks``, by name, those that are not callable are ignored. A ``RuntimeError`` names a hook
    that called a collective or changed the graph, which is restored.
    """
    names = " or ".join(name for name, hook in hooks.items() if callable(hook))
    if not names:
        yield
        return
    snapshot = Snapshot(graph)
    failed: Exception | None = None
    # A hook that changes the graph and then fails is reported for the change: that is the cause.
    try:
        with _NoCollectives(names):
            yield
    except Exception as error:
        failed = error
    difference = snapshot.difference()
    if difference:
        snapshot.restore()
        raise RuntimeError(
            f"{names} changed the graph ({difference}); it may only read it. The graph was restored"
        ) from failed
    if failed is not None:
        raise failed
