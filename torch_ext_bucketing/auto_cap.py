"""Byte caps chosen by trying a handful of them on the cost model.

Large buckets make few collectives, which need little time on the wire; small ones start earlier,
hold less memory and leave less communication at the ends of a graph. Which is better depends on
the graph, and planning is cheap: every cap is planned, merged and scheduled on a copy of the graph.
First all groups get the same cap, then each group in turn tries the caps next to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch.fx as fx

from .buckets import BucketingPlan, apply_plan
from .caps import plan_by_cap
from .cost import H100, Machine
from .report import ScheduleReport
from .scheduling import Policy, model_of, peak_bytes, schedule_model
from .tags import Kind

__all__ = ["CAPS_MB", "choose_caps"]

CAPS_MB = (8.0, 25.0, 64.0, 160.0, 500.0)
"""MiB. 25 is DDP's default bucket, 500 the ceiling of torch's own estimate."""

_SMALLEST_MB = 0.1

_Caps: TypeAlias = tuple[tuple[str, float], ...]


def choose_caps(
    graph: fx.Graph,
    policies: Policy | Iterable[Policy],
    *,
    caps_mb: Sequence[float] = CAPS_MB,
    kinds: Collection[Kind] = ("all_gather", "reduce_scatter"),
    machine: Machine = H100,
    reference_bytes: int | None = None,
    **options: Any,
) -> tuple[BucketingPlan, ScheduleReport]:
    """The plan with the caps that give the fastest step within the policies' bounds. The graph is
    only read.

    Args:
        graph: as of :func:`.caps.plan_by_cap`.
        policies: as of :func:`.scheduling.schedule`.
        caps_mb: what to try, ascending, in MiB. Where all miss a bound, smaller ones are tried.
        kinds: what is bucketed.
        machine: what the cost model times nodes for.
        reference_bytes: see :func:`.scheduling.schedule`; None: the peak of ``graph``.
        options: of :func:`.caps.plan_by_cap`: ``eligible``, ``group_filter``, ``max_node_span``.

    Returns:
        The plan for ``graph``, and a report of which only ``caps_mb`` and ``cap_alternatives`` say
        something of the whole search.

    Raises:
        ValueError: ``caps_mb`` is empty, or holds something else than positive numbers.
        Exception: what :func:`.caps.plan_by_cap` raises.
    """
    if not caps_mb:
        raise ValueError("caps_mb is empty: give at least one cap in MiB")
    policies = tuple(policies) if isinstance(policies, Iterable) else (policies,)
    if reference_bytes is None:
        reference_bytes = peak_bytes(graph)
    tried: dict[_Caps, ScheduleReport] = {}
    known: dict[tuple[Any, ...], ScheduleReport] = {}

    def attempt(caps: Mapping[str, float] | float) -> None:
        plan = plan_by_cap(graph, caps, kinds=kinds, **options)
        groups = dict.fromkeys(_groups(plan))
        key = tuple((g, caps if isinstance(caps, float) else caps.get(g, 0.0)) for g in groups)
        if key in tried:
            return
        members = tuple(b.members for b in plan.buckets)
        if members not in known:
            copy, plan = _copied(graph, plan)
            apply_plan(copy, plan)
            model = model_of(copy, machine)
            known[members], _ = schedule_model(model, policies, reference_bytes, True)
        tried[key] = known[members]

    def best() -> _Caps:
        return min(tried, key=lambda k: (tried[k].misses, tried[k].step_ms))

    for cap in caps_mb:
        attempt(float(cap))
    ladder = [float(c) for c in caps_mb]
    while tried[best()].misses and ladder[0] > _SMALLEST_MB:  # a small model, or a hard bound
        ladder.insert(0, ladder[0] / 4)
        attempt(ladder[0])
    groups = [g for g, _ in best()]
    if len(groups) > 1:
        for group in groups:
            at = ladder.index(dict(best())[group])
            for near in (at - 1, at + 1):
                if 0 <= near < len(ladder):
                    attempt({**dict(best()), group: ladder[near]})
    caps = best()
    found = dict(caps)
    cap_of: Any = found if found else ladder[0]
    plan = plan_by_cap(graph, cap_of, kinds=kinds, **options)
    alternatives = tuple((k, r.step_ms[1], r.peak_bytes[1], r.misses) for k, r in tried.items())
    return plan, replace(tried[caps], caps_mb=caps, cap_alternatives=alternatives)


def _groups(plan: BucketingPlan) -> Iterable[str]:
    from . import _torch_bucketing as tb

    yield from (tb.group_name(b.members[0]) for b in plan.buckets)
    yield from (u.group for u in plan.alone)


def _copied(graph: fx.Graph, plan: BucketingPlan) -> tuple[fx.Graph, BucketingPlan]:
    """A copy of the graph that shares its fake tensors, and the plan for it."""
    copy = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new[node] = copy.node_copy(node, new.__getitem__)
    buckets = tuple(replace(b, members=tuple(new[m] for m in b.members)) for b in plan.buckets)
    return copy, replace(plan, buckets=buckets)
