"""Classify single nodes, such as collectives, waits and views; read and write tags.

A tag has a collective's kind and the parameters (FQNs) whose bytes it moves. Tags are set on the
joint graph (:mod:`.fsdp.tagging`) and stored in ``node.meta["custom"]``. Partitioners,
recomputation and Inductor's passes copy that dictionary, and torch's bucketing collects it from
every member of a bucket, so tags survive all of these.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from .._torch.inductor import size_hint
from .._torch.process_groups import group_by_name

_TAG_KEY = "bucketing_tag"
_MEMBERS_KEY = "bucketing_member_tags"
_HOME_KEY = "bucketing_home_group"
_REPLACES_KEY = "bucketing_replaces"
_UPDATES_KEY = "bucketing_updates"
OPTIMIZER = "bucketing_optimizer"  # noted on nodes of the norm, clipping and updates
_BUFFERS_KEY = "bucketing_buffer_bytes"
_SOURCES_KEY = "bucketing_custom_sources"  # written by torch's bucketing, one entry per member


@dataclass(frozen=True)
class Tag:
    """The kind of a collective, and the canonical FQNs of its parameters, several if fused."""

    kind: Kind
    fqns: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        if isinstance(self.fqns, str) or not all(isinstance(f, str) for f in self.fqns or (0,)):
            raise ValueError(f"fqns must be a non-empty tuple of names, got {self.fqns!r}")
        object.__setattr__(self, "fqns", tuple(self.fqns))


def set_tag(node: fx.Node, tag: Tag, home_group: str | None = None) -> None:
    """Tag a collective's start; raise a ValueError unless the kind is the tag's.

    ``home_group`` is the process group that shards the parameter, for an all-gather that runs in a
    smaller group (:mod:`.passes.reshard_to`).
    """
    kind = kind_of(node)
    if kind != tag.kind:
        what = "not a collective" if kind is None else f"{'a' if kind[0] == 'r' else 'an'} {kind}"
        raise ValueError(f"can't tag {node.name} as {tag.kind}: it is {what}")
    note(node, _TAG_KEY, (tag.kind, *tag.fqns))
    if home_group is not None:
        note(node, _HOME_KEY, home_group)


def set_member_tags(start: fx.Node, tags: Sequence[Tag | None]) -> None:
    """Record the tags of a bucket's members on its start, in payload order."""
    note(start, _MEMBERS_KEY, tuple(None if t is None else (t.kind, *t.fqns) for t in tags))


def home_group(start: fx.Node) -> str:
    """Return the process group that shards a parameter; its gather may run in a smaller group."""
    return noted(start, _HOME_KEY) or group_name(start)


def set_updates(node: fx.Node, fqns: Sequence[str], nbytes: int) -> None:
    """Tag a node that updates parameters, and allocates ``nbytes`` while it runs."""
    note(node, _UPDATES_KEY, tuple(fqns))
    note(node, _BUFFERS_KEY, nbytes)


def buffer_bytes(node: fx.Node) -> int:
    """Return the bytes that a node allocates while it runs, as far as its result shows none."""
    return noted(node, _BUFFERS_KEY) or 0


def updates_of(node: fx.Node) -> tuple[str, ...]:
    """List the parameters that a node updates."""
    return noted(node, _UPDATES_KEY) or ()


def mark_replaced(start: fx.Node) -> None:
    """Keep a reduction's tags, before its node becomes another collective such as an all-to-all."""
    note(start, _REPLACES_KEY, kind_of(start))


def replaced_kind(node: fx.Node) -> Kind | None:
    """Return the kind of a collective, or of the reduction that it replaces; else None."""
    return (noted(node, _REPLACES_KEY) or kind_of(node)) if is_collective(node) else None


def tag_of(node: fx.Node) -> Tag | None:
    """Return the tag of a collective's start; None for other nodes and for untagged collectives.

    A bucket's tag has the FQNs of all members, in payload order if this package merged the bucket,
    else in the members' order. A bucket with an untagged member has no tag.
    """
    tags = member_tags(node)
    if not tags or len(tags) < len(_members(node)):
        return None
    return Tag(tags[0].kind, tuple(dict.fromkeys(f for tag in tags for f in tag.fqns)))


def member_tags(start: fx.Node) -> tuple[Tag, ...]:
    """List the tags of a bucket's tagged members, or the own tag of a single collective."""
    return tuple(m for m in _members(start) if m is not None)


def is_bucket(node: fx.Node) -> bool:
    """Return whether this package or torch made a collective by merging several."""
    return noted(node, _MEMBERS_KEY) is not None or _SOURCES_KEY in node.meta


def _members(node: fx.Node) -> list[Tag | None]:
    """List the tags of a bucket's members, or of a collective that is not a bucket itself."""
    kind = replaced_kind(node)
    if kind is None:
        return []
    members = noted(node, _MEMBERS_KEY)
    if members is None:
        sources = node.meta.get(_SOURCES_KEY, [node.meta.get("custom")])
        members = [(custom or {}).get(_TAG_KEY) for custom in sources]
    # A tag of another kind came from another node, along with a copy of its metadata.
    return [Tag(kind, tuple(t[1:])) if t is not None and t[0] == kind else None for t in members]


def note(node: fx.Node, key: str, value: object) -> None:
    """Note a fact about a node, for passes that copy its tags."""
    # A new dictionary, since tracing shares one ``custom`` dictionary between many nodes.
    node.meta["custom"] = {**(node.meta.get("custom") or {}), key: value}


def noted(node: fx.Node, key: str) -> Any:
    """Return the value of :func:`note`, or None."""
    return (node.meta.get("custom") or {}).get(key)


GraphLike: TypeAlias = fx.GraphModule | fx.Graph


def graph_of(gm: GraphLike) -> fx.Graph:
    """Return the graph of a module, or the graph itself."""
    return gm.graph if isinstance(gm, fx.GraphModule) else gm


Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]
KINDS: tuple[Kind, ...] = ("all_gather", "reduce_scatter", "all_reduce")
"""The kinds that buckets merge."""
# The default of every ``kinds=``. Tensor parallelism all-reduces gradients of replicated parameters
# before FSDP scatters them. Merging these would change their bits, so all-reduces are opt-in.
FSDP_KINDS: tuple[Kind, ...] = KINDS[:2]

_c10d = torch.ops._c10d_functional


class CollectiveType(NamedTuple):
    """One kind of collective: its operators, the bytes that it moves, its names."""

    short: str
    targets: tuple[Any, ...]  # torch's functional operators; the first one is out of place
    # Of the first operator, between input and group, by the number of ranks and the number of rows
    # in a rank's part of the buffer.
    arguments: Callable[[int, int], tuple[Any, ...]]
    whole_input: bool  # whether a rank's input is the whole buffer; else it is one part per rank
    whole_output: bool
    # How often a ring moves the buffer past each rank. 0: no ring; each rank sends to every other
    # one, and ranks may send different amounts.
    rounds: int


COLLECTIVES = {
    "all_gather": CollectiveType(
        "AG",
        (_c10d.all_gather_into_tensor.default, _c10d.all_gather_into_tensor_out.default),
        lambda ranks, part: (ranks,),
        whole_input=False,
        whole_output=True,
        rounds=1,
    ),
    "reduce_scatter": CollectiveType(
        "RS",
        (_c10d.reduce_scatter_tensor.default,),
        lambda ranks, part: ("sum", ranks),
        whole_input=True,
        whole_output=False,
        rounds=1,
    ),
    "all_reduce": CollectiveType(
        "AR",
        (_c10d.all_reduce.default, _c10d.all_reduce_.default),
        lambda ranks, part: ("sum",),
        whole_input=True,
        whole_output=True,
        rounds=2,
    ),
    "all_to_all": CollectiveType(
        "A2A",
        (_c10d.all_to_all_single.default,),
        lambda ranks, part: ([part] * ranks, [part] * ranks),
        whole_input=True,
        whole_output=True,
        rounds=0,
    ),
}
"""All kinds. Another one is a row: times, measurements and reports follow it."""

_KIND_OF_TARGET: dict[Any, str] = {t: kind for kind, c in COLLECTIVES.items() for t in c.targets}
_MERGED_KIND_OF_TARGET: dict[Any, Kind] = {t: k for k in KINDS for t in COLLECTIVES[k].targets}


def check_kinds(kinds: Collection[str]) -> tuple[Kind, ...]:
    """Return ``kinds`` in the order of :data:`KINDS`, each once; raise a ValueError for others."""
    several = isinstance(kinds, Collection) and not isinstance(kinds, str)
    if not several or any(k not in KINDS for k in kinds):
        raise ValueError(f"kinds must be some of {', '.join(KINDS)}, got {kinds!r}")
    return tuple(k for k in KINDS if k in kinds)


def kind_of(node: fx.Node) -> Kind | None:
    """Return the kind of the collective that ``node`` launches; None where no bucket merges it."""
    return _MERGED_KIND_OF_TARGET.get(node.target) if node.op == "call_function" else None


def collective_kind(node: fx.Node) -> str | None:
    """Return the row of :data:`COLLECTIVES` that ``node`` launches a collective of, or None."""
    return _KIND_OF_TARGET.get(node.target) if node.op == "call_function" else None


_BUILTIN_MODULES = ("_operator", "builtins", "math")
_COPIES_NOTHING = frozenset(
    {
        operator.getitem,
        _c10d.wait_tensor.default,
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.lift_fresh_copy.default,
    }
)


def is_collective(node: fx.Node) -> bool:
    """Return whether ``node`` launches communication of any row of :data:`COLLECTIVES`."""
    return collective_kind(node) is not None


def started_by(wait: fx.Node) -> fx.Node | None:
    """Return the collective that ``wait`` waits for; None for other nodes."""
    start = next(iter(wait.all_input_nodes), None) if is_wait(wait) else None
    return start if start is not None and is_collective(start) else None


_ASSERTIONS = frozenset(
    {
        torch._assert,
        torch._assert_async,
        torch._check,
        torch._check_is_size,
        torch.ops.aten._assert_async.default,
        torch.ops.aten._assert_async.msg,
        torch.ops.aten._assert_scalar.default,
        torch.ops.aten._assert_tensor_metadata.default,
        torch.ops.aten.sym_constrain_range.default,
        torch.ops.aten.sym_constrain_range_for_size.default,
    }
)


def is_assertion(node: fx.Node) -> bool:
    """Return whether ``node`` only checks its inputs, or gives the compiler facts about them."""
    return node.op == "call_function" and node.target in _ASSERTIONS


def is_number(node: fx.Node) -> bool:
    """Return whether ``node`` computes a number, such as a size, unknown at compile time."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_view(node: fx.Node) -> bool:
    """Return whether ``node`` launches no kernel."""
    return node.op != "call_function" or _is_view(node.target)


@functools.lru_cache(maxsize=1024)  # torch reads an operator's schema, and choices ask often
def _is_view(target: Any) -> bool:
    if target in _COPIES_NOTHING:
        return True
    if target in _ASSERTIONS:
        return "_assert_async" not in str(target)  # this one runs a kernel that reads the values
    if isinstance(target, torch._ops.OpOverload):
        gives_a_size = target.namespace == "aten" and target._opname.startswith("sym_")
        return bool(target.is_view or gives_a_size or target.namespace == "profiler")
    module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
    return module in _BUILTIN_MODULES or (
        module == "torch" and name.removeprefix("_").startswith("sym_")
    )


def is_compute(node: fx.Node) -> bool:
    """Return whether ``node`` is a matrix product, an attention or a convolution."""
    # The operators with a FLOP count in torch, and the grouped products of experts.
    from torch.utils.flop_counter import flop_registry

    target: Any = node.target
    return node.op == "call_function" and (
        getattr(target, "overloadpacket", None) in flop_registry
        or target in flop_registry
        or is_grouped_product(node)
    )


def is_grouped_product(node: fx.Node) -> bool:
    """Return whether ``node`` is ``_grouped_mm`` or one of its scaled forms."""
    name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
    return name.startswith("aten::") and "_grouped_mm" in name


def tensors_in(value: Any) -> list[torch.Tensor]:
    """List the tensors of a node's ``meta["val"]``, in order."""
    if isinstance(value, torch.Tensor):  # the common case, and pytree functions are slow
        return [value]
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def bucket_key(start: fx.Node) -> tuple[Any, ...]:
    """Return the kind, group, operation, dtype and device that members of one bucket share."""
    value, kind = start.meta["val"], kind_of(start)
    # All-gathers of several dtypes merge as bytes.
    dtype = None if kind == "all_gather" else value.dtype
    return (kind, group_name(start), reduce_op(start), dtype, str(value.device))


def group_name(start: fx.Node) -> str:
    """Return the name of a collective's process group, which may be a node of the graph."""
    name = argument(start, "group_name")
    return str(name if isinstance(name, str) else name.meta["val"].group_name)


def set_group_name(start: fx.Node, name: str) -> None:
    """Move a collective to another process group with the same ranks."""
    if "group_name" in start.kwargs:
        start.update_kwarg("group_name", name)
    else:
        start.update_arg(start.args.index(argument(start, "group_name")), name)


def argument(node: fx.Node, name: str) -> Any:
    """Return an argument of an operator's call by name; None without one."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if name in node.kwargs:
        return node.kwargs[name]
    names = [a.name for a in target._schema.arguments if not a.kwarg_only]
    place = names.index(name) if name in names else len(node.args)
    return node.args[place] if place < len(node.args) else None


def collective_group(node: fx.Node) -> str | None:
    """Return a functional collective's process group; None for other nodes or a node as group."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "_c10d_functional":
        return None
    group = argument(node, "group_name")
    return group if isinstance(group, str) else None


def group_size(start: fx.Node) -> int:
    """Return the number of ranks in a collective's process group."""
    size = argument(start, "group_size")
    return int(group_by_name(group_name(start)).size() if size is None else size)


def reduce_op(start: fx.Node) -> str | None:
    """Return ``"avg"``, ``"sum"``, ...; None for an all-gather."""
    op = argument(start, "reduce_op")
    return None if op is None else str(op)


def wire_bytes(start: fx.Node) -> int:
    """Return the bytes that count against a byte cap: of the larger of input and output."""
    return max(
        size_hint(node.meta["val"].numel(), f"collective bucket {what} size")
        * node.meta["val"].element_size()
        for node, what in ((start, "output"), (start.all_input_nodes[0], "input"))
    )


def sent_as_bytes(start: fx.Node) -> torch.dtype | None:
    """Return the 8-bit dtype of values that a collective sends as ``uint8``; None otherwise."""
    node: Any = start.all_input_nodes[0]
    while isinstance(node, fx.Node) and (
        is_view(node) or node.target is torch.ops.aten.clone.default
    ):
        if node.target is torch.ops.aten.view.dtype:
            dtype: torch.dtype = node.all_input_nodes[0].meta["val"].dtype
            return dtype if dtype.itemsize == 1 else None
        node = next(iter(node.all_input_nodes), None)
    return None


def is_wait(node: fx.Node) -> bool:
    """Return whether ``node`` is a ``wait_tensor``."""
    return node.op == "call_function" and node.target is _c10d.wait_tensor.default


def only_wait(start: fx.Node) -> fx.Node | None:
    """Return the wait for a collective if no other node reads it, else None."""
    users = list(start.users)
    return users[0] if len(users) == 1 and is_wait(users[0]) else None


def nbytes_of(node: fx.Node) -> int:
    """Return the bytes of a tensor whose sizes are numbers."""
    value = node.meta["val"]
    return int(value.numel()) * int(value.element_size())


TO_HOST, FROM_HOST = HOST_STREAMS = "to host", "from host"
"""The streams of the copies, in the place of a process group's name."""
_STREAMS = {"offload": TO_HOST, "reload": FROM_HOST}


def _copy_name(node: fx.Node) -> str:
    """Return the name of an operator ``ao.*``, torch's copies between a device and host memory."""
    # Compared by name, since torch registers these operators only when they are used.
    target = node.target
    is_copy = isinstance(target, torch._ops.OpOverload) and target.namespace == "ao"
    return target._opname if is_copy else ""  # type: ignore[union-attr]


def host_stream(node: fx.Node) -> str | None:
    """Return the stream of the copy that ``node`` starts; None for other nodes."""
    return _STREAMS.get(_copy_name(node))


def is_host_wait(node: fx.Node) -> bool:
    """Return whether ``node`` waits for a copy."""
    return _copy_name(node) == "wait_tensor"


def is_plain_view(node: fx.Node) -> bool:
    """Return whether a node launches no kernel and is not a wait."""
    return is_view(node) and launched_by(node) is None


def viewed(node: fx.Node) -> fx.Node:
    """Return the node whose value ``node`` shows; other nodes show their own."""
    while is_plain_view(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def launched_by(wait: fx.Node) -> fx.Node | None:
    """Return the collective or the copy that ``wait`` waits for; None for other nodes."""
    start = wait.args[0] if is_host_wait(wait) else started_by(wait)
    return start if isinstance(start, fx.Node) else None


def is_on_host(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is in host memory, because it is parked there."""
    if node.op == "placeholder":
        return any(host_stream(user) == FROM_HOST for user in node.users)
    start = node.args[0] if is_host_wait(node) else node
    return isinstance(start, fx.Node) and host_stream(start) == TO_HOST


def pinned_bytes(nbytes: int) -> int:
    """Round ``nbytes`` of pinned memory up to a power of two, as torch's allocator does."""
    # The default of `ATen/core/CachingHostAllocator.h`.
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
