"""List the passes that run for a recipe's list, in order, and run them on a trace of a step."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import torch.fx as fx
import torch.nn as nn
import torch.utils._pytree as pytree

from .._torch.fsdp2 import name_per_tensor
from ..errors import PassOrderError, check_argument
from ..fqns import canonical_fqn
from ..fsdp.tagging import gradients_of, tag_joint_graph
from ..graph.nodes import GraphLike, graph_of
from ..reports.compile import GraphReport
from .add_by_unit import AddByUnit
from .base import (
    BUCKETS,
    ORDER,
    REGATHERS,
    TAGS,
    Compilation,
    Extension,
    GraphPass,
    Stage,
    run_passes,
)
from .cache_key import brief, digest
from .checks import warn_of_padding, warn_of_silence
from .combine_uses import CombineUses, MergeAmax
from .reduce_scatter_first import ReduceScatterFirst
from .tagging import TagParameters

DISABLE = "TORCH_EXT_BUCKETING_DISABLE"
"""Environment variable: class names of passes to switch off, separated by commas."""


def in_order(passes: Iterable[GraphPass], model: nn.Module | None = None) -> list[GraphPass]:
    """List the passes that run for a list such as :func:`.recipe`'s, in the order they run.

    Args:
        model: names the parameters, where no pass in the list tags collectives.
    """
    tags: list[GraphPass] = []
    joint: list[GraphPass] = []
    after: list[GraphPass] = []
    for p in passes:
        if isinstance(p, MatchFSDP2):
            joint += [
                # Removes the views on units' inputs, before others look for patterns.
                *p.add_by_unit,
                # One gather and one reduction per parameter, of the sum of its gradients.
                CombineUses(),
                # Once per parameter, too: the uses of one share its all-reduce of amax by now.
                MergeAmax(),
                # Last, for the one reduction per parameter that CombineUses leaves.
                ReduceScatterFirst(),
            ]
        elif TAGS in p.provides:
            tags.append(p)
        elif p.stage == "joint":
            joint.append(p)
        else:
            after.append(p)
    return [
        # Only the joint graph has the descriptors that tags are made from.
        *(tags or [TagParameters(model)]),
        # Joint passes: the partitioner carries out their marks for recomputation.
        *joint,
        # Forward and backward apart: a bucket made earlier could not be split between the two.
        *after,
    ]


@dataclass(frozen=True, eq=False, repr=False)
class MatchFSDP2(GraphPass):
    """Give the joint graph eager FSDP2's collectives, and its order of additions.

    Stands for four passes, in this order. Each changes only graphs that have its pattern:

    - :class:`.AddByUnit` adds the gradients of an activation that several units read unit by unit;
      only with ``model`` and ``units``.
    - :class:`.CombineUses` leaves one all-gather and one reduction per parameter and step.
    - :class:`.MergeAmax` merges the all-reduces of amax that 8-bit all-gathers wait for.
    - :class:`.ReduceScatterFirst` reduce-scatters HSDP's gradients before it all-reduces them.

    Reports, traces and ``TORCH_EXT_BUCKETING_DISABLE`` name the four.

    Args:
        model: the model that ``units`` belong to. It is not kept alive.
        units: FQNs of the modules of each ``fully_shard()`` call, in the order of the calls; see
            :meth:`.FSDPParamOrder.from_model`.
    """

    stage = "joint"
    model: InitVar[nn.Module | None] = None
    units: Iterable[str | Sequence[str]] | None = None
    add_by_unit: tuple[AddByUnit, ...] = field(init=False, default=())

    def __post_init__(self, model: nn.Module | None) -> None:
        if (model is None) != (self.units is None):
            raise TypeError("give model and units, or neither: MatchFSDP2(model, units)")
        if model is not None and self.units is not None:
            add_by_unit = AddByUnit(model, self.units)
            self._set(units=add_by_unit.units, add_by_unit=(add_by_unit,))

    @property
    def parts(self) -> tuple[GraphPass, ...]:
        return tuple(in_order([self])[1:])

    def run(self, graph: fx.Graph, compilation: Compilation) -> None:
        for part in self.parts:
            part.run(graph, compilation)
            compilation.changed()

    def __repr__(self) -> str:
        return "MatchFSDP2()" if self.units is None else f"MatchFSDP2(model, {self.units!r})"


class Pipeline:
    """Check passes and order them by :func:`in_order`; the stages may be mixed.

    A :class:`.PassOrderError` names a list that works if a pass undoes the work of one before it,
    two passes decide the same, or a pass requires a fact that none before it provides. An unknown
    name in ``TORCH_EXT_BUCKETING_DISABLE``, read here, is a ``ValueError``.
    """

    def __init__(self, passes: Iterable[GraphPass] = (), model: nn.Module | None = None) -> None:
        check_argument("passes", passes, Iterable)
        chosen = tuple(passes)
        for p in chosen:
            if not isinstance(p, GraphPass):
                raise TypeError(f"{p!r} is not a pass: it must be a GraphPass")
            if p.stage not in ("joint", "forward_backward"):
                raise ValueError(
                    f"{p.name}.stage must be 'joint' or 'forward_backward', got {p.stage!r}"
                )
        if why := _why_not(in_order(chosen)):
            working = _working(chosen)
            names = ", ".join(_listed(p, chosen) for p in working)
            raise PassOrderError(f"{why}. A list that works: [{names}]", working)
        self.disabled = off = _switched_off(
            q for p in (*chosen, *in_order(chosen)) for q in (p, *p.parts)
        )
        ordered = in_order([p for p in chosen if p.name not in off], model)
        running = [p for p in ordered if p.name not in off]
        self.joint = tuple(p for p in running if p.stage == "joint")
        self.forward_backward = tuple(p for p in running if p.stage == "forward_backward")
        for p in running:
            p.install()

    @property
    def ahead(self) -> tuple[GraphPass, ...]:
        """The passes after the partitioner that are switched on, each after its parts."""
        passes = (q for p in self.forward_backward for q in (*p.parts, p))
        return tuple(q for q in passes if q.name not in self.disabled)

    def compilation(self, **settings: Any) -> Compilation:
        """Start a compile; ``settings`` are further fields of :class:`.Compilation`."""
        compilation = Compilation(ahead=self.ahead, **settings)
        compilation.report.disabled = self.disabled
        return compilation

    def run(self, stage: Stage, graph: GraphLike, compilation: Compilation) -> list[GraphReport]:
        """Run the passes of one stage, and warn about collectives that they did not bucket."""
        if stage == "joint":
            reports = run_passes(self.joint, stage, graph, compilation)
        else:
            reports = run_passes(self.forward_backward, stage, graph, compilation, self.joint)
        warn_of_silence(graph_of(graph), reports, compilation)
        if reports:
            warn_of_padding(graph_of(graph), reports, compilation)
        return reports

    def planned_with(self, compilation: Compilation) -> str:
        """Name the inputs of plans and orders, for ranks to compare."""
        # Machines of an order, the dtype of sums in rank order, size hints, a joint pass's choice.
        texts = [p.planned_with for p in self.ahead]
        if any(ORDER in p.provides and p.planned_with for p in self.ahead):
            hints = compilation.size_hints
            texts.append(f"size hints {brief(hints) if callable(hints) else hints}")
        chosen = "" if compilation.choice is None else compilation.choice.text
        return ", ".join(filter(None, [*texts, chosen]))

    def uuid(self) -> str | None:
        """Make a cache key from the keys of all passes; None if a pass has none."""
        uuids = [p.uuid() for p in (*self.joint, *self.forward_backward)]
        return digest(*map(str, uuids), *self.disabled) if all(uuids) else None


def _why_not(passes: Sequence[GraphPass]) -> str:
    """Return why the passes can't run in this order; empty if they can."""
    decided: dict[str, GraphPass] = {}
    for p in passes:
        for fact in sorted(p.requires):
            if fact not in decided:
                return f"{p.name} requires {fact}, which no pass before it provides"
        for fact in sorted(p.provides - {BUCKETS}):
            if fact in decided:
                return f"{decided[fact].name} and {p.name} both decide {fact}: give one of them"
        for fact, earlier in decided.items():
            if fact in p.conflicts_with:
                return (
                    f"{p.name} comes after {earlier.name} and would undo what that decides, {fact}"
                )
        decided |= dict.fromkeys(sorted(p.provides), p)
    return ""


def _working(passes: Sequence[GraphPass]) -> list[GraphPass]:
    """Return a list that works, with as many of the passes as possible."""
    # Of two that decide the same, the one that decides more stays.
    remaining = list(passes)
    decided = set[str]()
    for p in sorted(passes, key=lambda p: -len(p.provides)):
        facts = p.provides - {BUCKETS}
        if facts & decided:
            remaining.pop(max(i for i, q in enumerate(remaining) if q is p))
        decided |= facts
    # Each pass takes the last place where the list works, else it becomes a part of another pass.
    # Parts come last, and all come again, since a pass may require one after it.
    remaining.sort(key=lambda p: (p.stage != "joint", bool(p.option)))
    working: list[GraphPass] = []
    for p in remaining * len(remaining):
        if not any(p is q for q in working):
            tries = [[*working[:i], p, *working[i:]] for i in range(len(working), -1, -1)]
            for i, whole in enumerate(working):
                if hasattr(whole, p.option):
                    joined = replace(whole, **{p.option: p})
                    tries.append([*working[:i], joined, *working[i + 1 :]])
            working = next((passes for passes in tries if not _why_not(in_order(passes))), working)
    return working


def _listed(p: GraphPass, chosen: Sequence[GraphPass]) -> str:
    """Name a pass; show the given pass that is a part of it now."""
    if any(p is q for q in chosen):
        return p.name
    return f"{p.name}(..., {', '.join(f'{part.option}={part!r}' for part in p.parts)})"


def _switched_off(passes: Iterable[GraphPass]) -> tuple[str, ...]:
    """List the class names that are switched off; subclasses of these classes stay on."""
    names = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    if not names:
        return ()
    present = dict.fromkeys(p.name for p in passes)
    accepted = sorted({*present, *_names_of_passes()})
    unknown = [name for name in names if name not in accepted]
    if unknown:
        names_of_all = ", ".join(accepted)
        raise ValueError(f"{DISABLE} names {', '.join(unknown)}; the passes are {names_of_all}")
    return tuple(name for name in present if name in names)


def _names_of_passes() -> list[str]:
    """List the passes of the package, imported or not."""
    package = importlib.import_module(__package__.partition(".")[0])
    for name in package.__all__:
        getattr(package, name)
    classes, names = [GraphPass], []
    for cls in classes:
        classes += cls.__subclasses__()
        if cls.__module__.startswith(f"{package.__name__}.") and not inspect.isabstract(cls):
            names.append(cls.__name__)
    return names


def whole_step_pass(
    model: nn.Module,
    passes: Iterable[GraphPass],
    compilation: Compilation | None = None,
    extension: Extension | None = None,
    fuses: bool = False,
) -> Callable[..., fx.GraphModule]:
    """Combine ``passes`` into one, ``(graph_module, example_inputs) -> graph_module``.

    For the list of passes of torchtitan's graph trainer, in place of its bucketing: ``passes[i] =
    whole_step_pass(model, recipe(model, reference=eager_model))``.

    The graph's inputs are the parameters and buffers of ``model``, the traced module, one per name,
    and then the step's inputs. Its last outputs are the gradients of the trained parameters, in the
    same order. A ``DTensor`` is its plain tensors, the shard first. The trainer chooses what
    backward gathers again, so passes that choose it (``ReshardAfterForward``) are left out.

    Args:
        compilation: gets the report.
        extension: adds nodes to the graph, without ``compilation``. The pass adds values of new
            inputs to ``example_inputs``.
        fuses: whether Inductor compiles the graph afterwards, without ``compilation``.
    """
    pipeline = Pipeline((p for p in passes if REGATHERS not in p.provides), model)
    shared = compilation or pipeline.compilation(extension=extension, fuses=fuses)

    def torch_ext_bucketing_pass(gm: fx.GraphModule, example_inputs: Any = None) -> fx.GraphModule:
        names, trained = names_per_tensor(model)
        inputs = gm.graph.find_nodes(op="placeholder")
        (output,) = gm.graph.find_nodes(op="output")
        other_outputs = len(pytree.tree_leaves(output.args[0])) - len(trained)
        if other_outputs < 0 or len(inputs) < len(names):
            raise ValueError(
                f"this is not a step of {type(model).__name__}, whose parameters are {len(names)} "
                f"tensors, {len(trained)} of them trained: the graph has {len(inputs)} inputs "
                f"and {other_outputs + len(trained)} outputs. Give the model that was traced"
            )
        # Tensors inside of a parameter besides its shard, such as scales, have no name.
        fqns = {node: name for node, name in zip(inputs, names, strict=False) if name}
        added = run_pipeline(gm, pipeline, shared, fqns, [*(None,) * other_outputs, *trained])
        if added:
            example_inputs.extend(node.meta["val"] for node in added)
        return gm

    return torch_ext_bucketing_pass


def names_per_tensor(model: nn.Module) -> tuple[list[str | None], list[str | None]]:
    """List the parameter's name for each of its tensors: for all, and for trained parameters."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    names = [name_per_tensor(*parameter) for parameter in parameters]
    trained = [t for t, (_, p) in zip(names, parameters, strict=True) if p.requires_grad]
    return list(itertools.chain(*names)), list(itertools.chain(*trained))


def run_pipeline(
    gm: fx.GraphModule,
    pipeline: Pipeline,
    compilation: Compilation,
    fqns: dict[fx.Node, str],
    grad_fqns: Sequence[str | None],
) -> list[fx.Node]:
    """Run all passes on a graph of any part of a step, in place; return its new inputs.

    ``fqns`` names parameters by placeholder; ``grad_fqns`` names, for each flattened output, the
    parameter whose gradient it is.
    """
    # The graph of a whole step is joint and final at once, so passes of both stages run on it.
    tag_joint_graph(gm, fqns.get, grad_fqns=grad_fqns)
    pipeline.run("joint", gm, compilation)
    added = []
    if compilation.extension is not None:
        inputs = {canonical_fqn(fqn): node for node, fqn in fqns.items()}
        gradients = gradients_of(gm.graph, fqns.get, grad_fqns)
        added = compilation.extension.append(gm.graph, inputs, gradients, compilation.choice)
    pipeline.run("forward_backward", gm, compilation)
    gm.graph.lint()
    gm.recompile()
    return added
