"""Add the gradients of an activation unit by unit, as eager FSDP2 does.

The views that :mod:`.fsdp.unit_inputs` puts in make autograd do so. The pass removes them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import InitVar, dataclass, field

import torch
import torch.fx as fx
import torch.nn as nn
from torch.utils.weak import WeakTensorKeyDictionary

from .._torch.aot import gradient_outputs, input_key
from .._torch.dynamo import module_of
from ..errors import AddedByGraphWarning
from ..fqns import format_names
from ..fsdp.unit_inputs import is_unit_input, register_input_nodes
from ..fsdp.units import Units, modules_with_input_nodes
from ..graph.values import keeps_values
from ..reports.compile import RewriteReport
from .base import Compilation, GraphPass


@dataclass(frozen=True)
class AddedByUnit:
    """An activation, made in ``module`` if known, whose gradients are added unit by unit.

    ``sums`` is the number of units whose sum is added where autograd would add use by use.
    """

    node: str
    module: str | None
    sums: int


@dataclass(frozen=True)
class AddReport(RewriteReport):
    """The activations whose gradients are added in another order now, in backward order."""

    rewrite = heading = "added by unit"
    added: tuple[AddedByUnit, ...] = ()

    def _lines(self) -> list[str]:
        return [
            f"gradients of {a.node}{f', made in {a.module}' if a.module else ''}: {a.sums} sums"
            for a in self.added
        ]


@dataclass(frozen=True, eq=False, repr=False)
class AddByUnit(GraphPass):
    """Add the gradients of an activation that several units read unit by unit, as eager FSDP2 does.

    Examples are cross-attention, skip connections, and a trained position bias that layers share.
    Without this pass, a compiled model adds use by use, which changes the bits of all gradients
    upstream of such an activation.

    A backend with this pass registers hooks on the units' modules (:mod:`.fsdp.unit_inputs`), so
    create the backend before the model is traced. The hooks stay, and change nothing but the order
    of these sums. If several graphs read an activation, each graph adds its own gradients first.
    Where that changes the order, for instance because a unit has a graph break, there is an
    :class:`AddedByGraphWarning`::

        x is read by units a and b in one graph, by c in a later one, and made before both
        eager FSDP2       (c + b) + a
        two graphs        c + (b + a)

    ``units`` are the modules of each ``fully_shard`` call of ``model``, which the pass does not
    keep alive; see :meth:`.FSDPParamOrder.from_model`.
    """

    stage = "joint"
    model: InitVar[nn.Module]
    units: Iterable[str | Sequence[str]]
    _units: Units = field(init=False)
    _modules: MutableMapping[str, nn.Module] = field(
        init=False, default_factory=weakref.WeakValueDictionary
    )
    _names: tuple[str, ...] = field(init=False)
    # Maps an activation to the units of the graph that added several of its gradients.
    _summed: MutableMapping[torch.Tensor, tuple[str, ...]] = field(
        init=False, default_factory=WeakTensorKeyDictionary
    )

    def __post_init__(self, model: nn.Module) -> None:
        units = Units.of_modules(self.units)
        self._modules.update(modules_with_input_nodes(model, units))
        self._set(units=units, _units=units, _names=tuple(self._modules))

    def install(self) -> None:
        """Put the hooks on the units' modules."""
        register_input_nodes(self._modules.values())

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        self._warn_of_split_sums(graph, compilation)
        views = {
            n: n.all_input_nodes[0] for n in graph.nodes if is_unit_input(n) and keeps_values(n)
        }
        compilation.report.rewrites.append(AddReport(tuple(_added(views))))
        for view in views:
            view.replace_all_uses_with(_source(view, views), lambda user: user.op != "output")
            if not view.users:
                graph.erase_node(view)

    def _warn_of_split_sums(self, g: fx.Graph, compilation: Compilation) -> None:
        """Warn of activations with gradients in this graph and sums in an earlier one."""
        # Forward runs the graphs in the order of their compiles, backward in reverse.
        gradients = {
            input_key(source): value
            for output in g.find_nodes(op="output")
            for value, source in gradient_outputs(output)
        }
        fqns = compilation.input_fqns or {}
        read = dict.fromkeys(self._units.unit_of(fqn) for fqn in fqns.values())
        units_here = tuple(repr(self._units.units[unit][0]) for unit in read if unit is not None)
        for index, (name, tensor) in compilation.activations.items():
            x = tensor()
            if x is None or index not in gradients:
                continue
            # Single gradients are added as by eager FSDP2. A graph's own sum is made before others.
            if x in self._summed:
                compilation.warn(
                    f"the gradients of {name!r}, an input of unit "
                    f"{format_names(dict.fromkeys(self._summed[x] + units_here)) or '(none)'}, are "
                    "added graph by graph: several in an earlier graph, others in this one. Eager "
                    "FSDP2 adds one after the other, so weights are not eager FSDP2's bit for bit. "
                    "Remove the graph break between the two (torch.compile(..., fullgraph=True) "
                    "shows where it is)",
                    AddedByGraphWarning,
                )
            elif _is_sum(gradients[index]):
                self._summed[x] = units_here

    def __repr__(self) -> str:
        return f"AddByUnit(model, {self.units!r})"

    def settings(self) -> tuple[object, ...]:
        """Return the units, and the modules with hooks."""
        return (self._units.units, self._names)


def _is_sum(node: fx.Node) -> bool:
    return bool(node.meta.get("is_gradient_acc", False))


def _added(views: Mapping[fx.Node, fx.Node]) -> Iterator[AddedByUnit]:
    """Yield the activations whose gradients are added in another order than use by use.

    ``views`` maps the views of units' inputs and of their gradients to the viewed nodes.
    """
    inputs: dict[object, fx.Node] = {}
    sums: dict[fx.Node, int] = {}
    for view in views:
        # Autograd gives the view of a gradient the sequence number of its view in forward.
        source = inputs.setdefault(view.meta.get("seq_nr"), view)
        if source is view or not _is_sum(_source(view, views)):
            continue  # a view in forward, or one of a single gradient
        after = [view]
        for node in after:  # nested units have views of the same activation
            after += [user for user in node.users if user in views]
        # Autograd adds the new gradient as the second argument to those that arrived before.
        if any(_is_sum(user) and user.args[1] is node for node in after for user in node.users):
            activation = _source(source, views)
            sums[activation] = sums.get(activation, 0) + 1
    for activation, number in sums.items():
        yield AddedByUnit(activation.name, module_of(activation), number)


def _source(node: fx.Node, views: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Return the node that a chain of views begins at."""
    while node in views:
        node = views[node]
    return node
