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
import torch.distributed as dist
import torch.fx as fx
from torch._inductor import config as inductor_config

from .tags import Kind, kind_of

__all__ = [
    "argument",
    "bucket_key",
    "collective_group",
    "configured_payload_key",
    "default_cap_mb",
    "fsdp_starts",
    "group_name",
    "group_size",
    "group_size_of",
    "is_wait",
    "member_input",
    "merge",
    "nccl_estimate_ms",
    "packed_values",
    "packing_ops",
    "payload_inputs",
    "reduce_op",
    "register_ops",
    "require_payload_order_hook",
    "set_group_name",
    "size_hint",
    "sort_topologically",
    "waited_for",
    "wire_bytes",
]

PAYLOAD_ORDER_ENTRY = "aten_distributed_optimizations.bucket_payload_order_key"

_c10d = torch.ops._c10d_functional
_aten = torch.ops.aten


def register_ops() -> None:
    """Register ``torch.ops.bucketing``, which torch does when its bucketing is first imported.

    What Inductor made of a graph bucketed in mode ``custom_ops`` calls them, also where it comes
    from a cache and no bucketing has run in the process. The ``uuid()`` of passes and hooks, which
    is what a cache is asked with, calls this first.
    """
    from torch._inductor.fx_passes import bucketing  # noqa: F401


def require_payload_order_hook() -> None:
    """Check that torch has the payload-order config entry.

    Raises:
        HooksError: it has not; the message says what to do.
    """
    if not hasattr(inductor_config.aten_distributed_optimizations, "bucket_payload_order_key"):
        from .patching import require_hooks

        require_hooks()


def configured_payload_key() -> Callable[[fx.Node], Any] | None:
    """The user's ``bucket_payload_order_key``; None if it is unset or torch has no such entry."""
    return getattr(inductor_config.aten_distributed_optimizations, "bucket_payload_order_key", None)


def _payload_order(key: Callable[[fx.Node], Any] | None) -> AbstractContextManager[Any]:
    if key is None and configured_payload_key() is None:
        return nullcontext()
    return inductor_config.patch({PAYLOAD_ORDER_ENTRY: key})


def bucket_key(start: fx.Node) -> tuple[Any, ...]:
    """What members of one bucket share: kind, group, reduce op, dtype.

    The mode that torch is configured to use decides whether gathers of several dtypes may share a
    bucket (``bucket_mode="custom_ops_multidtype"``).
    """
    from torch._inductor.fx_passes import bucketing

    default_mode = getattr(bucketing, "_default_bucket_mode", None)
    mode = "default" if default_mode is None else default_mode()
    return (kind_of(start), bucketing.bucket_key(start, mode))


def group_name(start: fx.Node) -> str:
    """The name of a collective's process group, also where it is a node of the graph.

    Takes all-to-alls as well, which are never bucketed.
    """
    name = argument(start, "group_name")
    if isinstance(name, str):
        return name
    from torch._inductor.fx_passes import bucketing

    return str(getattr(bucketing, "_resolve_group_name", str)(name))


def set_group_name(start: fx.Node, name: str) -> None:
    """Let a collective run on another process group of the same ranks."""
    if "group_name" in start.kwargs:
        start.update_kwarg("group_name", name)
    else:
        start.update_arg(start.args.index(argument(start, "group_name")), name)


def argument(node: fx.Node, name: str) -> Any:
    """The argument of that name in a call of an operator; None where there is none."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if name in node.kwargs:
        return node.kwargs[name]
    names = [a.name for a in target._schema.arguments if not a.kwarg_only]
    at = names.index(name) if name in names else len(node.args)
    return node.args[at] if at < len(node.args) else None


def collective_group(node: fx.Node) -> str | None:
    """The name of the process group of any functional collective, those included that are never
    bucketed; None for other nodes, and where the group is a node of the graph."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return None
    group = argument(node, "group_name")
    return group if isinstance(group, str) else None


def group_size(start: fx.Node) -> int:
    """Number of ranks in a collective's process group."""
    kind = kind_of(start)
    if kind == "all_gather":
        return int(argument(start, "group_size"))
    if kind == "reduce_scatter":
        return int(argument(start, "group_size"))
    return group_size_of(group_name(start))


def group_size_of(group: str) -> int:
    """Number of ranks in the process group of that name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return int(_resolve_process_group(group).size())  # type: ignore[arg-type]


def group_sizes() -> tuple[tuple[str, int], ...]:
    """Names and numbers of ranks of all process groups that this rank knows, sorted."""
    if not dist.is_available() or not dist.is_initialized():
        return ()
    from torch.distributed.distributed_c10d import _world

    return tuple(sorted((name, group.size()) for group, name in _world.pg_names.items()))


def nccl_estimate_ms(start: fx.Node, nbytes: int) -> float:
    """Milliseconds of a collective by torch's analytical model of NCCL.

    Args:
        start: any collective, all-to-alls included.
        nbytes: of its input and output together.
    """
    from torch._inductor.comm_analysis import estimate_nccl_collective_runtime_from_fx_node

    return float(
        estimate_nccl_collective_runtime_from_fx_node(start, nbytes, use_nccl_estimator=False)
    )


def reduce_op(start: fx.Node) -> str | None:
    """``"avg"``, ``"sum"``, ...; None for a gather."""
    return None if kind_of(start) == "all_gather" else str(argument(start, "reduce_op"))


def default_cap_mb(size: int) -> float:
    """Byte cap in MiB that saturates the network of a group of ``size`` ranks, as torch sees it.

    From torch's bandwidth profiles of the interconnect, between the floor and the ceiling in
    ``aten_distributed_optimizations.pre_bucketing_fsdp_collectives_{min,max}_bucket_cap_mb``;
    its ``..._bucket_cap_mb`` overrides all that. torch 2.11 estimates nothing; there it is the
    default cap of its bucketing passes, whatever the size.
    """
    try:
        from torch._inductor.fx_passes.fsdp import compute_pre_bucket_cap_mb
    except ImportError:
        from torch._inductor.fx_passes.bucketing import bucket_cap_mb_by_bucket_idx_default

        return float(bucket_cap_mb_by_bucket_idx_default(0))

    override = getattr(
        inductor_config.aten_distributed_optimizations,
        "pre_bucketing_fsdp_collectives_bucket_cap_mb",
        None,
    )
    return float(compute_pre_bucket_cap_mb(size, override))


def size_hint(size: Any, context: str) -> int:
    """A size as an integer: itself, or the hint of a symbolic one.

    Raises:
        RuntimeError: for a symbolic size without a hint.
    """
    try:
        from torch._inductor.fx_passes.bucketing import _hint_int_or_raise
    except ImportError:
        hint = size if isinstance(size, int) else size.node.hint
        if not isinstance(hint, int):
            raise RuntimeError(
                f"Could not extract optimization hint for {size} ({context})"
            ) from None
        return hint
    return int(_hint_int_or_raise(size, context=context))


def wire_bytes(start: fx.Node) -> int:
    """What a collective counts against a byte cap: the larger of its input and its output.

    Raises:
        RuntimeError: for a symbolic size without a hint.
    """
    return max(
        size_hint(node.meta["val"].numel(), f"collective bucket {what} size")
        * node.meta["val"].element_size()
        for node, what in ((start, "output"), (start.all_input_nodes[0], "input"))
    )


def fsdp_starts(graph: fx.Graph) -> dict[fx.Node, None]:
    """The starts that torch takes for FSDP's by structure, in graph order.

    A gather that derives from exactly one placeholder (``is_fsdp_all_gather``), a reduce-scatter
    whose result reaches nothing but outputs, by operators of one input
    (``is_fsdp_reduce_scatter_wait``), and an all-reduce on the group of such a gather
    (``bucket_fsdp_all_reduce``). torch walks the graph once per collective; this is one walk each
    way for all of them.
    """
    nodes = list(graph.nodes)
    several: Any = object()
    source: dict[fx.Node, Any] = {}  # the only placeholder behind a node, None, or several
    for node in nodes:
        if node.op == "placeholder":
            source[node] = node
            continue
        found = None
        for arg in node.all_input_nodes:
            theirs = source.get(arg)
            if theirs is None or theirs is found:
                continue
            if found is not None:
                found = several
                break
            found = theirs
        source[node] = found
    only_outputs: dict[fx.Node, bool] = {}
    for node in reversed(nodes):
        only_outputs[node] = all(
            user.op == "output" or (len(user.all_input_nodes) == 1 and only_outputs[user])
            for user in node.users
        )

    gathers = [n for n in nodes if kind_of(n) == "all_gather"]
    gathers = [n for n in gathers if source[n] is not None and source[n] is not several]
    groups = dict.fromkeys(group_name(n) for n in gathers)
    ours = dict.fromkeys(gathers)
    found_starts: dict[fx.Node, None] = {}
    for node in nodes:
        kind = kind_of(node)
        if kind == "reduce_scatter":
            waits = [u for u in node.users if is_wait(u)]
            matches = bool(waits) and all(w.users and only_outputs[w] for w in waits)
        elif kind == "all_reduce":
            matches = group_name(node) in groups
        else:
            matches = node in ours
        if matches:
            found_starts[node] = None
    return found_starts


def is_wait(node: fx.Node) -> bool:
    """Whether ``node`` is a ``wait_tensor``."""
    return node.op == "call_function" and node.target is _c10d.wait_tensor.default


def waited_for(wait: fx.Node) -> fx.Node | None:
    """What a wait waits for."""
    return next(iter(wait.all_input_nodes), None)


def merge(
    graph: fx.Graph,
    kind: Kind,
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
    anchor = None
    if kind == "all_gather" and insert_before is not None:
        anchor = _kept_before(insert_before, members)
    more: dict[str, Any] = {}
    if kind == "all_gather" and not hasattr(bucketing, "_default_bucket_mode"):
        # torch 2.11's default packs with _foreach_copy_ into views of the buffer, which Inductor
        # does not see as a write to it where that operator is a fallback.
        more["mode"] = "custom_ops"
    with _payload_order(payload_key):
        new_nodes, replacements = function(
            graph, list(members), insert_before=insert_before, **more
        )
    if anchor is not None and new_nodes[0].prev is not anchor:
        for node in new_nodes:  # torch 2.11 takes insert_before and does not read it
            anchor.append(node)
            anchor = node
    return [*new_nodes, *_keep_strides(graph, replacements)]


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


def packed_values(start: fx.Node) -> list[fx.Node]:
    """The nodes that may stand for a member among :func:`payload_inputs`.

    torch 2.15 with custom ops packs an unpadded gradient instead of the padded copy of it.
    """
    from torch._inductor.fx_passes import bucketing

    values = [member_input(start)]
    match_padding = getattr(bucketing, "_match_dim0_padded_cat", None)
    if match_padding is not None and kind_of(start) == "reduce_scatter":
        match = match_padding(values[0], group_size(start))
        if match is not None:
            values.append(match[0])
    return values


def payload_inputs(new_nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The values that a bucket packs, in the order of their bytes, read from the merged graph.

    torch packs with ``cat`` (default mode) or with one custom op that takes the list::

        a -> reshape \\                                   a \\
                      cat -> ... -> start       or           _pre_bucket_* -> ... -> start
        b -> reshape /                                    b /

    Raises:
        LookupError: neither is found; this torch packs in a way that is not known here.
    """
    inside = dict.fromkeys(new_nodes)
    for node in new_nodes:
        if node.target in (_aten.cat.default, *packing_ops()):
            packed: Any = node.args[0]
            return [_behind_views(value, inside) for value in packed]
    start = next((n for n in new_nodes if kind_of(n) is not None), None)
    if start is not None:  # one member needs no cat
        return [_behind_views(start.args[0], inside)]
    raise LookupError(f"no packing op among {', '.join(n.name for n in new_nodes)}")


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
