"""Finds the parameters that each collective of a joint graph serves.

Tags (:mod:`.tags`) are made on the joint forward+backward graph, the only place where AOTAutograd's
descriptors say which placeholder is which parameter and which output is whose gradient. The rules,
for a graph with the parameter ``w``::

    w -> _to_copy -> constant_pad_nd -> all_gather_into_tensor     all_gather of (w,)
    w -> abs -> max -> all_reduce -> ... -> mul(w, ...) -> view -> all_gather_into_tensor      too
    cat(w1, w2) -> all_gather_into_tensor                          all_gather of (w1, w2)
    relu(...) -> all_gather_into_tensor                            not tagged: an activation

    mm -> reduce_scatter_tensor -> wait -> _to_copy -> output(grad_of=w)    reduce_scatter of (w,)
    mm -> all_reduce -> wait -> reduce_scatter_tensor -> ...                both tagged (HSDP)
    mm -> all_reduce -> wait -> mm                                 not tagged: an activation
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree

from .._torch import descriptors as _descriptors
from .._torch.aot import backward_nodes
from .._torch.dynamo_inputs import module_path
from .._torch.sharded import shard_of
from ..fqns import canonical_fqn
from ..graph.collectives import Kind, is_compute, is_start, kind_of
from ..graph.graph_of import graph_of
from ..graph.moves import CONSTANTS, SCALES, is_move
from ..graph.tags import Tag, TagReport, Untagged, is_bucket, set_tag, tag_of

_aten = torch.ops.aten

# What may stand between a reduction and the gradient in addition: a parameter that is used twice
# has the sum of two reductions as gradient, and a divide factor may follow the reduction.
_ACCUMULATES = frozenset({_aten.add.Tensor, _aten.add_.Tensor, _aten.slice_backward.default})


FqnOf = Callable[[Any], "str | None"] | Mapping[Any, str]


def tag_joint_graph(
    gm: fx.GraphModule | fx.Graph,
    fqn_of: FqnOf | None = None,
    *,
    grad_fqns: Sequence[str | None] | None = None,
    model: torch.nn.Module | None = None,
) -> TagReport:
    """Tag every collective of ``gm`` that serves parameters. One pass forward and one back.

    Args:
        gm: a joint graph, an inference graph, or a trace of a whole training step. Existing tags
            are kept.
        fqn_of: names a parameter input: called with what identifies it, an ``AOTInput`` where the
            placeholders carry descriptors and the placeholder node otherwise, or a mapping from
            the graph input's index (``PlainAOTInput.idx``) to the FQN. It returns None for inputs
            that are no parameters. ``ParamAOTInput`` needs none: its target is the FQN.
        grad_fqns: for graphs without descriptors: whose gradient each flattened output is.
        model: the module whose parameters are meant, for graphs whose nodes carry
            ``custom["module_fqn"]`` or ``nn_module_stack`` and nothing better.

    Raises:
        TypeError: ``fqn_of`` or ``grad_fqns`` gives something else than names and None.
        ValueError: the output's descriptors, or ``grad_fqns``, don't match its flattened values in
            number. The graph is untouched then.
    """
    graph = graph_of(gm)
    names = _InputNames(fqn_of)
    nodes = list(graph.nodes)
    sources = _parameters_behind(nodes, names)
    sinks = _gradients_ahead(nodes, names, grad_fqns)

    tags: dict[fx.Node, Tag] = {}
    skipped: list[Untagged] = []
    by_module = _ModuleFallback(model)
    has_descriptors = any("desc" in n.meta for n in nodes if n.op in ("placeholder", "output"))
    for node in nodes:
        kind = kind_of(node)
        if kind is None:
            continue
        known = tag_of(node)
        if known is not None:
            tags[node] = known
            continue
        found = _source_of(node, sources) if kind == "all_gather" else sinks.get(node, _NOWHERE)
        fqns = found.fqns
        if not fqns and not has_descriptors:
            fqns = by_module.fqns(node, kind)
        if fqns:
            tags[node] = Tag(kind, fqns)
        else:
            skipped.append(Untagged(node.name, kind, found.reason))
    for node, tag in tags.items():
        if not is_bucket(node):
            set_tag(node, tag)
    return TagReport(tuple((n.name, t) for n, t in tags.items()), tuple(skipped))


def parameter_chains(graph: fx.Graph) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Map every tagged gather to the nodes from the parameter to its last mere rearrangement.

    ::

        w -> _to_copy -> all_gather -> wait -> slice -> t -> mm
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    Of a parameter that is gathered in another form, the nodes that make the full parameter of it
    belong to the chain. What is computed before the gather does not: it is small, as a shard is::

        w -> abs -> max -> ... -> mul -> all_gather -> wait -> sub -> mul -> t -> mm
                                         ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^

    Starts in graph order; the nodes of a chain in graph order.
    """
    behind: dict[fx.Node, dict[fx.Node, None]] = {}
    ahead: dict[fx.Node, dict[fx.Node, None]] = {}
    chains: dict[fx.Node, dict[fx.Node, None]] = {}
    made_of: dict[fx.Node, fx.Node] = {}  # the one input that an ungathered value is computed from
    for node in graph.nodes:
        if node.op == "placeholder":
            made_of[node] = node
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        served = _union(ahead, inputs)
        sources = {made_of[i]: None for i in inputs if i in made_of}
        if not served and len(sources) == 1 and all(i in made_of for i in inputs):
            made_of.update(dict.fromkeys([node], *sources))
        if kind_of(node) == "all_gather" and tag_of(node) is not None:
            made_of.pop(node, None)
            chains[node] = {**_union(behind, inputs), node: None}
            ahead[node] = {**served, node: None}
        elif is_move(node) or node.target in CONSTANTS:
            if served:  # after a gather
                ahead[node] = served
                for start in served:
                    chains[start][node] = None
            elif all(i.op == "placeholder" or i in behind for i in inputs):  # before one
                behind[node] = {**_union(behind, inputs), node: None}
        elif served and not is_compute(node):
            made = {made_of.get(start.all_input_nodes[0]) for start in served}
            alone = all(i in ahead or i in made_of or i.target in CONSTANTS for i in inputs)
            if alone and made | set(sources) == made and all(map(in_other_form, served)):
                ahead[node] = served
                for start in served:
                    chains[start][node] = None
    return {start: tuple(chain) for start, chain in chains.items()}


def read_in_forward(chains: Mapping[fx.Node, Sequence[fx.Node]]) -> dict[fx.Node, None]:
    """The gathers of a joint graph, out of :func:`parameter_chains`, that forward reads. Others,
    as of data that is scaled along other rows for backward's products, are best left to backward:
    to keep what they make would cost memory and save nothing."""
    if not chains:
        return {}
    late = backward_nodes(next(iter(chains)).graph)
    linked = {node for chain in chains.values() for node in chain}
    return {
        start: None
        for start, chain in chains.items()
        if any(
            user.op == "output" or (user not in late and user not in linked)
            for node in chain[chain.index(start) :]
            for user in node.users
        )
    }


def in_other_form(gather: fx.Node) -> bool:
    """Whether what is gathered are not the values of a parameter but others, computed from them or
    stored in their place, such as 8-bit data and scales."""
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


def _union(
    of: Mapping[fx.Node, dict[fx.Node, None]], nodes: Iterable[fx.Node]
) -> dict[fx.Node, None]:
    merged: dict[fx.Node, None] = {}
    for node in nodes:
        merged.update(of.get(node, {}))
    return merged


@dataclass(frozen=True)
class _Origin:
    """The parameters that a value is made of (or becomes the gradient of), or why there are none.
    A constant has neither."""

    fqns: tuple[str, ...] = ()
    reason: str = ""
    gathered: bool = False

    @property
    def is_constant(self) -> bool:
        return not self.fqns and not self.reason


_CONSTANT = _Origin()
_NOWHERE = _Origin(reason="its result reaches no parameter's gradient")


class _InputNames:
    """FQN of a parameter's placeholder: by descriptor, else by what the caller says."""

    def __init__(self, fqn_of: FqnOf | None) -> None:
        self._fqn_of = fqn_of

    def of_descriptor(self, desc: Any) -> str | None:
        """The FQN of an ``AOTInput``; None for no known parameter."""
        base = _descriptors.base_input(desc)
        target = _descriptors.param_target(base)
        if target is not None:
            return canonical_fqn(target)
        return self._ask(base, _descriptors.plain_index(base))

    def of_placeholder(self, node: fx.Node) -> str | None:
        desc = node.meta.get("desc")
        return self._ask(node, None) if desc is None else self.of_descriptor(desc)

    def _ask(self, what: Any, index: int | None) -> str | None:
        if self._fqn_of is None:
            return None
        if isinstance(self._fqn_of, Mapping):
            name = self._fqn_of.get(what if index is None else index)
        else:
            name = self._fqn_of(what)
        return None if name is None else canonical_fqn(name)


def _parameters_behind(nodes: Sequence[fx.Node], names: _InputNames) -> dict[fx.Node, _Origin]:
    """Map every node to the parameters that it is a mere rearrangement of, in order of
    appearance."""
    origin: dict[fx.Node, _Origin] = {}
    for node in nodes:
        if node.op == "placeholder":
            fqn = names.of_placeholder(node)
            if fqn is not None:
                origin[node] = _Origin((fqn,))
            else:
                origin[node] = _Origin(reason=f"it gathers {node.name}, no known parameter")
        elif node.op == "get_attr":
            origin[node] = _Origin(reason=f"it gathers the constant {node.target}")
        elif node.op == "call_function":
            origin[node] = _merge_origins(node, origin)
    return origin


def _merge_origins(node: fx.Node, origin: Mapping[fx.Node, _Origin]) -> _Origin:
    if node.target in CONSTANTS:
        return _CONSTANT
    found = [origin.get(arg, _CONSTANT) for arg in node.all_input_nodes]
    fqns = dict.fromkeys(fqn for each in found for fqn in each.fqns)
    # A gather of what was gathered already is a parameter sharded over two mesh dimensions.
    gathered = kind_of(node) == "all_gather" or any(each.gathered for each in found)
    # What is computed from one shard alone is that parameter in another form: 8 bits, scales.
    one_shard = len(fqns) == 1 and not gathered and not any(each.reason for each in found)
    if not is_move(node) and kind_of(node) != "all_gather" and not one_shard:
        return _Origin(reason=f"it gathers an activation, made by {node.name}")
    # Of several that are none, the last one is named.
    return next(
        (each for each in reversed(found) if each.reason), _Origin(tuple(fqns), "", gathered)
    )


def _source_of(start: fx.Node, origin: Mapping[fx.Node, _Origin]) -> _Origin:
    found = origin.get(start.all_input_nodes[0], _CONSTANT) if start.all_input_nodes else _CONSTANT
    return _Origin(reason="it gathers a constant") if found.is_constant else found


def _gradients_ahead(
    nodes: Sequence[fx.Node], names: _InputNames, grad_fqns: Sequence[str | None] | None
) -> dict[fx.Node, _Origin]:
    """Map every node to the parameters whose gradient it becomes, by way of collectives, moves,
    accumulation and scaling only."""
    ahead: dict[fx.Node, dict[str, None]] = {}
    output = next((n for n in reversed(nodes) if n.op == "output"), None)
    if output is not None:
        for value, fqn in _gradient_outputs(output, names, grad_fqns):
            ahead.setdefault(value, {})[fqn] = None
    for node in reversed(nodes):
        if node.op != "call_function":
            continue
        mine = ahead.get(node, {})
        for user in node.users:
            if _keeps_gradient(user):
                mine.update(ahead.get(user, {}))
        if mine:
            ahead[node] = mine
    # In the order of the graph's inputs, so that fused weights have their gather's order.
    inputs = (names.of_placeholder(n) for n in nodes if n.op == "placeholder")
    rank = {fqn: i for i, fqn in enumerate(dict.fromkeys(inputs))}
    last = len(rank)
    return {
        node: _Origin(tuple(sorted(fqns, key=lambda f: (rank.get(f, last), f))))
        for node, fqns in ahead.items()
    }


def _keeps_gradient(user: fx.Node) -> bool:
    if user.op != "call_function":
        return False
    if user.target in SCALES:
        return len(user.all_input_nodes) == 1  # by a number; a product of tensors is computation
    return is_move(user) or is_start(user) or user.target in _ACCUMULATES


def _gradient_outputs(
    output: fx.Node, names: _InputNames, grad_fqns: Sequence[str | None] | None
) -> list[tuple[fx.Node, str]]:
    """The outputs that are gradients of known parameters."""
    if grad_fqns is not None:
        values = pytree.tree_leaves(output.args[0])
        if len(grad_fqns) != len(values):
            raise ValueError(
                f"grad_fqns has {len(grad_fqns)} names, but the graph's flattened output has "
                f"{len(values)} values; give one name or None per value"
            )
        return [
            (v, canonical_fqn(f))
            for v, f in zip(values, grad_fqns, strict=True)
            if isinstance(v, fx.Node) and f is not None
        ]
    found = [(v, names.of_descriptor(of)) for v, of in _descriptors.gradient_outputs(output)]
    return [(v, fqn) for v, fqn in found if fqn is not None]


# The module that ``torch.nn.utils.parametrize`` puts in charge of one parameter.
_PARAMETRIZATION = re.compile(r"(?:(.*)\.)?parametrizations\.(\w+)(?:\.\d+)?")


class _ModuleFallback:
    """Names a collective by the module that it was traced in and the shape of the shard.

    Only for graphs without descriptors. A module that owns two parameters of the same shard shape
    is ambiguous and names nothing.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._owned: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        parameters = () if model is None else model.named_parameters(remove_duplicate=False)
        for name, param in parameters:
            fqn = canonical_fqn(name)
            owner = fqn.rpartition(".")[0]
            self._owned.setdefault(owner, []).append((fqn, tuple(shard_of(param).shape)))

    def fqns(self, node: fx.Node, kind: Kind) -> tuple[str, ...]:
        module = _module_fqn(node)
        if module is None:
            return ()
        parametrization = _PARAMETRIZATION.fullmatch(module)
        if parametrization:
            return (".".join(p for p in parametrization.groups() if p),)
        shapes = self._shard_shapes(node, kind)
        fits = [fqn for fqn, shape in self._owned.get(module, []) if shape in shapes]
        return (fits[0],) if len(dict.fromkeys(fits)) == 1 else ()

    @staticmethod
    def _shard_shapes(node: fx.Node, kind: Kind) -> tuple[tuple[int, ...], ...]:
        shapes = []
        step: Any = node.args[0] if kind == "all_gather" else node
        while isinstance(step, fx.Node):
            value = step.meta.get("val")
            if isinstance(value, torch.Tensor):
                shapes.append(tuple(value.shape))
            if kind == "all_gather":
                step = step.all_input_nodes[0] if is_move(step) else None
            else:
                step = next((u for u in step.users if is_move(u)), None)
        return tuple(shapes[-1:]) if kind == "all_gather" else tuple(shapes)


def _module_fqn(node: fx.Node) -> str | None:
    """The innermost module that a node was traced in, as an FQN from the root module."""
    fqn = (node.meta.get("custom") or {}).get("module_fqn")
    if isinstance(fqn, str):
        return canonical_fqn(fqn)
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    for path, _ in reversed(list(stack.values())):
        name = module_path(path)
        if name is not None:
            return canonical_fqn(name)
    return None
