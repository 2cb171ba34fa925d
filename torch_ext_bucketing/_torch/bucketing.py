"""torch's bucketing: the one place that touches ``torch._inductor.fx_passes.bucketing``.

torch merges a list of starts into one collective over a packed buffer and packs them in the order
of the list, or by ``aten_distributed_optimizations.bucket_payload_order_key`` where torch has that
config entry.

What torch 2.11 lacks: group names are plain strings there, buckets have no configured mode and no
estimated byte cap, and a bucket of gathers is put behind its last member wherever it was asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config

__all__ = [
    "configured_payload_key",
    "member_input",
    "merge",
    "packed_values",
    "packing_ops",
    "payload_inputs",
    "register_ops",
    "replaced_inputs",
    "require_packed_reductions",
    "require_payload_order_hook",
    "sort_topologically",
]

PAYLOAD_ORDER_ENTRY = "aten_distributed_optimizations.bucket_payload_order_key"

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


def register_ops() -> None:
    """Register ``torch.ops.bucketing``, which torch does when its bucketing is first imported.

    What Inductor made of a graph bucketed in mode ``custom_ops`` calls them, also where it comes
    from a cache and no bucketing has run in the process. The ``uuid()`` of passes and hooks, which
    is what a cache is asked with, calls this first (:func:`.caches.before_key`).
    """
    from torch._inductor.fx_passes import bucketing  # noqa: F401


def require_payload_order_hook() -> None:
    """Check that torch has the payload-order config entry.

    Raises:
        RuntimeError: it has not; the message says what to do.
    """
    if not hasattr(inductor_config.aten_distributed_optimizations, "bucket_payload_order_key"):
        raise RuntimeError("this torch lacks the hooks: call torch_ext_bucketing.hooks.install()")


def require_packed_reductions() -> None:
    """Check that torch is configured to merge reduce-scatters over a packed buffer.

    Raises:
        ValueError: ``bucket_mode`` is ``"coalesced"``, which launches the members of a bucket as
            one group of calls, each on its own tensor: there is no payload to lay out.
    """
    if getattr(inductor_config.aten_distributed_optimizations, "bucket_mode", None) == "coalesced":
        raise ValueError(
            "torch._inductor.config.aten_distributed_optimizations.bucket_mode is 'coalesced', "
            "which packs no buffer, so reduce-scatters can't be merged in an order of their own: "
            "set it to None, 'default' or 'custom_ops', or bucket all-gathers only"
        )


def configured_payload_key() -> Callable[[fx.Node], Any] | None:
    """The user's ``bucket_payload_order_key``; None if it is unset or torch has no such entry."""
    return getattr(inductor_config.aten_distributed_optimizations, "bucket_payload_order_key", None)


def _payload_order(key: Callable[[fx.Node], Any] | None) -> AbstractContextManager[Any]:
    if key is None and configured_payload_key() is None:
        return nullcontext()
    return inductor_config.patch({PAYLOAD_ORDER_ENTRY: key})


def merge(
    graph: fx.Graph,
    kind: str,
    members: Sequence[fx.Node],
    *,
    insert_before: fx.Node | None,
    payload_key: Callable[[fx.Node], Any] | None,
) -> list[fx.Node]:
    """Replace ``members`` (in graph order) by one collective.

    ``payload_key`` alone decides about the payload; None is graph order, whatever is configured.

    Returns:
        The new nodes, in graph order.
    """
    from torch._inductor.fx_passes import bucketing

    function = {
        "all_gather": bucketing.merge_all_gather_bucket,
        "reduce_scatter": bucketing.merge_reduce_scatter_bucket,
        "all_reduce": bucketing.merge_all_reduce_bucket,
    }[kind]
    before = None
    if kind == "all_gather" and insert_before is not None:
        before = _kept_before(insert_before, members)
    more: dict[str, Any] = {}
    if kind == "all_gather" and not hasattr(bucketing, "_default_bucket_mode"):
        # torch 2.11's default packs with _foreach_copy_ into views of the buffer, which Inductor
        # does not see as a write to it where that operator is a fallback.
        more["mode"] = "custom_ops"
    with _payload_order(payload_key):
        new_nodes, replacements = function(
            graph, list(members), insert_before=insert_before, **more
        )
    if before is not None and new_nodes[0].prev is not before:
        for node in new_nodes:  # torch 2.11 takes insert_before and does not read it
            before.append(node)
            before = node
    new_nodes = [*new_nodes, *_keep_strides(graph, replacements)]
    for node in new_nodes:
        # The key that this call set; copies of the graph would carry it, and the members it knows.
        node.meta.pop("bucket_payload_key", None)
    return new_nodes


def torch_bucket_key(start: fx.Node) -> object:
    """What torch lets share a bucket, in the mode that it is configured to use."""
    from torch._inductor.fx_passes import bucketing

    default_mode = getattr(bucketing, "_default_bucket_mode", None)
    return bucketing.bucket_key(start, "default" if default_mode is None else default_mode())


def resolve_group_name(argument: Any) -> str:
    """The name of a process group that is a node of the graph."""
    from torch._inductor.fx_passes import bucketing

    return str(getattr(bucketing, "_resolve_group_name", str)(argument))


def _kept_before(node: fx.Node, members: Sequence[fx.Node]) -> fx.Node:
    """The last node before ``node`` that outlives the merge: no member, wait or cast of one."""
    gone: dict[Any, None] = dict.fromkeys(n for m in members for n in (m, *m.users, m.args[0]))
    for member in members:
        gone.pop(member_input(member), None)
    before = node.prev
    while before in gone:
        before = before.prev
    return before


def _keep_strides(graph: fx.Graph, replacements: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy what came out of a bucket with other strides than out of its own collective.

    torch unpacks a gather with ``split`` and ``reshape``. Shards of a single row need no copy for
    that and stay views of the bucket, but what follows was traced on a contiguous tensor and may
    view it, which fails when the graph is run as it is::

        wait -> view                    WAIT -> split -> reshape -> clone -> view

    Args:
        replacements: the erased waits and the nodes that stand in for them.

    Returns:
        The copies.
    """
    copies = []
    for wait, node in replacements.items():
        wanted = wait.meta["val"]
        if node.meta["val"].stride() == wanted.stride():
            continue
        with graph.inserting_after(node):
            copy = graph.call_function(
                _aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        copy.meta = {**node.meta, "val": wanted}
        node.replace_all_uses_with(copy, delete_user_cb=lambda user, own=copy: user is not own)
        copies.append(copy)
    return copies


def member_input(start: fx.Node) -> fx.Node:
    """The node that torch packs for a member: its input, before a cast that torch merges."""
    from torch._inductor.fx_passes.bucketing import has_mergeable_all_gather_convert_dtype

    value = start.args[0]
    if has_mergeable_all_gather_convert_dtype(start):
        value = value.args[0]  # type: ignore[union-attr]
    assert isinstance(value, fx.Node)
    return value


def packed_values(start: fx.Node, reduce_scatter_ranks: int | None = None) -> list[fx.Node]:
    """The nodes that may stand for a member among :func:`payload_inputs`.

    Args:
        start: the member.
        reduce_scatter_ranks: number of ranks in its group, where it is a reduce-scatter.

    torch 2.15 with custom ops packs an unpadded gradient instead of the padded copy of it.
    """
    from torch._inductor.fx_passes import bucketing

    values = [member_input(start)]
    match_padding = getattr(bucketing, "_match_dim0_padded_cat", None)
    if match_padding is not None and reduce_scatter_ranks is not None:
        match = match_padding(values[0], reduce_scatter_ranks)
        if match is not None:
            values.append(match[0])
    return values


def replaced_inputs(start: fx.Node, reduce_scatter_ranks: int | None = None) -> list[fx.Node]:
    """The nodes in front of a member that torch replaces: a bucket reads what these read.

    A cast before a gather, and what pads a gradient of torch 2.15 (see :func:`packed_values`)::

        x -> cast -> all_gather                        x -----------> BUCKET
        x -> split -> pad -> cat -> reduce_scatter     x -----------> BUCKET

    Args:
        start: the member.
        reduce_scatter_ranks: number of ranks in its group, where it is a reduce-scatter.
    """
    from torch._inductor.fx_passes import bucketing

    value = start.args[0]
    assert isinstance(value, fx.Node)
    if value is not member_input(start):
        return [value]
    match_padding = getattr(bucketing, "_match_dim0_padded_cat", None)
    if match_padding is None or reduce_scatter_ranks is None:
        return []
    match = match_padding(value, reduce_scatter_ranks)
    return [] if match is None else list(match[1])


def payload_inputs(new_nodes: Sequence[fx.Node], start: fx.Node) -> list[fx.Node]:
    """The values that a bucket packs, in the order of their bytes, read from the merged graph.

    torch packs with ``cat`` (default mode) or with one custom op that takes the list::

        a -> reshape \\                                   a \\
                      cat -> ... -> start       or           _pre_bucket_* -> ... -> start
        b -> reshape /                                    b /

    Args:
        new_nodes: all that a bucket consists of.
        start: its collective, one of them.
    """
    inside = dict.fromkeys(new_nodes)
    for node in new_nodes:
        if node.target in (_aten.cat.default, *packing_ops()):
            packed: Any = node.args[0]
            return [_behind_views(value, inside) for value in packed]
    return [_behind_views(start.args[0], inside)]  # one member needs no cat


def packing_ops() -> tuple[Any, ...]:
    """torch's custom operators that pack the list of values given to them."""
    register_ops()

    ops = torch.ops.bucketing
    return (ops._pre_bucket_all_gather.default, ops._pre_bucket_reduce_scatter.default)


def _behind_views(value: Any, inside: dict[fx.Node, None]) -> fx.Node:
    while value in inside and value.target is not operator.getitem:
        value = value.all_input_nodes[0]
    assert isinstance(value, fx.Node)
    return value


def sort_topologically(graph: fx.Graph) -> None:
    """Move every node behind its inputs, leaving the order alone where it is legal."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
