r"""Merge each bucket of a plan: pack the members, launch one collective, unpack the results.

``flat`` and ``rows`` are views where the layout allows it, and copies otherwise. ``p`` is the
number of elements of all members, ``n`` the number of ranks::

    all_gather (ranks gather into their place of a buffer; casts of members are part of the copy)

        a -> flat \                                             / part -> clone -> view [n * a0, .]
                   cat [p] -> copy_ -> AG [n * p] -> view [n, p]
        b -> flat /           /             (wait)              \ part -> clone -> view [n * b0, .]
          empty [n * p] -> slice

    if one rank compiles for all, a rank's place is not a constant: cat -> cast -> AG

    all_gather of several dtypes: members are cast first, and packed as bytes

        a -> cast -> flat -> as uint8 \ ...          ... / part -> clone -> as bfloat16 -> view
        b ---------> flat -> as uint8 /                  \ part -> clone -> as float32 -> view

    reduce_scatter (rank-major: a member's rows for one rank lie together)

        a -> rows [n, a/n] \                                     / part -> view [a0 / n, .]
                            cat [n, p/n] -> view [p] -> RS [p/n]
        b -> rows [n, b/n] /                          (wait)     \ part -> view [b0 / n, .]
                                                   of several parts of one gradient: part -> clone

    all_reduce: flat, cat [p], AR [p], parts as above

Eager FSDP2 has the same layout (``_fsdp_collectives.py``: ``all_gather_copy_in``, ``chunk_cat``).
On CUDA, Inductor fuses packing (``cat``, cast and copy) of up to 8 members into one kernel. More
gathered ones are concatenated in one, and cast and copied in another; a reduced one is a kernel,
unless its producer writes into the buffer. Each gathered parameter's ``clone`` is a kernel, unless
it fuses into its reader.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.fx as fx
from torch.fx.traceback import NodeSource, NodeSourceAction

from .._torch import paused_gc
from .._torch.aot import fake_mode_of, fake_tensor, mark_backward
from .._torch.inductor import sort_topologically
from .._torch.process_groups import compiles_for_all_ranks, group_by_name
from ..graph.analysis import Collective, GraphAnalysis
from ..graph.edits import evaluate, unchanged_on_error
from ..graph.layout import Layout
from ..graph.nodes import Kind, group_name, host_stream, is_collective, is_wait, set_member_tags
from ..reports.compile import GRAPH_ORDER, NO_KEY, BucketReport, GraphReport, PayloadMember, emit
from .contraction import Bucket, MergePlan, reading_only

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_prims = torch.ops.prims

_Size: TypeAlias = int | fx.Node
"""A number, or the node that computes a symbolic size."""
_Merged: TypeAlias = tuple[fx.Node, list[fx.Node]]
"""The start of a bucket, and each member's result, in payload order."""


def pack(
    graph: fx.Graph, members: Sequence[fx.Node], payload: Sequence[fx.Node], before: fx.Node
) -> tuple[fx.Node, list[fx.Node]]:
    """Replace collectives by one over a packed buffer; return its start and all new nodes.

    ``members`` are starts of one bucket key in graph order, each with one wait as its only user;
    ``payload`` orders them in the buffer. ``before`` may be a member or its wait: the graph may not
    be in topological order afterwards.
    """
    layout = Layout.of(payload)
    with graph.inserting_before(before):
        writer = Writer(graph, members)
        make = _all_gather if layout.kind == "all_gather" else _reduction
        start, results = make(writer, layout)
    for piece, result in zip(layout.pieces, results, strict=True):
        (wait,) = piece.start.users
        wait.replace_all_uses_with(result)
        cast = piece.cast
        for node in (wait, piece.start, *((cast,) if cast is not None else ())):
            graph.erase_node(node)
    return start, writer.nodes


def _all_gather(w: Writer, layout: Layout) -> _Merged:
    """Gather one packed buffer; return its start and the result of each piece."""
    pieces, ranks, dtype = layout.pieces, layout.ranks, layout.dtype
    first = pieces[0].start
    group = first.args[2]
    sizes = [w.numel(piece.value) for piece in pieces]
    flat = [w.reshape(piece.value, [size]) for piece, size in zip(pieces, sizes, strict=True)]
    if layout.as_bytes:  # from here on sizes and offsets count bytes
        flat = [w.call(_aten.view.dtype, value, dtype) for value in flat]
        sizes = [w.numel(value) for value in flat]
    total = w.add(sizes)
    whole_size = w.times(total, ranks)
    # One compile for all ranks can't have this rank's place in a constant.
    if compiles_for_all_ranks():
        packed = w.cat(flat, [total])
        if packed.meta["val"].dtype != dtype:
            packed = w.new(_prims.convert_element_type.default, [packed, dtype], dtype, [total])
        gather, kwargs = _c10d.all_gather_into_tensor.default, {}
    else:
        rank = group_by_name(group_name(first)).rank()
        where = {"dtype": dtype, "device": first.meta["val"].device, "pin_memory": False}
        out = w.new(_aten.empty.memory_format, [[whole_size]], dtype, [whole_size], where)
        offset = w.times(total, rank)
        bounds = [out, 0, offset, w.times(total, rank + 1)]
        part = w.view(_aten.slice.Tensor, bounds, [total], offset=offset)
        packed = w.view(_aten.copy_.default, [part, w.cat(flat, [total])], [total], offset=offset)
        gather, kwargs = _c10d.all_gather_into_tensor_out.default, {"out": out}
    start = w.new(gather, [packed, ranks, group], dtype, [whole_size], kwargs)
    by_rank = w.viewed(w.wait(start, [whole_size]), [ranks, total])
    results = []
    for part, piece, size in zip(w.split(by_rank, sizes, dim=1), pieces, sizes, strict=True):
        shape = w.shape(piece.value)
        whole = [w.times(shape[0], ranks), *shape[1:]]
        if piece.copied:
            part = w.copied(part, [ranks, size])
        if layout.as_bytes:
            part = w.viewed(part, [w.times(size, ranks)])
            part = w.call(_aten.view.dtype, part, piece.start.meta["val"].dtype)
        results.append(w.viewed(part, whole))
    return start, results


def _reduction(w: Writer, layout: Layout) -> _Merged:
    """Reduce one packed buffer; return its start and the result of each piece."""
    pieces, dtype = layout.pieces, layout.dtype
    first, ranks = pieces[0].start, layout.rows or 1
    sizes = [w.divided(w.numel(piece.value), ranks) for piece in pieces]
    total = w.add(sizes)
    rows = [] if layout.rows is None else [ranks]
    # A rank receives one contiguous part of the buffer: its rows of all members.
    by_rank = [
        w.reshape(piece.value, [*rows, size]) for piece, size in zip(pieces, sizes, strict=True)
    ]
    packed = w.cat(by_rank, [*rows, total], dim=len(rows))
    if rows:
        packed = w.viewed(packed, [w.times(total, ranks)])
    start = w.new(first.target, [packed, *first.args[1:]], dtype, [total])
    parts = w.split(w.wait(start, [total]), sizes, dim=0)
    results = []
    for part, piece in zip(parts, pieces, strict=True):
        shape = w.shape(piece.value)
        shape[:1] = [w.divided(length, ranks) for length in shape[:1]]
        results.append(w.viewed(part, shape))
    return start, results


class Writer:
    """Insert nodes, with values in ``meta``, at the graph's insertion point."""

    # Results' layouts are computed, unless a size is symbolic: running operators on fake tensors
    # takes nine tenths of the time of merging. Symbolic sizes are nodes in arguments.

    def __init__(self, graph: fx.Graph, members: Sequence[fx.Node]) -> None:
        self.nodes: list[fx.Node] = []
        self._graph = graph
        # All nodes share the first member's module stack, source line and annotations, and name
        # each member as a source (``from_node``) for Inductor's provenance tracking.
        actions = [NodeSourceAction.CREATE, NodeSourceAction.REPLACE]
        first = members[0].meta
        inherited = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "custom")
        self._meta = {key: first[key] for key in inherited if key in first}
        self._meta["from_node"] = [NodeSource(m, "bucketing_pass", actions) for m in members]
        values = [m.meta["val"] for m in members] + [m.args[0].meta["val"] for m in members]  # type: ignore[union-attr]
        self._mode = fake_mode_of(values[0])
        self._static = self._mode is not None and all(
            isinstance(size, int) for value in values for size in value.shape
        )
        self._device = values[0].device
        self._sizes: dict[tuple[fx.Node, int], fx.Node] = {}

    def _add(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        name = getattr(target, "_opname", target.__name__)
        node = self._graph.create_node("call_function", target, tuple(args), kwargs, name)
        node.meta.update(self._meta)
        if isinstance(target, torch._ops.OpOverload):
            node.meta["original_aten"] = target  # Inductor names kernels by it
        self.nodes.append(node)
        return node

    def _run(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = evaluate(node, self._mode)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        """Call an operator, and run it for the layout of its result."""
        return self._run(self._add(target, args, {}))

    def change(self, node: fx.Node, target: Any, *args: Any) -> fx.Node:
        """Make a node call another operator; it keeps its name and metadata."""
        node.target, node.args, node.kwargs = target, args, {}
        node.meta["original_aten"] = target
        node.meta.pop("tensor_meta", None)
        return self._run(node)

    def new(
        self,
        target: Any,
        args: Sequence[Any],
        dtype: torch.dtype,
        shape: Sequence[_Size],
        kwargs: dict[str, Any] | None = None,
    ) -> fx.Node:
        """Call an operator whose result is contiguous, in a storage of its own."""
        node = self._add(target, args, kwargs)
        if not self._static:
            return self._run(node)
        sizes = _numbers(shape)
        node.meta["val"] = fake_tensor(self._mode, sizes, _contiguous(sizes), dtype, self._device)
        return node

    def view(
        self, target: Any, args: Sequence[Any], shape: Sequence[_Size], offset: _Size = 0
    ) -> fx.Node:
        """Call an operator whose contiguous result is a view of its contiguous first argument.

        ``offset`` counts elements from the storage's start, and for ``aten.view`` from the
        argument's.
        """
        node = self._add(target, args)
        if not self._static:
            return self._run(node)
        source, sizes, start = args[0].meta["val"], _numbers(shape), _numbers([offset])[0]
        if target is _aten.view.default:
            start += source.storage_offset()
        node.meta["val"] = fake_tensor(
            self._mode, sizes, _contiguous(sizes), source.dtype, source.device, source, start
        )
        return node

    def reshape(self, value: fx.Node, shape: Sequence[_Size]) -> fx.Node:
        """Reshape ``value``, and copy it if its strides don't allow a view."""
        tensor = value.meta["val"]
        if not self._static or tensor.stride() != tuple(_contiguous(tensor.shape)):
            # Running the view shows whether the strides allow it.
            node = self._add(_aten.view.default, [value, list(shape)])
            try:
                if self._static and 1 in tensor.shape and not tensor.is_contiguous():
                    # torch 2.15 views a fake tensor of (2, 1, 2) with strides (1, 2, 2) as (4,).
                    raise ValueError("not sure to be a view")
                return self._run(node)
            except (RuntimeError, ValueError):
                self.nodes.remove(node)
                self._graph.erase_node(node)
            value = self.copied(value, self.shape(value))
        return self.viewed(value, shape)

    def viewed(self, value: fx.Node, shape: Sequence[_Size]) -> fx.Node:
        """View a contiguous ``value`` in another shape."""
        return self.view(_aten.view.default, [value, list(shape)], shape)

    def copied(self, value: fx.Node, shape: Sequence[_Size]) -> fx.Node:
        """Copy ``value``, of this shape, to contiguous memory."""
        layout = {"memory_format": torch.contiguous_format}
        return self.new(_aten.clone.default, [value], value.meta["val"].dtype, shape, layout)

    def cat(self, values: Sequence[fx.Node], shape: Sequence[_Size], dim: int = 0) -> fx.Node:
        """Concatenate ``values`` to a result of this shape."""
        dtype = functools.reduce(torch.promote_types, (v.meta["val"].dtype for v in values))
        return self.new(_aten.cat.default, [values, *([dim] if dim else [])], dtype, shape)

    def wait(self, start: fx.Node, shape: Sequence[_Size]) -> fx.Node:
        return self.new(_c10d.wait_tensor.default, [start], start.meta["val"].dtype, shape)

    def split(self, value: fx.Node, sizes: Sequence[_Size], dim: int) -> list[fx.Node]:
        """Split the last dimension of a contiguous tensor."""
        whole = value.meta["val"]
        arguments = [value, list(sizes), *([dim] if dim else [])]
        node = self._add(_aten.split_with_sizes.default, arguments)
        if self._static:
            strides, dtype, device = whole.stride(), whole.dtype, whole.device
            ends = itertools.accumulate(_numbers(sizes), initial=whole.storage_offset())
            shapes = [(*whole.shape[:-1], size) for size in _numbers(sizes)]
            node.meta["val"] = [
                fake_tensor(self._mode, shape, strides, dtype, device, whole, offset)
                for shape, offset in zip(shapes, ends, strict=False)
            ]
        else:
            self._run(node)
        parts = []
        for i, part in enumerate(node.meta["val"]):
            parts.append(self._add(operator.getitem, [node, i]))
            parts[-1].meta["val"] = part
        return parts

    def shape(self, value: fx.Node) -> list[_Size]:
        """Return the sizes of a tensor: numbers, or nodes for symbolic ones."""
        sizes: list[_Size] = []
        for dim, size in enumerate(value.meta["val"].shape):
            if isinstance(size, int):
                sizes.append(size)
                continue
            if (value, dim) not in self._sizes:
                self._sizes[value, dim] = self._run(self._add(_aten.sym_size.int, [value, dim]))
            sizes.append(self._sizes[value, dim])
        return sizes

    def numel(self, value: fx.Node) -> _Size:
        return functools.reduce(self.times, self.shape(value), 1)

    def add(self, sizes: Sequence[_Size]) -> _Size:
        return functools.reduce(functools.partial(self._number, operator.add), sizes)

    def times(self, a: _Size, b: _Size) -> _Size:
        return self._number(operator.mul, a, b)

    def divided(self, size: _Size, ranks: int) -> _Size:
        """Divide a size that is a multiple of ``ranks``."""
        return size if ranks == 1 else self._number(operator.floordiv, size, ranks)

    def _number(self, function: Any, a: _Size, b: _Size) -> _Size:
        if isinstance(a, int) and isinstance(b, int):
            return int(function(a, b))
        return self._run(self._add(function, [a, b]))


def _numbers(sizes: Sequence[_Size]) -> list[int]:
    return [size for size in sizes if isinstance(size, int)]


def _contiguous(shape: Sequence[int]) -> list[int]:
    """Return contiguous strides, in elements; like torch, count an empty dimension as size 1."""
    return [math.prod(max(n, 1) for n in shape[i + 1 :]) for i in range(len(shape))]


PayloadKey = Callable[[fx.Node], Any]


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
    analysis: GraphAnalysis, plan: MergePlan, payload_key: PayloadKey | None = None
) -> list[BucketReport]:
    """Merge the buckets of a plan, sort the graph topologically, and return reports in graph order.

    A gather bucket starts where its first member started, a reduction where its last did::

        ag(a) w ... ag(b) w ...            AG(a, b) W split ... ... ...
        rs(a) w use ... rs(b) w use        ... ... RS(a, b) W split use use

    ``payload_key`` sorts start nodes in the payload, ties in graph order. It runs once per member,
    before anything changes. If it fails, changes the graph, communicates or returns keys without an
    order, a ``RuntimeError`` chains the cause and the graph is as it was.
    """
    # Keys come first: a user's function that fails leaves the graph as it was.
    keys, packed_by = None, GRAPH_ORDER
    if payload_key is not None:
        keys = _payload_keys(analysis.graph, plan, payload_key)
        packed_by = str(getattr(payload_key, "__qualname__", type(payload_key).__qualname__))
    with paused_gc(), unchanged_on_error(analysis.graph):
        return merge_buckets(analysis, plan, keys, packed_by)


def merge_buckets(
    analysis: GraphAnalysis,
    plan: MergePlan,
    keys: Mapping[fx.Node, Any] | None = None,
    packed_by: str = GRAPH_ORDER,
) -> list[BucketReport]:
    """Apply a plan with known keys, without restoring the graph on error (:func:`apply_plan`)."""
    graph, position = analysis.graph, dict(analysis.position)
    reports = []
    for bucket in plan.buckets:  # all results of a bucket will stand where the bucket does
        first, last = bucket.members[0], bucket.members[-1]
        place = position[first if bucket.kind == "all_gather" else last]
        position.update((node, place) for m in bucket.members for node in (m, *m.users))
    for bucket in sorted(plan.buckets, key=lambda b: position[b.members[0]]):
        # A reduction's bucket starts where its last member did, when all inputs are there.
        if bucket.kind == "all_gather":
            _hoist_inputs(bucket, position)
        members = [analysis.collectives[m] for m in bucket.members]
        reports.append(_apply_bucket(graph, bucket, members, keys, packed_by))
    if reports:
        # Readers of early members stand before a reduction's bucket. They come after all results.
        results: dict[fx.Node, None] = {}
        for node in graph.nodes:
            if node not in analysis.position and (
                is_wait(node) or not results.keys().isdisjoint(node.all_input_nodes)
            ):
                results[node] = None
        sort_topologically(graph, soon=results)
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
                ordered = sorted(keys[m] for m in bucket.members if keys[m] is not None)
                if not all(a < b or a == b for a, b in itertools.pairwise(ordered)):
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
    """Order the members' payload, pack them into one collective, tag it and report it."""
    payload, keyless = list(members), list[Collective]()
    if keys is not None:
        keyless = [m for m in members if keys[m.start] is None]
        if keyless:  # graph order is documented; a half-sorted bucket would have no known order
            packed_by = NO_KEY
        else:
            payload.sort(key=lambda m: keys[m.start])
    offsets = itertools.accumulate((m.nbytes for m in payload), initial=0)
    layout = [
        PayloadMember(
            m.fqns, offset, m.nbytes, m.shape, str(m.dtype).removeprefix("torch."), m.rows
        )
        for m, offset in zip(payload, offsets, strict=False)
    ]
    first, last = members[0], members[-1]
    before = first.start if bucket.kind == "all_gather" else last.start.next
    start, new_nodes = pack(graph, bucket.members, [m.start for m in payload], before)
    # All new nodes have the first member's annotations. Only the start lists all members.
    set_member_tags(start, [m.tag for m in payload])
    if all(m.in_backward for m in members):
        mark_backward(new_nodes)
    return BucketReport(
        bucket.kind,
        bucket.unit,
        group=first.group,
        group_size=first.ranks,
        reduce_op=first.reduce_op,
        node=start.name,
        members=tuple(layout),
        closed_by=bucket.closed_by,
        detail=bucket.detail,
        wire_bytes=bucket.wire_bytes,
        cap_bytes=bucket.cap_bytes,
        packed_by=packed_by,
        no_key=tuple(", ".join(m.fqns) or m.start.name for m in keyless),
    )


def _hoist_inputs(bucket: Bucket, position: dict[fx.Node, int]) -> None:
    """Move the inputs of a gather bucket's later members before its first member.

    Only some ranks pad their shard of an uneven parameter. A bucket that waited for such a pad
    would start later on these ranks, and collectives would meet the wrong partner::

        rank 0   ag(a) ... ag(b)              AG(a, b) ... ...
        rank 1   ag(a) ... pad(b) ag(b)       pad(b) AG(a, b) ... ...
    """
    first = bucket.members[0]
    limit = position[first]
    for piece in Layout.of(bucket.members).pieces[1:]:
        late: dict[fx.Node, None] = {}
        stack = [piece.value]
        while stack:
            node = stack.pop()
            # Nodes without a position are those of buckets that stand earlier.
            if position.get(node, limit) > limit and node not in late:
                late[node] = None
                stack.extend(node.all_input_nodes)
        # An input that needs another collective can't move up; the final sort places the input.
        if any(is_collective(n) or host_stream(n) for n in late):
            continue
        for node in sorted(late, key=position.__getitem__):
            first.prepend(node)
            position[node] = limit
