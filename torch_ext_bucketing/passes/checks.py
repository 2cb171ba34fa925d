"""Warn about graphs that are not bucketed as requested.

All are legal and cost what the package is for, so each is one warning per compile. Nothing is
bucketed, or not in the payload order (:func:`warn_of_silence`); gathers carry padding
(:func:`warn_of_padding`); or a unit's gradients are reduced
several times in one graph, or in several (:class:`DividedUnits`): a graph break divides a step into
graphs, and a bucket lies within one. Its offsets then differ from eager FSDP2's, and so do the
bits::

      unit [embed, norm, head]      eager FSDP2    one reduce-scatter: embed norm head
      graph break before norm       graph 1        reduce-scatter: embed
                                    graph 2        reduce-scatter: norm head
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch.fx as fx

from ..errors import NotBucketedWarning, PayloadOrderWarning, UnevenShardsWarning
from ..fqns import format_names
from ..fsdp.units import Units
from ..graph.analysis import Collective
from ..graph.nodes import Kind, is_bucket, kind_of, member_tags, replaced_kind, tag_of
from ..reports.base import LeftCause, size_text
from ..reports.compile import UNEVEN, GraphReport, PayloadMember, Unmerged
from .base import Compilation

_SHOWN = 8
"""Names in one warning; the report has all."""

_REDUCTIONS: frozenset[Kind] = frozenset(("reduce_scatter", "all_reduce"))
_NAME_KIND = "name the kind in kinds= of the pass"
_GIVE_MODEL = "give the backend the model whose parameters they serve: backend(..., model=model)"


def warn_of_silence(
    graph: fx.Graph, reports: Sequence[GraphReport], compilation: Compilation
) -> None:
    """Warn if the passes that made ``reports`` bucketed nothing, or lost the payload order."""
    if not any(report.kinds for report in reports):
        return
    if reports[0].collectives_before == reports[-1].collectives_after:
        text = _nothing_bucketed(graph, reports, compilation.tagged > 0)
        if any(report.uncovered for report in compilation.report.graphs):
            text = ""  # compilation.warn_uncovered() has warned already
    else:
        text = _kind_left_out(graph, reports)
    if text:
        compilation.warn(text, NotBucketedWarning)
    buckets = [bucket for report in reports for bucket in report.buckets]
    lost = [bucket for bucket in buckets if bucket.no_key]
    if lost:
        keyless = dict.fromkeys(name for bucket in lost for name in bucket.no_key)
        compilation.warn(
            f"{len(lost)} of {len(buckets)} buckets of the {reports[0].stage} graph keep graph "
            f"order: the payload order has no key for {format_names(keyless, _SHOWN)}. Make the "
            "order from the compiled model, with units that hold all its parameters. If FQNs are "
            "relative to another module, give that to the backend: backend(..., model=model)",
            PayloadOrderWarning,
        )


_LEAST_PADDING = 2**20
"""Bytes of padding on a rank that a warning is worth."""


def warn_of_padding(
    graph: fx.Graph, reports: Sequence[GraphReport], compilation: Compilation
) -> None:
    """Warn of gathers with over a tenth of padding, as by experts with fewer rows than ranks."""
    gathers: list[tuple[int, Sequence[PayloadMember]]] = [
        (bucket.group_size, bucket.members)
        for report in reports
        for bucket in report.buckets
        if bucket.kind == "all_gather"
    ]
    for start in graph.nodes:
        if kind_of(start) == "all_gather" and tag_of(start) is not None and not is_bucket(start):
            gather = Collective(start, "all_gather")
            if gather.rows is not None:
                member = PayloadMember(gather.fqns, 0, gather.nbytes, gather.shape, "", gather.rows)
                gathers.append((gather.ranks, [member]))
    padded = [(ranks, m, m.padding(ranks)) for ranks, members in gathers for m in members]
    uneven = [
        (ranks, members)
        for ranks, members in gathers
        if (padding := sum(m.padding(ranks) for m in members)) >= _LEAST_PADDING
        and padding > UNEVEN * sum(m.nbytes for m in members)
    ]
    if not uneven:
        return
    ranks, worst, _ = max(padded, key=lambda p: p[2])
    rows = worst.rows or 1
    times = worst.shape[0] * ranks / rows
    shape = (rows, *worst.shape[1:])
    dims = [d for d in range(1, len(shape)) if shape[d] % ranks == 0]
    share = math.gcd(rows, ranks)
    if dims:
        way = (
            f"shard it by Shard({dims[0]}), as in fully_shard(..., shard_placement_fn=lambda p: "
            f"Shard({dims[0]}) if p.ndim == {len(shape)} else None)"
        )
    else:
        way = (
            f"no other dimension is divisible by {ranks} ranks: share it among {share}, with copies"
        )
    bytes_of = sum(m.padding(n) for n, members in uneven for m in members)
    compilation.warn(
        f"{len(uneven)} of {len(gathers)} gathers of the {reports[0].stage} graph are more than a "
        f"tenth padding, {size_text(int(bytes_of))} of each rank's parts, and ranks hold unequal "
        f"shards. Most has {', '.join(worst.fqns)}, {' x '.join(map(str, shape))} on {ranks} ranks:"
        f" the first ranks hold, and gathers carry, {times:.1f} times the mean. To avoid that: "
        f"{way}",
        UnevenShardsWarning,
    )


def _nothing_bucketed(graph: fx.Graph, reports: Sequence[GraphReport], has_tags: bool) -> str:
    """Explain why no collective of a graph was merged; empty if none could be."""
    starts = [node for node in graph.nodes if replaced_kind(node) is not None]
    serving = [node for node in starts if tag_of(node) is not None]
    if has_tags and not serving:
        return ""  # Only activations'; the parameters' are in other graphs of the compile.
    # Without any tag, all collectives are taken for the parameters'.
    starts = serving or starts
    if len(starts) < 2:
        return ""
    left_alone = {x.node: x for r in reports for x in (*r.unmerged, *r.ineligible)}
    asked = {kind for report in reports for kind in report.kinds}
    whys: Counter[tuple[str, str]] = Counter()  # by why, and what to change
    for node in starts:
        kind, alone, way = replaced_kind(node), left_alone.get(node.name), ""
        if isinstance(alone, Unmerged) and alone.closed_by == "search":
            return ""  # the caps that the search chose are the fastest ones
        if isinstance(alone, Unmerged):
            why = f"closed by {alone.closed_by}"
            way = "raise cap_mb" if alone.closed_by == "bytes" else ""
        elif alone is not None:
            why, way = alone.reason, _GIVE_MODEL if alone.cause is LeftCause.UNTAGGED else ""
        elif kind in asked:
            why = "their unit has no other collective of the same kind, group and dtype"
            way = "make larger units"
        else:
            why, way = f"no pass buckets {kind}", _NAME_KIND
        whys[why, way] += 1
    counts = Counter(str(replaced_kind(node)) for node in starts)
    has = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    reasons = format_names([f"{why} ({n})" for (why, _), n in whys.most_common()], _SHOWN)
    ways = "; ".join(dict.fromkeys(way for _, way in whys if way))
    text = f"nothing is bucketed in the {reports[0].stage} graph, which has {has}: {reasons}."
    return text + (f" To change that: {ways}." if ways else "")


def _kind_left_out(graph: fx.Graph, reports: Sequence[GraphReport]) -> str:
    """Explain that one kind of reduction is bucketed and another is not; empty otherwise."""
    unbucketed = _REDUCTIONS - {kind for report in reports for kind in report.kinds}
    if len(unbucketed) != 1:
        return ""
    (kind,) = unbucketed
    number = sum(replaced_kind(node) == kind and tag_of(node) is not None for node in graph.nodes)
    if number < 2:
        return ""
    return (
        f"the {number} {kind} of the {reports[0].stage} graph are not bucketed: no pass buckets "
        "them. Eager FSDP2 packs them like the other reductions of the same parameters. To change "
        f"that: {_NAME_KIND}, or take the passes of recipe()."
    )


class DividedUnits:
    """Record the parameters that each graph reduces of ``units``, over all compiles of a pass."""

    def __init__(self, units: Units) -> None:
        self._units = units
        self._seen: dict[int, dict[int, tuple[str, ...]]] = {}  # unit -> frame -> parameters

    def look(self, graph: fx.Graph, compilation: Compilation) -> None:
        """Record the reductions of ``graph``, and warn if they divide a unit."""
        if compilation.frame is None:
            return
        # Gathers do not count: they copy, at any offset.
        tags = (tag for node in graph.nodes for tag in member_tags(node) if tag is not None)
        reduced = Counter((t.kind, fqn) for t in tags if t.kind != "all_gather" for fqn in t.fqns)
        reduced_by_unit: dict[int, dict[str, None]] = {}
        several = []
        for (_, fqn), times in reduced.items():
            if (unit := self._units.unit_of(fqn)) is not None:
                reduced_by_unit.setdefault(unit, {})[fqn] = None
                several += [fqn] * (times > 1)
        if several:
            compilation.warn_of_bits(
                f"{format_names(several)} have several uses in one graph, whose gradients are "
                "reduced one by one instead of their sum",
                "Put MatchFSDP2() first among the passes, as recipe() does; if it is there, the "
                "report names the reason",
            )
        divided = []
        for unit, fqns in reduced_by_unit.items():
            frames = self._seen.setdefault(unit, {})
            frames[compilation.frame] = tuple(fqns)
            # A recompiled frame replaces its graph. Graphs of equal parameters take turns in a
            # step (ReduceOnce), and divide nothing.
            elsewhere = [f for f in frames.values() if set(f) != set(fqns)]
            divided += [(earlier, fqns) for earlier in elsewhere[-1:]]
        if divided:
            (earlier, these), further = divided[0], len(divided) - 1
            compilation.warn_of_bits(
                f"one unit's gradients are reduced in several graphs: {format_names(earlier)} in "
                f"an earlier one, {format_names(these)} in this one"
                + (f" (and {further} more unit(s))" if further else ""),
                "Remove the graph break between them (torch.compile(..., fullgraph=True) reports "
                "it), or make each side's parameters a unit, in eager FSDP2 as well",
            )
