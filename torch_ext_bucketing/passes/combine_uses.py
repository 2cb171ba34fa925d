r"""Gather and reduce each parameter once per step, as eager FSDP2 does.

A traced graph has one all-gather and one reduction per *use* of a parameter: for a weight that one
``forward`` reads twice, for tied weights, for a head that runs once per chunk of the loss. Eager
FSDP2 gathers once, lets autograd add the gradients of all uses on the full parameter, and reduces
the sum::

    w -> ag -> wait -> mm                         w -> ag -> wait -> mm
    w -> ag -> wait -> mm                                        \-> mm
    ...                                           ...
    mm (g2) -> cast -> rs -> wait -> cast         mm (g2)
                                      |            |
    mm (g1) -> cast -> rs -> wait -> cast         mm (g1)
                                      |            |
                                     add          add -> cast -> rs -> wait -> cast
                                      |                                         |
                                  gradient                                  gradient

The sum has the dtype of the gathered parameter. Its terms keep the order of the gradients' arrival
in autograd's engine. That is the order of their nodes, since the joint graph is recorded while
autograd runs: ``((g3 + g2) + g1)``, whether or not some of them came through one read.

A weight that is scaled to 8 bits by its largest value (amax) needs the maximum over all shards
first: a small all-reduce before every all-gather, each as long as the network's latency.
:class:`MergeAmax` merges them into one per process group. A maximum is exact, so bits do not
change::

    w1 -> max -> all_reduce -> wait -> ... -> mul -> ag      w1 -> max \
                                                                        cat -> all_reduce -> ...
    w2 -> max -> all_reduce -> wait -> ... -> mul -> ag      w2 -> max /
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from .._torch.aot import base_input, gradient_outputs, in_backward, same_shape
from .._torch.inductor import sort_topologically
from ..bucketing.pack import pack
from ..fsdp.tagging import in_other_form
from ..graph.analysis import GraphAnalysis, unmergeable
from ..graph.dependencies import Writes, may_run_twice
from ..graph.edits import ancestors, call, contiguous_copy
from ..graph.nodes import (
    bucket_key,
    group_name,
    group_size,
    is_view,
    kind_of,
    only_wait,
    reduce_op,
    tag_of,
    wire_bytes,
)
from ..graph.operators import CASTS
from ..graph.values import (
    Cut,
    StructuralIds,
    cuts_before,
    erase_unused,
    is_linear,
    keeps_values,
    outside_reader,
)
from ..reports.base import LeftAlone, LeftCause, size_text
from ..reports.compile import RewriteReport
from .base import Compilation, GraphPass

_aten = torch.ops.aten


@dataclass(frozen=True)
class CombinedUses:
    """A parameter, or several that are gathered as one, with fewer collectives."""

    fqns: tuple[str, ...]
    gathers: tuple[int, int]  # number of all-gathers, before and after; so ``reductions``
    reductions: tuple[int, int]
    added_dtype: str | None  # dtype of the sum of the gradients; None if there was nothing to add
    saved_bytes: int  # larger side of each collective that is gone


@dataclass(frozen=True)
class CombineReport(RewriteReport):
    """The result of :class:`.CombineUses` on one graph.

    ``left`` are parameters whose uses are gathered or reduced one by one; such gradients do not
    match eager FSDP2's bit for bit.
    """

    rewrite = "combine uses"
    heading = "uses combined"
    combined: tuple[CombinedUses, ...] = ()

    def _lines(self) -> list[str]:
        lines = []
        for c in self.combined:
            parts = []
            if c.gathers[0] != c.gathers[1]:
                parts.append(f"{c.gathers[0]} gathers -> {c.gathers[1]}")
            if c.reductions[0] != c.reductions[1]:
                parts.append(
                    f"{c.reductions[0]} reductions -> {c.reductions[1]}, added in {c.added_dtype}"
                )
            parts.append(f"saves {size_text(c.saved_bytes)}")
            lines.append(f"{', '.join(c.fqns)}: {'; '.join(parts)}")
        return lines


@dataclass(frozen=True, eq=False, repr=False)
class CombineUses(GraphPass):
    """Gather and reduce each parameter once per step, as eager FSDP2 does.

    A parameter is left alone if a node writes to it, to its gathered values or to its gradients
    between its uses, if its uses are reduced in different ways, or if another node reads a value
    that would be replaced. The report gives the reason. See :mod:`.passes.combine_uses`.
    """

    stage = "joint"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        compilation.report.rewrites.append(combine_uses(graph))


def combine_uses(graph: fx.Graph) -> CombineReport:
    """Run :class:`CombineUses` on a tagged joint or inference graph in topological order."""
    combined: list[CombinedUses] = []
    left_alone: list[LeftAlone] = []
    # The parameters with several collectives of one kind and group, in graph order.
    tags = [(tag, group_name(n)) for n in graph.nodes if (tag := tag_of(n)) is not None]
    several = (tag.fqns for (tag, _), count in Counter(tags).items() if count > 1)
    for fqns in dict.fromkeys(several):
        done, unshared = _combine(graph, fqns)
        combined += done
        left_alone += unshared
    if combined:
        graph.lint()
    return CombineReport(tuple(combined), left=tuple(left_alone))


def _combine(graph: fx.Graph, fqns: tuple[str, ...]) -> tuple[list[CombinedUses], list[LeftAlone]]:
    """Combine the uses of one parameter; return the combined uses and the reasons for others."""
    # Equal nodes read equal values only as long as no node writes in between.
    if not Writes(graph.nodes).unordered:
        _share_forms(graph, _gathers(_serving(graph, fqns)))
    collectives = _serving(graph, fqns)
    gathers = _gathers(collectives)
    facts = GraphAnalysis(graph)
    tree = _find_tree(facts, collectives)
    saved = 0

    mergeable, left_alone = _same_gathers(fqns, gathers, facts) if len(gathers) > 1 else ([], [])
    plan: dict[fx.Node, Cut] = {}
    # The parameter's values before a write and after it have different gradients.
    if tree.uses and not any(x.cause is LeftCause.WRITTEN for x in left_alone):
        plan, reason = _plan_reduction(tree, gathers, facts)
        if reason:
            left_alone.append(LeftAlone(fqns, reason))

    # torch drops a gather whose result no kernel reads, so sharing it saves nothing.
    read = [n for n in gathers if _is_read(n)]
    remaining = len(read)
    for first, *equal in mergeable:
        unread = max(0, sum(n in read for n in (first, *equal)) - 1)
        remaining -= unread
        saved += unread * wire_bytes(first)
        for start in equal:
            (wait,), (shared,) = start.users, first.users
            wait.replace_all_uses_with(shared)
            erase_unused([wait])
    dtype = None
    if plan:
        dtype = _dtype_name(next(iter(plan.values())).node.meta["val"].dtype)
        saved += _reduce_once(graph, tree, plan, facts.position)
    if plan or mergeable:
        sort_topologically(graph)
    if remaining == len(read) and not plan:
        return [], left_alone
    number = len(tree.uses)
    reduced = (number, 1 if plan else number)
    return [CombinedUses(fqns, (len(read), remaining), reduced, dtype, saved)], left_alone


def _serving(graph: fx.Graph, fqns: tuple[str, ...]) -> list[fx.Node]:
    """List the collectives that serve exactly these parameters."""
    return [n for n in graph.nodes if (tag := tag_of(n)) is not None and tag.fqns == fqns]


def _gathers(starts: Sequence[fx.Node]) -> list[fx.Node]:
    return [start for start in starts if kind_of(start) == "all_gather"]


# --- gathers -------------------------------------------------------------------------


def _same_gathers(
    fqns: tuple[str, ...], gathers: Sequence[fx.Node], facts: GraphAnalysis
) -> tuple[list[list[fx.Node]], list[LeftAlone]]:
    """Group the gathers of equal values, two or more each; return reasons for the others."""
    left_alone: list[LeftAlone] = []
    position, writes = facts.position, facts.writes
    structures = StructuralIds(position)
    groups: dict[Any, list[fx.Node]] = {}
    epochs: dict[fx.Node, dict[int, None]] = {}
    for start in gathers:
        wait = only_wait(start)
        if "out" in start.kwargs or wait is None:
            reason = f"nodes other than one wait read {start.name}"
            left_alone.append(LeftAlone(fqns, reason))
            continue
        if writes.is_written(start) or writes.is_written(wait):
            reason = f"a node writes to the result of {start.name}"
            left_alone.append(LeftAlone(fqns, reason, cause=LeftCause.WRITTEN))
            continue
        source, structure = structures.from_source(start.all_input_nodes[0])
        # The epoch is the number of writes to the source that precede the gather. If a write lies
        # between the nodes that lead to the gather, the gather gets an epoch of its own.
        written_at = [position[write] for write in _writes_to(source.node, writes)]
        before = {bisect(written_at, position[n]) for n in (*source.inside, start)}
        epoch = before.pop() if len(before) == 1 else -1 - position[start]
        epochs.setdefault(source.node, {})[epoch] = None
        # In a trace of a whole step, backward gathers again to free memory in between.
        dtype, again = start.meta["val"].dtype, in_backward(start)
        key = (structure, group_name(start), group_size(start), dtype, epoch, again)
        groups.setdefault(key, []).append(start)
    for node, several in epochs.items():
        if len(several) > 1:
            reason = f"{_writes_to(node, writes)[0].name} writes to it between its uses"
            left_alone.append(LeftAlone(fqns, reason, cause=LeftCause.WRITTEN))
    return [group for group in groups.values() if len(group) > 1], left_alone


def _writes_to(source: fx.Node, writes: Writes) -> list[fx.Node]:
    return [writer for writer in writes.unordered if source in writes.by_writer[writer]]


def _share_forms(graph: fx.Graph, gathers: Sequence[fx.Node]) -> None:
    """Merge equal nodes among the ancestors of gathers."""
    # All-gather extensions compute 8-bit data and scales from the shard. A scale may be used after
    # the gather as well, so it is not enough to share the gather.
    #
    #     w -> abs -> max -> all_reduce -> ... -> mul -> ag      w -> ... -> mul -> ag
    #     w -> abs -> max -> all_reduce -> ... -> mul -> ag                     \-> ag
    before = ancestors(gathers)
    first: dict[Any, fx.Node] = {}
    for node in [n for n in graph.nodes if n in before]:
        if may_run_twice(node):
            key = (node.target, repr((node.args, node.kwargs)), in_backward(node))
            same = first.setdefault(key, node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _is_read(node: fx.Node) -> bool:
    """Return whether a kernel reads a result, or the graph returns it."""
    return any(u.op == "output" or not is_view(u) or _is_read(u) for u in node.users)


# --- reductions ----------------------------------------------------------------------


class _Tree(NamedTuple):
    """A parameter's gradient as a sum, ``add(add(a, b), c)``, with ``add`` nodes in reverse order.

    ``uses`` has the ``leaves`` that are reduced gradients of the parameter, each with its cuts.
    """

    adds: list[fx.Node]
    leaves: list[fx.Node]
    uses: dict[fx.Node, list[Cut]]

    def grow(self, add: fx.Node) -> None:
        """Include an addition, and the additions whose results only it reads."""
        self.adds.append(add)
        for summand in _summands_of(add):
            if _summands_of(summand) and len(summand.users) == 1:
                self.grow(summand)
            else:
                self.leaves.append(summand)


def _summands_of(add: fx.Node) -> tuple[fx.Node, ...]:
    """Return the two tensors of one shape and dtype that a node adds, or nothing."""
    if add.target is not _aten.add.Tensor or add.kwargs:
        return ()
    nodes = tuple(a for a in add.args if isinstance(a, fx.Node))
    values = [v for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]
    if len(values) != 2:
        return ()
    first, second = values
    return nodes if same_shape(first.shape, second.shape) and first.dtype == second.dtype else ()


def _find_tree(facts: GraphAnalysis, collectives: Sequence[fx.Node]) -> _Tree:
    """Find the sum with two or more reductions of a parameter; without one, return an empty sum."""
    for output in facts.graph.find_nodes(op="output"):
        for node in output.all_input_nodes:
            # The output may be a view or a cast of the sum.
            while not _summands_of(node) and is_linear(node) and len(node.all_input_nodes) == 1:
                node = node.all_input_nodes[0]
            if not _summands_of(node):
                continue
            tree = _Tree([], [], {})
            tree.grow(node)
            for leaf in tree.leaves:
                cuts = list(cuts_before(leaf, facts.position))
                if any(start in collectives for start in cuts[-1].reductions):
                    tree.uses[leaf] = cuts
            if len(tree.uses) > 1:
                return tree
    return _Tree([], [], {})


def _plan_reduction(
    tree: _Tree, gathers: Sequence[fx.Node], facts: GraphAnalysis
) -> tuple[dict[fx.Node, Cut], str]:
    """Return by leaf the cut at its full gradient, where it is added; or the reason why not."""
    if len(dict.fromkeys(tree.leaves)) != len(tree.leaves):
        return {}, "one gradient is added to itself after its reduction"
    # Eager FSDP2's autograd adds on the full parameter, so in the dtype that it is gathered in.
    dtypes = dict.fromkeys(g.meta["val"].dtype for g in gathers) or _kept_dtype(tree, facts)
    if any(map(in_other_form, gathers)):
        dtypes = dict.fromkeys(map(_before_cast, tree.uses.values()))
    if len(dtypes) != 1:
        listed = ", ".join(map(_dtype_name, dtypes)) or "an unknown dtype"
        return {}, f"its uses read it in {listed}, so their gradients' sum has no single dtype"
    (dtype,) = dtypes
    # Each use may have been reduced over further groups. Add before as many reductions as possible.
    most = min(len(cuts[-1].reductions) for cuts in tree.uses.values())
    structures = StructuralIds(facts.position)
    reason = ""
    for reductions in range(most, 0, -1):
        cuts = {leaf: _full(choices, reductions, dtype) for leaf, choices in tree.uses.items()}
        plan = {leaf: cut for leaf, cut in cuts.items() if cut is not None}
        if len(plan) < len(cuts):
            reason = reason or (
                f"a gradient that is reduced does not have {_dtype_name(dtype)}, the dtype of the "
                "gathered parameter"
            )
        elif len({structures.of(cut, leaf) for leaf, cut in plan.items()}) > 1:
            reason = reason or "the gradients of its uses are reduced in different ways"
        else:
            reason = _unsafe(plan, tree, facts.writes)
            return {} if reason else plan, reason
    return {}, reason


def _before_cast(cuts: Sequence[Cut]) -> torch.dtype:
    """Return the dtype of a gradient before it is cast for its reduction."""
    (node,) = cuts[-1].reductions[-1].all_input_nodes[:1]
    while _prepares(node):
        node = node.all_input_nodes[0]
    if node.target in CASTS:
        node = node.all_input_nodes[0]
    return node.meta["val"].dtype


def _prepares(node: fx.Node) -> bool:
    """Return whether a node copies or pads a gradient for its reduction."""
    return keeps_values(node) or node.target is _aten.constant_pad_nd.default


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _full(cuts: Sequence[Cut], reductions: int, dtype: torch.dtype) -> Cut | None:
    """Find the cut at which a gradient is full and has the parameter's dtype."""
    # The one nearest to the reduction, but before the copies and pads for the reduction.
    for i, cut in enumerate(cuts):
        value = cut.node.meta.get("val")
        full = len(cut.reductions) == reductions and isinstance(value, torch.Tensor)
        if full and value.dtype is dtype:
            for further in cuts[i + 1 :]:
                if len(further.inside) != len(cut.inside) + 1 or not _prepares(cut.node):
                    break
                cut = further
            return cut
    return None


def _kept_dtype(tree: _Tree, facts: GraphAnalysis) -> dict[torch.dtype, None]:
    """Return the dtypes that the uses of an unsharded parameter cast it to."""
    (output,) = facts.graph.find_nodes(op="output")
    for node, grad_of in gradient_outputs(output):
        while node is not tree.adds[0] and is_linear(node):
            node = node.all_input_nodes[0]
        if node is not tree.adds[0]:
            continue
        for parameter in facts.graph.find_nodes(op="placeholder"):
            origin = parameter.meta.get("desc")
            if origin is not None and base_input(origin) == base_input(grad_of):
                return {} if facts.writes.is_written(parameter) else _used_in(parameter)
    return {}


def _used_in(node: fx.Node) -> dict[torch.dtype, None]:
    """Collect the dtypes that computation reads a value in, linear casts followed."""
    dtype = node.meta["val"].dtype
    dtypes: dict[torch.dtype, None] = {}
    for user in node.users:
        if keeps_values(user):
            dtypes.update(_used_in(user))
        elif user.op == "call_function" and is_linear(user) and user.meta["val"].dtype != dtype:
            dtypes[user.meta["val"].dtype] = None
        elif user.op != "output":
            dtypes[dtype] = None
    return dtypes


def _unsafe(cuts: dict[fx.Node, Cut], tree: _Tree, writes: Writes) -> str:
    """Return why the gradients must stay as they are; empty if they can be added."""
    adds = dict.fromkeys(tree.adds)
    for leaf, cut in cuts.items():
        reader = outside_reader(cut, leaf) or next((u for u in leaf.users if u not in adds), None)
        if reader is not None:
            return f"{reader.name} reads a gradient that is reduced separately"
        for node in (*cut.inside, cut.node):
            if writes.is_written(node):
                return f"a node writes to {node.name}, which leads to its gradient"
    return ""


def _reduce_once(
    graph: fx.Graph, tree: _Tree, cuts: dict[fx.Node, Cut], position: dict[fx.Node, int]
) -> int:
    """Add the gradients before reducing; return the number of bytes that are not reduced now."""
    summands = [s for cut in cuts.values() for s in _summands(cut.node, position)]
    summands.sort(key=lambda s: s[0])
    # All other gradients are there before the last one, so its reduction can take the sum.
    last = max(cuts, key=lambda leaf: position[cuts[leaf].node])
    cut = cuts[last]
    total = _sum(graph, [node for _, node in summands], tree.adds[0], position)
    # The views and collectives that follow were recorded for these strides or contiguous ones.
    if total.meta["val"].stride() != cut.node.meta["val"].stride():
        total = contiguous_copy(graph, total, like=total)
    for node in cut.inside:
        node.replace_input_with(cut.node, total)

    saved = 0
    unused = [c.node for c in cuts.values()]
    for leaf, removed in cuts.items():
        if leaf is not last:
            saved += sum(map(wire_bytes, removed.reductions))
            add = next(iter(leaf.users))
            (sibling,) = (a for a in add.all_input_nodes if a is not leaf)
            add.replace_all_uses_with(sibling)
            graph.erase_node(add)  # now, so that a dead sum does not count as its reader
            unused.append(leaf)
    erase_unused(unused)
    return saved


def _summands(node: fx.Node, position: dict[fx.Node, int]) -> list[tuple[int, fx.Node]]:
    """List the gradients that autograd added up to this one, each with its place in the graph."""
    sum_ = node
    while keeps_values(sum_):
        sum_ = sum_.all_input_nodes[0]
    # An addition in the model's own code makes one gradient; only autograd's are taken apart.
    if not _summands_of(sum_) or not sum_.meta.get("is_gradient_acc"):
        return [(position[node], node)]
    buffer, new = _summands_of(sum_)
    return [*_summands(buffer, position), (position[sum_], new)]


def _sum(
    graph: fx.Graph, values: Sequence[fx.Node], like: fx.Node, position: dict[fx.Node, int]
) -> fx.Node:
    """Add from the left, each value as early as possible, with the metadata of ``like``."""
    total, last = values[0], values[0]
    for value in values[1:]:
        if position[value] > position[last]:
            last = value
        with graph.inserting_after(total if total not in position and last is not value else last):
            total = call(graph, _aten.add.Tensor, total, value, like=like)
    return total


# --- largest values ------------------------------------------------------------------


@dataclass(frozen=True)
class AmaxReport(RewriteReport):
    """The number of all-reduces in each merged one; the parameters of others are ``left``."""

    rewrite = heading = "largest values merged"
    merged: tuple[int, ...] = ()

    def _lines(self) -> list[str]:
        return [f"{number} all-reduces -> 1" for number in self.merged]


@dataclass(frozen=True, eq=False, repr=False)
class MergeAmax(GraphPass):
    """Find the largest values of all parameters with one all-reduce per process group.

    The first all-gather in 8 bits then waits for all values. See :mod:`.passes.combine_uses`.
    """

    stage = "joint"

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        # Only maxima that gathers of parameters wait for: others may be the model's own.
        fqns: dict[fx.Node, dict[str, None]] = {}  # by all-reduce
        for start in graph.nodes:
            tag = tag_of(start)
            if tag is not None and kind_of(start) == "all_gather":
                for node in ancestors([start]):
                    if kind_of(node) == "all_reduce" and reduce_op(node) in ("max", "min"):
                        fqns.setdefault(node, {}).update(dict.fromkeys(tag.fqns))
        groups: dict[Any, list[fx.Node]] = {}
        left_alone: list[LeftAlone] = []
        # Merging moves the reads of all members to one place, so that no write may lie between.
        writes = Writes(graph.nodes).unordered
        for node in [n for n in graph.nodes if n in fqns]:
            why = "the graph writes to tensors" if writes else unmergeable(node)
            if not why and any(ancestor in fqns for ancestor in ancestors([node])):
                why = "it depends on another of these all-reduces"
            if why:
                left_alone.append(LeftAlone(tuple(fqns[node]), why, node.name))
            else:
                groups.setdefault(bucket_key(node), []).append(node)
        merged = [members for members in groups.values() if len(members) > 1]
        for members in merged:
            pack(graph, members, members, members[-1].next)
        if merged:
            sort_topologically(graph)
            graph.lint()
        if merged or left_alone:
            report = AmaxReport(tuple(map(len, merged)), left=tuple(left_alone))
            compilation.report.rewrites.append(report)
