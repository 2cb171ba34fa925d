"""The pass that has the gradients of an activation added unit by unit, as eager FSDP2 does.

:mod:`.fsdp.unit_inputs` says what eager does, and has autograd do the same: nothing is rewritten
here but views that are of no use any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .._torch import descriptors as _descriptors
from .._torch.dynamo_inputs import module_path
from ..fsdp.unit_inputs import give_nodes, is_unit_input, modules_with_nodes
from ..fsdp.unit_spec import UnitSpec
from ..graph.moves import keeps_values
from ..passes.base import Compilation, GraphLike, GraphPass, Stage, graph_of
from ..passes.diagnostics import DividedUnitWarning
from ..reports.rewrites import AddedByUnit, AddReport

__all__ = ["AddByUnit"]


class AddByUnit(GraphPass):
    """Add the gradients of an activation that several units read unit by unit, as eager FSDP2 does.

    Cross-attention, skip connections, a position bias that is trained and shared: eager FSDP2 adds
    the gradients of all uses inside a unit before it adds them to those of other uses. Without
    this, a compiled model adds use by use, and has other bits upstream of such an activation.

    A backend with this pass puts a hook on the units' modules, which gives what they are called
    with autograd nodes of their own (:mod:`.fsdp.unit_inputs`): make the backend before the model
    is traced. The hooks stay, and change no value but by the order of these sums.

    What a unit is called with and does not read gets no gradient from it, where eager FSDP2 gives
    zeros. What is read in several graphs is added graph by graph: a graph break inside a unit that
    reads an activation on both sides is a ``DividedUnitWarning``.

    Args:
        model: whose units they are. It is not kept alive.
        units: the modules of each ``fully_shard`` call, in the order of the calls, as of
            :meth:`.FSDPParamOrder.from_model`.

    Raises:
        TypeError, ValueError: units that don't fit, as of :meth:`.FSDPParamOrder.from_model`.
    """

    stage: Stage = "joint"

    def __init__(self, model: nn.Module, units: Iterable[str | Sequence[str]]) -> None:
        named = ((unit,) if isinstance(unit, str) else tuple(unit) for unit in units)
        self.units = UnitSpec(tuple(named))
        self._modules = weakref.WeakSet(modules_with_nodes(model, self.units))

    def install(self) -> None:
        """Put the hooks on the units' modules."""
        give_nodes(self._modules)

    def run(self, graph: GraphLike, compilation: Compilation) -> None:
        g = graph_of(graph)
        views = {n: n.all_input_nodes[0] for n in g.nodes if is_unit_input(n) and keeps_values(n)}
        compilation.report.rewrites.append(AddReport(tuple(_added(views))))
        for name in _added_at_the_border(g, views, compilation):
            compilation.warn(
                f"the gradients of the uses of {name} in this graph are added before those of its "
                "uses in other graphs, where eager FSDP2 adds all of a unit one after the other. "
                "If there are such, weights are not eager FSDP2's bit for bit: mend the graph "
                "break inside the unit (torch.compile(..., fullgraph=True) says where it is)",
                DividedUnitWarning,
            )
        for view, value in views.items():
            view.replace_all_uses_with(value, lambda user: user.op != "output")
            if not view.users:
                g.erase_node(view)

    def __repr__(self) -> str:
        return f"AddByUnit(model, {self.units!r})"

    def settings(self) -> tuple[object, ...]:
        """The units."""
        return (self.units.units,)


def _is_sum(node: fx.Node) -> bool:
    """Whether autograd added two gradients here."""
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


def _added_at_the_border(
    graph: fx.Graph, views: Mapping[fx.Node, fx.Node], compilation: Compilation
) -> Iterator[str]:
    """The activations that the graph is given, and whose gradient is a sum that no unit made."""
    names = compilation.input_names
    (output,) = graph.find_nodes(op="output")
    values, descs = pytree.tree_leaves(output.args[0]), pytree.tree_leaves(output.meta.get("desc"))
    for value, desc in zip(values, descs, strict=False):
        index = _descriptors.plain_index(_descriptors.base_input(_descriptors.grad_of(desc)))
        if index in names and isinstance(value, fx.Node) and value not in views and _is_sum(value):
            yield names[index]
