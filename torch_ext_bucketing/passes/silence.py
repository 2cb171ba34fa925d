"""Warnings for compiles in which bucketing did nothing, or something else than was asked for.

Both are legal outcomes, and both cost what the package was installed for, so neither is silent: one
warning per compile says what happened, why, and what to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch.fx as fx

from ..bucketing.members import UNTAGGED
from ..graph.collectives import Kind, kind_of
from ..reports.buckets import NO_KEY
from ..reports.graph import GraphReport
from ..tagging.tags import tag_of
from .base import Compilation
from .divided import some

__all__ = [
    "NotBucketedWarning",
    "PayloadOrderWarning",
    "warn_of_silence",
]

_SHOWN = 8
"""Names in one warning; the report has all."""

_NOT_ASKED = "no pass was asked for"
_NO_PARTNER = "nothing else in their unit has the same kind, group and dtype"
_NO_UNIT = "no unit has "
_REDUCTIONS: frozenset[Kind] = frozenset(("reduce_scatter", "all_reduce"))
_WAYS_OUT = {
    UNTAGGED: "give the backend the model whose parameters they serve: backend(..., model=model)",
    _NOT_ASKED: "name the kind in kinds= of the pass",
    _NO_PARTNER: "make larger units",
    _NO_UNIT: "name the parameters' modules in the units, as they are called in the compiled model",
    "bytes": "raise cap_mb",
}


class NotBucketedWarning(UserWarning):
    """Nothing in a compiled graph was bucketed, although it has collectives, or nothing of one
    kind of reduction, or there is nothing to bucket as parameters are not sharded."""


class PayloadOrderWarning(UserWarning):
    """Buckets are not packed in the order that was asked for."""


def warn_of_silence(
    graph: fx.Graph, reports: Sequence[GraphReport], compilation: Compilation
) -> None:
    """Warn where the passes that bucket did nothing to a graph, or lost the payload order.

    Args:
        graph: after the passes.
        reports: theirs; without any, nothing was to be bucketed.
        compilation: takes the warnings, each class once.
    """
    if not any(report.kinds for report in reports):
        return
    if reports[0].collectives_before == reports[-1].collectives_after:
        text = _nothing_bucketed(graph, reports, compilation.tagged > 0)
        if text and not compilation.uncovered:  # which says the same
            compilation.warn(text, NotBucketedWarning)
    elif text := _kind_left_out(graph, reports):
        compilation.warn(text, NotBucketedWarning)
    buckets = [bucket for report in reports for bucket in report.buckets]
    lost = [bucket for bucket in buckets if bucket.packed_by == NO_KEY]
    if lost:
        keyless = dict.fromkeys(name for bucket in lost for name in bucket.no_key)
        compilation.warn(
            f"{len(lost)} of {len(buckets)} buckets of the {reports[0].stage} graph keep graph "
            f"order, not the payload order that was asked for, which has no key for "
            f"{some(list(keyless), _SHOWN)}. Make the order from the model that is compiled, with "
            "units that hold all its parameters; where FQNs are relative to another module, give "
            "that to the backend: backend(..., model=model)",
            PayloadOrderWarning,
        )


def _nothing_bucketed(graph: fx.Graph, reports: Sequence[GraphReport], has_tags: bool) -> str:
    """What to say of a graph with unchanged collectives; empty where there was nothing to merge."""
    starts = [node for node in graph.nodes if kind_of(node) is not None]
    serving = [node for node in starts if tag_of(node) is not None]
    if has_tags and not serving:
        return ""  # activations' alone; those of parameters are in the compile's other graphs
    starts = serving or starts
    if len(starts) < 2:
        return ""
    left = {node: why for report in reports for node, why in report.left_alone}
    alone = {u.node: u for report in reports for u in report.alone}
    asked = {kind for report in reports for kind in report.kinds}
    whys: Counter[str] = Counter()
    ways: dict[str, None] = {}
    for node in starts:
        kind = kind_of(node)
        if node.name in left:
            why = left[node.name]
            way = next((w for start, w in _WAYS_OUT.items() if why.startswith(start)), "")
        elif node.name in alone:
            closed_by = alone[node.name].closed_by
            why, way = f"closed by {closed_by}", _WAYS_OUT.get(closed_by, "")
        elif kind not in asked:
            why, way = f"{_NOT_ASKED} {kind}", _WAYS_OUT[_NOT_ASKED]
        else:
            why, way = _NO_PARTNER, _WAYS_OUT[_NO_PARTNER]
        whys[why] += 1
        ways.update({way: None} if way else {})
    counts = Counter(str(kind_of(node)) for node in starts)
    text = (
        f"nothing is bucketed in the {reports[0].stage} graph, although it has "
        f"{', '.join(f'{n} {kind}' for kind, n in counts.items())}: "
        f"{some([f'{why} ({n})' for why, n in whys.most_common()], _SHOWN)}."
    )
    return text + (f" To change that: {'; '.join(ways)}." if ways else "")


def _kind_left_out(graph: fx.Graph, reports: Sequence[GraphReport]) -> str:
    """What to say where one kind of reduction is bucketed and another, of the same parameters, was
    not asked for; empty where that is not so."""
    left = _REDUCTIONS - {kind for report in reports for kind in report.kinds}
    if len(left) != 1:
        return ""
    (kind,) = left
    number = sum(kind_of(node) == kind and tag_of(node) is not None for node in graph.nodes)
    if number < 2:
        return ""
    return (
        f"the {number} {kind} of the {reports[0].stage} graph are not bucketed: no pass was asked "
        "for them. Eager FSDP2 packs them as it packs the other reductions of the same "
        f"parameters. To change that: {_WAYS_OUT[_NOT_ASKED]}, or take the passes of recipe()."
    )
