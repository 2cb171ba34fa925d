"""The pass that has the gradients of an activation added unit by unit, as eager FSDP2 does.

:mod:`.fsdp.unit_inputs` has autograd do it; here the views that this takes are dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.fx as fx
import torch.nn as nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch import descriptors
from .._torch.dynamo_inputs import module_path
from ..errors import AddedByGraphWarning
from ..fqns import format_names
from ..fsdp.unit_inputs import give_nodes, is_unit_input, modules_with_nodes
from ..fsdp.units import UnitSpec
from ..graph.moves import keeps_values
from ..graph.unwrap import GraphLike, graph_of
from ..passes.base import GraphPass, Stage
from ..reports.rewrites import AddedByUnit, AddReport

if TYPE_CHECKING:
    from ..passes.compilation import Compilation


@dataclass(frozen=True, eq=False, repr=False)
class AddByUnit(GraphPass):
    """Add the gradients of an activation that several units read unit by unit, as eager FSDP2 does:
    of cross-attention, skip connections, a position bias that is trained and shared. Without this,
    a compiled model adds use by use, and has other bits upstream of such an activation.

    A backend with this pass puts a hook on the units' modules (:mod:`.fsdp.unit_inputs`): make the
    backend before the model is traced. The hooks stay, and change no value but by the order of
    these sums. What several graphs read is added graph by graph: where the order of the additions
    is then another, as of a unit with a graph break, there is an :class:`AddedByGraphWarning`::

        x is read by units a and b in one graph, by c in a later one, and made before both
        eager FSDP2       (c + b) + a
        two graphs        c + (b + a)

    Args:
        model: whose units they are. It is not kept alive.
        units: the modules of each ``fully_shard`` call, in the order of the calls, as of
            :meth:`.FSDPParamOrder.from_model`.

    Raises:
        TypeError, ValueError: units that don't fit, as of :meth:`.FSDPParamOrder.from_model`.
    """

    stage: ClassVar[Stage] = "joint"
    model: InitVar[nn.Module]
    units: Iterable[str | Sequence[str]]
    _units: UnitSpec = field(init=False)
    _modules: MutableMapping[str, nn.Module] = field(
        init=False, default_factory=weakref.WeakValueDictionary
    )
    _names: tuple[str, ...] = field(init=False)
    # By activation, the units in the graph that added up several of its gradients.
    _summed: MutableMapping[torch.Tensor, tuple[str, ...]] = field(
        init=False, default_factory=WeakTensorKeyDictionary
    )

    def __post_init__(self, model: nn.Module) -> None:
        units = UnitSpec(tuple(self.units))  # type: ignore[arg-type]
        self._modules.update(modules_with_nodes(model, units))
        self._set(units=units, _units=units, _names=tuple(self._modules))

    def install(self) -> None:
        """Put the hooks on the units' modules."""
        give_nodes(self._modules.values())

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        self._look(g, compilation)
        views = {n: n.all_input_nodes[0] for n in g.nodes if is_unit_input(n) and keeps_values(n)}
        compilation.report.rewrites.append(AddReport(tuple(_added(views))))
        for view in views:
            view.replace_all_uses_with(_behind(view, views), lambda user: user.op != "output")
            if not view.users:
                g.erase_node(view)

    def _look(self, g: fx.Graph, compilation: Compilation) -> None:
        """Warn of activations that this graph reads, whose gradients a graph before adds up on its
        own. Forward runs through graphs as they are compiled, and backward the other way."""
        gradients = {
            descriptors.plain_index(descriptors.base_input(of)): value
            for output in g.find_nodes(op="output")
            for value, of in descriptors.gradient_outputs(output)
        }
        fqns: Any = compilation.input_fqns or {}
        found = dict.fromkeys(self._units.unit_of(fqn) for fqn in fqns.values())
        here = tuple(repr(self._units.units[unit][0]) for unit in found if unit is not None)
        for index, (name, tensor) in compilation.activations.items():
            x = tensor()
            if x is None or index not in gradients:
                continue
            if x in self._summed:
                compilation.warn(
                    f"the gradients of {name!r}, an input of unit "
                    f"{format_names(dict.fromkeys(self._summed[x] + here)) or '(none)'}, are added "
                    "graph by graph: several in an earlier graph, others in this one. Eager FSDP2 "
                    "adds one after the other, so weights are not eager FSDP2's bit for bit. Mend "
                    "the graph break between the two (torch.compile(..., fullgraph=True) says "
                    "where it is)",
                    AddedByGraphWarning,
                )
            elif _is_sum(gradients[index]):
                self._summed[x] = here

    def __repr__(self) -> str:
        return f"AddByUnit(model, {self.units!r})"

    def settings(self) -> tuple[object, ...]:
        """The units, and the modules with hooks."""
        return (self._units.units, self._names)


def _is_sum(node: fx.Node) -> bool:
    return bool(node.meta.get("is_gradient_acc", False))


def _added(views: Mapping[fx.Node, fx.Node]) -> Iterator[AddedByUnit]:
    """The activations of which the sum of a unit is added to what came before it, where without
    units each of its gradients would have been.

    Args:
        views: those of units' inputs, and of their gradients, by what each is a view of.
    """
    inputs: dict[object, fx.Node] = {}
    sums: dict[fx.Node, int] = {}
    for view in views:
        source = inputs.setdefault(view.meta.get("seq_nr"), view)
        if source is view or not _is_sum(_behind(view, views)):
            continue  # in forward, or one gradient alone
        after = [view]
        for node in after:  # of the same activation, units around this one
            after += [user for user in node.users if user in views]
        if any(_is_sum(user) and user.args[1] is node for node in after for user in node.users):
            activation = _behind(source, views)
            sums[activation] = sums.get(activation, 0) + 1
    for activation, number in sums.items():
        stack = list((activation.meta.get("nn_module_stack") or {}).values())
        yield AddedByUnit(activation.name, module_path(stack[-1][0]) if stack else None, number)


def _behind(node: fx.Node, views: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node in views:
        node = views[node]
    return node
