"""Compute the dependencies between a graph's nodes, with dependencies that no edge shows.

A node depends on its inputs. In addition, these nodes keep their order:

- A write to a tensor, and every node that touches the tensor before or after it (:class:`Writes`,
  read from operators' schemas). A collective reads its input until its wait::

      start(p) -> wait        copy_(p, new)        copy_ stays after wait, not only after start

- Calls that draw random numbers from the generator's state, among themselves. Operators that are
  not known to be pure (:func:`is_known`) count: one without tags may draw, or read and write state.
- An assertion on a size or another number, and the nodes after it that use the number, or the
  tensor whose size it is. They must not run unchecked.
- The marks of profiled ranges, among themselves. After scheduling, a range no longer shows where
  the nodes between its marks run.
- Operators with other side effects, or with unknown ones, against all nodes.
- The starts of one process group and kind. Ranks meet in a group in launch order, so each kind
  keeps the graph's order, which is the same on every rank. All-gathers may overtake reductions, and
  all-to-alls, such as those of experts' tokens in chunks, may overtake each other.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NewType

import torch
import torch.fx as fx

from .._torch.aot import draws
from .nodes import (
    group_name,
    host_stream,
    is_assertion,
    is_collective,
    is_host_wait,
    is_number,
    is_view,
    is_wait,
    kind_of,
    launched_by,
)


class Writes:
    """Writes and aliases among nodes in topological order.

    Attributes:
        roots: maps each node to the nodes whose memory it may share. Empty if no node writes.
        aliases: maps each of these to the nodes that may share its memory.
        by_writer: maps each writer to the roots that it writes to, directly or through a view.
        written: all roots that are written to.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._nodes = list(nodes)
        self.roots: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.aliases: dict[fx.Node, list[fx.Node]] = {}
        writers = {n: written for n in self._nodes if (written := written_values(n))}
        inputs: dict[int, fx.Node] = {}
        for node in self._nodes if writers else ():
            if node.op == "output":
                continue
            shared = [v for v in _aliased(node) if v in self.roots]
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                # An input may be a view of another one, for instance of an updated parameter.
                first = inputs.setdefault(value.untyped_storage()._cdata, node)
                shared = [first] if first is not node else shared
            storage_roots = tuple(dict.fromkeys(r for v in shared for r in self.roots[v])) or (
                node,
            )
            self.roots[node] = storage_roots
            for root in storage_roots:
                self.aliases.setdefault(root, []).append(node)
        self.by_writer = {
            writer: dict.fromkeys(root for value in written for root in self.roots.get(value, ()))
            for writer, written in writers.items()
        }
        self.written = {root for roots in self.by_writer.values() for root in roots}

    @functools.cached_property
    def unordered(self) -> list[fx.Node]:
        """The writers that edges do not order against all other readers of the tensor.

        Edges order a write if every other node that touches the tensor either leads to the write
        through views alone, or reads the write's result, as for the output buffer of a bucketed
        all-gather. A collective may lead to the write through any nodes; a cast may not, since a
        bucket casts its inputs again::

            empty -> slice -> copy_ -> all_gather_into_tensor_out(out=empty) -> wait -> view
            mm -> all_reduce(mm) -> wait -> copy_(mm, wait) -> add
        """
        position = {node: i for i, node in enumerate(self._nodes)} if self.by_writer else {}
        return [
            writer
            for writer, roots in self.by_writer.items()
            if not all(_is_ordered(writer, self.aliases[root], position) for root in roots)
        ]

    def is_written(self, node: fx.Node) -> bool:
        """Return whether any node of the graph writes to the memory of ``node``."""
        # Writes through other aliases count only where edges do not order them.
        roots = self.roots.get(node, ()) if self.unordered else (node,)
        return not self.written.isdisjoint(roots)


def _is_ordered(write: fx.Node, aliases: list[fx.Node], position: dict[fx.Node, int]) -> bool:
    """Return whether edges order a write against all readers of a tensor's ``aliases``."""
    of_result: dict[fx.Node, None] = {write: None}  # the aliases that are made of its result
    for alias in aliases:
        if alias is not write and any(arg in of_result for arg in alias.all_input_nodes):
            of_result[alias] = None
    known = dict.fromkeys(aliases)
    readers = (user for alias in aliases if alias not in of_result for user in alias.users)
    for user in readers:
        if user in of_result:
            continue
        if position[user] > position[write]:
            # A later reader of an old alias: nothing but its place puts it after the write.
            if not any(arg in of_result for arg in user.all_input_nodes):
                return False
        elif user not in known and not (is_collective(user) and _leads_to(user, write, position)):
            return False
    return True


def _leads_to(node: fx.Node, later: fx.Node, position: dict[fx.Node, int]) -> bool:
    """Return whether ``later`` needs ``node``, directly or through others."""
    seen, stack = {later: None}, [later]
    while stack and node not in seen:
        for arg in stack.pop().all_input_nodes:
            if arg not in seen and position[arg] >= position[node]:
                seen[arg] = None
                stack.append(arg)
    return node in seen


def _schema_values(node: fx.Node, *, writes: bool) -> list[fx.Node]:
    """List the inputs that a node's schema marks as written, or that its result may alias."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema, values = node.target._schema, list[fx.Node]()
    if writes and not schema.is_mutable:
        return []
    for i, argument in enumerate(schema.arguments):
        info = argument.alias_info
        if info is None or (writes and not info.is_write):
            continue
        passed = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        for value in passed if isinstance(passed, (list, tuple)) else (passed,):
            if isinstance(value, fx.Node):
                values.append(value)
    return values


def written_values(node: fx.Node) -> list[fx.Node]:
    """List the inputs that a node writes to."""
    # The only higher-order operator that still writes to its inputs after AOTAutograd.
    if getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation":
        return node.all_input_nodes
    return _schema_values(node, writes=True)


def _aliased(node: fx.Node) -> list[fx.Node]:
    if node.op == "call_function" and node.target is operator.getitem:
        return node.all_input_nodes[:1]
    if node.op == "call_function" and node.target is torch.ops._c10d_functional.wait_tensor.default:
        return node.all_input_nodes
    return _schema_values(node, writes=False)


_TORCH = frozenset(
    {
        *("aten", "prims", "ao", "bucketing", "fsdp", "profiler", "sparse", "streams", "symm_mem"),
        *("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor"),
        *("inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "onednn"),
        *("_quantized", "quantized", "quantized_decomposed"),
        *("_native", "flex_gemm", "flex_lib", "spmd_types", "torch_attn"),
        "torch_ext_bucketing",
    }
)
"""Namespaces of the operators of torch 2.11 to 2.15, and ours."""

# Of torch's tags, these alone define what an operator computes. ``pt2_compliant_tag``, which
# ``torch.library.custom_op`` sets, does not.
_VALUES = frozenset({torch.Tag.core, torch.Tag.pointwise, torch.Tag.reduction})

FUNCTIONAL = frozenset(
    {
        "auto_functionalized",
        "auto_functionalized_v2",
        "flex_attention",
        "flex_attention_backward",
        "invoke_subgraph",
        "triton_kernel_wrapper_functional",
    }
)
"""Higher-order operators without side effects of their own."""


def is_known(node: fx.Node) -> bool:
    """Return whether schema and tags show all effects of a call, and of the calls inside it.

    They do for torch's own operators, which torch tests, and for others with a tag that describes
    the values of their results. Any other operator may draw random numbers, read state that
    changes, or write to it, whatever its schema declares.
    """
    target = node.target
    if node.op != "call_function":
        return node.op != "call_module"
    if isinstance(target, torch._ops.HigherOrderOperator):
        name = target.name()
        if name.startswith("auto_functionalized"):
            return _declares(node.args[0])
        return draws(node) or (name in FUNCTIONAL and all(map(is_known, _inside(node))))
    return _declares(target) or is_view(node) or is_number(node)


def _declares(target: object) -> bool:
    return isinstance(target, torch._ops.OpOverload) and (
        target.namespace in _TORCH or not _VALUES.isdisjoint(target.tags)
    )


def _inside(node: fx.Node) -> list[fx.Node]:
    """List the nodes of the graphs that a higher-order operator gets."""
    owner, inside = node.graph.owning_module, list[fx.Node]()
    for argument in node.all_input_nodes:
        inner = argument.op == "get_attr" and getattr(owner, str(argument.target), None)
        if isinstance(inner, fx.GraphModule):
            inside += inner.graph.nodes
    return inside


def may_run_twice(node: fx.Node) -> bool:
    """Return whether running a node twice gives the same result and has no effects."""
    if is_wait(node) or is_collective(node):
        return True
    if draws(node) or not is_known(node) or any(map(draws, _inside(node))):
        return False
    return not node.is_impure(impure_random=False)


_READ_CONTENTS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


Place = NewType("Place", int)
"""A node, by its place among those that an order moves, from 0."""


class Precedence:
    """Dependencies between nodes in topological order, by their places from 0.

    Attributes:
        needs: per node, the places of the nodes that it depends on, ascending.
        needed_by: per node, the places of the nodes that depend on it, ascending.
    """

    def __init__(self, nodes: list[fx.Node], needs: Iterable[Collection[Place]]) -> None:
        self.nodes = nodes
        self.needs = [sorted(places) for places in needs]
        self.needed_by: list[list[Place]] = [[] for _ in nodes]
        for i, needed in enumerate(self.needs):
            for j in needed:
                self.needed_by[j].append(Place(i))

    def is_order(self, order: Sequence[int]) -> bool:
        """Return whether ``order`` has every node once, after all nodes that it depends on."""
        position = {i: k for k, i in enumerate(order)}
        return len(position) == len(order) == len(self.nodes) and all(
            i in position and all(position[j] < position[i] for j in needed)
            for i, needed in enumerate(self.needs)
        )

    def runs_after(self, i: Place, others: Collection[Place]) -> bool:
        """Return whether node ``i`` depends on all ``others``, itself among them or not."""
        missing = {j for j in others if j != i}
        # Nodes before the first of them can't lead to any.
        first, seen, stack = min(missing, default=i), {i}, [i]
        while stack and missing:
            for j in self.needs[stack.pop()]:
                if j >= first and j not in seen:
                    missing.discard(j)
                    seen.add(j)
                    stack.append(j)
        return not missing


class Dependencies(Precedence):
    """The dependencies between a graph's movable nodes: no inputs, constants or output.

    Attributes:
        index: place of each movable node among them.
        group: process group by the place of each collective, or a host copy's stream.
    """

    def __init__(self, everything: list[fx.Node], writes: Writes) -> None:
        self.nodes = [n for n in everything if n.op not in ("placeholder", "get_attr", "output")]
        self.index: dict[fx.Node, Place] = {n: Place(i) for i, n in enumerate(self.nodes)}
        self.group: dict[Place, str] = {}
        needs: list[dict[Place, None]] = []
        before: set[fx.Node] = set()
        for node in everything:
            for arg in node.all_input_nodes:
                if arg not in before:
                    raise ValueError(f"{node.name} stands before its input {arg.name}")
            before.add(node)
            if node in self.index:
                places = (self.index.get(arg) for arg in node.all_input_nodes)
                needs.append(dict.fromkeys(needed for needed in places if needed is not None))
        self._order_writes(writes, needs)
        self._order_assertions(needs)
        self._order_chains(needs)
        super().__init__(self.nodes, needs)

    def _order_writes(self, writes: Writes, needs: list[dict[Place, None]]) -> None:
        """Keep writes between the readers before and after them."""
        for write in writes.unordered:
            write_place = self.index[write]
            aliases = (a for root in writes.by_writer[write] for a in writes.aliases[root])
            for node in dict.fromkeys(n for a in aliases for n in (a, *a.users)):
                other = self.index.get(node)
                if other is not None and other < write_place:
                    needs[write_place][other] = None
                elif other is not None and other > write_place:
                    needs[other][write_place] = None
                if is_collective(node) or host_stream(node):
                    # A collective, or a copy, reads its input until its wait.
                    waits = (self.index[w] for w in node.users if launched_by(w) is node)
                    needs[write_place].update(dict.fromkeys(w for w in waits if w < write_place))

    def _order_assertions(self, needs: list[dict[Place, None]]) -> None:
        """Keep assertions before later users of the values that they check."""
        for node, i in self.index.items():
            if not is_assertion(node):
                continue
            for value in _asserted(node):
                for user in value.users:
                    place = self.index.get(user, i)
                    if place > i and not is_assertion(user):
                        needs[place][i] = None

    def _order_chains(self, needs: list[dict[Place, None]]) -> None:
        last: dict[Any, Place] = {}
        barrier = Place(-1)
        for node, i in self.index.items():
            if barrier >= 0:
                needs[i][barrier] = None
            if _is_barrier(node):
                # The nodes since the last barrier come before this one, and all later ones after.
                for j in range(barrier + 1, i):
                    needs[i][Place(j)] = None
                barrier = i
                continue
            chain: Any = None
            if is_collective(node):
                self.group[i] = group_name(node)
                # All-to-alls have no kind that buckets merge, and may overtake each other.
                kind = kind_of(node)
                chain = kind and (self.group[i], kind)
            elif stream := host_stream(node):
                self.group[i] = stream  # copies may overtake each other
            elif draws(node) or not is_known(node):
                chain = "random"
            elif _is_profiler_mark(node):
                chain = "profiler"
            if chain is not None:
                if chain in last:
                    needs[i][last[chain]] = None
                last[chain] = i


def unused(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Find nodes, among all of a graph, that change neither its results nor anything else."""
    # torch's partitioner leaves some, such as the inputs of a collective that it removed. Inductor
    # generates no code for them.
    idle: set[fx.Node] = set()
    for node in reversed(nodes):
        if node.op == "call_function" and idle.issuperset(node.users) and not _acts(node):
            idle.add(node)
    return idle


def _acts(node: fx.Node) -> bool:
    """Return whether a call has an effect beside its result."""
    return (
        is_collective(node)
        or is_wait(node)
        or is_assertion(node)
        or _is_barrier(node)
        or _is_profiler_mark(node)
        or draws(node)
        or bool(written_values(node))
    )


def _is_barrier(node: fx.Node) -> bool:
    """Return whether no node may move past this one."""
    if node.op != "call_function":
        return True
    if is_assertion(node) or _is_profiler_mark(node) or is_host_wait(node):
        return False
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() not in FUNCTIONAL and not draws(node)
    if not isinstance(target, torch._ops.OpOverload):
        return not is_view(node)
    # Writes and random numbers have finer rules than a barrier.
    finer = target.namespace == "_c10d_functional" or target._schema.is_mutable
    return not finer and node.is_impure(impure_random=False)


def _asserted(assertion: fx.Node) -> list[fx.Node]:
    """List the nodes that an assertion checks: its inputs, and the tensors whose sizes they are.

    Numbers that are inputs of the graph do not count if other numbers are compared with them. They
    are known before the graph runs, and nearly all nodes use the batch size.
    """
    checked: dict[fx.Node, None] = {}
    numbers, asserts = [], False
    stack = list(assertion.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in checked:
            continue
        checked[node] = None
        if node.op == "placeholder" and is_number(node):
            numbers.append(node)
        elif is_number(node) and node.target not in _READ_CONTENTS:
            stack += node.all_input_nodes
        else:
            asserts = True
    for node in numbers if asserts else ():
        del checked[node]
    return list(checked)


def _is_profiler_mark(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "profiler"
