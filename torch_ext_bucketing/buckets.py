"""Which collectives merge: planned over a graph first, applied afterwards.

:func:`plan_units` only reads the graph; :func:`apply_plan` only does what the plan says. A plan
never merges into a cycle, nor across a write to a tensor (see :mod:`.contraction`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.fx as fx

from . import _torch_bucketing as tb
from ._gc import paused_gc
from ._merge_traces import shared_traces
from .contraction import Contraction
from .hook_guard import reading_only
from .report import BucketReport, ClosedBy, PayloadMember, Unmerged
from .snapshot import unchanged_on_error
from .tags import KINDS, Kind, Tag, is_bucket, kind_of, set_member_tags, tag_of
from .writes import written_roots

__all__ = [
    "Bucket",
    "BucketingPlan",
    "UncoveredParametersWarning",
    "UnitIndex",
    "apply_plan",
    "count_collectives",
    "merge_buckets",
    "plan_units",
    "unmergeable",
]

PayloadKey = Callable[[fx.Node], Any]


class UncoveredParametersWarning(UserWarning):
    """Some parameters' collectives are in no unit and stay one collective each."""


@runtime_checkable
class HasUnits(Protocol):
    """An order: units as tuples of parameter FQNs, in payload order."""

    @property
    def units(self) -> Sequence[Sequence[str]]: ...


@dataclass(frozen=True)
class Bucket:
    """Starts that become one collective.

    Args:
        kind: of all members.
        unit: its number in the order or plan; None for a bucket by size.
        members: in graph order.
        span: distance in graph order between the first and the last member, in nodes.
        closed_by: what kept the next candidate out; ``"end"``: there was none.
        detail: which one, and why, in words.
        wire_bytes: what the members count against a byte cap, together; None where none is kept.
        cap_bytes: the cap.
    """

    kind: Kind
    unit: int | None
    members: tuple[fx.Node, ...]
    span: int = 0
    closed_by: ClosedBy = "end"
    detail: str = ""
    wire_bytes: int | None = None
    cap_bytes: int | None = None


@dataclass(frozen=True)
class BucketingPlan:
    """What to merge, and why the rest is left.

    Args:
        buckets: in the graph order of their first members; each has two members or more.
        duplicates: ``(start, earlier start)``: a gather of the same value as an earlier one, whose
            result it can use.
        uncovered: FQNs in no unit, sorted as met in the graph.
        left_alone: ``(node name, reason)``.
        splits: members that had to leave their bucket for a further one, in words.
        alone: what could have been in a bucket and is in none, in graph order.
    """

    buckets: tuple[Bucket, ...] = ()
    duplicates: tuple[tuple[fx.Node, fx.Node], ...] = ()
    uncovered: tuple[str, ...] = ()
    left_alone: tuple[tuple[str, str], ...] = ()
    splits: tuple[str, ...] = ()
    alone: tuple[Unmerged, ...] = ()


class UnitIndex:
    """Finds the unit of a parameter.

    Args:
        order_or_plan: an object with ``units`` (tuples of parameter or of module FQNs), or the
            tuples themselves. A module's name covers the parameters below it that no longer name
            covers; ``""`` is the root. A name that no parameter has covers none.
        aliases: ``(other FQN, FQN in units)`` of shared parameters.

    Raises:
        TypeError: the units are a string, or a name is none.
        ValueError: one name in two units.
    """

    def __init__(
        self,
        order_or_plan: HasUnits | Iterable[Sequence[str]],
        aliases: Iterable[tuple[str, str]] = (),
    ) -> None:
        units = order_or_plan.units if isinstance(order_or_plan, HasUnits) else order_or_plan
        if isinstance(units, str):
            raise TypeError(f"units must be a sequence of sequences of FQNs, got {units!r}")
        self._unit: dict[str, int] = {}
        for index, unit in enumerate(units):
            for fqn in (unit,) if isinstance(unit, str) else unit:
                if not isinstance(fqn, str):
                    raise TypeError(f"unit {index}: an FQN must be a string, got {fqn!r}")
                if self._unit.setdefault(fqn, index) != index:
                    raise ValueError(
                        f"{fqn!r} is in two units, {self._unit[fqn]} and {index}: name it in one"
                    )
        self._aliases = dict(aliases or getattr(order_or_plan, "aliases", ()))

    def unit_of(self, fqn: str) -> int | None:
        """Index of the unit of a parameter, or None."""
        name = self._aliases.get(fqn, fqn)
        while True:
            if name in self._unit:
                return self._unit[name]
            if not name:
                return None
            name = name.rpartition(".")[0]


def count_collectives(graph: fx.Graph) -> dict[str, int]:
    """Number of all-gathers, reduce-scatters and all-reduces in ``graph``, by kind."""
    found = Counter(kind_of(n) for n in graph.nodes)
    return {kind: found[kind] for kind in KINDS if found[kind]}


def plan_units(
    graph: fx.Graph, units: UnitIndex, kinds: Collection[Kind] = ("all_gather", "reduce_scatter")
) -> BucketingPlan:
    """One bucket per unit and bucket key. Reads the graph only.

    Args:
        graph: a graph whose collectives carry tags.
        units: which parameter is in which unit.
        kinds: what is bucketed; others are left alone without a word.

    Raises:
        ValueError: the graph is not in topological order.
    """
    uncovered: dict[str, None] = {}
    left: list[tuple[str, str]] = []
    groups: dict[tuple[int, Any], list[fx.Node]] = {}
    duplicates: list[tuple[fx.Node, fx.Node]] = []
    first_gather: dict[tuple[Any, ...], fx.Node] = {}
    contracted = Contraction(graph)
    written = written_roots(list(graph.nodes))
    for start in graph.nodes:
        kind = kind_of(start)
        if kind is None or kind not in kinds:
            continue
        tag = tag_of(start)
        if tag is None:
            left.append((start.name, "it serves no known parameter"))
            continue
        unit, why = _unit_of(tag, units)
        if unit is None:
            uncovered.update(dict.fromkeys(f for f in tag.fqns if units.unit_of(f) is None))
            left.append((start.name, why))
            continue
        why = unmergeable(start)
        if why:
            left.append((start.name, why))
            continue
        if kind == "all_gather" and start not in written:
            same = (start.target, *_gathered(start))
            earlier = first_gather.setdefault(same, start)
            if earlier is not start:
                contracted.open(earlier)
                refused = contracted.try_add(start)
                contracted.close()
                if refused is None:
                    duplicates.append((start, earlier))
                    continue
        groups.setdefault((unit, tb.bucket_key(start)), []).append(start)

    buckets: list[Bucket] = []
    splits: list[str] = []
    for (unit, _), starts in groups.items():
        if len(starts) < 2:
            continue
        kind = kind_of(starts[0])
        assert kind is not None
        first = starts[0]
        while starts:
            members, starts, detail, span = _fill(contracted, starts)
            if members[0] is not first:
                splits += [
                    f"{start.name} depends on the bucket of {first.name} or is needed by it, "
                    "and goes into a further bucket"
                    for start in members
                ]
            if len(members) > 1:
                closed_by: ClosedBy = "dependency" if starts else "end"
                buckets.append(Bucket(kind, unit, tuple(members), span, closed_by, detail))
            else:
                left.append((members[0].name, "nothing can be merged with it without a cycle"))
    position = {node: i for i, node in enumerate(graph.nodes)}
    buckets.sort(key=lambda b: position[b.members[0]])
    return BucketingPlan(
        tuple(buckets), tuple(duplicates), tuple(uncovered), tuple(left), tuple(splits)
    )


def _fill(
    contracted: Contraction, starts: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], str, int]:
    """The bucket of the first start, the starts that can't be in it, why so, and its span."""
    contracted.open(starts[0])
    members, rest, detail = [starts[0]], [], ""
    for start in starts[1:]:
        if contracted.try_add(start) is None:
            members.append(start)
        else:
            rest.append(start)
            detail = detail or contracted.why(start)
    span = contracted.span
    contracted.close()
    return members, rest, detail, span


def apply_plan(
    graph: fx.Graph, plan: BucketingPlan, payload_key: PayloadKey | None = None
) -> list[BucketReport]:
    """Merge the plan's buckets. ``graph`` is in topological order afterwards.

    A gather bucket starts where its first member started, a reduction where its last did::

        ag(a) w ... ag(b) w ...            AG(a, b) W split ... ... ...
        rs(a) w use ... rs(b) w use        ... ... RS(a, b) W split use use

    Args:
        graph: the graph that the plan was made for, unchanged since.
        plan: what to merge.
        payload_key: ascending key of a member's bytes; a bucket with a member whose key is None
            keeps graph order as a whole. None takes torch's ``bucket_payload_order_key``. It is
            called once per member, before anything changes, and may only read the graph.

    Returns:
        One report per bucket, in graph order.

    Raises:
        HooksError: ``payload_key`` is given, but this torch has no payload-order hook.
        RuntimeError: the key failed at a node, its keys for one bucket have no order, or it changed
            the graph or communicated; or, torch's own, a symbolic size has no hint.
        Exception: what torch raises where it can't merge. Then, too, the graph is as it was.
    """
    keys = _payload_keys(graph, plan, payload_key)
    with paused_gc(), unchanged_on_error(graph):
        return merge_buckets(graph, plan, keys)


def merge_buckets(
    graph: fx.Graph, plan: BucketingPlan, keys: Mapping[fx.Node, Any] | None = None
) -> list[BucketReport]:
    """:func:`apply_plan` with keys at hand, and without a way back.

    Args:
        graph: as of :func:`apply_plan`.
        plan: as of :func:`apply_plan`.
        keys: every member's key; None packs in graph order.
    """
    for duplicate, original in plan.duplicates:
        _reuse_gather(duplicate, original)
    position = {node: i for i, node in enumerate(graph.nodes)}
    reports = []
    with shared_traces():
        for bucket in plan.buckets:
            if bucket.kind == "all_gather":
                _hoist_inputs(bucket, position)
            reports.append(_apply_bucket(graph, bucket, keys))
    if reports or plan.duplicates:
        tb.sort_topologically(graph)
        graph.lint()
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    return sorted(reports, key=lambda r: place[r.node])


def _payload_keys(
    graph: fx.Graph, plan: BucketingPlan, payload_key: PayloadKey | None
) -> Mapping[fx.Node, Any] | None:
    """Every member's key, computed and compared before anything changes."""
    if payload_key is not None:
        tb.require_payload_order_hook()
    key_of, name = payload_key, "payload_order"
    if key_of is None:
        key_of, name = tb.configured_payload_key(), "bucket_payload_order_key"
    if key_of is None:
        return None
    keys: dict[fx.Node, Any] = {}
    with reading_only(graph, name):
        for bucket in plan.buckets:
            for member in bucket.members:
                try:
                    keys[member] = key_of(member)
                except Exception as error:
                    raise RuntimeError(f"{name} failed at {member.format_node()}") from error
            _check_order(name, {m: keys[m] for m in bucket.members})
    return keys


def _check_order(name: str, keys: Mapping[fx.Node, Any]) -> None:
    known = [k for k in keys.values() if k is not None]
    try:
        known.sort()
        if not all(a < b or a == b for a, b in itertools.pairwise(known)):
            raise TypeError("keys without a total order, such as NaN")
    except Exception as error:
        said = ", ".join(f"{node.name}: {key!r}" for node, key in keys.items())
        raise RuntimeError(f"{name}: the keys of a bucket can't be sorted: {said}") from error


def _apply_bucket(
    graph: fx.Graph, bucket: Bucket, keys: Mapping[fx.Node, Any] | None
) -> BucketReport:
    first, last = bucket.members[0], bucket.members[-1]
    tags = {m: tag_of(m) for m in bucket.members}
    shapes = {m: _payload_shape(m) for m in bucket.members}
    dtypes = {m: m.meta["val"].dtype for m in bucket.members}
    by_input: dict[fx.Node, list[fx.Node]] = {}
    for member in bucket.members:
        for value in tb.packed_values(member):
            by_input.setdefault(value, []).append(member)
    group, size, op = tb.group_name(first), tb.group_size(first), tb.reduce_op(first)

    key: PayloadKey | None = None  # never a half-sorted bucket
    if keys is not None and all(keys[m] is not None for m in bucket.members):
        key = keys.__getitem__
    insert_before = first if bucket.kind == "all_gather" else last.next
    new_nodes = tb.merge(
        graph, bucket.kind, bucket.members, insert_before=insert_before, payload_key=key
    )

    start = next(n for n in new_nodes if kind_of(n) is not None)
    packed = [by_input[value].pop(0) for value in tb.payload_inputs(new_nodes)]
    if len(packed) != len(bucket.members):
        raise AssertionError(f"{start.name} packs {len(packed)} of {len(bucket.members)} members")
    # torch gave every new node the first member's metadata; who the members are is said once.
    set_member_tags(start, [tags[m] for m in packed])
    layout, offset = [], 0
    for member in packed:
        nbytes = math.prod(shapes[member]) * dtypes[member].itemsize
        tag = tags[member]
        layout.append(
            PayloadMember(
                () if tag is None else tag.fqns,
                offset,
                nbytes,
                shapes[member],
                str(dtypes[member]).removeprefix("torch."),
            )
        )
        offset += nbytes
    return BucketReport(
        bucket.kind,
        bucket.unit,
        group,
        size,
        op,
        start.name,
        tuple(layout),
        bucket.span,
        bucket.closed_by,
        bucket.detail,
        bucket.wire_bytes,
        bucket.cap_bytes,
    )


def _hoist_inputs(bucket: Bucket, position: dict[fx.Node, int]) -> None:
    """Move what leads from the parameters to a bucket's later members before its first member.

    Which ranks pad their shard of an uneven parameter differs, and so does whether there is a node
    between the parameter and the gather. A bucket that had to wait for such a node would start
    later on some ranks than on others, and collectives would meet the wrong partner::

        rank 0   ag(a) ... ag(b)              AG(a, b) ... ...
        rank 1   ag(a) ... pad(b) ag(b)       pad(b) AG(a, b) ... ...
    """
    first = bucket.members[0]
    limit = position[first]
    for member in bucket.members[1:]:
        late: dict[fx.Node, None] = {}
        stack = [tb.member_input(member)]
        while stack:
            node = stack.pop()
            if position.get(node, limit + 1) > limit and node not in late:
                late[node] = None
                stack.extend(node.all_input_nodes)
        # Behind another collective it can't be moved alone; the final sort places it.
        if any(n not in position or kind_of(n) is not None for n in late):
            continue
        for node in sorted(late, key=position.__getitem__):
            first.prepend(node)
            position[node] = limit


def _unit_of(tag: Tag, units: UnitIndex) -> tuple[int | None, str]:
    found = {fqn: units.unit_of(fqn) for fqn in tag.fqns}
    missing = [fqn for fqn, unit in found.items() if unit is None]
    if missing:
        return None, f"no unit has {', '.join(missing)}"
    if len(set(found.values())) > 1:
        return None, f"its parameters {', '.join(tag.fqns)} are in several units"
    return found[tag.fqns[0]], ""


def unmergeable(start: fx.Node) -> str:
    """Why a collective can't be a member of any bucket; empty if it can."""
    if start.target is torch.ops._c10d_functional.all_reduce_.default:
        return "it works in place"
    result = start.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return "its shape is unknown (no meta['val'])"
    if "out" in start.kwargs or is_bucket(start):
        return "it is a bucket already"
    if len(start.users) != 1 or not tb.is_wait(next(iter(start.users))):
        return "its result is used by other nodes than one wait"
    # What torch's merging takes for granted:
    if start.kwargs or next(iter(start.users)).kwargs:
        return "its arguments are given by keyword"
    value = start.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return "the shape of its input is unknown (no meta['val'])"
    kind = kind_of(start)
    if kind != "all_reduce" and not value.ndim:
        return "its input has no dimension"
    if kind == "reduce_scatter" and isinstance(value.shape[0], int):
        size = tb.group_size(start)
        if value.shape[0] % size:
            return f"its input's {value.shape[0]} rows can't be divided among {size} ranks"
    return ""


def _gathered(start: fx.Node) -> tuple[Any, ...]:
    """What makes two gathers equal: the value behind casts, dtype, group."""
    value = tb.member_input(start)
    return (value, start.meta["val"].dtype, start.args[1], tb.group_name(start))


def _reuse_gather(duplicate: fx.Node, original: fx.Node) -> None:
    (wait,) = duplicate.users
    (earlier,) = original.users
    wait.replace_all_uses_with(earlier)
    graph = duplicate.graph
    graph.erase_node(wait)
    graph.erase_node(duplicate)


def _payload_shape(start: fx.Node) -> tuple[int, ...]:
    """Shape of a member in one rank's part of the buffer."""
    if kind_of(start) == "all_gather":
        value = start.args[0]
        assert isinstance(value, fx.Node)
        shape = value.meta["val"].shape
    else:
        shape = start.meta["val"].shape
    return tuple(tb.size_hint(s, "the report of a bucket's payload") for s in shape)
