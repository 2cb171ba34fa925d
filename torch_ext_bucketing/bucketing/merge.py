"""Apply a plan: merge each bucket into one collective."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch.fx as fx

from .._torch.aot import mark_backward
from .._torch.sorting import sort_topologically
from ..graph.analysis import GraphAnalysis
from ..graph.collectives import Kind
from ..graph.pause_gc import paused_gc
from ..graph.records import Collective
from ..graph.snapshot import reading_only, unchanged_on_error
from ..graph.tags import set_member_tags
from ..reports.buckets import GRAPH_ORDER, NO_KEY, BucketReport, PayloadMember
from ..reports.graph import GraphReport, emit
from .pack import pack, packed_values
from .plan import Bucket, MergePlan

PayloadKey = Callable[[fx.Node], Any]


def check_payload_order(order: PayloadKey | None) -> PayloadKey | None:
    """Return ``order``; raise a TypeError unless it is a callable or None."""
    if order is not None and not callable(order):
        raise TypeError(
            "payload_order must be a callable that returns a start node's key, or None for graph "
            f"order, got {order!r}"
        )
    return order


def merge_and_report(
    analysis: GraphAnalysis,
    plan: MergePlan,
    payload_key: PayloadKey | None,
    kinds: Collection[Kind],
) -> GraphReport:
    """Apply a plan for ``kinds`` with :func:`apply_plan`, and log and return the graph's report."""
    stage, before = analysis.stage, analysis.counts
    buckets = tuple(apply_plan(analysis, plan, payload_key))
    gone = Counter[str](b.kind for b in plan.buckets for _ in b.members[1:])
    after = {kind: n - gone[kind] for kind, n in before.items()}
    report = GraphReport(stage, before, after, buckets, tuple(kinds), **plan.not_merged())
    emit(report)
    return report


def apply_plan(
    graph: fx.Graph | GraphAnalysis, plan: MergePlan, payload_key: PayloadKey | None = None
) -> list[BucketReport]:
    """Merge the buckets of a plan and sort the graph topologically.

    A gather bucket starts where its first member started, a reduction where its last did::

        ag(a) w ... ag(b) w ...            AG(a, b) W split ... ... ...
        rs(a) w use ... rs(b) w use        ... ... RS(a, b) W split use use

    Args:
        graph: unchanged since it was planned.
        payload_key: sort key of start nodes for the payload, ascending, ties in graph order. A
            bucket with a member whose key is None keeps graph order. The callable runs once per
            member, before anything changes, and must not change the graph.

    Returns:
        Reports of the buckets in graph order.

    Raises:
        RuntimeError: ``payload_key`` failed at a node, returned keys that have no order, changed
            the graph or communicated; or a symbolic size has no hint. The graph is as it was.
    """
    analysis, keys, packed_by = GraphAnalysis.of(graph), None, GRAPH_ORDER
    if payload_key is not None:
        keys = _payload_keys(analysis.graph, plan, payload_key)
        packed_by = str(getattr(payload_key, "__qualname__", type(payload_key).__qualname__))
    with paused_gc(), unchanged_on_error(analysis.graph):
        return merge_buckets(analysis, plan, keys, packed_by)


def merge_buckets(
    graph: fx.Graph | GraphAnalysis,
    plan: MergePlan,
    keys: Mapping[fx.Node, Any] | None = None,
    packed_by: str = GRAPH_ORDER,
) -> list[BucketReport]:
    """Do what :func:`apply_plan` does, with known keys and without restoring the graph on error."""
    analysis = GraphAnalysis.of(graph)
    graph, position = analysis.graph, dict(analysis.position)
    reports = []
    for bucket in plan.buckets:
        if bucket.kind == "all_gather":
            _hoist_inputs(bucket, position, analysis.collectives)
        members = [analysis.collectives[m] for m in bucket.members]
        reports.append(_apply_bucket(graph, bucket, members, keys, packed_by))
    if reports:
        sort_topologically(graph)
        graph.lint()
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    return sorted(reports, key=lambda r: place[r.node])


def _payload_keys(graph: fx.Graph, plan: MergePlan, payload_key: PayloadKey) -> dict[fx.Node, Any]:
    """Compute the key of every member, and check that each bucket's keys can be sorted."""
    keys: dict[fx.Node, Any] = {}
    with reading_only(graph, payload_order=payload_key):
        for bucket in plan.buckets:
            for member in bucket.members:
                try:
                    keys[member] = payload_key(member)
                except Exception as error:
                    text = f"payload_order failed at {member.format_node()}"
                    raise RuntimeError(text) from error
            try:
                known = sorted(keys[m] for m in bucket.members if keys[m] is not None)
                if not all(a < b or a == b for a, b in itertools.pairwise(known)):
                    raise TypeError("keys without a total order, such as NaN")
            except Exception as error:
                listed = ", ".join(f"{m.name}: {keys[m]!r}" for m in bucket.members)
                text = f"payload_order: the keys of a bucket can't be sorted: {listed}"
                raise RuntimeError(text) from error
    return keys


def _apply_bucket(
    graph: fx.Graph,
    bucket: Bucket,
    members: Sequence[Collective],
    keys: Mapping[fx.Node, Any] | None,
    packed_by: str,
) -> BucketReport:
    first, payload, keyless = members[0], list(members), list[Collective]()
    if keys is not None:
        keyless = [m for m in members if keys[m.start] is None]
        if keyless:  # graph order is documented; a half-sorted bucket would have no known order
            packed_by = NO_KEY
        else:
            payload.sort(key=lambda m: keys[m.start])
    layout, offset = [], 0
    for m in payload:
        name = str(m.dtype).removeprefix("torch.")
        layout.append(PayloadMember(m.fqns, offset, m.nbytes, m.shape, name))
        offset += m.nbytes
    wire = (first.group, first.ranks, first.reduce_op)

    before = first.start if bucket.kind == "all_gather" else members[-1].start.next
    in_order = [m.start for m in payload]
    start, new_nodes = pack(graph, bucket.members, in_order, before)
    # All new nodes have the first member's annotations. Only the start lists all members.
    set_member_tags(start, [m.tag for m in payload])
    if all(m.in_backward for m in members):
        mark_backward(new_nodes)
    closed = (bucket.closed_by, bucket.detail, bucket.wire_bytes, bucket.cap_bytes)
    without = tuple(", ".join(m.fqns) or m.start.name for m in keyless)
    found = (*wire, start.name, tuple(layout), *closed, packed_by, without)
    return BucketReport(bucket.kind, bucket.unit, *found)


def _hoist_inputs(
    bucket: Bucket, position: dict[fx.Node, int], collectives: Collection[fx.Node]
) -> None:
    """Move the inputs of a gather bucket's later members before its first member.

    Only some ranks pad their shard of an uneven parameter. A bucket that waited for such a pad
    would start later on these ranks, and collectives would meet the wrong partner::

        rank 0   ag(a) ... ag(b)              AG(a, b) ... ...
        rank 1   ag(a) ... pad(b) ag(b)       pad(b) AG(a, b) ... ...
    """
    first = bucket.members[0]
    limit = position[first]
    for value in packed_values(bucket.members)[1:]:
        late: dict[fx.Node, None] = {}
        stack = [value]
        while stack:
            node = stack.pop()
            if position.get(node, limit + 1) > limit and node not in late:
                late[node] = None
                stack.extend(node.all_input_nodes)
        # An input that needs another collective can't move up; the final sort places it.
        if any(n not in position or n in collectives for n in late):
            continue
        for node in sorted(late, key=position.__getitem__):
            first.prepend(node)
            position[node] = limit
