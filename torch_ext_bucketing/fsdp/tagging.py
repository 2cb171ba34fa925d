"""Find the parameters that each collective of a joint graph serves, and the nodes in between.

Tags (:mod:`.graph.nodes`) are set on the joint forward+backward graph, the only one where
AOTAutograd's descriptors identify parameters among the inputs and gradients among the outputs::

    w -> _to_copy -> constant_pad_nd -> all_gather_into_tensor     all_gather of (w,)
    w -> abs -> max -> all_reduce -> ... -> mul(w, ...) -> all_gather_into_tensor      the same
    cat(w1, w2) -> all_gather_into_tensor                          all_gather of (w1, w2)
    relu(...) -> all_gather_into_tensor                            not tagged: an activation

    mm -> reduce_scatter_tensor -> wait -> _to_copy -> output(grad_of=w)    reduce_scatter of (w,)
    mm -> all_reduce -> wait -> reduce_scatter_tensor -> ...                both tagged (HSDP)
    mm -> all_reduce -> wait -> mm                                 not tagged: an activation
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from .._torch.aot import Halves, base_input, gradient_outputs, input_key
from ..fqns import canonical_fqn
from ..graph.dependencies import may_run_twice
from ..graph.nodes import (
    Tag,
    graph_of,
    is_bucket,
    is_compute,
    is_number,
    kind_of,
    set_tag,
    tag_of,
)
from ..graph.values import CONSTANTS, SCALES, is_move

T = TypeVar("T")
Chains: TypeAlias = Mapping[fx.Node, Sequence[fx.Node]]
"""The result of :func:`parameter_chains`."""


def parameter_chains(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Map each tagged all-gather to the nodes between the parameter and its first computation.

    ::

        w -> _to_copy -> all_gather -> wait -> slice -> t -> mm
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    With an all-gather extension, the nodes that compute the full parameter after the gather belong
    to the chain. Those that compute the gather's input do not, since they are as small as a shard::

        w -> abs -> max -> ... -> mul -> all_gather -> wait -> sub -> mul -> t -> mm
                                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    A copy that an activation is a part of does not belong to the chain, such as that of attention's
    logits and a parameter beside them (gpt-oss's sinks): it is an activation, and as large as one.

    Starts, and the nodes of each chain, are in graph order.
    """
    before: dict[fx.Node, dict[fx.Node, None]] = {}
    ahead: dict[fx.Node, dict[fx.Node, None]] = {}
    chains: dict[fx.Node, dict[fx.Node, None]] = {}
    made_of: dict[fx.Node, fx.Node] = {}  # the only input that an ungathered value depends on
    for node in graph.nodes:
        if node.op == "placeholder":
            made_of[node] = node
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        served = union(ahead, inputs)
        sources = {made_of[i]: None for i in inputs if i in made_of}
        if not served and len(sources) == 1 and all(i in made_of for i in inputs):
            made_of.update(dict.fromkeys([node], *sources))
        if kind_of(node) == "all_gather" and tag_of(node) is not None:
            made_of.pop(node, None)
            chains[node] = {**union(before, inputs), node: None}
            ahead[node] = {**served, node: None}
            continue
        moves = is_move(node) or node.target in CONSTANTS
        # A move that serves no gather yet is a step before one, if all its inputs are.
        if moves and not served:
            if all(i.op == "placeholder" or i in before for i in inputs):
                before[node] = {**union(before, inputs), node: None}
            continue
        alone = all(i in ahead or i in made_of or i.target in CONSTANTS for i in inputs)
        if served and moves:
            moves = alone or all(i in ahead or i in before or is_number(i) for i in inputs)
        elif served and not is_compute(node) and may_run_twice(node):
            # An all-gather extension may compute the full parameter here.
            gathered = {made_of.get(start.all_input_nodes[0]) for start in served}
            moves = alone and gathered.issuperset(sources) and all(map(in_other_form, served))
        if moves:
            ahead[node] = served
            for start in served:
                chains[start][node] = None
    return {start: tuple(chain) for start, chain in chains.items()}


def read_in_forward(chains: Chains) -> dict[fx.Node, None]:
    """Find the all-gathers of a joint graph that forward reads."""
    # Keeping the results of others, such as data scaled along other rows for products of backward,
    # would take memory and save nothing.
    if not chains:
        return {}
    forward = Halves(next(iter(chains)).graph).forward
    linked = {node for chain in chains.values() for node in chain}
    return {
        start: None
        for start, chain in chains.items()
        if any(
            user.op == "output" or (user in forward and user not in linked)
            for node in chain[chain.index(start) :]
            for user in node.users
        )
    }


def in_other_form(gather: fx.Node) -> bool:
    """Return whether an all-gather extension computed the input, such as 8-bit data or scales."""
    dtype = gather.meta["val"].dtype
    if dtype.itemsize == 1 or not dtype.is_floating_point:
        return True
    stack = gather.all_input_nodes[:1]
    while stack:
        node = stack.pop()
        if is_move(node):
            stack += node.all_input_nodes
        elif node.op == "call_function" and node.target not in CONSTANTS:
            return kind_of(node) != "all_gather"
    return False


def union(sets: Mapping[fx.Node, dict[T, None]], nodes: Iterable[fx.Node]) -> dict[T, None]:
    """Merge the sets of some nodes, in their order."""
    merged: dict[T, None] = {}
    for node in nodes:
        merged.update(sets.get(node, {}))
    return merged


_aten = torch.ops.aten

# Operators that may stand between a reduction and the gradient, beside moves and scaling: the
# gradient of a parameter that is used twice is the sum of two reductions.
_ACCUMULATES = frozenset({_aten.add.Tensor, _aten.add_.Tensor, _aten.slice_backward.default})


FqnOf = Callable[[Any], "str | None"] | Mapping[Any, str]


def tag_joint_graph(
    gm: fx.GraphModule | fx.Graph,
    fqn_of: FqnOf | None = None,
    *,
    grad_fqns: Sequence[str | None] | None = None,
) -> dict[fx.Node, Tag]:
    """Tag every collective that serves parameters, in one pass forward and one back.

    Args:
        gm: a joint or inference graph, or a graph of a whole step. Existing tags are kept.
        fqn_of: maps a parameter input to its FQN, and other inputs to None: a function of the
            input's ``AOTInput``, or of the placeholder in graphs without descriptors, or a mapping
            from the input's index (``PlainAOTInput.idx``). ``ParamAOTInput`` has the FQN itself.
        grad_fqns: for graphs without descriptors: per flattened output, the FQN of the parameter
            whose gradient it is, or None.
    """
    graph = graph_of(gm)
    nodes = list(graph.nodes)
    inputs = {n: _name_of(n, fqn_of) for n in nodes if n.op == "placeholder"}
    gathered = _parameters_of_nodes(nodes, inputs)
    ahead = _gradients_ahead(nodes, inputs, _gradient_outputs(nodes, fqn_of, grad_fqns))

    tags: dict[fx.Node, Tag] = {}
    for node in nodes:
        kind, tag = kind_of(node), tag_of(node)
        if kind is None:
            continue
        if tag is None:
            fqns: Iterable[str] = ahead.get(node, ())
            if kind == "all_gather":
                fqns = union(gathered, node.all_input_nodes[:1])
            tag = Tag(kind, tuple(fqns)) if fqns else None
        if tag is not None:
            tags[node] = tag
    for node, tag in tags.items():
        if not is_bucket(node):
            set_tag(node, tag)
    return tags


def named_inputs(graph: fx.Graph, fqn_of: FqnOf | None) -> dict[str, fx.Node]:
    """Map parameters to their inputs, the shard's where a parameter is several tensors."""
    inputs: dict[str, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        name = _name_of(node, fqn_of)
        if name is not None and isinstance(node.meta.get("val"), torch.Tensor):
            inputs.setdefault(name, node)
    return inputs


def gradients_of(
    graph: fx.Graph, fqn_of: FqnOf | None, grad_fqns: Sequence[str | None] | None = None
) -> list[tuple[fx.Node, str]]:
    """List the outputs that are gradients of named parameters; see :func:`tag_joint_graph`."""
    # A gradient may be several values, such as a shard and its mesh: take the tensors.
    outputs = _gradient_outputs(list(graph.nodes), fqn_of, grad_fqns)
    return [(n, fqn) for n, fqn in outputs if isinstance(n.meta.get("val"), torch.Tensor)]


def _name_of(source: Any, fqn_of: FqnOf | None) -> str | None:
    """Return the FQN of a parameter's placeholder or ``AOTInput``; None for other inputs."""
    desc = source.meta.get("desc") if isinstance(source, fx.Node) else source
    key = input_key(desc)
    if isinstance(key, str):
        return canonical_fqn(key)
    if desc is not None:
        source = base_input(desc)
    if isinstance(fqn_of, Mapping):
        name = fqn_of.get(source if key is None else key)
    else:
        name = None if fqn_of is None else fqn_of(source)
    return None if name is None else canonical_fqn(name)


def _parameters_of_nodes(
    nodes: Sequence[fx.Node], inputs: Mapping[fx.Node, str | None]
) -> dict[fx.Node, dict[str, None]]:
    """Map nodes that only rearrange parameters to these; constants to none, activations not."""
    made_of: dict[fx.Node, dict[str, None]] = {
        node: {fqn: None} for node, fqn in inputs.items() if fqn is not None
    }
    gathered: set[fx.Node] = set()
    for node in nodes:
        args = node.all_input_nodes
        if node.target in CONSTANTS:
            made_of[node] = {}
        elif node.op == "call_function" and all(arg in made_of for arg in args):
            fqns = union(made_of, args)
            # A parameter that is sharded over two mesh dimensions is gathered twice.
            if kind_of(node) == "all_gather" or not gathered.isdisjoint(args):
                gathered.add(node)
            # All-gather extensions compute 8-bit data and scales from one shard.
            one_shard = len(fqns) == 1 and node not in gathered
            if is_move(node) or kind_of(node) == "all_gather" or one_shard:
                made_of[node] = fqns
    return made_of


def _gradients_ahead(
    nodes: Sequence[fx.Node],
    inputs: Mapping[fx.Node, str | None],
    outputs: Iterable[tuple[fx.Node, str]],
) -> dict[fx.Node, tuple[str, ...]]:
    """Map nodes to the parameters whose gradient they become, in the order of the inputs."""
    # Only collectives, moves, sums and scaling stand between.
    ahead: dict[fx.Node, dict[str, None]] = {}
    for value, fqn in outputs:
        ahead.setdefault(value, {})[fqn] = None
    for node in reversed(nodes):
        if node.op == "call_function":
            parameters = union(ahead, [node, *filter(_keeps_gradient, node.users)])
            if parameters:
                ahead[node] = parameters
    rank = {fqn: i for i, fqn in enumerate(dict.fromkeys(inputs.values()))}
    return {
        node: tuple(sorted(fqns, key=lambda fqn: (rank.get(fqn, len(rank)), fqn)))
        for node, fqns in ahead.items()
    }


def _keeps_gradient(user: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if user.target in SCALES:
        return len(user.all_input_nodes) == 1  # scaling by a number, not a product of tensors
    return is_move(user) or kind_of(user) is not None or user.target in _ACCUMULATES


def _gradient_outputs(
    nodes: Sequence[fx.Node], fqn_of: FqnOf | None, grad_fqns: Sequence[str | None] | None
) -> list[tuple[fx.Node, str]]:
    """List the outputs that are gradients of known parameters, with the FQNs."""
    output = next((n for n in reversed(nodes) if n.op == "output"), None)
    if output is None:
        return []
    if grad_fqns is None:
        named = [(v, _name_of(source, fqn_of)) for v, source in gradient_outputs(output)]
        return [(value, fqn) for value, fqn in named if fqn is not None]
    values = pytree.tree_leaves(output.args[0])
    if len(grad_fqns) != len(values):
        raise ValueError(
            f"grad_fqns has {len(grad_fqns)} names, but the graph's flattened output has "
            f"{len(values)} values; give one name or None per value"
        )
    return [
        (value, canonical_fqn(fqn))
        for value, fqn in zip(values, grad_fqns, strict=True)
        if isinstance(value, fx.Node) and fqn is not None
    ]
